"""The examples of docs/serving.md, of its tutorial and of the client's docstrings, against a server on a tiny model."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.conftest import Live
from steerscope.engines.load import load_engine
from steerscope.serving.settings import ServerSettings
from support import examples

PLACE = "http://127.0.0.1:8000"
PAGES = [page for page in examples.PAGES if page.name in ("serving.md", "serve.md")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shop")
    examples.workshop(made)
    return made


@pytest.fixture(scope="module")
def example_server(folder: Path) -> Iterator[Live]:
    asked = {"vectors": str(folder / "vectors"), "lenses": [str(folder / "lenses")], "any_model": True}
    settings = ServerSettings.parse({"port": 0, "model_name": "smollm2-135m", **asked})
    server = Live(lambda: load_engine(folder / "model"), settings).ready()
    yield server
    server.stop()


@pytest.mark.slow
def test_python_examples_that_ask_a_server_run(
    example_server: Live, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    texts = [block.text for page in PAGES for block in examples.blocks(page) if block.kind == "python"]
    texts += [text for name in examples.NAMES if ".client." in name for text in examples.docstring_blocks(name)]
    assert len(texts) >= 4
    for text in texts:
        assert PLACE in text
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(
                compile(examples.shorter(text).replace(PLACE, example_server.url), "example", "exec"),
                {"__name__": "example"},
            )
        assert shown.getvalue().strip() or "print" not in text
