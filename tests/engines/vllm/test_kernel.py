"""The tap of CUDA against the tap in torch, which is tested against the float64 oracle. Triton's interpreter runs the
kernel's own code on a CPU, in a process of its own: whether Triton interprets is settled when it is imported."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.engines.vllm.worker.index_layout import (
    CELL,
    ENTRIES,
    FLAG,
    GROUP,
    PRECOMPUTED,
    STRIDE,
    WATCHED,
)
from support.gpu_code import compiled
from support.waiting import HUNG_S

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
compiles = pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="needs Triton's compiler")
GROUPS, SLOTS, CELLS = 5, 7, 64
NAN, INF = float("nan"), float("inf")


@pytest.mark.long
@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="this is that process, or there is none")
def test_the_kernels_equal_their_definitions_in_tritons_interpreter() -> None:
    """Runs the tests below, and those of the kernels for readings, reductions and lenses."""
    here, root = Path(__file__), Path(__file__).parents[3]
    files = [str(here.with_name(f"test_{name}.py")) for name in ("kernel", "lens_readout", "reductions")]
    files.append(str(root / "tests" / "lenses" / "test_fused.py"))
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=HUNG_S)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "47 passed" in done.stdout, done.stdout[-4000:]


def made(function: Any, **fixed: Any) -> Any:
    """As an engine launches it."""
    from steerscope.engines.vllm.cuda import precomputed_ops

    now: dict[str, Any] = {"COLUMNS": 4, "BLOCK": 2048, "STEER": True, "CAPTURE": True, "RESIDUAL": True}
    now |= {"ADDS_ONE": False, "LAST": True, "LARGE": 3e38, "WATCHED": WATCHED}
    now |= {"FLAG": FLAG, "CELL": CELL, "GROUP": GROUP, "STRIDE": STRIDE, "ENTRIES": ENTRIES}
    now |= {
        "PRECOMPUTED": PRECOMPUTED,
        "TAIL": precomputed_ops.TAIL,
        "PLACE": precomputed_ops.PLACE,
        "BEFORE": precomputed_ops.BEFORE,
    } | fixed
    kinds = dict.fromkeys(("delta", "residual", "weight", "normed", "stream", "pool"), "*bf16")
    kinds |= dict.fromkeys(("vectors", "coefficients", "gates", "precomputed"), "*fp32") | {
        "before": "*i1",
        "epsilon": "fp32",
    }
    kinds |= dict.fromkeys(("index", "order", "orders", "overflow_flags"), "*i32")
    return compiled(function, kinds, {name: now[name] for name in function.arg_names if name in now}, num_warps=8)


@compiles
def test_the_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    from steerscope.engines.vllm.cuda import fused_norm, kernel, precomputed_ops

    for function in (
        kernel._kernel, kernel.end_kernel, precomputed_ops._precompute_kernel, fused_norm.fused_kernel
    ):  # fmt: skip
        assert ".entry" in made(function).asm["ptx"]
    assert ".entry" in made(fused_norm.fused_kernel, STEER=False, CAPTURE=False).asm["ptx"]


def instructions(kernel: Any, folder: Path) -> list[str]:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    found = subprocess.run([program, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    return [line.split("*/", 1)[1].strip() for line in found.splitlines() if re.match(r"\s+/\*[0-9a-f]{4}\*/", line)]


@compiles
@pytest.mark.parametrize(("steer", "most"), [(True, 5), (False, 2)])
def test_no_read_of_a_decoding_step_waits_for_another(tmp_path: Path, steer: bool, most: int) -> None:
    """Which tables are read is a matter of a microsecond in every layer: where the compiler puts a use of one answer
    before the next question, the memory's time is paid twice. `most` are the wide reads that are asked for so: the
    stream, its change, what lies ready; and the weights, which without steering may come later."""
    from steerscope.engines.vllm.cuda import fused_norm

    asked: set[int] = set()  # registers that wait for an answer
    wide = 0
    for line in instructions(made(fused_norm.fused_kernel, STEER=steer), tmp_path):
        used = {int(number) for number in re.findall(r"\bR(\d+)", line)}
        read = re.search(r"LDG\S* R(\d+), \S*\[R(\d+)", line)
        if re.search(r"\b(BRA|BAR)\b", line) or (read is None and asked & used):
            break
        if read is not None:
            assert int(read[2]) not in asked, f"{line} waits for an answer"
            many = 4 if ".128" in line else 1
            wide += many == 4
            asked |= set(range(int(read[1]), int(read[1]) + many))
    assert wide >= most


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that the test above starts")


def tables(tokens: int, hidden: int, columns: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Everything a tap reads, drawn at random; slot 0 and group 0 are nothing, as everywhere."""
    rng = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=rng, dtype=torch.int32)

    index = torch.zeros(tokens + 2, ENTRIES + 3 * columns, dtype=torch.int32)
    index[:, CELL] = 3 * torch.arange(tokens + 2)  # room for three captured taps of each token
    index[:, GROUP] = draw(GROUPS, tokens + 2)
    index[:, STRIDE] = draw(3, tokens + 2)
    for k in range(ENTRIES, ENTRIES + 3 * columns, 3):
        index[:, k] = draw(SLOTS, tokens + 2)
        index[:, k + 1] = draw(SLOTS, tokens + 2) * draw(2, tokens + 2)  # half the entries are empty
        index[:, k + 2] = draw(3, tokens + 2)
    index[:, FLAG] = (1 + torch.arange(tokens + 2)) * index[:, ENTRIES + 1 :: 3].ne(0).any(1)
    vectors = torch.randn(SLOTS, hidden, generator=rng) / hidden**0.5
    coefficients = torch.randn(SLOTS, 5, generator=rng)
    coefficients[:, 3:] = torch.tensor([[-INF, INF], [-0.2, INF], [-INF, 0.1], [-0.1, 0.3]])[draw(4, SLOTS).long()]
    coefficients[1, 1:3] = 0  # a plain addition
    coefficients[0] = torch.tensor([0.0, 0.0, 0.0, -INF, INF])
    vectors[0] = 0
    order = draw(4, GROUPS) - 1 + WATCHED * (torch.arange(GROUPS, dtype=torch.int32) % 2)  # some are watched too
    order[0] = -1
    before = draw(2, GROUPS).bool()
    pool = torch.full((CELLS + tokens + 2, hidden), 7.0, dtype=dtype)
    overflow_flags = torch.zeros(tokens + 4, dtype=torch.int32)
    overflow_flags[0] = 1  # a request is tracked
    return [pool, index, vectors, coefficients, torch.tensor([1.0, 0.0, 0.5]), order, before, overflow_flags]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """With its strides, which clone does not keep where there are gaps."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def both(delta: torch.Tensor, residual: torch.Tensor | None, given: list, steer: bool, capture: bool) -> list[list]:
    """What the two taps leave behind, in (delta, pool, overflow_flags, residual)."""
    from steerscope.engines.vllm.cuda.kernel import cuda_end, cuda_tap
    from steerscope.engines.vllm.worker.tap import _torch_tap

    found = []
    for tap in (cuda_tap, _torch_tap):
        mine, rest = copied(delta), [tensor.clone() for tensor in given]
        other = None if residual is None else copied(residual)
        tap(mine, other, *rest, steer, capture)
        if tap is cuda_tap:  # on CUDA that is a kernel of its own
            if capture:
                cuda_end(mine, rest[1], rest[-1])
            moved = given[1][: len(delta), CELL] + (given[1][: len(delta), STRIDE] if capture else 0)
            assert torch.equal(rest[1][: len(delta), CELL], moved)
        found.append([mine, rest[0], rest[-1], other])
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To a few steps of the dtype: the sum of a dot product is taken in another order."""
    step = max(1e-6, 4 * torch.finfo(found.dtype).eps)
    return torch.allclose(found.float(), wanted.float(), rtol=step, atol=4 * step, equal_nan=True)


