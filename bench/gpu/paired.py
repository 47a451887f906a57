"""The cost of each kind of request against untouched vLLM, measured in pairs.

    python -m bench.gpu.paired --model qwen2.5-3b --out speed.json

Two engines live side by side on one GPU, each in a process of its own: stock vLLM without any plugin (A), and the
tapped one (B). They start beside each other, and then only one runs at a time. Rounds go A B, B A, A B, …, and each
round's ratio is B over A with the same prompts, so that what changes slowly hits both. The first cell runs A against
itself: that is the noise. The second runs it against another untouched engine: no two processes are equally fast, which
no number of rounds takes away. On a GPU each run has the cores that are fastest then, and a pair is measured
again if others had them meanwhile (`cores`). With `--passes` every cell has a part of its rounds, then every cell the
next part, so that no single one has the minutes in which the host is busy. A cell holds when the upper end of the 95 %
interval of its median ratio does. The file is written after every cell. Of several loads (`--loads`, with the same
engines) each has a file of its own, and so has every cell that is profiled (profile-CELL.json).
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.child import Child, ChildFailed
from bench.gpu.cores import Cores, stolen
from bench.gpu.drivers import WATCHES, load_of, widest
from steerscope.bench.one import about, drift, paired, write
from steerscope.bench.workload import Setup, capture_of, check_cell, check_setup, steers
from steerscope.specs.errors import InvalidRequest

NOISE, TWIN, PEER = "noise", "twin", "hidden-states"
UNTOUCHED = (NOISE, TWIN, PEER)  # by us
CELLS = (
    NOISE, TWIN, "zero-layer", "all-layers", "one-layer", "generated", "last", "mean", "add", "cap", "ablate",
    "add:one", "add:same", "watch", "watch:int8",
)  # fmt: skip
GOALS = {
    "zero-layer": 1.005, "all-layers": 1.01, "generated": 1.005, "last": 1.005, "mean": 1.005, "add": 1.01,
    "cap": 1.02, "ablate": 1.02, "watch": 1.02, "watch:int8": 1.02,
}  # fmt: skip
FETCH_GOAL, DRIFT_GOAL = 10.0, 0.01  # GB/s into private memory; of the ratio, with every row captured
STOLEN_S = 0.02  # a pair is measured again when others had the cores of one of its runs for so long
_FEWEST = 4  # rounds of a cell that is cut short
Pair = tuple[dict[str, Any], dict[str, Any]]


class Pairs:
    """What a cell has of them."""

    def __init__(self) -> None:
        self.kept, self.again = list[Pair](), list[Pair]()  # in the second, others had the cores
        self.seconds, self.verified = 0.0, dict[str, Any]()

    @property
    def turn(self) -> int:
        return len(self.kept) + len(self.again)


def run_cell(
    cell: str, base: Child, other: Child, rounds: int, pairs: Pairs, args: argparse.Namespace
) -> dict[str, Any]:
    """Run pairs until there are `rounds` of them, or time is up. The warm-ups and one round after the first timed ones,
    which verifies the rows and copies them, are not among them."""
    for i in range(args.warmups if not pairs.turn else min(1, args.warmups)):
        for child in (base, other):
            first = child.order("run", cell, 10_000 + i)
            if "error" in first:
                return {"error": first["error"]}
    before, began = pairs.seconds, time.perf_counter()
    while len(pairs.kept) < rounds and (turn := pairs.turn) < 2 * rounds:
        pair: dict[int, dict[str, Any]] = {}
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            pair[which] = drive((base, other)[which], cell, turn, args.cores)
            if "error" in pair[which]:
                return {"error": pair[which]["error"]}
        calm = max(one["stolen_s"] for one in pair.values()) < STOLEN_S
        (pairs.kept if calm else pairs.again).append((pair[0], pair[1]))
        pairs.seconds = before + time.perf_counter() - began
        if turn + 1 >= _FEWEST and pairs.seconds > args.cell_seconds:
            break
    for child in (base, other) if args.cores.chosen else ():
        child.order("cores", "", args.cores.all)
    shows = other is not base and (capture_of(cell, 4) or steers(cell))
    if not pairs.verified and (other.kind == PEER or shows):
        pairs.verified = verify_cell(cell, other, args)
    if "error" in pairs.verified:  # then its times mean nothing
        return pairs.verified
    found = figures(cell, other.kind, pairs.kept, pairs.again, args) | pairs.verified
    if "drift_goal" in found:
        found["drift_holds"] = abs(found["drift"]) <= found["drift_goal"]
    return found


def figures(cell: str, kind: str, kept: list[Pair], again: list[Pair], args: argparse.Namespace) -> dict[str, Any]:
    every = paired(*([pair[which]["seconds"] for pair in kept + again] for which in (0, 1)))
    pairs, again = (kept, again) if len(kept) >= _FEWEST else (kept + again, [])
    theirs, ours = ([pair[which]["seconds"] for pair in pairs] for which in (0, 1))
    ratio = paired(theirs, ours)
    found: dict[str, Any] = {"rounds": len(ours), "baseline_s": theirs, "tapped_s": ours, "ratio": ratio}
    found["ratio_of_all"] = {name: every[name] for name in ("median", "interval")}  # those measured again, too
    found["stolen_s"] = [[round(one["stolen_s"], 2) for one in pair] for pair in pairs]
    found["measured_again"] = [[[one["seconds"], round(one["stolen_s"], 2)] for one in pair] for pair in again]
    same = sum(a == b for one, two in pairs for a, b in zip(one["tokens"], two["tokens"], strict=True))
    found |= {"same_tokens": same / (len(ours) * args.setup.batch), "steps": [one["steps"] for one in pairs[-1]]}
    for which, name in enumerate(("baseline", "tapped")):
        told = [pair[which]["extra"] for pair in pairs]
        phases = [one["phases"] for one in told]
        found.setdefault("phases", {})[name] = medians(phases)
        found.setdefault("phases_of_rounds", {})[name] = [[round(ms, 2) for ms in one.values()] for one in phases]
        found.setdefault("steps_ms", {})[name] = each_step([one["steps_ms"] for one in told])
    if kind == "ours":
        found["stall_s"] = statistics.median(one["extra"]["stall_s"] for _, one in pairs)
    found["drift"] = drift(ratio["rounds"])
    found["tokens_per_s"] = sum(args.setup.decodes()) / statistics.median(ours)
    if cell in GOALS and kind == "ours" and has_goals(args):
        found |= {"goal": GOALS[cell], "holds": ratio["interval"][1] <= GOALS[cell]}
    return found


def has_goals(args: argparse.Namespace) -> bool:
    """Of several loads, the first."""
    return args.setup == [*args.loads, args.setup][0]


def drive(child: Child, cell: str, seed: int, cores: Cores) -> dict[str, Any]:
    """A run, and for how long others had its cores."""
    if not cores.chosen:
        return child.order("run", cell, seed) | {"stolen_s": 0.0}
    chosen = cores.fastest()
    if wrong := child.order("cores", "", chosen):
        return wrong
    before = stolen(chosen)
    return child.order("run", cell, seed) | {"stolen_s": stolen(chosen) - before}


def verify_cell(cell: str, child: Child, args: argparse.Namespace) -> dict[str, Any]:
    """Rows counted, summed, and copied into private memory several times; what steers must change something."""
    checked = child.order("run", cell, 0, not args.noop, True)
    again = [child.order("run", cell, i, False, True) for i in range(3)] if checked.get("fetch") else []
    if wrong := [run["error"] for run in (checked, *again) if "error" in run]:
        return {"error": wrong[0]}
    found: dict[str, Any] = {name: checked[name] for name in ("rows", "bytes", "checksum")}
    found |= {"verified": not args.noop, "stats": checked["extra"].get("stats")}
    if checked["fetch"]:
        times = [run["fetch"] for run in again]
        fresh = checked["extra"].get("fetch_fresh")
        found["fetch_gb_per_s"] = checked["bytes"] / statistics.median(times) / 1e9
        found["fetch_fresh_gb_per_s"] = checked["bytes"] / fresh / 1e9 if fresh else None
        if cell == "all-layers" and has_goals(args):
            found |= {"fetch_goal": FETCH_GOAL, "fetch_holds": found["fetch_gb_per_s"] >= FETCH_GOAL}
            found["drift_goal"] = DRIFT_GOAL
    return found


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds of each part of a round."""
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


