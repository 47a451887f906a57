"""lm-evaluation-harness over a steered model: its own model class as the reference, and a task run end to end."""

from pathlib import Path

import pytest
import torch

import tiny
from steerscope.engines.facade import SyncEngine
from steerscope.vectors.vector import SteeringVector

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


def test_steering_counts_and_long_texts_lose_their_beginning(
    engine: SyncEngine, vectors: dict[str, SteeringVector]
) -> None:
    asked = requests("loglikelihood", PAIRS)
    plain, pushed = SteeredLM(engine).loglikelihood(asked), SteeredLM(engine, vectors["a"].add(3)).loglikelihood(asked)
    assert max(abs(one[0] - other[0]) for one, other in zip(plain, pushed, strict=True)) > 0.1
    long = requests("loglikelihood", [("beach " * 400, " fox")])
    assert torch.isfinite(torch.tensor(SteeredLM(engine).loglikelihood(long)[0][0]))
    text = "dog " * 300
    assert SteeredLM(engine).loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))[0] < 0


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
