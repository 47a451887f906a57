"""What this package touches of vLLM, against the signatures, call sites and attributes of every supported version.

The file is written by bench/vllm_surface.py, which reads the published wheels; nothing here needs vLLM or a network.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import vllm_surface
from bench.vllm_targets import CALLED, GIVEN, IMPORTS, READ, WRAPPED, Called, Read, Wrapped
from steerscope.engines.vllm.guards import SUPPORTED
from steerscope.engines.vllm.worker.model_layout import _NORM_FOLLOWS

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "steerscope"
FOUND = json.loads((ROOT / "bench" / "results" / "vllm_surface.json").read_text())
SURFACE: dict[str, list[dict[str, Any]]] = FOUND["surface"]
AGAIN = "run: python -m bench.vllm_surface --out bench/results/vllm_surface.json"


def last(target: str) -> str:
    return target.rpartition(":")[2].rpartition(".")[2]


def signature(text: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {text}: None"))  # written by our own program


def bare(text: str) -> inspect.Signature:
    """Without the object."""
    found = signature(text)
    return found.replace(parameters=[one for one in found.parameters.values() if one.name not in ("self", "cls")])


def resolved(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    found: Any = importlib.import_module(f"steerscope.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def fits(accepts: inspect.Signature, call: ast.Call, every: inspect.Signature | None = None) -> bool:
    """Whether these arguments can be given; `**` in a call stands for every parameter of `every` by name."""
    given: dict[str, int] = {}
    for keyword in call.keywords:
        if keyword.arg is not None:
            given[keyword.arg] = 0
        elif every is not None:
            kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
            given |= {name: 0 for name, one in every.parameters.items() if one.kind in kinds}
    try:
        accepts.bind(*[0] * len(call.args), **given)
    except TypeError:
        return False
    return True


def sites(entry: dict[str, Any]) -> Iterator[ast.Call]:
    """The recorded call sites: `file: receiver.method(_, name=, **)`."""
    for text in entry["calls"]:
        arguments = text.partition("(")[2].rstrip(")").replace("=", "=_").replace("**", "**_")
        found = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(found, ast.Call)
        yield found


def refusals(wrapper: inspect.Signature, entries: list[dict[str, Any]], leading: int) -> list[str]:
    """Versions that make a call which the wrapper cannot take; `leading` parameters come before the caller's."""
    own = wrapper.replace(parameters=list(wrapper.parameters.values())[leading:])
    return [
        f"{entry['versions']}: {ast.unparse(call)}"
        for entry in entries
        for call in sites(entry)
        if not fits(own, call, bare(entry["signature"]))
    ]


def calls(callers: tuple[str, ...], name: str) -> Iterator[tuple[str, ast.Call]]:
    for module in callers:
        root = ROOT if module.startswith("bench.gpu.") else SOURCE
        file = root / f"{module.replace('.', '/')}.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
                if called == name:
                    yield module, node


def test_the_file_holds_every_supported_version_and_everything_in_the_table() -> None:
    assert tuple(version.rpartition(".")[0] for version in FOUND["versions"]) == SUPPORTED, AGAIN
    assert set(SURFACE) == {one.target for one in (*WRAPPED, *GIVEN, *CALLED, *READ)} | set(IMPORTS), AGAIN
    for target, entries in SURFACE.items():
        assert [version for entry in entries for version in entry["versions"]] == list(FOUND["versions"]), target


def test_the_pins_allow_what_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = SUPPORTED[-1].split(".")
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={SUPPORTED[0]},<{major}.{int(minor) + 1}"]
    least, most = (pin.strip("<>=") for pin in next(
        name.removeprefix("transformers") for name in project["dependencies"] if name.startswith("transformers")
    ).split(","))  # fmt: skip
    for version, pins in FOUND["versions"].items():
        for pin in pins["transformers"].split(","):
            bound = tuple(map(int, pin.strip("<>=").split(".")))
            ours = tuple(map(int, (most if pin[0] == ">" else least).split(".")))
            assert (bound < ours) if pin[0] == ">" else (ours < bound), f"vllm {version} needs transformers {pin}"


