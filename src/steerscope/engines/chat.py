"""Chats to tokens, with a proof of where each message's text lies.

The template is rendered twice: with the real messages and with a unique marker in place of each content. If putting
the contents (as they are, or stripped) in place of the markers gives exactly the real text, the spans are proven;
if not, the template rewrites messages and no span is claimed. Tokens follow from the tokenizer's character offsets.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from steerscope.engines.options import TemplateOptions
from steerscope.specs.chat import Message
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Interval, MessageSpan

_MARKER = re.compile("\ue000([0-9]+)\ue001")
_MOST_WHOLE = 128  # messages whose template text is told apart: it takes a rendering for each


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: object) -> str: ...
    def __call__(self, text: str, **options: bool) -> Mapping[str, list]: ...


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    token_ids: list[int]
    messages: tuple[MessageSpan, ...] | None  # None: the spans could not be proven
    open_message: bool


def render_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    continue_final: bool,
    options: TemplateOptions,
    context: int | None = None,
) -> RenderedChat:
    """Return the prompt for the next assistant message, or, with `continue_final`, one that ends inside the last
    message. A prompt longer than `context`, which will be refused, gets no spans."""
    _check_options(tokenizer, options)
    if continue_final and messages[-1].role != "assistant":
        what = f"the last message is from {messages[-1].role!r}"
        raise InvalidRequest([Problem("messages", what, "end with an assistant message to continue it")])

    def render(contents: Sequence[str], prompt: bool) -> str:
        conversation = [{"role": m.role, "content": c} for m, c in zip(messages, contents, strict=False)]
        try:
            return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt, **options)
        except Exception as error:  # templates raise what they like; the message is theirs
            what = f"the chat template refuses this chat ({error})"
            raise InvalidRequest(
                [Problem("messages", what, "change the roles, or use generate() with your own text")]
            ) from error

    contents = [message.content for message in messages]
    text = render(contents, prompt=not continue_final)
    spans = _content_spans(text, contents, render, not continue_final)
    if continue_final:
        if spans is None:
            what = "the chat template rewrites messages, so the last one cannot be continued"
            raise InvalidRequest([Problem("messages", what, "use generate() with your own text")])
        text = text[: spans[-1][1]]
    fast = bool(getattr(tokenizer, "is_fast", False))  # a slow one cannot tell where a token's text lies
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
    token_ids, offsets = list(encoded["input_ids"]), _untrimmed(encoded["offset_mapping"] if fast else [])
    if spans is None or not fast or (context is not None and len(token_ids) > context):
        return RenderedChat(text, token_ids, None, continue_final)
    wholes = _whole_spans(text, contents, spans, render, continue_final) if len(messages) <= _MOST_WHOLE else None
    return RenderedChat(text, token_ids, _message_spans(messages, spans, wholes, offsets), continue_final)


def _message_spans(
    messages: Sequence[Message], spans: Sequence[Interval], wholes: Sequence[Interval] | None, offsets: list[Interval]
) -> tuple[MessageSpan, ...]:
    """Turn spans of characters into spans of tokens."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    return tuple(
        MessageSpan(
            index=i,
            role=message.role,
            content=_to_tokens(spans[i], places),
            whole=None if wholes is None else _to_tokens(wholes[i], places),
        )
        for i, message in enumerate(messages)
    )


def _check_options(tokenizer: ChatTokenizer, options: TemplateOptions) -> None:
    """Only variables of the template are options. The function that renders it has arguments of its own under the same
    names: `chat_template` would run a program from the request in place of the model's template."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    taken = [name for name in options if name in own and own[name].kind is not inspect.Parameter.VAR_KEYWORD]
    if taken:
        what = "is not a variable of the chat template"
        raise InvalidRequest([Problem(f"template_options.{name}", what, "leave it out") for name in taken])


class _Render(Protocol):
    def __call__(self, contents: Sequence[str], prompt: bool) -> str: ...


def _content_spans(text: str, contents: Sequence[str], render: _Render, prompt: bool) -> list[Interval] | None:
    """Character spans of the contents in the rendered text, None when they cannot be proven."""
    markers = [f"\ue000{i}\ue001" for i in range(len(contents))]
    try:
        marked = render(markers, prompt)
    except InvalidRequest:  # a template that reads contents, e.g. JSON arguments
        return None
    parts = _MARKER.split(marked)  # the template's own text, and between it the numbers of the contents
    own = parts[::2]
    if parts[1::2] != [str(i) for i in range(len(contents))] or not text.startswith(own[0]):
        return None
    spans: list[Interval] = []
    at = len(own[0])  # in the real text
    for content, behind in zip(contents, own[1:], strict=True):
        # What stands behind decides between the two: white space there may be the content's or the template's.
        shown = next((c for c in (content, content.strip()) if text.startswith(c + behind, at)), None)
        if shown is None:
            return None
        spans.append((at, at + len(shown)))
        at += len(shown) + len(behind)
    return spans if at == len(text) else None


def _whole_spans(
    text: str, contents: Sequence[str], spans: Sequence[Interval], render: _Render, continued: bool
) -> list[Interval] | None:
    """Spans with the template's own text: each message adds to the rendering of those before it, or None."""
    ends = []
    for count in range(1, len(contents) + 1):
        if continued and count == len(contents):
            ends.append(len(text))
            break
        try:
            prefix = render(contents[:count], False)
        except InvalidRequest:
            return None
        if not text.startswith(prefix):
            return None
        ends.append(len(prefix))
    wholes = list(zip([0, *ends[:-1]], ends, strict=True))
    # A message that is put into another one's turn (Gemma's system message) has no text of its own around it.
    hold = all(a <= start and stop <= b for (a, b), (start, stop) in zip(wholes, spans, strict=True))
    return wholes if hold else None


def _untrimmed(offsets: Sequence[Interval]) -> list[Interval]:
    """Some tokenizers (GPT-NeoX) trim white space off their offsets; a token of nothing else gets its place back."""
    placed: list[Interval] = []
    for a, b in offsets:
        end = placed[-1][1] if placed else 0
        placed.append((end, b) if a == b else (a, b))
    return placed


def _to_tokens(span: Interval, places: np.ndarray) -> Interval:
    """The tokens that hold any character of the span; `places` [tokens, 2] are their offsets."""
    (start, stop), (a, b) = span, places.T
    inside = np.flatnonzero(np.maximum(a, start) < np.minimum(b, stop))
    if len(inside):
        return int(inside[0]), int(inside[-1]) + 1
    behind = np.flatnonzero(a >= start)
    after = int(behind[0]) if len(behind) else len(places)
    return after, after
