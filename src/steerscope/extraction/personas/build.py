"""Vectors, axis and caps from the answers and scores of a run; no model is needed."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steerscope.extraction.personas.axis import (
    FEWEST_ROLES,
    cap_layers,
    contrast_axis,
    floor,
    principal_axis,
    thresholds,
    write_capping,
)
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.folder import Folder, write_pt
from steerscope.extraction.personas.keys import Answers, Keys, role_keys, trait_keys
from steerscope.extraction.personas.rollouts import text_of
from steerscope.extraction.personas.run import PersonaRun, load_run, score_id
from steerscope.extraction.runs import write_json
from steerscope.files import write_text
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import LayersLike
from steerscope.vectors.files import load, save
from steerscope.vectors.vector import SteeringVector

PERCENTILES = (1.0, 25.0, 50.0, 75.0)
TRUSTED = 5  # answers or pairs; keys that depend on scores are left out where they are fewer
_CHOICES = {"roles": ("pos_3", "pos_all"), "traits": ("pos_neg_50", "pos_neg")}  # best first
_NEED_NO_SCORE = ("pos_all", "pos_neg", "pos_default")
Summary = dict[str, Any]


def build(out: Path, *, layers: LayersLike | None = None, percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """Write vectors of all personas, the axis of the roles, and caps on it at some layers; return summary.json."""
    run, folder = load_run(out), Folder(out)
    assert run.model is not None
    chosen_layers = cap_layers(layers, run.model.layers)
    default = gather(run, folder, run.default)
    if not len(default.means):
        raise InvalidRequest([Problem(str(out), "holds no answer of the default", "go on with personas run --resume")])
    for name in ("vectors/roles", "vectors/traits", "steering"):
        (out / name).mkdir(parents=True, exist_ok=True)
    ground = _ground(default)
    counts = {"answers": len(default.means)}
    write_pt(out / "vectors" / "default_vectors.pt", {"activations": {"default_1": ground}, "metadata": counts})
    personas: Summary = {run.default.name: {"kind": "default", **counts}}
    means: dict[str, Tensor] = {}
    for persona in run.personas:
        answers = gather(run, folder, persona)
        keys = _keys(run, persona, answers)
        personas[persona.name] = _persona_summary(persona, answers, keys)
        if keys:
            tensors = {key: value for key, (value, _) in keys.items()}
            write_pt(out / "vectors" / persona.kind / f"{persona.name}.pt", tensors)
        key = next((key for key in _CHOICES[persona.kind] if key in keys), None)
        if key is None:
            continue
        name, (rows, count) = key, keys[key]
        if persona.kind == "roles":
            own = _ground(default, run.questions(persona))
            name += "-default_1" if torch.equal(own, ground) else "-default of the same questions"
            means[persona.name] = rows + (ground - own)  # as if it had been asked all questions
            rows = rows - own
        _save_contrast(out, run, persona, rows, name, count)
        personas[persona.name]["steering"] = name
    summary: Summary = {"personas": personas}
    if len(means) >= FEWEST_ROLES:
        summary["axis"] = _axis(out, run.model.name, means, default.means, ground, chosen_layers, percentiles)
    summary["files"] = _files(summary, percentiles)
    _remove_stale(out, summary["files"])
    write_json(out / "summary.json", summary)
    return summary


def _ground(default: Answers, questions: Sequence[str] | None = None) -> Tensor:
    """Return the mean of the default's answers to some questions; of all where it has answered none of them."""
    some = [i for i, one in enumerate(default.asked) if questions is None or one.question in questions]
    return default.mean(some or range(len(default.asked))).float()


def _keys(run: PersonaRun, persona: Persona, answers: Answers) -> Keys:
    keys = role_keys(answers) if persona.kind == "roles" else trait_keys(answers, len(run.default.instructions))
    return {key: found for key, found in keys.items() if key in _NEED_NO_SCORE or found[1] >= TRUSTED}


def _files(summary: Summary, percentiles: Sequence[float]) -> list[str]:
    found = ["vectors/default_vectors.pt"]
    for name, one in summary["personas"].items():
        found += [f"vectors/{one['kind']}/{name}.pt"] if one.get("keys") else []
        found += [f"steering/{name}.safetensors"] if "steering" in one else []
    if "axis" in summary:
        found += [f"steering/{name}" for name in ("axis.safetensors", "axis-contrast.safetensors", "capping_config.pt")]
        found += [f"steering/cap-p{percentile:g}.json" for percentile in percentiles]
    return sorted(found)


