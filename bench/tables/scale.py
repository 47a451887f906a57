"""Tables about corpora: what the store was measured at, and what a billion tokens take, by arithmetic from that."""

import json
import math
import statistics
from pathlib import Path

from steerscope.corpus.job import shard_size

LAYERS, HIDDEN = 36, 2048  # Qwen2.5-3B, whose speed was measured
TOKENS, DOCUMENT = 1_000_000_000, 1000  # tokens in all, and in a document
_CHOICES = {  # name: rows per document, layers, the measured request that is like it
    "one layer, every token": (DOCUMENT, 1, "all-layers"),
    "four layers, every token": (DOCUMENT, 4, "all-layers"),
    "all 36 layers, every token": (DOCUMENT, LAYERS, "all-layers"),
    "all 36 layers, mean of each document": (1, LAYERS, "mean"),
    "all 36 layers, last token of each document": (1, LAYERS, "last"),
}


def store(results: Path) -> str:
    data = json.loads((results / "store.json").read_text())
    lines = ["| | median GB/s | × raw, median of pairs | least … most |", "|---|---|---|---|"]
    cells = {
        "raw write, synced": ("raw_write", "raw_write"),
        "**store write**": ("store_write", "raw_write"),
        "raw read": ("raw_read", "raw_read"),
        "**store read**, mapped, in order": ("store_read", "raw_read"),
        "shuffled batches of 4,096": ("shuffled_read", "raw_read"),
    }
    for name, (cell, base) in cells.items():
        speeds = [one[cell] / 1e9 for one in data["rounds"]]
        ratios = [one[cell] / one[base] for one in data["rounds"]]
        spread = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} … {max(ratios):.2f}" if cell != base else "|"
        lines.append(f"| {name} | {statistics.median(speeds):.2f} | {spread} |")
    size = f"{data['rows']:,} rows × {data['hidden']} bfloat16, {data['bytes'] / 1e9:.1f} GB in {data['shards']} shards"
    lines += ["", f"{size}; {len(data['rounds'])} rounds in turns, nothing in the page cache before a reading; "]
    lines[-1] += f"{data['machine']['cores']} cores, {data['machine']['processor']}, shared with other work."
    return "\n".join(lines)


def scale(results: Path) -> str:
    data = json.loads((results / "gpu" / "speed-qwen2.5-3b.json").read_text())
    work, cells = data["configuration"], data["cells"]
    lines = [
        "| what is kept | bytes per token | on disk | shards | GPU hours | GB/s per GPU | done in an hour by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (rows, layers, like) in _CHOICES.items():
        each = rows * layers * HIDDEN * 2  # bytes of a document
        total, shards = each * TOKENS // DOCUMENT, math.ceil(TOKENS / DOCUMENT / shard_size(each))
        rate = work["batch"] * (work["prefill"] + work["decode"]) / statistics.median(cells[like]["tapped_s"])
        hours, gigabytes = TOKENS / rate / 3600, total / 1e9 / 3600
        disks, links = math.ceil(gigabytes), math.ceil(gigabytes / 1.25)
        needed = f"{math.ceil(hours)} GPUs, {disks} × 1 GB/s of disk, {links} × 10 Gbit/s"
        lines.append(
            f"| {name} | {each / DOCUMENT:,.0f} | {_size(total)} | {shards:,} | {hours:.1f} "
            f"| {each / DOCUMENT * rate / 1e9:.3f} | {needed} |"
        )
    lines += [
        "",
        f"{TOKENS / 1e9:.0f} billion tokens in documents of {DOCUMENT:,}; {LAYERS} layers × {HIDDEN}, bfloat16. "
        f"GPU hours from requests of {work['prefill']} prompt and {work['decode']} generated tokens, {work['batch']} "
        f"at a time, on one {data['hardware']['gpu']} ({work['model']}, vLLM {data['versions']['vllm']}); reading "
        "documents generates nothing, which takes less. Writing rows to disk is not in them.",
    ]
    return "\n".join(lines)


def _size(size: float) -> str:
    return f"{size / 1e12:,.1f} TB" if size >= 1e12 else f"{size / 1e9:,.0f} GB"
