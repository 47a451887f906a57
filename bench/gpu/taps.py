"""What a tap costs on the GPU alone: the kernel that is tap and norm, layer after layer in one CUDA graph, with the
matrix products of a layer between two of them: they read its weights, and leave neither data nor code in the caches.

    python -m bench.gpu.taps --out taps.json

The host has no part in it, so a busy machine does not show. Needs torch and Triton, not vLLM.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steerscope.bench.one import write
from steerscope.core.equation import NOTHING
from steerscope.engines.vllm.cuda.fused_norm import cuda_tap_norm
from steerscope.engines.vllm.cuda.precomputed_ops import PrecomputedOps
from steerscope.engines.vllm.worker.index_layout import CELL, ENTRIES, FLAG, GROUP, PRECOMPUTED, STRIDE
from steerscope.engines.vllm.worker.step_index import PAGE
from steerscope.specs import Ablate, Add

CASES = (
    "norm", "nothing asked", "capture", "capture, precomputed", "capture, no steering, precomputed",
    "add", "add, precomputed", "ablate", "ablate, precomputed",
)  # fmt: skip
_COLUMNS, _GROUPS = 4, 64  # as an engine has them


class Layers:
    """A model's taps and matrices. The products are not read: every tap gets the same stream."""

    def __init__(self, layers: int, tokens: int, hidden: int, inner: int) -> None:
        cuda: dict[str, Any] = {"device": "cuda"}
        self.layers, self.tokens, self.hidden = layers, tokens, hidden
        half: dict[str, Any] = {"dtype": torch.bfloat16, **cuda}
        self.attention = torch.zeros(layers, hidden, 2 * hidden, **half)
        self.up, self.down = torch.zeros(layers, hidden, 2 * inner, **half), torch.zeros(layers, inner, hidden, **half)
        self.norm = torch.ones(layers, hidden, dtype=torch.bfloat16, **cuda)
        self.delta, self.residual = torch.randn(2, tokens, hidden, **cuda).to(torch.bfloat16)
        self.vectors = torch.randn(layers, tokens + 1, hidden, **cuda) / hidden**0.5
        self.coefficients = torch.tensor(NOTHING, **cuda).repeat(layers, tokens + 1, 1)
        self.pool = torch.zeros(PAGE * layers * tokens + tokens, hidden, **half)  # a page for each
        self.index = torch.zeros(tokens, 16, dtype=torch.int32, **cuda)
        self.gates = torch.ones(8, **cuda)
        self.orders = torch.full((layers, _GROUPS), -1, dtype=torch.int32, **cuda)
        self.orders[:, 1] = torch.arange(layers)
        self.before, self.overflow_flags = (
            torch.zeros(_GROUPS, dtype=torch.bool, **cuda),
            torch.zeros(tokens + 2, **cuda).int(),
        )
        self.laying = PrecomputedOps(self.vectors, self.coefficients, self.orders, self.before, self.index, tokens)

    def ask(self, case: str) -> None:
        """Every token another vector."""
        self.index.zero_()
        numbers = torch.arange(1, self.tokens + 1, device="cuda", dtype=torch.int32)
        if case.startswith("capture"):
            self.index[:, GROUP], self.index[:, CELL] = 1, PAGE * self.layers * (numbers - 1)
        op = Add(vector=[1.0], scale=0.01) if case.startswith("add") else Ablate(vector=[1.0])
        if case.startswith(("add", "ablate")):
            self.index[:, FLAG] = self.index[:, ENTRIES] = self.index[:, ENTRIES + 1] = numbers
            self.coefficients[:, 1:] = torch.tensor(op.coefficients(), device="cuda")
        precomputed = case.endswith("precomputed")
        self.index[:, FLAG] += PRECOMPUTED * precomputed
        self.index[:, STRIDE] = 0
        self.laying.compute(self.tokens if precomputed else 0)

    def run(self, case: str) -> Tensor:
        """All layers once; the stream that leaves the last."""
        delta, stream = self.delta, self.residual
        taps = case != "norm" and "no steering" not in case, case != "norm"
        for i in range(self.layers):
            tables = (self.pool, self.index, self.vectors[i], self.coefficients[i], self.gates, self.orders[i],
                      self.before, self.overflow_flags)  # fmt: skip
            normed, stream = cuda_tap_norm(
                delta, stream, self.norm[i], 1e-6, False, self.laying.table[i], *tables, *taps, False
            )
            torch.mm((normed @ self.attention[i])[:, : self.hidden], self.attention[i, :, : self.hidden])
            gate, up = (normed @ self.up[i]).chunk(2, 1)
            torch.mm(torch.nn.functional.silu(gate) * up, self.down[i])
        return stream


def graph_of(layers: Layers, case: str) -> torch.cuda.CUDAGraph:
    layers.ask(case)
    layers.run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run(case)
    return graph


def microseconds(run: Callable[[], object], times: int) -> float:
    """Return the device time of one call among many, after one that is not counted."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / times


def agree(layers: Layers) -> float:
    """Return how far precomputed ops are from ops that are looked up, relative to the stream; rows must be equal."""
    worst = 0.0
    kept = []
    for way in ("capture", "capture, no steering, precomputed"):
        layers.ask(way)
        layers.pool.zero_()
        layers.run(way)
        kept.append(layers.pool.clone())
        if not torch.equal(kept[0], kept[-1]) or not kept[0].any():
            raise SystemExit(f"{way}: other rows than by looking up")
    for case in ("add", "ablate"):
        found = []
        for way in (case, f"{case}, precomputed"):
            layers.ask(way)
            found.append(layers.run(way).float())
        worst = max(worst, float((found[0] - found[1]).norm() / found[0].norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=11008, help="size of the MLP")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    layers = Layers(args.layers, args.tokens, args.hidden, args.inner)
    worst = agree(layers)
    graphs = {case: graph_of(layers, case) for case in CASES}
    rounds = [dict[str, float]() for _ in range(args.rounds)]
    for one, case in itertools.product(rounds, CASES):
        layers.ask(case)
        one[case] = microseconds(graphs[case].replay, 10)
    more = {
        case: [(one[case] - one["norm"]) / args.layers for one in rounds] for case in CASES if case != "norm"
    }  # per layer
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": args.layers,
        "tokens": args.tokens,
        "hidden": args.hidden,
        "inner": args.inner,
        "columns": _COLUMNS,
        "rounds": args.rounds,
        "step_us": statistics.median(one["norm"] for one in rounds),
        "more_us_per_layer": {case: statistics.median(found) for case, found in more.items()},
        "spread_us": {case: [min(found), max(found)] for case, found in more.items()},
        "precomputed_against_looked_up": worst,
    }
    write(args.out, result)
    for case, value in result["more_us_per_layer"].items():
        low, high = result["spread_us"][case]
        print(f"{case:34} {value:+.3f} µs per layer over the norm alone [{low:+.3f}, {high:+.3f}]")  # noqa: T201
    print(f"precomputed against looked up: {worst:.2e}")  # noqa: T201


if __name__ == "__main__":
    main()
