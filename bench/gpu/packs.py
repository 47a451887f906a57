"""Lens packs that come and go on a running engine: what they read, and what loading one costs the streams that run.

    . bench/gpu/env.sh && python3 -m bench.gpu.packs --out packs.json

One engine with made-up weights. Small packs are registered, watched, replaced and unregistered in turn, side by side
and while requests read with them; every reading is compared with lenses computed here, in float64, from the captured
rows. Then streams run while a large pack is registered from a folder and from memory: the longest time between two
tokens of a stream is compared with that of the same streams left alone.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.lens_speed import LIMITS
from bench.random_packs import make_pack, small_share
from steerscope.bench.one import hardware, versions
from steerscope.bench.shapes import SHAPES, NoTokenizer, load_model
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import EndEvent, Generation, TokenEvent, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.lenses.pack import Pack
from steerscope.lenses.spec import EPSILON
from steerscope.models import DEFAULT_MODEL
from steerscope.specs import Capture, InvalidRequest, Sampling, Watch
from steerscope.specs.errors import SteerscopeError
from steerscope.specs.watch import flag, when

WIDTHS, SMALL = (128, 64), (4, 20)  # widths of a lens, lenses per level of a small pack
CHUNK = 64  # lenses that are computed in float64 at a time
STARTED_S = 120.0  # for all streams to have their first token
KINDS: tuple[dict[str, Any], ...] = (
    {"top_k": 5},
    {"top_k": 3, "tokens": "generated"},
    {"top_k": 4, "levels": [1]},
    {"top_k": 2, "rules": [when("0.0", above=0.5).then(flag("often"))]},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--shape", choices=[*SHAPES, DEFAULT_MODEL], default="llama-1b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", choices=CASE_NAMES, default=CASE_NAMES)
    parser.add_argument("--cache-bytes", type=int, default=2 << 30, help="memory for keys and values")
    parser.add_argument("--rounds", type=int, default=6, help="packs that are registered and unregistered in turn")
    parser.add_argument("--pack-bytes", type=int, default=500_000_000, help="of the large pack")
    parser.add_argument("--streams", type=int, default=16, help="that run while the large pack is registered")
    parser.add_argument("--repeats", type=int, default=3, help="of each registration of the large pack")
    parser.add_argument("--alone-s", type=float, default=2.0, help="how long streams run without a registration")
    parser.add_argument("--more-s", type=float, default=0.25, help="what registering may add to the longest gap")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args, Path(scratch))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(result) + "\n")
    sys.exit(not result["holds"])


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    began = time.monotonic()
    engine = start(args, scratch / "model")
    started = time.monotonic() - began
    mode = {}
    if args.engine == "vllm":
        aio: Any = engine.aio
        mode = {"mode": aio.mode, "core_process": aio.context.core_is_apart}
    run = Run(engine, args.rounds)
    cases: dict[str, Callable[[], None]] = {case.__name__: functools.partial(case, run) for case in CASES}
    cases["gaps"] = functools.partial(gaps, run, args, scratch)
    try:
        for name in args.cases:
            run.case(name, cases[name])
    finally:
        engine.close()
    names = "engine", "shape", "dtype", "rounds", "pack_bytes", "streams", "repeats", "alone_s", "more_s"
    configuration = {name: getattr(args, name) for name in names} | mode
    busy = {"load_average": os.getloadavg()[1]}  # of five minutes, other programs included
    result = {"configuration": configuration, "versions": versions(), "hardware": hardware() | busy}
    result |= {"start_s": started, "seconds": time.monotonic() - began, "gaps": run.gaps, "checks": run.checks}
    return result | {"holds": all(check["holds"] for check in run.checks)}


def start(args: argparse.Namespace, folder: Path) -> SyncEngine:
    model = load_model(args.shape, args.device, getattr(torch, args.dtype))
    if args.engine == "hf":
        return HFEngine(model, NoTokenizer(), name=args.shape).sync  # type: ignore[arg-type]
    from steerscope.engines.vllm.client.engine import VLLMEngine

    model.save_pretrained(folder)
    del model
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    options: dict[str, Any] = {"dtype": args.dtype, "max_model_len": 1024, "max_num_seqs": 64}
    options |= {"max_num_batched_tokens": 2048, "kv_cache_memory_bytes": args.cache_bytes, "skip_tokenizer_init": True}
    options |= small_share(args.device)
    return VLLMEngine(folder, tokenizer=NoTokenizer(), **options).sync


# --- what lenses must say


def scores_of(pack: Pack, rows: Tensor) -> Tensor:
    """Probabilities [n, lenses] of captured rows, in float64: layer norm, linear layers with ReLU, sigmoid."""
    x = rows.double().cpu()
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    parts = [_logits(pack, slice(at, at + CHUNK), x) for at in range(0, len(pack), CHUNK)]
    return torch.cat(parts, 1).sigmoid()


def _logits(pack: Pack, lenses: slice, x: Tensor) -> Tensor:
    depth = len(pack.info.architecture.widths) + 1
    weights = [pack.tensors[f"w{i}"][lenses].double() for i in range(depth)]
    biases = [pack.tensors[f"b{i}"][lenses].double() for i in range(depth)]
    h = torch.einsum("ni,loi->nlo", x, weights[0]) + biases[0]
    for w, b in zip(weights[1:], biases[1:], strict=True):
        h = torch.einsum("nli,loi->nlo", h.relu(), w) + b
    return h.squeeze(-1)


def distance(done: Generation, pack: Pack, watch: Watch) -> float:
    """How far readings are from these lenses on the captured rows: the worst difference of a rank, of a concept that is
    named, and of a score with which a rule fired. Infinite if readings are missing or not of the rows asked for."""
    readings: Any = done.readings
    length = len(done.prompt_token_ids)
    first = length if watch.tokens == "generated" else 0
    if readings.positions.tolist() != list(range(first, length + len(done.token_ids) - 1)):
        return float("inf")
    scores = scores_of(pack, done.rows[pack.info.layer])
    counted = torch.zeros(len(pack), dtype=torch.bool)
    for level in range(pack.levels) if watch.levels is None else watch.levels:
        counted[pack.level(level)] = True
    wanted = torch.where(counted, scores, -1.0)[first:]
    values, named = torch.from_numpy(readings.values).double(), torch.from_numpy(readings.indices).long()
    in_order = named.sort(-1).values
    if bool((named < 0).any()) or bool((in_order[:, 1:] == in_order[:, :-1]).any()):
        return float("inf")
    ranks = (values - wanted.topk(watch.top_k).values).abs().max()
    concepts = (values - wanted.gather(1, named)).abs().max()
    fired = [abs(s - scores[f.position, pack.index(c)]) for f in done.firings for c, s in f.scores]
    return float(max([ranks, concepts, *fired]))


# --- requests


@dataclass
class Asked:
    """Requests of one batch, and the pack that each should be read with."""

    prompts: list[TokenPrompt] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    watches: list[Watch | None] = field(default_factory=list)
    packs: list[Pack | None] = field(default_factory=list)


class Run:
    """An engine, the checks made on it, and packs and requests that differ each time."""

    def __init__(self, engine: SyncEngine, rounds: int) -> None:
        self.engine, self.rounds, self.layer = engine, rounds, engine.facts.layers // 2
        self.checks: list[dict[str, Any]] = []
        self.gaps: dict[str, Any] = {}
        self.idle = 0  # packs that were never registered, and may stay
        self._chance, self._seed = np.random.default_rng(0), 0

    def case(self, name: str, work: Callable[[], None]) -> None:
        """A case that raises is a check that does not hold; the others are made all the same."""
        began = time.monotonic()
        try:
            work()
            left = int(self.engine.stats()["packs"])
            self.check(f"{name}: no pack is left", left <= self.idle, packs=left)
        except Exception as error:
            self.check(f"{name}: no error", False, error=f"{type(error).__name__}: {error}"[:600])
            with contextlib.suppress(SteerscopeError):
                for pack in list(self.engine.packs):
                    self.engine.unregister_pack(pack)
        sys.stderr.write(f"{name}: {time.monotonic() - began:.1f} s\n")

    def check(self, name: str, holds: bool, **found: Any) -> None:
        self.checks.append({"name": name, "holds": bool(holds), **found})

    def pack(self) -> Pack:
        self._seed += 1
        return make_pack(SMALL, self.engine.facts.hidden, WIDTHS, layer=self.layer, seed=self._seed)

    def register(self, name: str, **options: Any) -> Pack:
        return self.engine.register_pack(name, self.pack(), any_model=True, **options)

    def asked(self, packs: "Sequence[tuple[str | Pack, Pack] | None]", most: int = 24) -> Asked:
        """Every kind of watch with every pack, given as what names it and what it is; None is not watched."""
        made = Asked()
        for kind in KINDS:
            for one in packs:
                length, count = int(self._chance.integers(3, 90)), int(self._chance.integers(most // 3, most))
                made.prompts.append(self.prompt(length))
                made.samplings.append(Sampling(max_tokens=count, ignore_eos=True))
                made.watches.append(None if one is None else Watch(pack=one[0], **kind))  # type: ignore[arg-type]
                made.packs.append(None if one is None else one[1])
        return made

    def prompt(self, length: int) -> TokenPrompt:
        return TokenPrompt(self._chance.integers(2, self.engine.facts.vocab, length).tolist())

    def watch(self, name: str, asked: Asked, limit: float = LIMITS["bank fp32"]) -> list[Generation]:
        """Run a batch twice, the second time with the graphs of the first, and check all readings."""
        first, second = (
            self.engine.generate(asked.prompts, asked.samplings, watch=asked.watches, capture=self.captures(asked))
            for _ in range(2)
        )
        self.read(f"{name}, at first", asked, first, limit)
        self.read(f"{name}, again", asked, second, limit)
        return first

    def captures(self, asked: Asked) -> list[Capture | None]:
        """The rows that lenses read, of requests that are watched."""
        return [None if watch is None else Capture(layers=self.layer) for watch in asked.watches]

    def read(self, name: str, asked: Asked, done: Sequence[Generation], limit: float = LIMITS["bank fp32"]) -> None:
        """Check that readings are those of the lenses, and that every text is as long as it should be."""
        worst = 0.0
        for one, watch, pack in zip(done, asked.watches, asked.packs, strict=True):
            if watch is not None and pack is not None:
                worst = max(worst, distance(one, pack, watch))
        readings = sum(len(one.readings) for one in done)
        whole = [len(one.token_ids) for one in done] == [sampling.max_tokens for sampling in asked.samplings]
        plain = all(not one.readings for one, watch in zip(done, asked.watches, strict=True) if watch is None)
        holds = worst <= limit and whole and plain and readings > 0
        self.check(name, holds, readings=readings, worst=worst, limit=limit, all_tokens=whole, unwatched_plain=plain)


# --- the cases


def in_turn(run: Run) -> None:
    """Register, watch, unregister, and again with another pack; the device's memory must not grow with them."""
    free: list[int] = []
    for turn in range(run.rounds):
        asked = run.asked([("turn", run.register("turn")), None])
        done = run.watch(f"in_turn: pack {turn + 1}", asked)
        run.engine.unregister_pack("turn")
        if torch.cuda.is_initialized():
            free.append(torch.cuda.mem_get_info()[0])
        if turn == 0:
            pairs = zip(done, asked.watches, strict=True)
            far = min(distance(one, run.pack(), watch) for one, watch in pairs if watch is not None)
            run.check("in_turn: the lenses of another pack would be noticed", far > 100 * LIMITS["bank fp32"], by=far)
    if len(free) > 3:  # the first turns make room that the next ones use
        grown, pack = free[1] - free[-1], run.pack()
        pack_bytes = pack.lens_bytes * len(pack)
        run.check("in_turn: memory of packs is used again", grown < pack_bytes, bytes=grown, pack_bytes=pack_bytes)


