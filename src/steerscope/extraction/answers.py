"""Answers of a model to questions that a system message precedes."""

from collections.abc import Callable, Sequence

from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.specs.chat import Message
from steerscope.specs.errors import InvalidRequest, RequestFailed


def takes_system(engine: SyncEngine) -> bool:
    """Whether the chat template renders a system message; some templates refuse it, some drop it."""
    question = Message(role="user", content="Hello")
    try:
        first, second = (
            engine.aio.render([Message(role="system", content=text), question]) for text in ("A.", "Be a fox.")
        )
    except InvalidRequest:
        return False
    return first.token_ids != second.token_ids


def conversation(system: str, question: str, takes_system: bool) -> list[Message]:
    """Put `system` into a system message, or before the question where the template takes none."""
    if system and takes_system:
        return [Message(role="system", content=system), Message(role="user", content=question)]
    return [Message(role="user", content=f"{system}\n\n{question}" if system else question)]


def generate_each(
    generate: Callable[[int, int], list[Generation]], questions: Sequence[str]
) -> tuple[list[Generation | None], str]:
    """Return the finished answers, None where one failed, and why they failed.

    `generate` answers the questions of a range. The engine refuses a call as a whole, so a refused range is halved
    until the refused question is alone."""

    def answer(start: int, stop: int) -> tuple[list[Generation | None], list[str]]:
        try:
            return list(generate(start, stop)), []
        except RequestFailed as error:
            return list(error.completed) or [None] * (stop - start), [str(error)]
        except InvalidRequest as error:
            if stop - start == 1:
                return [None], [f"{questions[start][:60]!r}: {error}"]
        middle = (start + stop) // 2
        first, first_reasons = answer(start, middle)
        second, second_reasons = answer(middle, stop)
        return first + second, first_reasons + second_reasons

    done, reasons = answer(0, len(questions))
    return [one if one and one.finish_reason != "cancelled" else None for one in done], "\n".join(reasons)
