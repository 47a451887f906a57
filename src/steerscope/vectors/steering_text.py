"""The text form of a steering: `vector.safetensors@10-14:6;tokens=generated`.

The file is the longest prefix that exists, so its path may contain any of the separators.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import Ablate, Add, Cap, Steering
from steerscope.vectors.files import load
from steerscope.vectors.legacy import load_capping
from steerscope.vectors.vector import SteeringVector

FORMS = (
    "write FILE[@LAYERS][:SCALE], FILE[@LAYERS]:cap=MIN..MAX (one side may be empty), FILE[@LAYERS]:ablate[=KEEP] or "
    "CAPPING_CONFIG.pt#EXPERIMENT, each optionally followed by ;tokens=SELECTOR"
)


@dataclass(frozen=True, slots=True)
class SteerArg:
    path: str
    layers: str | None
    steering: Steering

    @property
    def name(self) -> str:
        return Path(self.path).stem


def parse(text: str, known: Sequence[str] = ()) -> SteerArg:
    """Read a steering from its text; `known` are names of vectors that a server has. Every problem names the text."""
    body, mark, tokens = text.rpartition(";tokens=") if ";tokens=" in text else (text, "", "")
    try:
        named = _known(body, known)
        path, rest = named or split(body)
        match = re.fullmatch(r"(?:@([^@:]+))?(?::(.+))?|(#.*)", rest)
        if match is None:
            raise _unreadable(f"cannot read {rest!r} after {path}")
        ops = (
            _experiment(path, rest[1:])
            if match[3]
            else (_op(path if named else load(path), match[1], match[2] or "1"),)
        )
        if mark:
            ops = tuple(type(op).parse({**op.model_dump(), "tokens": tokens}) for op in ops)
    except InvalidRequest as error:
        problems = [Problem(p.field, p.what, p.remedy).under(f"steer {text!r}") for p in error.problems]
        raise InvalidRequest(problems) from None
    return SteerArg(path, match[1], Steering.of(*ops))


def joined(args: Sequence[SteerArg]) -> Steering:
    return Steering.of(*(op for arg in args for op in arg.steering.ops))


def _unreadable(what: str) -> InvalidRequest:
    return InvalidRequest([Problem("", what, FORMS)])


def _known(body: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the longest name that the text begins with, and the rest."""
    fitting = [name for name in names if body.startswith(name) and body[len(name) :][:1] in ("", "@", ":")]
    name = max(fitting, key=len, default=None)
    return None if name is None else (name, body[len(name) :])


def split(body: str) -> tuple[str, str]:
    """Return the longest prefix that is a path, and the rest; a slash in the rest means that the path is wrong."""
    for cut in [len(body), *(sign.start() for sign in reversed([*re.finditer("[@:#]", body)]))]:
        path, rest = body[:cut], body[cut:]
        if os.path.exists(path) and ("/" not in rest or (rest[0] == "#" and os.path.isfile(path))):
            return path, rest
    path = re.sub(r"(@(all|[\d, -]+))?(:[^:/]*)?$|#[^/]*$", "", body, count=1)
    raise _unreadable(f"there is no file {path!r}")


def _experiment(path: str, name: str) -> tuple[Add | Cap | Ablate, ...]:
    experiments = load_capping(path)
    if name not in experiments:
        raise InvalidRequest([Problem("", f"{path} has no experiment {name!r}", f"it has {', '.join(experiments)}")])
    return tuple(experiments[name].ops)


def _op(vector: SteeringVector | str, layers: str | None, strength: str) -> Add | Cap | Ablate:
    kind, equals, value = strength.partition("=")
    low, dots, high = value.partition("..")
    site = {"site": vector.site} if isinstance(vector, SteeringVector) else {}  # a server knows the site of its vectors
    about = {"vector": vector, "layers": layers, **site}
    try:
        if kind == "cap" and dots:
            bounds = {"min": float(low) if low else None, "max": float(high) if high else None}
            return Cap.parse({**about, **bounds})
        if kind == "ablate":
            return Ablate.parse({**about, "scale": float(value) if equals else 0.0})
        return Add.parse({**about, "scale": float(strength)})
    except InvalidRequest:  # it is a ValueError too
        raise
    except ValueError:
        raise _unreadable(f"{strength!r} is not a strength") from None
