"""Directions through the MLPs and the attention of a tuned SmolLM2, and whether z-scores mean what they say.

`python -m bench.studies.layers --work DIR --out bench/results/layers_study.json` takes vectors and the tuned
copy that analysis_study left in DIR, runs both passes on the two checkpoints and writes the page anew. Apart from that,
200 random directions take the place of named ones: how many of them are called extreme, |z| > 3?
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console
from torch import Tensor

from bench.machine import commit, machine
from steerscope.analysis.attention import BEYOND, attention_pass, layer_tables, see
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.directions import Directions, components, load_directions
from steerscope.analysis.layerwise import Inputs, along, mlp_pass, z_by_rank
from steerscope.analysis.onelayer import OneLayer
from steerscope.analysis.report import analysis_page
from steerscope.analysis.results import AnalysisResult, load_results, where
from steerscope.files import atomic_path
from steerscope.vectors.files import save

CHANGES = ("z_change_parallel", "against_z_change_parallel")
MODEL, NAMED, RANDOM, DISTANCE, COMPONENTS = "smollm2-135m", 200, 1024, 1, 10


def calibration(progress: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Per cent of random directions beyond |z| = 3, on average and in the worst layer; `plain` is (x − mean) / std."""
    checkpoint = Checkpoint(MODEL)
    model = OneLayer(checkpoint)
    rows = np.random.default_rng(1).standard_normal((1, NAMED, checkpoint.hidden)).astype(np.float32)
    inputs = Inputs.of(Directions(tuple(map(str, range(NAMED))), ("",) * NAMED, (None,), rows), 0, RANDOM, 0)
    shares: dict[str, list[float]] = {}
    for layer in range(checkpoint.layers):
        with model.at(layer):
            added, seen = along(inputs.units, model.mlp(inputs.rows)), see(model, inputs, DISTANCE)
        measured = {"MLP, parallel": added["parallel"], "MLP, norm": added["norm"]}
        cases = {name: (values[: 2 * NAMED], values[2 * NAMED :]) for name, values in measured.items()}
        for name, values in (("affinity for itself", seen.own), ("written along itself", seen.write)):
            cases[f"{name}, single heads"] = values[:-1, :NAMED], values[:-1, NAMED:]
        for name, (values, baseline) in cases.items():
            plain = (values - baseline.mean(-1, keepdim=True)) / baseline.std(-1, keepdim=True)
            shares.setdefault(f"{name} (plain)", []).append(_beyond(plain))
            shares.setdefault(name, []).append(_beyond(z_by_rank(values, baseline)))
        pairs = layer_tables(inputs, layer, [seen])["beyond"]["percent"].to_numpy()
        shares.setdefault("pairs, single heads", []).append(float(pairs[:-1].mean()))
        progress(f"calibration, layer {layer + 1} of {checkpoint.layers}")
    return {name: {"mean": float(np.mean(found)), "worst": max(found)} for name, found in shares.items()}


def _beyond(z: Tensor) -> float:
    return 100 * float((z.abs() > BEYOND).float().mean())


def passes(work: Path, progress: Callable[[str], None]) -> dict[str, object]:
    """Both passes over all vectors of the study and the components, between the two checkpoints."""
    vectors, report = work / "vectors", work / "report"
    folder = report / "components"
    folder.mkdir(parents=True, exist_ok=True)
    for name, vector in (
        components(load_directions([vectors / "roles", vectors / "traits"]), COMPONENTS).vectors().items()
    ):
        save(vector, folder / f"{name}.safetensors")
    directions = load_directions([*(vectors / kind for kind in ("contrast", "roles", "traits")), folder])
    base, tuned, exchanged = Checkpoint(MODEL), Checkpoint(work / "tuned"), load_directions([vectors / "shuffled"])
    told = lambda what, done, total: progress(f"{what}, layer {done} of {total}")  # noqa: E731
    found: dict[str, object] = {"directions": len(directions.names)}
    for run in (
        lambda: mlp_pass(base, directions, tuned, random=RANDOM, against=exchanged, progress=told),
        lambda: attention_pass(
            base, directions, tuned, distance=DISTANCE, random=RANDOM, against=exchanged, progress=told
        ),
    ):
        clock, processor = time.perf_counter(), time.process_time()
        result = run()
        seconds = {"clock": time.perf_counter() - clock, "processor": time.process_time() - processor}
        result.save(report)
        found[result.kind] = {**_told(result), "seconds": seconds}
    with atomic_path(report / "index.html") as page:
        page.write_text(analysis_page(load_results(report)), encoding="utf-8")
    return found


def _told(result: AnalysisResult) -> dict[str, object]:
    ranked = result.tables["ranking"]
    first = {
        name: where(ranked, "measure", name).slice(0, 3).to_pylist()
        for name in dict.fromkeys(ranked["measure"].to_pylist())
    }
    told = {name: result.about[name] for name in ("focus", "groups")}
    contrast = where(where(result.tables["written"], "group", "contrast"), "sign", 1)
    told["contrast"] = {
        name: {z: float(np.abs(where(contrast, "name", name)[z].to_numpy()).mean()) for z in CHANGES}
        for name in dict.fromkeys(contrast["name"].to_pylist())
    }
    if result.kind == "attention":
        pairs, top = result.tables["pairs"], result.tables["top"]
        told["pairs"] = pairs.num_rows
        told["significant"] = {p: int((pairs[p].to_numpy() < 0.05).sum()) for p in ("p", "p_change")}
        queries, keys = pairs["query"].to_pylist(), pairs["key"].to_pylist()
        own = pairs.filter(pa.array([a == b for a, b in zip(queries, keys, strict=True)]))
        told["selves"] = {p: int((own[p].to_numpy() < 0.05).sum()) for p in ("p", "p_change")}
        told["top"] = {by: where(top, "by", by).slice(0, 5).to_pylist() for by in ("z", "z_change")}
    return {**told, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder of analysis_study")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    console = Console(stderr=True)
    began = torch.get_num_threads()
    found = {"model": MODEL, "commit": commit(), "machine": machine(), "threads": began}
    found |= {"named": NAMED, "random": RANDOM, "distance": DISTANCE}
    found |= {"calibration": calibration(console.print), **passes(args.work, console.print)}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {args.out} and {args.work / 'report' / 'index.html'}")


if __name__ == "__main__":
    main()
