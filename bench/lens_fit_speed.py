"""How well lenses trained on the shipped concepts read texts of forms they have never seen.

`python -m bench.lens_fit_speed --out bench/results/lens_fit.json` fits the concepts on the embedded SmolLM2 once
for each fold. A fold holds out a quarter of the forms of text (dialogues, headlines, …); over all folds every form is
held out once. The headline is the AUROC per text (mean logit of its tokens), averaged over the folds for each concept,
median over concepts; the same per token stands beside it. Layers are chosen by validation forms, which are neither
trained on nor tested. A control with exchanged labels must end near 0.5.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.machine import commit, machine
from steerscope.engines.load import load
from steerscope.lenses.fit import FitSettings
from steerscope.training.concepts import FOLDS, ConceptSet, load_concepts
from steerscope.training.lenses import LensFit, LensSettings, fit_pack

MODEL, LAYERS = "smollm2-135m", (8, 10, 12, 14, 16, 18, 20)


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, quartiles, the least, and how many reach 0.9."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    least, share = values.min(), (values >= 0.9).mean()
    found = {
        "median": median,
        "lower_quartile": low,
        "upper_quartile": high,
        "least": least,
        "share_at_least_0.9": share,
    }
    return {name: round(float(value), 4) for name, value in found.items()}


def of_fold(done: LensFit, seconds: float) -> dict[str, object]:
    notes = done.pack.info.training
    result: dict[str, object] = {
        "forms": notes["forms"],
        "layer": done.pack.info.layer,
        "validation_auroc_of_layers": {str(layer): round(value, 4) for layer, value in done.layers.items()},
        "seconds": round(seconds, 1),
        "per_text": spread(done.texts.auroc),
        "per_token": spread(done.rows.auroc),
    }
    if done.control:
        result["control"] = {"per_text": spread(done.control[1].auroc), "per_token": spread(done.control[0].auroc)}
    return result


def over_folds(concepts: ConceptSet, fits: list[LensFit]) -> dict[str, object]:
    """Each concept's mean over the folds, then the spread over concepts; and the concepts that are hardest to read."""
    text, token = (np.mean([getattr(done, kind).auroc for done in fits], axis=0) for kind in ("texts", "rows"))
    f1, ap = (np.mean([getattr(done.texts, kind) for done in fits], axis=0) for kind in ("f1", "ap"))
    levels = np.array(concepts.levels)
    hardest = [(concepts.concepts[i].id, round(float(text[i]), 3)) for i in text.argsort()[:8]]
    return {
        "per_text": spread(text),
        "per_token": spread(token),
        "per_text_by_level": {str(level): spread(text[levels == level]) for level in sorted(set(concepts.levels))},
        "per_text_median_average_precision": round(float(np.median(ap)), 4),
        "per_text_median_f1": round(float(np.median(f1)), 4),
        "hardest": dict(hardest),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("bench-report/lens_fit"), help="rows and packs")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--folds", type=int, default=FOLDS)
    args = parser.parse_args()
    console, concepts, made_by = Console(stderr=True), load_concepts(), commit()
    args.work.mkdir(parents=True, exist_ok=True)
    chosen = FitSettings(widths=()) if args.linear else FitSettings()
    base = LensSettings(layers=LAYERS, fit=chosen, name="shipped")
    kind = "linear" if args.linear else "hidden layers"
    fits, folds = [], []
    with load(MODEL, max_batch=64, progress=console.print) as engine:
        for fold in range(args.folds):
            began = time.perf_counter()
            settings = base.model_copy(update={"fold": fold, "control": fold == 0})
            out = args.work / f"{kind.replace(' ', '-')}-{fold}"
            fits.append(fit_pack(engine, concepts, out, settings, work=args.work / "rows"))
            folds.append(of_fold(fits[-1], time.perf_counter() - began))
            console.print_json(data=folds[-1])
    result = {
        "model": MODEL,
        "commit": made_by,
        "machine": machine(),
        "concepts": len(concepts),
        "texts": len(concepts.examples),
        "lenses": kind,
        "settings": base.model_dump(mode="json"),
        "headline": "per_text median: AUROC of mean token logits on held-out forms, mean of folds, median of concepts",
        **over_folds(concepts, fits),
        "control": folds[0]["control"],
        "folds": folds,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    console.print_json(data={key: result[key] for key in ("per_text", "per_token", "control", "hardest")})


if __name__ == "__main__":
    main()
