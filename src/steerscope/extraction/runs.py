"""Run folders of answers, scores and training runs: settings, results that are only ever added, and a lock.

Finished items are lines of a `Ledger`. Work is done in batches, and each batch is appended at once, so a killed run
resumes with the first item that has no line.
"""

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

from pydantic import Field

from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.files import atomic_path, reading, write_text
from steerscope.specs import Message, Sampling
from steerscope.specs.base import Spec
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, RequestFailed, SteerscopeError

T = TypeVar("T")
Q = TypeVar("Q", bound="Asked")
Record = Mapping[str, Any]
Progress = Callable[[str, int, int], None]  # what, number done, total
Results = Sequence[T] | Iterator[tuple[int, T]]  # a result for each item in order, or (index, result) in any order


class Interrupted(SteerscopeError):
    """Work that cannot continue now; its results so far are stored, and the next run resumes."""


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


def digest(*parts: object) -> str:
    """Return a short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:24]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, data: object) -> None:
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    with reading(path, what):
        return json.loads(path.read_text(encoding="utf-8"))


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Ledger:
    """A JSONL file of records with an `id`. Reading changes nothing, so another process may read a running run."""

    def __init__(self, path: Path, is_valid: Callable[[Record], bool] = lambda _: True) -> None:
        """Read the whole lines; records that are damaged, repeated or not valid count as missing."""
        self._path = path
        self.records: dict[str, Record] = {}
        raw = path.read_bytes() if path.is_file() else b""
        kept = []
        for line in raw.splitlines(keepends=True):
            try:
                record = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:  # UnicodeDecodeError is one
                continue
            if not isinstance(record, dict) or not isinstance(record.get("id"), str):
                continue
            if record["id"] not in self.records and is_valid(record):
                self.records[record["id"]] = record
                kept.append(line)
        self._kept = b"".join(kept)
        self._damaged = self._kept != raw

    def append(self, records: Sequence[Record]) -> None:
        """Add records in one write; lines that count as missing are removed first."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._damaged:
            with atomic_path(self._path) as temporary:
                temporary.write_bytes(self._kept)
            self._damaged = False
        try:
            with self._path.open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadFile(f"cannot write {self._path}: {error.strerror}") from error
        self.records.update((record["id"], record) for record in records)


def store_missing(
    items: Mapping[str, T], ledger: Ledger, size: int, work: Callable[[Sequence[T]], Iterable[Sequence[Record]]]
) -> Iterator[int]:
    """Give items without a line to `work` in batches and append each group of records that it yields.

    Yields the number of items that had a line, then the number of items of each batch."""
    missing = [item for id, item in items.items() if id not in ledger.records]
    yield len(items) - len(missing)
    for batch in batches(missing, size):
        for records in work(batch):
            ledger.append(records)
        yield len(batch)


def groups(results: Results[T]) -> Iterator[list[tuple[int, T]]]:
    """Results with the index of their item, in groups to be stored together: a whole list, or each as it arrives."""
    if isinstance(results, Sequence):
        yield list(enumerate(results))
        return
    for pair in results:
        yield [pair]


# --- settings


class RolloutSettings(Spec):
    """How answers are sampled."""

    max_tokens: int = Field(default=64, ge=2)  # one token has no row
    temperature: float = Field(default=0.7, ge=0.0, le=2.0)
    top_p: float = Field(default=0.9, gt=0.0, le=1.0)
    seed: int = Field(default=0, ge=0)

    def sampling(self, *asked: object) -> Sampling:
        """Return the sampling of an answer, whose seed depends on what is asked."""
        return Sampling.parse({**self.model_dump(), "seed": int(digest(self.seed, *asked)[:12], 16)})


class ModelFacts(Spec):
    name: str
    layers: int
    hidden: int
    vocab: int
    engine: str | None = None  # None in older runs
    dtype: str | None = None

    @classmethod
    def of(cls, engine: SyncEngine) -> Self:
        sizes = {name: getattr(engine.facts, name) for name in ("name", "layers", "hidden", "vocab")}
        return cls(**sizes, engine=type(engine.aio).__name__, dtype=str(engine.aio.dtype).removeprefix("torch."))

    def same(self, other: "ModelFacts") -> bool:
        """Whether all facts that both have are equal."""
        mine = self.model_dump(exclude_none=True)
        theirs = other.model_dump(exclude_none=True)
        return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


