"""The one equation: the torch definition against the float64 oracle, masks, order, and the bits it keeps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.core.equation import NOTHING, apply, change, look_up, settle
from steerscope.specs.steering import Ablate, Add, Cap, Coefficients
from support.float64 import change_float64

HIDDEN = 48
GATES = torch.tensor([1.0, 0.0, 0.5])  # gate 0 is the constant 1
# A dot product of 48 float32 numbers is off by at most ~48 · 6e-8 of |h||v|, 3e-6; five ops in a row, and a cap that
# turns it into a change, make that 1.5e-5. Real errors are ten times smaller.
TOLERANCE = 2e-5


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape: int, seed: int) -> torch.Tensor:
    drawn = numbers(*shape, seed=seed)
    return drawn / drawn.norm(dim=-1, keepdim=True)


def tables(ops: list[tuple[torch.Tensor, Coefficients]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Vector and coefficient tables with slot 0 = nothing and op i in slot i + 1 of both."""
    vectors = torch.stack([torch.zeros(HIDDEN), *(v for v, _ in ops)])
    return vectors, torch.tensor([NOTHING, *(c for _, c in ops)], dtype=torch.float32)


def entries(rows: int, *columns: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([list(columns)] * rows)


def oracle(h: torch.Tensor, ops: list[tuple[torch.Tensor, Coefficients, float]]) -> np.ndarray:
    plain = [(v.double().numpy(), c, gate) for v, c, gate in ops]
    return np.stack([change_float64(row, plain) for row in h.double().numpy()])


def rounded(coefficients: Coefficients) -> Coefficients:
    c, s, m, lo, hi = (float(np.float32(x)) for x in coefficients)
    return c, s, m, lo, hi


KINDS = [
    lambda x: Add(vector="v", scale=4 * x),
    lambda x: Cap(vector="v", min=x, max=x + 0.5),
    lambda x: Cap(vector="v", max=x),
    lambda x: Cap(vector="v", min=x),
    lambda x: Ablate(vector="v", scale=x),
    lambda x: Ablate(vector="v", scale=0 * x),
    lambda x: Ablate(vector="v", to=x),
]


@settings(deadline=None, max_examples=80, derandomize=True)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 999))
def test_any_mix_of_ops_matches_the_float64_oracle(data, dtype: torch.dtype, seed: int):
    """Every row has its own ops and gates, in one to five columns."""
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    strengths = numbers(len(kinds), seed=seed).tolist()
    made = [kind(x) for kind, x in zip(kinds, strengths, strict=True)]
    drawn = numbers(len(made), HIDDEN, seed=seed + 1)
    ops = [(v / v.norm() if op.unit else v, rounded(op.coefficients())) for v, op in zip(drawn, made, strict=True)]
    chosen = data.draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, len(ops)), st.integers(0, 2)), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        )
    )
    h = (3 * numbers(rows, HIDDEN, seed=seed + 2)).to(dtype)
    found = change(h, *tables(ops), torch.tensor([[(s, s, g) for s, g in row] for row in chosen]), GATES)
    assert found.dtype == torch.float32
    for i, row in enumerate(chosen):
        active = [(*ops[slot - 1], float(GATES[gate])) for slot, gate in row if slot]
        expected = oracle(h[i : i + 1], active)[0]
        size = float(h[i].float().norm()) + sum(4 * float(v.norm()) for v, _, _ in active)
        assert np.abs(found[i].numpy() - expected).max() <= TOLERANCE * size


def test_add_adds_scale_times_the_vector():
    h, v = numbers(3, HIDDEN, seed=1), numbers(HIDDEN, seed=2)
    found = change(h, *tables([(v, Add(vector="v", scale=-6.0).coefficients())]), entries(3, (1, 1, 0)), GATES)
    assert torch.equal(found, (-6.0 * v).expand(3, -1))


