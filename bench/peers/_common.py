"""What every peer script shares: arguments, prompts, the steering vector, timing, JSON.

A peer script runs as a file in the peer's own virtual environment, so this module imports only torch and the
standard library. A script hands `main` a function that loads the model once and returns one `Cell` per
workload; a cell is a callable that does the whole workload, or a sentence saying why the peer cannot do it.

A cell named `capture:variant` is run with `capture` when variants are asked for: another way of doing the same
workload, reported beside it.
"""

import argparse
import gc
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import torch

VECTOR_SEED = 20240607


@dataclass(frozen=True)
class Job:
    """The workload, the same for every peer."""

    model: Path
    prompts: torch.Tensor  # [requests, prompt length], int64
    max_new_tokens: int
    repeats: int
    cells: tuple[str, ...]
    variants: bool
    layer: int
    scale: float
    output: Path

    @property
    def fed(self) -> int:
        """Tokens that pass through the model per request: the last generated one is never fed back."""
        return self.prompts.shape[1] + self.max_new_tokens - 1

    def steering_vector(self, width: int) -> torch.Tensor:
        """The fixed vector to add: unit length times the scale, scaled up to the norm of a unit-variance row."""
        vector = torch.randn(width, generator=torch.Generator().manual_seed(VECTOR_SEED))
        return vector * (self.scale * width**0.5 / vector.norm())


@dataclass(frozen=True)
class Outcome:
    """What one run of a cell hands back: full sequences (or the new tokens only) and the captured rows."""

    tokens: torch.Tensor  # [requests, prompt + new] or [requests, new]
    rows: Sequence[torch.Tensor] = field(default_factory=tuple)  # any shapes whose last axis is the hidden size


Cell: TypeAlias = Callable[[], Outcome] | str


def main(peer: str, package: str, build: Callable[[Job], dict[str, Cell]]) -> None:
    """Load the peer once, run the asked cells (one warm-up, then the timed runs) and write the JSON."""
    job = parse_job()
    torch.manual_seed(0)
    results: dict[str, dict[str, object]] = {}
    try:
        cells = build(job)
    except Exception as error:  # a peer that does not load is a result, not a crash
        cells = {}
        results = {name: {"error": _one_line(error)} for name in job.cells}
    for name, cell in cells.items():
        kind, _, variant = name.partition(":")
        if kind in job.cells and (job.variants or not variant):
            results[name] = measure(cell, job)
    report = {
        "peer": peer,
        "version": version(package),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "cells": results,
    }
    job.output.write_text(json.dumps(report, indent=1))


def measure(cell: Cell, job: Job) -> dict[str, object]:
    """Time one cell, on the clock and in processor time (all threads); a failure becomes its one-line error."""
    if isinstance(cell, str):
        return {"error": cell}
    try:
        outcome = cell()
        seconds, cpu_seconds = [], []
        for _ in range(job.repeats):
            del outcome
            gc.collect()
            start, cpu_start = time.perf_counter(), time.process_time()
            outcome = cell()
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    except Exception as error:
        return {"error": _one_line(error)}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, **describe(outcome, job)}


def describe(outcome: Outcome, job: Job) -> dict[str, object]:
    """Count and sum what a run returned, and say what is missing from it."""
    new = outcome.tokens[:, -job.max_new_tokens :].tolist()
    rows = sum(row.numel() // row.shape[-1] for row in outcome.rows)
    result: dict[str, object] = {
        "rows": rows,
        "tokens": new[:1],
        "tokens_crc": zlib.crc32(json.dumps(new).encode()),  # over all requests, to compare without storing them
        "checksum": sum(row.double().abs().sum().item() for row in outcome.rows),
    }
    wrong = []
    if outcome.tokens.shape[0] != len(job.prompts) or any(len(ids) != job.max_new_tokens for ids in new):
        wrong.append(f"tokens have shape {tuple(outcome.tokens.shape)}")
    if any(row.device.type != "cpu" for row in outcome.rows):
        wrong.append("rows are not on the CPU")
    config = json.loads((job.model / "config.json").read_text())
    expected = len(job.prompts) * job.fed * config["num_hidden_layers"]
    if outcome.rows and rows != expected:
        wrong.append(f"{rows} rows instead of {expected}")
    if odd := {tuple(row.shape) for row in outcome.rows if row.shape[-1] != config["hidden_size"]}:
        wrong.append(f"rows of shape {sorted(odd)}, but the hidden size is {config['hidden_size']}")
    return result | ({"wrong": "; ".join(wrong)} if wrong else {})


def parse_job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cells", default="plain,capture,steer")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--layer", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    return Job(
        model=args.model,
        prompts=torch.tensor(json.loads(args.prompts.read_text())),
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        cells=tuple(args.cells.split(",")),
        variants=args.variants,
        layer=args.layer,
        scale=args.scale,
        output=args.out,
    )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
