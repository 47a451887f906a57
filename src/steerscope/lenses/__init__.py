"""Lenses: small classifiers that read rows, kept in packs and evaluated together, without an engine."""

from steerscope.lenses.bank import Bank
from steerscope.lenses.expand import BankExpander, Expansion
from steerscope.lenses.pack import Architecture, Calibration, Concept, Pack, PackInfo
from steerscope.lenses.tiers import Tiers

__all__ = [
    "Architecture",
    "Bank",
    "Calibration",
    "Concept",
    "Expansion",
    "Pack",
    "PackInfo",
    "Tiers",
    "BankExpander",
]
