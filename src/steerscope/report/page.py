"""HTML pages that need no network: one file with plotly.js inside. Values are escaped unless they are `Html`."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Formatter, Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from steerscope.report.plots import FONT

_CONFIG: dict[str, object] = {"displayModeBar": False, "responsive": True, "scrollZoom": False}


class Html(str):
    """Markup that goes into a page as it is."""

    __slots__ = ()


def page(title: str, about: str, sections: Mapping[str, str]) -> str:
    """Return a page of sections, heading → HTML that is already escaped."""
    parts = [fill('<h1>{}</h1><p class="lead">{}</p>', title, about)]
    parts += [fill("<section><h2>{}</h2>{}</section>", heading, Html(body)) for heading, body in sections.items()]
    return document(title, "\n".join(parts))


def section(*parts: str) -> Html:
    """Return the body of a section: texts become paragraphs, `Html` stays as it is."""
    return Html("".join(part if isinstance(part, Html) else f"<p>{escape(part, quote=False)}</p>" for part in parts))


def document(title: str, body: str) -> str:
    """Return a page around `body`, which is already escaped."""
    template = (resources.files("steerscope.report") / "page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(title), font=FONT, plotlyjs=get_plotlyjs(), body=body)


class _Escaping(Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        text = format(value, format_spec)
        if isinstance(value, Html):
            return text
        return escape(text.replace("-", "−") if isinstance(value, float) else text)


def fill(template: str, *values: object, **named: object) -> Html:
    """Return `template.format(…)` with every value escaped, and a true minus sign before numbers."""
    return Html(_Escaping().format(template, *values, **named))


def table(head: Sequence[str | tuple[str, str]], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """Return a table of values. The head of a column is its title, or (title, format of its numbers)."""
    columns = [column if isinstance(column, tuple) else (column, "") for column in head]
    lines = ["".join(f"<th>{escape(title)}</th>" for title, _ in columns)]
    for row in rows:
        cells = [_cell(value, form) for value, (_, form) in zip(row, columns, strict=False)]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return Html(f'<div class="wide"><table class="{kind}">{body}</table></div>')


def _cell(value: object, form: str) -> str:
    if value is None:
        return ""
    if isinstance(value, Html):
        return value
    return escape(value if isinstance(value, str) else format(value, form))


def div(figure: go.Figure, name: str, min_width: int = 0) -> Html:
    """Return a figure as a page holds it; one with a least width scrolls sideways where the page is narrower."""
    plot = figure.to_html(full_html=False, include_plotlyjs=False, div_id=escape(name), config=_CONFIG)
    if not min_width:
        return Html(f'<div class="plot">{plot}</div>')
    return Html(f'<div class="wide"><div class="plot" style="min-width:{min_width}px">{plot}</div></div>')
