"""Vectors, axis and caps from the answers and scores of a run; no model is needed.

**Keys** are the tensors of persona files: `pos_0` … `pos_3`, `pos_all`; `pos_neg`, `pos_neg_50`, … Keys of a role are
means over the answers with that score. Keys of a trait are differences of means over pairs of answers to the same
question, `_50` over the pairs whose scores differ by more than 50, and means of its pos answers with scores from 70,
and from 40 to below 70. A key without answers is left out, because a vector of zeros would look like a measurement;
so is a key of scores with few answers.

**The axis** is the first principal component of the mean rows of roles at each layer, with length 1 and the default on
its positive side. `contrast_axis` is the mean of the default minus the mean of the roles, with its own length. A cap
keeps the projection of every row above a floor, which is a percentile of the projections of known answers.
"""

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.judges import REFUSAL, Score
from steerscope.extraction.personas.run import Folder, PersonaRollout, PersonaRun, load_run, score_id, text_of
from steerscope.extraction.runs import write_json
from steerscope.extraction.strategies import first_axis, towards
from steerscope.files import atomic_path, write_text
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import LayersLike, Steering, checked_layers
from steerscope.vectors.files import load, save
from steerscope.vectors.vector import SteeringVector

PERCENTILES = (1.0, 25.0, 50.0, 75.0)
TRUSTED = 5  # answers or pairs; keys that depend on scores are left out where they are fewer
FEWEST_ROLES = 3  # the first component of two is only the line between them
APART = 50.0
_CHOICES = {"roles": ("pos_3", "pos_all"), "traits": ("pos_neg_50", "pos_neg")}  # best first
_NEED_NO_SCORE = ("pos_all", "pos_neg", "pos_default")
Summary = dict[str, Any]
Keys = dict[str, tuple[Tensor, int]]  # the tensor, and the number of answers or pairs behind it


# --- keys


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of one persona: rollouts, the mean row [layers, hidden] of each, and scores (None: not judged)."""

    asked: Sequence[PersonaRollout]
    means: Tensor
    scores: Sequence[Score | None]

    def select(self, *labels: str) -> list[int]:
        return [i for i, one in enumerate(self.asked) if one.label in labels]

    def number(self, i: int) -> float:
        """Return a score, NaN where it is no number."""
        score = self.scores[i]
        return float("nan") if score is None or score == REFUSAL else score

    def mean(self, places: Sequence[int]) -> Tensor:
        return self.means[torch.tensor(places)].double().mean(0)

    def of_scores(self, fits: Callable[[float], bool]) -> list[int]:
        """Return the pos answers whose score is a number that fits."""
        return [i for i in self.select("pos") if not np.isnan(self.number(i)) and fits(self.number(i))]


def role_keys(answers: Answers) -> Keys:
    groups = {f"pos_{level}": answers.of_scores(lambda score, at=level: round(score) == at) for level in range(4)}
    return _means(answers, {**groups, "pos_all": answers.select("pos")})


def trait_keys(answers: Answers, default_prompts: int) -> Keys:
    """Instruction i is paired with instruction i of the default, modulo the number of the default's instructions."""
    keys: Keys = {}
    for other in ("neg", "default"):
        pairs = _pairs(answers, other, default_prompts)
        far = [(i, j) for i, j in pairs if answers.number(i) - answers.number(j) > APART]
        for key, chosen in ((f"pos_{other}", pairs), (f"pos_{other}_{APART:.0f}", far)):
            if chosen:
                difference = answers.mean([i for i, _ in chosen]) - answers.mean([j for _, j in chosen])
                keys[key] = difference.float(), len(chosen)
    high = answers.of_scores(lambda score: score >= 70)
    middle = answers.of_scores(lambda score: 40 <= score < 70)
    return keys | _means(answers, {"pos_70": high, "pos_40_70": middle})


def _pairs(answers: Answers, other: str, default_prompts: int) -> list[tuple[int, int]]:
    """Pos answers with the other answer to the same question, without refusals."""
    place = {(one.label, one.prompt_index, one.question): i for i, one in enumerate(answers.asked)}
    pairs = []
    for i in answers.select("pos"):
        one = answers.asked[i]
        prompt = one.prompt_index % default_prompts if other == "default" else one.prompt_index
        j = place.get((other, prompt, one.question))
        if j is not None and REFUSAL not in (answers.scores[i], answers.scores[j]):
            pairs.append((i, j))
    return pairs


def _means(answers: Answers, groups: dict[str, list[int]]) -> Keys:
    return {key: (answers.mean(group).float(), len(group)) for key, group in groups.items() if group}


# --- axis and caps


