"""What a request carries to the workers in `SamplingParams.extra_args["steerscope"]`: everything resolved, nothing left
to judge there. Vectors go by the hash of their content, which the workers were given before or find beside it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from steerscope.engines.plan import Plan
from steerscope.residual.table import Column, Key
from steerscope.specs.steering import Coefficients
from steerscope.specs.tokens import EVERYWHERE, Positions

Packed = dict[str, Any]  # plain data that msgpack takes


@dataclass(frozen=True, slots=True)
class WireColumn:
    vectors: bytes  # hash of the content
    content: bytes | None  # float32 [keys, hidden]; None: the workers were given it
    coefficients: dict[Key, Coefficients]
    positions: Positions
    gate: int

    @classmethod
    def of(cls, column: Column, inline: bool) -> "WireColumn":
        content = b"".join(vector.tobytes() for vector in column.vectors.values()) if inline else None
        return cls(column.vector_key, content, column.coefficients, column.positions, column.gate)


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
    arena: tuple[str, int] | None  # path and size of the shared memory; None: the one that was attached
    offset: int  # of its region there: counters, then rows
    owner: int  # what that region's counter must say
    columns: tuple[WireColumn, ...]
    capture: WireCapture | None

    def without_content(self) -> "Wire":
        """When the vectors are in the table nobody needs these bytes."""
        if all(column.content is None for column in self.columns):
            return self
        return replace(self, columns=tuple(replace(column, content=None) for column in self.columns))

    def pack(self) -> bytes:
        """One piece, which vLLM copies and sends as it is."""
        import msgspec  # vLLM has it

        return msgspec.msgpack.encode(self._plain())

    def _plain(self) -> Packed:
        columns = [
            [column.vectors, column.content, _pack_keys(column.coefficients), list(column.coefficients.values()),
             _pack_positions(column.positions), column.gate]
            for column in self.columns
        ]  # fmt: skip
        capture = None
        if self.capture:
            c = self.capture
            capture = [_pack_keys(c.keys), _pack_positions(c.positions), c.before_steering, c.reduce, c.hold, c.most]
        return {"name": self.name, "place": [self.arena, self.offset, self.owner], "columns": columns,
                "capture": capture}  # fmt: skip

    @classmethod
    def unpack(cls, packed: bytes) -> "Wire":
        import msgspec

        data: Packed = msgspec.msgpack.decode(packed)
        columns = tuple(
            WireColumn(bytes(vectors), content, dict(zip(_keys(keys), map(tuple, values), strict=True)),
                       _positions(at), gate)
            for vectors, content, keys, values, at, gate in data["columns"]
        )  # fmt: skip
        capture = None
        if data["capture"] is not None:
            keys, at, *rest = data["capture"]
            capture = WireCapture(_keys(keys), _positions(at), *rest)
        arena, offset, owner = data["place"]
        return cls(data["name"], None if arena is None else (arena[0], arena[1]), offset, owner, columns, capture)


def _pack_keys(keys: Iterable[Key]) -> list[list[int | str]]:
    return [[layer, site] for layer, site in keys]


def _keys(packed: list) -> tuple[Key, ...]:
    return tuple((layer, site) for layer, site in packed)


def _pack_positions(positions: Positions) -> list[list[int]]:
    return [[a, b] for a, b in positions.intervals]


def _positions(packed: list) -> Positions:
    return Positions(tuple((a, b) for a, b in packed))


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
        found.update(column.vector_key)
        found.update(column.coefficient_key)
        if column.positions != EVERYWHERE:
            found.update(repr((len(plan.prompt.token_ids), column.positions.intervals)).encode())
        found.update(b";")
    return found.hexdigest()


def reads_cached(plan: Plan) -> bool:
    """Whether a cached prompt may be used: of its positions, all but the last can be, and those would have no rows."""
    return plan.capture is None or plan.capture.positions.count(len(plan.prompt.token_ids) - 1) == 0
