"""The structure that docs/design.md promises: rooms import downwards, without cycles; files and functions are short."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "steerscope"
PYTHON = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 450
MAX_BODY_LINES = 40


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): list(ast.walk(ast.parse(file.read_text(encoding="utf-8")))) for file in PYTHON}


def imported(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the modules of steerscope that a module imports, also lazily and for type checking."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def rooms() -> list[str]:
    """Return the rooms of the table in docs/design.md, from top to bottom, as prefixes of modules."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## 3. ")[2].partition("## 4. ")[0]
    found = []
    for cell in re.findall(r"^\| (.+?) \|", text, re.MULTILINE):
        nested, name = cell.startswith("…"), re.search(r"`([\w/]+?)(?:/|\.py)`", cell)
        if name is not None and "wheel" not in cell and not name[1].startswith("tests"):
            found.append(f"engines/vllm/{name[1]}" if nested else name[1])
    return [f"steerscope.{name.replace('/', '.')}" for name in found]


def test_lazy_imports_name_modules_that_exist() -> None:
    missing = [
        f"{name}: {node.module}"
        for name, nodes in MODULES.items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "steerscope"
        if node.module not in MODULES
    ]
    assert not missing


def test_no_module_imports_itself_through_others() -> None:
    graph = {name: set(imported(nodes)) - {name} for name, nodes in MODULES.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_rooms_import_only_downwards() -> None:
    order = rooms()
    assert len(order) > 15

    def room(module: str) -> int | None:
        fits = [name for name in order if f"{module}.".startswith(f"{name}.")]
        return order.index(max(fits, key=len)) if fits else None

    vllm = "steerscope.engines.vllm"
    starts = {(f"{vllm}.worker", f"{vllm}.cuda"), (f"{vllm}.plugin", f"{vllm}.client")}
    wrong = []
    for name, nodes in MODULES.items():
        for other in imported(nodes):
            here, there = room(name), room(other)
            if here is not None and there is not None and there < here and (order[here], order[there]) not in starts:
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_no_class_name_has_two_meanings() -> None:
    where = defaultdict(list)
    for name, nodes in MODULES.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                where[node.name].append(name)
    assert not {name: places for name, places in where.items() if len(places) > 1}


@pytest.mark.parametrize("kind", ["py", "js", "css", "html"])
def test_files_are_short(kind: str) -> None:
    lines = {file: file.read_text(encoding="utf-8").count("\n") for file in SOURCE.rglob(f"*.{kind}")}
    assert not {str(file): count for file, count in lines.items() if count > MAX_FILE_LINES}


def test_functions_are_short() -> None:
    """Counted without signatures, which list the options of commands, and docstrings; Triton compiles a kernel as one
    function."""
    long = {}
    for name, nodes in MODULES.items():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                count = (node.end_lineno or 0) - body[0].lineno + 1
                kernel = any("triton" in ast.unparse(one) for one in node.decorator_list)
                if count > MAX_BODY_LINES and not kernel:
                    long[f"{name}.{node.name}"] = count
    assert not long