def side_by_side(run: Run) -> None:
    """Two packs in one batch; one of them goes, a third comes, the other stays."""
    first, second = run.register("a"), run.register("b")
    run.watch("side_by_side: two packs", run.asked([("a", first), ("b", second), None]))
    run.engine.unregister_pack("a")
    run.watch("side_by_side: one of them is left", run.asked([("b", second)]))
    third = run.register("c")
    run.watch("side_by_side: with a third", run.asked([("b", second), ("c", third)]))
    for name in ("b", "c"):
        run.engine.unregister_pack(name)


def brought_along(run: Run) -> None:
    """Requests that bring their packs: more of them than stay on the device unused."""
    run.idle = 2
    packs = [of_model(run, run.pack()) for _ in range(4)]
    for i, pack in enumerate([*packs, packs[0]]):
        run.watch(f"brought_along: {i + 1}", run.asked([(pack, pack)]))


def of_model(run: Run, pack: Pack) -> Pack:
    """The same pack, which says that it was made for the model that runs."""
    return pack.replace(info=pack.info.model_copy(update={"model": run.engine.facts.name}))


def narrow_weights(run: Run) -> None:
    """Weights in bfloat16, which kernels of their own read."""
    for turn in range(2):
        asked = run.asked([("bf16", run.register("bf16", weights="bf16"))])
        run.watch(f"narrow_weights: {turn + 1}", asked, LIMITS["bank bf16"])
        run.engine.unregister_pack("bf16")


