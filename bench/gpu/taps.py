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

import numpy as np
import torch
from torch import Tensor

from steerscope.bench.one import write
from steerscope.core.equation import NOTHING
from steerscope.engines.vllm.cuda.fused_norm import cuda_tap_norm
from steerscope.engines.vllm.cuda.kernel import make_stage
from steerscope.engines.vllm.cuda.precomputed_ops import PrecomputedOps
from steerscope.engines.vllm.wire import Wire, WireCapture
from steerscope.engines.vllm.worker.index_layout import CELL, ENTRIES, FLAG, GROUP, PRECOMPUTED, STRIDE
from steerscope.engines.vllm.worker.prefill_sums import PrefillRows, PromptSlice
from steerscope.engines.vllm.worker.requests import TrackedRequest
from steerscope.engines.vllm.worker.step_index import PAGE
from steerscope.engines.vllm.worker.tap import TapMode, at_first_tap, end_forward
from steerscope.specs import Ablate, Add
from steerscope.specs.tokens import EVERYWHERE

CASES = (
    "norm", "nothing asked", "capture", "capture, precomputed", "capture, no steering, precomputed",
    "capture, no steering, staged", "add", "add, precomputed", "ablate", "ablate, precomputed",
)  # fmt: skip
_COLUMNS, _GROUPS = 4, 64  # as an engine has them
_SUM = 1e-5  # relative L2 that a sum may be off


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
        self.stage, self.bare = make_stage(layers, tokens, self.pool), torch.zeros(0, **half)
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
        staged = case.endswith("staged")
        for i in range(self.layers):
            tables = (self.pool, self.index, self.vectors[i], self.coefficients[i], self.gates, self.orders[i],
                      self.before, self.overflow_flags)  # fmt: skip
            normed, stream = cuda_tap_norm(
                delta, stream, self.norm[i], 1e-6, False, self.laying.table[i],
                self.stage[i] if staged else self.bare, self.stage, self.orders, *tables, *taps,
                staged and i == self.layers - 1,
            )  # fmt: skip
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
    for way in ("capture", "capture, no steering, precomputed", "capture, no steering, staged"):
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


