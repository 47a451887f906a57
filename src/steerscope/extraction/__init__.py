"""Contrast data in, steering vectors out."""

from steerscope.extraction.contrast import (
    ContrastPair,
    ContrastSet,
    load_contrast_set,
    mean_difference,
    row_norms,
    sentence_rows,
    sentences,
)

__all__ = [
    "ContrastPair",
    "ContrastSet",
    "load_contrast_set",
    "mean_difference",
    "row_norms",
    "sentence_rows",
    "sentences",
]
