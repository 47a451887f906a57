"""Lenses: small classifiers that read rows, kept in packs and evaluated together. No engine."""

from steerscope.lenses.pack import Architecture, Calibration, Concept, Pack, PackInfo

__all__ = ["Architecture", "Calibration", "Concept", "Pack", "PackInfo"]
