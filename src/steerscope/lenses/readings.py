"""Results of watching a request, on the host: readings of rows and firings of rules.

Numbers stay in arrays, as they came from the device; a `Reading` with names is made when it is accessed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import numpy as np

from steerscope.lenses.pack import Pack
from steerscope.lenses.reader import HostStepReadings
from steerscope.lenses.rules import Compiled

Action = Literal["flag", "stop", "steer", "steer_off"]


class ConceptScore(NamedTuple):
    """One concept of a reading. `probability` is the lens's calibrated score."""

    id: str
    name: str
    path: tuple[str, ...]  # names from the root to the concept
    probability: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The top concepts of the row at `position`, best first, without those whose score is 0.

    `token_id` is the token that the row was computed from; the token sampled from it comes next.
    """

    position: int
    token_id: int
    concepts: tuple[ConceptScore, ...]


@dataclass(frozen=True, slots=True)
class Firing:
    """A rule that went on or, if it switches steering, off.

    It fired on the row at `position`, with generated token number `token`; `acts_from` is the first row it can change.
    `scores` are those of the concepts that the condition names.
    """

    rule: str
    action: Action
    position: int
    token: int
    acts_from: int
    scores: tuple[tuple[str, float], ...]

    @property
    def score(self) -> float:
        return self.scores[0][1]


class Readings(Sequence[Reading]):
    """Readings of n rows, in order: `values` and `indices` [n, k], with index −1 for empty places."""

    def __init__(
        self, pack: Pack, positions: np.ndarray, tokens: Sequence[int] | np.ndarray, values: np.ndarray,
        indices: np.ndarray,
    ) -> None:  # fmt: skip
        self.pack = pack
        self.positions = positions
        self._tokens = tokens
        self.values = values
        self.indices = indices

    @property
    def token_ids(self) -> np.ndarray:
        """Return the token that each row was computed from."""
        if not isinstance(self._tokens, np.ndarray):  # converted on first access: slow, and rarely needed
            self._tokens = np.array(self._tokens, np.int64)
        return self._tokens

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, i: int) -> Reading: ...
    @overload
    def __getitem__(self, i: slice) -> "Readings": ...
    def __getitem__(self, i: int | slice) -> "Reading | Readings":
        if isinstance(i, slice):
            columns = (self.positions[i], self.token_ids[i], self.values[i], self.indices[i])
            return Readings(self.pack, *columns)
        found = zip(self.indices[i].tolist(), self.values[i].tolist(), strict=True)
        concepts = tuple(self._concept(lens, value) for lens, value in found if lens >= 0)
        return Reading(int(self.positions[i]), int(self.token_ids[i]), concepts)

    def _concept(self, lens: int, value: float) -> ConceptScore:
        concept = self.pack.concepts[lens]
        return ConceptScore(concept.id, concept.name, self.pack.path(lens), value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Reading.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Readings({len(self)} rows, pack {self.pack.info.name!r})"

    def of(self, concept: str) -> np.ndarray:
        """Return one concept's probability on every row; 0 if it was not in the top k."""
        found = np.where(self.indices == self.pack.index(concept), self.values, 0.0)
        return found.max(axis=1) if found.shape[1] else np.zeros(len(self))

    def table(self) -> dict[str, list[object]]:
        """Return columns with one line per row and concept, e.g. for a data frame."""
        lines = [(r.position, r.token_id, rank, *c) for r in self for rank, c in enumerate(r.concepts)]
        names = ("position", "token_id", "rank", "id", "name", "path", "probability")
        return {name: [line[i] for line in lines] for i, name in enumerate(names)}


