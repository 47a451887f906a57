"""Examples to rows: which tokens stand for an example, and one pass of the engine over all layers.

A `TokenChoice` returns the selector of an example's tokens. Their mean is computed on the device, so an example costs
one float32 row per layer, whatever its length.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from steerscope.capture.rows import Rows
from steerscope.engines.plan import Prompt
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.data import Text, parse_all
from steerscope.specs import Capture, InvalidRequest, Problem, Sampling
from steerscope.specs.chat import parse_chat
from steerscope.specs.steering import LayersLike, Site, checked_layers

_READ_ONLY = Sampling(max_tokens=1)  # p prompt tokens and 1 generated one: p rows, all of them of the prompt
_BATCH = 256  # examples whose rows are held together
Decode = Callable[[list[int]], str]
TokenChoice = Callable[[Prompt, Decode], str]


def last(count: int = 1) -> TokenChoice:
    """Choose the last tokens, which have attended to all of the text."""
    if count < 1:
        raise InvalidRequest([Problem("tokens", f"the last {count} are asked for", "choose 1 or more")])

    def choose(prompt: Prompt, _: Decode) -> str:
        n = len(prompt.token_ids)
        if n < count:
            raise InvalidRequest([Problem("", f"has {n} tokens, {count} are needed", "ask for fewer last tokens")])
        return f"positions=[-{count}:]"

    return choose


def _response(prompt: Prompt, _: Decode) -> str:
    """Choose the text of the chat's last message, which is the assistant's."""
    if not prompt.messages or prompt.messages[-1].role != "assistant":
        what = "has no response" if prompt.messages else "is no chat whose messages can be told apart"
        raise InvalidRequest([Problem("", what, "give chats that end with an assistant message")])
    return "message=-1"


def _marker(text: str) -> TokenChoice:
    """Choose the tokens that hold the last occurrence of a text."""
    if not text:
        raise InvalidRequest([Problem("tokens", "the marker is empty", "write marker=TEXT")])

    def choose(prompt: Prompt, decode: Decode) -> str:
        ids = prompt.token_ids
        start = decode(ids).rfind(text)
        if start < 0:
            raise InvalidRequest([Problem("", f"does not hold {text!r}", "add it, or choose another marker")])
        ends = [len(decode(ids[: i + 1])) for i in range(len(ids))]
        first = next(i for i, end in enumerate(ends) if end > start)
        final = next(i for i, end in enumerate(ends) if end >= start + len(text))
        return f"positions=[{first}:{final + 1}]"

    return choose


def parse_choice(text: str) -> TokenChoice:
    """Parse `last`, `last=3`, `all`, `response`, `marker=TEXT` or `position=-2`.

    `all` leaves out the first token: models use it as an attention sink, and in SmolLM2 its row is 150 times as long as
    the others."""
    name, _, value = text.partition("=")
    number = int(value) if re.fullmatch(r"-?\d{1,9}", value) else None
    match name:
        case "marker":
            return _marker(value)
        case "response" if name == text:
            return _response
        case "all" if name == text:
            return lambda *_: "prompt & !positions=[0]"
        case "last" if number is not None or name == text:
            return last(1 if number is None else number)
        case "position" if number is not None:
            return lambda *_: f"positions=[{number}]"
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
    """Return the mean row of each example's chosen tokens, [texts, layers, hidden] in float32; `name` is for errors."""
    tokenizer = engine.aio.tokenizer

    def prepare(text: Text) -> tuple[Prompt, Capture]:
        prompt = as_prompt(engine, text)
        selector = tokens(prompt, lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
        return prompt, Capture.parse({"layers": layers, "sites": site, "reduce": "mean", "tokens": selector})

    named = ((name(i), text) for i, text in enumerate(checked_texts(texts)))
    prompts, captures = zip(*parse_all(named, prepare), strict=True)
    found: list[Tensor] = []
    for start in range(0, len(prompts), _BATCH):
        try:
            rows = captured(engine, list(prompts[start : start + _BATCH]), captures[start : start + _BATCH])
        except InvalidRequest as error:
            raise InvalidRequest(_renamed(problem, name, start) for problem in error.problems) from None
        found += [torch.stack([one[layer] for layer in one.layers]).cpu() for one in rows]
    return torch.stack(found)


def _renamed(problem: Problem, name: Callable[[int], str], start: int) -> Problem:
    """Replace the engine's number of a prompt by the name of its text."""
    found = re.fullmatch(r"prompts\[(\d+)\]\.?(.*)", problem.field)
    if found is None:
        return problem
    return Problem(found[2], problem.what, problem.remedy).under(name(start + int(found[1])))


def captured(engine: SyncEngine, prompts: list[Prompt] | list[str], capture: Capture | Sequence[Capture]) -> list[Rows]:
    """Return the rows of one forward over each prompt; their buffers are released at once."""
    done = engine.generate(prompts, _READ_ONLY, capture=capture)
    rows = [generation.rows for generation in done]
    for generation in done:
        if generation.capture:
            generation.capture.close()
    return rows


def layer_numbers(engine: SyncEngine, layers: LayersLike) -> tuple[int, ...]:
    """Return the layers, or refuse those that the model does not have."""
    facts = engine.facts
    wanted = checked_layers(layers)
    if wanted == "all":
        return tuple(range(facts.layers))
    if beyond := [str(layer) for layer in wanted if layer >= facts.layers]:
        what = f"{', '.join(beyond)} is out of range"
        remedy = f"{facts.name} has layers 0–{facts.layers - 1}"
        raise InvalidRequest([Problem("layers", what, remedy)])
    return wanted


def checked_texts(texts: Sequence[Text]) -> Sequence[Text]:
    if isinstance(texts, str) or not texts:
        raise InvalidRequest([Problem("texts", "no list of texts was given", "give at least one, in a list")])
    return texts


def as_prompt(engine: SyncEngine, text: Text) -> Prompt:
    if isinstance(text, str):
        return engine.aio.tokenize(text)
    # A chat that ends with an answer is read to the answer's end: no template text comes behind it.
    ended = parse_chat(text)[-1].role == "assistant"
    return engine.aio.render(text, continue_final_message=ended)
