"""Ops that are placed: their directions at each layer, and the columns of a token that they become, once for all
requests that are steered alike."""

import functools
import hashlib
import threading
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from steerscope.core.slot_table import Column, Key, PlacedOp, pack
from steerscope.specs.steering import Coefficients, Site, VectorData
from steerscope.specs.tokens import Positions

T = TypeVar("T")


def tap_of(layer: int, site: Site) -> Key:
    """`resid_pre` of layer i > 0 is `resid_post` of layer i−1: one tap."""
    return (layer - 1, "resid_post") if site == "resid_pre" and layer > 0 else (layer, site)


def raw_of(data: VectorData, layers: tuple[int, ...]) -> tuple[bytes, ...]:
    """The direction of each layer, all of which it has."""
    if data.shared is not None:
        return (data.shared,) * len(layers)
    return tuple(map(data.per_layer.get, layers))  # type: ignore[arg-type]


class Placing(NamedTuple):
    """An op that will be placed, as far as columns depend on it."""

    raw: tuple[bytes, ...]  # a direction per layer
    layers: tuple[int, ...]
    site: Site
    unit: bool
    coefficients: Coefficients
    positions: Positions
    gate: int = 0


class Same(Generic[T]):
    """What was made of specs, found again by which they are: to compare them would take longer than to make it. They do
    not change, and a few are kept (with their vectors), so that their identities stay theirs."""

    def __init__(self, most: int = 128) -> None:
        self._most, self._lock = most, threading.Lock()
        self._known: dict[Hashable, tuple[T, tuple[object, ...]]] = {}
        self.get = self._known.get

    def keep(self, name: Hashable, made: T, *of: object) -> T:
        """`name` has the identities of these, and what else matters."""
        with self._lock:
            self._known[name] = made, of
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        return made


@functools.lru_cache(maxsize=256)
def columns_of(placed: tuple[Placing, ...]) -> tuple[Column, ...]:
    """Once for all requests that are steered alike."""
    found: list[tuple[bool, PlacedOp]] = []
    for op in placed:
        for layer, raw in zip(op.layers, op.raw, strict=True):
            vector, content = _worked_out(raw, op.unit)
            key = tap_of(layer, op.site)
            placed_op = PlacedOp(key, op.positions, vector, op.coefficients, op.gate, content)
            found.append((key != (layer, op.site), placed_op))
    # At a shared tap the ops of resid_post come before those of the next layer's resid_pre.
    return tuple(pack([op for _, op in sorted(found, key=lambda pair: pair[0])]))


@functools.lru_cache(maxsize=4096)
def _worked_out(raw: bytes, unit: bool) -> tuple[np.ndarray, bytes]:
    """Once for all requests that use them."""
    vector = np.frombuffer(raw, dtype="<f4")
    if unit:
        precise = vector.astype(np.float64)
        vector = (precise / np.linalg.norm(precise)).astype(np.float32)
    return vector, hashlib.blake2b(vector.tobytes(), digest_size=16).digest()
