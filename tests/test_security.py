"""What must be nowhere in the code: programs from files, shells, code from hubs, HTML made of text."""

import ast
import re
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "steerscope"
FILES = sorted(SOURCE.rglob("*.py"))
NEVER = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "marshal.load", "marshal.loads"}
NEVER |= {f"{module}.{name}" for module in ("pickle", "dill", "cloudpickle", "joblib") for name in ("load", "loads")}
NEVER |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp", "pickle.Unpickler"}
NOT_TRUE = {"shell", "allow_pickle", "trust_remote_code"}

WORDS = re.compile(  # of the files that are looked at; parsing all takes long
    r"(?<![.\w])(eval|exec|compile|__import__)\(|os\.(system|popen)|pickle|dill|joblib|marshal|yaml|torch\.load"
    r"|mktemp|shell|trust_remote_code"
)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def dangers(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name, given = dotted(node.func), {word.arg: word.value for word in node.keywords}
            if name in NEVER:
                found.append(name)
            if name == "torch.load" and not is_true(given.get("weights_only")):
                found.append("torch.load without weights_only=True")
            found += [f"{word}=True" for word in NOT_TRUE if word in given and not _is_false(given[word])]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args][::-1]
            pairs = [*zip(arguments, node.args.defaults[::-1], strict=False)]
            pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
            found += [
                f"{argument.arg}=True" for argument, default in pairs if argument.arg in NOT_TRUE and is_true(default)
            ]
        elif isinstance(node, ast.ImportFrom) and node.module in ("pickle", "dill", "cloudpickle", "marshal"):
            found.append(f"from {node.module} import …")
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            found += [f"{k}=True" for k, v in zip(keys, node.values, strict=True) if k in NOT_TRUE and is_true(v)]
    return found


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def test_nothing_in_the_source_runs_what_it_reads() -> None:
    texts = {str(file.relative_to(SOURCE)): file.read_text(encoding="utf-8") for file in FILES}
    assert len(texts) > 150
    found = {file: dangers(text) for file, text in texts.items() if WORDS.search(text)}
    assert {file: what for file, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "import pickle\npickle.load(f)",
        "from pickle import loads",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)",
        "subprocess.run(c, shell=True)",
        "AutoModel.from_pretrained(m, trust_remote_code=trust)",
        "def load(m, trust_remote_code=True): ...",
        "options = {'trust_remote_code': True}",
        "yaml.load(f)",
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert WORDS.search(text)
    assert dangers(text)


def test_the_page_never_makes_html_of_text() -> None:
    """Texts of models, names of concepts and of vectors are put into elements as text."""
    scripts = sorted((SOURCE / "serving" / "ui").rglob("*.js"))
    assert len(scripts) > 10
    making = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|\beval\(|new Function"
    )
    assert {file.name: making.findall(text) for file in scripts if making.search(text := file.read_text())} == {}


def test_every_exception_of_the_audit_names_what_and_why() -> None:
    lines = [line for file in FILES for line in file.read_text(encoding="utf-8").splitlines() if "nosec" in line]
    assert lines
    assert [line for line in lines if not re.search(r"# nosec B\d{3} # \w.{8,}", line)] == []


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as wheel:
        held = {name for name in wheel.namelist() if name.startswith("steerscope/")}
    there = (file for file in SOURCE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert held == {f"steerscope/{file.relative_to(SOURCE).as_posix()}" for file in there}
    assert {"steerscope/serving/ui/index.html", "steerscope/demo/report.html", "steerscope/py.typed"} <= held


def test_every_test_that_the_threat_model_names_is_there() -> None:
    files = {file: file.read_text(encoding="utf-8") for file in Path(__file__).parent.rglob("test_*.py")}
    told = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", told)
    assert len(named) > 20
    found = {end: text for end, _ in named for file, text in files.items() if file.as_posix().endswith(f"/{end}")}
    assert [
        f"{end}::{name}" for end, name in named if not re.search(rf"(def|class) {name}\b", found.get(end, ""))
    ] == []