@interpreted
@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    tokens=st.integers(1, 6),
    hidden=st.sampled_from([16, 48, 64]),
    columns=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    shape=st.sampled_from(["one tensor", "pair", "strided"]),
    kind=st.sampled_from([(True, True), (True, False), (False, True)]),
    seed=st.integers(0, 999),
)
def test_any_tokens(
    tokens: int, hidden: int, columns: int, dtype: torch.dtype, shape: str, kind: tuple[bool, bool], seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed + 1)
    delta, residual = (torch.randn(tokens, 2 * hidden, generator=rng).to(dtype) for _ in range(2))
    delta, residual = (part[:, :hidden] for part in (delta, residual))
    if shape != "strided":
        delta, residual = delta.contiguous(), residual.contiguous()
    given_tables = tables(tokens, hidden, columns, dtype, seed)
    kernel, torch_tap = both(delta, None if shape == "one tensor" else residual, given_tables, *kind)
    assert close(kernel[0], torch_tap[0])
    assert close(kernel[1], torch_tap[1])
    assert torch.equal(kernel[2], torch_tap[2])
    steered = (
        given_tables[1][:tokens, ENTRIES + 1 :: 3].ne(0).any(1) if kind[0] else torch.zeros(tokens, dtype=torch.bool)
    )
    assert torch.equal(kernel[0][~steered], delta[~steered])  # not touched at all


