"""Texts a vector is learned from, and their tokens with those that count.

A set is shipped (JSON in `data/`, with parts for training, validation and test) or a file of JSON Lines:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}    a chat
    {"prompt": "Once upon a time", "response": " there was …"}                                 its second half counts
    {"text": "There was …"}                                                                    all of it counts

Files of contrast data (`steerscope.extraction`) serve too: what is positive is learned from, and both sides give the
mean difference that training may begin with. In a chat only what the assistant says counts, and the token that ends it.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from steerscope.engines.hf import HFEngine
from steerscope.extraction.data import DatasetEntry, Examples, Text, load_examples
from steerscope.extraction.personas.definitions import load_personas
from steerscope.extraction.personas.rollouts import takes_system
from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.chat import Message, parse_chat
from steerscope.specs.errors import InvalidRequest, Problem, not_json
from steerscope.specs.tokens import Positions, SelectorError, resolve

_FORMS = 'write {"messages": …}, {"prompt": …, "response": …}, {"text": …}, or a pair {"positive": …, "negative": …}'
_SHIPPED = resources.files("steerscope.training") / "data"


class Completion(Spec):
    """A text of which only the second half counts."""

    prompt: str
    response: str


Source = Text | Completion


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """`validation` may be empty: then some of `train` are held out. `prompts` are told to the prompted baseline."""

    name: str
    train: tuple[Source, ...]
    validation: tuple[Source, ...] = ()
    test: tuple[Source, ...] = ()
    examples: Examples | None = None  # both sides of the training part
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Token ids up to the last that counts; `targets` are the positions of those that count, `steered` of the ops."""

    token_ids: list[int]
    targets: list[int]
    steered: Positions

    @property
    def width(self) -> int:
        """The last token is predicted and never fed."""
        return len(self.token_ids) - 1


def shipped_training_sets() -> list[str]:
    return sorted(file.name.removesuffix(".json") for file in _SHIPPED.iterdir() if file.name.endswith(".json"))


def load_training_set(source: str | Path) -> TrainingSet:
    """A shipped set by name, or a file; every bad line is named."""
    if str(source) in shipped_training_sets():
        return _shipped(str(source))
    path = Path(source)
    if not path.is_file():
        known = f"sets are {', '.join(shipped_training_sets())}"
        raise InvalidRequest([Problem(str(source), "is no file and no shipped set", known)])
    with reading(path, "file of training texts"):
        lines = [(i, line) for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if line.strip()]
    if lines and _is_contrast(lines[0][1]):
        examples = load_examples(path)
        positive = [text for text, yes in zip(examples.texts, examples.positive, strict=True) if yes]
        return TrainingSet(path.stem, tuple(positive), examples=examples)
    found = _each((line for _, line in lines), _line, lambda i: f"{path}:{lines[i][0]}")
    if not found:
        raise InvalidRequest([Problem(str(path), "holds no text", _FORMS)])
    return TrainingSet(path.stem, tuple(found))


def _shipped(name: str) -> TrainingSet:
    data = json.loads((_SHIPPED / f"{name}.json").read_text(encoding="utf-8"))
    pairs = [DatasetEntry(_chat(asked, yes), _chat(asked, no)) for asked, yes, no in data["train"]]
    validation, test = (tuple(_chat(asked, yes) for asked, yes, _ in data[part]) for part in ("validation", "test"))
    prompts = tuple(one.pos for one in load_personas("traits", [name])[0].instructions)
    learned = tuple(pair.positive for pair in pairs)
    return TrainingSet(name, learned, validation, test, Examples.of_pairs(pairs), prompts)


def _chat(question: str, answer: str) -> list[Message]:
    return [Message(role="user", content=question), Message(role="assistant", content=answer)]


def _is_contrast(line: str) -> bool:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and not {"label", "positive"}.isdisjoint(data)


def _line(line: str) -> Source:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest([Problem("", not_json(error), _FORMS)]) from None
    match data:
        case {"messages": chat, **rest} if not rest:
            return parse_chat(chat)
        case {"prompt": str(), "response": str(), **rest} if not rest:
            return Completion(**data)
        case {"text": str(text), **rest} if not rest:
            return text
    found = ", ".join(sorted(data)) if isinstance(data, dict) else ""
    raise InvalidRequest([Problem("", f"has {found or 'no fields'}", _FORMS)])


