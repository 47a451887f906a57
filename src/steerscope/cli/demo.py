"""`steerscope demo`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from steerscope.cli import options as o

app = o.command_group()


@app.command()
def demo(
    out: Annotated[Path, Option(help="Folder of the report.")] = Path("demo-report"),
    model: o.ModelName = "smollm2-135m",
) -> None:
    """Steer and read a small model, and write a page about it."""
    from steerscope.demo.run import run_demo

    run_demo(out, model)
