"""How much memory streaming a checkpoint takes: two checkpoints of a 3B model's shape, one process, its peak.

`python -m steerscope.bench.checkpoint_memory --out bench/results/checkpoint_memory.json` writes both (bf16, a file per
layer, 12 GB in a temporary folder), and runs `steerscope analyze susceptibility` on them in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from transformers import Qwen2Config

from steerscope.bench.hf import commit, machine
from steerscope.vectors.files import save
from steerscope.vectors.vector import SteeringVector

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def write(folder: Path, seed: int) -> int:
    """Random weights, the same in every layer; the number of bytes."""
    generator = torch.Generator().manual_seed(seed)
    h, wide, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 2 * 128
    shapes = {f"self_attn.{name}_proj": (kv if name in "kv" else h, h) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (wide, h), "mlp.up_proj": (wide, h), "mlp.down_proj": (h, wide)}
    layer = {name: (0.02 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in shapes.items()}
    embedding = torch.randn(SHAPE["vocab_size"], h, generator=generator, dtype=torch.bfloat16)
    folder.mkdir()
    files = {"embedding.safetensors": {"model.embed_tokens.weight": embedding}}
    for i in range(SHAPE["num_hidden_layers"]):
        files[f"{i}.safetensors"] = {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    Qwen2Config(**SHAPE).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        work = Path(scratch)
        console.print("writing two checkpoints …")
        size = write(work / "base", 0)
        write(work / "tuned", 1)
        save(SteeringVector.shared(torch.randn(SHAPE["hidden_size"])), work / "vector.safetensors")
        console.print("susceptibility …")
        began = time.perf_counter()
        asked = ["base", "tuned", "vector.safetensors", "--out", "out"]
        command = [sys.executable, "-m", "steerscope.cli.main", "analyze", "susceptibility", *asked]
        child = subprocess.Popen(command, cwd=work)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
    if status:
        raise SystemExit(f"steerscope analyze susceptibility ended with {status}")
    result = {"commit": commit(), "machine": machine(), "shape": SHAPE, "bytes": size, "seconds": seconds}
    result |= {"processor_seconds": usage.ru_utime + usage.ru_stime, "peak_rss": usage.ru_maxrss * 1024}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print_json(data=result)


if __name__ == "__main__":
    main()
