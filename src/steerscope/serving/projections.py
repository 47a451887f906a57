"""Projections of tokens on vectors: their rows are captured, projected at the end, and freed."""

from collections.abc import Mapping, Sequence

from steerscope.capture.rows import Rows
from steerscope.engines.plan import Facts
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import Site, parse_layers
from steerscope.vectors.vector import SteeringVector

Projections = dict[str, dict[str, list[float | None]]]
_TOKENS = "last_prompt | generated"  # never empty, whatever is generated


class Projector:
    """The vectors on which a request projects its tokens."""

    def __init__(
        self, names: Sequence[str], known: Mapping[str, SteeringVector], facts: Facts, prompt: str | None = None
    ) -> None:
        missing = [name for name in names if name not in known]
        if missing:
            has = ", ".join(list(known)[:20]) or "none"
            what = f"no vector is named {', '.join(map(repr, missing))}"
            raise InvalidRequest([Problem("steerscope.project", what, f"upload it; known: {has}")])
        self.vectors = {name: known[name] for name in names}
        self._tokens = _TOKENS if prompt is None else f"({prompt}) & prompt | {_TOKENS}"
        self._prompt = prompt is not None
        every = tuple(range(facts.layers))
        self.layers = {name: every if v.layers is None else v.layers for name, v in self.vectors.items()}

    def capture(self, own: Capture | None) -> Capture:
        """Return the capture of the rows to project. A request has one capture: its own, if any, must hold them."""
        layers = sorted({layer for layers in self.layers.values() for layer in layers})
        sites: list[Site] = list(dict.fromkeys(vector.site for vector in self.vectors.values()))
        if own is None:
            return Capture(layers=layers, sites=sites, tokens=self._tokens)
        asked = parse_layers(own.layers)
        enough = ("all", self._tokens) if self._prompt else ("all", "generated", _TOKENS)
        whole = own.tokens in enough and own.reduce is None and not own.before_steering
        if not whole or not set(sites) <= set(own.sites) or (asked != "all" and not set(layers) <= set(asked)):
            tokens = "tokens" if self._prompt else "generated tokens"
            what = f"needs layers {', '.join(map(str, layers))} of {', '.join(sites)} at all {tokens}"
            remedy = "widen steerscope.capture to hold them, without reduce and before_steering, or leave one out"
            raise InvalidRequest([Problem("steerscope.project", what, remedy)])
        return own

    def project(self, rows: Rows, first: int, count: int) -> Projections:
        """Return, by vector and layer, one number per token from position `first` on; None where a token has no row."""
        index = (rows.labels.position - first).tolist()
        found: Projections = {}
        for name, vector in self.vectors.items():
            found[name] = {}
            for layer in self.layers[name]:
                values = vector.projection(rows[layer, vector.site], layer).tolist()
                row: list[float | None] = [None] * count
                for i, value in zip(index, values, strict=True):
                    if 0 <= i < count:
                        row[i] = float(f"{value:.5g}")
                found[name][str(layer)] = row
        return found