class WholePrompts:
    """One tap, and prompts whose rows it keeps, or sums for their means."""

    def __init__(self, count: int, hidden: int, length: int = 512, hold: int = 4, device: str = "cuda") -> None:
        tokens, cuda = count * length, torch.device(device)
        self.hidden = hidden
        self.delta, self.residual = torch.randn(2, tokens, hidden, device=cuda).to(torch.bfloat16)
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=cuda)
        self.pool = torch.zeros(3 * tokens, hidden, dtype=torch.bfloat16, device=cuda)
        self.index = torch.zeros(tokens, 16, dtype=torch.int32, device=cuda)
        self.order = torch.full((_GROUPS,), -1, dtype=torch.int32, device=cuda)
        self.order[1] = 0
        vectors = torch.randn(count + 1, hidden, device=cuda) / hidden**0.5
        ops = torch.tensor(Ablate(vector=[1.0]).coefficients(), device=cuda).repeat(count + 1, 1)
        self.tables = vectors, ops, torch.ones(2, device=cuda)
        self.more = torch.zeros(_GROUPS, dtype=torch.bool, device=cuda), torch.zeros(count + 2, device=cuda).int()
        self.bare, self.flush = torch.zeros(0, device=cuda), torch.empty(256 << 20, dtype=torch.uint8, device=cuda)
        capture = WireCapture((), EVERYWHERE, False, "mean", hold, length)
        self.requests = [TrackedRequest(Wire(str(i), None, 0, 1, (), capture), [], 1, 1) for i in range(count)]
        self.length, self.doing, self.prompts = length, TapMode(), PrefillRows([], 0)
        self.numbers = torch.arange(tokens, dtype=torch.int32, device=cuda) // length + 1  # another op for each

    def ask(self, case: str) -> None:
        span = 2 if case == "summed" else 0
        step_index = np.zeros(self.index.shape, dtype=np.int32)
        taken = [PromptSlice(one, i * self.length, 0, self.length, False) for i, one in enumerate(self.requests)]
        self.prompts = PrefillRows(taken if "kept" in case or case == "summed" else [], span)
        self.prompts.place(0, step_index)
        runs = self.prompts.runs(len(step_index))
        self.index.copy_(torch.from_numpy(step_index))
        listed = None if runs is None else torch.from_numpy(runs).to(self.index.device)
        steers = case.startswith("steered")
        if steers:
            self.index[:, FLAG] = self.index[:, ENTRIES] = self.index[:, ENTRIES + 1] = self.numbers
        keeps = case not in ("nothing asked", "steered")
        self.doing = TapMode(
            steers or case == "kept, others steer", keeps, listed, len(step_index), int(case == "steered")
        )

    def run(self) -> Tensor:
        at_first_tap(self.index, lambda: self.doing)
        normed, _ = cuda_tap_norm(
            self.delta, self.residual, self.norm, 1e-6, False, self.bare, self.bare, self.bare, self.bare, self.pool,
            self.index, *self.tables, self.order, *self.more, True, True, False,
        )  # fmt: skip
        end_forward(self.index)
        return normed

    def agree(self) -> float:
        """Sums are those of the rows, and the norms are the same but for rounding: which part of their numbers is
        not."""
        self.ask("kept")
        plain, rows = self.run(), self.pool[: len(self.delta)].clone()
        self.ask("summed")
        summed = self.run()
        if not torch.allclose(plain.float(), summed.float(), rtol=torch.finfo(plain.dtype).eps, atol=0):
            raise SystemExit("summed: another norm than where rows are kept")
        for one in self.prompts.prompts:
            sums = self.pool[one.cell : one.cell + one.sum_cells].view(-1).view(torch.float32).view(-1, self.hidden)
            mine = rows[one.token : one.token + one.summed].double()
            if float((sums.double().sum(0) - mine.sum(0)).norm() / mine.sum(0).norm()) > _SUM:
                raise SystemExit("summed: other sums than those of the rows")
        steered = [self.ask(case) or self.run() for case in ("steered, as if there were more", "steered")]
        if not torch.allclose(*(one.float() for one in steered), rtol=torch.finfo(plain.dtype).eps, atol=1e-2):
            raise SystemExit("steered: another norm than where there may be several ops")
        return float((plain != summed).float().mean())


def prompts_us(whole: WholePrompts, rounds: int) -> dict[str, float]:
    """Microseconds of one kernel, with nothing of it in the cache."""
    cases = "nothing asked", "kept, others steer", "kept", "summed", "steered, as if there were more", "steered"
    found: dict[str, list[float]] = {case: [] for case in cases}
    for _, case in itertools.product(range(rounds), found):
        whole.ask(case)
        whole.flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # until the host has told the device all of it
        start.record()
        whole.run()
        end.record()
        end.synchronize()
        found[case].append(1000 * start.elapsed_time(end))
    return {case: statistics.median(times) for case, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=11008, help="size of the MLP")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32, help="of 512 tokens, which one kernel works on")
    args = parser.parse_args()
    prompts = WholePrompts(args.prompts, args.hidden)
    other, whole = prompts.agree(), prompts_us(prompts, args.rounds)
    del prompts
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
        "laid_against_looked_up": worst,
        "prompts": args.prompts,
        "prompts_us": whole,
        "norms_rounded_otherwise": other,
    }
    write(args.out, result)
    for case, value in result["more_us_per_layer"].items():
        low, high = result["spread_us"][case]
        print(f"{case:34} {value:+.3f} µs per layer over the norm alone [{low:+.3f}, {high:+.3f}]")  # noqa: T201
    print(f"precomputed against looked up: {worst:.2e}")  # noqa: T201
    for case, value in whole.items():
        print(f"{case:34} {value:.1f} µs for {args.prompts} prompts")  # noqa: T201
    print(f"norms that summing rounds otherwise: {other:.1e}")  # noqa: T201


if __name__ == "__main__":
    main()
