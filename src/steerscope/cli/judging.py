"""Options of the model that judges, shared by `steerscope eval` and `steerscope personas`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from steerscope.cli import options as o

_PANEL = "Judge"
MaxTokens = Annotated[
    int | None,
    typer.Option("--judge-max-tokens", help="Most tokens of a reply; default: 16.", rich_help_panel=_PANEL),
]
MaxCompletionTokens = Annotated[
    int | None,
    typer.Option(
        "--judge-max-completion-tokens", help="The same for models that refuse max_tokens.", rich_help_panel=_PANEL
    ),
]
AtOnce = Annotated[
    int | None, typer.Option("--judge-at-once", help="Requests at a time; default: 8.", rich_help_panel=_PANEL)
]
Tries = Annotated[
    int | None, typer.Option("--judge-tries", help="Tries of a request; default: 5.", rich_help_panel=_PANEL)
]
TimeoutS = Annotated[
    float | None, typer.Option("--judge-timeout-s", help="Of a request; default: 120.", rich_help_panel=_PANEL)
]
_CONFIG = "A JSON object with these settings, and temperature (null: not sent), pause_s and same_refusals."
Config = Annotated[Path | None, typer.Option("--judge-config", help=_CONFIG, rich_help_panel=_PANEL)]
_OPTIONS = ("max_tokens", "max_completion_tokens", "at_once", "tries", "timeout_s")


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an endpoint from the arguments of a command: those of the file, and over them the options."""
    found = _read(given["judge_config"]) if given["judge_config"] else {}
    return found | {name: given[f"judge_{name}"] for name in _OPTIONS if given[f"judge_{name}"] is not None}


def key() -> str | None:
    return os.environ.get("OPENAI_API_KEY") or None


def _read(path: Path) -> dict[str, Any]:
    from steerscope.extraction.endpoint import SETTINGS
    from steerscope.files import reading

    with reading(path, "configuration of a judge"):
        found = json.loads(path.read_text(encoding="utf-8"))
    known = f"choose from {', '.join(SETTINGS)}"
    if not isinstance(found, dict):
        raise o.mistake("--judge-config", f"{path} is no JSON object", known)
    if unknown := [name for name in found if name not in SETTINGS]:
        raise o.mistake("--judge-config", f"{path} has no known setting {', '.join(unknown)}", known)
    return found
