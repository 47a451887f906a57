"""The site of the documentation builds without a warning and asks nothing of the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.examples import ROOT


@pytest.mark.slow
def test_the_site_builds_with_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")} <= pages
    for path in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"""(?:\ssrc=|<link[^>]+href=|url\(|@import )["']?((?:https?:)?//[^"') >]+)""", text)
        assert not loaded, f"{path.name}: {loaded}"
    commands = (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
    assert "steerscope lens fit" in commands
    assert "--shuffled-control" in commands
    specs = (tmp_path / "reference" / "specs.html").read_text(encoding="utf-8")
    assert re.search(r"max_tokens.{0,200}128", specs, re.S), "fields of specs are their signatures"
