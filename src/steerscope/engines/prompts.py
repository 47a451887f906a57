"""From what a user gives to prompts: texts, ids and chats, each checked.

For a chat it is proven where each message's text lies. The template is rendered twice: with the real messages and with
a unique marker in place of each content. If putting the contents (as they are, or stripped) in place of the markers
gives exactly the real text, the spans are proven; if not, the template rewrites messages and no span is claimed.
Tokens follow from the tokenizer's character offsets.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steerscope.engines.options import ChatOptions, TemplateOptions
from steerscope.engines.plan import Prompt
from steerscope.engines.results import PromptLike, TokenPrompt
from steerscope.specs.chat import Chat, Message, parse_chat
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Interval, MessageSpan

_MARKER = re.compile("\ue000([0-9]+)\ue001")
_MOST_WHOLE = 128  # messages up to which template text is located, with one rendering per message
_Render = Callable[[Sequence[str], bool], str]  # of contents, and whether an answer is to follow


def all_of(make: Callable[[Any], Prompt], items: Sequence[object]) -> list[Prompt]:
    """Prompts of all items, or one error with the problems of all of them."""
    made: list[Prompt] = []
    problems: list[Problem] = []
    for i, item in enumerate(items):
        try:
            made.append(make(item))
        except InvalidRequest as error:
            problems += [problem.under(f"prompts[{i}]") for problem in error.problems]
    if problems:
        raise InvalidRequest(problems)
    return made


def check_text(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that were not UTF-8, smuggled in as lone surrogates
        raise InvalidRequest([Problem(field, "the text is not valid Unicode", "send UTF-8")]) from None


def tokenized(tokenizer: Any, prompt: PromptLike) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, TokenPrompt) and isinstance(prompt.token_ids, Iterable):
        return Prompt(list(prompt.token_ids))
    if not isinstance(prompt, str):
        what = f"a prompt is text or TokenPrompt, not {type(prompt).__name__}"
        raise InvalidRequest([Problem("prompt", what, "wrap token ids in TokenPrompt([...])")])
    check_text(prompt, "prompt")
    return Prompt(list(tokenizer(prompt)["input_ids"]) if prompt else [])


@dataclass(frozen=True, slots=True)
class RenderedChat(Prompt):
    text: str = ""


def rendered(tokenizer: Any, name: str, chat: Chat, options: ChatOptions, context: int | None) -> RenderedChat:
    """By the chat template of the model `name`."""
    messages = parse_chat(chat)
    for i, message in enumerate(messages):
        check_text(message.content, f"messages[{i}].content")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest([Problem("messages", f"{name} has no chat template", "use generate()")])
    continued = options.get("continue_final_message", False)
    extra = options.get("template_options") or {}
    return render_chat(tokenizer, messages, continued, extra, context)


def render_chat(
    tokenizer: Any,
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
            remedy = "change the roles, or use generate() with your own text"
            raise InvalidRequest([Problem("messages", what, remedy)]) from error

    contents = [message.content for message in messages]
    text = render(contents, not continue_final)
    spans = _content_spans(text, contents, render, not continue_final)
    if continue_final:
        if spans is None:
            what = "the chat template rewrites messages, so the last one cannot be continued"
            raise InvalidRequest([Problem("messages", what, "use generate() with your own text")])
        text = text[: spans[-1][1]]
    fast = bool(getattr(tokenizer, "is_fast", False))  # a slow one cannot tell where a token's text lies
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
    token_ids = list(encoded["input_ids"])
    if spans is None or not fast or (context is not None and len(token_ids) > context):
        return RenderedChat(token_ids, None, continue_final, text)
    places = np.array(_untrimmed(encoded["offset_mapping"]), np.int64).reshape(-1, 2)
    wholes = _whole_spans(text, contents, spans, render, continue_final) if len(messages) <= _MOST_WHOLE else None
    contents_at = [_to_tokens(span, places) for span in spans]
    wholes_at = [None if span is None else _to_tokens(span, places) for span in wholes or [None] * len(spans)]
    found = (MessageSpan(i, m.role, contents_at[i], wholes_at[i]) for i, m in enumerate(messages))
    return RenderedChat(token_ids, tuple(found), continue_final, text)


def _check_options(tokenizer: Any, options: TemplateOptions) -> None:
    """Only variables of the template are options. The function that renders it has arguments of its own under the same
    names: `chat_template` would run a program from the request in place of the model's template."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    taken = [name for name in options if name in own and own[name].kind is not inspect.Parameter.VAR_KEYWORD]
    if taken:
        what = "is not a variable of the chat template"
        raise InvalidRequest([Problem(f"template_options.{name}", what, "leave it out") for name in taken])


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
    for count in range(1, len(contents) + (not continued)):
        try:
            prefix = render(contents[:count], False)
        except InvalidRequest:
            return None
        if not text.startswith(prefix):
            return None
        ends.append(len(prefix))
    ends += [len(text)] if continued else []
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
