"""Capture of corpora: the rows of many documents on disk, each exactly once."""
