"""SteeringVector: its algebra, its measures, and what it refuses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.specs.errors import InvalidRequest
from steerscope.specs.steering import Ablate, Add, Cap
from steerscope.vectors import SteeringVector

# Away from the ends of float32, so that sums and squares neither overflow nor vanish.
NUMBERS = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)


@st.composite
def pairs(draw, zeros: bool = True) -> tuple[SteeringVector, SteeringVector]:
    """Two vectors of one shape, per layer or shared."""
    hidden = draw(st.integers(1, 6))
    layers: list = draw(st.just([None]) | st.lists(st.integers(0, 50), min_size=1, max_size=3, unique=True))
    numbers = st.lists(NUMBERS, min_size=hidden, max_size=hidden)
    row = (numbers if zeros else numbers.filter(any)).map(torch.tensor)
    return tuple(SteeringVector({layer: draw(row) for layer in layers}) for _ in range(2))  # type: ignore[return-value]


def close(a: SteeringVector, b: SteeringVector, scale: float) -> bool:
    """Equal up to the rounding of float32 numbers of size `scale`."""
    assert a.directions.keys() == b.directions.keys()
    return all(torch.allclose(a.directions[k], b.directions[k], rtol=0, atol=scale * 2**-22) for k in a.directions)


def largest(*vectors: SteeringVector) -> float:
    return max(float(t.abs().max()) for v in vectors for t in v.directions.values())


@settings(deadline=None)
@given(pair=pairs())
def test_adding_and_subtracting_the_same_vector_gives_back_the_first(pair):
    a, b = pair
    assert close((a + b) - b, a, largest(a, b))


@settings(deadline=None)
@given(pair=pairs())
def test_addition_commutes_and_subtraction_is_adding_the_negative(pair):
    a, b = pair
    for layer in a.directions:
        assert torch.equal((a + b).directions[layer], (b + a).directions[layer])
        assert torch.equal((a - b).directions[layer], (a + -b).directions[layer])


@settings(deadline=None)
@given(pair=pairs())
def test_negating_twice_gives_back_every_bit(pair):
    a, _ = pair
    negative = -a
    twice = -negative
    for layer, direction in a.directions.items():
        assert twice.directions[layer].view(torch.int32).tolist() == direction.view(torch.int32).tolist()


@settings(deadline=None)
@given(pair=pairs(), factor=st.sampled_from([0.5, 2.0, -4.0]))
def test_scaling_by_a_power_of_two_and_back_is_exact(pair, factor: float):
    a, _ = pair
    for back in ((a * factor) / factor, (factor * a) / factor):
        assert all(torch.equal(back.directions[layer], a.directions[layer]) for layer in a.directions)


@settings(deadline=None)
@given(pair=pairs(zeros=False))
def test_normalised_directions_have_length_one_and_keep_their_direction(pair):
    a, _ = pair
    unit = a.normalised()
    assert unit.norms() == pytest.approx(dict.fromkeys(a.directions, 1.0), abs=1e-6)
    assert unit.cosine(a) == pytest.approx(dict.fromkeys(a.directions, 1.0), abs=1e-6)


@settings(deadline=None)
@given(pair=pairs(zeros=False))
def test_the_cosine_is_one_with_itself_minus_one_with_the_negative_and_symmetric(pair):
    a, b = pair
    assert a.cosine(a) == pytest.approx(dict.fromkeys(a.directions, 1.0))
    assert a.cosine(-a) == pytest.approx(dict.fromkeys(a.directions, -1.0))
    assert a.cosine(b) == pytest.approx(b.cosine(a))
    assert all(abs(value) <= 1 + 1e-12 for value in a.cosine(b).values())


def test_the_cosine_with_a_zero_direction_is_zero():
    zero, one = SteeringVector({1: torch.zeros(2)}), SteeringVector({1: torch.ones(2)})
    assert zero.cosine(one) == {1: 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_algebra_keeps_the_dtype(dtype: torch.dtype):
    vector = SteeringVector({2: torch.tensor([3.0, 4.0], dtype=dtype)})
    for result in (vector + vector, vector - vector * 0.5, 3 * vector, vector / 2, -vector, vector.normalised()):
        assert result[2].dtype == dtype
    assert vector.normalised()[2].tolist() == pytest.approx([0.6, 0.8], rel=2**-8)


def test_algebra_makes_new_vectors_and_leaves_the_old_ones():
    a = SteeringVector({1: torch.tensor([1.0, 2.0])}, method="mean")
    b = SteeringVector({1: torch.tensor([5.0, 5.0])}, method="pca")
    total = a + b
    assert total[1].tolist() == [6.0, 7.0]
    assert total.method == "mean + pca"
    assert (2 * total).method == "2 * (mean + pca)"
    assert a[1].tolist() == [1.0, 2.0]
    assert b[1].tolist() == [5.0, 5.0]


def test_layers_are_sorted_and_a_shared_vector_answers_for_every_layer():
    vector = SteeringVector({9: torch.ones(2), 3: torch.zeros(2)})
    assert vector.layers == (3, 9)
    shared = SteeringVector.shared(torch.tensor([1.0, 2.0]))
    assert shared.layers is None
    assert shared[31].tolist() == [1.0, 2.0]
    assert shared.at("4-6").layers == (4, 5, 6)
    assert vector.at(9).layers == (9,)
    assert vector.at("all") is vector


def test_a_layer_the_vector_lacks_is_refused_with_the_layers_it_has():
    vector = SteeringVector({3: torch.ones(2), 9: torch.ones(2)})
    for ask in (lambda: vector[4], lambda: vector.at("3-5")):
        with pytest.raises(InvalidRequest, match=r"no layer 4; it has 3, 9"):
            ask()


def test_the_projection_is_the_component_along_the_unit_direction():
    vector = SteeringVector({5: torch.tensor([3.0, 4.0])})
    rows = torch.tensor([[[3.0, 4.0], [4.0, -3.0], [-6.0, -8.0]]])
    assert vector.projection(rows, 5).tolist() == [pytest.approx([5.0, 0.0, -10.0], abs=1e-6)]


def test_all_problems_of_a_combination_are_listed_at_once():
    a = SteeringVector({1: torch.ones(2)})
    b = SteeringVector({2: torch.ones(3)}, site="attn_out")
    for combine in (lambda: a + b, lambda: a - b, lambda: a.cosine(b)):
        with pytest.raises(InvalidRequest) as caught:
            combine()
        assert [problem.field for problem in caught.value.problems] == ["hidden", "layers", "site"]
        assert "3 problems" in str(caught.value)


@pytest.mark.parametrize(
    ("directions", "fields"),
    [
        ({}, ["directions"]),
        ({None: torch.ones(2), 1: torch.ones(3)}, ["directions", "directions"]),
        ({1: torch.ones(2, 2), 2: torch.ones(2)}, ["directions", "layer 1"]),
        ({1: torch.tensor([float("nan")]), 2: torch.tensor([1])}, ["layer 1", "layer 2"]),
        ({None: torch.ones(0)}, ["shared"]),
        ({4: torch.tensor([float("inf")])}, ["layer 4"]),
    ],
)
def test_directions_that_make_no_vector_are_refused_with_every_problem(directions: dict, fields: list[str]):
    with pytest.raises(InvalidRequest) as caught:
        SteeringVector(directions)
    assert [problem.field for problem in caught.value.problems] == fields


def test_a_zero_direction_cannot_be_normalised_and_the_layers_are_named():
    vector = SteeringVector({1: torch.ones(2), 2: torch.zeros(2), 5: torch.zeros(2)})
    with pytest.raises(InvalidRequest, match=r"zero at layers \[2, 5\]"):
        vector.normalised()


def test_equals_sees_dtype_values_layers_and_metadata():
    vector = SteeringVector({1: torch.ones(2)}, "m", "resid_post", "x", {"a": 1})
    assert vector.equals(SteeringVector({1: torch.ones(2)}, "m", "resid_post", "x", {"a": 1}))
    for other in (
        SteeringVector({1: torch.ones(2, dtype=torch.bfloat16)}, "m", "resid_post", "x", {"a": 1}),
        SteeringVector({1: torch.tensor([1.0, 2.0])}, "m", "resid_post", "x", {"a": 1}),
        SteeringVector({2: torch.ones(2)}, "m", "resid_post", "x", {"a": 1}),
        SteeringVector({1: torch.ones(2)}, "n", "resid_post", "x", {"a": 1}),
        SteeringVector({1: torch.ones(2)}, "m", "resid_mid", "x", {"a": 1}),
        SteeringVector({1: torch.ones(2)}, "m", "resid_post", "y", {"a": 1}),
        SteeringVector({1: torch.ones(2)}, "m", "resid_post", "x", {"a": 2}),
    ):
        assert not vector.equals(other)


def test_ops_carry_the_numbers_the_site_and_what_was_asked():
    vector = SteeringVector({3: torch.tensor([1.0, -2.0], dtype=torch.bfloat16)}, site="mlp_out")
    data = {3: torch.tensor([1.0, -2.0]).numpy().tobytes()}
    add, cap, ablate = vector.add(2.5, layers=3), vector.cap(max=1.0), vector.ablate(to=0.5)
    assert isinstance(add, Add)
    assert isinstance(cap, Cap)
    assert isinstance(ablate, Ablate)
    assert (add.scale, add.layers) == (2.5, (3,))
    assert (cap.min, cap.max, ablate.to) == (None, 1.0, 0.5)
    for op in (add, cap, ablate):
        assert op.site == "mlp_out"
        assert not isinstance(op.vector, str)
        assert op.vector.per_layer == data
