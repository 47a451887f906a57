"""All lenses together say what each says alone, within a bounded workspace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lenses.packs import alone, calibrated_by_hand, make, one_by_one, rows
from steerscope.lenses.bank import Bank
from steerscope.specs.errors import InvalidRequest


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), max_size=3),
    normed=st.booleans(),
    normalisation=st.sampled_from(["layernorm", "none"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    n=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_a_bank_says_what_every_lens_says_alone(widths, normed, normalisation, dtype, n, seed):
    pack = make(seed=seed, widths=tuple(widths), normed=normed, normalisation=normalisation, dtype=dtype)
    x = rows(n, seed=seed)
    torch.testing.assert_close(Bank(pack).probabilities(x), one_by_one(pack, x), atol=1e-5, rtol=0)


def test_lenses_of_the_size_in_the_field_agree_to_a_hundred_thousandth():
    pack = make([4, 8], hidden=576, widths=(128, 64), normed=True)
    x = rows(6, 576)
    expected = one_by_one(pack, x)
    assert expected.std() > 0.05, "lenses that all say the same would agree too"
    assert (Bank(pack).scores(x) - expected).abs().max() < 1e-5


def test_logits_are_what_the_sigmoid_takes_and_bfloat16_rows_are_read_as_they_are():
    pack, x = make(), rows(5).bfloat16()
    torch.testing.assert_close(Bank(pack).logits(x).sigmoid(), one_by_one(pack, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chosen", [slice(3, 9), [7, 2, 19, 4], [0]])
def test_a_bank_of_some_lenses_keeps_the_order_asked_for(chosen):
    pack, x = make(normed=True), rows(4)
    lenses = list(range(3, 9)) if isinstance(chosen, slice) else chosen
    bank = Bank(pack, chosen)
    torch.testing.assert_close(bank.probabilities(x), one_by_one(pack, x)[:, lenses], atol=1e-5, rtol=0)
    _, indices = bank.top(x, 2)
    assert set(indices.flatten().tolist()) <= set(lenses)


def test_levels_are_slices_a_bank_can_be_made_of():
    pack, x = make([3, 6, 12]), rows(2)
    assert Bank(pack, pack.level(1)).scores(x).shape == (2, 6)
    torch.testing.assert_close(Bank(pack, pack.level(1)).scores(x), Bank(pack).scores(x)[:, 3:9])


# --- calibration and top


def test_scores_are_calibrated_and_what_is_below_the_noise_floor_is_nothing():
    pack, x = make(calibrated=True, normed=True), rows(7)
    expected = calibrated_by_hand(pack, one_by_one(pack, x))
    assert (expected == 0).any()
    assert (expected > 0.5).any()
    torch.testing.assert_close(Bank(pack).scores(x), expected, atol=1e-4, rtol=0)  # (high − low) divides by 0.1


def test_the_top_are_the_largest_scores_with_their_place_in_the_pack():
    pack, x = make(calibrated=True), rows(7)
    values, indices = Bank(pack).top(x, 4)
    expected = calibrated_by_hand(pack, one_by_one(pack, x)).sort(dim=1, descending=True)
    torch.testing.assert_close(values, expected.values[:, :4], atol=1e-4, rtol=0)
    clear = expected.values[:, :4] - expected.values[:, 1:5] > 1e-3
    assert torch.equal(indices[clear], expected.indices[:, :4][clear])
    assert clear.sum() > 10


def test_more_than_there_are_gives_all():
    values, indices = Bank(make([2])).top(rows(3), 10)
    assert values.shape == indices.shape == (3, 2)


def test_topk_keeps_the_k_largest_positive_of_a_row():
    pack, x = make([20], widths=(), output="topk", k=3), rows(6)
    raw = one_by_one(pack, x)
    found = Bank(pack).probabilities(x)
    for n in range(6):
        best = raw[n].topk(3)
        expected = torch.zeros(20).scatter(0, best.indices, best.values.clamp(min=0))
        torch.testing.assert_close(found[n], expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(InvalidRequest, match="topk compares all lenses"):
        Bank(pack, slice(0, 10))


# --- memory


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that was made inside, leaving out results of a given shape."""

    def __init__(self, result: tuple[int, ...]):
        super().__init__()
        self.result, self.nbytes = result, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
        made = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) == self.result:
                continue
            if tensor.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("kept", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("workspace", [20_000, 100_000, 1 << 30])
def test_a_small_workspace_changes_no_score_and_bounds_every_tensor(kept, workspace):
    pack, x = make([5, 30, 60], widths=(16, 8), normed=True), rows(50)
    whole = Bank(pack, weights=kept).probabilities(x)
    bank = Bank(pack, weights=kept, workspace=workspace)
    with LargestTensor((50, 95)) as largest:
        found = bank.probabilities(x)
    assert 0 < largest.nbytes <= workspace
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=0)
    unbounded = 95 * 16 * 50 * 4
    assert largest.nbytes < unbounded or workspace > unbounded


