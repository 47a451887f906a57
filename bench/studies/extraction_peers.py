"""Our vectors against those of repeng and steering-vectors: the same model, pairs and tokens.

`python -m bench.studies.extraction_peers --out bench/results/extraction_peers.json` runs each peer in an environment
of its own (see `peers/run.py`) and compares directions layer by layer. The last layer is left out: repeng reads it
behind the final norm.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from bench.machine import commit, machine
from bench.peers.run import HERE, call, ensure_venv
from steerscope.engines.load import load
from steerscope.extraction import Examples, load_contrast_set
from steerscope.extraction.data import shipped_sets
from steerscope.extraction.reading import last, read_rows
from steerscope.extraction.strategies import strategy
from steerscope.models import resolve

MODEL = "smollm2-135m"
REQUIREMENTS = {
    "repeng": ["torch==2.13.0", "transformers==5.19.0", "numpy==1.26.4", "repeng==0.4.0"],
    "steering_vectors": ["torch==2.13.0", "transformers==4.57.6", "steering-vectors==0.12.2"],
}
SAME = {  # what a peer calls it → what we do
    "repeng": {"pca_diff": "paired_pca", "pca_center": "centred_pca"},
    "steering_vectors": {"mean": "mean_difference", "pca": "centred_pca"},
}


def theirs(peer: str, python: Path, pairs: dict[str, list[tuple[str, str]]]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        given, output = Path(folder) / "pairs.json", Path(folder) / "vectors.npz"
        given.write_text(json.dumps(pairs))
        script = HERE / f"extract_{peer}.py"
        call([str(python), str(script), f"--model={resolve(MODEL)}", f"--pairs={given}", f"--out={output}"])
        with np.load(output) as found:
            return dict(found)


def compare(found: dict[str, np.ndarray], method: str, ours: Tensor, differences: Tensor) -> dict[str, object]:
    """Cosine, but for the sign, at every layer both have, without the last; and how much longer ours is.

    Signs of a PCA are a choice: ours and that of steering-vectors follow the mean difference of the pairs, repeng's the
    majority of them. Where they part, `other_sign` tells for how many pairs ours is right.
    """
    layers = [layer for layer in range(len(ours) - 1) if f"{method} {layer}" in found]
    other = torch.stack([torch.from_numpy(found[f"{method} {layer}"]).double() for layer in layers])
    mine = ours[layers].double()
    cosines = torch.nn.functional.cosine_similarity(mine, other, dim=-1)
    lengths = mine.norm(dim=-1) / other.norm(dim=-1)
    right = ((differences.double() * ours.double()).sum(-1) > 0).sum(0)
    return {
        "layers": len(layers),
        "least_cosine": float(cosines.abs().min()),
        "median_cosine": float(cosines.abs().median()),
        "lengths": [float(lengths.min()), float(lengths.max())],
        "other_sign": {str(layer): int(right[layer]) for layer, x in zip(layers, cosines, strict=True) if x < 0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--venvs", type=Path, default=Path(".cache/peers"), help="where their environments are kept")
    args = parser.parse_args()
    console, sets = Console(stderr=True), {name: load_contrast_set(name).extraction for name in shipped_sets()}
    directions: dict[tuple[str, str], Tensor] = {}
    differences: dict[str, Tensor] = {}
    with load(MODEL, max_batch=32, progress=console.print) as engine:
        for name, pairs in sets.items():
            data = Examples.of_pairs(pairs)
            rows = read_rows(engine, data.texts, last())
            positive, numbers = torch.tensor(data.positive), torch.tensor(data.pairs)
            differences[name] = rows[: len(pairs)] - rows[len(pairs) :]
            for ours in {ours for same in SAME.values() for ours in same.values()}:
                directions[name, ours] = strategy(ours)(rows, positive, numbers)
    result: dict[str, object] = {"model": MODEL, "commit": commit(), "machine": machine()}
    peers = result["peers"] = {}
    texts = {name: [(pair.positive, pair.negative) for pair in pairs] for name, pairs in sets.items()}
    for peer, same in SAME.items():
        python = ensure_venv(args.venvs.absolute() / peer, REQUIREMENTS[peer], console.print)
        console.print(f"{peer} …")
        found = theirs(peer, python, texts)
        peers[peer] = {"version": str(found["version"]), "sets": {}}
        for name in sets:
            peers[peer]["sets"][name] = {
                method: {"ours": ours, **compare(found, f"{name} {method}", directions[name, ours], differences[name])}
                for method, ours in same.items()
            }
        console.print_json(data=peers[peer])
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
