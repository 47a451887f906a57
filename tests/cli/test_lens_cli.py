"""`steerscope lens`: fit and show."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from steerscope.lenses import Pack

Cli = Callable[..., Result]
Refused = Callable[..., list[str]]
FRAMES = {
    "statement": "There was the {0} and the {0} over here",
    "question": "How was the {0}, and where is the {0} now?",
    "dialogue": "A: The {0}!\nB: I had the {0} too.",
    "story": "And then it rained on the {0}, so the {0} had a time",
}


@pytest.fixture(scope="module")
def concepts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("concepts") / "concepts.jsonl"
    words = {"fox": "quick brown fox", "dog": "lazy dog jumps", "week": "week at work"}
    lines = [{"id": "all", "name": "All of it"}]
    for name, word in words.items():
        texts = {form: [frame.format(word)] for form, frame in FRAMES.items()}
        lines.append({"id": name, "name": f"[{name}]", "parents": [] if name == "week" else ["all"], "texts": texts})
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_fit_writes_a_pack_and_show_draws_its_tree(cli: Cli, model: str, concepts: Path, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    done = cli(
        *("lens", "fit", "--concepts", concepts, "--model", model, "--layers", "1,2", "--out", out),
        *("--linear", "--epochs", 2, "--seed", 7, "--shuffled-control"),
    )
    assert done.exit_code == 0, done.output
    assert f"{out}: Pack(pack, 4 lenses (2/2)" in done.stdout
    pack = Pack.load(out)
    assert pack.info.architecture.widths == ()
    assert pack.info.training["settings"]["seed"] == 7  # type: ignore[index]
    assert (tmp_path / "pack.work" / "rows.jsonl").is_file()
    shown = cli("lens", "show", out)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert any("shuffled labels" in line for line in lines)
    tree = lines[next(i for i, line in enumerate(lines) if line == "pack") :]
    assert [line.split(" AUROC")[0].strip("│├└─ ") for line in tree] == [
        "pack",
        "All of it",
        "[fox]",
        "[dog]",
        "[week]",
    ]
    assert all("per text" in line for line in tree[1:])
    top = cli("lens", "show", out, "--level", 0).stdout
    assert "[week]" in top
    assert "[fox]" not in top


def test_all_mistakes_are_told_together(refused: Refused, model: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no json\n", encoding="utf-8")
    told = refused(
        "lens", "fit", "--concepts", bad, "--model", model, "--layers", "1", "--out", tmp_path, "--epochs", 0
    )
    assert len(told) == 2
    assert ":1: is not JSON" in told[0]
    assert told[1].startswith("fit.epochs: ")
    assert "name some" in refused("lens", "fit", "--model", model, "--layers", "all", "--out", tmp_path / "x")[0]
    (line,) = refused("lens", "fit", "--model", model, "--layers", "x", "--out", tmp_path / "x")
    assert line.startswith("--layers: 'x' is not a layer; write 12")


def test_show_refuses_what_is_no_pack(refused: Refused, tmp_path: Path) -> None:
    assert str(tmp_path) in refused("lens", "show", tmp_path)[0]
