"""Faults inside the transformers engine: a step that fails is run again as if it had not been, and what one request
asks for ends no other request."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from lenses.packs import make
from steerscope.core.rows import RowBuffer
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.decode_batch import BatchCache
from steerscope.engines.hf.forward_index import Gather
from steerscope.engines.results import Generation
from steerscope.engines.sync import SyncEngine
from steerscope.lenses.reader import Reader
from steerscope.lenses.readings import Notes
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.errors import RequestFailed
from steerscope.specs.watch import Watch, flag, steer, when
from support import tiny
from support.reference import distance

pytestmark = pytest.mark.filterwarnings("ignore::steerscope.capture.handle.UnfetchedRows")
PROMPTS = ["The quick brown fox jumps over", "Hello", "the lazy dog and then", "How was your week at work?"]
SHORT = Sampling(max_tokens=8, ignore_eos=True)
VECTOR = np.random.default_rng(1).normal(size=64).astype(np.float32)
PACK = make([3, 6], hidden=64, normed=True).replace(
    info=make(hidden=64).info.model_copy(update={"layer": 2, "model": "llama"})
)
OTHER = make([4, 5], hidden=64, seed=7).replace(info=PACK.info)
PUSH = Add(vector=VECTOR, scale=3.0, layers=1)
RULES = [
    when(PACK.concepts[0].id, above=0.0).then(steer(Add(vector=VECTOR, layers=0))),
    when(PACK.concepts[1].id, above=0.2, for_tokens=2).then(flag("x")),
]
ALL: dict[str, list[Any]] = {
    "steer": [PUSH, None, PUSH, None],
    "capture": [Capture(), Capture(reduce="mean"), None, Capture(layers=[1, 3], tokens="prompt")],
    "watch": [Watch(pack="p", rules=RULES), Watch(pack="p"), Watch(pack="other"), None],
}


@pytest.fixture
def engine() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="llama").sync as made:
        made.register_pack("p", PACK)
        made.register_pack("other", OTHER)
        yield made


def once(patch: pytest.MonkeyPatch, owner: type, name: str, fails: Callable[..., bool]) -> None:
    """The first call for which `fails` holds raises in place of doing anything."""
    real, left = getattr(owner, name), [1]

    def broken(self: Any, *arguments: Any, **more: Any) -> object:
        if left and fails(self, *arguments, **more):
            left.clear()
            raise MemoryError("no room")
        return real(self, *arguments, **more)

    patch.setattr(owner, name, broken)


def same(found: Generation, wanted: Generation) -> None:
    assert found.token_ids == wanted.token_ids
    assert [(f.rule, f.position) for f in found.firings] == [(f.rule, f.position) for f in wanted.firings]
    assert [r.position for r in found.readings] == [r.position for r in wanted.readings]
    for mine, theirs in zip(found.readings, wanted.readings, strict=True):
        assert [c.probability for c in mine.concepts] == pytest.approx(
            [c.probability for c in theirs.concepts], abs=1e-5
        )
    assert (found.capture is None) == (wanted.capture is None)
    if found.capture is not None:
        assert found.rows.n == wanted.rows.n
        assert found.rows.labels.position.tolist() == wanted.rows.labels.position.tolist()
        for key, rows in found.rows.items():
            assert distance(rows, wanted.rows[key]) < 1e-5, key


def asked(engine: SyncEngine, *which: int) -> list[Generation]:
    """These requests, together."""
    options = {name: [each[i] for i in which] for name, each in ALL.items()}
    return engine.generate([PROMPTS[i] for i in which], SHORT, **options)  # type: ignore[call-overload, no-any-return]


class TestPrefill:
    def test_prompts_whose_rows_found_no_place_in_the_cache_are_run_again_from_the_first_token(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = asked(engine, 0, 1, 2, 3)
        before = engine.stats()
        once(monkeypatch, BatchCache, "join", lambda *_: True)
        found = asked(engine, 0, 1, 2, 3)
        for mine, theirs in zip(found, wanted, strict=True):
            same(mine, theirs)
        after = engine.stats()
        assert (after["rows"], after["readings"]) == (2 * before["rows"], 2 * before["readings"])
        assert after["failed"] == 0

    def test_a_join_that_fails_half_way_leaves_nothing_in_the_cache(self) -> None:
        """What is masked must still be a number: 0 · NaN is NaN."""
        cache, fresh = BatchCache(LlamaConfig(num_hidden_layers=2)), self.prefilled
        cache.join(fresh(2, 5, 1.0), [5, 5])
        cache.leave(1)
        bad = fresh(1, 5, float("nan"))
        bad.layers[1].values = bad.layers[1].values[..., :2]
        with pytest.raises(RuntimeError):
            cache.join(bad, [5])
        cache.join(fresh(1, 2, 1.0), [2])
        assert all(torch.isfinite(layer.keys).all() for layer in cache.own if layer.keys is not None)

    @staticmethod
    def prefilled(rows: int, width: int, value: float) -> Any:
        cache = DynamicCache()
        for layer in range(2):
            cache.update(torch.full((rows, 2, width, 3), value), torch.full((rows, 2, width, 3), value), layer)
        return cache

    def test_a_request_whose_rows_cannot_be_kept_fails_alone(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = asked(engine, 0, 1, 2, 3)
        once(monkeypatch, RowBuffer, "write", lambda self, *_: len(self.keys) == 2)
        with pytest.raises(RequestFailed, match="rows could not be kept: no room") as failure:
            asked(engine, 0, 1, 2, 3)
        done = failure.value.completed
        assert done[3] is None
        for mine, theirs in zip(done[:3], wanted, strict=False):
            assert mine is not None
            same(mine, theirs)

    @pytest.mark.parametrize("after", [False, True])
    def test_a_request_whose_taps_fail_fails_alone(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch, after: bool
    ) -> None:
        wanted = asked(engine, 0, 1, 2, 3)
        real = Gather.take

        def broken(self: Gather, key: Any, flat: torch.Tensor) -> None:
            if after:
                real(self, key, flat)
            if self.keys == ((1, "resid_post"), (3, "resid_post")):
                raise MemoryError("no room")
            real(self, key, flat)

        monkeypatch.setattr(Gather, "take", broken)
        with pytest.raises(RequestFailed, match="no room") as failure:
            asked(engine, 0, 1, 2, 3)
        done = failure.value.completed
        assert [one is None for one in done] == [False, False, False, True]
        for mine, theirs in zip(done[:3], wanted, strict=False):
            assert mine is not None
            same(mine, theirs)


class TestDecoding:
    @pytest.mark.parametrize(
        ("owner", "name", "fails"),
        [
            (Reader, "read", lambda self, rows, *_: self.pack is OTHER and len(rows) == 1),
            (Notes, "add", lambda self, positions, *_: self.pack is OTHER and len(positions) == 1),
        ],
    )
    def test_lenses_that_fail_end_the_request_that_asked_for_them(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, fails: Callable[..., bool]
    ) -> None:
        wanted = asked(engine, 0, 1, 2, 3)
        once(monkeypatch, owner, name, fails)
        with pytest.raises(RequestFailed, match="could not be read by the lenses: no room") as failure:
            asked(engine, 0, 1, 2, 3)
        done = failure.value.completed
        assert [one is None for one in done] == [False, False, True, False]
        for i in (0, 1, 3):
            one = done[i]
            assert one is not None
            same(one, wanted[i])
        assert engine.stats()["slots_in_use"] == 0

    def test_requests_that_are_read_together_are_read_alone_when_that_fails(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rules of none of them see a row twice, or miss one."""
        wanted = asked(engine, 0, 1)
        once(monkeypatch, Reader, "read", lambda _, rows, *__: len(rows) == 2)
        for mine, theirs in zip(asked(engine, 0, 1), wanted, strict=True):
            same(mine, theirs)

    def test_one_of_those_who_are_read_together_fails_alone(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = asked(engine, 0, 1)
        once(monkeypatch, Notes, "add", lambda self, at, *_: not self.compiled.rules and len(at) == 1)
        with pytest.raises(RequestFailed, match="read by the lenses") as failure:
            asked(engine, 0, 1)
        done = failure.value.completed
        assert done[1] is None
        assert done[0] is not None
        same(done[0], wanted[0])

    def test_taps_that_fail_end_the_request_that_asked_for_them(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts, captures = [*PROMPTS, "x", "y"], [Capture(layers=i) for i in (0, 1, 2, 3, 2, 1)]
        wanted = engine.generate(prompts, SHORT, capture=captures)
        real = Gather.take

        def broken(self: Gather, key: Any, flat: torch.Tensor) -> None:
            if self.keys == ((2, "resid_post"),) and len(self.stage) <= 2:  # not while prompts are read
                raise MemoryError("no room")
            real(self, key, flat)

        monkeypatch.setattr(Gather, "take", broken)
        with pytest.raises(RequestFailed, match="no room") as failure:
            engine.generate(prompts, SHORT, capture=captures)
        done = failure.value.completed
        assert [one is None for one in done] == [False, False, True, False, True, False]
        for mine, theirs in zip(done, wanted, strict=True):
            if mine is not None:
                same(mine, theirs)

    def test_a_step_that_fails_without_them_too_ends_all(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, left = engine.aio.model, []  # type: ignore[attr-defined]
        real = model.forward

        def broken(*arguments: Any, **more: Any) -> object:
            if more["input_ids"].shape[1] == 1 and len(left) < 2:
                left.append(1)
                raise MemoryError("no room for the model")
            return real(*arguments, **more)

        monkeypatch.setattr(model, "forward", broken)
        with pytest.raises(RequestFailed, match="no room for the model") as failure:
            asked(engine, 0, 1, 2, 3)
        assert failure.value.completed == [None] * 4
        monkeypatch.undo()
        assert len(asked(engine, 0)[0].token_ids) == 8
