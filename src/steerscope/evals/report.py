"""A run as one page: score over scale, what it costs, how sure it is, and answers side by side."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from steerscope.evals.run import OPPOSITE, PROMPTED, UNSTEERED, EvalRun, answers_of, load_run
from steerscope.evals.scoring import UNFIT
from steerscope.evals.summary import out_of_reach, summarise
from steerscope.files import atomic_path
from steerscope.lenses.report import GRID, INK, div, page, styled
from steerscope.specs.steering import Add

Entry = Mapping[str, Any]
_COLOURS = ("#c2560c", "#17497c", "#2f7d4f", "#7a3e9d", "#a3741c", "#b3244c")
_LINES = {UNSTEERED: ("#6b7280", "dash"), PROMPTED: (INK, "dot"), OPPOSITE: ("#9aa1ad", "dot")}
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
    def of(name: str) -> list[Entry]:
        return [one for one in entries if one["score"] == name]

    about = (
        "<p>Mean over questions; bands and bars: 95 % intervals from the means of questions. Lines across: the model "
        "as it is, and told to be so.</p>"
    )
    key = f"plot-{escape(dataset)}"
    found = {f"{dataset}: {main}": about + div(curve_figure(of(main), main, run), f"{key}-main")}
    others = [name for name in names if name != main]
    if others:
        varied = [name for name in others if len({one["mean"] for one in of(name)}) > 1]
        figures = [div(curve_figure(of(name), name, run, 300), f"{key}-{i}") for i, name in enumerate(varied)]
        plots = "".join(f'<div style="min-width:0">{figure}</div>' for figure in figures)
        # The first plot is drawn before the others are there: its column must have its width by then.
        columns = "auto-fill" if len(figures) > 1 else "auto-fit"
        grid = f"display:grid;grid-template-columns:repeat({columns},minmax(420px,1fr));gap:12px"
        found[f"{dataset}: other scores"] = f'<div style="{grid}">{plots}</div>'
    if "perplexity" in names and main != "perplexity":
        told = "<p>What a score costs: upwards is more of it, to the right is stranger text to the unsteered model.</p>"
        found[f"{dataset}: {main} against perplexity"] = told + div(
            frontier_figure(of(main), of("perplexity"), main), f"{key}-frontier"
        )
    tables = [
        _table(of(main), main),
        *(f"<details><summary>{escape(n)}</summary>{_table(of(n), n)}</details>" for n in others),
    ]
    said = (
        "<p>Against the unsteered model, paired by question; p from exchanging conditions within questions, corrected "
        "for all comparisons of the score (Holm). Bold: below 0.05. Least: the smallest corrected p that so many "
        "questions can give, however large the difference is.</p>"
    )
    told = "".join(
        f"<p><b>{escape(name)}</b>: {beyond}</p>" for name in (main, *others) if (beyond := out_of_reach(of(name)))
    )
    found[f"{dataset}: how sure"] = said + told + "".join(tables)
    return found


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
    figure, plain = go.Figure(), [one for one in entries if one["condition"] == UNSTEERED]
    adds = _adds(run)
    for (series, own), colour in zip(_series(entries).items(), _COLOURS * len(entries), strict=False):
        points = sorted([*own, *({**one, "at": 0.0} for one in plain if adds)], key=lambda one: one["at"])
        _band(figure, points, colour)
        _line(figure, points, escape(series), colour)
    ends = [one["at"] for one in entries if one["at"] is not None] or [0.0, 1.0]
    for one in entries:
        if one["series"] is None:
            colour, dash = _LINES.get(one["condition"], ("#6b7280", "longdash"))
            figure.add_trace(
                go.Scatter(
                    x=[min(ends), max(ends)],
                    y=[one["mean"]] * 2,
                    mode="lines",
                    name=escape(one["condition"]),
                    line={"color": colour, "dash": dash, "width": 1.5},
                    hovertemplate=f"{escape(one['condition'])}<br>%{{y:.3g}}<extra></extra>",
                )
            )
    for meaning, at in run.marks.items():
        figure.add_vline(
            x=at, line={"color": GRID, "width": 2}, annotation_text=escape(meaning), annotation_font_size=11
        )
    large = height > 400
    styled(figure, height, margin={"l": 64, "r": 16, "t": 28, "b": 48}, showlegend=large)
    figure.update_xaxes(title={"text": "scale" if adds else "percentile"}, gridcolor=GRID, zeroline=False)
    kind = "log" if name == "perplexity" else "linear"
    figure.update_yaxes(title={"text": escape(name)}, gridcolor=GRID, zeroline=False, type=kind)
    return figure


def _band(figure: go.Figure, points: Sequence[Entry], colour: str) -> None:
    points = [one for one in points if one["low"] is not None]
    across = [one["at"] for one in points]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    figure.add_trace(
        go.Scatter(
            x=across + across[::-1],
            y=[one["high"] for one in points] + [one["low"] for one in points][::-1],
            fill="toself",
            fillcolor=f"rgba({red},{green},{blue},0.14)",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            mode="lines",
        )
    )


def _line(figure: go.Figure, points: Sequence[Entry], name: str, colour: str) -> None:
    figure.add_trace(
        go.Scatter(
            x=[one["at"] for one in points],
            y=[one["mean"] for one in points],
            customdata=[interval_of(one) for one in points],
            mode="lines+markers",
            name=name,
            line={"color": colour, "width": 2.5},
            marker={"size": 8},
            hovertemplate=f"{name} %{{x:g}}<br>%{{y:.3g}} (%{{customdata}})",
        )
    )


def interval_of(one: Entry) -> str:
    return "unknown" if one["low"] is None else f"{one['low']:.3g} – {one['high']:.3g}"


def frontier_figure(scores: Sequence[Entry], costs: Sequence[Entry], name: str) -> go.Figure:
    """Every condition as a point: perplexity across, the score upwards."""
    figure, cost = go.Figure(), {one["condition"]: one for one in costs}
    groups = {escape(series): own for series, own in _series(scores).items()}
    groups |= {escape(one["condition"]): [one] for one in scores if one["series"] is None}
    for number, (label, own) in enumerate(groups.items()):
        points = [one for one in own if one["condition"] in cost]
        alone = own[0]["series"] is None
        colour = _LINES.get(own[0]["condition"], (_COLOURS[number % len(_COLOURS)], ""))[0]
        figure.add_trace(
            go.Scatter(
                x=[cost[one["condition"]]["mean"] for one in points],
                y=[one["mean"] for one in points],
                error_y={
                    "type": "data",
                    "array": [None if one["low"] is None else one["high"] - one["mean"] for one in points],
                    "arrayminus": [None if one["low"] is None else one["mean"] - one["low"] for one in points],
                    "thickness": 1,
                    "width": 3,
                },
                text=[label if alone else f"{one['at']:g}" for one in points],
                textposition="top right",
                mode="markers+text" if alone else "lines+markers+text",
                marker={"size": 10, "symbol": "diamond" if alone else "circle"},
                line={"color": colour, "width": 1, "dash": "dot"},
                marker_color=colour,
                name=label,
                hovertemplate=f"{label} %{{text}}<br>perplexity %{{x:.3g}}<br>{escape(name)} %{{y:.3g}}<extra></extra>",
            )
        )
    styled(figure, 480, margin={"l": 64, "r": 16, "t": 12, "b": 48}, showlegend=True)
    figure.update_xaxes(title={"text": "perplexity"}, type="log", gridcolor=GRID, zeroline=False)
    figure.update_yaxes(title={"text": escape(name)}, gridcolor=GRID, zeroline=False)
    return figure


def _table(entries: Sequence[Entry], name: str) -> str:
    change = "ratio, as a logarithm" if name == "perplexity" else "difference"
    head = ("condition", "mean", "95 %", "questions", "answers", change, "95 %", "p", "corrected", "least")
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    for one in entries:
        cells = [escape(one["condition"]), f"{one['mean']:.3g}", interval_of(one)]
        cells += [str(one["questions"]), str(one["answers"])]
        if "p" in one:
            sure = f"{one['p_corrected']:.2g}"
            low, high = one["difference_low"], one["difference_high"]
            cells += [f"{one['difference']:+.3g}", "unknown" if low is None else f"{low:+.3g} – {high:+.3g}"]
            cells += [f"{one['p']:.2g}", f"<b>{sure}</b>" if one["p_corrected"] < 0.05 else sure]
            cells.append(f"{one['least_p_corrected']:.2g}")
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _counts(summary: Mapping[str, Any]) -> str:
    """What the means are made of, in bold where something is missing."""
    name, missing = summary["score"], summary["missing"]
    lines = [f"<tr><th>questions</th><th>condition</th><th>expected</th><th>present</th><th>with {escape(name)}</th>"]
    lines[0] += "<th>without</th></tr>"
    for one in summary["counts"]:
        present = str(one["present"])
        cells = [escape(one["dataset"]), escape(one["condition"]), str(one["expected"])]
        cells.append(present if one["present"] == one["expected"] else f"<b>{present}</b>")
        cells += [str(one["judged"][name]), escape(unjudged_of(one))]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    told = f"<p><b>{escape(missing)}.</b></p>" if missing else "<p>Nothing is missing.</p>"
    return f'{told}<div class="wide"><table>{"".join(lines)}</table></div>'


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
    head = "<tr><th></th>" + "".join(f"<th>{escape(name)}</th>" for name in shown) + "</tr>"
    style = ' style="vertical-align:top;min-width:190px;padding-bottom:10px;font-size:14px"'
    lines = [
        f"<tr><td{style}><b>{escape(question)}</b></td>"
        + "".join(f"<td{style}>{escape(texts.get((question, name), ''))}</td>" for name in shown)
        + "</tr>"
        for question in questions
    ]
    return f'<div class="wide"><table>{head}{"".join(lines)}</table></div>'


def _scorers(facts: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["<tr><th>scorer</th><th>answers</th><th>about it</th></tr>"]
    for name, one in facts.items():
        about = {key: value for key, value in one["about"].items() if key != "spent"} | one["about"].get("spent", {})
        told = ("; ".join(f"{what}: {value}" for what, value in part.items()) for part in (one["counts"], about))
        lines.append(f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{escape(part)}</td>" for part in told) + "</tr>")
    return f"<table>{''.join(lines)}</table>"
