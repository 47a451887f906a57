"""The axis along which roles differ most, and caps that keep a model from moving along it.

The axis is the first principal component of the mean rows of roles at each layer, with length 1 and the default on its
positive side. `contrast_axis` is the mean of the default minus the mean of the roles, with its own length. A cap keeps
the projection of every row above a floor, which is a percentile of the projections of known answers.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steerscope.extraction.personas.folder import write_pt
from steerscope.extraction.strategies import first_axis, towards
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import LayersLike, Steering, checked_layers
from steerscope.vectors.vector import SteeringVector

FEWEST_ROLES = 3  # the first component of two is only the line between them


def principal_axis(roles: Tensor, default: Tensor, model: str | None = None) -> SteeringVector:
    """Return the axis of role means [roles, layers, hidden] and the default's mean [layers, hidden]."""
    if len(roles) < FEWEST_ROLES:
        what = f"an axis of {len(roles)} roles says nothing"
        raise InvalidRequest([Problem("roles", what, f"give at least {FEWEST_ROLES}")])
    spread = roles.double() - roles.double().mean(0)
    means = torch.cat([roles, default[None]])
    first = towards(first_axis(spread), means, torch.arange(len(means)) == len(roles))
    along, whole = (spread * first).sum(-1).square().sum(0), spread.square().sum((0, 2))
    explained = [round(float(share), 4) for share in along / whole.clamp_min(1e-30)]  # 0 where all roles are alike
    return SteeringVector(
        dict(enumerate(first)),
        model=model,
        method="first PC of role means",
        provenance={"name": "axis", "roles": len(roles), "explained": explained},  # type: ignore[dict-item]
    )


def contrast_axis(roles: Tensor, default: Tensor, model: str | None = None) -> SteeringVector:
    """Return the default's mean minus the mean of the roles' means."""
    found = (default.double() - roles.double().mean(0)).float()
    provenance = {"name": "axis-contrast", "roles": len(roles)}
    return SteeringVector(dict(enumerate(found)), model=model, method="default - roles", provenance=provenance)


def thresholds(vector: SteeringVector, rows: Tensor, percentile: float) -> dict[int, float]:
    """Return, by layer, the percentile of the projections of rows [n, layers, hidden] on the unit directions."""
    if not 0 <= percentile <= 100:
        raise InvalidRequest([Problem("percentile", f"is {percentile:g}", "choose 0 to 100")])
    layers = vector.layers or range(rows.shape[1])
    return {k: float(np.percentile(vector.projection(rows[:, k], k).numpy(), percentile)) for k in layers}


def floor(vector: SteeringVector, limits: Mapping[int, float], tokens: str = "all") -> Steering:
    """Return a cap for each layer that keeps projections from falling below its limit."""
    return Steering.of(*(vector.at(k).cap(min=limit, layers=k, tokens=tokens) for k, limit in limits.items()))


def write_capping(
    path: Path, vector: SteeringVector, experiments: Mapping[str, Mapping[int, float]], name: str = "axis"
) -> None:
    """Write floors as a `capping_config.pt`. Its caps are upper bounds: a floor along v becomes a ceiling along -v."""
    layers = sorted({layer for floors in experiments.values() for layer in floors})
    turned = -vector.at(layers).normalised()
    data = {
        "vectors": {f"layer_{k}/{name}": {"vector": turned[k].clone(), "layer": k} for k in layers},
        "experiments": [
            {"id": id, "interventions": [{"vector": f"layer_{k}/{name}", "cap": -x} for k, x in floors.items()]}
            for id, floors in experiments.items()
        ],
    }
    write_pt(path, data)


def cap_layers(layers: LayersLike | None, n_layers: int) -> tuple[int, ...]:
    """Return the layers to cap; by default those from 70 to 85 percent of the depth."""
    first = min(round(0.7 * n_layers), n_layers - 1)
    try:
        wanted = range(first, max(round(0.85 * n_layers), first + 1)) if layers is None else checked_layers(layers)
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        raise InvalidRequest([Problem("layers", what, remedy)]) from None
    chosen = tuple(range(n_layers)) if wanted == "all" else tuple(wanted)
    if chosen[-1] >= n_layers:
        what = f"layer {chosen[-1]} is out of range"
        raise InvalidRequest([Problem("layers", what, f"the model has layers 0–{n_layers - 1}")])
    return chosen
