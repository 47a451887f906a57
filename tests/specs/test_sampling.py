"""Sampling specs: every limit, on both sides."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.specs.errors import InvalidRequest
from steerscope.specs.sampling import Sampling

TINY = math.ulp(0.0)  # the smallest number above 0
LIMITS: list[tuple[str, list[object], list[object]]] = [  # field, allowed at the edge, refused beyond it
    ("max_tokens", [1, 10**6], [0, -1, 1.5, "many", None]),
    ("temperature", [0, 0.0, 2.0], [-TINY, 2.0000001, math.nan, math.inf, None]),
    ("top_p", [TINY, 1.0], [0.0, -0.1, 1.0000001, math.nan]),
    ("top_k", [0, 10**6], [-1, 0.5]),
    ("min_p", [0.0, 1.0], [-TINY, 1.0000001, math.nan]),
    ("repetition_penalty", [TINY, 10.0], [0.0, -1.0, 10.000001, math.inf]),
    ("frequency_penalty", [-2.0, 2.0], [-2.0000001, 2.0000001, math.nan]),
    ("presence_penalty", [-2.0, 2.0], [-2.0000001, 2.0000001, math.nan]),
    ("repetition_window", [1, None], [0, -5]),
    ("seed", [0, 2**63 - 1, None], [-1, 2**63]),
    ("n", [1, 128], [0, 129]),
    ("logprobs", [0, 20, None], [-1, 21, 0.5]),
    ("stop", ["end", [], ["a", "b", "c", "d"]], [["a", "b", "c", "d", "e"], ["a", ""], "", [1], None]),
    ("ignore_eos", [True, False], ["perhaps", None]),
]
ALLOWED = [(field, value) for field, good, _ in LIMITS for value in good]
REFUSED = [(field, value) for field, _, bad in LIMITS for value in bad]


def test_every_field_has_its_limits_tested():
    assert {field for field, _, _ in LIMITS} == set(Sampling.model_fields)


@pytest.mark.parametrize(("field", "value"), ALLOWED)
def test_values_at_the_limit_are_taken_as_they_are(field: str, value: object):
    taken = getattr(Sampling.parse({field: value}), field)
    assert taken == ((value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_values_beyond_the_limit_are_refused_with_their_field_and_a_remedy(field: str, value: object):
    with pytest.raises(InvalidRequest) as caught:
        Sampling.parse({field: value})
    (problem,) = caught.value.problems
    assert problem.field.startswith(field) or "stop string is empty" in problem.what
    assert problem.remedy


def test_a_fifth_stop_string_is_one_too_many():
    with pytest.raises(InvalidRequest, match="stop: has too many items; give at most 4"):
        Sampling(stop=("a", "b", "c", "d", "e"))


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="max_token: .*; remove it or correct its name"):
        Sampling(max_token=3)  # type: ignore[call-arg]


def test_all_bad_fields_are_reported_together():
    with pytest.raises(InvalidRequest) as caught:
        Sampling.parse({"max_tokens": 0, "temperature": 9, "top_p": 0, "n": 0, "speed": 1, "stop": ["a"] * 5})
    assert sorted(problem.field for problem in caught.value.problems) == [
        "max_tokens",
        "n",
        "speed",
        "stop",
        "temperature",
        "top_p",
    ]
    assert str(caught.value).startswith("6 problems:\n  ")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=4),
)
def test_a_sampling_survives_json_bit_for_bit(**fields):
    sampling = Sampling.parse(fields)
    back = Sampling.from_json(sampling.to_json())
    assert back == sampling
    assert back.stop == tuple(fields["stop"])
