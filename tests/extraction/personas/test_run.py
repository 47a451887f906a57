"""The whole way on a tiny model: nothing is done twice, a killed run ends as an undisturbed one, loaders read all."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from extraction.personas.conftest import a_run, role
from extraction.personas.test_judges import endpoint, says
from steerscope import Sampling, Steering, load_vector
from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.build import build, gather
from steerscope.extraction.personas.definitions import Keywords, Persona
from steerscope.extraction.personas.judges import EndpointJudge, Judged, KeywordJudge, Score
from steerscope.extraction.personas.run import Folder, PersonaRun, generate
from steerscope.extraction.runs import Interrupted, RolloutSettings
from steerscope.specs.errors import BadFile, InvalidRequest, Problem, RequestFailed
from steerscope.vectors.legacy import load_capping, load_persona, read_pt
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

ANSWERS = 3 + 3 * 6 + 12  # the default's, three roles', a trait's


class Dice:
    """A judge that says anything, but always the same, and remembers what it was asked."""

    def __init__(self, fails_after: int = 10**6, name: str = "dice", scores: list[Score] | None = None) -> None:
        self.asked: list[Judged] = []
        self.fails_after, self.name, self.scores = fails_after, name, scores

    def check(self, personas: Sequence[Persona]) -> list[Problem]:
        del personas
        return []

    def __call__(self, persona: Persona, answers: Sequence[Judged]) -> list[Score]:
        if len(self.asked) + len(answers) > self.fails_after:
            raise ConnectionError("gone")
        self.asked += answers
        if self.scores is not None:
            return self.scores
        highest = 3 if persona.kind == "roles" else 100
        return [round(highest * hashlib.sha256(one.answer.encode()).digest()[0] / 255) for one in answers]


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def copy(whole: Path, out: Path, without: str = "nothing") -> None:
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns(without), dirs_exist_ok=True)


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
        assert load_persona(path).provenance["key"] == summary[name]["steering"]
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
    assert load_persona(path).provenance["key"] == summary["quick"]["steering"]


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
    copy(whole, tmp_path)
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
    copy(whole, tmp_path, "scores")
    first, second = Dice(fails_after=13), Dice()
    with pytest.raises(ConnectionError):
        generate(engine, a_run(), tmp_path, judge=first, resume=True)
    generate(engine, a_run(), tmp_path, judge=second, resume=True)
    assert len(first.asked) == 12
    assert len(first.asked) + len(second.asked) == ANSWERS
    build(tmp_path)
    assert contents(tmp_path)["summary.json"] == contents(whole)["summary.json"]


def test_each_judgement_is_asked_for_once_though_the_endpoint_goes_away(
    engine: SyncEngine, whole: Path, tmp_path: Path
) -> None:
    copy(whole, tmp_path, "scores")
    with endpoint(lambda n, _: (403, {}) if n == 5 else (200, says("3"))) as (url, seen):
        judge = EndpointJudge(url, "m", at_once=1)
        with pytest.raises(Interrupted, match="answers 403"):
            generate(engine, a_run(), tmp_path, judge=judge, resume=True)
        generate(engine, a_run(), tmp_path, judge=judge, resume=True)
    prompts = [one["messages"][0]["content"] for one in seen]
    assert len(prompts) == ANSWERS + 1  # the one that failed
    lines = b"".join(data for name, data in contents(tmp_path).items() if name.startswith("scores"))
    assert lines.count(b"\n") == ANSWERS


def test_an_answer_that_the_judge_refuses_is_counted_and_does_not_stop_it(
    engine: SyncEngine, whole: Path, tmp_path: Path
) -> None:
    copy(whole, tmp_path, "scores")

    def refuses(_: int, body: dict) -> tuple[int, object]:
        return (413, {"error": "long"}) if "role rain" in str(body) else (200, says("3"))

    with endpoint(refuses) as (url, _):
        _, failures = generate(engine, a_run(), tmp_path, judge=EndpointJudge(url, "m"), resume=True)
    assert failures == ['rain: 6 of 6 answers have no score: the judge answers 413: {"error": "long"}']
    summary = build(tmp_path)["personas"]
    assert (summary["rain"]["scores"], summary["rain"]["steering"]) == ({"none": 6}, "pos_all-default_1")
    assert (summary["work"]["scores"], summary["work"]["steering"]) == ({"3.0": 6}, "pos_3-default_1")


@pytest.mark.parametrize("changes", [{"keywords": Keywords(pos=("o",))}, {"eval_prompt": "Is it one? {answer}"}])
def test_another_rubric_is_judged_anew_and_the_first_ones_scores_stay(
    engine: SyncEngine, whole: Path, tmp_path: Path, changes: dict
) -> None:
    copy(whole, tmp_path)
    fox, *others = a_run().personas
    changed, dice = a_run(personas=(fox.model_copy(update=changes), *others)), Dice()
    generate(engine, changed, tmp_path, judge=dice, resume=True)
    assert len(dice.asked) == 6
    generate(engine, a_run(), tmp_path, judge=dice, resume=True)
    assert len(dice.asked) == 6


def test_keys_of_too_few_answers_are_left_out(engine: SyncEngine, tmp_path: Path) -> None:
    for threes, wanted in ((4, ["pos_all"]), (5, ["pos_3", "pos_all"])):
        judge = Dice(name=f"gives {threes}", scores=[3] * threes + [1] * (6 - threes))
        generate(engine, a_run(personas=(role("fox", "A fox.", "A dog."),)), tmp_path, judge=judge, resume=True)
        found = build(tmp_path)["personas"]["fox"]
        assert list(found["keys"]) == wanted
        path = tmp_path / "vectors" / "roles" / "fox.pt"
        assert sorted(read_pt(path)) == wanted  # type: ignore[call-overload]
        assert load_persona(path).provenance["key"] == found["steering"] == f"{wanted[0]}-default_1"


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


def test_who_resumes_with_less_adds_to_a_run_and_takes_nothing_away(
    engine: SyncEngine, whole: Path, tmp_path: Path
) -> None:
    copy(whole, tmp_path)
    before, files = engine.stats()["finished"], contents(tmp_path)
    small = a_run(personas=a_run().personas[:1], shared=("What?",))
    generate(engine, small, tmp_path, judge=Dice(), resume=True)
    build(tmp_path)
    assert engine.stats()["finished"] == before
    assert contents(tmp_path) == files
    more = a_run(personas=(role("cloud", "A cloud."),), shared=("Why?",))
    run, _ = generate(engine, more, tmp_path, judge=Dice(), resume=True)
    assert [one.name for one in run.personas] == ["fox", "rain", "work", "quick", "cloud"]
    assert run.shared == ("How was it?", "And then?", "What?", "Why?")
    assert sorted(build(tmp_path)["axis"]["projections"]) == ["cloud", "default", "fox", "rain", "work"]


@pytest.mark.parametrize(("before", "now", "both"), [("own", "own", "own"), ("own", "shared", "both")])
def test_questions_of_both_kinds_stay(before: str, now: str, both: str) -> None:
    assert a_run(ask=now).joined(a_run(ask=before)).ask == both


def test_files_of_the_last_build_that_are_of_no_use_now_are_removed(
    engine: SyncEngine, whole: Path, tmp_path: Path
) -> None:
    copy(whole, tmp_path)
    mine = tmp_path / "steering" / "mine.safetensors"
    mine.write_bytes(b"not of the run")
    trait = a_run().personas[3].model_copy(update={"name": "fox"})
    generate(engine, a_run(personas=(trait,)), tmp_path, resume=True)
    summary = build(tmp_path)
    assert "axis" not in summary  # two roles are left
    found = {name for name in contents(tmp_path) if name.startswith(("vectors", "steering"))}
    assert found - {"steering/mine.safetensors"} == set(summary["files"])
    assert {"vectors/traits/fox.pt", "steering/fox.safetensors"} <= found
    assert not {"vectors/roles/fox.pt", "steering/axis.safetensors", "steering/cap-p25.json"} & found
    assert mine.is_file()


def test_a_role_with_questions_of_its_own_is_compared_with_the_default_on_those(
    engine: SyncEngine, tmp_path: Path
) -> None:
    names = ("fox", "rain", "work")
    personas = tuple(role(name, name).model_copy(update={"questions": (f"{name}?", "Why?")}) for name in names)
    run, _ = generate(engine, a_run(personas=personas, ask="own"), tmp_path)
    summary = build(tmp_path)
    folder = Folder(tmp_path)
    default = gather(run, folder, run.default)
    assert len(default.means) == 4
    for one in personas:
        same = [i for i, asked in enumerate(default.asked) if asked.question in one.questions]
        assert len(same) == 2
        wanted = gather(run, folder, one).means.mean(0) - default.means[same].mean(0)
        vector = load_vector(tmp_path / "steering" / f"{one.name}.safetensors")
        torch.testing.assert_close(torch.stack([vector[k] for k in range(4)]), wanted, atol=1e-5, rtol=1e-5)
        assert summary["personas"][one.name]["steering"] == "pos_all-default of the same questions"
    defaults = read_pt(tmp_path / "vectors" / "default_vectors.pt")
    torch.testing.assert_close(defaults["activations"]["default_1"], default.means.mean(0))  # type: ignore[index]


def test_a_question_that_does_not_fit_costs_itself_only(engine: SyncEngine, tmp_path: Path) -> None:
    run = a_run(personas=(role("fox", "A fox."),), shared=("How was it?", "long " * 200, "What?"))
    for resume in (False, True):
        _, failures = generate(engine, run, tmp_path, resume=resume)
        assert [failure.split(":")[0] for failure in failures] == ["default", "fox"]
        assert "256" in failures[0]  # the limit
        lines = [json.loads(line) for line in (tmp_path / "responses" / "fox.jsonl").read_text().splitlines()]
        assert [line["question"] for line in lines] == ["How was it?", "What?"]
    assert build(tmp_path)["personas"]["fox"]["answers"] == 2


def test_a_run_of_which_nothing_succeeds_is_a_failure(engine: SyncEngine, tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match="default: 'long"):
        generate(engine, a_run(shared=("long " * 200,)), tmp_path)


def test_looking_at_a_run_that_goes_on_changes_none_of_its_answers(whole: Path, tmp_path: Path) -> None:
    copy(whole, tmp_path)
    for name in ("responses/fox.jsonl", "scores/fox.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-9])  # a line is just being written
    before = contents(tmp_path)
    assert build(tmp_path)["personas"]["fox"]["answers"] == 5
    kept = ("responses", "scores", "activations", "run.json")
    assert {n: d for n, d in contents(tmp_path).items() if n.startswith(kept)} == {
        n: d for n, d in before.items() if n.startswith(kept)
    }


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
        "holds answers already; go on with --resume",
        "another sampling",
    ):
        assert text in told
    with HFEngine(tiny.model(layers=3), tiny.tokenizer(), name="tiny").sync as smaller:  # noqa: SIM117
        with pytest.raises(InvalidRequest, match="another model"):
            generate(smaller, a_run(), tmp_path, resume=True)
    coarse = deepcopy(tiny.model()).to(torch.bfloat16)  # type: ignore[arg-type]
    with HFEngine(coarse, tiny.tokenizer(), name="tiny").sync as other_type:  # noqa: SIM117
        with pytest.raises(InvalidRequest, match="dtype='float32'.*dtype='bfloat16'"):
            generate(other_type, a_run(), tmp_path, resume=True)
    with pytest.raises(InvalidRequest, match="Axis is the name of another file") as caught:
        generate(engine, a_run(personas=(role("Axis", "x"), role("axis-contrast", "y"))), tmp_path / "other")
    assert len(caught.value.problems) == 2
    with pytest.raises(BadFile, match="holds no persona run"):
        build(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="layer 4 is out of range"):
        build(tmp_path, layers=4)


_SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support import tiny
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


@pytest.mark.long
def test_kill_9_loses_and_repeats_nothing(whole: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(Path(__file__).parent.parent.parent)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=HUNG_S)
    ends, answered = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert ends == (*[signal.SIGKILL] * 6, 0)
    assert answered[-1] == ANSWERS
    assert len(set(answered)) > 4  # it was killed in the middle, and went on
    torch.testing.assert_close(vectors(tmp_path), vectors(whole), atol=1e-4, rtol=1e-4)


def test_a_run_survives_its_own_json(engine: SyncEngine, tmp_path: Path) -> None:
    run, _ = generate(engine, a_run(), tmp_path)
    assert PersonaRun.from_json((tmp_path / "run.json").read_bytes()) == run