class Notes:
    """Readings and firings of one request so far. An engine adds the rows of each step, in order."""

    def __init__(self, pack: Pack, compiled: Compiled, top_k: int, prompt_length: int) -> None:
        self.pack = pack
        self.compiled = compiled
        self.top_k = top_k
        self.prompt_length = prompt_length
        self.restart()

    @property
    def kept(self) -> int | None:
        """Return how many generated tokens a stop rule keeps; None: no rule has stopped the text."""
        return None if self.stopped is None else self.stopped.token + 1

    def restart(self) -> None:
        """Forget everything: the request is computed again from its first row."""
        self.stopped: Firing | None = None
        self._firings: list[Firing] = []
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # positions, values, indices
        self._next = self._told = self._fired = 0

    def add(self, positions: Sequence[int] | np.ndarray, values: np.ndarray, indices: np.ndarray) -> None:
        """Add readings [n, k] of ascending positions; positions that were added before are skipped."""
        at = np.asarray(positions)
        fresh = int(np.searchsorted(at, self._next)) if len(at) and at[0] < self._next else 0
        if fresh < len(at):
            k = self.top_k
            self._parts.append((at[fresh:], values[fresh:, :k], indices[fresh:, :k]))
            self._next = int(at[-1]) + 1

    def note(self, seen: HostStepReadings, start: int, positions: Sequence[int] | np.ndarray) -> None:
        """Add the results of a step from its row `start` on, which are these positions of the request."""
        stop = start + len(positions)
        self.add(positions, seen.values[start:stop], seen.indices[start:stop])
        if seen.on is None or seen.off is None or seen.scores is None:
            return
        for i in np.flatnonzero((seen.on[start:stop] | seen.off[start:stop]).any(axis=1)).tolist():
            at = start + i
            on = np.flatnonzero(seen.on[at]).tolist()
            off = np.flatnonzero(seen.off[at]).tolist()
            self.fire(int(positions[i]), on, off, seen.scores[at])

    def fire(self, position: int, on: Iterable[int], off: Iterable[int], scores: np.ndarray) -> None:
        """Add the rules that changed on one row, given the scores [terms] of its terms."""
        lens_scores = {term.lens: float(scores[i]) for i, term in enumerate(self.compiled.terms)}
        for rules, going_on in ((on, True), (off, False)):
            for r in rules:
                rule = self.compiled.rules[r]
                if not going_on and rule.kind != "steer":
                    continue  # only steering has an end to report
                token = max(position + 1 - self.prompt_length, 0)
                named = tuple((self.pack.concepts[lens].id, lens_scores[lens]) for lens in rule.lenses)
                action: Action = rule.kind if going_on else "steer_off"
                firing = Firing(rule.name, action, position, token, self.prompt_length + token, named)
                self._firings.append(firing)
                if action == "stop" and self.stopped is None:
                    self.stopped = firing

    def news(self, history: list[int]) -> tuple[Readings, list[Firing]]:
        """Return readings and firings since the last call."""
        parts = self._parts[self._told :]
        self._told = len(self._parts)
        firings = self._firings[self._fired :]
        self._fired = len(self._firings)
        return self._readings(parts, history), firings

    def finish(self, rows: int, history: list[int]) -> tuple[Readings, tuple[Firing, ...]]:
        """Return all readings and firings of the first `rows` rows; later ones no longer belong to the text."""
        found = self._readings(self._parts, history, rows)
        return found, tuple(firing for firing in self._firings if firing.position < rows)

    def _readings(
        self, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], history: list[int], rows: int | None = None
    ) -> Readings:
        if not parts:
            nothing = np.zeros(0, np.int64)
            return Readings(self.pack, nothing, nothing, np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64))
        at, values, indices = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        kept = len(at) if rows is None else int(np.searchsorted(at, rows))
        at = at[:kept]
        values = values[:kept]
        indices = indices[:kept]
        whole = len(at) and len(at) == at[-1] + 1 - at[0]
        tokens = history[int(at[0]) : int(at[-1]) + 1] if whole else [history[i] for i in at.tolist()]
        return Readings(self.pack, at, tokens, values, indices)

    def __iter__(self) -> Iterator[Firing]:
        return iter(self._firings)
