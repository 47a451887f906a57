"""The console script `steerscope`: a user's mistake ends as `error: …` lines on stderr and exit code 2; a traceback is
a bug. The library is imported by the commands when they run, so `--help` does not wait for torch."""

import sys
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
from steerscope.cli.options import mistakes_of
from steerscope.cli.personas import app as personas
from steerscope.cli.serve import serve
from steerscope.cli.stress import stress
from steerscope.cli.train import app as train
from steerscope.cli.vectors import app as vectors


class _Group(TyperGroup):
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
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.add_typer(vectors, name="vectors")
app.add_typer(personas, name="personas")
app.add_typer(train, name="train")
app.add_typer(lens, name="lens")
app.add_typer(capture, name="capture")
app.add_typer(evals, name="eval")
add_watching(lens)
app.add_typer(analyze, name="analyze")
add_layers(analyze)
app.add_typer(bench, name="bench")
app.command()(stress)
app.command()(doctor)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
    model: Annotated[str, typer.Option(help="A name, a directory or a hub id.")] = "smollm2-135m",
) -> None:
    """Steer and read a small model, and write a report about it."""
    from steerscope.demo.run import run_demo

    run_demo(out, model)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"steerscope {ss.__version__}")
        raise typer.Exit


@app.callback()
def _options(_: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """See into a language model and steer it."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end a generation
    app()


if __name__ == "__main__":
    main()