def principal_axis(roles: Tensor, default: Tensor, model: str | None = None) -> SteeringVector:
    """Return the axis of role means [roles, layers, hidden] and the default's mean [layers, hidden]."""
    if len(roles) < FEWEST_ROLES:
        what = f"an axis of {len(roles)} roles says nothing"
        raise InvalidRequest([Problem("roles", what, f"give at least {FEWEST_ROLES}")])
    spread = roles.double() - roles.double().mean(0)
    means = torch.cat([roles, default[None]])
    first = towards(first_axis(spread), means, torch.arange(len(means)) == len(roles))
    along = (spread * first).sum(-1).square().sum(0)
    whole = spread.square().sum((0, 2))
    explained = [round(float(share), 4) for share in along / whole.clamp_min(1e-30)]  # 0 where all roles are alike
    return SteeringVector(
        dict(enumerate(first)),
        model=model,
        method="first PC of role means",
        provenance={"name": "axis", "roles": len(roles), "explained": explained},  # type: ignore[dict-item]
    )


def contrast_axis(roles: Tensor, default: Tensor, model: str | None = None) -> SteeringVector:
    """Return the default's mean minus the mean of the roles' means."""
    found = (default.double() - roles.double().mean(0)).float()
    provenance = {"name": "axis-contrast", "roles": len(roles)}
    return SteeringVector(dict(enumerate(found)), model=model, method="default - roles", provenance=provenance)


def thresholds(vector: SteeringVector, rows: Tensor, percentile: float) -> dict[int, float]:
    """Return, by layer, the percentile of the projections of rows [n, layers, hidden] on the unit directions."""
    if not 0 <= percentile <= 100:
        raise InvalidRequest([Problem("percentile", f"is {percentile:g}", "choose 0 to 100")])
    layers = vector.layers or range(rows.shape[1])
    return {k: float(np.percentile(vector.projection(rows[:, k], k).numpy(), percentile)) for k in layers}


def floor(vector: SteeringVector, limits: Mapping[int, float], tokens: str = "all") -> Steering:
    """Return a cap for each layer that keeps projections from falling below its limit."""
    return Steering.of(*(vector.at(k).cap(min=limit, layers=k, tokens=tokens) for k, limit in limits.items()))


def write_capping(
    path: Path, vector: SteeringVector, experiments: Mapping[str, Mapping[int, float]], name: str = "axis"
) -> None:
    """Write floors as a `capping_config.pt`. Its caps are upper bounds: a floor along v becomes a ceiling along -v."""
    layers = sorted({layer for floors in experiments.values() for layer in floors})
    turned = -vector.at(layers).normalised()
    data = {
        "vectors": {f"layer_{k}/{name}": {"vector": turned[k].clone(), "layer": k} for k in layers},
        "experiments": [
            {"id": id, "interventions": [{"vector": f"layer_{k}/{name}", "cap": -x} for k, x in floors.items()]}
            for id, floors in experiments.items()
        ],
    }
    write_pt(path, data)


