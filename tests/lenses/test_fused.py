"""The kernels of lenses. In Triton's interpreter, in the process that tests/engines/vllm/test_kernel.py starts; there
float16 stands for the bfloat16 of a GPU, which it cannot multiply."""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lenses.packs import info, make, rows
from steerscope.lenses.bank import Bank
from steerscope.lenses.pack import Pack
from steerscope.lenses.reader import Reader, Registered
from steerscope.lenses.stack import Weights, trusted
from support.gpu_code import compiled

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_kernel.py starts")
compiles = pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="needs Triton's compiler")


def with_kernels(bank: Bank, compute: torch.dtype = torch.float16) -> Bank:
    """As on a GPU, but for where its tensors are."""
    from steerscope.lenses import fused

    stack = bank._stack
    stack.kernels, stack.compute = fused, compute
    for i in range(stack.depth - 1):
        for name in (f"b{i}", f"s{i}", *([] if stack.weights == "int8" else [f"w{i}"])):
            if name in stack.tensors:
                stack.tensors[name] = stack.tensors[name].to(compute)
    return bank


def choosing(bank: Bank, compute: torch.dtype = torch.float32) -> Bank:
    """The same, and warm. Lenses themselves are evaluated as before, if that is in float32."""
    with_kernels(bank, compute).warm_up()
    assert bank._chooses
    return bank


@interpreted
@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize(("widths", "hidden"), [((128, 64), 80), ((24,), 72), ((20, 12), 200)])
def test_every_lens_and_row_is_as_without_the_kernel(widths: tuple[int, ...], hidden: int, weights: Weights) -> None:
    pack, some = make([3, 6], hidden=hidden, widths=widths, normed=True), rows(64, hidden)
    for lenses in (None, [5, 2, 3]):
        plain, bank = Bank(pack, lenses, weights=weights), with_kernels(Bank(pack, lenses, weights=weights))
        wanted = plain.logits(some)
        for count in (1, 16, 17, 64):
            torch.testing.assert_close(bank.logits(some[:count]), wanted[:count], atol=2e-2, rtol=2e-2)


