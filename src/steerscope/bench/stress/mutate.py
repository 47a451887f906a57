"""Guards taken out one by one: for each, which test notices.

    python -m steerscope.bench.stress.mutate --out bench/results/mutants.json     from the root of the repository

Each mutant is one small change of the code in a copy of the tree, run against the tests of that part until one fails.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from steerscope.bench.hf import commit
from steerscope.bench.one import write
from steerscope.bench.stress.mutants import MUTANTS, Mutant


class _First:
    """A plugin of pytest: the first test that fails."""

    found = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.found:
            self.found = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.found:
            self.found = f"{report.nodeid} (collection)"


def run_one(tree: Path, mutant: Mutant) -> str:
    """The test that notices; nothing when none does. In a child, so that nobody else meets the changed code."""
    path = tree / "src" / "steerscope" / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        import hypothesis
        import pytest

        first = _First()
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # that it fails is enough: no smallest example
        hypothesis.settings.register_profile("mutants", phases=phases, database=None)
        hypothesis.settings.load_profile("mutants")
        os.chdir(tree)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", mutant.tests]
        code = pytest.main(options, plugins=[first])
        os.write(tell, first.found.encode())
        os._exit(0 if first.found or code == 0 else int(code))
    os.close(tell)
    with os.fdopen(told, "rb") as pipe:
        found = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    path.write_text(before, encoding="utf-8")
    if status:  # nobody looked: no test ran, or the child died
        raise RuntimeError(f"{mutant.tests} could not be run against {mutant.file} (wait status {status})")
    return found


def measure(known: dict[tuple[str, str, str], dict[str, Any]]) -> dict[str, Any]:
    """All but those that a test is known to notice. Code that the tests need and that no mutant changes is imported
    once, before the children are made."""
    import hypothesis  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for name in ("src", "tests", "pyproject.toml"):
            source = Path(name)
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tree / name, ignore=skip) if source.is_dir() else shutil.copy(source, tree)
        for name in [name for name in sys.modules if name.split(".")[0] == "steerscope"]:
            del sys.modules[name]
        sys.path.insert(0, str(tree / "src"))
        sys.dont_write_bytecode = True
        for mutant in MUTANTS:
            before = known.get((mutant.file, mutant.old, mutant.new), {})
            if before.get("killed_by"):
                results.append(before)
                continue
            began = time.monotonic()
            killed = run_one(tree, mutant)
            said = {"file": mutant.file, "old": mutant.old, "new": mutant.new, "killed_by": killed}
            results.append({**said, "why": mutant.why, "seconds": round(time.monotonic() - began, 1)})
            line = f"{'killed' if killed else 'SURVIVED'}  {mutant.file}: {mutant.old[:60]!r}  {killed[-70:]}"
            print(line, flush=True)  # noqa: T201
    return {"commit": commit(), "mutants": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--again", action="store_true", help="only those that are new, or that no test noticed last time"
    )
    args = parser.parse_args()
    known = json.loads(args.out.read_text())["mutants"] if args.again else []
    found = measure({(one["file"], one["old"], one["new"]): one for one in known})
    write(args.out, found)
    raise SystemExit(any(not one["killed_by"] and not one["why"] for one in found["mutants"]))


if __name__ == "__main__":
    main()
