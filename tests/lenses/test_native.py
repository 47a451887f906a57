"""The compiled functions for lenses of narrow weights on a CPU: as without them, whatever the rows."""

import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lenses.packs import info, make, rows
from steerscope.lenses import stack
from steerscope.lenses.bank import Bank
from steerscope.lenses.stack import Stack, Weights
from steerscope.lenses.tiers import Tiers

native = pytest.importorskip("steerscope.lenses.native", reason="needs Numba")


def without(bank: Bank, what: Callable[[], Tensor]) -> Tensor:
    kept, bank._stack.kernels = bank._stack.kernels, None
    try:
        return what()
    finally:
        bank._stack.kernels = kept


@pytest.mark.parametrize(("weights", "off"), [("bf16", 1e-5), ("int8", 1e-3)])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("widths", "hidden"), [((), 40), ((24,), 72), ((128, 64), 80), ((20, 12), 37), ((9, 8, 5), 16)]
)
def test_every_lens_and_row_is_as_without_them(
    widths: tuple[int, ...], hidden: int, threads: int, weights: Weights, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_WORTH_A_THREAD", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    pack, some = make([3, 6], hidden=hidden, widths=widths, normed=True), rows(17, hidden)
    for lenses in (None, [5, 2, 3], [7]):
        bank = Bank(pack, lenses, weights=weights)
        assert bank._stack.kernels is native
        wanted = without(bank, lambda bank=bank: bank.logits(some))
        for count in (1, 2, 8, 9, 16, 17):
            found = bank.logits(some[:count])
            torch.testing.assert_close(found, wanted[:count], atol=off * float(wanted.abs().max()), rtol=0)
        out = torch.full((4, 2 * len(bank)), torch.nan)[:, ::2]  # whatever lies between stays
        assert bank.logits(some[:4], out=out) is out
        torch.testing.assert_close(out, bank.logits(some[:4]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_a_row_in_two_parts_is_the_row(numbers: list[float]) -> None:
    x = torch.tensor(numbers).view(1, 1, -1).numpy()
    high, low = (torch.full((1, x.shape[2]), -128, dtype=torch.int8).numpy() for _ in "hl")
    unit = native._apart(x, 0, 0, high, low)
    together = (high[0].astype(float) * 128 + low[0]) * float(unit)
    largest = abs(x).max()
    assert abs(together - x[0, 0]).max() <= max(largest / 127 / 128 * 0.501, 1.2e-38)
    assert abs(high).max() <= 127
    assert low.min() >= -64
    assert low.max() <= 63


@pytest.mark.parametrize(
    ("weights", "bad"), [("bf16", torch.nan), ("int8", torch.nan), ("int8", torch.inf), ("int8", -torch.inf)]
)
def test_what_is_no_number_stays_so_and_hurts_no_other_row(weights: Weights, bad: float) -> None:
    pack = make([4], hidden=24, widths=(8,), normalisation="none")
    bank, some = Bank(pack, weights=weights), rows(3, 24)
    fine = bank.logits(some)
    some[1, 5] = bad
    found = bank.logits(some)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], fine[::2])


def test_nothing_and_next_to_nothing_are_what_they_are() -> None:
    pack = make([4], hidden=24, widths=(8,), normalisation="none")
    bank = Bank(pack, weights="int8")
    some = torch.stack([torch.zeros(24), torch.full((24,), 1e-42), torch.full((24,), 1e30)])
    wanted = without(bank, lambda: bank.logits(some))
    torch.testing.assert_close(bank.logits(some), wanted, rtol=2e-3, atol=1e-6)


def test_no_more_lenses_are_evaluated_together_than_the_workspace_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    pack, some = make([3, 60], hidden=40, widths=(16,)), rows(4, 40)
    bank = Bank(pack, weights="int8", workspace=40_000)
    wanted, most, seen = Bank(pack, weights="int8").logits(some), bank._stack.tiles(4).lenses, []
    evaluate = native.evaluate
    monkeypatch.setattr(native, "evaluate", lambda *given: (seen.append(given[3] - given[2]), evaluate(*given)))
    assert torch.equal(bank.logits(some), wanted)
    assert max(seen) == most < len(pack)
    assert sum(seen) == len(pack)


def test_many_may_ask_at_once() -> None:
    pack, some = make([3, 60], hidden=40, widths=(16,)), rows(16, 40)
    bank = Bank(pack, weights="int8")
    alone = [bank.logits(some[i : i + 1 + i % 3]) for i in range(13)]
    with ThreadPoolExecutor(6) as threads:
        for _ in range(5):
            found = list(threads.map(lambda i: bank.logits(some[i : i + 1 + i % 3]), range(13)))
            assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_a_forked_process_has_threads_of_its_own() -> None:
    native._threads().submit(int).result()
    forked = multiprocessing.get_context("fork").Process(target=_asks_another_thread)
    forked.start()
    forked.join(60)
    assert forked.exitcode == 0


def _asks_another_thread() -> None:
    native._threads().submit(int).result(30)


def test_tiers_give_what_the_full_bank_gives() -> None:
    pack, some = make([3, 9, 27], hidden=40, widths=(16,)), rows(6, 40)
    full = Bank(pack, weights="int8").scores(some)
    with Tiers(pack, budget=20, base_levels=1, device="cpu", weights="int8") as tiers:
        for i in range(6):
            found = tiers.expand(some[i : i + 1], 3)
            said = found.indices[0] >= 0
            torch.testing.assert_close(found.values[0][said], full[i][found.indices[0][said]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", ["wrong", "broken"])
def test_they_are_used_only_if_they_say_what_the_other_way_says(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluate(_tensors: object, _x: Tensor, _start: int, _stop: int, out: Tensor) -> None:
        if how == "broken":
            raise RuntimeError("no such instruction")
        out.fill_(1.0)

    broken = SimpleNamespace(ROWS=native.ROWS, ALONE=False, evaluates=native.evaluates, evaluate=evaluate)
    monkeypatch.setattr(stack, "kernels", lambda *_: broken)
    pack = make([4], hidden=24, widths=(8,))
    bank = Bank(pack, weights="int8")
    assert bank._stack.kernels is None
    assert ("off by" if how == "wrong" else "no such instruction") in caplog.text
    monkeypatch.undo()
    torch.testing.assert_close(bank.logits(rows(2, 24)), Bank(pack).logits(rows(2, 24)), atol=0.05, rtol=0.05)


def test_without_numba_and_with_other_weights_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    about = info(hidden=24, widths=(8,))
    assert Stack(about, 4, torch.device("cpu"), "fp32").kernels is None
    stack.kernels.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert Stack(about, 4, torch.device("cpu"), "int8").kernels is None
    stack.kernels.cache_clear()
