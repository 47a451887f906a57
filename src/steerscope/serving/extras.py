"""What an answer has beside its text, in its `steerscope` objects: tokens, readings, firings, and projections.

Projections need rows: these are captured, projected at the end, and freed.
"""

from collections.abc import Mapping, Sequence

from steerscope.capture.rows import Rows
from steerscope.engines.detokenizer import Decoder, Detokenizer
from steerscope.engines.plan import Facts, Prompt
from steerscope.engines.results import Choice, RuleEvent, TokenEvent
from steerscope.lenses.readings import Firing, Reading
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import Site, parse_layers
from steerscope.specs.tokens import Interval, SelectorError, resolve
from steerscope.vectors.vector import SteeringVector

Projections = dict[str, dict[str, list[float | None]]]
_TOKENS = "last_prompt | generated"  # never empty, whatever is generated


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def about_reading(reading: Reading, prompt_length: int) -> dict[str, object]:
    index = reading.position - prompt_length
    return {
        "position": reading.position,
        "token_index": index if index >= 0 else None,
        "top": [
            {"id": one.id, "name": one.name, "path": one.path, "score": _rounded(one.probability)}
            for one in reading.concepts
        ],
    }


def about_firing(firing: Firing) -> dict[str, object]:
    return {
        "name": firing.rule,
        "action": firing.action,
        "position": firing.position,
        "token_index": firing.token,
        "acts_from": firing.acts_from,
        "score": firing.score,
        "scores": dict(firing.scores),
    }


class Extras:
    """Makes the `steerscope` objects of one choice: each has what came since the one before."""

    def __init__(self, prompt_length: int, prompt: list[dict[str, object]] | None) -> None:
        self._prompt_length = prompt_length
        self._n_read = 0
        self._n_fired = 0
        self._found: dict[str, list[dict[str, object]]] = {"tokens": []}
        if prompt is not None:  # tokens of the prompt, in the first object
            self._found["prompt"] = prompt

    def add(self, event: TokenEvent | RuleEvent) -> None:
        if isinstance(event, RuleEvent):
            self._fire([event.firing])
        else:
            self._found["tokens"].append({"i": event.index, "id": event.token_id, "t": event.text})
            self._read(event.readings)

    def take(self) -> dict[str, list[dict[str, object]]]:
        found = self._found
        self._found = {"tokens": []}
        return found

    def last(self, choice: Choice, more: Mapping[str, object]) -> dict[str, object]:
        """Return the object of the last chunk or of the whole answer: everything still to be sent, and the end."""
        self._read(choice.readings[self._n_read :])
        self._fire(choice.firings[self._n_fired :])
        t = choice.timings
        return {
            **self.take(),
            "finish": {"reason": choice.finish_reason, "stop_string": choice.stop_string, "rule": choice.rule},
            "seed": choice.seed,
            "timings": {"queued_s": t.queued, "first_token_s": t.first_token, "total_s": t.total},
            **more,
        }

    def _read(self, readings: Sequence[Reading]) -> None:
        if len(readings):
            self._n_read += len(readings)
            about = [about_reading(reading, self._prompt_length) for reading in readings]
            self._found.setdefault("readings", []).extend(about)

    def _fire(self, firings: Sequence[Firing]) -> None:
        if firings:
            self._n_fired += len(firings)
            self._found.setdefault("rules", []).extend(map(about_firing, firings))


# --- tokens of the prompt that a request selects: `"prompt": "message=2"`


def select(selector: str, prompt: Prompt) -> list[Interval]:
    p = len(prompt.token_ids)
    try:
        return list(resolve(selector, p, prompt.messages, prompt.open_message, p).within(0, p))
    except SelectorError as error:
        raise InvalidRequest([Problem.of("steerscope.prompt", error)]) from None


def about_tokens(decoder: Decoder, ids: Sequence[int], intervals: list[Interval]) -> list[dict[str, object]]:
    """Return position, id and text of each token. The text of a character that has several stands at the last one."""
    found: list[dict[str, object]] = []
    for start, stop in intervals:
        text = Detokenizer(decoder)
        if start:
            text.push(ids[start - 1])  # some tokenizers drop a leading space where a text begins
        for at in range(start, stop):
            piece = text.push(ids[at]) + (text.flush() if at == stop - 1 else "")
            found.append({"position": at, "id": ids[at], "t": piece})
    return found


# --- projections


class Projector:
    """The vectors on which a request projects its tokens."""

    def __init__(
        self, names: Sequence[str], known: Mapping[str, SteeringVector], facts: Facts, prompt: str | None
    ) -> None:
        missing = [name for name in names if name not in known]
        if missing:
            has = ", ".join(list(known)[:20]) or "none"
            what = f"no vector is named {', '.join(map(repr, missing))}"
            raise InvalidRequest([Problem("steerscope.project", what, f"upload it; known: {has}")])
        self._tokens = _TOKENS if prompt is None else f"({prompt}) & prompt | {_TOKENS}"
        self._prompt = prompt is not None
        every = tuple(range(facts.layers))
        self._vectors = {name: (known[name], known[name].layers or every) for name in names}

    def capture(self, own: Capture | None) -> Capture:
        """Return the capture of the rows to project. A request has one capture: its own, if any, must hold them."""
        layers = sorted({layer for _, some in self._vectors.values() for layer in some})
        sites: list[Site] = list(dict.fromkeys(vector.site for vector, _ in self._vectors.values()))
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

    def project(self, rows: Rows, positions: Sequence[int]) -> Projections:
        """Return, by vector and layer, one number per position; None where it has no row."""
        index = {position: i for i, position in enumerate(rows.labels.position.tolist())}
        found: Projections = {}
        for name, (vector, layers) in self._vectors.items():
            found[name] = {}
            for layer in layers:
                values = vector.projection(rows[layer, vector.site], layer).tolist()
                kept = [None if at not in index else _rounded(values[index[at]]) for at in positions]
                found[name][str(layer)] = kept
        return found
