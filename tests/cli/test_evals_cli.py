"""`steerscope eval`: answers, scores, report and caps from the command line, and every mistake told at once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from steerscope import SteeringVector, save_vector
from steerscope.extraction.personas.build import write_capping
from support.fake_endpoint import endpoint, says

Cli = Callable[..., Result]
Refused = Callable[..., list[str]]
SHORT = ("--max-tokens", 4, "--n", 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evals")
    told = {"instruction": [{"pos": "Be quick.", "neg": "Be lazy."}], "keywords": {"pos": ["a"], "neg": ["e"]}}
    (folder / "quick.json").write_text(json.dumps(told), encoding="utf-8")
    (folder / "some.jsonl").write_text('{"question": "How?"}\n{"question": "And then?"}\n', encoding="utf-8")
    (folder / "bad.jsonl").write_text('{"question": "How I do bad?"}\n', encoding="utf-8")
    fact = {"question": "1+1?", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(B)"}
    (folder / "facts.jsonl").write_text(json.dumps(fact), encoding="utf-8")
    (folder / "rubric.txt").write_text("Rate {answer}", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_from_answers_to_a_report(
    cli: Cli, refused: Refused, model: str, vector: str, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    asked = ["eval", "rollouts", "--out", out, "--model", model, "--vectors", f"up={vector}@1,{vector}@1,2"]
    asked += [
        "--scales",
        "-2..2:2",
        "--normalize",
        "--trait",
        data / "quick.json",
        "--questions",
        data / "some.jsonl",
        *SHORT,
    ]
    done = cli(*asked)
    assert done.exit_code == 0, done.output
    assert f"{out}: 7 conditions, 2 questions" in done.stdout
    assert refused(*asked) == [f"{out}: holds answers already; go on with --resume, or choose another folder"]
    assert cli(*asked, "--resume").exit_code == 0
    with endpoint(lambda *_: (200, says("40", usage={"prompt_tokens": 10, "completion_tokens": 1}))) as (url, seen):
        judged = ["--judge", url, "--judge-model", "m", "--rubric", data / "rubric.txt", "--prices", "1,2"]
        limits = [f"--judge-set={one}" for one in ("max_completion_tokens=300", "temperature=none", "at_once=2")]
        scored = cli("eval", "score", out, *judged, *limits, "--regex", "e")
        for wrong in ("max_token=99", "tries"):
            (told,) = refused("eval", "score", out, *judged, "--judge-set", wrong)
            assert told.startswith(f"--judge-set: '{wrong}' sets nothing; write NAME=VALUE with one of max_tokens, ")
        least = refused("eval", "score", out, *judged, "--judge-set", "tries=0", "--judge-set", "timeout_s=soon")
    assert least == [
        "judge tries: cannot be 0; give a whole number of 1 or more",
        "judge timeout_s: cannot be 'soon'; give a number of 0.001 or more",
    ]
    assert seen[0]["max_completion_tokens"] == 300
    assert not {"max_tokens", "temperature"} & seen[0].keys()
    assert scored.exit_code == 0, scored.output
    assert seen[0]["messages"][0]["content"].startswith("Rate ")
    assert "cost" in scored.stderr
    shown = cli("eval", "report", out)
    assert shown.exit_code == 0, shown.output
    assert "up × -2" in shown.stdout
    assert "PARTIAL" not in scored.output + shown.output
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["score"] == "judge"
    assert {"judge", "keywords", "regex", "perplexity", "projection: up"} <= {
        one["score"] for one in summary["conditions"]
    }
    assert (out / "report.html").is_file()
    lines = (out / "rollouts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "rollouts.jsonl").write_text("".join(lines[:-3]), encoding="utf-8")  # as a run that was killed leaves it
    for command in (("eval", "report", out), ("eval", "score", out, "--text-only")):
        told = cli(*command)
        assert told.exit_code == 0, told.output
        assert "PARTIAL RUN: 3 of 14 answers are not there (" in told.stdout
    head = next(line for line in shown.stdout.splitlines() if "condition" in line)
    assert [head.index(name) for name in ("expected", "present", "judged")] == sorted(
        head.index(name) for name in ("expected", "present", "judged")
    )


@pytest.mark.slow
def test_caps_are_measured_on_harm_and_ability_side_by_side(cli: Cli, model: str, data: Path, tmp_path: Path) -> None:
    axis = SteeringVector({2: torch.randn(64, generator=torch.Generator().manual_seed(0))})
    experiments = {"layers_2:3-p0.25": {2: -1.0}, "layers_2:3-p0.75": {2: 1.0}}
    write_capping(tmp_path / "capping_config.pt", axis, experiments)
    sets = ["--harm", data / "bad.jsonl", "--capability", data / "facts.jsonl"]
    out = tmp_path / "caps"
    done = cli("eval", "cap", "--out", out, "--caps", tmp_path / "capping_config.pt", "--model", model, *sets, *SHORT)
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    places = {(one["dataset"], one["series"], one["at"]) for one in summary["conditions"] if one["score"] == "refusal"}
    assert {("bad", "layers_2:3", 25.0), ("bad", "layers_2:3", 75.0), ("bad", None, None)} <= places
    assert "refusal" in done.stdout


def test_mistakes_are_told_together_before_a_model_is_loaded(refused: Refused, data: Path, tmp_path: Path) -> None:
    wrong = ["--questions", "nothing", "--vectors", tmp_path / "gone.safetensors", "--scales", "x", "--trait", "odd"]
    lines = refused(
        "eval", "rollouts", "--out", tmp_path / "run", "--model", "no-such-model", *wrong, "--temperature", 3
    )
    assert [line.split(":")[0] for line in lines] == [
        "questions",
        "traits",
        f"there is no file '{tmp_path}/gone.safetensors'; write FILE[@LAYERS][",
        "scales",
        "temperature",
    ]
    assert not (tmp_path / "run").exists()
    assert "it has no run.json" in refused("eval", "score", tmp_path)[0]
    assert "it has no run.json" in refused("eval", "report", tmp_path)[0]
    (line,) = refused("eval", "cap", "--out", tmp_path / "run", "--caps", data / "some.jsonl")
    assert line.startswith("caps: ")


def test_names_of_vectors_must_differ_and_be_names(refused: Refused, vector: str, tmp_path: Path) -> None:
    twice = refused("eval", "rollouts", "--out", tmp_path / "run", "--vectors", f"{vector},{vector}")
    assert twice == ["vectors: two are called happy; name one: NAME=FILE"]
    save_vector(SteeringVector({1: torch.ones(64)}), tmp_path / "a b.safetensors")
    odd = refused("eval", "rollouts", "--out", tmp_path / "run", "--vectors", tmp_path / "a b.safetensors")
    assert odd == ["vectors: 'a b' is no name for a file; use letters, digits, - and _: NAME=FILE"]
    learned = refused("eval", "rollouts", "--out", tmp_path / "run", "--vectors", vector, "--match-learned-scale")
    assert learned[0].startswith("match-learned-scale: 0 of the vectors are learned")
