"""Steering specs: what users may write, the coefficients it becomes, and the exact way through JSON."""

import base64
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from steerscope.specs.errors import InvalidRequest
from steerscope.specs.steering import SITES, Ablate, Add, Cap, Steering, VectorData, parse_layers
from steerscope.vectors.vector import SteeringVector

PROPERTY = settings(deadline=None, max_examples=60, derandomize=True)
FLOAT32_MAX = float(np.finfo(np.float32).max)
INF = math.inf


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def problems(build) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        build()
    return [str(problem) for problem in caught.value.problems]


# --- layers


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        (12, (12,)),
        (0, (0,)),
        ("12", (12,)),
        ("10-14", (10, 11, 12, 13, 14)),
        (" 3 , 1 - 2 ", (1, 2, 3)),
        ("4,8,10-11", (4, 8, 10, 11)),
        ([8, "10-11", 4, 8], (4, 8, 10, 11)),
        ((2, 1), (1, 2)),
        (range(3), (0, 1, 2)),
        ({5, 3}, (3, 5)),
        ("7-7", (7,)),
        ("all", "all"),
    ],
)
def test_layers_are_written_as_numbers_ranges_and_lists_and_become_ascending_numbers(written: object, layers: object):
    assert parse_layers(written) == layers
    assert Add(vector="v", layers=written).layers == layers  # type: ignore[arg-type]


@PROPERTY
@given(st.sets(st.integers(0, 99), min_size=1, max_size=8))
def test_any_way_of_writing_a_set_of_layers_gives_the_same_layers(layers: set[int]):
    ordered = tuple(sorted(layers))
    assert parse_layers(list(layers)) == parse_layers(",".join(map(str, layers))) == ordered
    assert parse_layers(ordered) == parse_layers([f"{layer}-{layer}" for layer in layers]) == ordered


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("5-3", "runs backwards"),
        (-1, "layer -1 is negative"),
        ([3, -2], "layer -2 is negative"),
        ([], "no layers given"),
        ("", "is not a layer"),
        ("-3", "is not a layer"),
        ("1,,2", "is not a layer"),
        ("ten", "is not a layer"),
        (1.5, "is not a layer"),
        (True, "is not a layer"),
        ([None], "is not a layer"),
        ([["1"]], "is not a layer"),
        ({"a": 1}, "is not a layer"),
        ("all,3", "is not a layer"),
    ],
)
def test_what_is_no_layer_is_refused_by_name_with_how_to_write_one(written: object, why: str):
    (problem,) = problems(lambda: Add(vector="v", layers=written))  # type: ignore[arg-type]
    assert problem.startswith("layers: ")
    assert why in problem
    assert "; " in problem


def test_a_range_of_a_billion_layers_is_refused_before_it_is_spelt_out():
    # Spelt out it would take gigabytes: one request must not take the server's memory.
    (problem,) = problems(lambda: Add(vector="v", layers="0-99999999999"))
    assert "is not a layer" in problem


# --- vectors