@interpreted
@pytest.mark.parametrize(("slots", "weights"), [([1], "bf16"), ([3, 6], "int8")])
def test_a_kernel_is_used_only_if_it_says_what_the_other_way_says(
    slots: list[int], weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    from steerscope.lenses import fused

    def off(by: float) -> Any:
        def evaluate(tensors: Any, x: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
            fused.evaluate(tensors, x, start, stop, out)
            out[-1, -1] += by

        return SimpleNamespace(ROWS=fused.ROWS, evaluates=fused.evaluates, evaluate=evaluate)

    def broken(*_: Any) -> None:
        raise RuntimeError("no shared memory")

    stack = with_kernels(Bank(make(slots, hidden=72, widths=(24, 12)), weights=weights))._stack
    assert trusted(lambda: stack._fault(fused))
    assert not caplog.messages
    assert not any(tensor[-1].any() for tensor in stack.tensors.values())
    for kernels, said in ((off(1.0), "off by"), (off(float("nan")), "nan"), (off(0.0), "")):
        caplog.clear()
        assert trusted(lambda kernels=kernels: stack._fault(kernels)) == (not said)
        assert said in caplog.text
    kernels = SimpleNamespace(ROWS=fused.ROWS, evaluates=fused.evaluates, evaluate=broken)
    assert not trusted(lambda: stack._fault(kernels))  # type: ignore[arg-type]
    assert "lens kernels are not used: RuntimeError: no shared memory" in caplog.text


@interpreted
@pytest.mark.parametrize("calibrated", [False, True])
def test_choosing_is_used_only_if_it_finds_what_the_other_way_finds(
    calibrated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from steerscope.lenses import fused

    bank = choosing(Bank(make([40], calibrated=calibrated)))
    assert not caplog.messages

    def wrong(how: str) -> Any:
        def choose(logits: torch.Tensor, k: int, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            *rest, view = rest
            values, lenses = fused.choose(logits, k, *rest, None if how == "unseen" else view)
            match how:
                case "turned":
                    lenses = lenses.flip(-1)
                case "twice":
                    lenses[:, 1], values[:, 1] = lenses[:, 0], values[:, 0]
                case "scores":
                    logits[0, 0] += 0.1
                case "broken":
                    raise RuntimeError("no compiler")
            return values, lenses

        return SimpleNamespace(CHOSEN=fused.CHOSEN, chooses=fused.chooses, choose=choose, evaluates=fused.evaluates)

    for how in ("turned", "twice", "scores", "unseen", "broken", "right"):
        caplog.clear()
        bank._stack.kernels = wrong(how)
        bank.warm_up()
        assert bank._chooses == (how == "right") == (not caplog.messages), how
    bank._stack.kernels = wrong("broken")
    bank.warm_up()
    assert "lens kernels are not used: RuntimeError: no compiler" in caplog.text
    assert bank.best(rows(3), 5, torch.ones(1, 40).bool())[1].shape == (3, 5)


@interpreted
def test_in_whatever_parts_weights_are_read_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu import lens_kernel

    for name in ("WARPS", "STAGES"):
        monkeypatch.setattr(lens_kernel, name, (4,))
    bank = with_kernels(Bank(make([5], hidden=200, widths=(24, 12)), weights="int8"))
    kept, told = lens_kernel.runnable(lens_kernel.ways(bank, rows(20, 200)))
    assert set(kept) == {"memory", *told}
    assert list(told)[1:] == ["as it is", *(f"{n} bytes, 4 warps, 4 stages" for n in (64, 128, 256))]
    assert max(told.values()) < 0.01


@interpreted
@pytest.mark.parametrize("normalisation", ["none", "layernorm"])
def test_rows_and_results_may_lie_in_any_order(normalisation: Any) -> None:
    pack, some = make([3, 6], hidden=40, widths=(16, 8), normalisation=normalisation), rows(5, 40)
    wanted, bank = Bank(pack, weights="bf16").logits(some), with_kernels(Bank(pack, weights="bf16"))
    room = torch.full((18, 5), 7.0)
    for out in (room[:9].T, room.T[:, ::2]):
        bank.logits(some.T.contiguous().T, out=out)
        torch.testing.assert_close(out, wanted, atol=4e-2, rtol=4e-2)
    assert (room[9:] == 7).sum() == 5 * 5  # of the second, every other one


@interpreted
def test_inputs_that_do_not_fit_the_workspace_come_in_parts() -> None:
    from steerscope.lenses import fused

    pack, some = make(hidden=80, widths=(16, 8)), rows(40, 80)
    bank, parts = with_kernels(Bank(pack, weights="bf16", workspace=16 << 10)), list[int]()

    def evaluate(tensors: Any, x: torch.Tensor, *rest: Any) -> None:
        parts.append(len(x))
        fused.evaluate(tensors, x, *rest)

    bank._stack.kernels = SimpleNamespace(evaluate=evaluate, evaluates=fused.evaluates)  # type: ignore[assignment]
    torch.testing.assert_close(bank.logits(some), Bank(pack).logits(some), atol=4e-2, rtol=4e-2)
    assert sum(parts) == 40
    assert all(bank._stack.workspace_bytes(part, 0) <= 16 << 10 for part in parts)


@interpreted
@pytest.mark.parametrize("widths", [(16, 8), (16,)])
def test_a_row_that_is_no_number_says_nothing(widths: tuple[int, ...]) -> None:
    some = rows(3)
    some[0, 1], some[2, 5] = float("nan"), float("inf")
    bank = choosing(Bank(make(widths=widths), weights="bf16"), torch.float16)
    assert bank.logits(some).isnan().all(1).tolist() == [True, False, True]
    values, indices, scores = bank.best(some, 4, torch.ones(1, len(bank)).bool())
    assert (values[0::2] == 0).all()
    assert (indices[0::2] == -1).all()
    assert (indices[1] >= 0).all()
    assert scores[0::2].isnan().all()


@interpreted
def test_nothing_is_written_beside_the_lenses_that_were_asked_for() -> None:
    from steerscope.lenses import fused

    bank = Bank(make(hidden=40, widths=(16, 8)))
    some, out = rows(3, 40), torch.full((5, len(bank)), 7.0)
    fused.evaluate(bank._stack.tensors, bank._stack.inputs(some)[0][1], 2, 5, out[:3, 1:4])
    torch.testing.assert_close(out[:3, 1:4], bank.logits(some)[:, 2:5], atol=1e-5, rtol=1e-5)
    out[:3, 1:4] = 7.0
    assert (out == 7).all()


@interpreted
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("output", ["sigmoid", "relu", "jumprelu"])
def test_what_is_chosen_is_what_would_be_without_the_kernel(output: Any, calibrated: bool) -> None:
    widths = (16, 8) if output == "sigmoid" else ()
    pack, some = make(widths=widths, output="sigmoid", calibrated=calibrated), rows(9)
    tensors = {**pack.tensors, "threshold": torch.full((len(pack),), 0.3)} if output == "jumprelu" else pack.tensors
    pack = Pack(info(widths=widths, output=output), pack.concepts, tensors)
    readers = [Reader(Registered(pack)) for _ in range(2)]
    for reader in readers:
        assert reader.view((1,)) == 1
    assert readers[1].bank is not None
    choosing(readers[1].bank)
    columns, view = torch.tensor([[0, 3]]).expand(9, 2), torch.zeros(9, 10, dtype=torch.long)[:, 3]
    view[1::2] = 1
    for k in (1, 5, 200):
        for how in ((None, None), (columns, None), (columns, view)):
            plain, chosen = (reader.read(some, k, *how) for reader in readers)
            torch.testing.assert_close(chosen.values, plain.values, atol=1e-6, rtol=1e-6)
            assert chosen.indices.tolist() == plain.indices.tolist()
            if how[0] is None:
                assert chosen.scores is None
            else:
                torch.testing.assert_close(chosen.scores, plain.scores, atol=1e-6, rtol=1e-6)


@interpreted
def test_there_are_no_more_than_all() -> None:
    plain, bank = Bank(make([4])), choosing(Bank(make([4])))
    views = torch.ones(1, 4).bool()
    for mine, theirs in zip(bank.best(rows(3), 9, views), plain.best(rows(3), 9, views), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@interpreted
def test_of_equal_scores_the_earlier_lens_is_first_and_what_is_no_number_is_not_chosen() -> None:
    from steerscope.lenses import fused

    logits = torch.tensor([[50.0, 60.0, float("nan"), 70.0, -200.0, 80.0]])
    per_lens = dict.fromkeys(("threshold", "floor", "low", "high", "confidence"), torch.zeros(6))
    values, indices = fused.choose(logits, 5, "sigmoid", per_lens, False, False, torch.ones(1, 6).bool(), None)
    assert values.tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0]]
    assert indices.tolist() == [[0, 1, 3, 5, -1]]


@compiles
@pytest.mark.parametrize("weights", ["i8", "bf16"])
@pytest.mark.parametrize("count", [16, 32, 64])
def test_weights_come_while_the_matrix_units_work_and_three_programs_fit_a_core(weights: str, count: int) -> None:
    """267 lenses on 132 cores of 228 kB: with two a core, three lenses would come after all others."""
    from steerscope.lenses import fused

    kinds = dict.fromkeys(("w2", "b2", "out"), "*fp32") | dict.fromkeys(("x", "s0", "b0", "s1", "b1"), "*bf16")
    kinds |= dict.fromkeys(("w0", "w1"), f"*{weights}")
    line, warps, parts = fused.shape(1 if weights == "i8" else 2, count)
    fixed = {"DEEP": True, "SCALED": weights == "i8", "N": count, "K": line, "WIDE": 128, "NARROW": 64}
    made = compiled(fused._evaluate, kinds, {**fixed, "PRECISION": "ieee"}, num_warps=warps, num_stages=parts)
    assert "wgmma" in made.asm["ptx"]
    assert "cp.async" in made.asm["ptx"]
    assert "max.f32" not in made.asm["ptx"], "what is no number would become 0"
    assert made.metadata.shared <= 75 << 10


@compiles
def test_choosing_compiles() -> None:
    from steerscope.lenses import fused

    kinds = dict.fromkeys(("scores", "threshold", "floor", "low", "high", "confidence", "values"), "*fp32")
    kinds |= {"views": "*u8", "view": "*i64", "indices": "*i64", "tiny": "fp32"}
    fixed = {"L": 512, "K": 16, "OUTPUT": 0, "FLOORED": True, "CALIBRATED": True, "VIEWED": True}
    assert ".entry" in compiled(fused._choose, kinds, fixed, num_warps=4).asm["ptx"]
