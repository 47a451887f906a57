"""What the supported versions of vLLM look like from here, for the table in vllm_targets.py.

    python -m bench.vllm_surface --out bench/results/vllm_surface.json

Downloads the latest wheel of each supported minor version, one at a time, reads its Python source without importing
it, and writes the signatures, call sites and attributes of everything in that table. Needs a network and about 1 GB of
disk; `--sources FOLDER` keeps the source of each version there and reads it again the next time.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench.vllm_targets import CALLED, GIVEN, IMPORTS, READ, WRAPPED
from steerscope.engines.vllm.guards import SUPPORTED
from steerscope.files import atomic_path

PINS = ("torch", "transformers")  # what of a wheel's requirements is noted
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64", "manylinux1_x86_64")
Defined = tuple[str, ast.AST]  # the module a definition is in, and the definition


class Source:
    """The Python files of one version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree, self.all_calls = cache(self._tree), cache(self._all_calls)

    def _tree(self, module: str) -> ast.Module | None:
        path = self.folder / module.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, name: str) -> Defined | None:
        """Find a class, function or variable, wherever the module imports it from."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in statements(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if name in assigned(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(origin, alias.name) or self._module(f"{origin}.{alias.name}")
                    if alias.name == "*" and (found := self.find(origin, name)) is not None:
                        return found
        known = self._lazy(tree, name)
        if known is not None:
            return self.find(f"{module}{known[0]}", known[1])
        return self._module(f"{module}.{name}")

    def _module(self, name: str) -> Defined | None:
        tree = self.tree(name)
        return None if tree is None else (name, tree)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = (self.folder / module.replace(".", "/") / "__init__.py").exists()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    @staticmethod
    def _lazy(tree: ast.Module, name: str) -> tuple[str, str] | None:
        """Return (module, name) of what `vllm/__init__.py` imports on first use."""
        for node in statements(tree):
            if "MODULE_ATTRS" in assigned(node) and isinstance(node, ast.Assign):
                where = ast.literal_eval(node.value).get(name)
                return None if where is None else tuple(where.split(":"))
        return None

    def lineage(self, found: Defined) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and its bases within vLLM, nearest first."""
        module, node = found
        if not isinstance(node, ast.ClassDef):
            return
        yield module, node
        for base in node.bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name) and (known := self.find(module, base.id)) and known[1] is not node:
                yield from self.lineage(known)

    def look_up(self, target: str) -> Defined | None:
        """Find `module:name` or `module:Class.method`."""
        module, _, name = target.partition(":")
        if not name:
            return self._module(module)
        owner, _, method = name.partition(".")
        found = self.find(module, owner)
        if not method or found is None:
            return found
        for where, node in self.lineage(found):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == method:
                    return where, part
        return None

    def attributes(self, target: str) -> set[str] | None:
        """Return the names that a class, its bases and their methods set, or that a module has."""
        found = self.look_up(target)
        if found is None:
            return None
        if isinstance(found[1], ast.Module):
            return set().union(*map(names, statements(found[1])))
        known: set[str] = set()
        function = [found] if isinstance(found[1], ast.FunctionDef) else []  # one that gives a class its methods
        for _, node in [*function, *self.lineage(found)]:
            known |= set().union(*map(names, statements(node)))
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and self_of(part):
                    known.add(part.attr)
        return known

    def calls(self, method: str, receivers: tuple[str, ...], own: str) -> list[str]:
        """Return vLLM's calls of a method as `file: receiver.method(_, name=, …)`; on `self`, those in module `own`."""
        return sorted(
            {
                f"{where}: {receiver}.{method}({given})"
                for where, receiver, called, given in self.all_calls()
                if called == method
                and receiver in receivers
                and (receiver != "self" or own == where.removesuffix(".py").replace("/", "."))
            }
        )

    def _all_calls(self) -> list[tuple[str, str, str, str]]:
        """Return file, receiver, method and arguments of every call of a method in the table."""
        methods = {one.target.rpartition(".")[2] for one in (*WRAPPED, *GIVEN)}
        found = []
        for path in sorted((self.folder / "vllm").rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not any(f".{method}(" in text for method in methods):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                    receiver = ast.unparse(node.func.value).rpartition(".")[2]
                    found.append((path.relative_to(self.folder).as_posix(), receiver, node.func.attr, shape(node)))
        return found


def shape(call: ast.Call) -> str:
    """Return the arguments of a call without their values: `_` by position, `name=` by name, `*` and `**`."""
    given = ["*" if isinstance(arg, ast.Starred) else "_" for arg in call.args]
    given += ["**" if keyword.arg is None else f"{keyword.arg}=" for keyword in call.keywords]
    return ", ".join(given)


def statements(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """Yield the statements of a body, also those inside `if` and `try`."""
    left: list[ast.stmt] = list(node.body)
    while left:
        one = left.pop(0)
        yield one
        if isinstance(one, ast.If | ast.Try):
            left = [*one.body, *one.orelse, *(part for h in getattr(one, "handlers", ()) for part in h.body), *left]


def assigned(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def names(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module or a class defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return assigned(node)


def self_of(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def signature(source: Source, found: Defined) -> str | None:
    """Return parameters without types, `...` for any default; the fields of a class without `__init__`."""
    node = found[1]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return parameters(node.args)
    if not isinstance(node, ast.ClassDef):
        return None
    fields: dict[str, str] = {}
    for _, one in source.lineage(found):
        for part in one.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return parameters(part.args)
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                fields.setdefault(part.target.id, "" if part.value is None else "=...")
    return ", ".join(["*", *(f"{name}{default}" for name, default in sorted(fields.items()))]) if fields else ""


def parameters(args: ast.arguments) -> str:
    bare = ast.parse("def f(): ...").body[0].args  # type: ignore[attr-defined]
    for kind in ("posonlyargs", "args", "kwonlyargs"):
        setattr(bare, kind, [ast.arg(arg.arg) for arg in getattr(args, kind)])
    bare.vararg, bare.kwarg = (part and ast.arg(part.arg) for part in (args.vararg, args.kwarg))
    bare.defaults = [ast.Constant(...) for _ in args.defaults]
    bare.kw_defaults = [default and ast.Constant(...) for default in args.kw_defaults]
    return ast.unparse(bare)


def read(source: Source) -> dict[str, Any]:
    """Look up everything in the table."""
    found: dict[str, Any] = {}
    for one in (*WRAPPED, *GIVEN):
        entry = found.setdefault(one.target, {})
        defined = source.look_up(one.target)
        entry["signature"] = None if defined is None else signature(source, defined)
        entry["calls"] = source.calls(one.target.rpartition(".")[2], one.receivers, one.target.partition(":")[0])
        if one.absent_in is not None:
            entry["absent"] = one.target.rpartition(".")[2] not in (source.attributes(one.absent_in) or ())
    for one in CALLED:
        defined = source.look_up(one.target)
        entry = found.setdefault(one.target, {})
        entry["signature"] = None if defined is None else signature(source, defined)
    for one in READ:
        known = source.attributes(one.target)
        wanted = sorted({*one.attributes, *one.optional})
        found.setdefault(one.target, {})["attributes"] = None if known is None else [n for n in wanted if n in known]
    for name in IMPORTS:
        module, _, attribute = name.partition(":")
        found.setdefault(name, {})["import"] = source.look_up(name if attribute else module) is not None
    return found


def together(versions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the entries of each target; neighbouring versions that agree share one."""
    table: dict[str, list[dict[str, Any]]] = {}
    for version, found in versions.items():
        for target, entry in found.items():
            rows = table.setdefault(target, [])
            if rows and {k: v for k, v in rows[-1].items() if k != "versions"} == entry:
                rows[-1]["versions"].append(version)
            else:
                rows.append({"versions": [version], **entry})
    return dict(sorted(table.items()))


def latest(minor: str, listed: list[str]) -> str:
    patches = [name for name in listed if re.fullmatch(rf"{re.escape(minor)}\.\d+", name)]
    if not patches:
        raise SystemExit(f"the package index has no vllm {minor}")
    return max(patches, key=lambda name: int(name.rpartition(".")[2]))


def published() -> list[str]:
    out = pip("index", "versions", "vllm")
    return re.findall(r"\d+\.\d+\.\d+", out.partition("Available versions:")[2])


def pip(*args: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def unpack(version: str, folder: Path) -> None:
    """Download the wheel of a version, keep its source and metadata, and delete it."""
    with tempfile.TemporaryDirectory() as scratch:
        where = [part for name in PLATFORMS for part in ("--platform", name)]
        pip("download", "-q", "--no-deps", "--only-binary", ":all:", *where, "-d", scratch, f"vllm=={version}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".py", ".dist-info/METADATA"))]
            archive.extractall(folder, wanted)


def requirements(folder: Path) -> dict[str, str]:
    (metadata,) = folder.glob("*.dist-info/METADATA")
    found = {}
    for line in metadata.read_text(encoding="utf-8").splitlines():
        given = re.fullmatch(r"Requires-Dist: ([\w-]+)([^;]*)", line)
        if given and given[1] in PINS:
            found[given[1]] = given[2].strip()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sources", type=Path, help="where the source of each version is kept, or is already")
    args = parser.parse_args()
    listed = published()
    versions: dict[str, dict[str, Any]] = {}
    pins: dict[str, dict[str, str]] = {}
    for version in (latest(minor, listed) for minor in SUPPORTED):
        with tempfile.TemporaryDirectory() as scratch:
            folder = (args.sources or Path(scratch)) / version
            if not folder.exists():
                unpack(version, folder)
            versions[version], pins[version] = read(Source(folder)), requirements(folder)
        print(f"vllm {version}: {len(versions[version])} entries", flush=True)  # noqa: T201
    with atomic_path(args.out) as partial:
        partial.write_text(json.dumps({"versions": pins, "surface": together(versions)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
