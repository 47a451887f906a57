"""Chat messages."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem


class Message(Spec):
    """One turn of a chat; a plain dict with the same two keys is also accepted."""

    role: str = Field(min_length=1)
    content: str


Chat = Sequence[Message | Mapping[str, str]]


def parse_chat(chat: Chat) -> list[Message]:
    """Return the messages of a chat, or refuse it with all problems."""
    problems: list[Problem] = []
    messages: list[Message] = []
    if not isinstance(chat, list | tuple):
        what = f"a chat is a list of messages, not {type(chat).__name__}"
        raise InvalidRequest([Problem("messages", what, 'write [{"role": "user", "content": "…"}]')])
    if not chat:
        problems.append(Problem("messages", "the chat is empty", "give at least one message"))
    for i, message in enumerate(chat):
        try:
            messages.append(message if isinstance(message, Message) else Message.parse(message))
        except InvalidRequest as error:
            problems += [problem.under(f"messages[{i}]") for problem in error.problems]
    if problems:
        raise InvalidRequest(problems)
    return messages
