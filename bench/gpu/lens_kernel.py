"""What the kernel of lenses costs on the GPU alone, and what it would if it read its weights in other parts.

    python -m bench.gpu.lens_kernel --out kernel-lenses.json

Each way is compared with the matrix products that it replaces (`other`), and a way that a GPU does not run is listed as
that. All take turns. A bank with more bytes than the caches hold can be read no faster than memory gives them, which
the largest of the same bytes shows (`memory`). Needs torch and Triton, not vLLM.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.taps import microseconds
from bench.random_packs import make_pack
from steerscope.bench.one import write
from steerscope.lenses import fused
from steerscope.lenses.bank import Bank
from steerscope.lenses.stack import Weights

BYTES, WARPS, STAGES = (64, 128, 256), (4, 8), (2, 3, 4)
_OTHER, _MEMORY = "other", "memory"


def ways(bank: Bank, rows: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each gives logits [rows, lenses], but for `memory`."""
    stack = bank._stack
    _, x = stack.inputs(rows)[0]
    out, words = torch.empty(len(rows), len(bank), device=rows.device), stack.tensors["w0"].view(torch.int32)

    def way(how: fused.Shape | None) -> Callable[[], Tensor]:
        def run_it() -> Tensor:
            fused.evaluate(stack.tensors, x, 0, stack.slots, out, how)
            return out

        return run_it

    def other() -> Tensor:
        step = stack.tiles(len(rows)).lenses
        parts = [stack._products(x, slice(start, start + step)).T for start in range(0, stack.slots, step)]
        return torch.cat(parts, 1)

    found = {_OTHER: other, _MEMORY: lambda: words.amax(), "as it is": way(None)}
    size = stack.tensors["w0"].element_size()
    for line, warps, stages in itertools.product(BYTES, WARPS, STAGES):
        found[f"{line} bytes, {warps} warps, {stages} stages"] = way(fused.Shape(line // size, warps, stages))
    return found


def runnable(found: dict[str, Callable[[], Tensor]]) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Any]]:
    """Those that run, each once; and how far each is from the right logits, or what stopped it."""
    wanted, told, kept = found[_OTHER](), dict[str, Any](), {_MEMORY: found[_MEMORY]}
    for name, way in found.items():
        if name == _MEMORY:
            continue
        try:
            told[name] = float((way() - wanted).abs().max() / wanted.abs().max())
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        kept[name] = way
    return kept, told


def measure(pack: Any, weights: Weights, count: int, rounds: int) -> dict[str, Any]:
    bank = Bank(pack, device="cuda", weights=weights)
    kept, told = runnable(ways(bank, torch.randn(count, pack.info.hidden, device="cuda")))
    times = [{name: microseconds(way, 3) for name, way in kept.items()} for _ in range(rounds)]
    us = {name: statistics.median(one[name] for one in times) for name in kept}
    return {"weights": weights, "rows": count, "bytes": bank.nbytes, "used": bank._stack.kernels is not None,
            "us": us, "distance": told}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lenses", type=int, default=7947)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--rows", type=int, nargs="*", default=[32], choices=range(1, fused.ROWS[-1] + 1), metavar="N")
    parser.add_argument("--weights", nargs="*", choices=("bf16", "int8"), default=["bf16", "int8"])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    pack = make_pack([args.lenses], args.hidden, tuple(map(int, args.widths.split(","))), "cuda")
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": []}
    result |= {"lenses": args.lenses, "hidden": args.hidden, "rounds": args.rounds}
    for weights, count in itertools.product(args.weights, args.rows):
        cell = measure(pack, weights, count, args.rounds)
        result["cells"].append(cell)
        print(f"{weights}, {count} rows, {cell['bytes'] / 1e9:.2f} GB, used: {cell['used']}")  # noqa: T201
        for name, us in sorted(cell["us"].items(), key=lambda pair: pair[1]):
            print(f"  {name:34} {us:9.1f} µs  {cell['bytes'] / us / 1e6:6.2f} TB/s  {cell['distance'].get(name, '')}")  # noqa: T201
    write(args.out, result)


if __name__ == "__main__":
    main()
