"""The demo's results as one self-contained HTML page. Everything that a model or a user wrote is escaped.

Colours mean the same everywhere: orange is positive, blue negative, grey unsteered.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib import resources

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from steerscope.demo.results import Answer, Results, TokenMap
from steerscope.report.colours import AXIS, DIVERGING, INK, NEGATIVE, NEUTRAL, POSITIVE, Colours
from steerscope.report.page import Html, div, document, fill
from steerscope.report.plots import framed, token_figure

_DOTTED = {"color": INK, "width": 1, "dash": "dot"}
_CARD = """<article class="card" style="border-top-color:{colour}">
<header><b style="color:{colour}">{name}</b><code>{op}</code></header><p>{text}</p>
<footer><span>projection<b>{answer.projection:+.3f}</b></span><span>perplexity<b>{answer.perplexity:.1f}</b></span></footer>
</article>"""


def html_report(results: Results) -> str:
    """Return the whole page."""
    template = (resources.files("steerscope.demo") / "report.html").read_text(encoding="utf-8")
    title = f"steerscope demo: {results.positive} and {results.negative} in {results.model}"
    return document(title, fill(template, **_numbers(results), **_texts(results), **_plots(results)))


def telling_lines(results: Results) -> list[str]:
    """Three lines for the terminal."""
    control = results.control
    up, down, plain = (results.dose(sign * results.scale) for sign in (1, -1, 0))
    return [
        f"Direction: held-out AUROC {results.heldout_auroc:.2f} at layer {results.read_layer} "
        f"({results.heldout_pairs} {results.positive} against {results.heldout_pairs} {results.negative} sentences, "
        "none used for the vector).",
        f"Effect: ± steering moves log p({results.positive}) − log p({results.negative}) by {control.gap:.1f} nats, "
        f"{control.z:.1f} times the spread of {len(control.random_gaps)} random directions of the same length.",
        f"Cost: the unsteered model's perplexity on the answers goes from {plain.perplexity:.1f} to "
        f"{up.perplexity:.1f} ({results.positive}) and {down.perplexity:.1f} ({results.negative}).",
    ]


def _numbers(results: Results) -> dict[str, object]:
    """Return the numbers that the template names: parts of the results, and what follows from them."""
    layers = results.steered_layers
    least = results.doses[0]
    most = results.doses[-1]
    up, down, plain = (results.dose(sign * results.scale) for sign in (1, -1, 0))
    last_plain, last_up, last_down = (heat.mean(-1) for heat in results.heat)
    return {
        **{"r": results, "up": up, "down": down, "plain": plain, "most": most, "least": least},
        **{"last_plain": last_plain, "last_up": last_up, "last_down": last_down},
        "first": layers[0],
        "last": layers[-1],
        "last_layer": results.layers - 1,
        "n_steered": len(layers),
        "share": results.scale / len(layers),
        "distances": results.scale / results.class_distance,
        "n_random": len(results.control.random_gaps),
        "random_largest": max(map(abs, results.control.random_gaps)),
        "n_tests": len(results.control.prompts),
        "gap_far": most.log_odds - least.log_odds,
        "heat": results.heat[0],
        "lens": results.lenses.maps[0],
        "heat_limit": heat_limit(results),
    }


def _texts(results: Results) -> dict[str, object]:
    """Return the texts that the template names."""
    control = results.control
    maps = results.lenses.maps
    ops = _ops(results)
    item = '<li><b style="color:{}">{}</b><span>{}</span></li>'
    return {
        "lens_means": "; ".join(f"{_title(one)} {one.mean(0):.2f} and {one.mean(1):.2f}" for one in maps),
        "gradient": ", ".join(f"{ink} {stop:.0%}" for stop, ink in DIVERGING),
        "test_prompts": " · ".join(f"{prompt} …" for prompt in control.prompts),
        "sweep_prompts": " · ".join(results.sweep_prompts),
        "positive_words": ", ".join(control.positive_words),
        "negative_words": ", ".join(control.negative_words),
        "ops": _joined(fill(item, colour(results, name), _name(name), about) for name, (_, about) in ops.items()),
        "cards": _joined(_cards(results, prompt) for prompt in dict.fromkeys(one.prompt for one in results.answers)),
    }


def _joined(parts: Iterable[str]) -> Html:
    return Html("".join(parts))


def _ops(results: Results) -> dict[str, tuple[str, str]]:
    """Return condition → its op, and what that means."""
    scale = results.scale
    layers = f"{results.steered_layers[0]}–{results.steered_layers[-1]}"
    same = "The same push, but no row may lie further out than unsteered answers do on average"
    return {
        "unsteered": ("no op", "The model as it is."),
        results.positive: (f"Add(+{scale:g})", f"The vector is added at layers {layers}."),
        results.negative: (f"Add(−{scale:g})", "The same vector, subtracted."),
        "capped": (f"Add(+{scale:g}), Cap(max)", f"{same} ({results.cap_at:+.3f})."),
        "ablated": ("Ablate()", f"No push; the component along the vector is set to zero at layers {layers}."),
    }


def _cards(results: Results, prompt: str) -> Html:
    """Return the answers to a prompt side by side."""
    cards = _joined(_card(results, answer) for answer in results.answers if answer.prompt == prompt)
    return fill('<h3 class="prompt">“{}”</h3><div class="cards">{}</div>', prompt, cards)


def _card(results: Results, answer: Answer) -> str:
    op, _ = _ops(results)[answer.condition]
    ink = colour(results, answer.condition)
    text = answer.text.strip() + ("" if answer.finished else " …")
    return fill(_CARD, name=_name(answer.condition), colour=ink, op=op, text=text, answer=answer)


def _name(condition: str) -> str:
    return condition[:1].upper() + condition[1:]


def _title(found: TokenMap) -> str:
    return found.condition if found.condition == "unsteered" else f"steered {found.condition}"


# --- plots


def _plots(results: Results) -> dict[str, Html]:
    return {
        "heat_plots": _maps(results, results.heat, "plot-heat", heat_figure),
        "lens_plots": _maps(results, results.lenses.maps, "plot-lens", lens_figure, room=120),
        "dose_plot": div(dose_figure(results), "plot-dose"),
    }


def _maps(
    results: Results,
    maps: Sequence[TokenMap],
    name: str,
    draw: Callable[[Results, TokenMap], go.Figure],
    room: int = 0,
) -> Html:
    """Return heat maps below each other with their titles; `room` is for the names of rows, in pixels."""
    title = '<h3 style="color:{}">{}</h3>{}'
    plots = [
        div(draw(results, one), f"{name}-{i}", room + max(720, 19 * len(one.tokens))) for i, one in enumerate(maps)
    ]
    inks = [colour(results, one.condition) for one in maps]
    return _joined(fill(title, ink, _title(one), plot) for ink, one, plot in zip(inks, maps, plots, strict=True))


def colour(results: Results, condition: str) -> str:
    known = {results.positive: POSITIVE, results.negative: NEGATIVE, "capped": "#7c4d9e", "ablated": "#2f7d5b"}
    return known.get(condition, NEUTRAL)


def heat_limit(results: Results) -> float:
    """Return one colour range for all heat maps."""
    return Colours.of(np.concatenate([np.ravel(heat.values) for heat in results.heat]), signed=True).limit


def heat_figure(results: Results, heat: TokenMap) -> go.Figure:
    """Tokens from left to right, layers from bottom to top."""
    colours = Colours(heat_limit(results))
    hover = "%{z:+.3f} mean row norms"
    figure = token_figure(
        heat.values, heat.rows, heat.tokens, colours=colours, hover=hover, answer_start=heat.answer_start
    )
    figure.update_layout(height=238 + figure.layout.margin.b, margin={"l": 46, "t": 8})  # type: ignore[union-attr]
    steered = results.steered_layers
    ticks = sorted({0, steered[0], steered[-1], results.layers - 1})
    title = {"text": "layer", "standoff": 6, "font": {"size": 13}}
    figure.update_yaxes(title=title, tickvals=ticks, ticktext=ticks, autorange=True)
    if heat.condition != "unsteered":
        figure.add_hrect(y0=steered[0] - 0.5, y1=steered[-1] + 0.5, line=_DOTTED, fillcolor="rgba(0,0,0,0)")
    return figure


def lens_figure(_: Results, found: TokenMap) -> go.Figure:
    """Tokens from left to right, concepts from top to bottom."""
    colours = Colours(1.0, signed=False)
    return token_figure(found.values, found.rows, found.tokens, colours=colours, hover="%{z:.3f}")


def dose_figure(results: Results) -> go.Figure:
    """Effect, cost and collapse over the scale, one below the other."""
    doses = results.doses
    scales = [dose.scale for dose in doses]
    rows = (
        (f"Effect: log-odds of {results.positive} words (nats)", [dose.log_odds for dose in doses], "%{y:+.1f} nats"),
        ("Cost: perplexity, unsteered model", [dose.perplexity for dose in doses], "%{y:.1f}"),
        ("Collapse: distinct tokens (%)", [100 * dose.distinct for dose in doses], "%{y:.0f} %"),
    )
    titles = [title for title, _, _ in rows]
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=titles)
    shade = {"color": scales, "colorscale": DIVERGING, "cmin": -0.6, "cmax": 0.6, "line": {"color": INK, "width": 1}}
    look = {"mode": "lines+markers", "line": {"color": AXIS, "width": 2}, "marker": {"size": 9, **shade}}
    for row, (_, values, form) in enumerate(rows, 1):
        hover = f"scale %{{x:+.2f}}<br>{form}<extra></extra>"
        figure.add_scatter(x=scales, y=values, hovertemplate=hover, row=row, col=1, **look)
    for sign in (-1, 1):
        figure.add_vline(x=sign * results.scale, line=_DOTTED)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13}, yshift=3)
    framed(figure, "", "", 560, margin={"l": 50, "r": 16, "t": 32, "b": 48}, showlegend=False)
    figure.update_xaxes(tickformat=".2~f", range=[min(scales) * 1.06, max(scales) * 1.06])
    figure.update_yaxes(type="log", tickvals=[1, 2, 5, 10, 20, 50, 100, 200, 500], row=2, col=1)
    figure.update_yaxes(range=[0, 105], row=3, col=1)
    return figure.update_xaxes(title={"text": "scale (mean row norms, in all)"}, row=3, col=1)
