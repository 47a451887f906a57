"""The demo's results as one self-contained HTML page. Everything that a model or a user wrote is escaped."""

from collections.abc import Sequence
from importlib import resources

from steerscope.demo import plots
from steerscope.demo.results import Answer, Results
from steerscope.report.colours import DIVERGING
from steerscope.report.page import Html, div, document, fill

_CARD = """<article class="card" style="border-top-color:{colour}">
<header><b style="color:{colour}">{name}</b><code>{op}</code></header><p>{text}</p>
<footer><span>projection<b>{answer.projection:+.3f}</b></span><span>perplexity<b>{answer.perplexity:.1f}</b></span></footer>
</article>"""


def html_report(results: Results) -> str:
    """Return the whole page."""
    template = (resources.files("steerscope.demo") / "report.html").read_text(encoding="utf-8")
    title = f"steerscope demo: {results.positive} and {results.negative} in {results.model}"
    return document(title, fill(template, **_values(results), **_plots(results)))


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


def _plots(results: Results) -> dict[str, Html]:
    heats = [
        _titled(results, heat.condition, div(plots.heat_figure(results, heat), f"plot-heat-{i}", _width(heat.tokens)))
        for i, heat in enumerate(results.heat)
    ]
    lenses = [
        _titled(results, one.condition, div(plots.lens_figure(one), f"plot-lens-{i}", 120 + _width(one.tokens)))
        for i, one in enumerate(results.lenses.maps)
    ]
    return {
        "heat_plots": Html("".join(heats)),
        "lens_plots": Html("".join(lenses)),
        "dose_plot": div(plots.dose_figure(results), "plot-dose"),
        "control_plot": div(plots.control_figure(results), "plot-control"),
        "layers_plot": div(plots.layers_figure(results), "plot-layers"),
        "plane_plot": div(plots.plane_figure(results), "plot-pca"),
    }


def _titled(results: Results, condition: str, plot: Html) -> str:
    colour = plots.colour(results, condition)
    return fill('<h3 style="color:{}">{}</h3>{}', colour, _title(condition), plot)


def _width(tokens: Sequence[str]) -> int:
    return max(720, 19 * len(tokens))


def _title(condition: str) -> str:
    return condition if condition == "unsteered" else f"steered {condition}"


def _ops(results: Results) -> dict[str, tuple[str, str]]:
    """Return condition → its op, and what that means."""
    scale = results.scale
    layers = f"{results.steered_layers[0]}–{results.steered_layers[-1]}"
    return {
        "unsteered": ("no op", "The model as it is."),
        results.positive: (f"Add(+{scale:g})", f"The vector is added at layers {layers}."),
        results.negative: (f"Add(−{scale:g})", "The same vector, subtracted."),
        "capped": (
            f"Add(+{scale:g}), Cap(max)",
            "The same push, but no row may lie further out than unsteered answers do on average "
            f"({results.cap_at:+.3f}).",
        ),
        "ablated": ("Ablate()", f"No push; the component along the vector is set to zero at layers {layers}."),
    }


def _cards(results: Results) -> Html:
    blocks = []
    for prompt in dict.fromkeys(answer.prompt for answer in results.answers):
        cards = "".join(_card(results, answer) for answer in results.answers if answer.prompt == prompt)
        blocks.append(fill('<h3 class="prompt">“{}”</h3><div class="cards">{}</div>', prompt, Html(cards)))
    return Html("".join(blocks))


def _card(results: Results, answer: Answer) -> str:
    op, _ = _ops(results).get(answer.condition, ("", ""))
    colour = plots.colour(results, answer.condition)
    text = answer.text.strip() + ("" if answer.finished else " …")
    return fill(_CARD, name=_name(answer.condition), colour=colour, op=op, text=text, answer=answer)


def _name(condition: str) -> str:
    return condition[:1].upper() + condition[1:]


def _values(results: Results) -> dict[str, object]:
    """Return what the template names: parts of the results, and what follows from them."""
    control, layers = results.control, results.steered_layers
    most, least = results.doses[-1], results.doses[0]
    up, down, plain = (results.dose(sign * results.scale) for sign in (1, -1, 0))
    conditions = {"last_plain": "unsteered", "last_up": results.positive, "last_down": results.negative}
    ops = (
        fill('<li><b style="color:{}">{}</b><span>{}</span></li>', plots.colour(results, name), _name(name), meaning)
        for name, (_, meaning) in _ops(results).items()
    )
    return {
        **{"r": results, "up": up, "down": down, "plain": plain, "most": most, "least": least},
        **{name: results.last_layer_mean(condition) for name, condition in conditions.items()},
        "first": layers[0],
        "last": layers[-1],
        "last_layer": results.layers - 1,
        "n_steered": len(layers),
        "share": results.scale / len(layers),
        "distances": results.scale / results.class_distance,
        "n_random": len(control.random_gaps),
        "random_largest": max(map(abs, control.random_gaps)),
        "n_tests": len(control.prompts),
        "gap_far": most.log_odds - least.log_odds,
        "heat": results.heat[0],
        "longest": results.heat[0].longest,
        "longest_token": results.heat[0].longest[0].strip(),
        "lens": results.lenses.maps[0],
        "lens_means": "; ".join(
            f"{_title(one.condition)} {one.mean(0):.2f} and {one.mean(1):.2f}" for one in results.lenses.maps
        ),
        "plain_cosines": " and ".join(f"{cosine:.2f}" for cosine in results.plane.plain_cosines),
        "heat_limit": plots.heat_limit(results),
        "gradient": ", ".join(f"{ink} {stop:.0%}" for stop, ink in DIVERGING),
        "test_prompts": " · ".join(f"{prompt} …" for prompt in control.prompts),
        "sweep_prompts": " · ".join(results.sweep_prompts),
        "positive_words": ", ".join(control.positive_words),
        "negative_words": ", ".join(control.negative_words),
        "ops": Html("".join(ops)),
        "cards": _cards(results),
    }
