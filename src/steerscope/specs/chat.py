"""Chat messages."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, problems_of


class Message(Spec):
    """One turn of a chat; a plain dict with the same two keys is also accepted."""

    role: str = Field(min_length=1)
    content: str


Chat = Sequence[Message | Mapping[str, str]]


_CHAT = TypeAdapter(Annotated[list[Message], Field(min_length=1)])


def parse_chat(chat: Chat) -> list[Message]:
    """Return the messages of a chat, or refuse it with all problems."""
    try:
        return _CHAT.validate_python(chat)
    except ValidationError as error:
        raise InvalidRequest(problem.under("messages") for problem in problems_of(error)) from None
