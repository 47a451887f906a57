"""From placed ops to the columns of a token: pure functions of their arguments, with results kept for equal ones."""

import functools
import hashlib
from typing import NamedTuple

import numpy as np

from steerscope.core.sites import tap_of
from steerscope.core.slot_table import Column, PlacedOp, pack
from steerscope.specs.steering import Coefficients, Site, VectorData
from steerscope.specs.tokens import Positions


def raw_of(data: VectorData, layers: tuple[int, ...]) -> tuple[bytes, ...]:
    """Return the direction of each of these layers, which the vector must have."""
    if data.shared is not None:
        return (data.shared,) * len(layers)
    return tuple(data.per_layer[layer] for layer in layers)


class Placing(NamedTuple):
    """An op that will be placed, as far as columns depend on it."""

    raw: tuple[bytes, ...]  # a direction per layer
    layers: tuple[int, ...]
    site: Site
    unit: bool
    coefficients: Coefficients
    positions: Positions
    gate: int = 0


@functools.lru_cache(maxsize=256)
def columns_of(placed: tuple[Placing, ...]) -> tuple[Column, ...]:
    found: list[tuple[bool, PlacedOp]] = []
    for op in placed:
        for layer, raw in zip(op.layers, op.raw, strict=True):
            vector, content = _direction(raw, op.unit)
            key = tap_of(layer, op.site)
            placed_op = PlacedOp(key, op.positions, vector, op.coefficients, op.gate, content)
            found.append((key != (layer, op.site), placed_op))
    # At a shared tap the ops of resid_post come before those of the next layer's resid_pre.
    return tuple(pack([op for _, op in sorted(found, key=lambda pair: pair[0])]))


@functools.lru_cache(maxsize=4096)
def _direction(raw: bytes, unit: bool) -> tuple[np.ndarray, bytes]:
    """Return a direction as numbers, at unit length if asked, and the hash of these."""
    vector = np.frombuffer(raw, dtype="<f4")
    if unit:
        precise = vector.astype(np.float64)
        vector = (precise / np.linalg.norm(precise)).astype(np.float32)
    return vector, hashlib.blake2b(vector.tobytes(), digest_size=16).digest()
