"""How fast a corpus becomes a store: `steerscope capture run` as a command, on each engine and each choice of rows.

    python -m bench.corpus_speed --engines hf vllm --out bench/results/gpu/corpus.json

Documents are random token ids. Speed is taken between the first and the last commit of a run, so it contains all writes
to disk, and not the start of the engine, which is measured separately. Stores of the second and later engines are
compared with those of the first, row for row.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.machine import commit, machine
from steerscope.capture.shards import part_path
from steerscope.capture.store import ActivationStore, committed, read_info
from steerscope.models import DEFAULT_MODEL

CHOICES: dict[str, list[str]] = {
    "one layer, every token": ["--layers", "12"],
    "all layers, every token": ["--layers", "all"],
    "all layers, mean of each document": ["--layers", "all", "--reduce", "mean"],
}


def write_corpus(path: Path, documents: int, tokens: int, vocabulary: int = 40_000) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            file.write(json.dumps({"token_ids": [draw.randrange(100, vocabulary) for _ in range(tokens)]}) + "\n")


def captured(data: Path, out: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "steerscope.cli.main", "capture", "run", "--data", str(data), "--out", str(out)]
    began, wall = time.time(), time.perf_counter()
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - wall
    commits, info = committed(out), read_info(out)
    at = {one.shard: part_path(out, "commits", one.shard).stat().st_mtime for one in commits}
    first, last = min(at, key=lambda shard: at[shard]), max(at.values())
    between, counted = last - at[first], [one for one in commits if one.shard != first]
    tokens, rows = sum(one.tokens for one in counted), sum(one.rows for one in counted)
    return {
        "seconds": whole,
        "first_commit_s": at[first] - began,
        "between_s": between,
        "shards": len(commits),
        "bad": sum(one.bad for one in commits),
        "tokens_per_s": tokens / between,
        "bytes_per_s": rows * info.row_bytes / between,
    }


def differences(first: Path, second: Path) -> dict[str, float]:
    """How far the rows of two stores of the same documents are apart, shard by shard."""
    one, other = ActivationStore(first), ActivationStore(second)
    if len(one) != len(other) or one.keys != other.keys:
        raise SystemExit(f"{second} holds other rows than {first}")
    worst, cosine = 0.0, 1.0
    for shard in range(one.info.shards):
        a, b = (store.shard(shard).float().flatten(1) for store in (one, other))
        worst = max(worst, float(((a - b).norm(dim=1) / a.norm(dim=1)).max()))
        cosine = min(cosine, float(torch.cosine_similarity(a, b, dim=1).min()))
    return {"rows": len(one), "worst_relative_l2": worst, "least_cosine": cosine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", default=["hf"], choices=["hf", "vllm"])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500, help="in a document")
    parser.add_argument("--shard-documents", type=int, default=100)
    args = parser.parse_args()
    table, runs = Table("rows", "engine", "tokens/s", "GB/s", "start s", "apart from the first"), {}
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "corpus.jsonl"
        write_corpus(data, args.documents, args.tokens)
        for number, (choice, asked) in enumerate(CHOICES.items()):
            for engine in args.engines:
                options = ["--engine", engine, "--model", args.model, "--dtype", args.dtype, *asked]
                out = Path(name) / f"{number}-{engine}"
                found = captured(data, out, [*options, "--shard-documents", str(args.shard_documents)])
                if engine != args.engines[0]:
                    found["against"] = differences(Path(name) / f"{number}-{args.engines[0]}", out)
                runs.setdefault(choice, {})[engine] = found
                apart = f"{found['against']['worst_relative_l2']:.1e}" if "against" in found else ""
                speed = f"{found['tokens_per_s']:,.0f}", f"{found['bytes_per_s'] / 1e9:.2f}"
                table.add_row(choice, engine, *speed, f"{found['first_commit_s']:.0f}", apart)
    Console().print(table)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    asked = {"model": args.model, "dtype": args.dtype, "documents": args.documents, "tokens": args.tokens}
    result = {"commit": commit(), "machine": machine(), "gpu": gpu, "configuration": asked, "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
