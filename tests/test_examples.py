"""No example rots: every command line in the pages, in docstrings and in --help is read with all its options; every
Python block names what exists, and runs, on a tiny model in place of the embedded one."""

import ast
import contextlib
import importlib
import io
import re
import shutil
from pathlib import Path

import pytest
from rich.text import Text

import steerscope as ss
from steerscope import models
from support.examples import (
    NAMES,
    PAGES,
    ROOT,
    blocks,
    call,
    commands,
    docstring_blocks,
    documented,
    every_command,
    named,
    parsed,
    shorter,
    workshop,
)

ELSEWHERE = {
    "docs/vllm.md": "needs vLLM's own objects; tests/engines/vllm/test_stock_frontend.py sends the same requests",
    "docs/evals.md": "lm-evaluation-harness takes its tasks from the hub; tests/evals/test_harness.py runs it",
    "docs/lenses.md": "tests/lenses/test_docs.py",
    "docs/watching.md": "tests/engines/test_watching_docs.py, on the embedded model",
    "docs/serving.md": "tests/serving/test_serving_examples.py, with a server",
    "docs/tutorials/serve.md": "tests/serving/test_serving_examples.py, with a server",
    "docs/tutorials/vllm.md": "needs vLLM",
}
QUICK = {"docs/tutorials/models.md"}  # the others take more than two seconds
WHOLE = (".SyncEngine", ".Client", ".SteeringVector", ".ActivationStore", ".Steering")  # every method is described


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_python(page: Path) -> bool:
    return any(block.kind == "python" for block in blocks(page))


# --- command lines


def test_every_command_line_of_the_pages_and_of_help_is_read_with_all_its_options() -> None:
    found = [
        (f"{block.page}:{block.line}", block.text) for p in PAGES for block in blocks(p) if block.kind == "command"
    ]
    for page in PAGES:  # in running text those that are whole
        inline = re.findall(r"`(steerscope [a-z][^`|…]*)`", page.read_text(encoding="utf-8"))
        found += [(page.name, " ".join(one.split())) for one in inline if " -" in one or "MODEL" in one]
        found += [(page.name, one) for one in commands(re.sub(r"^    ", "", page.read_text("utf-8"), flags=re.M))]
    for path, command in every_command():
        found += [(path, line) for line in commands(command.help.replace("Example: ", "\n"))]
    assert len(found) > 80
    wrong = []
    for where, line in found:
        try:
            parsed(line)
        except Exception as error:
            wrong.append(f"{where}: {line}: {getattr(error, 'message', error)}")
    assert not wrong, "\n".join(wrong)


def test_a_command_line_with_an_option_that_is_gone_is_noticed() -> None:
    for line in (
        "steerscope lens fit --level 3 --out x",
        "steerscope lense",
        "steerscope vectors show",
        "steerscope x -y",
    ):
        with pytest.raises(Exception, match=r"."):
            parsed(line)
    parsed("steerscope lens fit --layers 3 --out x")


def test_every_command_and_option_has_a_help_text_that_the_terminal_shows_whole() -> None:
    seen = 0
    for path, command in every_command():
        for what, text in [(path, command.help), *((f"{path} {one.opts[0]}", one.help) for one in command.params)]:
            seen += 1
            assert text, what
            assert text[0].isupper() or not text[0].isalpha() or " " in text, what
            assert Text.from_markup(text).plain == text, f"{what}: rich would take a part of it for markup"
            assert text.rstrip().endswith((".", "…", ")")) or "Example:" in text, what
    assert seen > 400


def test_one_thing_has_one_name_in_all_commands() -> None:
    """It may have a second, which the help shows behind it."""
    options = {one.opts[0] for _, command in every_command() for one in command.params if one.opts}
    assert not options & {"--output", "--lens", "--url", "--root", "--no-chat"}
    for path, command in every_command():
        for one in command.params:
            if one.name == "layers":
                assert one.opts[0] == "--layers", path
            if one.name == "out":
                assert one.opts[0] == "--out", path


# --- Python


def test_python_blocks_name_only_what_exists() -> None:
    found = [(block.page, block.text) for page in PAGES for block in blocks(page) if block.kind == "python"]
    found += [(name, text) for name in NAMES for text in docstring_blocks(name)]
    assert len(found) > 40
    for where, text in found:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("steerscope"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, one.name) for one in node.names), f"{where}: {ast.unparse(node)}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ss":
                assert node.attr in ss.__all__, f"{where}: ss.{node.attr}"


def test_the_reference_has_every_public_name_and_all_it_shows_is_described() -> None:
    shown = {name.rpartition(".")[2] for name in NAMES}
    renamed = {"load_vector": "load", "save_vector": "save"}
    assert {renamed.get(name, name) for name in ss.__all__} <= shown
    assert not [name for name in NAMES if not (named(name).__doc__ or "").strip()]
    whole = [name for name in NAMES if name.endswith(WHOLE)]
    assert len(whole) == len(WHOLE)
    assert not [path for name in whole for path, thing in documented(name) if not (thing.__doc__ or "").strip()]


def test_every_page_with_python_is_run_somewhere() -> None:
    assert {name for name in ELSEWHERE if not (ROOT / name).is_file()} == set()
    for reason in ELSEWHERE.values():
        for path in re.findall(r"tests/[\w/]+\.py", reason):
            assert (ROOT / path).is_file()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    workshop(folder)
    return folder


@pytest.fixture
def here(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the same files; `smollm2-135m` is the tiny model."""
    for path in shop.iterdir():
        (tmp_path / path.name).symlink_to(path) if path.name == "model" else _copy(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_default_model", lambda *_: tmp_path / "model")
    return tmp_path


def _copy(path: Path, to: Path) -> None:
    shutil.copytree(path, to) if path.is_dir() else shutil.copy(path, to)


def run(text: str, name: str, scope: dict[str, object]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, name, "exec"), scope)


RUN = [page for page in PAGES if has_python(page) and name_of(page) not in ELSEWHERE]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=name_of(p), marks=() if name_of(p) in QUICK else pytest.mark.slow) for p in RUN],
)
def test_the_examples_of_a_page_run(page: Path, here: Path) -> None:
    """Python blocks in order; of tutorials the commands between them, too."""
    scope: dict[str, object] = {"__name__": page.stem}
    if page.stem == "corpora":
        call("steerscope capture run --data corpus.jsonl --layers 12,20 --out rows")
    if page.parent.name == "tutorials":
        for made in (here / "happy.safetensors", here / "corpus.jsonl", here / "pack"):  # tutorials make all they need
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    for block in blocks(page):
        if block.kind == "python":
            run(shorter(block.text), f"{page.name}:{block.line}", scope)
        elif page.parent.name == "tutorials" and "path/to" not in block.text:
            call(shorter(block.text))
            if "lens fit" in block.text:  # a random model has nothing that a lens could find: go on with one made up
                shutil.rmtree(here / "pack")
                shutil.copytree(here / "lenses", here / "pack")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_examples_of_docstrings_run() -> None:
    call("steerscope capture run --data corpus.jsonl --layers 12 --out rows")
    ran = 0
    for name in ["steerscope", *NAMES]:
        if ".client." in name:
            continue
        for text in docstring_blocks(name) if name != "steerscope" else _module_blocks():
            run(shorter(text), name, {"__name__": name})
            ran += 1
    assert ran > 15


def _module_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", ss.__doc__ or "", re.M | re.S)
