"""The tap of CUDA against the tap in torch, which is tested against the float64 oracle. Triton's interpreter runs the
kernel's own code on a CPU, in a process of its own: whether Triton interprets is settled when it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.engines.vllm.step import ASKER, CELL, ENTRIES, GROUP, STRIDE
from steerscope.engines.vllm.tap import WATCHED

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
GROUPS, SLOTS, CELLS = 5, 7, 64
NAN, INF = float("nan"), float("inf")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_the_kernels_equal_their_definitions_in_tritons_interpreter() -> None:
    """Runs the tests below, and those of the kernels for readings and reductions."""
    here, root = Path(__file__), Path(__file__).parents[3]
    files = [str(here.with_name(f"test_{name}.py")) for name in ("kernel", "readout", "reducing")]
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "10 passed" in done.stdout, done.stdout[-4000:]


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
    index[:, ASKER] = (1 + torch.arange(tokens + 2)) * index[:, ENTRIES + 1 :: 3].ne(0).any(1)
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
    faults = torch.zeros(tokens + 4, dtype=torch.int32)
    faults[0] = 1  # somebody asks
    return [pool, index, vectors, coefficients, torch.tensor([1.0, 0.0, 0.5]), order, before, faults]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """With its strides, which clone does not keep where there are gaps."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def both(delta: torch.Tensor, residual: torch.Tensor | None, given: list, steer: bool, capture: bool) -> list[list]:
    """What the two taps leave behind, in (delta, pool, faults)."""
    from steerscope.engines.vllm.kernel import _cuda_end, _cuda_tap
    from steerscope.engines.vllm.tap import _torch_tap

    found = []
    for tap in (_cuda_tap, _torch_tap):
        mine, rest = copied(delta), [tensor.clone() for tensor in given]
        other = None if residual is None else copied(residual)
        tap(mine, other, *rest, steer, capture)
        if tap is _cuda_tap:  # on CUDA that is a kernel of its own
            _cuda_end(mine, other, rest[1], rest[-1], steer, capture)
            moved = given[1][: len(delta), CELL] + (given[1][: len(delta), STRIDE] if capture else 0)
            assert torch.equal(rest[1][: len(delta), CELL], moved)
        found.append([mine, rest[0], rest[-1]])
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
    (changed, pool, _), _ = both(delta, None, tables(6, 48, 3, torch.float32, 1), True, True)
    assert not close(changed, delta)
    filled = (pool != 7).any(1)
    assert 1 < int(filled[:CELLS].sum()) < CELLS
    assert 0 < int(filled[CELLS:].sum()) < 6


@interpreted
def test_what_is_not_finite_is_noted_and_an_untouched_row_keeps_its_infinity() -> None:
    given_tables = tables(4, 16, 1, torch.float32, 0)
    index, coefficients = given_tables[1], given_tables[3]
    index[:] = 0
    index[:2, ENTRIES:] = torch.tensor([1, 1, 0])
    index[3, ENTRIES:] = torch.tensor([1, 1, 1])  # its gate is closed
    index[:4, ASKER] = torch.tensor([1, 2, 0, 4])
    coefficients[1] = torch.tensor([0.5, 0.0, 0.0, -INF, INF])
    delta = torch.ones(4, 16)
    delta[1, 3], delta[2, 5], delta[3, 7] = NAN, INF, INF
    kernel, torch_tap = both(delta, None, given_tables, True, True)
    assert kernel[2].tolist() == torch_tap[2].tolist()
    assert kernel[2].tolist()[:4] == [1, 0, 1, 0]
    assert torch.equal(kernel[0][2:], delta[2:])
    assert close(kernel[0], torch_tap[0])


def both_normed(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, beside_one: bool, given: list, steer: bool
) -> list[list]:
    """What the kernel that is a norm too leaves behind, and what the tap and vLLM's norm do one after the other, in
    (normed, stream, pool, faults)."""
    from steerscope.engines.vllm.kernel import _cuda_tap_norm
    from steerscope.engines.vllm.tap import _torch_tap

    rest = [tensor.clone() for tensor in given]
    normed, stream = _cuda_tap_norm(delta, residual, weight, 1e-6, beside_one, *rest, steer, True, True)
    mine, other = copied(delta), [tensor.clone() for tensor in given]
    _torch_tap(mine, residual, *other, steer, True)
    x = mine.float() + residual.float()
    scale = weight.float() + 1 if beside_one else weight
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = (y.to(scale.dtype) * scale).to(delta.dtype)
    other[1][: len(delta), CELL] += other[1][: len(delta), STRIDE]  # as the last tap of a step does
    return [[normed, stream, rest[0], rest[-1], rest[1]], [wanted, x.to(delta.dtype), other[0], other[-1], other[1]]]


@interpreted
@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    tokens=st.integers(1, 6),
    hidden=st.sampled_from([16, 48, 64]),
    columns=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    beside_one=st.booleans(),
    strided=st.booleans(),
    steer=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_tokens_through_the_norm(
    tokens: int, hidden: int, columns: int, dtype: torch.dtype, beside_one: bool, strided: bool, steer: bool, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed + 2)
    delta, residual = (torch.randn(tokens, 2 * hidden, generator=rng).to(dtype)[:, :hidden] for _ in range(2))
    if not strided:
        delta, residual = delta.contiguous(), residual.contiguous()
    weight = torch.randn(hidden, generator=rng).to(dtype)
    before = copied(delta), copied(residual)
    kernel, wanted = both_normed(
        delta, residual, weight, beside_one, tables(tokens, hidden, columns, dtype, seed), steer
    )
    assert all(close(mine, theirs) for mine, theirs in zip(kernel[:3], wanted[:3], strict=True))
    assert torch.equal(kernel[3], wanted[3])
    assert torch.equal(kernel[4], wanted[4])
    assert torch.equal(delta, before[0])
    assert torch.equal(residual, before[1])


@interpreted
def test_without_the_kernels_the_norm_is_the_models_own() -> None:
    from steerscope.engines.vllm.tap import kernels_off

    delta, residual = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(3))
    given_tables = tables(4, 16, 2, torch.float32, 1)
    with kernels_off():
        kernel, _ = both_normed(delta, residual, torch.ones(16), False, given_tables, True)
    x = delta + residual
    assert torch.equal(kernel[1], x)
    assert close(kernel[0], x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    assert torch.equal(kernel[2], given_tables[0])


@interpreted
def test_a_state_that_the_kernel_cannot_read_is_refused() -> None:
    given_tables = tables(4, 16, 1, torch.float32, 0)
    from steerscope.engines.vllm.kernel import _cuda_tap

    with pytest.raises(ValueError, match="made for 6"):
        _cuda_tap(torch.ones(7, 16), None, *given_tables, True, True)
    with pytest.raises(ValueError, match="side by side"):
        _cuda_tap(torch.ones(16, 4).T, None, *given_tables, True, True)