def replaced(run: Run) -> None:
    """Another pack under the name: requests that run keep theirs, later ones have the new one."""
    old = run.register("name")
    asked = run.asked([("name", old), None], most=600)
    new: list[Pack] = []

    def replace(running: Callable[[], int]) -> None:
        new.append(run.register("name"))
        run.check("replaced: while requests ran", running() > 0, running=running())
        run.watch(
            "replaced: the new pack, beside the old one as long as that is read with", run.asked([("name", new[0])])
        )

    done = asyncio.run(during(run, asked, replace))
    run.read("replaced: requests keep the pack that they began with", asked, done)
    run.watch("replaced: the new pack alone", run.asked([("name", new[0])]))
    run.engine.unregister_pack("name")


def under_load(run: Run) -> None:
    """Unregister while requests read with the pack: they keep it to their ends, others notice nothing, new ones are
    refused, and a pack that comes later reads what it should."""
    gone, stays = run.register("gone"), run.register("stays")
    asked = run.asked([("gone", gone), ("stays", stays), None], most=600)
    told: list[str] = []

    def unregister(running: Callable[[], int]) -> None:
        run.engine.unregister_pack("gone")
        run.check("under_load: while requests ran", running() > 0, running=running())
        try:
            run.engine.generate(run.prompt(5), Sampling(max_tokens=2), watch=Watch(pack="gone"))
        except InvalidRequest as error:
            told.append(str(error))

    done = asyncio.run(during(run, asked, unregister))
    run.read("under_load: all requests keep their readings", asked, done)
    run.check("under_load: a new request is refused by name", bool(told) and "gone" in told[0], told=told)
    fresh = run.register("fresh")
    run.watch("under_load: a pack that came later", run.asked([("fresh", fresh), ("stays", stays)]))
    for name in ("fresh", "stays"):
        run.engine.unregister_pack(name)


