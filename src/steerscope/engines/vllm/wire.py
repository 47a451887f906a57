"""What a request carries to the workers in `SamplingParams.extra_args["steerscope"]`: everything resolved, nothing left
to judge there. Vectors go by the hash of their content, which the workers were given before or find beside it."""

import functools
import hashlib
import secrets
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from steerscope.core.slot_table import Column, Key
from steerscope.engines.plan import Plan
from steerscope.engines.vllm.settings import NAME
from steerscope.lenses.compile import Compiled, CompiledRule, Term
from steerscope.lenses.monitor import WatchPlan
from steerscope.specs.steering import Coefficients
from steerscope.specs.tokens import END, EVERYWHERE, Positions

LATER = "steerscope_from"  # beside that entry: it asks for nothing below this position
OVERFLOW = "its steering makes the hidden states not finite; lower the strength"  # why a worker gives a request up
_KEPT, _RECENT = 256, 4096


@dataclass(slots=True)
class WireColumn:
    vectors: bytes  # hash of the content
    strengths: bytes  # hash of the coefficients
    content: bytes | None  # float32 [keys, hidden]; None: the workers were given it
    coefficients: dict[Key, Coefficients]
    positions: Positions
    gate: int

    @classmethod
    def of(cls, column: Column, inline: bool) -> "WireColumn":
        content = b"".join(vector.tobytes() for vector in column.vectors.values()) if inline else None
        strengths = column.coefficient_key
        return cls(column.vector_key, strengths, content, column.coefficients, column.positions, column.gate)

    def placed(self, known: Mapping[bytes, Mapping[Key, np.ndarray]], taps: Container[Key], hidden: int) -> Column:
        """As far as these taps are here; with vectors that are known unless it carries them."""
        if self.content is None:
            vectors = known[self.vectors]
        else:
            rows = np.frombuffer(self.content, dtype="<f4").reshape(-1, hidden)
            vectors = dict(zip(self.coefficients, rows, strict=True))
        here = {key: vector for key, vector in vectors.items() if key in taps}
        kept = {key: c for key, c in self.coefficients.items() if key in taps}
        made = Column(self.positions, self.gate, here, kept)
        # Of what all stages have, as good a name for our part of it.
        made.vector_key, made.coefficient_key = self.vectors, self.strengths
        return made


@dataclass(frozen=True)
class WireCapture:
    keys: tuple[Key, ...]
    positions: Positions
    before_steering: bool
    reduce: Literal["mean", "last"] | None
    hold: int  # rows a reduction keeps back until the end is known
    most: int  # rows are numbered below this

    @functools.cached_property
    def packed(self) -> bytes:
        """Requests that ask alike share it: their layers, which are many, are packed once."""
        import msgspec

        where = [_plain_keys(self.keys), _pack_positions(self.positions)]
        return msgspec.msgpack.encode([*where, self.before_steering, self.reduce, self.hold, self.most])


@dataclass(frozen=True, slots=True)
class WireWatch:
    pack: str  # its `Registered.digest`
    key: Key
    positions: Positions
    top_k: int
    levels: tuple[int, ...] | None
    compiled: Compiled
    kept: int  # concepts in a reading
    most: int  # rows are numbered below this
    place: int  # of the readings, behind the counters

    @classmethod
    def of(cls, plan: WatchPlan, most: int, place: int) -> "WireWatch":
        kept = min(plan.spec.top_k, len(plan.registered.pack))
        pack = plan.registered.digest
        return cls(pack, plan.key, plan.positions, plan.spec.top_k, plan.levels, plan.compiled, kept, most, place)

    @property
    def words(self) -> int:
        """Numbers of four bytes in one reading: scores, lenses, rules that went on and off (a bit each), and the scores
        of their terms."""
        return 2 * self.kept + (2 + len(self.compiled.terms) if self.compiled.rules else 0)

    @property
    def bytes(self) -> int:
        return 4 * self.words * self.positions.count(self.most)

    def plain(self) -> list[Any]:
        terms = [[t.lens, t.above, t.below, t.need] for t in self.compiled.terms]
        rules = [[r.name, r.kind, r.clauses, r.off, r.off_for, r.lenses] for r in self.compiled.rules]
        where = [list(self.key), _pack_positions(self.positions)]
        return [self.pack, *where, self.top_k, self.levels, terms, rules, self.kept, self.most, self.place]

    @classmethod
    def unplain(cls, data: list[Any]) -> "WireWatch":
        pack, (layer, site), at, top_k, levels, terms, rules, *rest = data
        found = [
            CompiledRule(name, kind, tuple((p, n) for p, n in clauses), off, off_for, tuple(lenses))
            for name, kind, clauses, off, off_for, lenses in rules
        ]
        compiled = Compiled([Term(*term) for term in terms], found)
        chosen = None if levels is None else tuple(levels)
        return cls(pack, (layer, site), _positions(at), top_k, chosen, compiled, *rest)


