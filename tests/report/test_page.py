"""Everything that goes into a page is escaped, unless it is markup of our own."""

from html.parser import HTMLParser

import pytest

from steerscope.report.page import Html, fill, page, table

NASTY = ["<script>alert(1)</script>", "a & b", "<b>x</b>", "'\"", "</td></table><img src=x>", "{0}", "$title", "-3"]


class Cells(HTMLParser):
    """Rows of cells, and all tags, as a browser finds them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1][-1] += data


def test_a_table_shows_its_values_and_no_markup_of_others() -> None:
    head = [*NASTY[:3], ("share", ".1%")]
    rows = [[text, number, None, 0.123] for number, text in enumerate(NASTY)]
    found = Cells(table(head, rows))
    assert found.rows == [[*NASTY[:3], "share"], *([text, str(i), "", "12.3%"] for i, text in enumerate(NASTY))]
    assert found.tags == {"div", "table", "tr", "th", "td"}
    assert "<td><b>1</b></td>" in table(["x"], [[Html("<b>1</b>")]])


def test_a_format_speaks_of_numbers_and_texts_stand_as_they_are() -> None:
    assert Cells(table([("x", "+.2f")], [[1.0], ["unknown"], [-0.5]])).rows[1:] == [["+1.00"], ["unknown"], ["-0.50"]]


@pytest.mark.parametrize("text", NASTY)
def test_a_template_takes_every_value_as_text(text: str) -> None:
    found = fill("<p>{} {name} {number:.1f}</p>{html}", text, name=text, number=-2.0, html=Html("<i>"))
    parsed = HTMLParser()
    shown: list[str] = []
    parsed.handle_data = shown.append  # type: ignore[method-assign]
    parsed.feed(found)
    assert "".join(shown) == f"{text} {text} −2.0"
    assert found.endswith("</p><i>")


def test_titles_and_headings_of_a_page_are_escaped_and_bodies_are_not() -> None:
    made = page(NASTY[0], NASTY[4], {NASTY[2]: "<p>body</p>"})
    assert "<script>alert" not in made
    assert "<img" not in made.split("</head>")[1]
    assert "<h2>&lt;b&gt;x&lt;/b&gt;</h2><p>body</p>" in made
