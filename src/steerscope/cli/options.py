"""What the commands share: options made from the fields of settings models, engines, answers, tables, errors."""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args, get_origin

import typer
from pydantic import Field
from pydantic.fields import FieldInfo
from typer import Argument, Option

import steerscope as ss
from steerscope.specs.base import Spec
from steerscope.specs.errors import Problem

if TYPE_CHECKING:
    from steerscope.engines.load import LoadOptions
    from steerscope.engines.results import Event
    from steerscope.engines.sync import SyncEngine

S = TypeVar("S", bound=Spec)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Given(Generic[S]):
    """Values of the options that fill a settings model; options that are not given and have no default are left out."""

    model: type[S]
    values: Mapping[str, Any]

    def parse(self, **more: object) -> S:
        return self.model.parse({**self.values, **more})


class Fields:
    """Options for the named fields of a model, or for all, as the annotation of one parameter of a command.

    `names` maps a field to the names of its option where they differ; `defaults` replace those of fields.
    """

    def __init__(
        self,
        settings: type[Spec],
        fields: str = "",
        *,
        panel: str | None = None,
        names: Mapping[str, tuple[str, ...]] | None = None,
        **defaults: object,
    ) -> None:
        self.model = settings
        self.fields = fields.split() or list(settings.model_fields)
        self.panel = panel
        self.names = names or {}
        self.defaults = defaults

    def options(self) -> list[inspect.Parameter]:
        return [self._option(name, self.model.model_fields[name]) for name in self.fields]

    def _option(self, name: str, field: FieldInfo) -> inspect.Parameter:
        declared = self.names.get(name, ("--" + name.replace("_", "-"),))
        option = typer.Option(*declared, help=field.description, rich_help_panel=self.panel)
        default = self.defaults.get(name, inspect.Parameter.empty if field.is_required() else field.default)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if default == () else default,
            annotation=Annotated[_option_type(field.annotation), option],
        )


def with_fields(command: F) -> F:
    """Give a command the options of its `Fields` parameters; the command receives one `Given` for each."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Fields] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        fields = [one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, Fields)]
        if fields:
            groups[parameter.name] = fields[0]
            parameters += fields[0].options()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def filled(**values: Any) -> Any:
        for name, fields in groups.items():
            given = {field: values.pop(field) for field in fields.fields}
            values[name] = Given(fields.model, {field: value for field, value in given.items() if value is not None})
        return command(**values)

    filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    filled.__annotations__ = {}  # typer reads the signature
    return filled  # type: ignore[return-value]


def _option_type(annotation: Any) -> Any:
    """Return the option's type: a list for a sequence, and text for what only a validator understands."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_option_type(part) for part in get_args(annotation) if part is not NoneType]
        return parts[0] | None if len(parts) == 1 else str | None
    if get_origin(annotation) is tuple:
        return list[Path] | None if annotation == tuple[Path, ...] else list[str] | None
    if get_origin(annotation) is Literal or annotation in (int, float, bool, Path):
        return annotation
    return str


# --- options and settings

REQUEST = "cli"  # id of the one request that runs

_MODEL = "smollm2-135m, a model directory, or a hub id."
ENGINE_PANEL = "Model and engine"
Model = Annotated[str, Argument(help=_MODEL)]
ModelName = Annotated[str, Option("--model", help=_MODEL)]
_STEER = (
    "FILE@LAYERS:SCALE adds a vector, FILE@LAYERS:cap=MIN..MAX caps it, FILE@LAYERS:ablate removes it; append "
    "';tokens=generated' to choose tokens. Or CAPPING_CONFIG.pt#EXPERIMENT. Repeatable."
)
Steer = Annotated[list[str] | None, Option(help=_STEER)]
System = Annotated[str | None, Option(help="System message.")]
AsChat = Annotated[bool, Option("--chat", help="Send PROMPT as a user's message through the chat template.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")]
Resume = Annotated[bool, Option("--resume", help="Continue a run in its folder.")]
Batch = Annotated[int, Option(min=1, help="Answers that are generated and saved together.")]
_JUDGE_SET = (
    "Setting of requests to the judge: max_tokens, max_completion_tokens, temperature, at_once, tries, timeout_s, "
    "pause_s or same_refusals. Repeatable."
)
JudgeSet = Annotated[list[str] | None, Option(metavar="NAME=VALUE", help=_JUDGE_SET)]


class EngineOptions(Spec):
    """Options of an engine, named like those of `steerscope.load`."""

    device: str | None = Field(default=None, description="cpu, cuda, cuda:1, …; default: a GPU if there is one.")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = Field(
        default=None, description="Type of the weights; default: float32 on a CPU, else as stored."
    )
    engine: Literal["hf", "vllm"] = Field(default="hf", description="hf: transformers; vllm: vLLM, where installed.")
    max_batch: int | None = Field(
        default=None, ge=1, description="Sequences that decode together; default: 64 with hf, vLLM's own with vllm."
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens computed between two steps of running streams; hf only, default: 512.",
    )


LocalEngine = Annotated[Given[EngineOptions], Fields(EngineOptions, "device dtype", panel=ENGINE_PANEL)]
Engine = Annotated[Given[EngineOptions], Fields(EngineOptions, "device dtype engine", panel=ENGINE_PANEL)]
BatchEngine = Annotated[
    Given[EngineOptions], Fields(EngineOptions, "device dtype engine max_batch", panel=ENGINE_PANEL)
]
ServerEngine = Annotated[Given[EngineOptions], Fields(EngineOptions, panel=ENGINE_PANEL)]


def sampling_fields(names: str, **defaults: Any) -> Fields:
    return Fields(ss.Sampling, names, panel="Sampling", **defaults)


