"""What the demo's page promises: one file that needs no network, every text escaped, every plot there."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from steerscope.demo.report import html_report, telling_lines
from steerscope.demo.results import Answer, Control, Dose, Lenses, Results, TokenMap

EVIL = "<script>alert('x')</script>&\"quoted\""
PLOTS = [
    "plot-heat-0", "plot-heat-1", "plot-heat-2", "plot-lens-0", "plot-lens-1", "plot-lens-2", "plot-dose",
]  # fmt: skip
CONDITIONS = ["unsteered", "happy", "sad", "capped", "ablated"]


def results(text: str = "I had a wonderful day.") -> Results:
    """Small made-up results in which `text` stands wherever a model or a user could have written it."""
    tokens = ["How", " was", f" {text}", "?", "\n", " I"]
    layers = [f"layer {layer}" for layer in range(6)]
    places = [[0.1 * (layer - token) for token in range(6)] for layer in range(6)]
    heat = [TokenMap(name, text, tokens, layers, places, 4) for name in CONDITIONS[:3]]
    lenses = [TokenMap(name, text, tokens, [text, text], [[0.1] * 6] * 2) for name in CONDITIONS[:3]]
    return Results(
        model=text,
        layers=6,
        hidden=8,
        dtype="float32",
        positive="happy",
        negative="sad",
        pairs=2,
        heldout_pairs=2,
        steered_layers=(2, 3),
        read_layer=3,
        scale=0.3,
        class_distance=0.16,
        cap_at=0.0034,
        heldout_auroc=0.9125,
        doses=[
            Dose(-1.0, 48.0, 0.5, -3.2),
            Dose(-0.3, 7.5, 0.8, -3.1),
            Dose(0.0, 2.3, 0.9, 0.8),
            Dose(0.3, 4.0, 0.8, 6.6),
        ],
        sweep_prompts=[text],
        control=Control(9.7, [0.5, -1.0, 1.5], 9.06, [text], ["glad"], ["sorry"]),
        answers=[Answer(name, text, text, name == "sad", -0.25, 5.04) for name in CONDITIONS],
        heat=heat,
        lenses=Lenses(3, 5, 0.96, 0.85, lenses),
        seconds=61.0,
        version="0.1.0",
    )


class Page(HTMLParser):
    """Tags, attributes, visible text and scripts of a page, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        del tag
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text.append(data)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html_report(results()))


@pytest.fixture(scope="module")
def hostile() -> Page:
    return Page(html_report(results(EVIL)))


def test_every_text_is_escaped_wherever_it_stands(page: Page, hostile: Page) -> None:
    assert len(hostile.scripts) == len(page.scripts)  # the injected one is not an element
    assert not any("<script>alert" in script for script in hostile.scripts)
    assert [name for _, name, _ in hostile.attributes] == [name for _, name, _ in page.attributes]
    shown = "".join(hostile.text)
    # In five cards as an answer, as their prompt and the heat maps', as model, sweep prompt, test prompt and token.
    assert shown.count(EVIL) == "".join(page.text).count("I had a wonderful day.") >= 10


def test_plotly_labels_carry_no_markup_from_texts(hostile: Page) -> None:
    data = [script for script in hostile.scripts if "Plotly.newPlot" in script and len(script) < 100_000]
    assert len(data) == len(PLOTS)
    assert any("\\u0026lt;script\\u0026gt;" in script or "&lt;script&gt;" in script for script in data)
    assert not any("\\u003cscript" in script for script in data)


def test_the_page_needs_nothing_from_elsewhere(page: Page) -> None:
    loaded = [(tag, name, value) for tag, name, value in page.attributes if name in ("src", "href", "srcset", "action")]
    assert loaded == []
    assert {tag for tag, _, _ in page.attributes}.isdisjoint({"link", "img", "iframe", "object"})
    styles = " ".join(value for _, name, value in page.attributes if name == "style")
    assert "url(" not in styles
    assert "@import" not in html_report(results()).split("</style>")[0]


def test_plotly_is_embedded_once_and_every_plot_is_there(page: Page) -> None:
    assert sum(script.strip() == get_plotlyjs().strip() for script in page.scripts) == 1
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert ids == PLOTS
    for plot in PLOTS:
        assert sum(f'"{plot}"' in script for script in page.scripts if "newPlot" in script) == 1


def test_the_numbers_on_the_page_are_those_measured(page: Page) -> None:
    text = " ".join(" ".join(page.text).split())
    for expected in (
        "0.91",
        "9.7 nats",
        "9.1 times",
        "2.3 → 4.0 / 7.5",
        "projection −0.250",
        "perplexity 5.0",
        "+0.003",
    ):
        assert expected in text


def test_an_answer_that_was_cut_off_says_so() -> None:
    text = "".join(Page(html_report(results("Good day."))).text)
    assert text.count("Good day. …") == 4 + 1  # four answers (the sad one ended by itself) and the test prompt


def test_three_telling_lines_for_the_terminal() -> None:
    direction, effect, cost = telling_lines(results())
    assert "held-out AUROC 0.91 at layer 3" in direction
    assert "9.7 nats, 9.1 times the spread of 3 random directions" in effect
    assert "from 2.3 to 4.0 (happy) and 7.5 (sad)" in cost


def test_a_dollar_sign_in_a_text_is_just_a_dollar_sign() -> None:
    priced = replace(results(), sweep_prompts=["What costs $model and $5?"])
    assert "What costs $model and $5?" in "".join(Page(html_report(priced)).text)
