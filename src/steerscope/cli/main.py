"""The console script `steerscope`: a user's mistake ends as `error: …` lines on stderr and exit code 2; a traceback is
a bug. The library is imported by the commands when they run, so `--help` does not wait for torch."""

import _thread
import os
import signal
import sys
import threading
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import steerscope as ss
from steerscope.cli.analyze import app as analyze
from steerscope.cli.analyze_layers import register as add_layers
from steerscope.cli.bench import app as bench
from steerscope.cli.capture import app as capture
from steerscope.cli.chat import chat
from steerscope.cli.doctor import doctor
from steerscope.cli.evals import app as evals
from steerscope.cli.generate import generate
from steerscope.cli.lens import app as lens
from steerscope.cli.lens_watch import register as add_watching
from steerscope.cli.options import ModelName, mistakes_of
from steerscope.cli.personas import app as personas
from steerscope.cli.serve import serve
from steerscope.cli.train import app as train
from steerscope.cli.vectors import app as vectors

_TERMINATED = 128 + signal.SIGTERM
_ENDING_S = 60.0


class _Group(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        """As they are added below; typer alone would put commands before groups, and so panels out of order."""
        return sorted(super().list_commands(ctx), key=lambda name: name == "bench")

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:
            lines = mistakes_of(error)
            if not lines:
                raise
            typer.echo("\n".join(f"error: {line}" for line in lines), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command(rich_help_panel="Begin")
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
    model: ModelName = "smollm2-135m",
) -> None:
    """Steer and read a small model, and write a page about it."""
    from steerscope.demo.run import run_demo

    run_demo(out, model)


app.command(rich_help_panel="Begin")(doctor)
for _command in (generate, chat, serve):
    app.command(rich_help_panel="Run a model")(_command)
for _name, _group in (("vectors", vectors), ("train", train), ("personas", personas)):
    app.add_typer(_group, name=_name, rich_help_panel="Make vectors")
for _name, _group in (("capture", capture), ("lens", lens)):
    app.add_typer(_group, name=_name, rich_help_panel="Read activations")
for _name, _group in (("eval", evals), ("analyze", analyze)):
    app.add_typer(_group, name=_name, rich_help_panel="Judge and explain")
add_watching(lens)
add_layers(analyze)
app.add_typer(bench, name="bench", rich_help_panel="Measure steerscope itself")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"steerscope {ss.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """See into a language model and steer it."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a generation
    end_when_told()
    app()


def end_when_told() -> None:
    """SIGTERM ends like an error, so that engines close and jobs say how far they came; a second one ends at once."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _unraisable


def _terminated(*_: object) -> None:
    """The exception cuts through whatever the main thread was doing, and may leave a lock behind that others wait for:
    after a minute it ends anyway."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _thread.start_new_thread(_give_up, ())  # `threading` has locks of its own
    raise SystemExit(_TERMINATED)


def _unraisable(lost: "sys.UnraisableHookArgs") -> None:
    """It came while something was being deleted, where Python drops exceptions: it comes once more."""
    if lost.exc_type is not SystemExit or threading.current_thread() is not threading.main_thread():
        sys.__unraisablehook__(lost)
        return
    signal.signal(signal.SIGTERM, _terminated)
    _thread.start_new_thread(_again, ())


def _again() -> None:
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def _give_up() -> None:
    time.sleep(_ENDING_S)
    os._exit(_TERMINATED)


if __name__ == "__main__":
    main()
