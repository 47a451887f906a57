"""The wrongs that go unnoticed, on the real vLLM: each has a check, and each guard is taken out to see the check fail.

Rows of another request, rows overwritten later, steering that is not applied, half the residual, positions off by one,
the prefix cache handing out steered keys and values, captured prompts read from that cache, and what an overflow left
in its blocks.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, saved, start_vllm
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add, Capture, Sampling, Steering
from steerscope.specs.errors import RequestFailed, UnsupportedModel
from support import tiny
from support.reference import Reference, distance

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")

BLOCK, BLOCKS = 32, 32  # few, so that they change hands
RNG = np.random.default_rng(3)
VECTOR = (6 * RNG.standard_normal(64)).astype(np.float32)
LONG = RNG.integers(4, 500, 3 * BLOCK).tolist()  # several whole blocks of the cache
FEW = Sampling(max_tokens=6, ignore_eos=True)


def begin(**options: object) -> SyncEngine:
    given = {"sites": ("resid_post",), "num_gpu_blocks_override": BLOCKS, **options}
    return start_vllm(saved("llama", "bytes", None, {}), "llama", given)


def rows_are(done: Generation, vector: np.ndarray | None = None, where: Callable[[int], bool] = lambda _: True) -> bool:
    """Every captured row equals the reference's, with the vector added at layer 1."""
    from support.reference import RefOp

    fed = [*done.prompt_token_ids, *done.token_ids[:-1]]
    ops = [] if vector is None else [RefOp(1, "resid_post", vector, Add(vector="v", scale=1.0).coefficients(), where)]
    wanted = Reference(tiny.model()).run(fed, ops)[1]
    return done.rows.n == len(fed) and all(
        distance(rows, wanted[layer, "resid_post"]) < 1e-4 for (layer, _), rows in done.rows.items()
    )


# --- the checks


def own_rows(engine: SyncEngine) -> None:
    """Mixed prompts in small chunks, some steered: everybody has their own rows, at their own positions."""
    prompts = [TokenPrompt(RNG.integers(4, 500, n).tolist()) for n in (3, 70, 9, 40, 1, 22)]
    steers = [Add(vector=VECTOR, layers=1) if i % 2 else Steering() for i in range(6)]
    done = engine.generate(prompts, FEW, steer=steers, capture=Capture())
    assert all(rows_are(one, VECTOR if i % 2 else None) for i, one in enumerate(done))


def rows_stay(engine: SyncEngine) -> None:
    """What was fetched is not written to again, whatever runs after_copies."""
    first = engine.generate(TokenPrompt(LONG), FEW, capture=Capture())
    kept, copy = first.rows[1], first.rows[1].clone()
    assert first.capture is not None
    first.capture.close()
    for seed in range(6):
        more = [TokenPrompt(np.random.default_rng(seed).integers(4, 500, 60).tolist()) for _ in range(4)]
        for one in engine.generate(more, FEW, capture=Capture()):
            assert one.capture is not None
            one.capture.close()
        assert engine.aio.capacity.regions.used > 0  # type: ignore[attr-defined]  # what was freed is taken back here
    assert torch.equal(kept, copy)


def chosen_positions(engine: SyncEngine) -> None:
    """Only the chosen positions are steered, in the prompt and after it."""
    prompt = TokenPrompt(LONG[:40])
    for tokens, where in {
        "positions=[5:9]": lambda i: 5 <= i < 9,
        "last_prompt": lambda i: i == 39,
        "generated": lambda i: i >= 40,
    }.items():
        done = engine.generate(prompt, FEW, steer=Add(vector=VECTOR, layers=1, tokens=tokens), capture=Capture())
        assert rows_are(done, VECTOR, where), tokens


def uncached(engine: SyncEngine, ids: list[int], steer: Add | None) -> list[int]:
    """The text when nothing is read from the cache, as for every captured prompt."""
    done = engine.generate(TokenPrompt(ids), FEW, steer=steer, capture=Capture(layers=3, reduce="last"))
    assert done.capture is not None
    done.capture.close()
    return done.token_ids


def cache_is_parted(engine: SyncEngine) -> None:
    """Requests with other steering never see each other's keys and values, though their prompts begin alike."""
    ids = LONG[: 2 * BLOCK]
    add, turned = Add(vector=VECTOR, layers=0), Add(vector=-VECTOR, layers=0)
    plain, steered, other = (uncached(engine, ids, steer) for steer in (None, add, turned))
    assert len({tuple(plain), tuple(steered), tuple(other)}) == 3, "the vector is too weak for this test"
    for _ in range(2):
        for steer, wanted in ((add, steered), (None, plain), (turned, other)):
            assert engine.generate(TokenPrompt(ids), FEW, steer=steer).token_ids == wanted


