"""`steerscope lens`: train lenses on concepts, and look at what a pack holds."""

import typer

app = typer.Typer(no_args_is_help=True, help="Train lenses and look at packs of them.")
