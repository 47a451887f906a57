"""The `steerscope` object of answers: tokens, readings, firings of rules, and where a capture is.

Readings are written from the arrays they came in; what is fixed about a concept (id, name, path) is written once per
pack and kept.
"""

import json
import weakref
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted

from steerscope.engines.results import Choice, RuleEvent, TokenEvent
from steerscope.lenses.pack import Pack
from steerscope.lenses.readings import Firing, Reading, Readings

_written: "weakref.WeakKeyDictionary[Pack, dict[int, str]]" = weakref.WeakKeyDictionary()


def reading_texts(readings: Sequence[Reading], prompt_length: int) -> list[str]:
    """One JSON object per row."""
    if not isinstance(readings, Readings) or not len(readings):
        return []
    known = _written.setdefault(readings.pack, {})
    found: list[str] = []
    rows = zip(readings.positions.tolist(), readings.indices.tolist(), readings.values.tolist(), strict=True)
    for position, lenses, scores in rows:
        top = ",".join(
            f"{known.get(lens) or _concept(readings.pack, lens, known)}{score:.5g}}}"
            for lens, score in zip(lenses, scores, strict=True)
            if lens >= 0
        )
        index = position - prompt_length
        found.append(f'{{"position":{position},"token_index":{index if index >= 0 else "null"},"top":[{top}]}}')
    return found


def _concept(pack: Pack, lens: int, known: dict[int, str]) -> str:
    concept = pack.concepts[lens]
    about = json.dumps({"id": concept.id, "name": concept.name, "path": pack.path(lens)}, separators=(",", ":"))
    known[lens] = f'{about[:-1]},"score":'
    return known[lens]


def firing_text(firing: Firing) -> str:
    return json.dumps(
        {
            "name": firing.rule,
            "action": firing.action,
            "position": firing.position,
            "token_index": firing.token,
            "acts_from": firing.acts_from,
            "score": firing.score,
            "scores": dict(firing.scores),
        }
    )


class Extras:
    """What one choice has to tell, piece by piece or at its end."""

    def __init__(self, prompt_length: int, whole: bool, prompt: str | None = None) -> None:
        self._prompt_length = prompt_length
        self._prompt = prompt  # tokens of it, to be told first
        self._whole = whole  # nothing is told before the end
        self._tokens: list[str] = []
        self._readings: list[str] = []
        self._rules: list[str] = []
        self._read = self._fired = 0

    def rule(self, event: RuleEvent) -> None:
        self._rules.append(firing_text(event.firing))
        self._fired += 1

    def token(self, event: TokenEvent) -> str:
        """The object of the token's chunk."""
        self._tokens.append(f'{{"i":{event.index},"id":{event.token_id},"t":{quoted(event.text)}}}')
        if len(event.readings):
            self._readings += reading_texts(event.readings, self._prompt_length)
            self._read += len(event.readings)
        return "" if self._whole else self._taken()

    def last(self, choice: Choice, more: dict[str, object]) -> str:
        """The object of the last chunk, or of the whole answer: what was not told before, and how it ended."""
        self._readings += reading_texts(choice.readings[self._read :], self._prompt_length)
        self._rules += [firing_text(firing) for firing in choice.firings[self._fired :]]
        ended = {"reason": choice.finish_reason, "stop_string": choice.stop_string, "rule": choice.rule}
        t = choice.timings
        timings = {"queued_s": t.queued, "first_token_s": t.first_token, "total_s": t.total}
        end = json.dumps({"finish": ended, "seed": choice.seed, "timings": timings, **more})
        return f"{self._taken()[:-1]},{end[1:]}"

    def _taken(self) -> str:
        rest = f',"readings":[{",".join(self._readings)}]' if self._readings else ""
        if self._rules:
            rest += f',"rules":[{",".join(self._rules)}]'
        if self._prompt is not None:
            rest, self._prompt = f'{rest},"prompt":[{self._prompt}]', None
        found = f'{{"tokens":[{",".join(self._tokens)}]{rest}}}'
        self._tokens, self._readings, self._rules = [], [], []
        return found