def test_after_a_cap_the_projection_lies_between_its_bounds_and_rows_inside_stay_bit_for_bit():
    h, v = 4 * numbers(64, HIDDEN, seed=3), unit(HIDDEN, seed=4)
    cap = Cap(vector="v", min=-1.0, max=2.0)
    found = change(h, *tables([(v, cap.coefficients())]), entries(64, (1, 1, 0)), GATES)
    before, after = (h * v).sum(-1), ((h + found) * v).sum(-1)
    inside = (before >= -1) & (before <= 2)
    assert 5 < int(inside.sum()) < 60  # both kinds occur
    assert torch.equal(found[inside], torch.zeros_like(found[inside]))
    assert torch.allclose(after, before.clamp(-1, 2), rtol=0, atol=TOLERANCE * float(h.norm(dim=-1).max()))
    across = found - (found @ v).unsqueeze(-1) * v
    assert float(across.abs().max()) < 1e-5  # nothing moves at right angles to v


def test_a_cap_in_bf16_holds_up_to_the_rounding_of_the_stored_row():
    h, v = (4 * numbers(64, HIDDEN, seed=5)).bfloat16(), unit(HIDDEN, seed=6)
    cap = Cap(vector="v", max=0.5)
    found = change(h, *tables([(v, cap.coefficients())]), entries(64, (1, 1, 0)), GATES)
    stored = (h.float() + found).bfloat16().float()
    # Each stored number is off by at most 2^-9 of itself; the projection adds up the |h_i v_i|.
    slack = (stored.abs() * v.abs()).sum(-1) * 2**-8
    assert bool(((stored @ v) <= 0.5 + slack).all())


def test_ablation_removes_keeps_or_sets_the_component():
    h, v = numbers(5, HIDDEN, seed=7), unit(HIDDEN, seed=8)
    before = h @ v
    cases = [
        (Ablate(vector="v"), 0 * before),
        (Ablate(vector="v", scale=0.25), 0.25 * before),
        (Ablate(vector="v", scale=1.0), before),
        (Ablate(vector="v", to=1.5), torch.full_like(before, 1.5)),
    ]
    for op, expected in cases:
        found = change(h, *tables([(v, op.coefficients())]), entries(5, (1, 1, 0)), GATES)
        assert torch.allclose((h + found) @ v, expected, atol=TOLERANCE * float(h.norm(dim=-1).max()))


def test_the_order_of_ops_matters_and_the_oracle_agrees_with_both_orders():
    h, v = numbers(4, HIDDEN, seed=9), unit(HIDDEN, seed=10)
    add, cap = Add(vector="v", scale=5.0).coefficients(), Cap(vector="v", max=1.0).coefficients()
    ops = [(v, add), (v, cap)]
    first = change(h, *tables(ops), entries(4, (1, 1, 0), (2, 2, 0)), GATES)
    second = change(h, *tables(ops), entries(4, (2, 2, 0), (1, 1, 0)), GATES)
    assert bool(((h + first) @ v <= 1.0 + 1e-4).all())  # capped last
    assert bool(((h + second) @ v > 3.0).all())  # added last
    for found, order in ((first, (0, 1)), (second, (1, 0))):
        expected = oracle(h, [(*ops[i], 1.0) for i in order])
        assert np.abs(found.numpy() - expected).max() <= TOLERANCE * (float(h.norm(dim=-1).max()) + 5)


def test_half_a_gate_gives_half_the_change_and_no_gate_none():
    h, v = numbers(2, HIDDEN, seed=11), unit(HIDDEN, seed=12)
    made = tables([(v, Ablate(vector="v", to=3.0).coefficients())])
    full, none, half = (change(h, *made, entries(2, (1, 1, gate)), GATES) for gate in (0, 1, 2))
    assert torch.equal(half, full / 2)
    assert torch.equal(none, torch.zeros_like(none))


POISON = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(
    ("name", "entry"),
    [("slot 0", (0, 0, 0)), ("gate 0", (1, 1, 1)), ("scale 0", (1, 2, 0)), ("coefficients of slot 0", (1, 0, 0))],
)
def test_masked_entries_leave_rows_with_inf_and_nan_as_they_are(poison: float, name: str, entry: tuple[int, int, int]):
    assert name
    h = numbers(3, HIDDEN, seed=13)
    h[1, 5] = poison
    v = unit(HIDDEN, seed=14)
    zero = Add(vector="v", scale=0.0).coefficients()
    found = change(h, *tables([(v, Cap(vector="v", max=0.1).coefficients()), (v, zero)]), entries(3, entry), GATES)
    assert torch.equal(found, torch.zeros_like(found))  # and so h + found is h, inf and nan included


