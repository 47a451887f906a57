"""What the commands share: options, opening a model, showing answers and tables, telling mistakes together."""

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

import steerscope as ss

if TYPE_CHECKING:
    from steerscope.engines.load import LoadOptions
    from steerscope.engines.results import Event
    from steerscope.engines.sync import SyncEngine

REQUEST = "cli"  # the one request that runs

_MODEL = "smollm2-135m, a model directory, or a hub id."
_RUN, _SAMPLING = "Model and engine", "Sampling"  # panels of --help
Model = Annotated[str, typer.Argument(help=_MODEL)]
ModelName = Annotated[str, typer.Option("--model", help=_MODEL)]
_STEER = (
    "FILE@LAYERS:SCALE adds a vector, FILE@LAYERS:cap=MIN..MAX caps it, FILE@LAYERS:ablate removes it; "
    "';tokens=generated' behind it says where. Or CAPPING_CONFIG.pt#EXPERIMENT. May be given again."
)
Steer = Annotated[list[str] | None, typer.Option(help=_STEER)]
System = Annotated[str | None, typer.Option(help="The system message.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, …; default: a GPU if there is one.", rich_help_panel=_RUN)
]
EngineName = Annotated[
    Literal["hf", "vllm"],
    typer.Option("--engine", help="hf: transformers; vllm: vLLM, where installed.", rich_help_panel=_RUN),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "auto"] | None,
    typer.Option(help="Type of the weights; default: float32 on a CPU, else as they are stored.", rich_help_panel=_RUN),
]
MaxBatch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sequences that decode together; default: 64 with hf, with vLLM its own.", rich_help_panel=_RUN
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Keep the most likely tokens that hold this much probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option(help="Keep this many most likely tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(help="Keep tokens at least this likely, relative to the most likely one.", rich_help_panel=_SAMPLING),
]
Penalty = Annotated[
    float, typer.Option(help="Above 1, tokens seen before become less likely.", rich_help_panel=_SAMPLING)
]
Window = Annotated[
    int | None, typer.Option(help="Only this many last tokens count as seen.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SAMPLING)]
_JUDGE_SET = (
    "A setting of requests to the judge: max_tokens, max_completion_tokens, temperature, at_once, tries, timeout_s, "
    "pause_s or same_refusals. May be given again."
)
JudgeSet = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help=_JUDGE_SET)]


def sampling(given: Mapping[str, object]) -> "ss.Sampling":
    """From the arguments of a command, which are named like the fields."""
    fields = ss.Sampling.model_fields
    return ss.Sampling.parse({name: value for name, value in given.items() if name in fields and value is not None})


def judge_settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """Arguments of an endpoint from `--judge-set` and the environment; `none` leaves a setting out of the requests."""
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
    from steerscope.specs.errors import Problem

    return ss.InvalidRequest([Problem(field, what, remedy)])


def check_text(*texts: str) -> None:
    """Bytes of a shell or a pipe that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    if any("\ud800" <= sign <= "\udfff" for text in texts for sign in text):
        raise mistake("prompt", "the text is not UTF-8", "convert it first")


def together(*steps: Callable[[], object]) -> list[Any]:
    """Results of all steps, or all that went wrong in them."""
    results, errors = [], []
    for step in steps:
        try:
            results.append(step())
        except (ss.SteerscopeError, ExceptionGroup) as error:  # a group: what went wrong together further down
            errors.append(error)
    if errors:
        raise ExceptionGroup("mistakes", errors)
    return results


def mistakes_of(error: Exception) -> list[str]:
    """What to tell the user, one line per problem; nothing when the error is ours."""
    if isinstance(error, ExceptionGroup):
        return [line for part in error.exceptions for line in mistakes_of(part)]
    if isinstance(error, ss.InvalidRequest):
        return [str(problem) for problem in error.problems]
    known = isinstance(error, ss.SteerscopeError | OSError | UnicodeError) and not isinstance(error, BrokenPipeError)
    return [str(error)] if known else []


def note(text: str) -> None:
    """A dim line on stderr, apart from the answer on stdout."""
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


def open_engine(
    model: str,
    device: str | None,
    dtype: str | None,
    engine: Literal["hf", "vllm"] = "hf",
    max_batch: int | None = None,
) -> "SyncEngine":
    options: LoadOptions = {"engine": engine, "device": device, "dtype": dtype, "progress": note}
    if max_batch is not None:
        options["max_batch"] = max_batch
    if engine == "hf":
        check_device(device)
    return ss.load(model, **options)


def check_device(device: str | None) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        what = str(error).splitlines()[0].rstrip(".")
        raise mistake(f"--device {device}", what, "use cpu, or a device that doctor lists") from None


def show(engine: "SyncEngine", events: "Iterator[Event]", live: bool) -> "ss.Generation":
    """Print tokens as they come (if live) and return the whole. Ctrl-C cancels the request `REQUEST`, which then ends
    in good order with what it has; the second one does not wait for that."""
    before = signal.getsignal(signal.SIGINT)

    def cancel(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        if not engine.cancel(REQUEST):
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, cancel)
    try:
        for event in events:
            if isinstance(event, ss.EndEvent):
                typer.echo(nl=live)
                return event.generation
            if live and isinstance(event, ss.TokenEvent):
                typer.echo(event.text, nl=False)
        raise AssertionError("a stream ends with an EndEvent")
    finally:
        signal.signal(signal.SIGINT, before)
        cast("Generator[Event]", events).close()  # before its engine is


def speed(generation: "ss.Generation") -> str:
    count, seconds = sum(len(c.token_ids) for c in generation.choices), max(c.timings.total for c in generation.choices)
    reasons = ", ".join(choice.finish_reason for choice in generation.choices)
    return f"{count} tokens in {seconds:.2f} s ({count / max(seconds, 1e-9):.1f} tokens/s), finish: {reasons}"
