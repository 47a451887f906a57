"""Results → one self-contained HTML page. Everything that a model or a user wrote is escaped on its way in."""

from html import escape
from importlib import resources
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from steerscope.demo import plots
from steerscope.demo.results import Answer, Results
from steerscope.lenses.report import DIVERGING

_CONFIG: dict[str, object] = {"displayModeBar": False, "responsive": True, "scrollZoom": False}


def html_report(results: Results) -> str:
    """The whole page, plotly.js included once."""
    template = (resources.files("steerscope.demo") / "report.html").read_text(encoding="utf-8")
    return Template(template).substitute(_texts(results), **_plots(results), plotlyjs=get_plotlyjs())


def telling_lines(results: Results) -> list[str]:
    """Three lines for the terminal."""
    control, up, down = results.control, *(results.dose(sign * results.scale) for sign in (1, -1))
    plain = results.dose(0.0)
    return [
        f"Direction: held-out AUROC {results.heldout_auroc:.2f} at layer {results.read_layer} "
        f"({results.heldout_pairs} {results.positive} against {results.heldout_pairs} {results.negative} sentences, "
        "none used for the vector).",
        f"Effect: ± steering moves log p({results.positive}) − log p({results.negative}) by {control.gap:.1f} nats, "
        f"{control.z:.1f} times the spread of {len(control.random_gaps)} random directions of the same length.",
        f"Cost: the unsteered model's perplexity on the answers goes from {plain.perplexity:.1f} to "
        f"{up.perplexity:.1f} ({results.positive}) and {down.perplexity:.1f} ({results.negative}).",
    ]


def _plots(results: Results) -> dict[str, str]:
    heats = "".join(
        f'<h3 style="color:{plots.colour(results, heat.condition)}">{escape(_title(heat.condition))}</h3>'
        f'<div class="wide"><div style="min-width:{max(720, 19 * len(heat.tokens))}px">'
        f"{_div(plots.heat_figure(results, heat), f'plot-heat-{i}')}</div></div>"
        for i, heat in enumerate(results.heat)
    )
    lenses = "".join(
        f'<h3 style="color:{plots.colour(results, found.condition)}">{escape(_title(found.condition))}</h3>'
        f'<div class="wide"><div style="min-width:{max(720, 120 + 19 * len(found.tokens))}px">'
        f"{_div(plots.lens_figure(found), f'plot-lens-{i}')}</div></div>"
        for i, found in enumerate(results.lenses.maps)
    )
    return {
        "heat_plots": heats,
        "lens_plots": lenses,
        "dose_plot": _div(plots.dose_figure(results), "plot-dose"),
        "control_plot": _div(plots.control_figure(results), "plot-control"),
        "layers_plot": _div(plots.layers_figure(results), "plot-layers"),
        "plane_plot": _div(plots.plane_figure(results), "plot-pca"),
    }


def _div(figure: go.Figure, name: str) -> str:
    plot = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=_CONFIG)
    return f'<div class="plot">{plot}</div>'


def _title(condition: str) -> str:
    return condition if condition == "unsteered" else f"steered {condition}"


def _ops(results: Results) -> dict[str, tuple[str, str]]:
    """Condition → what was asked for, and in words."""
    scale, cap = results.scale, results.cap_at
    layers = f"{results.steered_layers[0]}–{results.steered_layers[-1]}"
    return {
        "unsteered": ("no op", "The model as it is."),
        results.positive: (f"Add(+{scale:g})", f"The vector is added at layers {layers}."),
        results.negative: (f"Add(−{scale:g})", "The same vector, subtracted."),
        "capped": (
            f"Add(+{scale:g}), Cap(max)",
            f"The same push, but no row may lie further out than unsteered answers do on average ({cap:+.3f}).",
        ),
        "ablated": ("Ablate()", f"No push; the component along the vector is set to zero at layers {layers}."),
    }


def _cards(results: Results) -> str:
    prompts = list(dict.fromkeys(answer.prompt for answer in results.answers))
    blocks = []
    for prompt in prompts:
        cards = "".join(_card(results, answer) for answer in results.answers if answer.prompt == prompt)
        blocks.append(f'<h3 class="prompt">“{escape(prompt)}”</h3><div class="cards">{cards}</div>')
    return "".join(blocks)


def _card(results: Results, answer: Answer) -> str:
    op, _ = _ops(results).get(answer.condition, ("", ""))
    ink = plots.colour(results, answer.condition)
    return (
        f'<article class="card" style="border-top-color:{ink}">'
        f'<header><b style="color:{ink}">{escape(_name(answer.condition))}</b><code>{escape(op)}</code></header>'
        f"<p>{escape(answer.text.strip())}{'' if answer.finished else ' …'}</p>"
        f"<footer><span>projection<b>{_signed(answer.projection, 3)}</b></span>"
        f"<span>perplexity<b>{answer.perplexity:.1f}</b></span></footer></article>"
    )


