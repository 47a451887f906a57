"""The examples of docs/watching.md run, in order, on the embedded model."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


@pytest.mark.smollm
def test_the_examples_run(capsys: pytest.CaptureFixture[str]):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
    shown = capsys.readouterr().out
    assert "' lost' grief" in shown, "the probes read what they were fitted on"
    assert "rule too sad" in shown
    assert "('too sad', " in shown
    assert "readings" in shown