def _each(items: Iterable, make: Callable, name: Callable[[int], str]) -> list:
    """What is made of all items, or one error with the problems of all of them."""
    made, problems = [], []
    for i, item in enumerate(items):
        try:
            made.append(make(item))
        except InvalidRequest as error:
            problems += [problem.under(name(i)) for problem in error.problems]
    if problems:
        raise InvalidRequest(problems)
    return made


# --- tokens


def samples(
    engine: HFEngine, sources: Sequence[Source], tokens: str = "all", prompt: str | None = None, name: str = "texts"
) -> list[Sample]:
    """The tokens of all texts; with `prompt` each is told that first, and the same tokens count."""
    return _each(sources, lambda source: _sample(engine, source, tokens, prompt), lambda i: f"{name}[{i}]")


def _sample(engine: HFEngine, source: Source, tokens: str, prompt: str | None) -> Sample:
    if isinstance(source, str):
        source = Completion(prompt="", response=source)
    parts = _completion(engine, source, prompt) if isinstance(source, Completion) else _spoken(engine, source, prompt)
    ids, targets, start, messages = parts
    if not targets:
        raise InvalidRequest([Problem("", "has no token that counts", "give an answer, or a text of two tokens")])
    ids = ids[: targets[-1] + 1]
    if engine.facts.context and len(ids) > engine.facts.context:
        what = f"has {len(ids)} tokens, the context of {engine.facts.name} holds {engine.facts.context}"
        raise InvalidRequest([Problem("", what, "shorten or cut it")])
    try:
        steered = resolve(tokens, start, messages, False, len(ids))
    except SelectorError as error:
        what, _, remedy = str(error).rpartition("; ")
        raise InvalidRequest([Problem("tokens", what, remedy)]) from None
    if not steered.count(len(ids) - 1):  # the last is never fed
        raise InvalidRequest([Problem("tokens", f"{tokens!r} selects no token of this text", "widen it")])
    return Sample(ids, targets, steered)


def _completion(engine: HFEngine, source: Completion, prompt: str | None) -> tuple:
    def encode(text: str, special: bool = False) -> list[int]:
        return list(engine.tokenizer(text, add_special_tokens=special)["input_ids"]) if text else []  # type: ignore[arg-type]

    before, body = encode(source.prompt), encode(source.response)
    whole = encode(source.response, special=True)
    more = len(whole) - len(body)
    lead = whole[:more] if whole[more:] == body else []  # the token that begins every text, where there is one
    told = encode(f"{prompt}\n\n") if prompt else []
    ids = [*lead, *told, *before, *body]
    start = len(ids) - len(body)
    # Nothing predicts the first token of a plain text, so it does not count when a prompt stands before it, either.
    first = start + (not lead and not before)
    return ids, list(range(first, len(ids))), max(start, 1), None


def _spoken(engine: HFEngine, chat: Sequence, prompt: str | None) -> tuple:
    messages = parse_chat(chat)
    if prompt:
        messages = _told(engine, messages, prompt)
    rendered = engine.render(messages)
    if rendered.messages is None:
        what = f"the chat template of {engine.facts.name} rewrites messages, so answers cannot be told apart"
        raise InvalidRequest([Problem("messages", what, "give prompt and response as plain text")])
    ids, spans = rendered.token_ids, rendered.messages
    answers = [span.content for span in spans if span.role == "assistant"]
    targets = [at for start, stop in answers for at in range(start, stop + _ends(engine, ids, stop))]
    last = next((i for i in reversed(range(len(spans))) if spans[i].role == "assistant"), 0)
    return ids, targets, spans[last].content[0], spans[:last]


def _ends(engine: HFEngine, ids: list[int], at: int) -> bool:
    return at < len(ids) and ids[at] in engine.context.eos


def _told(engine: HFEngine, messages: list[Message], prompt: str) -> list[Message]:
    """With a system message, or in front of the first one where the template takes none."""
    head, *rest = messages
    if head.role != "system" and takes_system(engine.sync):
        return [Message(role="system", content=prompt), *messages]
    return [Message(role=head.role, content=f"{prompt}\n\n{head.content}"), *rest]
