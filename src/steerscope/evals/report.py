"""A run as one page: score over scale, its cost, statistics, and answers side by side."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from steerscope.evals.run import OPPOSITE, PROMPTED, UNSTEERED, EvalRun, answers_of, load_run
from steerscope.evals.scoring import UNFIT, out_of_reach, summarise
from steerscope.files import write_text
from steerscope.report.colours import AXIS, GRID, INK, NEUTRAL, PALETTE
from steerscope.report.page import Html, div, fill, page, table
from steerscope.report.plots import add_band, add_line, framed, label
from steerscope.specs.steering import Add

Entry = Mapping[str, Any]
_LINES = {UNSTEERED: (NEUTRAL, "dash"), PROMPTED: (INK, "dot"), OPPOSITE: (AXIS, "dot")}
# of answers side by side
_MAX_QUESTIONS = 6
_MAX_COLUMNS = 8


def write_report(out: Path, main: str | None = None) -> dict[str, Any]:
    """Write OUT/summary.json and OUT/report.html; return the former."""
    run = load_run(out)
    summary = summarise(out, run, main)
    write_text(out / "report.html", report_page(out, run, summary))
    return summary


def report_page(out: Path, run: EvalRun, summary: Mapping[str, Any]) -> str:
    entries: list[Entry] = summary["conditions"]
    sections = {"Answers expected, present and judged": _counts(summary)}
    for dataset in dict.fromkeys(one["dataset"] for one in entries):
        scores = _grouped((one for one in entries if one["dataset"] == dataset), "score")
        main = summary["score"] if summary["score"] in scores else next(iter(scores))
        sections |= _dataset_sections(dataset, {main: scores[main], **scores}, run)
    sections["Answers side by side"] = _samples(out, run, entries, summary["score"])
    sections["Scorers"] = _scorers(summary["scorers"])
    name = run.model.name if run.model else "a model"
    about = f"{summary['answers']:,} answers of {name}: {len(run.items)} questions, {len(run.conditions)} conditions."
    title = f"{run.persona.name}: steering judged" if run.persona else "Steering judged"
    return page(f"{title} (partial run)" if summary["partial"] else title, about, sections)


def _grouped(entries: Iterable[Entry], key: str) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for one in entries:
        found.setdefault(one[key], []).append(one)
    return found


def _dataset_sections(dataset: str, scores: Mapping[str, Sequence[Entry]], run: EvalRun) -> dict[str, str]:
    """Return the sections of a set; the first of its scores is the main one."""
    main = next(iter(scores))
    key = f"plot-{dataset}"
    about = (
        "<p>Mean over questions; bands and bars: 95 % intervals from the means of questions. Lines across: the "
        "unsteered and the prompted model.</p>"
    )
    found = {f"{dataset}: {main}": about + div(curve_figure(scores[main], main, run), f"{key}-main")}
    varied = [name for name, own in scores.items() if name != main and len({one["mean"] for one in own}) > 1]
    if varied:
        plots = (div(curve_figure(scores[name], name, run, 300), f"{key}-{i}") for i, name in enumerate(varied))
        # The first plot is drawn before the others are there: its column must have its width by then.
        columns = "auto-fill" if len(varied) > 1 else "auto-fit"
        grid = f"grid-template-columns: repeat({columns}, minmax(420px, 1fr))"
        found[f"{dataset}: other scores"] = f'<div class="grid" style="{grid}">{"".join(plots)}</div>'
    if "perplexity" in scores and main != "perplexity":
        about = "<p>The cost of a score: perplexity of the answers under the unsteered model.</p>"
        costs = div(frontier_figure(scores[main], scores["perplexity"], main), f"{key}-frontier")
        found[f"{dataset}: {main} against perplexity"] = about + costs
    return {**found, f"{dataset}: how sure": _significance(scores)}


def _significance(scores: Mapping[str, Sequence[Entry]]) -> str:
    """Return tables of the scores, the main one first and the others folded."""
    text = (
        "<p>Against the unsteered model, paired by question; p from exchanging conditions within questions, corrected "
        "for all comparisons of the score (Holm). Bold: below 0.05. Least: the smallest corrected p that this number "
        "of questions can give, however large the difference is.</p>"
    )
    for name, own in scores.items():
        if beyond := out_of_reach(own):
            text += fill("<p><b>{}</b>: {}</p>", name, beyond)
    (main, first), *others = scores.items()
    folded = (fill("<details><summary>{}</summary>{}</details>", name, _table(own, name)) for name, own in others)
    return text + _table(first, main) + "".join(folded)


def _series(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found = _grouped((one for one in entries if one["series"] is not None), "series")
    return {name: sorted(own, key=lambda one: one["at"]) for name, own in found.items()}


def curve_figure(entries: Sequence[Entry], name: str, run: EvalRun, height: int = 460) -> go.Figure:
    """Draw a line for each series, and across them the conditions without a place."""
    figure = go.Figure()
    # Where vectors are added, 0 on the axis is the unsteered model.
    adds = any(isinstance(op, Add) for one in run.conditions if one.series for op in one.steering.ops)
    origin = [{**one, "at": 0.0} for one in entries if adds and one["condition"] == UNSTEERED]
    for i, (series, own) in enumerate(_series(entries).items()):
        points = sorted([*own, *origin], key=lambda one: one["at"])
        colour = PALETTE[i % len(PALETTE)]
        known = [one for one in points if one["low"] is not None]
        at, low, high = ([one[key] for one in known] for key in ("at", "low", "high"))
        add_band(figure, at, low, high, colour)
        at, means = ([one[key] for one in points] for key in ("at", "mean"))
        hover = f"{label(series)} %{{x:g}}<br>%{{y:.3g}} (%{{customdata}})"
        marker = {"size": 8, "color": colour}
        intervals = [interval_of(one) for one in points]
        add_line(figure, at, means, series, colour, hover=hover, customdata=intervals, marker=marker)
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


def interval_of(one: Entry) -> str:
    return "unknown" if one["low"] is None else f"{one['low']:.3g} – {one['high']:.3g}"


def frontier_figure(scores: Sequence[Entry], costs: Sequence[Entry], name: str) -> go.Figure:
    """Draw every condition as a point: perplexity across, the score upwards."""
    figure = go.Figure()
    cost = {one["condition"]: one["mean"] for one in costs}
    groups = {**_series(scores), **{one["condition"]: [one] for one in scores if one["series"] is None}}
    for i, (title, own) in enumerate(groups.items()):
        points = [one for one in own if one["condition"] in cost]
        alone = own[0]["series"] is None
        above = [None if one["low"] is None else one["high"] - one["mean"] for one in points]
        below = [None if one["low"] is None else one["mean"] - one["low"] for one in points]
        colour, _ = _LINES.get(own[0]["condition"], (PALETTE[i % len(PALETTE)], ""))
        add_line(
            figure,
            [cost[one["condition"]] for one in points],
            [one["mean"] for one in points],
            title,
            colour,
            hover=f"{label(title)} %{{text}}<br>perplexity %{{x:.3g}}<br>{label(name)} %{{y:.3g}}<extra></extra>",
            mode="markers+text" if alone else "lines+markers+text",
            text=[label(title) if alone else f"{one['at']:g}" for one in points],
            textposition="top right",
            error_y={"type": "data", "array": above, "arrayminus": below, "thickness": 1, "width": 3},
            marker={"size": 10, "symbol": "diamond" if alone else "circle", "color": colour},
            line={"color": colour, "width": 1, "dash": "dot"},
        )
    framed(figure, "perplexity", name, 480, legend={})
    figure.update_xaxes(type="log")
    return figure.update_yaxes(zeroline=False)


def _table(entries: Sequence[Entry], name: str) -> Html:
    change = "ratio, as a logarithm" if name == "perplexity" else "difference"
    head: list[str | tuple[str, str]] = ["condition", ("mean", ".3g"), "95 %", "questions", "answers"]
    head += [(change, "+.3g"), "95 %", ("p", ".2g"), ("corrected", ".2g"), ("least", ".2g")]
    rows = []
    for one in entries:
        cells = [one["condition"], one["mean"], interval_of(one), one["questions"], one["answers"]]
        if "p" in one:
            low = one["difference_low"]
            high = one["difference_high"]
            cells += [one["difference"], "unknown" if low is None else f"{low:+.3g} – {high:+.3g}", one["p"]]
            cells += [_bold(one["p_corrected"], one["p_corrected"] < 0.05, ".2g"), one["least_p_corrected"]]
        rows.append(cells)
    return table(head, rows)


def _bold(value: object, wanted: bool, form: str = "") -> object:
    return Html(f"<b>{format(value, form)}</b>") if wanted else value


def _counts(summary: Mapping[str, Any]) -> str:
    """Return the counts of answers, in bold where some are missing."""
    name = summary["score"]
    rows = []
    for one in summary["counts"]:
        present = _bold(one["present"], one["present"] != one["expected"])
        parts = []
        for scorer, left in one["unjudged"].items():
            reasons = ", ".join(f"{why} {count}" for why, count in left.items() if why != UNFIT)
            parts += [f"{scorer}: {reasons}"] if reasons else []
        cells = (one["dataset"], one["condition"], one["expected"], present, one["judged"][name], "; ".join(parts))
        rows.append(cells)
    missing = summary["missing"]
    text = fill("<p><b>{}.</b></p>", missing) if missing else "<p>Nothing is missing.</p>"
    return text + table(("questions", "condition", "expected", "present", f"with {name}", "without"), rows)


def _samples(out: Path, run: EvalRun, entries: Sequence[Entry], main: str) -> str:
    """Show the first answers to a few questions under the baselines and, of each series, the ends and the best."""
    shown = [one.name for one in run.conditions if one.series is None]
    for own in _series(one for one in entries if one["score"] == main).values():
        best = max(own, key=lambda one: one["mean"])
        shown += [one["condition"] for one in (own[0], best, own[-1])]
    shown = list(dict.fromkeys(shown))[:_MAX_COLUMNS]
    texts: dict[str, dict[str, str]] = {}
    for one in answers_of(out, run):
        if "logprobs" not in one:
            texts.setdefault(one["question"], {}).setdefault(one["condition"], one["text"])
    questions = list(texts)[:_MAX_QUESTIONS]
    rows = [(fill("<b>{}</b>", one), *(texts[one].get(name, "") for name in shown)) for one in questions]
    return table(("", *shown), rows, "texts")


def _scorers(scorers: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, facts in scorers.items():
        about = {key: value for key, value in facts["about"].items() if key != "spent"}
        about |= facts["about"].get("spent", {})
        listed = ("; ".join(f"{key}: {value}" for key, value in one.items()) for one in (facts["counts"], about))
        rows.append((name, *listed))
    return table(("scorer", "answers", "about it"), rows)