def test_watching_a_long_prompt_with_the_largest_known_pack_stays_within_the_workspace():
    from steerscope.lenses.stack import WORKSPACE, Stack

    pack = make(hidden=2560, widths=(128, 64), counts=[1])
    stack = Stack(pack, 7947, torch.device("meta"))
    tiles = stack.tiles(16_384)
    assert stack.workspace_bytes(*tiles) <= WORKSPACE
    assert tiles.rows * tiles.lenses >= 100_000, "tiles must not become so small that nothing is gained by stacking"


def test_a_workspace_that_holds_nothing_is_refused_with_what_is_needed():
    with pytest.raises(InvalidRequest, match="at least"):
        Bank(make(), workspace=64)


def test_results_are_written_where_they_are_wanted():
    pack, x = make(normed=True, calibrated=True), rows(4)
    out = torch.full((4, len(pack)), torch.nan)
    assert Bank(pack).scores(x, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, Bank(pack).scores(x))


@pytest.mark.parametrize("bad", [torch.zeros(3, 7), torch.zeros(24)])
def test_rows_of_another_size_are_refused(bad):
    with pytest.raises(InvalidRequest, match=r"give \[n, 24\]"):
        Bank(make()).scores(bad)
    with pytest.raises(InvalidRequest, match=r"float32 \[2, 21\]"):
        Bank(make()).scores(rows(2), out=torch.zeros(2, 20))


# --- narrower weights


@pytest.mark.parametrize(("kept", "worst", "typical"), [("bf16", 1e-2, 2e-3), ("int8", 3e-2, 5e-3)])
def test_narrow_weights_move_a_probability_by_no_more_than_this(kept, worst, typical):
    """Lenses with the sizes of the field and logits spread over about ±4."""
    pack, x = make([40], hidden=576, widths=(128, 64)), rows(32, 576)
    exact = one_by_one(pack, x)
    error = (Bank(pack, weights=kept).probabilities(x) - exact).abs()
    assert exact.std() > 0.2
    assert error.max() < worst
    assert error.mean() < typical
    assert error.max() > 1e-5, "then the weights are not narrow"


def test_narrow_weights_take_the_memory_they_say():
    pack = make([10], hidden=576, widths=(128, 64))
    whole, half, quarter = (Bank(pack, weights=kept).nbytes for kept in ("fp32", "bf16", "int8"))
    assert half < 0.51 * whole
    assert quarter < 0.27 * whole


def test_an_output_whose_weights_are_all_zero_survives_int8():
    pack = make([4])
    zeroed = pack.tensors["w0"].clone()
    zeroed[2] = 0
    pack = pack.replace(tensors={"w0": zeroed})
    x = rows(3)
    exact = alone(pack, 2)(x).flatten()
    torch.testing.assert_close(Bank(pack, weights="int8").probabilities(x)[:, 2], exact.detach(), atol=1e-2, rtol=0)
