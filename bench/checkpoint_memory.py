"""How much memory streaming a checkpoint takes: two checkpoints of a 3B model's shape, one process, its peak.

`python -m bench.checkpoint_memory --out bench/results/checkpoint_memory.json` writes both (bf16, a file per
layer, 12 GB in a temporary folder), and runs each pass of `steerscope analyze` on them, through all layers, in a
process of its own. With `--device cuda` the passes run on a GPU; the memory is the host's.
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

from bench.machine import commit, machine
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

PASSES = {
    "susceptibility": ["base", "tuned", "vector.safetensors"],
    "mlp": ["base", "vector.safetensors", "--tuned", "tuned"],
    "attention": ["base", "vector.safetensors", "--tuned", "tuned"],
}


def write(folder: Path, seed: int) -> int:
    """Random weights, the same in every layer; the number of bytes."""
    generator = torch.Generator().manual_seed(seed)
    h, wide, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 2 * 128
    shapes = {f"self_attn.{name}_proj": (kv if name in "kv" else h, h) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (wide, h), "mlp.up_proj": (wide, h), "mlp.down_proj": (h, wide)}
    layer = {
        f"{name}.weight": (0.02 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in shapes.items()
    }
    layer |= {f"self_attn.{name}_proj.bias": torch.zeros(kv if name in "kv" else h).bfloat16() for name in "qkv"}
    layer |= {f"{name}_layernorm.weight": torch.ones(h).bfloat16() for name in ("input", "post_attention")}
    embedding = torch.randn(SHAPE["vocab_size"], h, generator=generator, dtype=torch.bfloat16)
    folder.mkdir()
    files = {"embedding.safetensors": {"model.embed_tokens.weight": embedding}}
    for i in range(SHAPE["num_hidden_layers"]):
        files[f"{i}.safetensors"] = {f"model.layers.{i}.{name}": weight for name, weight in layer.items()}
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    Qwen2Config(**SHAPE).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        work = Path(scratch)
        console.print("writing two checkpoints …")
        size = write(work / "base", 0)
        write(work / "tuned", 1)
        direction = torch.randn(SHAPE["hidden_size"])
        save(SteeringVector.shared(direction), work / "vector.safetensors")
        passes = {}
        for name, asked in PASSES.items():
            console.print(f"{name} …")
            passes[name] = measured([name, *asked, "--out", "out", "--device", args.device], work)
            console.print_json(data=passes[name])
    result = {
        "commit": commit(),
        "machine": machine(),
        "device": args.device,
        "shape": SHAPE,
        "bytes": size,
        "passes": passes,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measured(asked: list[str], work: Path) -> dict[str, float]:
    """`steerscope analyze` in a process of its own: how long it took and the most memory it had."""
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "steerscope.cli.main", "analyze", *asked], cwd=work)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"steerscope analyze {asked[0]} ended with {status}")
    processor = usage.ru_utime + usage.ru_stime
    seconds = {"seconds": time.perf_counter() - began, "processor_seconds": processor}
    return {**seconds, "peak_rss": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    main()
