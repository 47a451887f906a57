"""The vectors of steering-vectors for bench/studies/extraction_peers.py: its mean and its PCA, at the last token."""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from steering_vectors import (  # pyright: ignore[reportMissingImports]
    mean_aggregator,
    pca_aggregator,
    train_steering_vector,
)
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--pairs", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    found: dict[str, np.ndarray] = {"version": np.array(version("steering-vectors"))}
    for name, given in json.loads(args.pairs.read_text()).items():
        pairs = [tuple(pair) for pair in given]
        for method, aggregator in (("mean", mean_aggregator()), ("pca", pca_aggregator())):
            vector = train_steering_vector(model, tokenizer, pairs, aggregator=aggregator)
            found |= {f"{name} {method} {layer}": rows.numpy() for layer, rows in vector.layer_activations.items()}
    np.savez(args.out, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
