"""Tokens of the prompt that a request asks to be told: `"prompt": "message=2"`, a selector as everywhere."""

from collections.abc import Iterator
from json.encoder import encode_basestring_ascii as quoted

from steerscope.engines.detokenizer import Decoder, Detokenizer
from steerscope.engines.plan import Prompt
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Interval, SelectorError, resolve


def chosen(selector: str, prompt: Prompt) -> list[Interval]:
    p = len(prompt.token_ids)
    try:
        return list(resolve(selector, p, prompt.messages, prompt.open_message, p).within(0, p))
    except SelectorError as error:
        what, _, remedy = str(error).partition("; ")
        raise InvalidRequest([Problem("steerscope.prompt", what, remedy or "choose other tokens")]) from None


def told(decoder: Decoder, prompt: Prompt, intervals: list[Interval]) -> str:
    """As JSON: position, id and text of each. A character of several tokens stands at the last of them."""
    tokens = (one for interval in intervals for one in _texts(decoder, prompt.token_ids, *interval))
    return ",".join(f'{{"position":{at},"id":{prompt.token_ids[at]},"t":{quoted(text)}}}' for at, text in tokens)


def _texts(decoder: Decoder, ids: list[int], start: int, stop: int) -> Iterator[tuple[int, str]]:
    text = Detokenizer(decoder)
    if start:
        text.push(ids[start - 1])  # some tokenizers drop a leading space where a text begins
    for at in range(start, stop):
        yield at, text.push(ids[at]) + (text.flush() if at == stop - 1 else "")
