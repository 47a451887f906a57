"""A run as one page: score over scale, what it costs, how sure it is, and answers side by side."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from steerscope.evals.run import OPPOSITE, PROMPTED, UNSTEERED, EvalRun, answers_of, load_run
from steerscope.evals.scoring import UNFIT
from steerscope.evals.summary import out_of_reach, summarise
from steerscope.files import atomic_path
from steerscope.report.colours import AXIS, GRID, INK, NEUTRAL, PALETTE
from steerscope.report.page import Html, div, fill, page, table
from steerscope.report.plots import add_band, add_line, framed, label
from steerscope.specs.steering import Add

Entry = Mapping[str, Any]
_LINES = {UNSTEERED: (NEUTRAL, "dash"), PROMPTED: (INK, "dot"), OPPOSITE: (AXIS, "dot")}
_QUESTIONS_SHOWN, _MOST_COLUMNS = 6, 6


def write_report(out: Path, main: str | None = None) -> dict[str, Any]:
    """OUT/summary.json and OUT/report.html; returns the former."""
    run = load_run(out)
    summary = summarise(out, run, main)
    with atomic_path(out / "report.html") as temporary:
        temporary.write_text(report_page(out, run, summary), encoding="utf-8")
    return summary


def report_page(out: Path, run: EvalRun, summary: Mapping[str, Any]) -> str:
    entries: list[Entry] = summary["conditions"]
    sections = {"Answers expected, present and judged": _counts(summary)}
    for dataset in dict.fromkeys(one["dataset"] for one in entries):
        mine = [one for one in entries if one["dataset"] == dataset]
        names = [name for name in dict.fromkeys(one["score"] for one in mine)]
        main = summary["score"] if summary["score"] in names else names[0]
        sections |= _dataset_sections(dataset, mine, names, main, run)
    sections["Answers side by side"] = _samples(out, run, entries, summary["score"])
    sections["Scorers"] = _scorers(summary["scorers"])
    name = run.model.name if run.model else "a model"
    about = f"{summary['answers']:,} answers of {name}: {len(run.items)} questions, {len(run.conditions)} conditions."
    title = f"{run.persona.name}: steering judged" if run.persona else "Steering judged"
    return page(f"{title} (partial run)" if summary["partial"] else title, about, sections)


def _dataset_sections(
    dataset: str, entries: Sequence[Entry], names: Sequence[str], main: str, run: EvalRun
) -> dict[str, str]:
    of = {name: [one for one in entries if one["score"] == name] for name in (main, *names)}
    key = f"plot-{dataset}"
    about = (
        "<p>Mean over questions; bands and bars: 95 % intervals from the means of questions. Lines across: the model "
        "as it is, and told to be so.</p>"
    )
    found = {f"{dataset}: {main}": about + div(curve_figure(of[main], main, run), f"{key}-main")}
    varied = [name for name in of if name != main and len({one["mean"] for one in of[name]}) > 1]
    if varied:
        plots = (div(curve_figure(of[name], name, run, 300), f"{key}-{i}") for i, name in enumerate(varied))
        # The first plot is drawn before the others are there: its column must have its width by then.
        columns = "auto-fill" if len(varied) > 1 else "auto-fit"
        grid = f"grid-template-columns: repeat({columns}, minmax(420px, 1fr))"
        found[f"{dataset}: other scores"] = f'<div class="grid" style="{grid}">{"".join(plots)}</div>'
    if "perplexity" in names and main != "perplexity":
        said = "<p>What a score costs: upwards is more of it, to the right is stranger text to the unsteered model.</p>"
        costs = div(frontier_figure(of[main], of["perplexity"], main), f"{key}-frontier")
        found[f"{dataset}: {main} against perplexity"] = said + costs
    return {**found, f"{dataset}: how sure": _significance(of)}


def _significance(of: Mapping[str, Sequence[Entry]]) -> str:
    """Tables of the scores, the main one first and the others folded."""
    said = (
        "<p>Against the unsteered model, paired by question; p from exchanging conditions within questions, corrected "
        "for all comparisons of the score (Holm). Bold: below 0.05. Least: the smallest corrected p that this number "
        "of questions can give, however large the difference is.</p>"
    )
    beyond = {name: out_of_reach(own) for name, own in of.items()}
    said += "".join(fill("<p><b>{}</b>: {}</p>", name, why) for name, why in beyond.items() if why)
    (main, first), *others = of.items()
    folded = (fill("<details><summary>{}</summary>{}</details>", name, _table(own, name)) for name, own in others)
    return said + _table(first, main) + "".join(folded)


def _series(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for one in entries:
        if one["series"] is not None:
            found.setdefault(one["series"], []).append(one)
    return {name: sorted(own, key=lambda one: one["at"]) for name, own in found.items()}


def _adds(run: EvalRun) -> bool:
    """Whether 0 on the axis is the unsteered model."""
    return any(isinstance(op, Add) for one in run.conditions if one.series for op in one.steering.ops)


def curve_figure(entries: Sequence[Entry], name: str, run: EvalRun, height: int = 460) -> go.Figure:
    """A line for each series, across which the conditions without a place are drawn."""
    figure, plain, adds = go.Figure(), [one for one in entries if one["condition"] == UNSTEERED], _adds(run)
    for i, (series, own) in enumerate(_series(entries).items()):
        points = sorted([*own, *({**one, "at": 0.0} for one in plain if adds)], key=lambda one: one["at"])
        _add_series(figure, points, series, PALETTE[i % len(PALETTE)])
    places = [one["at"] for one in entries if one["at"] is not None] or [0.0, 1.0]
    ends = [min(places), max(places)]
    for one in entries:
        if one["series"] is None:
            colour, dash = _LINES.get(one["condition"], (NEUTRAL, "longdash"))
            hover = f"{label(one['condition'])}<br>%{{y:.3g}}<extra></extra>"
            add_line(figure, ends, [one["mean"]] * 2, one["condition"], colour, dash=dash, hover=hover, mode="lines")
    for meaning, at in run.marks.items():
        line = {"color": GRID, "width": 2}
        figure.add_vline(x=at, line=line, annotation_text=label(meaning), annotation_font_size=11)
    framed(figure, "scale" if adds else "percentile", name, height, showlegend=height > 400, legend={})
    return figure.update_yaxes(zeroline=False, type="log" if name == "perplexity" else "linear")


def _add_series(figure: go.Figure, points: Sequence[Entry], name: str, colour: str) -> None:
    known = [one for one in points if one["low"] is not None]
    at, low, high = ([one[key] for one in known] for key in ("at", "low", "high"))
    add_band(figure, at, low, high, colour)
    hover = f"{label(name)} %{{x:g}}<br>%{{y:.3g}} (%{{customdata}})"
    intervals = [interval_of(one) for one in points]
    at, means = [one["at"] for one in points], [one["mean"] for one in points]
    marker = {"size": 8, "color": colour}
    add_line(figure, at, means, name, colour, hover=hover, customdata=intervals, marker=marker)


def interval_of(one: Entry) -> str:
    return "unknown" if one["low"] is None else f"{one['low']:.3g} – {one['high']:.3g}"


def frontier_figure(scores: Sequence[Entry], costs: Sequence[Entry], name: str) -> go.Figure:
    """Every condition as a point: perplexity across, the score upwards."""
    figure, cost = go.Figure(), {one["condition"]: one["mean"] for one in costs}
    groups = {**_series(scores), **{one["condition"]: [one] for one in scores if one["series"] is None}}
    for i, (title, own) in enumerate(groups.items()):
        points = [one for one in own if one["condition"] in cost]
        means, alone = [one["mean"] for one in points], own[0]["series"] is None
        colour, _ = _LINES.get(own[0]["condition"], (PALETTE[i % len(PALETTE)], ""))
        add_line(
            figure,
            [cost[one["condition"]] for one in points],
            means,
            title,
            colour,
            hover=f"{label(title)} %{{text}}<br>perplexity %{{x:.3g}}<br>{label(name)} %{{y:.3g}}<extra></extra>",
            mode="markers+text" if alone else "lines+markers+text",
            text=[label(title) if alone else f"{one['at']:g}" for one in points],
            textposition="top right",
            error_y=_error_bars(points),
            marker={"size": 10, "symbol": "diamond" if alone else "circle", "color": colour},
            line={"color": colour, "width": 1, "dash": "dot"},
        )
    framed(figure, "perplexity", name, 480, legend={})
    figure.update_xaxes(type="log")
    return figure.update_yaxes(zeroline=False)


def _error_bars(points: Sequence[Entry]) -> dict[str, object]:
    above = [None if one["low"] is None else one["high"] - one["mean"] for one in points]
    below = [None if one["low"] is None else one["mean"] - one["low"] for one in points]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": 1, "width": 3}


def _table(entries: Sequence[Entry], name: str) -> Html:
    change = "ratio, as a logarithm" if name == "perplexity" else "difference"
    head = (
        *("condition", ("mean", ".3g"), "95 %", "questions", "answers"),
        *((change, "+.3g"), "95 %", ("p", ".2g"), ("corrected", ".2g"), ("least", ".2g")),
    )
    rows = []
    for one in entries:
        cells = [one["condition"], one["mean"], interval_of(one), one["questions"], one["answers"]]
        if "p" in one:
            low, high = one["difference_low"], one["difference_high"]
            cells += [one["difference"], "unknown" if low is None else f"{low:+.3g} – {high:+.3g}", one["p"]]
            cells += [_bold(one["p_corrected"], one["p_corrected"] < 0.05, ".2g"), one["least_p_corrected"]]
        rows.append(cells)
    return table(head, rows)


def _bold(value: object, wanted: bool, form: str = "") -> object:
    return Html(f"<b>{format(value, form)}</b>") if wanted else value


def _counts(summary: Mapping[str, Any]) -> str:
    """What the means are made of, in bold where something is missing."""
    name, missing = summary["score"], summary["missing"]
    rows = [
        (
            *(one["dataset"], one["condition"], one["expected"]),
            _bold(one["present"], one["present"] != one["expected"]),
            *(one["judged"][name], unjudged_of(one)),
        )
        for one in summary["counts"]
    ]
    said = fill("<p><b>{}.</b></p>", missing) if missing else "<p>Nothing is missing.</p>"
    return said + table(("questions", "condition", "expected", "present", f"with {name}", "without"), rows)


def unjudged_of(one: Mapping[str, Any]) -> str:
    """Of a condition, what became of the answers that a scorer gave no score."""
    return "; ".join(
        f"{scorer}: {', '.join(f'{why} {count}' for why, count in left.items() if why != UNFIT)}"
        for scorer, left in one["unjudged"].items()
        if left.keys() - {UNFIT}
    )


def _samples(out: Path, run: EvalRun, entries: Sequence[Entry], main: str) -> str:
    """The first answers to a few questions under the baselines and, of each series, the ends and the best."""
    scored = [one for one in entries if one["score"] == main]
    shown = [one.name for one in run.conditions if one.series is None]
    for own in _series(scored).values():
        best = max(own, key=lambda one: one["mean"])
        shown += [one["condition"] for one in (own[0], best, own[-1])]
    shown = list(dict.fromkeys(shown))[: _MOST_COLUMNS + 2]
    texts = {
        (one["question"], one["condition"]): one["text"]
        for one in reversed(answers_of(out, run))
        if "logprobs" not in one
    }
    questions = list(dict.fromkeys(question for question, _ in texts))[::-1][:_QUESTIONS_SHOWN]
    rows = [
        (fill("<b>{}</b>", question), *(texts.get((question, name), "") for name in shown)) for question in questions
    ]
    return table(("", *shown), rows, "texts")


def _scorers(facts: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, one in facts.items():
        about = {key: value for key, value in one["about"].items() if key != "spent"} | one["about"].get("spent", {})
        rows.append(
            (name, *("; ".join(f"{key}: {value}" for key, value in part.items()) for part in (one["counts"], about)))
        )
    return table(("scorer", "answers", "about it"), rows)
