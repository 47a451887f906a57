"""Pages of the site that are made of other files: the front page is the README, the command line's reference comes from
the commands themselves, and notebooks and the changelog are taken along."""

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from steerscope.cli.main import app

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not under docs/."""
    made = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        "reference/cli.md": command_line(),
    }
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.name}", abs_src_path=str(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links are written for a reader of the repository; here its files have other places, or none."""
    if page.file.src_uri in ("index.md", "changelog.md", "contributing.md"):
        page.meta["hide"] = ["navigation"]
        markdown = markdown.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
        markdown = markdown.replace("](CONTRIBUTING.md)", "](contributing.md)")
    markdown = markdown.replace("](../notebooks/", "](notebooks/")
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)*(?:tests|src|bench)/[^)]*\)", r"`\1`", markdown)


def command_line() -> str:
    """Every command with its arguments and options, in the order of `steerscope --help`."""
    lines = ["# Command line", "", "`steerscope COMMAND --help` shows the same in the terminal.", ""]
    root: Any = typer.main.get_command(app)
    panel = None
    for name in root.list_commands(None):
        command = root.commands[name]
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            lines += [f"## {panel}", ""]
        lines += _command(f"steerscope {name}", command, "###")
    return "\n".join(lines) + "\n"


def _command(path: str, command: Any, mark: str) -> list[str]:
    about, *examples = command.help.split("\n\nExample: ")
    lines = [f"{mark} {path}", "", about, ""]
    for example in examples:
        lines += ["```", example.strip(), "```", ""]
    shown = [one for one in command.params if one.name != "help"]
    if shown:
        lines += ["| option | | default |", "|---|---|---|", *map(_row, shown), ""]
    for name, below in getattr(command, "commands", {}).items():
        lines += _command(f"{path} {name}", below, mark + "#")
    return lines


def _row(one: Any) -> str:
    is_option = one.param_type_name == "option"
    name = " ".join(f"`{opt}`" for opt in one.opts) if is_option else f"`{(one.metavar or one.name).upper()}`"
    default = "" if one.default is None or one.default is False or one.default == "" else f"`{one.default}`"
    return f"| {name} | {one.help.replace('|', chr(92) + '|')} | {'required' if one.required else default} |"
