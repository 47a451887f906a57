"""What each fast path of the vLLM engine earns on the lines that it serves.

    python -m bench.gpu.fast_paths --model qwen2.5-3b --out fast-paths.json

One engine runs the same batch with every fast path and with one taken out, in turns and in random order, so that a
ratio never compares two processes. What is fixed before an engine starts is taken out in engines of their own. A fast
path stays when taking it out costs more than 0.3 % on a line that it serves.
"""

import argparse
import functools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.child import Child
from bench.gpu.paired import say
from bench.gpu.without import FAST_PATHS
from steerscope.bench.one import about, paired, write
from steerscope.bench.workload import Setup

EVERYTHING, AGAIN = "everything", "everything again"
THRESHOLD = 0.003


def measure_cell(child: Child, cell: str, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return seconds of rounds by what was taken out, in random turns; one round of each comes first and is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in (EVERYTHING, AGAIN, *names)}
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):
        order = [name for name in seconds if name not in failed]
        random.Random(turn).shuffle(order)
        for name in order:
            without = () if name in (EVERYTHING, AGAIN) else (name,)
            run = child.order("run", cell, turn, False, False, without)
            if "error" in run:
                failed[name] = run["error"]
            elif turn:
                seconds[name].append(run["seconds"])
    base = seconds.pop(EVERYTHING)
    found: dict[str, Any] = {"everything_s": base, "failed": failed}
    found["without"] = {name: {"seconds": values, "ratio": paired(base, values)}
                        for name, values in seconds.items() if name not in failed}  # fmt: skip
    return found


def measure_beside(children: dict[str, Child], cell: str, rounds: int) -> dict[str, Any]:
    """Return seconds of rounds of several engines in turns; the first has everything."""
    seconds: dict[str, list[float]] = {name: [] for name in children}
    for turn in range(rounds + 1):
        order = list(children)
        random.Random(turn).shuffle(order)
        for name in order:
            run = children[name].order("run", cell, turn)
            if "error" in run:
                return {"error": f"{name}: {run['error']}"}
            if turn:
                seconds[name].append(run["seconds"])
    base = seconds.pop(EVERYTHING)
    return {"everything_s": base, "without": {name: {"seconds": values, "ratio": paired(base, values)}
                                              for name, values in seconds.items()}}  # fmt: skip


def show(cell: str, found: dict[str, Any]) -> None:
    for name, one in found.get("without", {}).items():
        low, high = (100 * (edge - 1) for edge in one["ratio"]["interval"])
        say(f"{cell:12} {name:20} {100 * (one['ratio']['median'] - 1):+6.2f} % [{low:+.2f}, {high:+.2f}]")
    for name, why in found.get("failed", {}).items():
        say(f"{cell:12} {name:20} {why}")
    if "error" in found:
        say(f"{cell:12} {found['error']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen2.5-3b")
    parser.add_argument("--rounds", type=int, default=26)
    parser.add_argument("--seconds", type=float, default=900.0, help="stop after so long; cells not begun are left out")
    parser.add_argument("--scratch", type=Path, help="keep the shape's folder, so that compiled code is found again")
    parser.add_argument("--only", nargs="*", choices=FAST_PATHS, default=list(FAST_PATHS))
    args = parser.parse_args()
    setup = Setup(model=args.model, engine="vllm")
    began = time.perf_counter()
    paths = {name: FAST_PATHS[name] for name in args.only}
    result: dict[str, Any] = about(setup, rounds=args.rounds) | {"threshold": THRESHOLD, "cells": {}, "engines": {}}
    result["what"] = {name: {"what": one.what, "cells": one.cells} for name, one in paths.items()}
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(Child, "ours", setup, args.scratch or Path(folder), setup.row_bytes())
        everything = start()
        try:
            everything.ready()
            result["hardware"] = everything.about["hardware"]
            for cell in dict.fromkeys(cell for one in paths.values() for cell in one.cells):
                names = [name for name, one in paths.items() if cell in one.cells and not one.at_start]
                if names and time.perf_counter() - began < args.seconds:
                    result["cells"][cell] = found = measure_cell(everything, cell, names, args.rounds)
                    write(args.out, result)
                    show(cell, found)
            for name, one in paths.items():
                if not one.at_start or time.perf_counter() - began > args.seconds:
                    continue
                other = start(without=(name,))
                try:
                    other.ready()
                    for cell in one.cells:
                        found = measure_beside({EVERYTHING: everything, name: other}, cell, args.rounds)
                        result["engines"].setdefault(name, {})[cell] = found
                        write(args.out, result)
                        show(cell, found)
                finally:
                    other.close()
        finally:
            everything.close()


if __name__ == "__main__":
    main()
