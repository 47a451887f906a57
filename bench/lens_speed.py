"""Lenses: all of a pack together against one after the other, and tiers with a budget.

    python -m bench.lens_speed --lenses 267 --hidden 576 --tokens 1,32 --out bench/results/lens.json

All cells of one table run in one process and take turns, so that a slow moment of the machine hits all. Sequential is
the loop of prior systems: one lens, one row, one `.item()` at a time; beside it the same loop with all rows at once,
which is the measure where the first would take minutes. Every cell's scores are compared with those of the loop before
anything is timed. On a GPU the banks run as CUDA graphs.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.machine import commit, machine
from bench.random_packs import make_pack
from steerscope.files import atomic_path
from steerscope.lenses.bank import Bank
from steerscope.lenses.pack import Pack
from steerscope.lenses.tiers import Tiers

SEQUENTIAL, BATCHED = "sequential", "sequential, rows together"
_MOST_CALLS = 10_000  # a loop of more lenses × rows takes longer than everything else together
LIMITS = {"bank fp32": 1e-4, "bank bf16": 0.05, "bank int8": 0.1}  # the most a probability may differ


def modules(pack: Pack, device: str) -> list[nn.Sequential]:
    """Each lens as the prior system has it."""
    sizes = [pack.info.hidden, *pack.info.architecture.widths, 1]
    found = []
    for i in range(len(pack)):
        steps: list[nn.Module] = []
        for layer, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False)):
            linear = nn.Linear(into, out, device="meta")
            linear.weight, linear.bias = (nn.Parameter(pack.tensors[f"{name}{layer}"][i]) for name in "wb")
            steps += [linear, nn.ReLU(), nn.Dropout(0.2)]
        found.append(nn.Sequential(*steps[:-2], nn.Sigmoid()).eval().to(device))
    return found


def graphed(bank: Bank, rows: Tensor) -> Callable[[], Tensor]:
    """The bank on fixed rows; on a GPU one graph, waited for."""
    out = torch.empty(len(rows), len(bank), device=rows.device)
    if rows.device.type != "cuda":
        return lambda: bank.scores(rows, out=out)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            bank.scores(rows, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bank.scores(rows, out=out)

    held = (graph, bank)  # a graph reads the bank's weights and does not keep them

    def replay() -> Tensor:
        held[0].replay()
        torch.cuda.synchronize()
        return out

    return replay


def cells_of(pack: Pack, rows: Tensor, lenses: list[nn.Sequential], compiled: int) -> dict[str, Callable[[], Tensor]]:
    hidden, device = pack.info.hidden, rows.device

    def loop(chosen: Sequence[nn.Module]) -> Tensor:
        scores = []
        for row in rows:
            x = nn.functional.layer_norm(row, (hidden,)).unsqueeze(0)
            scores.append([lens(x).item() for lens in chosen])
        return torch.tensor(scores)

    def batched() -> Tensor:
        x = nn.functional.layer_norm(rows, (hidden,))
        return torch.cat([lens(x) for lens in lenses], 1).cpu()

    cells: dict[str, Callable[[], Tensor]] = {BATCHED: batched}
    if len(lenses) * len(rows) <= _MOST_CALLS:
        cells = {SEQUENTIAL: lambda: loop(lenses), **cells}
    for weights in ("fp32", "bf16", "int8"):
        cells[f"bank {weights}"] = graphed(Bank(pack, device=device, weights=weights), rows)
    whole = Bank(pack, device=device)
    cells["bank fp32, top 10"] = lambda: whole.top(rows, 10)[0].cpu()
    if compiled:
        some = [torch.compile(lens) for lens in lenses[:compiled]]
        cells[f"sequential, {compiled} lenses compiled each"] = lambda: loop(some)  # type: ignore[arg-type]
        cells[f"sequential, {compiled} lenses"] = lambda: loop(lenses[:compiled])
    return cells


def measure_banks(pack: Pack, tokens: int, device: str, rounds: int, compiled: int) -> dict[str, dict[str, object]]:
    """Seconds of each cell in turns, and how they compare with the loop."""
    rows = torch.randn(tokens, pack.info.hidden, generator=torch.Generator().manual_seed(tokens)).to(device)
    cells = cells_of(pack, rows, modules(pack, device), compiled)
    with torch.inference_mode():
        seconds = in_turns(cells, rounds)
    base = next(iter(seconds.values()))
    return {
        name: {
            "median": statistics.median(times),
            "min": min(times),
            "ratio": statistics.median(mine / loop for mine, loop in zip(times, base, strict=True)),
            "seconds": times,
        }
        for name, times in seconds.items()
    }


def in_turns(cells: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    expected = next(iter(cells.values()))()
    for name, limit in LIMITS.items():
        worst = float((cells[name]().cpu() - expected).abs().max())
        assert worst < limit, f"{name} differs from the loop by {worst}"
    seconds: dict[str, list[float]] = {name: [] for name in cells}
    for run in cells.values():
        run()
    for turn in range(rounds):
        for name in list(cells) if turn % 2 == 0 else list(cells)[::-1]:
            start = time.perf_counter()
            cells[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def text_rows(tokens: int, hidden: int, device: str) -> Tensor:
    """Rows that change slowly from one to the next, as those of a text do."""
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randn(hidden, generator=draw)]
    while len(rows) < tokens:
        rows.append(0.95 * rows[-1] + 0.3 * torch.randn(hidden, generator=draw))
    return torch.stack(rows).to(device)


def measure_tiers(folder: Path, args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Milliseconds per token, row by row: first use, after the same rows, and after a prompt's rows."""
    pack = Pack.load(folder, verify=False)
    rows = text_rows(2 * args.steps, pack.info.hidden, args.device)
    prompt, text = rows[: args.steps], rows[args.steps :]
    found: dict[str, dict[str, object]] = {}
    for name in ("cold", "prewarm", "warm"):
        tiers = Tiers(pack, budget=args.budget, base_levels=2, device=args.device)
        for row in {"cold": rows[:0], "prewarm": prompt, "warm": text}[name]:
            tiers.expand(row.unsqueeze(0), args.top_k)
        stats = tiers.stats
        hits, misses, moved = stats.hits, stats.misses, stats.bytes_moved
        times = []
        for row in text:
            start = time.perf_counter()
            tiers.expand(row.unsqueeze(0), args.top_k).indices.cpu()
            times.append(1000 * (time.perf_counter() - start))
        asked = stats.hits - hits + stats.misses - misses
        found[name] = {
            "ms_per_token": statistics.mean(times),
            "median_ms": statistics.median(times),
            "p95_ms": statistics.quantiles(times, n=20)[-1],
            "hit_rate": (stats.hits - hits) / max(1, asked),
            "bytes_per_token": (stats.bytes_moved - moved) / len(text),
        }
    return found


