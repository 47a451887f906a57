"""Examples to rows: which tokens stand for an example, and one pass of the engine over all layers.

A `TokenChoice` says of each example which of its tokens to read. The mean over them is taken on the device while the
model runs, so an example leaves one float32 row per layer, however long it is.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from steerscope.capture.rows import Rows
from steerscope.engines.plan import Prompt
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.data import Text
from steerscope.specs.capture import Capture
from steerscope.specs.chat import parse_chat
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import LayersLike, Site, checked_layers

_READ_ONLY = Sampling(max_tokens=1)  # p prompt tokens and 1 generated one: p rows, all of them of the prompt
_AT_ONCE = 256  # examples: their rows are held at the same time


@dataclass(frozen=True, slots=True)
class Sample:
    """One example as the model sees it."""

    prompt: Prompt
    decode: Callable[[list[int]], str]


TokenChoice = Callable[[Sample], str]  # to a selector of tokens


def last(count: int = 1) -> TokenChoice:
    """The last tokens, which have seen all of the text."""
    if count < 1:
        raise InvalidRequest([Problem("tokens", f"the last {count} are asked for", "choose 1 or more")])

    def choose(sample: Sample) -> str:
        found = len(sample.prompt.token_ids)
        if found < count:
            raise InvalidRequest([Problem("", f"has {found} tokens, {count} are needed", "ask for fewer last tokens")])
        return f"positions=[-{count}:]"

    return choose


def all_tokens() -> TokenChoice:
    """Every token but the first: models use that one as an attention sink, and in SmolLM2 its row is 150 times as long
    as all others."""
    return lambda _: "prompt & !positions=[0]"


def response() -> TokenChoice:
    """The text of the chat's last message, which is the assistant's."""

    def choose(sample: Sample) -> str:
        if not sample.prompt.messages or sample.prompt.messages[-1].role != "assistant":
            what = "has no response" if sample.prompt.messages else "is no chat whose messages can be told apart"
            raise InvalidRequest([Problem("", what, "give chats that end with an assistant message")])
        return "message=-1"

    return choose


def marker(text: str) -> TokenChoice:
    """The tokens that hold the last occurrence of a text."""
    if not text:
        raise InvalidRequest([Problem("tokens", "the marker is empty", "write marker=TEXT")])

    def choose(sample: Sample) -> str:
        ids = sample.prompt.token_ids
        start = sample.decode(ids).rfind(text)
        if start < 0:
            raise InvalidRequest([Problem("", f"does not hold {text!r}", "add it, or choose another marker")])
        ends = [len(sample.decode(ids[: i + 1])) for i in range(len(ids))]
        first = next(i for i, end in enumerate(ends) if end > start)
        final = next(i for i, end in enumerate(ends) if end >= start + len(text))
        return f"positions=[{first}:{final + 1}]"

    return choose


def position(index: int) -> TokenChoice:
    """One token, counted from the start, or from the end where negative."""
    return lambda _: f"positions=[{index}]"


def parse_choice(text: str) -> TokenChoice:
    """`last`, `last=3`, `all`, `response`, `marker=TEXT` or `position=-2`."""
    name, _, value = text.partition("=")
    number = int(value) if re.fullmatch(r"-?\d{1,9}", value) else None
    if text == "last":
        return last()
    if name == "last" and number is not None:
        return last(number)
    if name == "position" and number is not None:
        return position(number)
    if name == "marker":
        return marker(value)
    if text in ("all", "response"):
        return all_tokens() if text == "all" else response()
    forms = "write last, last=3, all, response, marker=TEXT or position=-2"
    raise InvalidRequest([Problem("tokens", f"cannot read {text!r}", forms)])


def read_rows(
    engine: SyncEngine,
    texts: Sequence[Text],
    tokens: TokenChoice,
    *,
    layers: LayersLike = "all",
    site: Site = "resid_post",
    name: Callable[[int], str] = "texts[{}]".format,
) -> Tensor:
    """[texts, layers, hidden], float32: the mean row of each example's chosen tokens; `name` is for errors."""
    if isinstance(texts, str) or not texts:
        raise InvalidRequest([Problem("texts", "no list of texts was given", "give at least one, in a list")])
    prompts, selectors = _prompts(engine, texts, tokens, name)
    found: list[Tensor] = []
    for i in range(0, len(prompts), _AT_ONCE):
        wanted = {"layers": layers, "sites": site, "reduce": "mean"}
        captures = [Capture.parse({**wanted, "tokens": selector}) for selector in selectors[i : i + _AT_ONCE]]
        with _naming(name, i):
            rows = captured(engine, prompts[i : i + _AT_ONCE], captures)
        found += [torch.stack([one[layer] for layer in one.layers]).cpu() for one in rows]
    return torch.stack(found)


@contextmanager
def _naming(name: Callable[[int], str], first: int) -> Iterator[None]:
    """The engine counts the prompts of a call: its problems are told of the texts they belong to."""
    try:
        yield
    except InvalidRequest as error:
        problems: list[Problem] = []
        for problem in error.problems:
            found = re.fullmatch(r"prompts\[(\d+)\]\.?(.*)", problem.field)
            inner = Problem(found[2], problem.what, problem.remedy) if found else problem
            problems.append(inner.under(name(first + int(found[1]))) if found else inner)
        raise InvalidRequest(problems) from None


def captured(engine: SyncEngine, prompts: list[Prompt], capture: Capture | Sequence[Capture]) -> list[Rows]:
    """The rows of one forward over each prompt; their room is given back at once."""
    done = engine.generate(prompts, _READ_ONLY, capture=capture)
    rows = [generation.rows for generation in done]
    for generation in done:
        if generation.capture:
            generation.capture.close()
    return rows


def layer_numbers(engine: SyncEngine, layers: LayersLike) -> tuple[int, ...]:
    wanted = checked_layers(layers)
    return tuple(range(engine.facts.layers)) if wanted == "all" else wanted


def _prompts(
    engine: SyncEngine, texts: Sequence[Text], tokens: TokenChoice, name: Callable[[int], str]
) -> tuple[list[Prompt], list[str]]:
    """Prompts and selectors of all texts, or one error that names every bad text."""
    prompts, selectors, problems = [], [], []
    tokenizer = engine.aio.tokenizer

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    for i, text in enumerate(texts):
        try:
            prompts.append(as_prompt(engine, text))
            selectors.append(tokens(Sample(prompts[-1], decode)))
        except InvalidRequest as error:
            problems += [problem.under(name(i)) for problem in error.problems]
    if problems:
        raise InvalidRequest(problems)
    return prompts, selectors


def as_prompt(engine: SyncEngine, text: Text) -> Prompt:
    if isinstance(text, str):
        return engine.aio.tokenize(text)
    # A chat that ends with an answer is read to the answer's end: no template text comes behind it.
    ended = parse_chat(text)[-1].role == "assistant"
    return engine.aio.render(text, continue_final_message=ended)