def each_step(rounds: list[list[float]]) -> list[float]:
    """The median of the first step over all rounds, of the second, and so on."""
    return [round(statistics.median(steps), 3) for steps in zip(*rounds, strict=False)]


def shown(cell: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{cell:14} {found['error']}"
    ratio, goal = found["ratio"], found.get("goal")
    low, high = (100 * (edge - 1) for edge in ratio["interval"])
    text = f"{cell:14} {statistics.median(found['tapped_s']):8.4f} s  {100 * (ratio['median'] - 1):+6.2f} % "
    text += f"[{low:+.2f}, {high:+.2f}]  {found['rounds']} rounds, drift {100 * found['drift']:+.1f} %"
    text += f" ({len(found['measured_again'])} more)" if found["measured_again"] else ""
    if goal:
        text += f"  goal {100 * (goal - 1):+.1f} %: {'holds' if found['holds'] else 'MISSES'}"
    parts = found["phases"]
    text += "  ms: " + ", ".join(f"{n} {parts['tapped'][n] - parts['baseline'][n]:+.2f}" for n in parts["tapped"])
    if "fetch_gb_per_s" in found:
        text += f"  fetch {found['fetch_gb_per_s']:.1f} GB/s"
    return text


def load_name(load: Setup) -> str:
    """As files may be named."""
    shortest = f"{load.decode - load.stagger}-" if load.stagger else ""
    return f"{load.batch}x{load.prefill}-{shortest}{load.decode}"


def run_cells(
    up: Callable[[str], Child], children: dict[str, Child], result: dict[str, Any], out: Path, args: argparse.Namespace
) -> None:
    base, named = up(args.baseline), load_name(args.setup)
    rounds_of = {cell: args.rounds_of.get(cell, args.rounds) for cell in args.cells}
    rounds_of |= {cell: args.rounds_of.get(f"{named}/{cell}", rounds) for cell, rounds in rounds_of.items()}
    taken = {cell: Pairs() for cell, rounds in rounds_of.items() if rounds}
    for number, cell in itertools.product(range(args.passes), taken):
        if "error" in result["cells"].get(cell, ()):
            continue
        for name in {"ours", TWIN} & set(children) if cell == PEER else ():  # the peer needs their room
            children.pop(name).close()
        kind = args.baseline if cell == NOISE else cell if cell in UNTOUCHED else "ours"
        rounds = -(-rounds_of[cell] * (number + 1) // args.passes)  # by the end of this pass
        how = "baseline" if cell in UNTOUCHED else cell
        try:
            found = run_cell(how, base, up(kind), rounds, taken[cell], args)
        except ChildFailed as error:
            if not base.alive:
                raise
            children.pop(kind, None)  # the next cell starts another
            found = {"error": str(error)}
        result["cells"][cell] = found
        write(out, result)
        say(shown(cell, found))


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    loads: list[Setup] = args.loads or [args.setup]
    setup = widest(loads)  # what the engines can take
    asked = [*args.cells, *args.profile]
    budget = max(load.row_bytes() for load in loads) if any(capture_of(cell, 4) for cell in asked) else 0
    children: dict[str, Child] = {}
    result: dict[str, Any] = {}
    out: Path = args.out

    def start(kind: str) -> Child:
        like = args.baseline if kind == TWIN else kind
        children[kind] = children.get(kind) or Child(like, setup, scratch, budget, args.noop)
        return children[kind]

    def up(kind: str) -> Child:
        child = start(kind)
        child.ready()
        result["engines"][kind] = child.about["engine"] | {"start_s": child.about["start_s"]}
        result["hardware"] = child.about["hardware"]
        load = {name: getattr(args.setup, name) for name in ("batch", "prefill", "decode", "stagger")}
        child.order("load", "", load)
        return child

    def begin(load: Setup, name: str) -> None:
        nonlocal result, out
        args.setup, out = load, args.out.with_name(name)
        kept = {name: getattr(args, name) for name in ("rounds", "passes", "warmups", "baseline", "noop")}
        result = about(load, **kept) | {"engines": {}, "cells": {}}

    try:
        if set(args.cells) - set(UNTOUCHED) or args.profile:
            start("ours")
        if TWIN in args.cells:
            start(TWIN)
        for load in loads if args.cells else ():
            begin(load, f"{args.out.stem}-{load_name(load)}.json" if args.loads else args.out.name)
            run_cells(up, children, result, out, args)
        for cell in args.profile:  # last: profilers leave something behind
            begin(loads[0], f"profile-{cell}.json")
            result["profile"] = up("ours").order("profile", cell, 0)
            write(out, result)
    except ChildFailed as error:
        result["failed"] = str(error)
        write(out, result)
        say(str(error))
    finally:
        for child in children.values():
            child.close()
    return result


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", nargs="*", default=CELLS, help=f"of bench/workload.py, and {', '.join(UNTOUCHED)}")
    parser.add_argument("--baseline", choices=("baseline", "llm"), default="baseline", help="llm: through vLLM's LLM")
    parser.add_argument("--loads", nargs="*", default=[], metavar="64x512+128",
                        help="each of these, with the same engines; 32x512+32:128: texts of 32 to 128")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rounds-of", nargs="*", default=[], metavar="[LOAD/]CELL=ROUNDS",
                        help="of those near their goals; LOAD as in the names of files")  # fmt: skip
    parser.add_argument("--passes", type=int, default=1, help="through all cells, each with a part of their rounds")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--cell-seconds", type=float, default=60.0, help="a cell ends after so long, with fewer rounds")
    parser.add_argument(
        "--profile", nargs="*", default=[], metavar="CELL", help="last: these under profilers; OUT's profile-CELL.json"
    )
    noop = os.environ.get("STEERSCOPE_NOOP") == "1"
    parser.add_argument("--noop", action="store_true", default=noop, help="taps do nothing (also STEERSCOPE_NOOP=1)")
    parser.add_argument("--scratch", type=Path, help="keep the shape's folder, so that compiled code is found again")
    settings = {name: field for name, field in Setup.model_fields.items() if name != "engine"}
    for name, field in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    args = parser.parse_args()
    args.setup = Setup(**{name: getattr(args, name) for name in settings}, engine="vllm")
    # Where the device computes, and the thread that drives it is in the child's own process.
    args.cores = Cores(args.setup.device == "cuda" and args.setup.core == "inside")
    args.rounds_of = {cell: int(rounds) for cell, _, rounds in (one.partition("=") for one in args.rounds_of)}
    try:
        args.loads = [load_of(args.setup, text) for text in args.loads]
        for load in args.loads or [args.setup]:
            check_setup(load)
        for cell in {*args.cells, *args.profile} - {*UNTOUCHED, *WATCHES}:
            check_cell(cell)
    except InvalidRequest as error:
        parser.error(str(error))
    known = set(args.cells) | {f"{load_name(load)}/{cell}" for load in args.loads for cell in args.cells}
    if unknown := set(args.rounds_of) - known:
        parser.error(f"--rounds-of names cells that are not run: {', '.join(sorted(unknown))}")
    if args.passes > 1 and PEER in args.cells:
        parser.error(f"{PEER} ends the other engines: it has one pass")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args, args.scratch or Path(scratch))
    raise SystemExit(1 if "failed" in result else 0)


if __name__ == "__main__":
    main()
