"""Contrast data in, steering vectors out."""

from steerscope.extraction.data import (
    ContrastPair,
    ContrastSet,
    DatasetEntry,
    Examples,
    load_contrast_set,
    load_examples,
    sentences,
)
from steerscope.extraction.extract import Extraction, extract, mean_difference, row_norms, sentence_rows
from steerscope.extraction.quality import LayerQuality

__all__ = [
    "ContrastPair",
    "ContrastSet",
    "DatasetEntry",
    "Examples",
    "Extraction",
    "LayerQuality",
    "extract",
    "load_contrast_set",
    "load_examples",
    "mean_difference",
    "row_norms",
    "sentence_rows",
    "sentences",
]
