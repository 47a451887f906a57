"""lm-evaluation-harness over a steered model: its own model class as the reference, and a task run end to end."""

from pathlib import Path

import pytest

from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs.sampling import Sampling
from steerscope.vectors.vector import SteeringVector
from support import tiny

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from steerscope.evals.harness import SteeredLM

PAIRS = [("The quick brown", " fox"), ("How was your", " week at work?"), ("", "I had a wonderful")]


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]  # type: ignore


@pytest.fixture(scope="module")
def reference() -> HFLM:
    return HFLM(pretrained=tiny.model(), tokenizer=tiny.tokenizer(), batch_size=1, max_length=256)


def test_unsteered_it_scores_as_the_harness_own_model_does(engine: SyncEngine, reference: HFLM) -> None:
    ours = SteeredLM(engine)
    for mine, theirs in zip(
        ours.loglikelihood(requests("loglikelihood", PAIRS)),
        reference.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True),
        strict=True,
    ):
        assert mine == (pytest.approx(theirs[0], abs=1e-3), theirs[1])
    whole = requests("loglikelihood_rolling", [("The quick brown fox jumps over the lazy dog.",)])
    assert ours.loglikelihood_rolling(whole) == pytest.approx(
        reference.loglikelihood_rolling(whole, disable_tqdm=True), abs=1e-2
    )
    asked = requests(
        "generate_until",
        [("The quick", {"until": ["dog", "fox"], "max_gen_toks": 8}), ("How", {"max_gen_toks": 8, "until": "."})],
    )
    assert ours.generate_until(asked) == reference.generate_until(asked, disable_tqdm=True)


def test_steering_counts(engine: SyncEngine, vectors: dict[str, SteeringVector]) -> None:
    asked = requests("loglikelihood", PAIRS)
    plain, pushed = SteeredLM(engine).loglikelihood(asked), SteeredLM(engine, vectors["a"].add(3)).loglikelihood(asked)
    assert max(abs(one[0] - other[0]) for one, other in zip(plain, pushed, strict=True)) > 0.1


LONG = "How was the quick brown fox at work? " * 60  # several times the context


def test_scored_texts_longer_than_the_context_lose_their_beginning_as_in_the_harness_own_model(
    engine: SyncEngine,
) -> None:
    ours = SteeredLM(engine)
    theirs = HFLM(pretrained=tiny.model(), tokenizer=tiny.tokenizer(), batch_size=1, max_length=ours.scored_length)
    pairs = [("hi", " fox"), (LONG, " fox"), ("hi", LONG[: len(LONG) // 4]), (LONG, LONG[:300])]
    asked = requests("loglikelihood", pairs)
    for mine, wanted in zip(ours.loglikelihood(asked), theirs.loglikelihood(asked, disable_tqdm=True), strict=True):
        assert mine == (pytest.approx(wanted[0], abs=2e-3, rel=1e-4), wanted[1])
    whole = requests("loglikelihood_rolling", [(LONG,), ("hi",), (LONG[:900],)])
    assert ours.loglikelihood_rolling(whole) == pytest.approx(
        theirs.loglikelihood_rolling(whole, disable_tqdm=True), rel=1e-4
    )
    assert ours.loglikelihood(requests("loglikelihood", [("hi", LONG)]))[0][0] < 0  # the harness's own gives up


@pytest.mark.parametrize("longest", [8, 200])
def test_prompts_longer_than_the_context_lose_their_beginning_and_others_in_the_batch_nothing(
    engine: SyncEngine, reference: HFLM, longest: int
) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": longest}
    asked = requests("generate_until", [("hi", options), (LONG, options), ("The quick", options)])
    found = SteeredLM(engine).generate_until(asked)
    assert found == reference.generate_until(asked, disable_tqdm=True)
    kept = engine.aio.tokenizer.encode(LONG)[-(256 - longest) :]
    (alone,) = engine.generate([TokenPrompt(kept)], Sampling(max_tokens=longest, temperature=0.0))
    assert found[1] == alone.text.split("\n\n")[0]


@pytest.mark.parametrize("options", [{}, {"max_gen_toks": 256}, {"max_new_tokens": 5000, "do_sample": False}])
def test_more_tokens_than_the_context_holds_are_cut_down(engine: SyncEngine, options: dict) -> None:
    """The harness's default of 256 alone fills a context of 256, where its own model gives up."""
    asked = requests("generate_until", [("hi", options), (LONG, options), ("", options)])
    short, long, empty = SteeredLM(engine).generate_until(asked)
    room = 256 - len(engine.aio.tokenizer.encode("hi"))
    (whole,) = engine.generate(["hi"], Sampling(max_tokens=room, temperature=0.0))
    (half,) = engine.generate(
        [TokenPrompt(engine.aio.tokenizer.encode(LONG)[-128:])], Sampling(max_tokens=128, temperature=0.0)
    )
    assert (short, long) == (whole.text, half.text)
    assert isinstance(empty, str)


@pytest.mark.slow
def test_a_task_runs_from_end_to_end(engine: SyncEngine, vectors: dict[str, SteeringVector], tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    lines = [
        '{"q": "The quick brown", "c": [" fox", " beach"], "a": 0}',
        '{"q": "How was your", "c": [" dog", " week"], "a": 1}',
    ]
    data.write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(
        f"task: tiny_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{c}}'\n"
        "doc_to_target: '{{a}}'\nmetric_list:\n  - metric: acc\n",
        encoding="utf-8",
    )
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        SteeredLM(engine, vectors["a"].add(1)),
        tasks=["tiny_choice"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    assert 0 <= found["results"]["tiny_choice"]["acc,none"] <= 1