@dataclass(slots=True)  # not frozen, nor are its columns: that would make them twice as expensive to make
class Wire:
    name: str
    arena: tuple[str, int] | None  # path and size of the shared memory; None: the one that was attached
    offset: int  # of its region there: counters, then rows
    owner: int  # what that region's counter must say
    columns: tuple[WireColumn, ...]
    capture: WireCapture | None
    watch: WireWatch | None = None

    @property
    def steering(self) -> Hashable:
        """What is done where, as `salt` tells it apart."""
        return tuple((column.vectors, column.strengths, column.positions) for column in self.columns)

    @property
    def first(self) -> int:
        """Nothing is asked below this position."""
        found = END
        for one in (*self.columns, self.capture, self.watch):
            if one is not None and one.positions.intervals:
                found = min(found, one.positions.intervals[0][0])
        return 0 if found == END else found

    def without_content(self) -> "Wire":
        """When the vectors are in the table nobody needs these bytes."""
        if all(column.content is None for column in self.columns):
            return self
        return replace(self, columns=tuple(replace(column, content=None) for column in self.columns))

    def entry(self) -> dict[str, Any]:
        """What it is in `extra_args`."""
        return {NAME: self.pack(), LATER: self.first}

    def pack(self) -> bytes:
        """One piece, which vLLM copies and sends as it is."""
        import msgspec  # vLLM has it

        columns = [[_pack_ops(c), c.content, _pack_positions(c.positions), c.gate] for c in self.columns]
        capture = None if self.capture is None else self.capture.packed
        watch = None if self.watch is None else self.watch.plain()
        return msgspec.msgpack.encode([self.name, self.arena, self.offset, self.owner, columns, capture, watch])

    @classmethod
    def unpack(cls, packed: bytes) -> "Wire":
        import msgspec

        name, arena, offset, owner, plain, captured, watched = msgspec.msgpack.decode(packed)
        columns = []
        for ops, content, at, gate in plain:
            vectors, strengths, coefficients = _unpack_ops(bytes(ops))
            columns.append(WireColumn(vectors, strengths, content, coefficients, _positions(at), gate))
        capture = None if captured is None else _unpack_capture(bytes(captured))
        watch = None if watched is None else WireWatch.unplain(watched)
        return cls(name, None if arena is None else (arena[0], arena[1]), offset, owner, tuple(columns), capture, watch)


def waits(extra: dict[str, Any] | None, stop: int) -> bool:
    """Whether a request asks for nothing below a position: then a step that ends there need not know of it."""
    return extra is not None and extra.get(LATER, 0) >= stop


# Requests ask alike: what names many layers is packed, and unpacked, once for all of them.
_packed_ops: dict[tuple[bytes, bytes], bytes] = {}  # by the hashes of their contents, which name the layers too


def _pack_ops(column: WireColumn) -> bytes:
    import msgspec

    name = column.vectors, column.strengths
    if (known := _packed_ops.get(name)) is not None:
        return known
    if len(_packed_ops) >= _KEPT:
        _packed_ops.clear()  # in one go: several threads come here
    values = [*name, _plain_keys(column.coefficients), list(column.coefficients.values())]
    return _packed_ops.setdefault(name, msgspec.msgpack.encode(values))


@functools.lru_cache(maxsize=_KEPT)
def _unpack_ops(packed: bytes) -> tuple[bytes, bytes, dict[Key, Coefficients]]:
    import msgspec

    vectors, strengths, keys, values = msgspec.msgpack.decode(packed)
    return bytes(vectors), bytes(strengths), dict(zip(_keys(keys), map(tuple, values), strict=True))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=_KEPT)
def _unpack_capture(packed: bytes) -> WireCapture:
    import msgspec

    keys, at, *rest = msgspec.msgpack.decode(packed)
    return WireCapture(_keys(keys), _positions(at), *rest)


def _plain_keys(keys: Iterable[Key]) -> list[list[int | str]]:
    return [[layer, site] for layer, site in keys]


def _keys(packed: list) -> tuple[Key, ...]:
    return tuple((layer, site) for layer, site in packed)


def _pack_positions(positions: Positions) -> list[list[int]]:
    return [[a, b] for a, b in positions.intervals]


def _positions(packed: list) -> Positions:
    return Positions(tuple((a, b) for a, b in packed))


class Recent:
    """The last few thousand of something."""

    def __init__(self) -> None:
        self._known: dict[Hashable, None] = {}

    def add(self, one: Hashable) -> None:
        self._known[one] = None
        if len(self._known) > _RECENT:
            del self._known[next(iter(self._known))]

    def __contains__(self, one: Hashable) -> bool:
        return one in self._known


_spoilt = Recent()  # salts under which steering left the numbers


def salt(plan: Plan) -> str | None:
    """What keeps steered keys and values apart in vLLM's prefix cache: a hash of what the ops do and where.

    Cached blocks are reused by any prompt that begins with the same tokens, so what was done to a position must be a
    function of the salt and of the tokens up to it: where an op does not act everywhere, its resolved positions
    and the length of the prompt they were resolved against belong to it. Names never do. What a rule switches depends
    on the text itself: such a request shares with nobody. Nor does what was once too strong: blocks that were left then
    hold nothing, and whoever reads them computes none of the rows that would show it.
    """
    if not plan.columns:
        return None
    if any(column.gate for column in plan.columns):
        return secrets.token_hex(16)
    found = hashlib.blake2b(digest_size=16)
    for column in plan.columns:
        found.update(column.vector_key)
        found.update(column.coefficient_key)
        if column.positions != EVERYWHERE:
            found.update(repr((len(plan.prompt.token_ids), column.positions.intervals)).encode())
        found.update(b";")
    name = found.hexdigest()
    return secrets.token_hex(16) if name in _spoilt else name


def spoil(plan: Plan) -> None:
    """Its steering made rows that are not finite."""
    if name := salt(plan):
        _spoilt.add(name)


def reads_cached(plan: Plan) -> bool:
    """Whether a cached prompt may be used: of its positions, all but the last can be, and those would have no rows."""
    last = len(plan.prompt.token_ids) - 1
    return not any(asked is not None and asked.positions.count(last) for asked in (plan.capture, plan.watch))
