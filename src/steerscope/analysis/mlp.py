"""MLP pass: each direction through the norm and MLP of every layer, in one checkpoint or in two.

What the MLP adds to the stream is split into its part along the direction (positive: the layer reinforces it) and
across it, for the direction and its opposite. Between two checkpoints the absolute (L2) and angular (1 − cosine)
changes are measured, and the layers where they are largest come out as focus layers.
"""

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import (
    Inputs,
    Progress,
    about,
    checked_layers,
    component_ranks,
    group_tests,
    peaks,
    ranking,
    table_of,
    written,
)
from steerscope.analysis.onelayer import OneLayer
from steerscope.analysis.results import Result


def mlp_pass(
    base: Checkpoint,
    directions: Directions,
    tuned: Checkpoint | None = None,
    *,
    layer: int | None = None,
    random: int = 1024,
    against: Directions | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Result:
    """Tables `written` (layer, direction, sign) and `ranking` (direction).

    Layer i meets the directions of layer i, or those of `layer` everywhere. z is against random directions, and against
    those of `against`, if given.
    """
    layers = checked_layers(base, tuned, directions, layer, random, against)
    models = [OneLayer(checkpoint, device) for checkpoint in (base, tuned) if checkpoint]
    parts = []
    for done, number in enumerate(layers):
        inputs = Inputs.of(directions, number if layer is None else layer, random, seed, against)
        outs = []
        for model in models:
            with model.at(number):
                outs.append(model.mlp(inputs.rows))
        parts.append(written(inputs, number, outs))
        if progress:
            progress("MLP", done + 1, len(layers))
    table = table_of(parts)
    ranked = ranking(table, (*(("change", "turn") if tuned else ()), "parallel", "norm"))
    found = {
        "focus": peaks(table, ("change", "turn") if tuned else ("norm", "parallel")),
        "groups": group_tests(ranked),
        "components": component_ranks(table, ("z_parallel", "z_norm")),
    }
    told = about("MLPs", base, tuned, directions, against, layer=layer, random=random, seed=seed)
    return Result("mlp", {**told, **found}, {"written": table, "ranking": ranked})
