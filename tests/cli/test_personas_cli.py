"""`steerscope personas`: list, run, go on, and make the axis again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from steerscope.vectors.legacy import load_capping

Cli = Callable[..., Result]
Refused = Callable[..., list[str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("personas")
    (folder / "roles").mkdir()
    for name in ("fox", "dog", "rain"):
        told = {"instruction": [{"pos": f"A {name}."}], "keywords": {"pos": ["a", "e"]}}
        (folder / "roles" / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
    (folder / "roles" / "plain.json").write_text('{"instruction": [{"pos": "Plain."}]}', encoding="utf-8")
    (folder / "roles" / "default.json").write_text('{"instruction": [{"pos": ""}]}', encoding="utf-8")
    (folder / "questions.jsonl").write_text('{"question": "How?"}\n{"question": "And then?"}\n', encoding="utf-8")
    return folder


def command(data: Path, model: str, out: Path) -> list[object]:
    own = ["--roles-dir", data / "roles", "--questions", data / "questions.jsonl"]
    return ["personas", "run", "--out", out, "--model", model, "--max-tokens", 4, *own]


def test_run_writes_the_folder_and_resume_and_axis_go_on_from_it(
    cli: Cli, refused: Refused, model: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = [*command(data, model, out), "--roles", "fox,dog, rain", "--cap-layers", "2-3", "--percentiles", "25"]
    done = cli(*run)
    assert done.exit_code == 0, done.output
    assert "axis at layer 3" in done.stdout
    assert f"{out}/steering/capping_config.pt#layers_2:4-p0.25" in done.stdout
    assert {path.name for path in (out / "vectors" / "roles").iterdir()} == {"fox.pt", "dog.pt", "rain.pt"}
    assert refused(*run) == [f"{out}: holds answers already; go on with --resume, or choose another folder"]
    answers = (out / "responses" / "fox.jsonl").read_bytes()
    again = cli(*run, "--resume")
    assert again.exit_code == 0, again.output
    assert again.stdout == done.stdout
    assert (out / "responses" / "fox.jsonl").read_bytes() == answers
    other = cli("personas", "axis", out, "--cap-layers", "1,3", "--percentiles", "10,90")
    assert other.exit_code == 0, other.output
    assert list(load_capping(out / "steering" / "capping_config.pt")) == ["layers_1,3-p0.1", "layers_1,3-p0.9"]
    assert {path.name for path in (out / "steering").glob("cap-*")} == {"cap-p10.json", "cap-p90.json"}
    steered = cli(
        "generate",
        model,
        "The quick",
        "--max-tokens",
        4,
        "--steer",
        f"{out}/steering/capping_config.pt#layers_1,3-p0.1",
    )
    assert steered.exit_code == 0, steered.output


def test_mistakes_are_told_together_and_before_the_first_answer(
    refused: Refused, model: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    start = command(data, model, out)
    told = refused(*start, "--roles", "fox,wolf", "--judge", "ftp://x", "--percentiles", "x", "--temperature", 9)
    assert [line.split(":")[0] for line in told] == ["roles", "temperature", "judge", "judge model", "--percentiles"]
    assert refused(*start)[0].startswith("personas: none are chosen")
    assert refused(*start, "--roles", "fox,plain")[0].startswith("plain: has no keywords")
    assert "out of range" in refused(*start, "--roles", "fox", "--cap-layers", "9")[0]
    assert "is not a layer" in refused(*start, "--roles", "fox", "--cap-layers", "late")[0]
    assert not out.exists()
    assert "holds no persona run" in refused("personas", "axis", tmp_path)[0]


def test_list_shows_what_is_shipped_and_what_a_folder_holds(cli: Cli, refused: Refused, data: Path) -> None:
    shown = cli("personas", "list").stdout
    assert "pirate" in shown
    assert "cheerful" in shown
    own = cli("personas", "list", "--roles-dir", data / "roles").stdout
    assert "Plain." in own
    assert "pirate" not in own
    assert refused("personas", "list", "--roles-dir", data / "nowhere")[0].endswith("is not a folder of roles")
