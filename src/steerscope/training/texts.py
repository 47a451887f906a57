"""Texts a vector is learned from, and their tokens.

A set is shipped (JSON in `data/`, with parts for training, validation and test) or a file of JSON Lines:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}    a chat
    {"prompt": "Once upon a time", "response": " there was …"}                                 targets: the response
    {"text": "There was …"}                                                                    targets: all of it

Files of contrast data (`steerscope.extraction`) serve too: the positive side is learned, and both sides give the mean
difference that training may begin with. Targets of a chat are the assistant's messages and the tokens that end them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from steerscope.engines.hf import HFEngine
from steerscope.extraction.data import (
    DatasetEntry,
    Examples,
    Text,
    load_examples,
    names_in,
    numbered_lines,
    parse_all,
    parse_json,
)
from steerscope.extraction.personas.definitions import load_personas
from steerscope.extraction.runs import takes_system
from steerscope.specs.base import Spec
from steerscope.specs.chat import Message, parse_chat
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Positions, SelectorError, resolve

_FORMS = 'write {"messages": …}, {"prompt": …, "response": …}, {"text": …}, or a pair {"positive": …, "negative": …}'
_SHIPPED = resources.files("steerscope.training") / "data"


class Completion(Spec):
    """A text of which only the response is a target."""

    prompt: str
    response: str


Source = Text | Completion


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Where `validation` is empty, some of `train` are held out. `prompts` are those of the prompted baseline."""

    name: str
    train: tuple[Source, ...]
    validation: tuple[Source, ...] = ()
    test: tuple[Source, ...] = ()
    examples: Examples | None = None  # both sides of the training part
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """Token ids up to the last target, the positions of the targets, and those that are steered."""

    token_ids: list[int]
    targets: list[int]
    steered: Positions

    @property
    def width(self) -> int:
        """Tokens of the input; the last one is only predicted."""
        return len(self.token_ids) - 1


def shipped_training_sets() -> list[str]:
    return names_in(_SHIPPED)


def load_training_set(source: str | Path) -> TrainingSet:
    """Load a shipped set by name, or a file; every bad line is named."""
    if str(source) in shipped_training_sets():
        return _shipped(str(source))
    path = Path(source)
    if not path.is_file():
        remedy = f"sets are {', '.join(shipped_training_sets())}"
        raise InvalidRequest([Problem(str(source), "is no file and no shipped set", remedy)])
    lines = numbered_lines(path, "file of training texts")
    if not lines:
        raise InvalidRequest([Problem(str(path), "holds no text", _FORMS)])
    try:
        first = parse_json(lines[0][1], _FORMS)
    except InvalidRequest:  # reported with all others
        first = None
    if isinstance(first, dict) and not {"label", "positive"}.isdisjoint(first):
        examples = load_examples(path)
        positive = [text for text, yes in zip(examples.texts, examples.positive, strict=True) if yes]
        return TrainingSet(path.stem, tuple(positive), examples=examples)
    return TrainingSet(path.stem, tuple(parse_all(lines, _source)))


def _shipped(name: str) -> TrainingSet:
    data = json.loads((_SHIPPED / f"{name}.json").read_text(encoding="utf-8"))
    pairs = [DatasetEntry(_chat(asked, yes), _chat(asked, no)) for asked, yes, no in data["train"]]
    validation, test = (tuple(_chat(asked, yes) for asked, yes, _ in data[part]) for part in ("validation", "test"))
    prompts = tuple(one.pos for one in load_personas("traits", [name])[0].instructions)
    learned = tuple(pair.positive for pair in pairs)
    return TrainingSet(name, learned, validation, test, Examples.of_pairs(pairs), prompts)


def _chat(question: str, answer: str) -> list[Message]:
    return [Message(role="user", content=question), Message(role="assistant", content=answer)]


