"""The same vector from both engines, in float32 and bfloat16, side by side.

`python -m bench.studies.precision --out bench/results/precision.json` extracts happy/sad from SmolLM2 in four
processes, those of vLLM with another Python, and compares each vector with that of transformers in float32. A cell that
cannot run on this machine is kept with its error.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from bench.machine import commit, machine
from bench.peers.run import call, error_line
from steerscope.engines.load import load
from steerscope.extraction import load_contrast_set, mean_difference
from steerscope.specs.errors import SteerscopeError
from steerscope.vectors import files

MODEL, SET = "smollm2-135m", "happy_sad"
_LINEAR = torch.nn.functional.linear
CELLS: tuple[tuple[Literal["hf", "vllm"], str], ...] = (
    ("hf", "float32"),
    ("vllm", "float32"),
    ("hf", "bfloat16"),
    ("vllm", "bfloat16"),
)


def extract(engine: Literal["hf", "vllm"], dtype: str, path: Path) -> None:
    if engine == "hf" and not torch.cuda.is_available():
        torch.nn.functional.linear = (
            _linear  # torch is 250 times slower in bfloat16 on CPUs that have no such arithmetic
        )
    options = {"vllm": {"enforce_eager": True, "max_model_len": 256}} if engine == "vllm" else {}
    with load(MODEL, engine=engine, dtype=dtype, max_batch=32, **options) as model:  # type: ignore[arg-type]
        files.save(mean_difference(model, load_contrast_set(SET).extraction, data_name=SET), path)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As in bfloat16: products summed in float32, then rounded."""
    return _LINEAR(rows.float(), weight.float(), None if bias is None else bias.float()).to(rows.dtype)


def compare(folder: Path, errors: dict[str, str]) -> dict[str, dict]:
    """Cosine with the first cell's vector at each layer, and how much longer each is."""
    names = [f"{engine} {dtype}" for engine, dtype in CELLS]
    vectors = {name: files.load(_file(folder, *name.split())) for name in names if name not in errors}
    if names[0] in errors:
        raise SteerscopeError(f"there is nothing to compare with: {names[0]} failed: {errors[names[0]]}")
    first = vectors[names[0]]
    norms = first.norms()
    return {
        name: {
            "cosine": list(first.cosine(vector).values()),
            "length": [norm / norms[layer] for layer, norm in vector.norms().items()],
        }
        for name, vector in vectors.items()
    } | {name: {"error": error} for name, error in errors.items()}


def _file(folder: Path, engine: str, dtype: str) -> Path:
    return folder / f"{engine}-{dtype}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="required, but for --cell")
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--seconds", type=float, default=600.0, help="the longest a cell may take")
    parser.add_argument("--cell", nargs=3, metavar=("ENGINE", "DTYPE", "FILE"), help="one vector, in this process")
    args = parser.parse_args()
    if args.cell:
        engine, dtype, path = args.cell
        return extract(engine, dtype, Path(path))
    if args.out is None:
        parser.error("--out is required")
    console = Console(stderr=True)
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for engine, dtype in CELLS:
            console.print(f"{engine}, {dtype} …")
            python = str(args.vllm_python) if engine == "vllm" else sys.executable
            cell = ["--cell", engine, dtype, str(_file(folder, engine, dtype))]
            try:
                call([python, "-m", "bench.studies.precision", *cell], timeout_s=args.seconds)
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                errors[f"{engine} {dtype}"] = error_line(error)
                console.print(errors)
        cells = compare(folder, errors)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result = {"model": MODEL, "set": SET, "commit": commit(), "machine": machine(), "gpu": gpu, "cells": cells}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
