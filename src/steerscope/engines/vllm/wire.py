"""What a request carries to the workers in `SamplingParams.extra_args["steerscope"]`: everything resolved, nothing left
to judge there. Vectors go by the hash of their content; the workers were given the content before."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from steerscope.engines.plan import Plan
from steerscope.residual.table import Column, Key, digest
from steerscope.specs.steering import Coefficients
from steerscope.specs.tokens import EVERYWHERE, Positions

Packed = dict[str, Any]  # plain data that msgpack takes


@dataclass(frozen=True, slots=True)
class WireColumn:
    vectors: bytes  # hash of the content
    coefficients: dict[Key, Coefficients]
    positions: Positions
    gate: int


@dataclass(frozen=True, slots=True)
class WireCapture:
    keys: tuple[Key, ...]
    positions: Positions
    before_steering: bool
    reduce: Literal["mean", "last"] | None
    hold: int  # rows a reduction keeps back until the end is known
    most: int  # rows are numbered below this


@dataclass(frozen=True, slots=True)
class Wire:
    name: str
    offset: int  # of its region in the arena: counters, then rows
    columns: tuple[WireColumn, ...]
    capture: WireCapture | None

    def pack(self) -> Packed:
        columns = [
            [column.vectors, _pack_keys(column.coefficients), list(column.coefficients.values()),
             _pack_positions(column.positions), column.gate]
            for column in self.columns
        ]  # fmt: skip
        capture = None
        if self.capture:
            c = self.capture
            capture = [_pack_keys(c.keys), _pack_positions(c.positions), c.before_steering, c.reduce, c.hold, c.most]
        return {"name": self.name, "offset": self.offset, "columns": columns, "capture": capture}

    @classmethod
    def unpack(cls, data: Packed) -> "Wire":
        columns = tuple(
            WireColumn(bytes(vectors), dict(zip(_keys(keys), map(tuple, values), strict=True)), _positions(at), gate)
            for vectors, keys, values, at, gate in data["columns"]
        )
        capture = None
        if data["capture"] is not None:
            keys, at, *rest = data["capture"]
            capture = WireCapture(_keys(keys), _positions(at), *rest)
        return cls(data["name"], data["offset"], columns, capture)


def _pack_keys(keys: Any) -> list[list[int | str]]:  # noqa: ANN401 - any iterable of keys
    return [[layer, site] for layer, site in keys]


def _keys(packed: list) -> tuple[Key, ...]:
    return tuple((layer, site) for layer, site in packed)


def _pack_positions(positions: Positions) -> list[list[int]]:
    return [[a, b] for a, b in positions.intervals]


def _positions(packed: list) -> Positions:
    return Positions(tuple((a, b) for a, b in packed))


def vector_hash(column: Column) -> bytes:
    return digest({key: vector.tobytes() for key, vector in column.vectors.items()})


def coefficient_hash(column: Column) -> bytes:
    return digest({key: np.array(c, np.float64).tobytes() for key, c in column.coefficients.items()})


def salt(plan: Plan) -> str | None:
    """What keeps steered keys and values apart in vLLM's prefix cache: a hash of what the ops do and where.

    Cached blocks are reused by any prompt that begins with the same tokens, so what was done to a position must be a
    function of the salt and of the tokens up to it: where an op does not act everywhere, its resolved positions
    and the length of the prompt they were resolved against belong to it. Names never do.
    """
    if not plan.columns:
        return None
    found = hashlib.blake2b(digest_size=16)
    for column in plan.columns:
        found.update(vector_hash(column))
        found.update(coefficient_hash(column))
        if column.positions != EVERYWHERE:
            found.update(repr((len(plan.prompt.token_ids), column.positions.intervals)).encode())
        found.update(b";")
    return found.hexdigest()