def show(result: dict, console: Console) -> None:
    for tokens, cells in result["banks"].items():
        table = Table("cell", "median ms", "best ms", "of the first", title=f"{tokens} rows, {result['lenses']} lenses")
        for name, cell in cells.items():
            ratio = f"1/{1 / cell['ratio']:.1f}" if cell["ratio"] < 1 else f"{cell['ratio']:.2f}"
            table.add_row(name, f"{1000 * cell['median']:.2f}", f"{1000 * cell['min']:.2f}", ratio)
        console.print(table)
    if result["tiers"]:
        table = Table("tiers", "ms/token", "median", "p95", "hits", "MB/token", title="one row at a time")
        for name, cell in result["tiers"].items():
            numbers = [f"{cell[key]:.2f}" for key in ("ms_per_token", "median_ms", "p95_ms")]
            numbers += [f"{cell['hit_rate']:.0%}", f"{cell['bytes_per_token'] / 1e6:.2f}"]
            table.add_row(name, *numbers)
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--lenses", type=int, default=267)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--widths", default="128,64")
    parser.add_argument("--tokens", default="1,32", help="rows together, one table each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="more than one is slower and noisier on shared cores")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="also compile N lenses, each alone (slow)")
    parser.add_argument("--levels", default="10,257,1093", help="the tiers' pack; empty: no tiers")
    parser.add_argument("--budget", type=int, default=500, help="lenses in the hot slab")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="tokens through the tiers")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    widths = tuple(int(width) for width in args.widths.split(",") if width)
    pack = make_pack([args.lenses], args.hidden, widths, args.device)
    result: dict[str, object] = {"commit": commit(), "machine": machine(), "device": args.device}
    result |= {"lenses": args.lenses, "hidden": args.hidden, "widths": list(widths)}
    result["banks"] = {
        tokens: measure_banks(pack, int(tokens), args.device, args.rounds, args.compile)
        for tokens in args.tokens.split(",")
    }
    result["tiers"] = {}
    if args.levels:
        levels = [int(count) for count in args.levels.split(",")]
        with tempfile.TemporaryDirectory() as scratch:
            make_pack(levels, args.hidden, widths).save(Path(scratch) / "pack")
            result |= {"levels": levels, "budget": args.budget, "tiers": measure_tiers(Path(scratch) / "pack", args)}
    show(result, Console())
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(args.out) as partial:
            partial.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
