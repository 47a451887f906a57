"""Judging vectors: answers under steering, their scores, what the scores prove, and a report."""
