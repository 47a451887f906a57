"""Scales as users write them, lengths of vectors, and caps from files."""

from pathlib import Path

import pytest
import torch

from steerscope.evals.conditions import baselines, caps, parse_scales, prepared, steered
from steerscope.extraction.personas.build import floor, write_capping
from steerscope.extraction.personas.definitions import Persona
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.vector import SteeringVector


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("-2..2", [-2, -1, 1, 2]),
        ("-8..8:4", [-8, -4, 4, 8]),
        ("0.5..1.1:0.3", [0.5, 0.8, 1.1]),
        ("-2, -0.5,2", [-2, -0.5, 2]),
        ("100..1000:300", [100, 400, 700, 1000]),
        ("3", [3]),
        ("1,1,2", [1, 2]),
    ],
)
def test_scales_are_read_and_zero_is_left_out(text: str, scales: list[float]) -> None:
    assert parse_scales(text) == scales


@pytest.mark.parametrize("text", ["", "0", "2..1", "1..2:0", "1..2:-1", "a..b", "1,x", "nan", "1e9..inf", "0..1e9"])
def test_what_are_no_scales_is_told(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write -8..8, -8..8:4 or -2,-0.5,2"):
        parse_scales(text)


def test_lengths_follow_what_was_asked_for() -> None:
    plain = SteeringVector({1: torch.tensor([3.0, 4.0]), 2: torch.tensor([0.0, 1.0])}, method="mean_difference")
    learned = SteeringVector({1: torch.tensor([0.0, 10.0])}, method="learned")
    both = {"plain": plain, "learned": learned}
    assert prepared(both) == (both, {})
    unit, marks = prepared(both, normalize=True)
    assert [norm for one in unit.values() for norm in one.norms().values()] == pytest.approx([1, 1, 1])
    assert marks == {"length of learned as it was learned": 10.0}
    matched, marks = prepared(both, match_learned_scale=True)
    assert [norm for one in matched.values() for norm in one.norms().values()] == pytest.approx([10, 10, 10])
    assert matched["learned"] is learned
    assert list(marks.values()) == [1.0]


def test_a_learned_length_needs_one_learned_vector() -> None:
    plain = SteeringVector({1: torch.ones(2)})
    with pytest.raises(InvalidRequest, match="0 of the vectors are learned"):
        prepared({"plain": plain}, match_learned_scale=True)
    with pytest.raises(InvalidRequest, match="exclude each other"):
        prepared({"plain": plain}, normalize=True, match_learned_scale=True)


def test_baselines_are_told_and_steered_ones_are_named() -> None:
    trait = Persona.parse({"name": "t", "instruction": [{"pos": "Be {model_name}.", "neg": "Do not."}]})
    role = Persona.parse({"name": "r", "instruction": [{"pos": "A fox."}]})
    assert [(one.name, one.told) for one in baselines(trait, "m")] == [
        ("unsteered", ()),
        ("prompted", ("Be m.",)),
        ("opposite", ("Do not.",)),
    ]
    assert [one.name for one in baselines(role, "m")] == ["unsteered", "prompted"]
    assert [one.name for one in baselines(None, "m")] == ["unsteered"]
    (one,) = steered({"v": SteeringVector({1: torch.ones(2)}, site="mlp_out")}, [0.5])
    assert (one.name, one.series, one.at) == ("v × 0.5", "v", 0.5)
    assert (one.steering.ops[0].vector, one.steering.ops[0].site) == ("v", "mlp_out")


def test_caps_come_from_configs_and_from_steerings_with_their_percentiles(tmp_path: Path) -> None:
    axis = SteeringVector({1: torch.tensor([1.0, 0.0])})
    write_capping(tmp_path / "capping_config.pt", axis, {"layers_1:2-p0.25": {1: 2.0}, "odd": {1: 3.0}})
    (tmp_path / "cap-p75.json").write_text(floor(axis, {1: 5.0}).to_json(), encoding="utf-8")
    found = caps([tmp_path / "capping_config.pt", tmp_path / "cap-p75.json"])
    assert [(one.name, one.series, one.at) for one in found] == [
        ("layers_1:2-p0.25", "layers_1:2", 25.0),
        ("odd", None, None),
        ("cap-p75", "cap", 75.0),
    ]
    (tmp_path / "no.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidRequest) as caught:
        caps([tmp_path / "no.json", tmp_path / "gone.pt"])
    assert len(caught.value.problems) == 2
