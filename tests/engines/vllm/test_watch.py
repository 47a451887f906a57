"""What watching adds on vLLM: chunks, the prefix cache, preemption, and what workers hold. What a watch means is said
by tests/engines/test_watching.py, which runs on both engines."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, saved, start_vllm
from engines.test_watching import LAYER, PACK, PUSH, fires_on, monitor_of, scores_of
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add, Capture, InvalidRequest, Sampling
from steerscope.specs.errors import RequestFailed
from steerscope.specs.watch import Rule, Watch, flag, steer, stop, when
from support import tiny

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
LONG = [int(i) for i in np.random.default_rng(5).integers(20, 300, 75)]
SAMPLING = Sampling(max_tokens=12, ignore_eos=True)
ANY = PACK.concepts[0].id


def begin(tokens: int, **options: object) -> SyncEngine:
    made = start_vllm(saved("llama", "bytes", None, {}), "llama", {"max_num_batched_tokens": tokens, **options})
    made.register_pack("p", PACK)
    return made


@pytest.fixture(scope="class")  # one engine of vLLM at a time
def engine() -> Iterator[SyncEngine]:
    with begin(32, max_batch=16) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="llama").sync as made:
        made.register_pack("p", PACK)
        yield made


def switching(above: float = 0.0, concept: str = ANY, **options: int) -> Watch:
    return Watch(pack="p", rules=[when(concept, above=above).then(steer(PUSH, name="push", **options))])


def same(found: Generation, wanted: Generation) -> None:
    assert found.token_ids == wanted.token_ids
    assert (found.finish_reason, found.rule) == (wanted.finish_reason, wanted.rule)
    assert [r.position for r in found.readings] == [r.position for r in wanted.readings]
    for mine, theirs in zip(found.readings, wanted.readings, strict=True):
        assert [c.id for c in mine.concepts] == [c.id for c in theirs.concepts]
        scores = [c.probability for c in theirs.concepts]
        assert [c.probability for c in mine.concepts] == pytest.approx(scores, abs=1e-3)
    told = [(f.rule, f.action, f.position, f.acts_from) for f in wanted.firings]
    assert [(f.rule, f.action, f.position, f.acts_from) for f in found.firings] == told


class TestOneEngine:
    def test_a_mixed_batch_in_chunks_reads_what_transformers_reads(self, engine: SyncEngine, reference: SyncEngine):
        """Captures of the same rows, of others, before steering, and reductions lie beside the readings."""
        always = Add(vector=PUSH.vector, scale=1.0, layers=[0, LAYER])
        watches: list[Watch | None] = [
            Watch(pack="p", top_k=3),
            None,
            Watch(pack="p", tokens="generated", levels=[1]),
            switching(off_for=3),
            Watch(
                pack="p", tokens="positions=[3:40, 70:78]", rules=[when(ANY, above=0.3, for_tokens=2).then(flag("f"))]
            ),
            Watch(pack="p", top_k=50, tokens="last_prompt | generated"),
            switching(0.5),
            Watch(pack="p", rules=[when(ANY, above=0.5, for_tokens=2).then(stop("s"))]),
        ]
        captures = [
            None,
            Capture(layers=LAYER),
            Capture(layers="all", tokens="generated"),
            Capture(layers=[1, LAYER], before_steering=True),
            Capture(layers=LAYER, tokens="positions=[2:5, 33:76]"),
            Capture(layers=[0, 3], reduce="mean"),
            None,
            Capture(layers=1),
        ]
        steers = [None, always, always, always, None, always, None, None]
        prompts = [TokenPrompt(LONG[i : i + 75 - 7 * i]) for i in range(8)]
        prompts[4] = TokenPrompt(LONG)
        found = engine.generate(prompts, SAMPLING, watch=watches, capture=captures, steer=steers)
        wanted = reference.generate(prompts, SAMPLING, watch=watches, capture=captures, steer=steers)
        for mine, theirs, capture in zip(found, wanted, captures, strict=True):
            same(mine, theirs)
            for key in theirs.rows.tensors if capture else ():
                torch.testing.assert_close(mine.rows.tensors[key], theirs.rows.tensors[key], atol=1e-3, rtol=1e-3)
        assert any(one.firings for one in found)

    def test_watched_prompts_are_computed_and_what_a_rule_steered_is_nobody_elses(self, engine: SyncEngine, reference):
        prompt, rows = TokenPrompt(LONG), len(LONG) + 11
        before = engine.stats()["readings"]
        for _ in range(2):
            assert len(engine.generate(prompt, SAMPLING, watch=Watch(pack="p")).readings) == rows
        assert engine.stats()["readings"] == before + 2 * rows
        steered = [engine.generate(prompt, SAMPLING, watch=switching(off_for=1000)) for _ in range(2)]
        assert steered[0].firings[0].position == 0
        longer = TokenPrompt(
            [*LONG, *steered[0].token_ids, *LONG[:40]]
        )  # its first blocks are those of the steered text
        only = Capture(layers=LAYER, tokens="last_prompt | generated")
        mine, theirs = (one.generate(longer, SAMPLING, capture=only) for one in (engine, reference))
        torch.testing.assert_close(mine.rows[LAYER], theirs.rows[LAYER], atol=1e-3, rtol=1e-3)
        again = engine.generate(longer, SAMPLING, watch=Watch(pack="p", tokens="generated"))  # may use the cache
        same(again, reference.generate(longer, SAMPLING, watch=Watch(pack="p", tokens="generated")))

    def test_salts_and_the_cache(self, engine: SyncEngine):
        from steerscope.engines.vllm.client.capacity import Capacity

        def plan(watch: Watch):
            found = engine.aio._plan_stream(engine.aio.tokenize(TokenPrompt(LONG)), SAMPLING, {"watch": watch})
            return capacity.shared(found)

        capacity: Capacity = engine.aio.capacity  # type: ignore[attr-defined]
        assert capacity.salts.of(plan(switching())) != capacity.salts.of(plan(switching()))
        assert capacity.salts.of(plan(Watch(pack="p"))) is None
        assert not plan(Watch(pack="p")).reads_cached
        assert plan(Watch(pack="p", tokens="generated")).reads_cached
        assert plan(Watch(pack="p", tokens="last_prompt")).reads_cached
        assert not plan(Watch(pack="p", tokens="positions=[5]")).reads_cached

    def test_a_reading_that_never_comes_ends_its_request_and_no_other(self, engine: SyncEngine, monkeypatch):
        from steerscope.engines.vllm.client import requests
        from steerscope.engines.vllm.worker.delivery import Delivery

        monkeypatch.setattr(requests, "_PATIENCE", 0.2)
        with monkeypatch.context() as lost:
            lost.setattr(Delivery, "publish_readings", lambda *_: None)
            with pytest.raises(RequestFailed, match="a reading did not arrive"):
                list(engine.stream(TokenPrompt(LONG), SAMPLING, watch=Watch(pack="p")))
        assert engine.generate(TokenPrompt(LONG), SAMPLING, watch=Watch(pack="p")).readings

    def test_nothing_is_left_of_many(self, engine: SyncEngine):
        monitor = monitor_of(engine)
        free = len(monitor.rules._free)
        assert not any(pack.seats for pack in monitor._packs.values())
        for _ in range(3):
            ends: list[Rule] = [when(ANY, above=0.0).then(stop("s"))]
            engine.generate(
                [TokenPrompt(LONG[:9])] * 24, SAMPLING, watch=[switching(), Watch(pack="p", rules=ends)] * 12
            )
            stream = engine.stream(TokenPrompt(LONG[:9]), SAMPLING, watch=switching())
            next(stream)
            stream.close()
        engine.generate("x", SAMPLING)
        assert monitor_of(engine) is monitor
        assert len(monitor.rules._free) == free
        assert not any(pack.seats for pack in monitor._packs.values())
        stats = engine.stats()
        assert (stats["capture_bytes"], stats["slots_in_use"], stats["worker_requests"]) == (0, 0, 0)
        assert engine.aio.capacity.regions.used == 0  # type: ignore[attr-defined]

    def test_what_cannot_be_is_refused(self, engine: SyncEngine):
        facts = engine.aio.facts
        try:
            engine.aio.facts = replace(facts, switches=False)
            with pytest.raises(
                InvalidRequest, match=r"watch.rules\[0\].then.steering: the layers are spread over pipeline"
            ):
                engine.generate("x", SAMPLING, watch=switching())
            engine.aio.facts = replace(facts, tapped=frozenset({(0, "resid_post")}))
            with pytest.raises(InvalidRequest, match="watch.pack: resid_post of layers 2 was not tapped"):
                engine.generate("x", SAMPLING, watch=Watch(pack="p"))
        finally:
            engine.aio.facts = facts


@pytest.mark.parametrize("tokens", [32, 512])
def test_a_steering_changes_the_next_row_whatever_the_chunks(reference: SyncEngine, tokens: int):
    plain = reference.generate(TokenPrompt(LONG), SAMPLING, capture=Capture())
    p = len(LONG)
    with begin(tokens, max_batch=4) as engine:
        for least, acts in ((3, p), (40, p), (p, None)):  # in the first chunk, in a later one, on a generated row
            row, concept, above = fires_on(scores_of(plain), least)
            done = engine.generate(
                TokenPrompt(LONG), SAMPLING, watch=switching(above, concept, off_for=1000), capture=Capture()
            )
            assert (row < p) == (acts is not None)
            first = acts or row + 1
            assert [(f.position, f.acts_from) for f in done.firings] == [(row, first)]
            assert done.token_ids[: first + 1 - p] == plain.token_ids[: first + 1 - p]
            for layer in range(4):
                gap = (done.rows[layer] - plain.rows[layer]).abs().amax(1)
                assert gap[:first].max() < 1e-4
                assert (gap[first] > 0.1) == (layer >= 1)


def test_rows_that_are_computed_again_are_steered_as_they_were(reference: SyncEngine):
    """Far too few blocks for all: requests are preempted, and their gates have been switched meanwhile."""
    sampling = Sampling(max_tokens=60, ignore_eos=True)
    prompts = [TokenPrompt(LONG[i : i + 20]) for i in range(8)]
    watches = [switching(0.4 + 0.02 * i, PACK.concepts[i].id) for i in range(8)]
    wanted = reference.generate(prompts, sampling, watch=watches, capture=Capture(layers=[1, LAYER]))
    with begin(32, max_batch=8, num_gpu_blocks_override=10, max_model_len=128) as engine:
        found = engine.generate(prompts, sampling, watch=watches, capture=Capture(layers=[1, LAYER]))
        assert engine.stats()["worker_recomputed"] > 0
    assert sum(len(one.firings) > 4 for one in wanted) > 2, "rules must switch often for this to mean anything"
    for mine, theirs in zip(found, wanted, strict=True):
        same(mine, theirs)
        torch.testing.assert_close(mine.rows[1], theirs.rows[1], atol=1e-3, rtol=1e-3)