@interpreted
def test_steering_and_capture_do_something() -> None:
    """The comparison above means something only if the drawn tables change streams and fill cells."""
    delta = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    (changed, pool, *_), _ = both(delta, None, tables(6, 48, 3, torch.float32, 1), True, True)
    assert not close(changed, delta)
    plan = (pool != 7).any(1)
    assert 1 < int(plan[:CELLS].sum()) < CELLS
    assert 0 < int(plan[CELLS:].sum()) < 6


def overflowing(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Tokens that gain a half: one is fine, one is NaN, one is untracked, one is behind a closed gate, one is too large
    in sum, and one in the stream already."""
    given_tables = tables(6, 16, 1, dtype, 0)
    index, coefficients = given_tables[1], given_tables[3]
    index[:] = 0
    index[:6, ENTRIES:] = torch.tensor([1, 1, 0])
    index[2, ENTRIES:], index[3, ENTRIES + 2] = 0, 1
    index[:6, FLAG] = torch.tensor([1, 2, 0, 4, 5, 6])
    index[:6, GROUP], index[:, CELL] = 1, torch.arange(8)
    given_tables[5][1], given_tables[6][1] = 0, False
    coefficients[1] = torch.tensor([0.5, 0.0, 0.0, -INF, INF])
    delta, residual = torch.ones(6, 16, dtype=dtype), torch.ones(6, 16, dtype=dtype)
    delta[1, 3], delta[2, 5], delta[3, 7] = NAN, INF, INF
    delta[4, 2] = residual[4, 2] = 0.75 * torch.finfo(dtype).max
    residual[5, 1] = INF
    return given_tables, delta, residual


FAULTY = [1, 0, 1, 0, 1, 1, 1]  # the first says that a request is tracked


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_steered_row_that_is_not_finite_is_noted_and_silenced_and_others_keep_their_infinity(
    dtype: torch.dtype,
) -> None:
    given_tables, delta, residual = overflowing(dtype)
    kernel, torch_tap = both(delta, residual, given_tables, True, True)
    for changed, pool, overflow_flags, stream in (kernel, torch_tap):
        assert overflow_flags.tolist()[:7] == FAULTY
        assert torch.equal(changed[2], delta[2])
        assert torch.equal(stream[:3:2], residual[:3:2])
        for silenced in (changed, stream, pool):
            assert not silenced[[1, 3, 4, 5]].any()
        assert (changed[0] != 0).all()
    alone, _ = both(delta, None, given_tables, True, True)
    assert alone[2].tolist()[:7] == [1, 0, 1, 0, 1, 0, 0]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 6])
def test_nor_does_it_leave_the_norm(dtype: torch.dtype, rows: int) -> None:
    given_tables, delta, residual = overflowing(dtype)
    kernel, wanted = both_normed(delta, residual, torch.ones(16, dtype=dtype), False, given_tables, True, rows)
    assert kernel[3].tolist()[:7] == FAULTY
    assert all(close(mine, theirs) for mine, theirs in zip(kernel[:3], wanted[:3], strict=True))
    for silenced in kernel[:3]:
        assert not silenced[[1, 3, 4, 5]].any()
    assert not kernel[0][2].isfinite().all()


def laid_out(given: list, rows: int) -> torch.Tensor:
    """What is done to the first rows, precomputed ready; the index says so."""
    from steerscope.engines.vllm.cuda.precomputed_ops import PrecomputedOps

    _, index, vectors, coefficients, _, order, before, _ = given
    ready = PrecomputedOps(vectors[None], coefficients[None], order[None], before, index, rows)
    ready.compute(min(2, rows))
    ready.compute(rows)
    index[:, FLAG] += PRECOMPUTED
    return ready.table[0]


def both_normed(
    delta: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    adds_one: bool,
    given: list,
    steer: bool,
    rows: int = 0,
) -> list[list]:
    """What the kernel that is a norm too leaves behind, and what the tap and vLLM's norm do one after the other, in
    (normed, stream, pool, overflow_flags)."""
    from steerscope.engines.vllm.cuda.fused_norm import cuda_tap_norm
    from steerscope.engines.vllm.worker.tap import _torch_tap

    rest = [tensor.clone() for tensor in given]
    precomputed = laid_out(rest, rows) if rows else torch.zeros(0)
    normed, stream = cuda_tap_norm(delta, residual, weight, 1e-6, adds_one, precomputed, *rest, steer, True, True)
    rest[1][:, FLAG] %= PRECOMPUTED
    mine, other = copied(delta), [tensor.clone() for tensor in given]
    left = copied(residual)
    _torch_tap(mine, left, *other, steer, True)
    x = mine.float() + left.float()
    scale = weight.float() + 1 if adds_one else weight
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = (y.to(scale.dtype) * scale).to(delta.dtype)
    other[1][: len(delta), CELL] += other[1][: len(delta), STRIDE]  # as the last tap of a step does
    return [[normed, stream, rest[0], rest[-1], rest[1]], [wanted, x.to(delta.dtype), other[0], other[-1], other[1]]]


@interpreted
@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    tokens=st.integers(1, 6),
    hidden=st.sampled_from([16, 48, 64]),
    columns=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    adds_one=st.booleans(),
    strided=st.booleans(),
    steer=st.booleans(),
    rows=st.integers(0, 6),
    seed=st.integers(0, 999),
)
def test_any_tokens_through_the_norm(
    tokens: int,
    hidden: int,
    columns: int,
    dtype: torch.dtype,
    adds_one: bool,
    strided: bool,
    steer: bool,
    rows: int,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed + 2)
    delta, residual = (torch.randn(tokens, 2 * hidden, generator=rng).to(dtype)[:, :hidden] for _ in range(2))
    if not strided:
        delta, residual = delta.contiguous(), residual.contiguous()
    weight = torch.randn(hidden, generator=rng).to(dtype)
    before = copied(delta), copied(residual)
    drawn = tables(tokens, hidden, columns, dtype, seed)
    kernel, wanted = both_normed(delta, residual, weight, adds_one, drawn, steer, min(rows, tokens))
    assert all(close(mine, theirs) for mine, theirs in zip(kernel[:3], wanted[:3], strict=True))
    assert torch.equal(kernel[3], wanted[3])
    assert torch.equal(kernel[4], wanted[4])
    assert torch.equal(delta, before[0])
    assert torch.equal(residual, before[1])


@interpreted
def test_precomputed_rows() -> None:
    """Each kind of row: no op, a sum of additions, one op that depends on the stream, and ops that are looked up."""
    from steerscope.engines.vllm.cuda.precomputed_ops import BEFORE, PLACE

    given_tables = tables(8, 16, 2, torch.float32, 0)
    _, index, vectors, coefficients, *_ = given_tables
    coefficients[1], coefficients[2] = torch.tensor([[0.5, 0, 0, -INF, INF], [-2.0, 0, 0, 0.5, INF]])
    coefficients[3] = torch.tensor([0.0, 1, 1, -INF, 0.1])
    coefficients[4] = coefficients[0]  # it acts at other layers
    index[:, ENTRIES:] = 0
    index[:8, ENTRIES:] = torch.tensor(
        [[0, 0, 0, 0, 0, 0], [5, 4, 0, 0, 0, 0], [1, 1, 0, 2, 2, 0], [3, 1, 2, 0, 0, 0], [0, 0, 0, 4, 3, 0],
         [4, 3, 0, 1, 1, 0], [4, 3, 1, 0, 0, 0], [5, 4, 1, 4, 3, 0]]
    )  # fmt: skip
    precomputed = laid_out(given_tables, 8)
    assert precomputed[:, 16].tolist() == [0, 0, 1, -1, 2, -1, -1, 2]
    assert torch.allclose(precomputed[2, :16], 0.5 * vectors[1] + (0.5 - 2.0) * vectors[2])
    for row in (4, 7):
        assert torch.equal(precomputed[row, :16], vectors[4])
        assert torch.equal(precomputed[row, 17:22], coefficients[3])
    order, before = given_tables[5], given_tables[6]
    group = index[:8, GROUP].long()
    assert precomputed[:, 16 + PLACE].tolist() == order[group].tolist()
    assert precomputed[:, 16 + BEFORE].tolist() == before[group].float().tolist()


@interpreted
def test_without_the_kernels_the_norm_is_the_models_own() -> None:
    from steerscope.engines.vllm.worker.tap import TapMode, launch_mode

    delta, residual = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3))
    given_tables = tables(4, 16, 2, torch.float32, 1)
    with launch_mode(TapMode(False, False)):
        kernel, _ = both_normed(delta, residual, torch.ones(16), False, given_tables, True)
    x = delta + residual
    assert torch.equal(kernel[1], x)
    assert close(kernel[0], x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert torch.equal(kernel[2], given_tables[0])


@interpreted
def test_a_state_that_the_kernel_cannot_read_is_refused() -> None:
    given_tables = tables(4, 16, 1, torch.float32, 0)
    from steerscope.engines.vllm.cuda.kernel import cuda_tap

    with pytest.raises(ValueError, match="made for 6"):
        cuda_tap(torch.ones(7, 16), None, *given_tables, True, True)
    with pytest.raises(ValueError, match="not contiguous"):
        cuda_tap(torch.ones(16, 4).T, None, *given_tables, True, True)
