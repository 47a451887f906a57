"""Heat maps with one extreme value: the rest stays readable, large values stay apart, and the map says so."""

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
    assert tuple(beside[2, 3]) not in {tuple(colour) for colour in np.delete(beside.reshape(-1, 3), 21, axis=0)}


def test_large_values_are_not_cut_to_one_colour() -> None:
    values = np.random.default_rng(0).standard_normal((10, 10))
    values[0, :6] = [20, 60, 200, 600, 2000, 6000]
    large = colours_of(drawn(values))[0, :6]
    assert np.linalg.norm(np.diff(large, axis=0), axis=1).min() > 3


def test_the_map_says_where_its_colours_are_logarithmic_and_keeps_its_numbers() -> None:
    values = np.random.default_rng(0).standard_normal((4, 5))
    assert not drawn(values).layout.annotations
    assert drawn(values).data[0].colorscale == tuple(map(tuple, DIVERGING))
    values[1, 1] = 4321.0
    figure = drawn(values)
    (note,) = figure.layout.annotations
    assert note.text.startswith("Colours: linear up to ±")
    assert note.text.endswith("logarithmic from there to ±4,321")
    assert np.array(figure.data[0].z, dtype=float) == pytest.approx(values, rel=1e-3)
    assert figure.data[1].marker.colorbar.ticktext[-1] == "4,321"


def test_the_key_has_each_value_at_the_colour_it_has_in_the_map() -> None:
    values = np.append(np.linspace(-1, 1, 40), 500.0).reshape(1, -1)
    figure = drawn(values)
    bar, scale = figure.data[1].marker.colorbar, figure.data[1].marker.colorscale
    colours = Colours.of(values, signed=True)
    for value in (-1.0, 0.0, 0.4, 30.0, 500.0):
        shown = between(scale, np.array((colours.place(value) + 1) / 2))
        cell = colours_of(drawn(np.append(values[0, :-1], [value, 500.0]).reshape(1, -1)))[0, -2]
        assert np.abs(shown - cell).max() < 6
    assert list(bar.tickvals) == sorted(bar.tickvals)


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2)), np.full((2, 2), np.nan), np.array([[np.inf, 1.0], [2.0, np.nan]])]
)
def test_maps_of_nothing_have_a_scale(values: np.ndarray) -> None:
    heat = drawn(values).data[0]
    assert np.isfinite([heat.zmin, heat.zmax]).all()
    assert heat.zmin < heat.zmax


def test_probabilities_keep_a_linear_scale_up_to_1() -> None:
    colours = Colours.of([0.001] * 50 + [0.9], signed=False, least=1.0)
    assert (colours.limit, colours.bend) == (1.0, None)
    assert Colours.of([0.5] * 50 + [300.0], signed=False, least=1.0).place(0.5) == pytest.approx(0.35)