def command_group(**options: Any) -> typer.Typer:
    """Return an app for the commands of one module; one without options and with one command is that command."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **options)


def judge_settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return an endpoint's arguments from `--judge-set` and the environment; `none` removes a setting from requests."""
    from steerscope.extraction.endpoint import SETTINGS

    found: dict[str, Any] = {"api_key": os.environ.get("OPENAI_API_KEY") or None}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if name not in SETTINGS or not equals:
            known = ", ".join(SETTINGS)
            raise mistake("--judge-set", f"{text!r} sets nothing", f"write NAME=VALUE with one of {known}")
        found[name] = None if value.lower() == "none" else _number(value)
    return found


def _number(text: str) -> int | float | str:
    """Return the number that a text is, else the text."""
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text


def mistake(field: str, what: str, remedy: str) -> "ss.InvalidRequest":
    return ss.InvalidRequest([Problem(field, what, remedy)])


def check_text(*texts: str) -> None:
    """Refuse lone surrogates: Python decodes bytes that are not UTF-8 so, and no tokenizer accepts them."""
    if any("\ud800" <= sign <= "\udfff" for text in texts for sign in text):
        raise mistake("prompt", "the text is not UTF-8", "convert it first")


def together(*steps: Callable[[], object]) -> list[Any]:
    """Return the results of all steps, or raise all their errors as one group."""
    results = []
    errors = []
    for step in steps:
        try:
            results.append(step())
        except (ss.SteerscopeError, ExceptionGroup) as error:  # a group comes from a nested call
            errors.append(error)
    if errors:
        raise ExceptionGroup("mistakes", errors)
    return results


def mistakes_of(error: Exception) -> list[str]:
    """Return one line per problem for the user; none when the error is a bug."""
    if isinstance(error, ExceptionGroup):
        return [line for part in error.exceptions for line in mistakes_of(part)]
    if isinstance(error, ss.InvalidRequest):
        return [str(problem) for problem in error.problems]
    known = isinstance(error, ss.SteerscopeError | OSError | UnicodeError) and not isinstance(error, BrokenPipeError)
    return [str(error)] if known else []


def note(text: str) -> None:
    """Print a dim line on stderr; stdout is for answers."""
    from rich.console import Console

    Console(stderr=True).print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


def table(head: Iterable[str], rows: Iterable[Iterable[str]], err: bool = False) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(*map(escape, head))
    for row in rows:
        drawn.add_row(*map(escape, row))
    is_terminal = (sys.stderr if err else sys.stdout).isatty()
    Console(stderr=err, width=None if is_terminal else 1000).print(drawn)  # a pipe gets whole lines


def facts(title: str, found: Mapping[str, object]) -> None:
    """Print names and values as a table, and leave out values that are None."""
    table((title, ""), ((name, str(value)) for name, value in found.items() if value is not None))


def open_engine(model: str, options: Given[EngineOptions], **more: object) -> "SyncEngine":
    """Load a model; `more` replaces options that were given."""
    asked = options.parse(**more)
    if asked.engine == "hf":
        check_device(asked.device)
    return ss.load(model, **load_options(asked, note))


def load_options(asked: EngineOptions, progress: Callable[[str], None]) -> "LoadOptions":
    return cast("LoadOptions", {**asked.model_dump(exclude_none=True), "progress": progress})


def check_device(device: str | None) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        what = str(error).splitlines()[0].rstrip(".")
        raise mistake(f"--device {device}", what, "use cpu, or a device that doctor lists") from None


def print_text(engine: "SyncEngine", events: "Iterator[Event]") -> "ss.Generation":
    """Print tokens as they come and return the generation."""

    def print_token(event: "Event") -> None:
        if isinstance(event, ss.TokenEvent):
            typer.echo(event.text, nl=False)

    generation = consume(engine, events, print_token)
    typer.echo()
    return generation


def consume(
    engine: "SyncEngine", events: "Iterator[Event]", on_event: "Callable[[Event], None] | None" = None
) -> "ss.Generation":
    """Return the generation of a stream. Ctrl-C cancels the request, which then ends with the tokens it has; a second
    Ctrl-C interrupts at once."""
    before = signal.getsignal(signal.SIGINT)

    def cancel(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        if not engine.cancel(REQUEST):
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, cancel)
    try:
        for event in events:
            if isinstance(event, ss.EndEvent):
                return event.generation
            if on_event is not None:
                on_event(event)
        raise AssertionError("a stream ends with an EndEvent")
    finally:
        signal.signal(signal.SIGINT, before)
        cast("Generator[Event]", events).close()  # before its engine is


def speed(generation: "ss.Generation") -> str:
    n_tokens = sum(len(choice.token_ids) for choice in generation.choices)
    seconds = max(choice.timings.total for choice in generation.choices)
    return speed_of(n_tokens, seconds, ", ".join(choice.finish_reason for choice in generation.choices))


def speed_of(n_tokens: int, seconds: float, reason: str | None) -> str:
    return f"{n_tokens} tokens in {seconds:.2f} s ({n_tokens / max(seconds, 1e-9):.1f} tokens/s), finish: {reason}"


def check_target(out: Path) -> None:
    """Refuse a file that cannot be written, before the work."""
    if out.is_dir() or not out.parent.is_dir():
        raise mistake(f"--out {out}", "is a folder, or in none", "name a file in a folder that exists")


def parts(text: str) -> list[str]:
    """Split an option at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(option: str, text: str, example: str) -> list[float]:
    """Read numbers with commas between them."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise mistake(option, f"cannot read {text!r} as numbers", f"write {example}") from None
