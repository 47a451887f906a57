"""Conditions to compare: no steering, prompts, vectors at scales, caps at percentiles."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from steerscope.analysis.compare import LEARNED
from steerscope.evals.run import OPPOSITE, PROMPTED, UNSTEERED, Condition
from steerscope.extraction.data import parse_all
from steerscope.extraction.personas.definitions import Persona
from steerscope.files import reading
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.steering import Add, Steering
from steerscope.vectors.files import load
from steerscope.vectors.legacy import load_capping
from steerscope.vectors.text import split
from steerscope.vectors.vector import SteeringVector

_MOST_SCALES = 1000


def parse_scales(text: str) -> list[float]:
    """Parse `-8..8` (whole steps), `-8..8:4` (steps of 4), or `-2,-0.5,2`. 0, the unsteered model, is left out."""
    match = re.fullmatch(r"([^.,:]+(?:\.\d+)?)\.\.([^,:]+)(?::([^,:]+))?", text.strip())
    try:
        if match:
            low = float(match[1])
            high = float(match[2])
            step = float(match[3] or 1)
            count = math.floor((high - low) / step + 1e-9) + 1 if step > 0 and low <= high else 0
            found = [round(low + i * step, 9) for i in range(min(count, _MOST_SCALES + 2))]
        else:
            found = [float(part) for part in text.split(",")]
    except (ValueError, OverflowError):
        found = []
    found = [scale for scale in dict.fromkeys(found) if scale]
    if not found or len(found) > _MOST_SCALES or not all(map(math.isfinite, found)):
        raise InvalidRequest([Problem("scales", f"cannot read {text!r}", "write -8..8, -8..8:4 or -2,-0.5,2")])
    return found


def named_vectors(text: str) -> dict[str, SteeringVector]:
    """Read `[NAME=]FILE[@LAYERS]` with commas between them; the name is the file's unless NAME= is given."""
    found: dict[str, SteeringVector] = {}
    without_layer_commas = re.sub(r"@([\d,-]+)(?=,[^\d]|$)", lambda match: "@" + match[1].replace(",", ";"), text)
    for part in filter(None, map(str.strip, without_layer_commas.split(","))):
        given, equals, body = part.partition("=")
        path, rest = split(body if equals else part)
        vector = load(path)
        name = given if equals else Path(path).stem
        if rest and not rest.startswith("@"):
            raise _vectors_problem(f"cannot read {rest!r} after {path}", "write [NAME=]FILE[@LAYERS]")
        if name in found:
            raise _vectors_problem(f"two are called {name}", "name one: NAME=FILE")
        if not re.fullmatch(r"[\w.-]+", name):
            raise _vectors_problem(f"{name!r} is no name for a file", "use letters, digits, - and _: NAME=FILE")
        found[name] = vector.at(rest[1:].replace(";", ",")) if rest else vector
    return found


def _vectors_problem(what: str, remedy: str) -> InvalidRequest:
    return InvalidRequest([Problem("vectors", what, remedy)])


def prepared(
    vectors: Mapping[str, SteeringVector], *, normalize: bool = False, match_learned_scale: bool = False
) -> tuple[dict[str, SteeringVector], dict[str, float]]:
    """Return vectors as they will be added, and places to mark on the axis of scales.

    `normalize` gives every direction length 1, so that a scale is a length, and marks the length of a learned vector.
    `match_learned_scale` gives all the length of the learned one, so that scale 1 is what was learned.
    """
    lengths = {name: sum(one.norms().values()) / len(one.norms()) for name, one in vectors.items()}
    learned = [name for name, one in vectors.items() if one.method in LEARNED]
    problems = []
    if normalize and match_learned_scale:
        problems.append(Problem("normalize", "and match-learned-scale exclude each other", "give one of them"))
    if match_learned_scale and len(learned) != 1:
        what = f"{len(learned)} of the vectors are learned ({', '.join(learned) or 'by method'})"
        problems.append(Problem("match-learned-scale", what, "give one learned vector, with any others"))
    if problems:
        raise InvalidRequest(problems)
    if normalize:
        marks = {f"length of {name} as it was learned": lengths[name] for name in learned}
        return {name: one.normalised() for name, one in vectors.items()}, marks
    if match_learned_scale:
        length = lengths[learned[0]]
        same = {name: one if name in learned else one.normalised() * length for name, one in vectors.items()}
        return same, {f"{learned[0]} as it was learned": 1.0}
    return dict(vectors), {}


def baselines(persona: Persona | None, model: str) -> list[Condition]:
    """Return the unsteered model, and the model prompted with the persona; for a trait also with its opposite."""
    found = [Condition(name=UNSTEERED)]
    if persona is not None:
        prompts = tuple(one.pos.replace("{model_name}", model) for one in persona.instructions)
        found.append(Condition(name=PROMPTED, told=prompts))
        if persona.kind == "traits":
            found.append(Condition(name=OPPOSITE, told=tuple(one.neg or "" for one in persona.instructions)))
    return found


def steered(vectors: Mapping[str, SteeringVector], scales: Sequence[float]) -> list[Condition]:
    """Every vector, added at every scale."""
    return [
        Condition(
            name=f"{name} × {scale:g}",
            steering=Steering.of(Add(vector=name, scale=scale, site=vector.site)),
            series=name,
            at=scale,
        )
        for name, vector in vectors.items()
        for scale in scales
    ]


def caps(sources: Sequence[str | Path]) -> list[Condition]:
    """Load experiments of capping configs, and steerings as JSON; names like cap-p25 contain the percentile."""
    found = parse_all((("", Path(source)) for source in sources), _experiments)
    return [_cap(source, name, steering) for source, named in found for name, steering in named.items()]


def _experiments(source: Path) -> tuple[Path, dict[str, Steering]]:
    try:
        if source.suffix != ".json":
            return source, load_capping(source)
        with reading(source, "steering"):
            return source, {source.stem: Steering.from_json(source.read_bytes())}
    except BadFile as error:
        raise InvalidRequest([Problem("caps", str(error), "give a capping_config.pt or a cap-pN.json")]) from None


def _cap(source: Path, name: str, steering: Steering) -> Condition:
    match = re.fullmatch(r"(.*?)-?p(\d+(?:\.\d+)?)", name)
    if match is None:
        return Condition(name=name, steering=steering)
    percentile = float(match[2]) * (100 if source.suffix != ".json" and "." in match[2] else 1)
    return Condition(name=name, steering=steering, series=match[1] or source.stem, at=round(percentile, 6))
