"""The whole way on a tiny model: nothing is done twice, a killed run ends as an undisturbed one, loaders read all."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import tiny
from extraction.personas.conftest import a_run, role
from steerscope import Sampling, Steering, load_vector
from steerscope.engines.facade import SyncEngine
from steerscope.engines.hf import HFEngine
from steerscope.extraction.personas.build import build
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.judges import Judged, KeywordJudge, Score
from steerscope.extraction.personas.rollouts import RolloutSettings
from steerscope.extraction.personas.run import PersonaRun, generate
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.vectors.legacy import load_capping, load_persona, read_pt

ANSWERS = 3 + 3 * 6 + 12  # the default's, three roles', a trait's


class Dice:
    """A judge that says anything, but always the same, and remembers what it was asked."""

    name = "dice"

    def __init__(self, fails_after: int = 10**6) -> None:
        self.asked: list[Judged] = []
        self.fails_after = fails_after

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        del personas
        return []

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> list[Score | None]:
        if len(self.asked) + len(answers) > self.fails_after:
            raise ConnectionError("gone")
        self.asked += answers
        highest = 3 if persona.kind == "roles" else 100
        return [round(highest * hashlib.sha256(one.answer.encode()).digest()[0] / 255) for one in answers]


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def vectors(out: Path) -> dict[str, object]:
    return {str(path.relative_to(out)): read_pt(path) for path in sorted((out / "vectors").rglob("*.pt"))}


@pytest.fixture(scope="module")
def whole(engine: SyncEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    generate(engine, a_run(), out, judge=Dice(), batch=4)
    build(out)
    return out


def test_resuming_a_whole_run_asks_nobody_and_changes_nothing(engine: SyncEngine, tmp_path: Path) -> None:
    dice = Dice()
    before = engine.stats()["finished"]
    generate(engine, a_run(), tmp_path, judge=dice, batch=4)
    build(tmp_path)
    assert engine.stats()["finished"] - before == ANSWERS
    assert len(dice.asked) == ANSWERS - 3 + 3  # not the default for itself, but once more for the trait
    files, before, asked = contents(tmp_path), engine.stats()["finished"], len(dice.asked)
    generate(engine, a_run(), tmp_path, judge=dice, batch=4, resume=True)
    build(tmp_path)
    assert engine.stats()["finished"] == before
    assert len(dice.asked) == asked
    assert contents(tmp_path) == files


def test_the_loaders_of_persona_files_read_every_key(whole: Path) -> None:
    default = read_pt(whole / "vectors" / "default_vectors.pt")
    assert list(default["activations"]) == ["default_1"]  # type: ignore[index]
    summary = json.loads((whole / "summary.json").read_text())["personas"]
    for name in ("fox", "rain", "work"):
        path = whole / "vectors" / "roles" / f"{name}.pt"
        keys = read_pt(path)
        assert isinstance(keys, dict)
        assert {"pos_all"} <= keys.keys() <= {"pos_0", "pos_1", "pos_2", "pos_3", "pos_all"}
        assert list(keys) == list(summary[name]["keys"])
        assert sum(count for key, count in summary[name]["keys"].items() if key != "pos_all") == 6
        for key in keys:
            vector = load_persona(path, f"{key}-default_1")
            assert vector.layers == (0, 1, 2, 3)
            expected = keys[key] - default["activations"]["default_1"]  # type: ignore[index]
            assert all(torch.equal(vector[k], expected[k]) for k in range(4))
    path = whole / "vectors" / "traits" / "quick.pt"
    keys = read_pt(path)
    assert isinstance(keys, dict)
    assert {"pos_neg", "pos_default"} <= keys.keys()
    assert keys.keys() <= {"pos_neg", "pos_neg_50", "pos_default", "pos_default_50", "pos_70", "pos_40_70"}
    assert all(torch.equal(load_persona(path, key)[2], keys[key][2]) for key in keys)


def test_contrast_vectors_axis_and_caps_are_files_that_steer(engine: SyncEngine, whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    folder = whole / "steering"
    for name in ("fox", "rain", "work", "quick"):
        vector, key = load_vector(folder / f"{name}.safetensors"), summary["personas"][name]["steering"]
        kind = summary["personas"][name]["kind"]
        assert vector.equals(load_vector(folder / f"{name}.safetensors"))
        wanted = load_persona(whole / "vectors" / kind / f"{name}.pt", key)
        assert all(torch.equal(vector[k], wanted[k]) for k in range(4))
        assert (vector.model, vector.method, vector.provenance["judge"]) == ("tiny", "persona", "dice")
    axis = load_vector(folder / "axis.safetensors")
    places = summary["axis"]["projections"]
    assert sorted(places) == ["default", "fox", "rain", "work"]
    mean = sum(place for name, place in places.items() if name != "default") / 3
    assert places["default"] >= mean
    assert axis.norms() == pytest.approx(dict.fromkeys(range(4), 1.0), abs=1e-6)
    caps = load_capping(folder / "capping_config.pt")
    assert list(caps) == [f"layers_3:4-p{part}" for part in ("0.01", "0.25", "0.5", "0.75")]
    from_json = Steering.from_json((folder / "cap-p25.json").read_bytes())
    assert len(from_json.ops) == 1
    short = Sampling(max_tokens=8)
    texts = [
        engine.generate("The quick", short, steer=steer).token_ids for steer in (from_json, caps["layers_3:4-p0.25"])
    ]
    assert texts[0] == texts[1]


def test_a_run_cut_anywhere_ends_as_the_undisturbed_one(engine: SyncEngine, whole: Path, tmp_path: Path) -> None:
    """As if it had been killed: files end anywhere, in the order in which they were written."""
    wanted, rng = vectors(whole), random.Random(0)
    whole_files = contents(whole)
    names = ["default", "fox", "rain", "work", "quick"]
    for trial in range(6):
        out = tmp_path / str(trial)
        reached = rng.randrange(len(names))
        for name, data in whole_files.items():
            who = Path(name).stem.split("-")[0]
            kept = name == "run.json" or (name.startswith(("responses", "activations")) and who in names[: reached + 1])
            if name == f"responses/{names[reached]}.jsonl":
                data = data[: rng.randrange(len(data))]
            if kept:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(data)
        generate(engine, a_run(), out, judge=Dice(), batch=4, resume=True)
        build(out)
        found = vectors(out)
        assert found.keys() == wanted.keys()
        for name in names:
            lines = [json.loads(line) for line in (out / "responses" / f"{name}.jsonl").read_text().splitlines()]
            before = [json.loads(line) for line in whole_files[f"responses/{name}.jsonl"].decode().splitlines()]
            assert [line["id"] for line in lines] == [line["id"] for line in before]
            assert [line["conversation"] for line in lines] == [line["conversation"] for line in before]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)  # other batches, other rounding


def test_a_damaged_shard_costs_its_own_answers_and_no_others(engine: SyncEngine, whole: Path, tmp_path: Path) -> None:
    for name, data in contents(whole).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    shard = min((tmp_path / "activations").glob("fox-*"))
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\0\1")
    lines = (tmp_path / "responses" / "fox.jsonl").read_text().splitlines()
    lost = sum(json.loads(line)["shard"] == shard.name for line in lines)
    before, dice = engine.stats()["finished"], Dice()
    generate(engine, a_run(), tmp_path, judge=dice, batch=4, resume=True)
    assert engine.stats()["finished"] - before == lost > 0
    assert dice.asked == []  # the same seeds gave the same texts, and their scores are known
    build(tmp_path)
    torch.testing.assert_close(vectors(tmp_path), vectors(whole), atol=1e-4, rtol=1e-4)


def test_what_was_judged_before_the_judge_went_away_is_kept(engine: SyncEngine, whole: Path, tmp_path: Path) -> None:
    for name, data in contents(whole).items():
        if not name.startswith("scores"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
    first, second = Dice(fails_after=13), Dice()
    with pytest.raises(ConnectionError):
        generate(engine, a_run(), tmp_path, judge=first, resume=True)
    generate(engine, a_run(), tmp_path, judge=second, resume=True)
    assert len(first.asked) == 12
    assert len(first.asked) + len(second.asked) == ANSWERS
    build(tmp_path)
    assert contents(tmp_path)["summary.json"] == contents(whole)["summary.json"]


def test_another_judge_judges_anew_and_the_first_ones_scores_stay(engine: SyncEngine, tmp_path: Path) -> None:
    generate(engine, a_run(), tmp_path, judge=Dice())
    before = contents(tmp_path)["scores/fox.jsonl"]
    generate(engine, a_run(), tmp_path, judge=KeywordJudge(), resume=True)
    after = contents(tmp_path)["scores/fox.jsonl"]
    assert after.startswith(before)
    assert after.count(b"\n") == 2 * before.count(b"\n")
    keyword = build(tmp_path)["personas"]["fox"]["scores"]
    dice = Dice()
    generate(engine, a_run(), tmp_path, judge=dice, resume=True)
    assert dice.asked == []
    assert build(tmp_path)["personas"]["fox"]["scores"] != keyword


def test_more_personas_and_questions_join_a_run(engine: SyncEngine, tmp_path: Path) -> None:
    small = a_run(personas=(role("fox", "A fox."),), shared=("How was it?",))
    generate(engine, small, tmp_path)
    assert "axis" not in build(tmp_path)
    before = engine.stats()["finished"]
    generate(engine, a_run(), tmp_path, resume=True)
    assert engine.stats()["finished"] - before == ANSWERS - 2
    summary = build(tmp_path)
    assert summary["personas"]["fox"]["keys"] == {"pos_all": 6}  # no judge
    assert summary["personas"]["quick"]["keys"] == {"pos_neg": 6, "pos_default": 6}
    assert "axis" in summary


def test_own_questions_are_put_to_the_default_too() -> None:
    one, other = (role(name, "x").model_copy(update={"questions": (f"{name}?", "both?")}) for name in ("a", "b"))
    run = a_run(personas=(one, other), ask="own")
    assert run.questions(one) == ["a?", "both?"]
    assert run.questions(run.default) == ["a?", "both?", "b?"]
    assert a_run(personas=(one, other), ask="both").questions(other) == [
        "How was it?",
        "And then?",
        "What?",
        "b?",
        "both?",
    ]


def test_what_does_not_fit_a_folder_is_refused_with_all_reasons(engine: SyncEngine, tmp_path: Path) -> None:
    generate(engine, a_run(personas=(role("fox", "A fox."),), shared=("What?",)), tmp_path)
    other = a_run(personas=(role("fox", "x"), role("fox", "y")), shared=(), rollouts=RolloutSettings(max_tokens=9))
    with pytest.raises(InvalidRequest) as caught:
        generate(engine, other, tmp_path)
    told = "\n".join(str(problem) for problem in caught.value.problems)
    for text in (
        "fox is there twice",
        "has no questions",
        "holds a run already; go on with --resume",
        "another sampling",
    ):
        assert text in told
    with HFEngine(tiny.model(layers=3), tiny.tokenizer(), name="tiny").sync as smaller:  # noqa: SIM117
        with pytest.raises(InvalidRequest, match="another model"):
            generate(smaller, a_run(), tmp_path, resume=True)
    with pytest.raises(BadFile, match="holds no persona run"):
        build(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="layer 4 is out of range"):
        build(tmp_path, layers=4)


_SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import tiny
from extraction.personas.conftest import a_run
from extraction.personas.test_run import ANSWERS, Dice
from steerscope.engines.hf import HFEngine
from steerscope.extraction.personas.build import build
from steerscope.extraction.personas.run import generate

out, rng = Path(sys.argv[1]), random.Random(1)
count = lambda: sum(path.read_bytes().count(b"\\n") for path in (out / "responses").glob("*.jsonl"))
for target in [*sorted(rng.sample(range(1, ANSWERS - 3), 6)), None]:
    child = os.fork()  # nothing has started a thread yet
    if not child:
        with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
            generate(engine, a_run(), out, judge=Dice(), batch=1, resume=True)
        build(out)
        os._exit(0)
    while target is not None and count() < target:
        time.sleep(0.001)
    if target is not None:
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], count(), flush=True)
"""


@pytest.mark.slow
def test_kill_9_loses_and_repeats_nothing(whole: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(Path(__file__).parent.parent.parent)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240)
    ends, answered = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert ends == (*[signal.SIGKILL] * 6, 0)
    assert answered[-1] == ANSWERS
    assert len(set(answered)) > 4  # it was killed in the middle, and went on
    torch.testing.assert_close(vectors(tmp_path), vectors(whole), atol=1e-4, rtol=1e-4)


def test_a_run_survives_its_own_json(engine: SyncEngine, tmp_path: Path) -> None:
    run, _ = generate(engine, a_run(), tmp_path)
    assert PersonaRun.from_json((tmp_path / "run.json").read_bytes()) == run