def selectors_part_the_cache(engine: SyncEngine) -> None:
    """`last_prompt` is another token in an extension of the prompt; what was `generated` once is prompt in turn two."""
    fresh = [
        (LONG[: 2 * BLOCK], "last_prompt"),
        (LONG, "last_prompt"),
        (LONG[: 2 * BLOCK], "generated"),
    ]
    long = Sampling(max_tokens=BLOCK + 4, ignore_eos=True)
    alone = {}
    for ids, tokens in fresh:
        steer = Add(vector=VECTOR, layers=0, tokens=tokens)
        done = engine.generate(TokenPrompt(ids), long, steer=steer, capture=Capture(layers=3))  # computes everything
        alone[len(ids), tokens] = done.token_ids
    for ids, tokens in [*fresh, *fresh[::-1]]:
        steer = Add(vector=VECTOR, layers=0, tokens=tokens)
        assert engine.generate(TokenPrompt(ids), long, steer=steer).token_ids == alone[len(ids), tokens], tokens
    first = fresh[0][0] + alone[2 * BLOCK, "generated"]
    steer = Add(vector=VECTOR, layers=0, tokens="generated")
    second = engine.generate(TokenPrompt(first), FEW, steer=steer, capture=Capture(layers=3)).token_ids
    assert engine.generate(TokenPrompt(first), FEW, steer=steer).token_ids == second


def captured_prompts_are_whole(engine: SyncEngine) -> None:
    """A prompt that lies in the prefix cache still gives all its rows."""
    for _ in range(2):
        engine.generate(TokenPrompt(LONG), FEW)
    assert rows_are(engine.generate(TokenPrompt(LONG), FEW, capture=Capture()))


def a_swapped_name_is_another_vector(engine: SyncEngine) -> None:
    """A vector registered again under its name never uses the keys and values of the old one."""
    for sign in (1, -1, 1):
        wanted = uncached(engine, LONG, Add(vector=sign * VECTOR, layers=0))
        engine.register("mood", sign * VECTOR)
        assert engine.generate(TokenPrompt(LONG), FEW, steer=Add(vector="mood", layers=0)).token_ids == wanted


def an_overflow_stays_alone(engine: SyncEngine) -> None:
    """A request that gets the blocks of one whose steering overflowed reads nothing of them."""
    steer = Add(vector=VECTOR, scale=3e38, layers="all")
    for i in range(BLOCKS):
        with pytest.raises(RequestFailed, match="not finite"):
            engine.generate(TokenPrompt(LONG[i:] + LONG[:i]), FEW, steer=steer)
    for length in (1, 5, 40, BLOCK + 1):
        assert rows_are(engine.generate(TokenPrompt(LONG[:length]), FEW, capture=Capture()))


def an_overflow_is_not_read_from_the_cache(engine: SyncEngine) -> None:
    """Asked again, it fails again, though the rows that show it would lie in the prefix cache."""
    steer = Add(vector=VECTOR, scale=3e38, layers="all", tokens="positions=[0:5]")
    for _ in range(3):
        with pytest.raises(RequestFailed, match="not finite"):
            engine.generate(TokenPrompt(LONG), FEW, steer=steer)


def forget_overflows(engine: SyncEngine, patch: pytest.MonkeyPatch) -> None:
    salts = engine.aio.capacity.salts  # type: ignore[attr-defined]
    patch.setattr(salts, "_spoilt", ())
    patch.setattr(salts, "spoil", lambda _shared: None)


def nor_by_another_client(engine: SyncEngine) -> None:
    """One that has not heard of it."""
    with pytest.MonkeyPatch.context() as patch:
        forget_overflows(engine, patch)
        an_overflow_is_not_read_from_the_cache(engine)


CHECKS = [own_rows, rows_stay, chosen_positions, cache_is_parted, selectors_part_the_cache, captured_prompts_are_whole,
          a_swapped_name_is_another_vector, an_overflow_stays_alone, an_overflow_is_not_read_from_the_cache,
          nor_by_another_client]  # fmt: skip


def test_nothing_is_silently_wrong() -> None:
    engine = begin(max_num_batched_tokens=BLOCK)
    try:
        for check in CHECKS:
            check(engine)
    finally:
        engine.close()


# --- the guards, taken out one by one

Mutation = Callable[[pytest.MonkeyPatch], None]