def _remove_stale(out: Path, written: Sequence[str]) -> None:
    """Remove files of the last build that this one did not write; other files stay."""
    try:
        before = json.loads((out / "summary.json").read_bytes())["files"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    for path in [*(out / "vectors").rglob("*"), *(out / "steering").iterdir()]:
        name = path.relative_to(out).as_posix()
        if name in before and name not in written:
            path.unlink()


def gather(run: PersonaRun, folder: Folder, persona: Persona) -> Answers:
    """Return the answers that have rows, with their scores; a trait's include the default's to the same questions."""
    assert run.model is not None
    is_default = persona.name == run.default.name
    records = dict(folder.answers(persona).records)
    if persona.kind == "traits":
        records |= folder.answers(run.default).records
    scores = {} if is_default else folder.scores(persona).records
    asked = run.asked(persona) if is_default else run.judged(persona)
    found = [one for one in asked if records.get(one.id, {}).get("shard")]
    rows = folder.shards.read([records[one.id] for one in found]) if found else torch.empty(0, run.model.layers, 0)
    ids = [score_id(run.judge or "", persona, one, text_of(records[one.id])) for one in found]
    return Answers(found, rows, [scores.get(id, {}).get("score") for id in ids])


def _persona_summary(persona: Persona, answers: Answers, keys: Keys) -> Summary:
    own = answers.select("pos", "neg")
    levels = Counter("none" if (score := answers.scores[i]) is None else str(score) for i in own)
    return {
        "kind": persona.kind,
        "answers": len(own),
        "scores": dict(sorted(levels.items(), key=lambda pair: (len(pair[0].partition(".")[0]), pair[0]))),
        "keys": {key: count for key, (_, count) in keys.items()},
    }


def _save_contrast(out: Path, run: PersonaRun, persona: Persona, rows: Tensor, key: str, count: int) -> None:
    assert run.model is not None
    about = {"name": persona.name, "key": key, "answers": count, "judge": run.judge, "tokens": "mean of the response"}
    vector = SteeringVector(dict(enumerate(rows)), model=run.model.name, method="persona", provenance=about)
    _save(vector, out / "steering" / f"{persona.name}.safetensors")


def _save(vector: SteeringVector, path: Path) -> None:
    """Write a vector unless the file already holds it."""
    if not path.is_file() or not load(path).equals(vector):
        save(vector, path)


def _axis(
    out: Path,
    model: str,
    means: dict[str, Tensor],
    default_rows: Tensor,
    ground: Tensor,
    layers: Sequence[int],
    percentiles: Sequence[float],
) -> Summary:
    """Write both axes and caps: floors at percentiles of the projections of the default's answers."""
    roles = torch.stack(list(means.values()))
    axis, contrast = principal_axis(roles, ground, model), contrast_axis(roles, ground, model)
    _save(axis, out / "steering" / "axis.safetensors")
    _save(contrast, out / "steering" / "axis-contrast.safetensors")
    experiments = {}
    for percentile in percentiles:
        limits = thresholds(axis.at(list(layers)), default_rows, percentile)
        experiments[f"layers_{_span(layers)}-p{percentile / 100:g}"] = limits
        write_text(out / "steering" / f"cap-p{percentile:g}.json", floor(axis, limits).to_json())
    write_capping(out / "steering" / "capping_config.pt", axis, experiments)
    middle = layers[len(layers) // 2]
    places = {name: float(axis.projection(rows[middle], middle)) for name, rows in {**means, "default": ground}.items()}
    return {
        "roles": list(means),
        "layer": middle,
        "explained": axis.provenance["explained"][middle],  # type: ignore[index]
        "cosine_with_contrast": round(axis.cosine(contrast)[middle], 4),
        "projections": dict(sorted(((n, round(x, 4)) for n, x in places.items()), key=lambda pair: pair[1])),
        "experiments": {name: {str(k): round(x, 4) for k, x in limits.items()} for name, limits in experiments.items()},
    }


def _span(layers: Sequence[int]) -> str:
    """As in public capping configs: the first layer, and the one after the last."""
    gapless = len(layers) == layers[-1] - layers[0] + 1
    return f"{layers[0]}:{layers[-1] + 1}" if gapless else ",".join(map(str, layers))