CASES = (in_turn, side_by_side, replaced, brought_along, under_load, narrow_weights)
CASE_NAMES = [*(case.__name__ for case in CASES), "gaps"]


async def during(run: Run, asked: Asked, work: Callable[[Callable[[], int]], None]) -> list[Generation]:
    """Run requests as streams, and do something when all have a token; it can ask how many still run."""
    started, ended = set[int](), set[int]()
    all_started = asyncio.Event()

    async def one(i: int, capture: Capture | None) -> Generation:
        stream = run.engine.aio.stream(asked.prompts[i], asked.samplings[i], watch=asked.watches[i], capture=capture)
        async for event in stream:
            started.add(i)
            if len(started) == len(asked.prompts):
                all_started.set()
            if isinstance(event, EndEvent):
                ended.add(i)
                return event.generation
        raise RuntimeError(f"stream {i} ended without its generation")

    tasks = [asyncio.create_task(one(i, capture)) for i, capture in enumerate(run.captures(asked))]
    try:
        async with asyncio.timeout(STARTED_S):
            await all_started.wait()
        await asyncio.to_thread(work, lambda: len(tasks) - len(ended))
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# --- what registering a large pack costs streams


@dataclass(frozen=True)
class Phase:
    name: str
    start: float
    stop: float


def gaps(run: Run, args: argparse.Namespace, scratch: Path) -> None:
    hidden = run.engine.facts.hidden
    one = make_pack([1], hidden, WIDTHS).lens_bytes
    large = of_model(run, make_pack([max(5, args.pack_bytes // one)], hidden, WIDTHS, layer=run.layer))
    large.save(scratch / "large")
    run.register("small")
    phases, times = asyncio.run(streams_beside(run, args, large, scratch / "large"))
    run.engine.unregister_pack("small")
    found = summary(phases, times)
    run.gaps = {"lenses": len(large), "bytes": len(large) * one, "phases": found}
    alone = max(found["alone"]["longest_gap_s"])
    for name in ("register from a folder", "register from memory"):
        longest = max(found[name]["longest_gap_s"])
        run.check(f"gaps: {name}", longest <= alone + args.more_s, longest_gap_s=longest, alone_s=alone)


async def streams_beside(
    run: Run, args: argparse.Namespace, large: Pack, folder: Path
) -> tuple[list[Phase], list[tuple[float, float]]]:
    """Phases, and the times of each token and the one before in the same stream."""
    engine, over = run.engine, asyncio.Event()
    phases, times = list[Phase](), list[tuple[float, float]]()
    watch = Watch(pack="small", top_k=3)
    tasks = [asyncio.create_task(endless(run, watch if i % 2 else None, times, over)) for i in range(args.streams)]

    async def phase(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        await asyncio.to_thread(work)
        phases.append(Phase(name, start, time.perf_counter()))

    def first_watch() -> None:
        asked = Asked([run.prompt(24)], [Sampling(max_tokens=8, ignore_eos=True)], [Watch(pack="large")], [large])
        texts = engine.generate(asked.prompts, asked.samplings, watch=asked.watches, capture=run.captures(asked))
        done.append((asked, texts))

    done: list[tuple[Asked, list[Generation]]] = []
    try:
        await asyncio.sleep(1.0)  # all streams run, graphs are there
        for _ in range(args.repeats):
            await phase("alone", lambda: time.sleep(args.alone_s))
            for where in ("a folder", "memory"):
                # In memory its digest is not known yet.
                given = folder if where == "a folder" else await asyncio.to_thread(large.replace)
                await phase(f"register from {where}", lambda: engine.register_pack("large", given))  # noqa: B023
                await phase("first watch", first_watch)
                await phase("unregister", lambda: engine.unregister_pack("large"))
    finally:
        over.set()
        await asyncio.gather(*tasks)
    for asked, texts in done:
        run.read("gaps: readings of the large pack", asked, texts)
    return phases, times


async def endless(run: Run, watch: Watch | None, times: list[tuple[float, float]], over: asyncio.Event) -> None:
    """One stream after the other, until it is over."""
    while not over.is_set():
        prompt, sampling, last = run.prompt(32), Sampling(max_tokens=600, ignore_eos=True), None
        async with contextlib.aclosing(run.engine.aio.stream(prompt, sampling, watch=watch)) as events:
            async for event in events:
                if over.is_set():
                    break
                if isinstance(event, TokenEvent):
                    now = time.perf_counter()
                    if last is not None:
                        times.append((last, now))
                    last = now


def summary(phases: Sequence[Phase], times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of each kind of phase and each time it came: how long it took, and the longest and the median gap between two
    tokens that overlaps it."""
    spans = np.array(times)
    found: dict[str, Any] = {}
    for phase in phases:
        inside = spans[(spans[:, 1] > phase.start) & (spans[:, 0] < phase.stop)]
        lengths = inside[:, 1] - inside[:, 0] if len(inside) else np.zeros(1)  # all streams were between two texts
        mine = found.setdefault(phase.name, {"seconds": [], "longest_gap_s": [], "median_gap_s": []})
        mine["seconds"].append(phase.stop - phase.start)
        mine["longest_gap_s"].append(float(lengths.max()))
        mine["median_gap_s"].append(float(np.median(lengths)))
    return found


def table(result: dict[str, Any]) -> str:
    lines = ["| case | checks hold | readings | worst difference |", "|---|---|---|---|"]
    cases: dict[str, list[dict[str, Any]]] = {}
    for check in result["checks"]:
        cases.setdefault(check["name"].partition(":")[0], []).append(check)
    for case, checks in cases.items():
        hold, readings = (sum(check.get(name, 0) for check in checks) for name in ("holds", "readings"))
        worst = max((check.get("worst", 0.0) for check in checks), default=0.0)
        lines.append(f"| {case} | {hold} of {len(checks)} | {readings:,} | {worst:.1e} |")
    gaps = result["gaps"] or {"bytes": 0, "phases": {}}
    lines += ["", f"| {gaps['bytes'] / 1e6:.0f} MB | took, s | longest gap, ms | median gap, ms |", "|---|---|---|---|"]
    for name, one in gaps["phases"].items():
        took = " ".join(f"{seconds:.2f}" for seconds in one["seconds"])
        longest, median = (" ".join(f"{1e3 * gap:.1f}" for gap in one[f"{n}_gap_s"]) for n in ("longest", "median"))
        lines.append(f"| {name} | {took} | {longest} | {median} |")
    lines += ["", *(f"DOES NOT HOLD {json.dumps(check)}" for check in result["checks"] if not check["holds"])]
    return "\n".join([*lines, f"holds: {result['holds']}, {result['seconds']:.0f} s"])


if __name__ == "__main__":
    main()