@pytest.mark.parametrize(
    "written",
    [
        [1.0, -2.5, 0.0],
        (1, -2.5, 0),
        torch.tensor([1.0, -2.5, 0.0]),
        torch.tensor([1.0, -2.5, 0.0], dtype=torch.float64, requires_grad=True),
        torch.tensor([1.0, -2.5, 0.0], dtype=torch.bfloat16),
        np.array([1.0, -2.5, 0.0]),
        np.array([1.0, -2.5, 0.0], dtype=np.float32)[::1],
        packed(1.0, -2.5, 0.0),
        {"shared": base64.b64encode(packed(1.0, -2.5, 0.0)).decode()},
        {"shared": [1.0, -2.5, 0.0]},
        VectorData(shared=packed(1.0, -2.5, 0.0)),
        SteeringVector.shared(torch.tensor([1.0, -2.5, 0.0])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_vector_may_be_a_list_a_tensor_an_array_bytes_or_anything_with_a_spec(written: object):
    vector = Add(vector=written).vector  # type: ignore[arg-type]
    assert isinstance(vector, VectorData)
    assert vector.shared == packed(1.0, -2.5, 0.0)
    assert vector.hidden == 3


def test_a_mapping_gives_one_direction_per_layer_also_with_the_keys_of_json():
    for written in ({3: [1.0], 5: [2.0]}, {"3": [1.0], "5": [2.0]}, {"per_layer": {3: [1.0], "5": packed(2.0)}}):
        vector = Add(vector=written).vector  # type: ignore[arg-type]
        assert isinstance(vector, VectorData)
        assert dict(vector.items()) == {3: packed(1.0), 5: packed(2.0)}


def test_text_is_the_name_of_a_vector_and_stays_text():
    assert Add(vector="happy").vector == "happy"
    assert Steering.from_json(Steering.of(Add(vector="happy")).to_json()).ops[0].vector == "happy"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ([], "vector.shared: vector has 0 bytes"),
        ([0.0, 0.0], "vector: vector is all zero"),
        ([1.0, float("nan")], "vector: vector holds NaN or infinity"),
        ([float("inf")], "vector: vector holds NaN or infinity"),
        ([1e300], "vector.shared: vector holds a number beyond float32"),
        ([10**400], "vector.shared: vector holds a number beyond float32"),
        (np.array([-1e39, 1.0]), "vector.shared: vector holds a number beyond float32"),
        ([[1.0, 2.0]], "vector.shared: vector is not one-dimensional"),
        (torch.ones(2, 2), "vector.shared: vector is not one-dimensional"),
        (torch.tensor(1.0), "vector.shared: vector is not one-dimensional"),
        (3.5, "vector.shared: vector is not one-dimensional"),
        (b"\0\0\0", "vector.shared: vector has 3 bytes"),
        (None, "vector: give either shared or per_layer"),
        ({}, "vector: give either shared or per_layer"),
        ({"shared": [1.0], "per_layer": {1: [1.0]}}, "vector: give either shared or per_layer"),
        ({"shared": "not base64!"}, "vector.shared: vector is not base64"),
        ({1: [1.0], 2: [1.0, 2.0]}, "vector: directions have different sizes [1, 2]"),
        ({1: [1.0], 2: [0.0]}, "vector: vector of layer 2 is all zero"),
        ({1: [1.0], 2: [float("nan")]}, "vector: vector of layer 2 holds NaN"),
        ({1: [1.0], 2: "zz"}, "vector.per_layer[2]: vector is not base64"),
    ],
)
def test_vectors_without_a_direction_are_refused_with_the_field_and_a_remedy(written: object, why: str):
    found = problems(lambda: Add(vector=written))  # type: ignore[arg-type]
    assert [problem for problem in found if problem.startswith(why)]
    assert all("; " in problem for problem in found)


# --- ops and their coefficients (c, s, m, lo, hi)


@pytest.mark.parametrize(
    ("op", "coefficients", "unit"),
    [
        (Add(vector="v"), (1.0, 0, 0, -INF, INF), False),
        (Add(vector="v", scale=-6), (-6.0, 0, 0, -INF, INF), False),
        (Cap(vector="v", max=3), (0, 1, 1, -INF, 3.0), True),
        (Cap(vector="v", min=-2), (0, 1, 1, -2.0, INF), True),
        (Cap(vector="v", min=0, max=0), (0, 1, 1, 0.0, 0.0), True),
        (Ablate(vector="v"), (0, 0, 1, -INF, INF), True),
        (Ablate(vector="v", scale=0.25), (0, 0.25, 1, -INF, INF), True),
        (Ablate(vector="v", to=1.5), (1.5, 0, 1, -INF, INF), True),
        (Ablate(vector="v", to=0), (0, 0, 1, -INF, INF), True),
    ],
)
def test_every_op_is_the_row_of_coefficients_that_the_design_gives_it(op, coefficients, unit: bool):
    assert op.coefficients() == coefficients
    assert op.unit is unit


def test_ops_act_on_all_tokens_after_the_layer_unless_told_otherwise():
    for op in (Add(vector="v"), Cap(vector="v", max=1), Ablate(vector="v")):
        assert (op.layers, op.site, op.tokens) == (None, "resid_post", "all")


@pytest.mark.parametrize("site", SITES)
def test_every_site_of_the_vocabulary_is_taken(site):
    assert Ablate(vector="v", site=site).site == site


def test_a_site_outside_the_vocabulary_is_refused_with_the_vocabulary():
    (problem,) = problems(lambda: Add(vector="v", site="residual"))  # type: ignore[arg-type]
    assert all(site in problem for site in SITES)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: Cap(vector="v"), "a cap needs min, max or both; give at least one"),
        (lambda: Cap(vector="v", min=2, max=1), "min 2 is above max 1; swap them"),
        (lambda: Ablate(vector="v", scale=0.5, to=1), "scale and to exclude each other; give one of them"),
    ],
)
def test_ops_that_contradict_themselves_are_refused(build, why: str):
    assert problems(build) == [why]


