"""What a request carries to the workers in `SamplingParams.extra_args["steerscope"]`: everything resolved, nothing left
to check there. Vectors are named by the hash of their content: workers have them already, or find them beside it.

Requests that ask for the same carry the same bytes for what they ask (`WireBody`), which workers decode once.
"""

import functools
from collections.abc import Container, Hashable, Mapping
from typing import Any, Literal, Self

import msgspec
import numpy as np

from steerscope.core.slot_table import Column, Key
from steerscope.engines.vllm.settings import NAME
from steerscope.lenses.monitor import WatchPlan
from steerscope.lenses.rules import Compiled
from steerscope.specs.steering import Coefficients
from steerscope.specs.tokens import Positions

OVERFLOW = "its steering makes the hidden states not finite; lower the strength"  # why a worker gives a request up
_MAX_BODIES = 256
_MAX_RECENT = 4096


class WireColumn(msgspec.Struct, array_like=True):
    vectors: bytes  # hash of the content
    strengths: bytes  # hash of the coefficients
    coefficients: dict[Key, Coefficients]
    positions: Positions
    gate: int
    content: bytes | None = None  # float32 [keys, hidden]; None: the workers have it. It travels apart from the body

    @classmethod
    def of(cls, column: Column) -> Self:
        return cls(column.vector_key, column.coefficient_key, column.coefficients, column.positions, column.gate)

    def placed(self, known: Mapping[bytes, Mapping[Key, np.ndarray]], taps: Container[Key], hidden: int) -> Column:
        """Return the column as far as these taps are here, with known vectors unless it carries them."""
        if self.content is None:
            vectors = known[self.vectors]
        else:
            rows = np.frombuffer(self.content, dtype="<f4").reshape(-1, hidden)
            vectors = dict(zip(self.coefficients, rows, strict=True))
        here = {key: vector for key, vector in vectors.items() if key in taps}
        kept = {key: c for key, c in self.coefficients.items() if key in taps}
        made = Column(self.positions, self.gate, here, kept)
        # The hashes of the whole column name this stage's part of it, too.
        made.vector_key = self.vectors
        made.coefficient_key = self.strengths
        return made


class WireCapture(msgspec.Struct, frozen=True, array_like=True):
    keys: tuple[Key, ...]
    positions: Positions
    before_steering: bool
    reduce: Literal["mean", "last"] | None
    hold: int  # rows a reduction keeps back until the end is known
    most: int  # rows are numbered below this


class WireWatch(msgspec.Struct, frozen=True, array_like=True):
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
    def of(cls, plan: WatchPlan, most: int, place: int) -> Self:
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


class WireBody(msgspec.Struct, array_like=True):
    columns: tuple[WireColumn, ...]
    capture: WireCapture | None
    watch: WireWatch | None = None


class Envelope(msgspec.Struct, array_like=True):
    """One request as it travels. `body` is that of all requests that ask for the same."""

    name: str
    arena: tuple[str, int] | None  # path and size of the shared memory; None: the one that was attached
    offset: int  # of its region there: counters, then rows
    owner: int  # what that region's counter must say
    body: bytes
    contents: tuple[bytes, ...] = ()  # vectors of each column that the workers do not have

    def entry(self) -> dict[str, Any]:
        """Return what it is in `extra_args`: one piece, which vLLM copies and sends as it is."""
        return {NAME: msgspec.msgpack.encode(self)}


class Wire(msgspec.Struct):
    """One request as a worker knows it."""

    name: str
    arena: tuple[str, int] | None
    offset: int
    owner: int
    columns: tuple[WireColumn, ...]
    capture: WireCapture | None
    watch: WireWatch | None = None

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        sent = _ENVELOPES.decode(packed)
        body = _decoded(sent.body)
        columns = body.columns
        if sent.contents:
            pairs = zip(columns, sent.contents, strict=True)
            columns = tuple(msgspec.structs.replace(column, content=content) for column, content in pairs)
        return cls(sent.name, sent.arena, sent.offset, sent.owner, columns, body.capture, body.watch)

    @property
    def steering(self) -> Hashable:
        """Return what is done where, as salts tell it apart."""
        return tuple((column.vectors, column.strengths, column.positions) for column in self.columns)

    def without_content(self) -> Self:
        """Return it without vectors, which are in the table now."""
        if all(column.content is None for column in self.columns):
            return self
        columns = tuple(msgspec.structs.replace(column, content=None) for column in self.columns)
        return msgspec.structs.replace(self, columns=columns)


_ENVELOPES = msgspec.msgpack.Decoder(Envelope)
_BODIES = msgspec.msgpack.Decoder(WireBody)
_decoded = functools.lru_cache(maxsize=_MAX_BODIES)(_BODIES.decode)


class Recent:
    """The last few thousand of something."""

    def __init__(self) -> None:
        self._known: dict[Hashable, None] = {}

    def add(self, one: Hashable) -> None:
        self._known[one] = None
        if len(self._known) > _MAX_RECENT:
            del self._known[next(iter(self._known))]

    def __contains__(self, one: Hashable) -> bool:
        return one in self._known
