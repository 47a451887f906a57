"""What equal requests share on their way into vLLM, made once of their `RequestTemplate`; and the salts that keep
steered keys and values apart in vLLM's prefix cache."""

import hashlib
import secrets

import msgspec

from steerscope.capture.transport import ALIGN
from steerscope.engines.plan import RequestTemplate
from steerscope.engines.vllm.wire import Recent, WireBody, WireCapture, WireColumn, WireWatch
from steerscope.specs.tokens import EVERYWHERE


class VLLMTemplate:
    def __init__(self, template: RequestTemplate, hidden: int, row_itemsize: int) -> None:
        # No reference to the template, which refers to this: a cycle would keep the pack of a watch in memory.
        self._columns = template.columns
        self._capture = capture = template.capture
        self._most_rows = template.most_rows
        self._bodies: dict[int, tuple[bytes, int]] = {}  # by the rows that a reduction keeps back
        self.steers = bool(template.columns)
        self.reads_cached = reads_cached(template)
        self.salt = salt_of(template)
        watched = template.watch and template.watch.key
        captured = capture and (capture.keys, capture.spec.before_steering)
        groups = [(captured, None), (None, watched), (captured, watched)]  # a token is captured, watched, or both
        self.groups = [group for group in dict.fromkeys(groups) if group != (None, None)]
        n_bytes = 0 if capture is None else capture.n_bytes(template.most_rows, hidden, row_itemsize)
        self.watch: WireWatch | None = None
        if template.watch is not None:
            place = -(-n_bytes // ALIGN) * ALIGN  # of the readings, behind the rows
            self.watch = WireWatch.of(template.watch, template.most_rows, place)
            n_bytes = place + self.watch.bytes
        self.n_bytes = n_bytes  # of shared memory

    def body(self, hold: int) -> tuple[bytes, int]:
        """Return the packed body, and the first position of which it asks something."""
        found = self._bodies.get(hold)
        if found is None:
            columns = tuple(WireColumn.of(column) for column in self._columns)
            body = WireBody(columns, self._wire_capture(hold), self.watch)
            found = self._bodies[hold] = msgspec.msgpack.encode(body), body.first
        return found

    def _wire_capture(self, hold: int) -> WireCapture | None:
        if self._capture is None:
            return None
        keys, positions, spec = self._capture.keys, self._capture.positions, self._capture.spec
        return WireCapture(keys, positions, spec.before_steering, spec.reduce, hold, self._most_rows)

    def contents(self) -> tuple[bytes, ...]:
        """Return the vectors of each column, for workers that were not given them."""
        return tuple(b"".join(vector.tobytes() for vector in column.vectors.values()) for column in self._columns)


def reads_cached(template: RequestTemplate) -> bool:
    """Return whether a cached prompt may be used: all its positions but the last can be cached, and would have no
    rows."""
    last = template.prompt_length - 1
    asked = (template.capture, template.watch)
    return not any(one is not None and one.positions.count(last) for one in asked)


def salt_of(template: RequestTemplate) -> str | None:
    """Return a hash of what the ops do and where; None where nothing is steered, or rules switch ops.

    Cached blocks are reused by any prompt that begins with the same tokens, so what was done to a position must be a
    function of the salt and of the tokens up to it: where an op does not act everywhere, its resolved positions
    and the length of the prompt they were resolved against belong to it. Names never do.
    """
    if not template.columns or any(column.gate for column in template.columns):
        return None
    found = hashlib.blake2b(digest_size=16)
    for column in template.columns:
        found.update(column.vector_key)
        found.update(column.coefficient_key)
        if column.positions != EVERYWHERE:
            found.update(repr((template.prompt_length, column.positions.intervals)).encode())
        found.update(b";")
    return found.hexdigest()


class Salts:
    """The salts of one engine's requests. Requests share cached blocks if their salts are equal."""

    def __init__(self) -> None:
        self._spoilt = Recent()  # those under which steering overflowed: their cached blocks hold nothing

    def of(self, shared: VLLMTemplate) -> str | None:
        """Return the salt of a request. What a rule switches depends on the text itself: such a request shares with
        none, and neither does one whose steering has overflowed."""
        if shared.steers and (shared.salt is None or shared.salt in self._spoilt):
            return secrets.token_hex(16)
        return shared.salt

    def spoil(self, shared: VLLMTemplate) -> None:
        """Note that these ops made rows that are not finite."""
        if shared.salt is not None:
            self._spoilt.add(shared.salt)
