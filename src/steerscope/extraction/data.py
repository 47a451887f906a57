"""Contrast data: pairs that differ in a trait, or examples with a label; each example is a text or a chat.

Sets that ship with steerscope are JSON files in `data/`, with pairs kept apart for testing. Files of users are JSONL,
one example a line:

    {"positive": "I love it.", "negative": "I hate it."}                       a pair
    {"text": "I love it.", "label": "positive"}                                a labelled text
    {"messages": [{"role": "user", "content": "…"}, …], "label": "negative"}   a labelled chat

`positive` and `negative` of a pair may be lists of messages too. All problems of a file are reported together.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from steerscope.files import reading
from steerscope.specs.chat import Chat, parse_chat
from steerscope.specs.errors import InvalidRequest, Problem, not_json

T = TypeVar("T")
E = TypeVar("E")

Text = str | Chat  # plain text, or messages for the model's chat template
_LABELS = {"positive": True, "negative": False}
_FEWEST = 4  # of either label: without the held-out ones, both halves still need one


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """Two texts or chats that differ in the trait and as little else as possible."""

    positive: Text
    negative: Text

    def __post_init__(self) -> None:
        problems = [problem for name in _LABELS for problem in _check(getattr(self, name), name)]
        if not problems and self.positive == self.negative:
            problems.append(Problem("negative", f"both sentences are {self.positive!r}", "they must differ"))
        if problems:
            raise InvalidRequest(problems)


@dataclass(frozen=True, slots=True)
class ContrastPair(DatasetEntry):
    """A pair of plain sentences."""

    positive: str
    negative: str


@dataclass(frozen=True, slots=True)
class Examples:
    """Texts with their labels; `pairs` numbers the pair of each where they came in pairs."""

    texts: tuple[Text, ...]
    positive: tuple[bool, ...]
    pairs: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {"texts": len(self.texts), "positive": len(self.positive)}
        if self.pairs is not None:
            sizes["pairs"] = len(self.pairs)
        if len(set(sizes.values())) > 1:
            what = f"there are {', '.join(f'{size} {name}' for name, size in sizes.items())}"
            raise InvalidRequest([Problem("examples", what, "give one of each for every example")])
        problems = [
            Problem("examples", f"{self.positive.count(label)} are {name}", f"give at least {_FEWEST} of them")
            for name, label in _LABELS.items()
            if self.positive.count(label) < _FEWEST
        ]
        sides: dict[int, list[bool]] = {}
        for number, label in zip(self.pairs or (), self.positive, strict=False):
            sides.setdefault(number, []).append(label)
        remedy = "give one positive and one negative example"
        problems += [
            Problem(f"pairs[{number}]", "is not one example of either label", remedy)
            for number, labels in sides.items()
            if sorted(labels) != [False, True]
        ]
        if problems:
            raise InvalidRequest(problems)

    @classmethod
    def of_pairs(cls, entries: Sequence[DatasetEntry]) -> "Examples":
        """All positive examples, then all negative ones."""
        texts = [entry.positive for entry in entries] + [entry.negative for entry in entries]
        numbers = tuple(range(len(entries)))
        n = len(entries)
        return cls(tuple(texts), (True,) * n + (False,) * n, numbers * 2)

    def __len__(self) -> int:
        return len(self.texts)

    def name(self, index: int) -> str:
        """Return the name of an example in errors: its number, or its pair and side."""
        if self.pairs is None:
            return f"examples[{index}]"
        return f"pairs[{self.pairs[index]}].{'positive' if self.positive[index] else 'negative'}"


@dataclass(frozen=True, slots=True)
class ContrastSet:
    """Pairs for making a vector, and others for testing it; `positive` and `negative` name the two sides."""

    name: str
    positive: str
    negative: str
    extraction: tuple[ContrastPair, ...]
    heldout: tuple[ContrastPair, ...]


_SHIPPED = resources.files("steerscope.extraction") / "data"


def shipped_sets() -> list[str]:
    return names_in(_SHIPPED)


def load_contrast_set(name: str = "happy_sad") -> ContrastSet:
    """Load a set that ships with steerscope."""
    known = shipped_sets()
    if name not in known:
        raise InvalidRequest([Problem("name", f"there is no contrast set {name!r}", f"choose from {', '.join(known)}")])
    data = json.loads((_SHIPPED / f"{name}.json").read_text(encoding="utf-8"))
    extraction, heldout = (tuple(ContrastPair(**pair) for pair in data[part]) for part in ("extraction", "heldout"))
    return ContrastSet(name, data["positive"], data["negative"], extraction, heldout)


def sentences(pairs: Sequence[ContrastPair]) -> list[str]:
    """All positive sentences, then all negative ones."""
    return [pair.positive for pair in pairs] + [pair.negative for pair in pairs]


def load_examples(path: str | Path) -> Examples:
    """Read a JSONL file; every bad line is named."""
    entries, problems = parse_some(numbered_lines(Path(path), "file of examples"), _entry)
    pairs = [one for one in entries if isinstance(one, DatasetEntry)]
    labelled = [one for one in entries if not isinstance(one, DatasetEntry)]
    if pairs and labelled:
        what = f"{len(pairs)} pairs and {len(labelled)} labelled examples are mixed"
        problems.append(Problem(str(path), what, "put them into two files"))
    if problems:
        raise InvalidRequest(problems)
    try:
        if pairs:
            return Examples.of_pairs(pairs)
        return Examples(tuple(text for text, _ in labelled), tuple(label for _, label in labelled))
    except InvalidRequest as error:
        raise InvalidRequest([problem.under(str(path)) for problem in error.problems]) from None


def _entry(line: str) -> DatasetEntry | tuple[Text, bool]:
    forms = 'write {"positive": …, "negative": …} or {"text" or "messages": …, "label": "positive" or "negative"}'
    data = parse_json(line, forms)
    keys = set(data) if isinstance(data, dict) else set()
    if keys == {"positive", "negative"}:
        return DatasetEntry(**data)
    field = "text" if "text" in keys else "messages"
    if keys != {field, "label"}:
        raise InvalidRequest([Problem("", f"has {', '.join(sorted(keys)) or 'no fields'}", forms)])
    problems = _check(data[field], field)
    if not isinstance(data["label"], str) or data["label"] not in _LABELS:
        problems.append(Problem("label", f"is {data['label']!r}", "write positive or negative"))
    if problems:
        raise InvalidRequest(problems)
    return data[field], _LABELS[data["label"]]


def _check(text: object, name: str) -> list[Problem]:
    if isinstance(text, str):
        return [] if text.strip() else [Problem(name, "the sentence is empty", "write one")]
    try:
        parse_chat(text)  # type: ignore[arg-type]
    except InvalidRequest as error:
        return [problem.under(name) for problem in error.problems]
    return []


# --- JSON Lines and shipped files


def names_in(folder: Traversable, suffix: str = ".json") -> list[str]:
    """Return the names of the files with this suffix, without it."""
    return sorted(file.name.removesuffix(suffix) for file in folder.iterdir() if file.name.endswith(suffix))


def numbered_lines(path: Path | Traversable, what: str) -> list[tuple[str, str]]:
    """Return the lines that are not blank, each with `path:number`; `what` names the kind of file in errors."""
    with reading(str(path), what):
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold U+2028
    return [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def parse_json(text: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest([Problem("", not_json(error), remedy)]) from None


def parse_some(entries: Iterable[tuple[str, E]], parse: Callable[[E], T]) -> tuple[list[T], list[Problem]]:
    """Parse named entries; return the valid ones, and the problems of the others under their names."""
    parsed: list[T] = []
    problems: list[Problem] = []
    for name, entry in entries:
        try:
            parsed.append(parse(entry))
        except InvalidRequest as error:
            problems += [problem.under(name) for problem in error.problems]
    return parsed, problems


def parse_all(entries: Iterable[tuple[str, E]], parse: Callable[[E], T]) -> list[T]:
    """Parse named entries, or raise one error with the problems of all."""
    parsed, problems = parse_some(entries, parse)
    if problems:
        raise InvalidRequest(problems)
    return parsed
