"""MLP pass: each direction through the norm and MLP of every layer, in one checkpoint or in two.

What the MLP adds to the stream is split into its part along the direction (positive: the layer reinforces it) and
across it, for the direction and its opposite. Between two checkpoints the absolute (L2) and angular (1 − cosine)
changes are measured, and the layers where they are largest come out as focus layers.
"""

from typing import Unpack

import pyarrow as pa

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions
from steerscope.analysis.layerwise import LayerPass, PassOptions, written
from steerscope.analysis.results import AnalysisResult, joined


def mlp_pass(
    base: Checkpoint, directions: Directions, tuned: Checkpoint | None = None, **options: Unpack[PassOptions]
) -> AnalysisResult:
    """Return the tables `written` (layer, direction, sign) and `ranking` (direction).

    Directions of layer i go through layer i, or those of `layer` through all. z is against `random` random directions,
    and against those of `against`, if given.
    """
    run = LayerPass(base=base, directions=directions, tuned=tuned, **options)
    layers = run.layers("MLP", lambda model, inputs: model.mlp(inputs.rows))
    table = pa.table(joined([written(inputs, number, outs) for number, inputs, outs in layers]))
    measures = ("parallel", "norm")
    ranked = ("change", "turn", *measures) if tuned else measures
    return run.result("mlp", "MLPs", {"written": table}, table, ranked, measures)
