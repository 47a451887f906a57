"""Corpora: many documents through engines, their rows on disk, each exactly once."""