def _name(condition: str) -> str:
    return condition[:1].upper() + condition[1:]


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _texts(results: Results) -> dict[str, str]:
    control, plane = results.control, results.plane
    up, down, plain = (results.dose(sign * results.scale) for sign in (1, -1, 0))
    most, least = results.doses[-1], results.doses[0]
    token, token_layer, token_length = results.heat[0].longest
    lenses = results.lenses
    words = {
        "lens_prompt": lenses.maps[0].prompt,
        "lens_for": lenses.maps[0].concepts[0],
        "lens_against": lenses.maps[0].concepts[1],
        "model": results.model,
        "positive": results.positive,
        "negative": results.negative,
        "test_prompts": " · ".join(f"{prompt} …" for prompt in control.prompts),
        "sweep_prompts": " · ".join(results.sweep_prompts),
        "positive_words": ", ".join(control.positive_words),
        "negative_words": ", ".join(control.negative_words),
        "heat_prompt": results.heat[0].prompt,
        "longest_token": token.strip(),
        "version": results.version,
        "dtype": results.dtype,
    }
    numbers = {
        "layers": str(results.layers),
        "last_layer": str(results.layers - 1),
        "hidden": str(results.hidden),
        "pairs": str(results.pairs),
        "heldout": str(results.heldout_pairs),
        "steered_layers": f"{results.steered_layers[0]}–{results.steered_layers[-1]}",
        "steered_range": f"{results.steered_layers[0]}-{results.steered_layers[-1]}",
        "steered_count": str(len(results.steered_layers)),
        "share": f"{results.scale / len(results.steered_layers):.2g}",
        "read_layer": str(results.read_layer),
        "scale": f"{results.scale:g}",
        "class_distance": f"{results.class_distance:.2f}",
        "scale_in_distances": f"{results.scale / results.class_distance:.1f}",
        "cap": _signed(results.cap_at, 3),
        "auroc": f"{results.heldout_auroc:.2f}",
        "gap": f"{control.gap:.1f}",
        "z": f"{control.z:.1f}",
        "random": str(len(control.random_gaps)),
        "random_largest": f"{max(map(abs, control.random_gaps)):.1f}",
        "test_count": str(len(control.prompts)),
        "odds_plain": _signed(plain.log_odds, 1),
        "odds_up": _signed(up.log_odds, 1),
        "odds_down": _signed(down.log_odds, 1),
        "gap_far": f"{most.log_odds - least.log_odds:.1f}",
        "ppl_far_up": f"{most.perplexity:.0f}",
        "ppl_far_down": f"{least.perplexity:.0f}",
        "far": f"{most.scale:g}",
        "last_plain": _signed(results.last_layer_mean("unsteered"), 2),
        "last_up": _signed(results.last_layer_mean(results.positive), 2),
        "last_down": _signed(results.last_layer_mean(results.negative), 2),
        "longest_layer": str(token_layer),
        "longest_length": f"{token_length:.1f}",
        "ppl_plain": f"{plain.perplexity:.1f}",
        "ppl_up": f"{up.perplexity:.1f}",
        "ppl_down": f"{down.perplexity:.1f}",
        "cosine": f"{plane.cosine:.2f}",
        "plain_cosines": " and ".join(f"{cosine:.2f}" for cosine in plane.plain_cosines),
        "readback": f"{plane.readback_auroc:.2f}",
        "lens_count": str(lenses.count),
        "lens_layer": str(lenses.layer),
        "lens_text": f"{lenses.text_auroc:.2f}",
        "lens_token": f"{lenses.token_auroc:.2f}",
        "lens_means": "; ".join(
            f"{escape(_title(one.condition))} {one.mean(0):.2f} and {one.mean(1):.2f}" for one in lenses.maps
        ),
        "seconds": f"{results.seconds:.0f}",
        "heat_limit": f"{plots.heat_limit(results):.2f}",
        "gradient": ", ".join(f"{ink} {stop:.0%}" for stop, ink in DIVERGING),
    }
    ops = "".join(
        f'<li><b style="color:{plots.colour(results, name)}">{escape(_name(name))}</b>'
        f"<span>{escape(meaning)}</span></li>"
        for name, (_, meaning) in _ops(results).items()
    )
    escaped = {key: escape(value) for key, value in words.items()}
    return {**escaped, **numbers, "ops": ops, "cards": _cards(results)}