def _source(line: str) -> Source:
    data = parse_json(line, _FORMS)
    match data:
        case {"messages": chat, **rest} if not rest:
            return parse_chat(chat)
        case {"prompt": str(), "response": str(), **rest} if not rest:
            return Completion(**data)
        case {"text": str(text), **rest} if not rest:
            return text
    found = ", ".join(sorted(data)) if isinstance(data, dict) else ""
    raise InvalidRequest([Problem("", f"has {found or 'no fields'}", _FORMS)])


# --- tokens


class _Tokens(NamedTuple):
    ids: list[int]
    targets: list[int]
    start: int  # of the generated part, for selectors
    messages: Sequence | None  # spans of the messages before it


def samples(
    engine: HFEngine, sources: Sequence[Source], tokens: str = "all", prompt: str | None = None, name: str = "texts"
) -> list[TrainingSample]:
    """Tokenize all texts; a `prompt` is put before each and leaves the targets as they are."""
    named = ((f"{name}[{i}]", source) for i, source in enumerate(sources))
    return parse_all(named, lambda source: _sample(engine, source, tokens, prompt))


def _sample(engine: HFEngine, source: Source, tokens: str, prompt: str | None) -> TrainingSample:
    if isinstance(source, str):
        source = Completion(prompt="", response=source)
    found = _completion(engine, source, prompt) if isinstance(source, Completion) else _spoken(engine, source, prompt)
    if not found.targets:
        raise InvalidRequest([Problem("", "has no token that counts", "give an answer, or a text of two tokens")])
    ids = found.ids[: found.targets[-1] + 1]
    if engine.facts.context and len(ids) > engine.facts.context:
        what = f"has {len(ids)} tokens, the context of {engine.facts.name} holds {engine.facts.context}"
        raise InvalidRequest([Problem("", what, "shorten or cut it")])
    try:
        steered = resolve(tokens, found.start, found.messages, False, len(ids))
    except SelectorError as error:
        raise InvalidRequest([Problem.of("tokens", error)]) from None
    if not steered.count(len(ids) - 1):
        raise InvalidRequest([Problem("tokens", f"{tokens!r} selects no token of this text", "widen it")])
    return TrainingSample(ids, found.targets, steered)


def _completion(engine: HFEngine, source: Completion, prompt: str | None) -> _Tokens:
    def encode(text: str, special: bool = False) -> list[int]:
        return list(engine.tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []  # type: ignore[arg-type]

    before = encode(source.prompt)
    body = encode(source.response)
    whole = encode(source.response, special=True)
    n_special = len(whole) - len(body)
    lead = whole[:n_special] if whole[n_special:] == body else []  # the token that begins every text, if there is one
    ids = [*lead, *(encode(f"{prompt}\n\n") if prompt else []), *before, *body]
    start = len(ids) - len(body)
    # Nothing predicts the first token of a plain text, so it is no target with a prompt before it, either.
    first = start + (not lead and not before)
    return _Tokens(ids, list(range(first, len(ids))), max(start, 1), None)


def _spoken(engine: HFEngine, chat: Sequence, prompt: str | None) -> _Tokens:
    messages = parse_chat(chat)
    if prompt:
        head, *rest = messages
        if head.role != "system" and takes_system(engine.sync):
            messages = [Message(role="system", content=prompt), *messages]
        else:
            messages = [Message(role=head.role, content=f"{prompt}\n\n{head.content}"), *rest]
    rendered = engine.render(messages)
    if rendered.messages is None:
        what = f"the chat template of {engine.facts.name} rewrites messages, so answers cannot be told apart"
        raise InvalidRequest([Problem("messages", what, "give prompt and response as plain text")])
    ids = rendered.token_ids
    spans = rendered.messages
    targets: list[int] = []
    last = 0
    for i, span in enumerate(spans):
        if span.role == "assistant":
            start, stop = span.content
            ends = stop < len(ids) and ids[stop] in engine.context.eos
            targets += range(start, stop + ends)
            last = i
    return _Tokens(ids, targets, spans[last].content[0], spans[:last])
