"""repeng's vectors of given pairs, for bench/studies/extraction_peers.py: both of its PCAs, at the last token."""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from repeng import ControlVector, DatasetEntry  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--pairs", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    found: dict[str, np.ndarray] = {"version": np.array(version("repeng"))}
    for name, given in json.loads(args.pairs.read_text()).items():
        pairs = [DatasetEntry(positive, negative) for positive, negative in given]
        for method in ("pca_diff", "pca_center"):
            vector = ControlVector.train(model, tokenizer, pairs, method=method)
            found |= {f"{name} {method} {layer}": direction for layer, direction in vector.directions.items()}
    np.savez(args.out, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
