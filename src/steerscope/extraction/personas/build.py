"""Files from what a run has gathered; no model is needed, and everything here may be made again at any time."""

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
from steerscope.extraction.personas.folder import write_json, write_pt
from steerscope.extraction.personas.keys import Answers, Keys, role_keys, trait_keys
from steerscope.extraction.personas.rollouts import Rollout, text_of
from steerscope.extraction.personas.run import Folder, PersonaRun, load_run, score_id
from steerscope.files import atomic_path
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import LayersLike
from steerscope.vectors.files import load, save
from steerscope.vectors.vector import SteeringVector

PERCENTILES = (1.0, 25.0, 50.0, 75.0)
TRUSTED = 5  # answers or pairs; a key of those that were judged so is left out where they are fewer
_ROLE_CHOICE, _TRAIT_CHOICE = ("pos_3", "pos_all"), ("pos_neg_50", "pos_neg")
_OF_ALL = ("pos_all", "pos_neg", "pos_default")  # need no judge
Summary = dict[str, Any]


def build(out: Path, *, layers: LayersLike | None = None, percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """Vectors of all personas, the axis of the roles, and caps on it at some layers; returns what summary.json says."""
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
        chosen = _choose(persona, keys)
        if chosen is None:
            continue
        name, difference = chosen, keys[chosen][0]
        if persona.kind == "roles":
            name, own = f"{chosen}-default_1", _ground(default, run.questions(persona))
            if not torch.equal(own, ground):
                name = f"{chosen}-default of the same questions"
            means[persona.name] = difference + (ground - own)  # as if it had been asked what all were asked
            difference = difference - own
        _save_contrast(out, run, persona, difference, name, keys[chosen][1])
        personas[persona.name]["steering"] = name
    summary: Summary = {"personas": personas}
    if len(means) >= FEWEST_ROLES:
        summary["axis"] = _axis(out, run, means, default.means, ground, chosen_layers, percentiles)
    summary["files"] = _files(summary, percentiles)
    _remove_stale(out, summary["files"])
    write_json(out / "summary.json", summary)
    return summary


def _ground(default: Answers, questions: Sequence[str] | None = None) -> Tensor:
    """The mean of the default's answers to some questions; of all where it has answered none of them."""
    some = [i for i, one in enumerate(default.asked) if questions is None or one.question in questions]
    rows = default.means[torch.tensor(some)] if some else default.means
    return rows.double().mean(0).float()


def _keys(run: PersonaRun, persona: Persona, answers: Answers) -> Keys:
    keys = role_keys(answers) if persona.kind == "roles" else trait_keys(answers, len(run.default.instructions))
    return {key: found for key, found in keys.items() if key in _OF_ALL or found[1] >= TRUSTED}


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
    """Files of the last time that were not written this time; what others put there is left alone."""
    try:
        before = json.loads((out / "summary.json").read_bytes())["files"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    for path in [*(out / "vectors").rglob("*"), *(out / "steering").iterdir()]:
        name = path.relative_to(out).as_posix()
        if name in before and name not in written:
            path.unlink()


def gather(run: PersonaRun, folder: Folder, persona: Persona) -> Answers:
    """The answers that have rows, with their scores; for a trait the default's to the same questions are among them."""
    given = dict(folder.answers(persona).records)
    if persona.kind == "traits":
        given |= folder.answers(run.default).records
    scores = folder.scores(persona).records if persona.name != run.default.name else {}
    asked = run.asked(persona) if persona.name == run.default.name else run.judged(persona)
    found: list[Rollout] = [one for one in asked if given.get(one.id, {}).get("shard")]
    assert run.model is not None
    rows = folder.shards.read([given[one.id] for one in found]) if found else torch.empty(0, run.model.layers, 0)
    ids = [score_id(run.judge or "", persona, one, text_of(given[one.id])) for one in found]
    return Answers(found, rows, [scores.get(id, {}).get("score") for id in ids])


def _choose(persona: Persona, keys: Keys) -> str | None:
    """The key that stands for a persona: the well judged answers where there are enough of them."""
    best, every = _ROLE_CHOICE if persona.kind == "roles" else _TRAIT_CHOICE
    return next((key for key in (best, every) if key in keys), None)


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
    """A file that would not change is left alone."""
    if not path.is_file() or not load(path).equals(vector):
        save(vector, path)


def _axis(
    out: Path,
    run: PersonaRun,
    means: dict[str, Tensor],
    default_rows: Tensor,
    ground: Tensor,
    chosen: Sequence[int],
    percentiles: Sequence[float],
) -> Summary:
    """Caps are floors: a row is kept at least as far on the default's side as a percentile of the default's answers."""
    assert run.model is not None
    roles = torch.stack(list(means.values()))
    axis = principal_axis(roles, ground, run.model.name)
    contrast = contrast_axis(roles, ground, run.model.name)
    _save(axis, out / "steering" / "axis.safetensors")
    _save(contrast, out / "steering" / "axis-contrast.safetensors")
    experiments = {}
    for percentile in percentiles:
        limits = thresholds(axis.at(list(chosen)), default_rows, percentile)
        experiments[f"layers_{_span(chosen)}-p{percentile / 100:g}"] = limits
        with atomic_path(out / "steering" / f"cap-p{percentile:g}.json") as temporary:
            temporary.write_text(floor(axis, limits).to_json(), encoding="utf-8")
    write_capping(out / "steering" / "capping_config.pt", axis, experiments)
    middle = chosen[len(chosen) // 2]
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
    """As the public capping configs name them: the first, and the one behind the last."""
    gapless = len(layers) == layers[-1] - layers[0] + 1
    return f"{layers[0]}:{layers[-1] + 1}" if gapless else ",".join(map(str, layers))
