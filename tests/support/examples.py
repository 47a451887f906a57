"""Examples that users read: blocks of the pages, of docstrings in the reference, and of `--help`; and a folder in which
they run on a tiny model."""

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from typer.testing import CliRunner

from steerscope import Steering, SteeringVector, save_vector
from steerscope.cli.main import app
from steerscope.lenses import Architecture, Concept, Pack, PackInfo
from steerscope.training.concepts import load_concepts
from support import tiny

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = sorted({n for page in PAGES for n in re.findall(r"^::: (steerscope\.[\w.]+)", page.read_text("utf-8"), re.M)})
COMMANDS: Any = typer.main.get_command(app)


class Block(NamedTuple):
    page: str
    line: int
    kind: str  # python, or a command line that begins with steerscope
    text: str


def blocks(page: Path) -> list[Block]:
    """In order. Commands are lines of plain and shell blocks, joined where they are continued."""
    found, text = [], page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        line = text[: match.start()].count("\n") + 2
        if match[1] == "python":
            found.append(Block(page.name, line, "python", match[2]))
        elif match[1] in ("", "bash", "sh", "ini"):
            found += [Block(page.name, line, "command", one) for one in commands(match[2])]
    return found


def commands(text: str) -> list[str]:
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return re.findall(r"^(?:ExecStart=)?(?:\S*/)?(steerscope [a-z].*?)(?:\s+#.*)?$", joined, re.M)


def named(name: str) -> Any:
    """What a dotted name of the reference is."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def documented(name: str) -> Iterator[tuple[str, Any]]:
    """A name of the reference and the public members that are shown under it."""
    thing = named(name)
    yield name, thing
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            found = getattr(value, "__func__", value)
            if not member.startswith("_") and (inspect.isfunction(found) or isinstance(value, property)):
                yield f"{name}.{member}", value


def docstring_blocks(name: str) -> list[str]:
    texts = [inspect.getdoc(thing) or "" for _, thing in documented(name)]
    return [one for text in texts for one in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)]


def every_command(at: Any = COMMANDS, path: str = "steerscope") -> Iterator[tuple[str, Any]]:
    yield path, at
    for name, below in getattr(at, "commands", {}).items():
        yield from every_command(below, f"{path} {name}")


def parsed(command: str) -> None:
    """Read a command line as the console script would, all its commands and options, and run nothing."""
    words, at, context = shlex.split(command)[1:], COMMANDS, None
    while True:
        context = at.make_context("steerscope", list(words), parent=context)
        rest = [*context._protected_args, *context.args]
        if not getattr(at, "commands", None) or not rest:
            return
        _, at, words = at.resolve_command(context, rest)


def workshop(folder: Path) -> None:
    """What examples speak of: files, and a tiny model that stands where the embedded one does."""
    tiny.model("llama", layers=30, max_position_embeddings=2048).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    draw = torch.Generator().manual_seed(0)
    happy = SteeringVector({layer: torch.randn(64, generator=draw) for layer in range(30)}, model="smollm2-135m")
    for path in ("happy.safetensors", "vectors/happy.safetensors"):
        (folder / path).parent.mkdir(exist_ok=True)
        save_vector(happy, folder / path)
    info = PackInfo(
        name="pack", model="smollm2-135m", hidden=64, layer=16, architecture=Architecture(widths=()), training={}
    )
    tensors = {"w0": torch.randn(2, 1, 64, generator=draw), "b0": torch.zeros(2, 1)}
    for name in ("pack", "lenses"):
        Pack(info, [Concept(id="fear"), Concept(id="joy")], tensors).save(folder / name)
    (folder / "run" / "steering").mkdir(parents=True)
    cap = Steering.of(happy.cap(max=9, layers=20)).to_json()
    (folder / "run" / "steering" / "cap-p25.json").write_text(cap, encoding="utf-8")
    few = load_concepts().under(["fear", "joy", "dogs"]).concepts
    (folder / "few.jsonl").write_text("\n".join(one.to_json() for one in few), encoding="utf-8")
    lines = [json.dumps({"text": f"{tiny.TEXT} {i}", "topic": "rain"}) for i in range(10)]
    (folder / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")


SHORTER = {  # the same with less work, which a tiny model on a shared core needs
    "steerscope lens fit": "steerscope lens fit --concepts few.jsonl --linear --epochs 1",
    "load_concepts()": 'load_concepts("few.jsonl")',
    "seed=0))": "seed=0, fit=FitSettings(widths=(), epochs=1)))",
    "import LensSettings": "import FitSettings, LensSettings",
    "learning_rate=1, epochs=3": "learning_rate=1, epochs=1, target_tokens=200, val_tokens=60",
}


def shorter(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    text = re.sub(r"^steerscope (generate|lens watch|lens report) ", r"steerscope \1 --max-tokens 3 ", text)
    return re.sub(r"max_tokens=\d+", "max_tokens=3", text)


def call(command: str) -> str:
    """Run a command line in this process."""
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, f"{command}\n{done.output}"
    return done.stdout
