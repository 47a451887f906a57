"""Heat maps with one extreme value: the rest stays readable, and the map says where its colours end."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import pytest

from steerscope.report.colours import DIVERGING, Colours
from steerscope.report.plots import heat_figure


def colours_of(figure: go.Figure) -> np.ndarray:
    """RGB of every cell, as a browser finds it: by the place of the value between zmin and zmax in the colour scale."""
    heat = figure.data[0]
    z = np.array(heat.z, dtype=float)
    return between(heat.colorscale, ((z - heat.zmin) / (heat.zmax - heat.zmin)).clip(0, 1))


def between(scale: Sequence, places: np.ndarray) -> np.ndarray:
    stops = [place for place, _ in scale]
    colours = np.array([rgb(colour) for _, colour in scale])
    return np.stack([np.interp(places, stops, channel) for channel in colours.T], axis=-1)


def rgb(colour: str) -> list[float]:
    if colour.startswith("#"):
        return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return [float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


def drawn(values: np.ndarray, **options: object) -> go.Figure:
    rows, columns = (list(range(size)) for size in values.shape)
    return heat_figure({"": values}, rows, columns, across="layer", hover="%{z}", **options)  # type: ignore[arg-type]


def apart(colours: np.ndarray) -> float:
    """The median distance between the colours of two cells, of 441 between black and white."""
    flat = colours.reshape(-1, 3)
    return float(np.median(np.linalg.norm(flat[:, None] - flat[None], axis=-1)))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("extreme", [30.0, 1e3, 1e9, -1e5])
def test_one_extreme_value_leaves_the_rest_as_readable_as_without_it(extreme: float, signed: bool) -> None:
    values = np.random.default_rng(0).standard_normal((6, 9))
    spoilt = values.copy()
    spoilt[2, 3] = extreme
    if not signed:
        values, spoilt = np.abs(values), np.abs(spoilt)
    alone, beside = (colours_of(drawn(grid, signed=signed)) for grid in (values, spoilt))
    assert apart(beside) > 0.6 * apart(alone)


def test_the_map_says_where_its_colours_end_and_keeps_its_numbers() -> None:
    assert not drawn(np.ones((4, 5))).layout.annotations
    values = np.random.default_rng(0).standard_normal((4, 5))
    values[1, 1] = 4321.0
    figure = drawn(values)
    (note,) = figure.layout.annotations
    assert note.text.startswith("Colours end at ±")
    assert note.text.endswith("the largest value is ±4,321")
    assert figure.data[0].colorscale == tuple(map(tuple, DIVERGING))
    assert np.array(figure.data[0].z, dtype=float) == pytest.approx(values, rel=1e-3)


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2)), np.full((2, 2), np.nan), np.array([[np.inf, 1.0], [2.0, np.nan]])]
)
def test_maps_of_nothing_have_a_scale(values: np.ndarray) -> None:
    heat = drawn(values).data[0]
    assert np.isfinite([heat.zmin, heat.zmax]).all()
    assert heat.zmin < heat.zmax


def test_probabilities_keep_a_scale_up_to_1() -> None:
    assert Colours.of([0.001] * 50 + [0.9], signed=False, least=1.0).limit == 1.0
