"""Steering vectors and their files."""

from steerscope.vectors.files import load, save
from steerscope.vectors.vector import SteeringVector

__all__ = ["SteeringVector", "load", "save"]