@pytest.mark.parametrize("one", WRAPPED, ids=lambda one: one.target.rpartition(":")[2])
def test_a_wrapper_takes_every_call_of_every_version_and_passes_on_what_it_does_not_know(one: Wrapped) -> None:
    wrapper, entries = inspect.signature(resolved(one.wrapper)), SURFACE[one.target]
    assert refusals(wrapper, entries, leading=2) == []
    kinds = {parameter.kind for parameter in wrapper.parameters.values()}
    assert {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    for entry in entries:
        assert entry["calls"], f"{entry['versions']} never call it: look where it went"
        assert entry.get("absent", True), f"{entry['versions']} have it in {one.absent_in} too"


@pytest.mark.parametrize("one", GIVEN, ids=lambda one: last(one.target))
def test_a_plugin_takes_every_call_of_every_version(one: Wrapped) -> None:
    pytest.importorskip("fastapi")
    assert refusals(inspect.signature(resolved(one.wrapper)), SURFACE[one.target], leading=1) == []
    assert all(entry["calls"] for entry in SURFACE[one.target])


def test_a_dummy_run_of_the_second_runner_says_so_by_name() -> None:
    """`WorkerTaps._around_step` looks for the name."""
    (one,) = (one for one in WRAPPED if one.wrapper.endswith("_around_step") and ".gpu.model_runner" in one.target)
    for entry in SURFACE[one.target]:
        named = [call for call in sites(entry) if any(keyword.arg == "dummy_run" for keyword in call.keywords)]
        assert len(named) == 1
        assert all(len(call.args) <= 2 for call in sites(entry)), "the third parameter is dummy_run"


def test_a_wrapper_with_a_fixed_signature_is_noticed() -> None:
    """The capture of CUDA graphs as it was: 0.30 and later pass an argument while they profile."""
    (one,) = (one for one in WRAPPED if last(one.target) == "capture_model")
    found = refusals(inspect.signature(lambda self, run: None), SURFACE[one.target], leading=2)  # noqa: ARG005
    assert len(found) == 1
    assert "0.30.0" in found[0]
    assert "f(profile_only=_)" in found[0]


@pytest.mark.parametrize("one", CALLED, ids=lambda one: one.target.rpartition(":")[2])
def test_our_calls_fit_every_version(one: Called) -> None:
    ours = list(calls(one.callers, one.name or last(one.target)))
    assert {module for module, _ in ours} == set(one.callers)
    for entry in SURFACE[one.target]:
        assert entry["signature"] is not None, f"{entry['versions']} have no {one.target}"
        for module, call in ours:
            assert fits(bare(entry["signature"]), call), f"{module}: {ast.unparse(call)} in {entry['versions']}"


@pytest.mark.parametrize("one", READ, ids=lambda one: one.target)
def test_what_we_read_is_there_in_every_version(one: Read) -> None:
    for entry in SURFACE[one.target]:
        assert entry["attributes"] is not None, f"{entry['versions']} have no {one.target}"
        missing = set(one.attributes) - set(entry["attributes"])
        assert not missing, f"{entry['versions']}: {one.target} has no {missing}"


def test_an_optional_attribute_is_missing_in_some_version() -> None:
    """Else it belongs to the others, and what asks whether it is there can go."""
    for one in READ:
        for name in one.optional:
            assert any(name not in entry["attributes"] for entry in SURFACE[one.target]), f"{one.target}.{name}"


def test_every_field_that_we_name_when_we_make_an_object_of_vllm_is_in_the_table() -> None:
    made = {last(one.target): {*one.attributes, *one.optional} for one in READ}
    modules = tuple(".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in SOURCE.rglob("*.py"))
    for name in ("EngineArgs", "SamplingParams", "KVTransferConfig"):
        ours = list(calls((*modules, "bench.gpu.drivers"), name))
        assert ours
        for module, call in ours:
            named = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
            assert named <= made[name], f"{module}: {ast.unparse(call)}"


def test_every_import_of_vllm_is_in_the_table() -> None:
    known = {one.target for one in (*WRAPPED, *GIVEN, *CALLED, *READ)} | set(IMPORTS)
    known |= {f"{module}:{name.partition('.')[0]}" for module, _, name in (target.partition(":") for target in known)}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found = [f"{node.module}:{alias.name}" for alias in node.names]
            for name in found:
                if name.partition(":")[0].partition(".")[0] == "vllm":
                    assert name in known, f"{file.relative_to(SOURCE)} imports {name}: add it to surface.py"
    assert all(entry["import"] for name in IMPORTS for entry in SURFACE[name])


def test_everything_that_is_wrapped_is_in_the_table_and_the_other_way_round() -> None:
    found: set[str] = set()
    for file in (SOURCE / "engines" / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("wrap_method", "wrap")
            ):
                found |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
            if isinstance(node, ast.FunctionDef) and node.name == "install":  # a table of its own
                found |= {part.elts[1].value for part in ast.walk(node) if isinstance(part, ast.Tuple)
                          and len(part.elts) == 3 and isinstance(part.elts[1], ast.Constant)}  # fmt: skip
    assert found == {last(one.target) for one in WRAPPED}


def test_every_layer_whose_next_norm_is_known_is_in_the_table() -> None:
    assert {last(one.target) for one in READ if last(one.target).endswith("DecoderLayer")} == set(_NORM_FOLLOWS)


# --- the program that reads the wheels


FILES = {
    "__init__.py": 'MODULE_ATTRS = {"Lazy": ".deep.base:Base"}\n',
    "deep/__init__.py": "from .base import *\n",
    "deep/base.py": "class Base:\n    x: int\n    def __init__(self, a: int, *, b: int = 1):\n        self.y = a\n"
    "    def run(self, n: int, *rest, key=None, **more) -> int: ...\n",
    "user.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.deep import Base\n"
    "class Child(Base):\n    def go(self):\n        self.z: int = self.run(1, key=2)\n"
    "def use(child, rest):\n    child.run(1, *rest, **rest)\n    other.run()\n",
}


@pytest.fixture
def source(tmp_path: Path) -> Any:
    for name, text in FILES.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return vllm_surface.Source(tmp_path)


@pytest.mark.parametrize("target", ["vllm.user:Child.run", "vllm.deep:Base.run", "vllm:Lazy.run"])
def test_a_method_is_found_through_bases_and_imports(source: Any, target: str) -> None:
    assert vllm_surface.signature(source, source.look_up(target)) == "self, n, *rest, key=..., **more"


def test_attributes_are_those_of_the_class_and_its_bases(source: Any) -> None:
    assert {"x", "y", "z", "run", "go"} <= source.attributes("vllm.user:Child")
    assert vllm_surface.signature(source, source.look_up("vllm.user:Child")) == "self, a, *, b=..."
    assert source.look_up("vllm.user:Missing") is None
    assert source.attributes("vllm.gone:Child") is None


def test_call_sites_are_those_on_the_named_receivers(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_surface, "WRAPPED", (Wrapped("vllm.user:Child.run", "", ()),))
    assert source.calls("run", ("child", "self"), "vllm.user") == [
        "vllm/user.py: child.run(_, *, **)", "vllm/user.py: self.run(_, key=)",
    ]  # fmt: skip
    assert source.calls("run", ("self",), "vllm.deep.base") == []


def test_versions_that_agree_are_written_once() -> None:
    found = vllm_surface.together(
        {"1": {"a": {"signature": "x"}}, "2": {"a": {"signature": "x"}}, "3": {"a": {"signature": ""}}}
    )
    assert found == {"a": [{"versions": ["1", "2"], "signature": "x"}, {"versions": ["3"], "signature": ""}]}
