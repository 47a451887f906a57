"""What a request may be given beside its prompt, as typed keyword arguments shared by both faces of the engine."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from steerscope.lenses.stack import Weights
from steerscope.specs.capture import Capture
from steerscope.specs.errors import Problem
from steerscope.specs.steering import Ablate, Add, Cap, Steering
from steerscope.specs.watch import Watch

SteerLike = Steering | Add | Cap | Ablate
TemplateOptions = Mapping[str, str | int | float | bool | None]
T = TypeVar("T")
Each = T | Sequence[T | None] | None  # one for all prompts, or a list with one per prompt (None: nothing)


class ChatOptions(TypedDict, total=False):
    continue_final_message: bool  # the last message is the assistant's and goes on
    template_options: TemplateOptions  # passed to the chat template, e.g. {"enable_thinking": False}


class One(TypedDict, total=False):
    steer: SteerLike | None
    capture: Capture | None
    watch: Watch | None


class Many(TypedDict, total=False):
    steer: Each[SteerLike]
    capture: Each[Capture]
    watch: Each[Watch]


class PackKeywords(TypedDict, total=False):
    """How a registered pack is kept; see `lenses.reader.PackOptions`."""

    weights: Weights
    budget: int | None
    budget_bytes: int | None
    base_levels: int
    pinned: Sequence[str]
    any_model: bool
    workspace: int


class OneChat(One, ChatOptions): ...


class ManyChat(Many, ChatOptions): ...


class Stream(One, total=False):
    request_id: str | None  # a name to cancel it by


class StreamChat(Stream, ChatOptions): ...


def split(options: OneChat | ManyChat | StreamChat) -> tuple[ChatOptions, dict[str, Any]]:
    """Return the options of the chat's prompt, and the others; an unknown name is among these and is refused."""
    given: dict[str, Any] = dict(options)
    of_template = {name: given.pop(name) for name in ChatOptions.__annotations__ if name in given}
    return of_template, given  # type: ignore[return-value]


def per_prompt(
    spec: Each[T], kinds: tuple[type, ...], count: int, many: bool, name: str, problems: list[Problem]
) -> list[T | None]:
    """One spec for all prompts, or one per prompt."""
    given = spec if isinstance(spec, list | tuple) else [spec]
    wrong = {type(item).__name__ for item in given if item is not None and not isinstance(item, kinds)}
    if wrong:
        allowed = " or ".join(kind.__name__ for kind in kinds)
        problems.append(Problem(name, f"is {', '.join(sorted(wrong))}", f"give {allowed}"))
    if not isinstance(spec, list | tuple):
        return [spec] * count  # type: ignore[list-item]
    if not many:
        remedy = "wrap ops in Steering(ops=[...])" if name == "steer" else f"pass one {name}"
        problems.append(Problem(name, "a list goes with a list of prompts", remedy))
    elif len(spec) != count:
        problems.append(Problem(name, f"{len(spec)} specs for {count} prompts", "give one per prompt, None for none"))
    return list(spec)
