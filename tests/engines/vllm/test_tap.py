"""The light way through a tap against the heavy one, which is tested against the float64 oracle."""

import pytest
import torch

from steerscope.engines.vllm.pool import TRASH
from steerscope.engines.vllm.step import (
    ASKER,
    CELL,
    ENTRIES,
    GROUP,
    LIGHT_CELL,
    LIGHT_COEFFICIENT,
    LIGHT_GROUP,
    LIGHT_VECTOR,
)
from steerscope.engines.vllm.tap import Shared, Tap

TOKENS, HIDDEN, SLOTS, GROUPS, CELLS = 12, 16, 5, 4, 40


def taps(dtype: torch.dtype) -> tuple[Tap, Tap]:
    """The same tables; index rows that mean the same, one for the light way and one for the heavy one."""
    rng = torch.Generator().manual_seed(1)
    vectors = torch.randn(SLOTS, HIDDEN, generator=rng)
    vectors[0] = 0
    coefficients = torch.tensor([[0.0, 0, 0, -torch.inf, torch.inf]]).repeat(SLOTS, 1)
    coefficients[1:, 0] = torch.randn(SLOTS - 1, generator=rng)
    number = torch.randint(0, SLOTS, (TOKENS,), generator=rng, dtype=torch.int32)
    group = torch.randint(0, GROUPS, (TOKENS,), generator=rng, dtype=torch.int32)
    cell = 3 * torch.arange(TOKENS, dtype=torch.int32)
    found = []
    for light in (True, False):
        index = torch.zeros(TOKENS + 3, 16, dtype=torch.int32)
        index[:TOKENS, LIGHT_CELL if light else CELL] = cell
        index[:TOKENS, LIGHT_GROUP if light else GROUP] = group
        for column in (LIGHT_VECTOR, LIGHT_COEFFICIENT) if light else (ENTRIES, ENTRIES + 1):
            index[:TOKENS, column] = number
        index[:TOKENS, ASKER] = 1 + torch.arange(TOKENS)
        shared = Shared(
            pool=torch.full((CELLS + TRASH, HIDDEN), 7.0, dtype=dtype),
            index=index,
            gates=torch.ones(2),
            before=torch.tensor([False, True, False, False]),
            faults=torch.zeros(TOKENS + 2, dtype=torch.int32),
        )
        made = Tap(shared, vectors, coefficients, light=light)
        made.order.copy_(torch.tensor([-1, 2, 0, -1]))
        found.append(made)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_both_ways_lead_to_the_same(dtype: torch.dtype, residual: bool, compiled: bool) -> None:
    rng = torch.Generator().manual_seed(2)
    delta = torch.randn(TOKENS, HIDDEN, generator=rng).to(dtype)
    rest = torch.randn(TOKENS, HIDDEN, generator=rng).to(dtype) if residual else None
    light, heavy = taps(dtype)
    mine, theirs = delta.clone(), delta.clone()
    run = torch.compile(light, backend="aot_eager", fullgraph=True) if compiled else light
    run(mine, rest)
    heavy(theirs, rest)
    assert torch.equal(mine, theirs)
    assert torch.equal(light.pool[:CELLS], heavy.pool[:CELLS])
    assert not torch.equal(mine, delta)
    assert (light.pool[:CELLS] != 7).any()


def test_what_only_reads_steers_nothing() -> None:
    light, _ = taps(torch.float32)
    light.steer = False
    delta = torch.randn(TOKENS, HIDDEN)
    before = delta.clone()
    light(delta, None)
    assert torch.equal(delta, before)
    assert (light.pool[:CELLS] != 7).any()