@pytest.mark.parametrize("value", [float("nan"), INF, -INF, 1e39, -1e300, "much", None])
@pytest.mark.parametrize(("kind", "field"), [(Add, "scale"), (Ablate, "scale"), (Ablate, "to"), (Cap, "max")])
def test_strengths_that_float32_cannot_hold_are_refused(kind, field: str, value: object):
    optional = value is None and field in ("to", "max")
    data = {"vector": "v", field: value} | ({"min": 0} if kind is Cap else {})
    if optional:
        assert getattr(kind.parse(data), field) is None
    else:
        (problem,) = problems(lambda: kind.parse(data))
        assert problem.startswith(f"{field}: ")


def test_the_largest_float32_is_still_a_strength():
    assert np.float32(Add(vector="v", scale=FLOAT32_MAX).coefficients()[0]) == np.finfo(np.float32).max


def test_specs_cannot_be_changed_after_they_were_checked():
    op = Add(vector="v")
    with pytest.raises(ValidationError, match="frozen"):
        op.scale = math.nan  # type: ignore[misc]
    assert op.scale == 1.0


# --- composition

OPS = st.sampled_from([Add(vector="a"), Add(vector="b", scale=2), Cap(vector="c", max=1), Ablate(vector="d")])
STEERINGS = st.builds(Steering, ops=st.lists(OPS, max_size=3).map(tuple), reset=st.booleans())


@PROPERTY
@given(STEERINGS, STEERINGS, STEERINGS)
def test_composing_is_associative_and_nothing_is_neutral(a: Steering, b: Steering, c: Steering):
    assert a.then(b).then(c) == a.then(b.then(c))
    assert a.then(Steering()) == Steering().then(a) == a


@PROPERTY
@given(STEERINGS, STEERINGS)
def test_composing_keeps_the_order_and_none_switches_off_what_came_before(a: Steering, b: Steering):
    expected = [*b.ops] if b.reset else [*a.ops, *b.ops]
    assert list(a.then(b).ops) == expected
    assert a.then(Steering.none()).ops == ()
    assert a.then(Steering.none()).then(Steering(ops=b.ops)).ops == b.ops


def test_a_bare_list_of_ops_is_a_steering():
    expected = Steering.of(Add(vector="a"), Cap(vector="c", max=1.0))
    data = [{"op": "add", "vector": "a"}, {"op": "cap", "vector": "c", "max": 1}]
    assert Steering.parse(data) == expected
    assert Steering.from_json(json.dumps(data)) == expected


# --- JSON

FINITE = st.floats(-FLOAT32_MAX, FLOAT32_MAX, allow_nan=False)
NUMBERS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3).filter(any)
VECTORS = (
    st.text(max_size=8)
    | NUMBERS.map(lambda numbers: VectorData(shared=packed(*numbers)))
    | st.dictionaries(st.integers(0, 60), NUMBERS.map(lambda n: packed(*n)), min_size=1, max_size=3).map(
        lambda layers: VectorData(per_layer=layers)
    )
)
COMMON = {
    "vector": VECTORS,
    "layers": st.none() | st.just("all") | st.lists(st.integers(0, 60), min_size=1, max_size=4),
    "site": st.sampled_from(SITES),
    "tokens": st.sampled_from(
        ["all", "prompt & !role=user", "positions=[0, -1, 3:]", "message=-2+template | generated"]
    ),
}
ANY_OP = (
    st.builds(Add, scale=FINITE, **COMMON)
    | st.builds(Cap, min=FINITE, **COMMON)
    | st.builds(lambda low, high, **rest: Cap(min=min(low, high), max=max(low, high), **rest), FINITE, FINITE, **COMMON)
    | st.builds(Ablate, scale=FINITE, **COMMON)
    | st.builds(Ablate, to=FINITE, **COMMON)
)


@settings(PROPERTY, max_examples=100)
@given(ops=st.lists(ANY_OP, max_size=3), reset=st.booleans())
def test_a_steering_survives_json_bit_for_bit(ops, reset: bool):
    steering = Steering(ops=tuple(ops), reset=reset)
    text = steering.to_json()
    back = Steering.from_json(text)
    assert back == steering
    assert Steering.parse(json.loads(text)) == steering
    assert back.to_json() == text
    for old, new in zip(steering.ops, back.ops, strict=True):
        assert struct.pack("<5d", *old.coefficients()) == struct.pack("<5d", *new.coefficients())
        if isinstance(old.vector, VectorData) and isinstance(new.vector, VectorData):
            assert list(old.vector.items()) == list(new.vector.items())
