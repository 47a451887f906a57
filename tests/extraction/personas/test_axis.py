"""The axis finds a direction that was put there; thresholds are percentiles; caps hold on a running model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from steerscope import Capture, Sampling, SteeringVector
from steerscope.engines.sync import SyncEngine
from steerscope.extraction.personas.build import (
    cap_layers,
    contrast_axis,
    floor,
    principal_axis,
    thresholds,
    write_capping,
)
from steerscope.specs.errors import InvalidRequest
from steerscope.vectors.legacy import load_capping

LAYERS, HIDDEN = 4, 64


def planted(roles: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Role means that differ along one direction per layer, and a default at its far end."""
    generator = torch.Generator().manual_seed(5)
    direction = torch.nn.functional.normalize(torch.randn(LAYERS, HIDDEN, generator=generator), dim=-1)
    places = torch.linspace(-3, 2, roles)
    noise = 0.05 * torch.randn(roles, LAYERS, HIDDEN, generator=generator)
    base = 10 * torch.randn(LAYERS, HIDDEN, generator=generator)
    return base + places[:, None, None] * direction + noise, base + 3 * direction, direction


@pytest.mark.parametrize("side", [1, -1])
def test_the_axis_is_the_direction_that_was_put_there_and_points_to_the_default(side: int) -> None:
    roles, default, direction = planted()
    default = roles.mean(0) + side * (default - roles.mean(0))
    axis = principal_axis(roles, default, "tiny")
    for layer in range(LAYERS):
        assert float(axis[layer].norm()) == pytest.approx(1, abs=1e-6)
        assert float(axis[layer] @ direction[layer]) * side > 0.99
        independent = PCA(n_components=1).fit(roles[:, layer].numpy()).components_[0]
        assert abs(float(axis[layer] @ torch.from_numpy(independent))) > 0.9999
    explained = axis.provenance["explained"]
    assert isinstance(explained, list)
    assert all(isinstance(share, float) and 0.9 < share <= 1 for share in explained)


def test_roles_that_are_all_alike_have_an_axis_that_explains_nothing() -> None:
    alike = torch.randn(LAYERS, HIDDEN).expand(4, -1, -1)
    axis = principal_axis(alike, torch.randn(LAYERS, HIDDEN))
    assert axis.provenance["explained"] == [0.0] * LAYERS
    assert all(torch.isfinite(axis[layer]).all() for layer in range(LAYERS))


def test_the_contrast_axis_is_the_default_minus_the_mean_of_the_roles() -> None:
    roles, default, _ = planted()
    axis = contrast_axis(roles, default)
    for layer in range(LAYERS):
        expected = default[layer].double() - roles[:, layer].double().mean(0)
        torch.testing.assert_close(axis[layer].double(), expected, atol=1e-6, rtol=1e-6)


def test_two_roles_make_no_axis() -> None:
    with pytest.raises(InvalidRequest, match="an axis of 2 roles says nothing; give at least 3"):
        principal_axis(torch.randn(2, 4, 8), torch.randn(4, 8))


def test_thresholds_are_percentiles_of_the_projection_on_the_unit_direction() -> None:
    generator = torch.Generator().manual_seed(0)
    vector = SteeringVector({layer: 7 * torch.randn(8, generator=generator) for layer in (1, 3)})
    rows = torch.randn(50, 4, 8, generator=generator)
    found = thresholds(vector, rows, 25)
    assert list(found) == [1, 3]
    for layer, limit in found.items():
        unit = vector[layer].numpy().astype(np.float64)
        expected = np.percentile(rows[:, layer].numpy() @ (unit / np.linalg.norm(unit)), 25)
        assert limit == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InvalidRequest, match="percentile: is 101; choose 0 to 100"):
        thresholds(vector, rows, 101)


def test_a_cap_holds_on_a_running_model_and_the_capping_config_does_the_same(
    engine: SyncEngine, tmp_path: Path
) -> None:
    prompts, sampling = ["The quick brown fox", "How was your week at work?"], Sampling(max_tokens=8, ignore_eos=True)
    generator = torch.Generator().manual_seed(2)
    axis = SteeringVector({k: torch.randn(HIDDEN, generator=generator) for k in range(LAYERS)}).normalised()
    plain = engine.generate(prompts, sampling, capture=Capture())
    seen = torch.stack([torch.cat([one.rows[k] for one in plain]) for k in range(LAYERS)], dim=1)
    limits = thresholds(axis.at([2, 3]), seen, 75)
    below = (axis.projection(seen[:, 2], 2) < limits[2]).float().mean()
    assert 0.6 < float(below) < 0.85  # so that there is something to hold up

    held = engine.generate(prompts, sampling, steer=floor(axis, limits), capture=Capture())
    for k, limit in limits.items():
        projected = torch.cat([axis.projection(one.rows[k], k) for one in held])
        assert float(projected.min()) >= limit - 1e-4
        assert float(projected.max()) > limit + 0.01  # and those above it are let be

    path = tmp_path / "capping_config.pt"
    write_capping(path, axis, {"layers_2:4-p0.75": limits})
    (name, steering), *_ = load_capping(path).items()
    assert name == "layers_2:4-p0.75"
    same = engine.generate(prompts, sampling, steer=steering, capture=Capture())
    for one, other in zip(held, same, strict=True):
        assert one.token_ids == other.token_ids
        for k in range(LAYERS):
            torch.testing.assert_close(one.rows[k], other.rows[k], atol=1e-4, rtol=1e-4)


def test_layers_of_caps_lie_late_unless_somebody_chooses() -> None:
    assert cap_layers(None, 30) == (21, 22, 23, 24, 25)
    assert cap_layers(None, 1) == (0,)
    assert cap_layers("2,4-5", 6) == (2, 4, 5)
    assert cap_layers("all", 3) == (0, 1, 2)
    with pytest.raises(InvalidRequest, match="layer 6 is out of range; the model has layers 0–5"):
        cap_layers("5-6", 6)
    with pytest.raises(InvalidRequest, match="is not a layer"):
        cap_layers("late", 6)