def write_pt(path: Path, data: object) -> None:
    """Write the same bytes for the same data: `torch.save` to a path stores the name of the temporary file."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


def cap_layers(layers: LayersLike | None, n_layers: int) -> tuple[int, ...]:
    """Return the layers to cap; by default those from 70 to 85 percent of the depth."""
    first = min(round(0.7 * n_layers), n_layers - 1)
    try:
        wanted = range(first, max(round(0.85 * n_layers), first + 1)) if layers is None else checked_layers(layers)
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        raise InvalidRequest([Problem("layers", what, remedy)]) from None
    chosen = tuple(range(n_layers)) if wanted == "all" else tuple(wanted)
    if chosen[-1] >= n_layers:
        what = f"layer {chosen[-1]} is out of range"
        raise InvalidRequest([Problem("layers", what, f"the model has layers 0–{n_layers - 1}")])
    return chosen


# --- the files of a run


def build(out: Path, *, layers: LayersLike | None = None, percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """Write vectors of all personas, the axis of the roles, and caps on it at some layers; return summary.json."""
    run = load_run(out)
    assert run.model is not None
    chosen_layers = cap_layers(layers, run.model.layers)
    made = _Build(out, run, run.model.name)
    summary: Summary = {"personas": {run.default.name: made.ground_files()}}
    summary["personas"] |= {persona.name: made.persona_files(persona) for persona in run.personas}
    if len(made.means) >= FEWEST_ROLES:
        summary["axis"] = made.axis_files(chosen_layers, percentiles)
    summary["files"] = sorted(made.files)
    _remove_stale(out, made.files)
    write_json(out / "summary.json", summary)
    return summary


class _Build:
    """One build: `files` are the files written so far, `means` the mean row of each role."""

    def __init__(self, out: Path, run: PersonaRun, model: str) -> None:
        self.out = out
        self.run = run
        self.model = model
        self.files: list[str] = []
        self.means: dict[str, Tensor] = {}
        self.default = gather(run, Folder(out), run.default)
        if not len(self.default.means):
            remedy = "go on with personas run --resume"
            raise InvalidRequest([Problem(str(out), "holds no answer of the default", remedy)])
        self.ground = self._default_mean()
        for name in ("vectors/roles", "vectors/traits", "steering"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def _default_mean(self, questions: Sequence[str] | None = None) -> Tensor:
        """Return the mean of the default's answers to some questions; of all where it has answered none of them."""
        asked = self.default.asked
        some = [i for i, one in enumerate(asked) if questions is None or one.question in questions]
        return self.default.mean(some or range(len(asked))).float()

    def _path(self, name: str) -> Path:
        self.files.append(name)
        return self.out / name

    def ground_files(self) -> Summary:
        counts = {"answers": len(self.default.means)}
        data = {"activations": {"default_1": self.ground}, "metadata": counts}
        write_pt(self._path("vectors/default_vectors.pt"), data)
        return {"kind": "default", **counts}

    def persona_files(self, persona: Persona) -> Summary:
        """Write the keys of a persona and its steering vector; return its summary."""
        run = self.run
        answers = gather(self.run, Folder(self.out), persona)
        is_role = persona.kind == "roles"
        keys = role_keys(answers) if is_role else trait_keys(answers, len(run.default.instructions))
        keys = {key: found for key, found in keys.items() if key in _NEED_NO_SCORE or found[1] >= TRUSTED}
        summary = _persona_summary(persona, answers, keys)
        if keys:
            tensors = {key: value for key, (value, _) in keys.items()}
            write_pt(self._path(f"vectors/{persona.kind}/{persona.name}.pt"), tensors)
        key = next((key for key in _CHOICES[persona.kind] if key in keys), None)
        if key is None:
            return summary
        name, (rows, count) = key, keys[key]
        if is_role:
            own = self._default_mean(run.questions(persona))
            name += "-default_1" if torch.equal(own, self.ground) else "-default of the same questions"
            self.means[persona.name] = rows + (self.ground - own)  # as if it had been asked all questions
            rows = rows - own
        about = {"name": persona.name, "key": name, "answers": count, "judge": run.judge}
        about |= {"tokens": "mean of the response"}
        vector = SteeringVector(dict(enumerate(rows)), model=self.model, method="persona", provenance=about)
        _save(vector, self._path(f"steering/{persona.name}.safetensors"))
        return summary | {"steering": name}

    def axis_files(self, layers: Sequence[int], percentiles: Sequence[float]) -> Summary:
        """Write both axes and caps: floors at percentiles of the projections of the default's answers."""
        roles = torch.stack(list(self.means.values()))
        axis = principal_axis(roles, self.ground, self.model)
        contrast = contrast_axis(roles, self.ground, self.model)
        _save(axis, self._path("steering/axis.safetensors"))
        _save(contrast, self._path("steering/axis-contrast.safetensors"))
        # As in public capping configs: the first layer, and the one after the last.
        gapless = len(layers) == layers[-1] - layers[0] + 1
        span = f"{layers[0]}:{layers[-1] + 1}" if gapless else ",".join(map(str, layers))
        experiments = {}
        for percentile in percentiles:
            limits = thresholds(axis.at(list(layers)), self.default.means, percentile)
            experiments[f"layers_{span}-p{percentile / 100:g}"] = limits
            write_text(self._path(f"steering/cap-p{percentile:g}.json"), floor(axis, limits).to_json())
        write_capping(self._path("steering/capping_config.pt"), axis, experiments)
        middle = layers[len(layers) // 2]
        means = {**self.means, "default": self.ground}
        places = {name: round(float(axis.projection(rows[middle], middle)), 4) for name, rows in means.items()}
        return {
            "roles": list(self.means),
            "layer": middle,
            "explained": axis.provenance["explained"][middle],  # type: ignore[index]
            "cosine_with_contrast": round(axis.cosine(contrast)[middle], 4),
            "projections": dict(sorted(places.items(), key=lambda pair: pair[1])),
            "experiments": {id: {str(k): round(x, 4) for k, x in limits.items()} for id, limits in experiments.items()},
        }


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


def _save(vector: SteeringVector, path: Path) -> None:
    """Write a vector unless the file already holds it."""
    if not path.is_file() or not load(path).equals(vector):
        save(vector, path)


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
