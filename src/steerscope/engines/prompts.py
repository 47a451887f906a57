"""From what a user gives to prompts: texts, ids and chats, each checked."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from steerscope.engines.chat import render_chat
from steerscope.engines.options import ChatOptions
from steerscope.engines.plan import Prompt
from steerscope.engines.results import PromptLike, TokenPrompt
from steerscope.specs.chat import Chat, parse_chat
from steerscope.specs.errors import InvalidRequest, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def tokenized(tokenizer: "PreTrainedTokenizerBase", prompt: PromptLike) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, TokenPrompt) and isinstance(prompt.token_ids, Iterable):
        return Prompt(list(prompt.token_ids))
    if not isinstance(prompt, str):
        what = f"a prompt is text or TokenPrompt, not {type(prompt).__name__}"
        raise InvalidRequest([Problem("prompt", what, "wrap token ids in TokenPrompt([...])")])
    check_text(prompt, "prompt")
    return Prompt(list(tokenizer(prompt)["input_ids"]) if prompt else [])  # type: ignore[arg-type]


def rendered(
    tokenizer: "PreTrainedTokenizerBase", name: str, chat: Chat, options: ChatOptions, context: int | None
) -> Prompt:
    """By the chat template of the model `name`."""
    messages = parse_chat(chat)
    for i, message in enumerate(messages):
        check_text(message.content, f"messages[{i}].content")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest([Problem("messages", f"{name} has no chat template", "use generate()")])
    continued, extra = options.get("continue_final_message", False), options.get("template_options") or {}
    found = render_chat(tokenizer, messages, continued, extra, context)  # type: ignore[arg-type]
    return Prompt(found.token_ids, found.messages, found.open_message)