class AnswerRun(Spec):
    """Settings of a run of answers, kept in run.json. A resumed run adds to them and removes nothing."""

    kind: ClassVar[str] = "run of answers"
    rollouts: RolloutSettings = RolloutSettings()
    model: ModelFacts | None = None  # set when the run begins

    @abstractmethod
    def joined(self, before: Any) -> Self:
        """Return this run with everything an earlier one asked."""

    def changes(self, before: Any) -> list[str]:
        """Name the settings that differ from those of an earlier run and must not."""
        assert self.model is not None
        found = []
        if before.model is not None and not before.model.same(self.model):
            found.append(f"model ({before.model}), not with {self.model}")
        if before.rollouts != self.rollouts:
            found.append(f"sampling ({before.rollouts}), not with {self.rollouts}")
        return found

    def begin(self, out: Path, resume: bool, problems: Sequence[Problem]) -> Self:
        """Return the run that a folder will hold, or refuse it with all reasons; nothing is written."""
        found = list(problems)
        before = self.load(out)
        if before is not None:
            remedy = "or choose another folder"
            if not resume:
                found.append(Problem(str(out), "holds answers already", f"go on with --resume, {remedy}"))
            for change in self.changes(before):
                what = f"its answers were given with another {change}"
                found.append(Problem(str(out), what, f"keep to it, {remedy}"))
        if found:
            raise InvalidRequest(found)
        return self if before is None else self.joined(before)

    def save(self, out: Path) -> None:
        write_json(out / "run.json", self.model_dump(mode="json"))

    @classmethod
    def load(cls, out: Path) -> Self | None:
        """Read the settings of a folder; None where it holds no run."""
        path = out / "run.json"
        if not path.is_file():
            return None
        with reading(path, cls.kind):
            return cls.from_json(path.read_bytes())


# --- asking


class Asked(Protocol):
    """An item that a model answers."""

    @property
    def question(self) -> str: ...


def takes_system(engine: SyncEngine) -> bool:
    """Whether the chat template renders a system message; some templates refuse it, some drop it."""
    question = Message(role="user", content="Hello")
    try:
        first, second = (
            engine.aio.render([Message(role="system", content=text), question]) for text in ("A.", "Be a fox.")
        )
    except InvalidRequest:
        return False
    return first.token_ids != second.token_ids


def conversation(system: str, question: str, takes_system: bool) -> list[Message]:
    """Put `system` into a system message, or before the question where the template takes none."""
    if system and takes_system:
        return [Message(role="system", content=system), Message(role="user", content=question)]
    return [Message(role="user", content=f"{system}\n\n{question}" if system else question)]


def answer_missing(
    items: Mapping[str, Q],
    ledger: Ledger,
    size: int,
    generate: Callable[[Sequence[Q]], Sequence[Generation]],
    records_of: Callable[[Sequence[Q], Sequence[Generation | None]], Sequence[Record]],
    failures: list[str],
) -> Iterator[int]:
    """Answer items without a line as `store_missing` does. An answer that fails, or that the engine refuses (too long
    for the model), gets no line, and its reason is added to `failures`; the next run tries it again."""

    def work(part: Sequence[Q]) -> Iterator[Sequence[Record]]:
        done, reasons = _generate_each(generate, part)
        if reasons:
            failures.append("\n".join(reasons))
        yield records_of(part, done)

    return store_missing(items, ledger, size, work)


def _generate_each(
    generate: Callable[[Sequence[Q]], Sequence[Generation]], items: Sequence[Q]
) -> tuple[list[Generation | None], list[str]]:
    """Return the finished answers, None where one failed, and why they failed.

    The engine refuses a call as a whole, so refused items are halved until one is alone."""
    half = len(items) // 2
    reasons = list[str]()
    try:
        done = generate(items)
    except RequestFailed as error:
        done = error.completed or [None] * len(items)
        reasons.append(str(error))
    except InvalidRequest as error:
        if not half:
            return [None], [f"{items[0].question[:60]!r}: {error}"]
        first, first_reasons = _generate_each(generate, items[:half])
        second, second_reasons = _generate_each(generate, items[half:])
        return first + second, first_reasons + second_reasons
    return [one if one and one.finish_reason != "cancelled" else None for one in done], reasons
