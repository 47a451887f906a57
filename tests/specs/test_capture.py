"""Capture specs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest
from steerscope.specs.steering import SITES


def test_by_default_every_layer_after_steering_at_every_token_is_kept_whole():
    assert Capture().model_dump() == {
        "layers": "all",
        "sites": ("resid_post",),
        "tokens": "all",
        "reduce": None,
        "before_steering": False,
    }


def test_one_site_may_be_written_without_a_list():
    assert Capture(sites="attn_out") == Capture(sites=("attn_out",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field", "why"),
    [
        ({"sites": ()}, "sites", "has 0 items"),
        ({"sites": ("resid_post", "residual")}, "sites[1]", "resid_mid"),
        ({"sites": ("mlp_out", "mlp_out")}, "", "a site is named twice"),
        ({"layers": "3-1"}, "layers", "backwards"),
        ({"tokens": "promt"}, "tokens", "'promt' is not a selector"),
        ({"reduce": "max"}, "reduce", "'mean' or 'last'"),
        ({"before_steering": "sometimes"}, "before_steering", "cannot be 'sometimes'"),
        ({"layer": 3}, "layer", "is not known"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_field(changes: dict[str, object], field: str, why: str):
    with pytest.raises(InvalidRequest) as caught:
        Capture.parse(changes)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert why in problem.what
    assert problem.remedy


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    layers=st.just("all") | st.lists(st.integers(0, 99), min_size=1, max_size=5),
    sites=st.lists(st.sampled_from(SITES), min_size=1, unique=True),
    tokens=st.sampled_from(["all", "!prompt", "positions=[1, 2:3] & role=user", "message=0+template"]),
    reduce=st.sampled_from(["mean", "last", None]),
    before_steering=st.booleans(),
)
def test_a_capture_survives_json(**fields):
    capture = Capture.parse(fields)
    assert Capture.from_json(capture.to_json()) == capture
    assert capture.sites == tuple(fields["sites"])  # in the order they were asked for