def rows_by_arrival(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.worker.index_layout import CELL
    from steerscope.engines.vllm.worker.step_index import StepIndex

    real = StepIndex.plan

    def wrong(self, *args):
        plan = real(self, *args)
        cells = self.index[:, CELL]
        taken = cells[: plan.tokens] > 0
        cells[: plan.tokens][taken] = np.roll(cells[: plan.tokens][taken], 2)
        return plan

    patch.setattr(StepIndex, "plan", wrong)


def positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.worker.step_index import StepIndex

    real = StepIndex._write_ops
    patch.setattr(StepIndex, "_write_ops", lambda self, part, recomputed: real(
        self, replace(part, position=part.position + 1), recomputed))  # fmt: skip


def half_the_residual(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.worker.tap import TappedNorm

    def wrong(self, x, residual):
        self.tap(x, None)
        return self.norm(x, residual)

    patch.setattr(TappedNorm, "forward", wrong)


def no_steering(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.worker import tap

    patch.setattr(tap, "change", lambda h, *_: torch.zeros_like(h, dtype=torch.float32))


def no_salt(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.client.capacity import Salts

    patch.setattr(Salts, "of", lambda _self, _shared: None)


def salt_without_positions(patch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from steerscope.engines.vllm.client import capacity as module
    from steerscope.specs.tokens import EVERYWHERE

    real = module.salt_of

    def blind(template):
        columns = tuple(dataclasses.replace(column, positions=EVERYWHERE) for column in template.columns)
        return real(dataclasses.replace(template, columns=columns))

    patch.setattr(module, "salt_of", blind)


def salt_by_name(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.client import capacity as module

    patch.setattr(module, "salt_of", lambda template: str([str(a.op.vector)[:9] for a in template.applied]))


def reads_the_cache(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.client import capacity as module

    patch.setattr(module, "reads_cached", lambda _template: True)


def memory_reused_at_once(patch: pytest.MonkeyPatch) -> None:
    from steerscope.capture import transport

    def eager(self, data):
        self._regions.free(transport.Freed(self.offset, self.size, self.offset, ()))
        held = torch.from_numpy(np.asarray(self))
        return held[: data[0] * data[1] * 4].view(torch.float32).view(data)

    patch.setattr(transport.Region, "tensor", lambda self, shape, _dtype: eager(self, shape))


def overflows_remain(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm.worker import tap
    from steerscope.engines.vllm.worker.index_layout import FLAG

    def wrong(lost, _delta, _residual, index, overflow_flags):
        overflow_flags[index[lost, FLAG].long()] = 1

    patch.setattr(tap, "_clear_overflow", wrong)


def nobody_remembers(patch: pytest.MonkeyPatch) -> None:
    from steerscope.engines.vllm import wire

    patch.setattr(wire.Recent, "add", lambda _self, _one: None)


MUTATIONS: list[tuple[Mutation, Callable[[SyncEngine], None]]] = [
    (rows_by_arrival, own_rows),
    (half_the_residual, own_rows),
    (no_steering, own_rows),
    (positions_off_by_one, chosen_positions),
    (no_salt, cache_is_parted),
    (salt_without_positions, selectors_part_the_cache),
    (salt_by_name, a_swapped_name_is_another_vector),
    (reads_the_cache, captured_prompts_are_whole),
    (memory_reused_at_once, rows_stay),
    (overflows_remain, an_overflow_stays_alone),
    (nobody_remembers, nor_by_another_client),
]


@pytest.mark.parametrize(("mutation", "check"), MUTATIONS, ids=lambda item: item.__name__)
def test_without_its_guard_the_wrong_shows(
    mutation: Mutation, check: Callable[[SyncEngine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some show at the start already, where the self-tests refuse to serve: they are switched off to see the check."""
    mutation(monkeypatch)
    monkeypatch.setattr("steerscope.engines.vllm.worker.worker.check_taps", lambda *_: None)
    monkeypatch.setattr("steerscope.engines.vllm.client.engine.self_test", lambda *_: None)
    engine = begin(max_num_batched_tokens=BLOCK)
    try:
        with pytest.raises((AssertionError, RequestFailed, pytest.fail.Exception)) as found:
            check(engine)
        assert "TypeError" not in str(found.value), "the mutation itself is broken"
    finally:
        engine.close()


def test_a_worker_refuses_to_serve_a_tap_that_does_not_steer(monkeypatch: pytest.MonkeyPatch) -> None:
    no_steering(monkeypatch)
    with pytest.raises(UnsupportedModel, match="self-test failed: steering at resid_post of layer 0 did not arrive"):
        begin()


def test_so_does_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_steering(monkeypatch)
    monkeypatch.setattr("steerscope.engines.vllm.worker.worker.check_taps", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="self-test of llama failed: a vector added at resid_post"):
        begin()
