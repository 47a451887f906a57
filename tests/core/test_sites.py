"""The table of sites: complete, and in the order in which a forward reaches them."""

from steerscope.core.sites import TABLE, tap_of
from steerscope.specs.steering import SITES


def test_every_site_has_a_row() -> None:
    assert set(TABLE) == set(SITES)
    assert len({facts.hook_name for facts in TABLE.values()}) == len(SITES)


def test_resid_pre_of_a_later_layer_is_the_tap_of_the_layer_before() -> None:
    assert tap_of(0, "resid_pre") == (0, "resid_pre")
    assert tap_of(2, "resid_pre") == (1, "resid_post")
    assert tap_of(2, "attn_out") == (2, "attn_out")