@pytest.mark.parametrize("poison", POISON)
def test_a_plain_addition_is_the_same_whatever_the_row_holds(poison: float):
    h, v = numbers(1, HIDDEN, seed=17), unit(HIDDEN, seed=18)
    h[0, 5] = poison
    add = Add(vector="v", scale=2.0).coefficients()
    assert torch.equal(change(h, *tables([(v, add)]), entries(1, (1, 1, 0)), GATES)[0], 2 * v)
    finite = np.arange(HIDDEN) != 5  # inf − inf is nothing to compare
    assert np.allclose(change_float64(h[0].numpy(), [(v.numpy(), add, 1.0)])[finite], 2 * v.numpy()[finite])


@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_row_never_reaches_its_neighbours(poison: float):
    h = numbers(3, HIDDEN, seed=15)
    made = tables([(unit(HIDDEN, seed=16), Ablate(vector="v").coefficients())])
    clean = change(h, *made, entries(3, (1, 1, 0)), GATES)
    h[1] = poison
    found = change(h, *made, entries(3, (1, 1, 0)), GATES)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scale_zero_changes_nothing_bit_for_bit(dtype: torch.dtype):
    h = numbers(8, HIDDEN, seed=17).to(dtype)
    zero = Add(vector="v", scale=0.0).coefficients()
    found = change(h, *tables([(1e30 * numbers(HIDDEN, seed=18), zero)]), entries(8, (1, 1, 0)), GATES)
    back = (h.float() + found).to(dtype)
    assert torch.equal(back.view(torch.uint8), h.view(torch.uint8))


def test_the_change_keeps_small_bits_that_subtracting_afterwards_would_lose():
    """A small change of a large row: kept apart it is right to float32, as (h + change) − h it is not."""
    h, v = 300 * numbers(16, HIDDEN, seed=19), unit(HIDDEN, seed=20)
    ops = [(v, Add(vector="v", scale=x).coefficients()) for x in (0.01, 0.02)]
    apart = change(h, *tables(ops), entries(16, (1, 1, 0), (2, 2, 0)), GATES).double().numpy()
    vectors, coefficients = tables(ops)
    now = h.clone()
    for k in (1, 2):
        now = now + coefficients[k, 0] * vectors[k]
    afterwards = (now - h).double().numpy()
    expected = oracle(h, [(w, rounded(c), 1.0) for w, c in ops])
    size = np.abs(expected).max()
    assert np.abs(apart - expected).max() < 1e-6 * size
    assert np.abs(afterwards - expected).max() > 1e-4 * size


def test_no_rows_and_no_columns_are_no_change():
    made = tables([(unit(HIDDEN, seed=21), Ablate(vector="v").coefficients())])
    assert change(torch.zeros(0, HIDDEN), *made, torch.zeros(0, 2, 3, dtype=torch.long), GATES).shape == (0, HIDDEN)
    h = numbers(2, HIDDEN, seed=22)
    found = change(h, *made, torch.zeros(2, 0, 3, dtype=torch.long), GATES)
    assert torch.equal(found, torch.zeros(2, HIDDEN))


def test_the_row_itself_is_never_written_to():
    h = numbers(4, HIDDEN, seed=23)
    before = h.clone()
    change(h, *tables([(unit(HIDDEN, seed=24), Ablate(vector="v").coefficients())]), entries(4, (1, 1, 0)), GATES)
    assert torch.equal(h, before)


@pytest.mark.parametrize("gate", [0, 1, 2])
@pytest.mark.parametrize("op", [Add(vector="v", scale=3.0), Ablate(vector="v"), Cap(vector="v", max=0.1)])
def test_what_is_worked_out_once_is_what_would_be_worked_out_each_time(op, gate: int):
    h = numbers(3, HIDDEN, seed=25)
    vectors, coefficients = tables([(unit(HIDDEN, seed=26), op.coefficients())])
    columns = look_up(vectors, coefficients, entries(3, (1, 1, gate)))
    assert torch.equal(apply(h, [settle(one) for one in columns], GATES), apply(h, columns, GATES))
