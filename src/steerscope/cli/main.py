"""The console script `steerscope`: a user's mistake ends as `error: …` lines on stderr and exit code 2; a traceback is
a bug. The module of a command is imported when the command is looked up, and the library when it runs. SIGTERM ends the
process like an error, so that engines close and jobs report how far they came."""

import _thread
import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

import steerscope as ss

_TERMINATED = 128 + signal.SIGTERM
_ENDING_S = 60.0

# command → (module, panel of --help), in the order of --help
_COMMANDS = {
    "demo": ("demo", "Begin"),
    "doctor": ("doctor", "Begin"),
    "generate": ("generate", "Run a model"),
    "chat": ("chat", "Run a model"),
    "serve": ("serve", "Run a model"),
    "vectors": ("vectors", "Make vectors"),
    "train": ("train", "Make vectors"),
    "personas": ("personas", "Make vectors"),
    "capture": ("capture", "Read activations"),
    "lens": ("lens", "Read activations"),
    "eval": ("evals", "Judge and explain"),
    "analyze": ("analyze", "Judge and explain"),
    "bench": ("bench", "Measure steerscope itself"),
}


@functools.cache
def _command(name: str) -> Any:
    module, panel = _COMMANDS[name]
    command = typer.main.get_command(importlib.import_module(f"steerscope.cli.{module}").app)
    command.name, command.rich_help_panel = name, panel  # type: ignore[attr-defined]
    return command


class _Commands(Mapping[str, Any]):
    """All commands by name; each is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Group(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(self.commands)

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:
            from steerscope.cli.options import mistakes_of

            lines = mistakes_of(error)
            if not lines:
                raise
            typer.echo("\n".join(f"error: {line}" for line in lines), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"steerscope {ss.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """See into a language model and steer it."""


def end_on_sigterm() -> None:
    """Raise SystemExit in the main thread on SIGTERM; a second SIGTERM ends the process at once."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _unraisable


def _terminated(*_: object) -> None:
    """Raise SystemExit; it may interrupt code that holds a lock, so after `_ENDING_S` the process ends anyway."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _thread.start_new_thread(_end_later, ())  # `threading` takes locks that the main thread may hold
    raise SystemExit(_TERMINATED)


def _unraisable(lost: "sys.UnraisableHookArgs") -> None:
    """Send the signal again where Python dropped its exception, as it does in a finalizer."""
    if lost.exc_type is not SystemExit or threading.current_thread() is not threading.main_thread():
        sys.__unraisablehook__(lost)
        return
    signal.signal(signal.SIGTERM, _terminated)
    _thread.start_new_thread(_signal_again, ())


def _signal_again() -> None:
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def _end_later() -> None:
    time.sleep(_ENDING_S)
    os._exit(_TERMINATED)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a generation
    end_on_sigterm()
    app()


if __name__ == "__main__":
    main()
