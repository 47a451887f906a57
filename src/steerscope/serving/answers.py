"""Answers of the OpenAI routes as JSON text: chunks of a stream and whole answers, with their `steerscope` objects.

The text that all chunks of a request share is made once; a token then costs one escaped string and one join. Readings
are written from the arrays they came in; what is fixed about a concept (id, name, path) is written once per pack. No
object is built per token.
"""

import json
import random
import time
import weakref
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted

from steerscope.engines.results import Choice, FinishReason, Generation, RuleEvent, TokenEvent
from steerscope.lenses.pack import Pack
from steerscope.lenses.readings import Firing, Reading, Readings

_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "stop_string": "stop", "rule": "stop"}
_concepts: "weakref.WeakKeyDictionary[Pack, dict[int, str]]" = weakref.WeakKeyDictionary()


class Writer:
    """Writes the answer to one request of either route."""

    def __init__(self, chat: bool, model: str, include_usage: bool, name: str | None = None) -> None:
        self.chat = chat
        self.id = name or f"{'chatcmpl' if chat else 'cmpl'}-{random.getrandbits(96):024x}"
        kind = "chat.completion" if chat else "text_completion"
        about = f'"created":{int(time.time())},"model":{quoted(model)}'
        self._whole = f'{{"id":"{self.id}","object":"{kind}",{about},"choices":['
        self._chunk = f'data: {{"id":"{self.id}","object":"{kind}{".chunk" if chat else ""}",{about},"choices":['
        self._usage = ',"usage":null' if include_usage else ""
        self._before = ',"delta":{"content":' if chat else ',"text":'
        self._between = '},"logprobs":' if chat else ',"logprobs":'

    # --- chunks

    def opening(self, index: int) -> str:
        """Return a chat's first chunk, which names the role."""
        start = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return f'{self._chunk}{{"index":{index},{start}}}]{self._usage}}}\n\n'

    def token(self, index: int, text: str, logprobs: str = "null", extra: str = "") -> str:
        return (
            f'{self._chunk}{{"index":{index}{self._before}{quoted(text)}{self._between}{logprobs}'
            f',"finish_reason":null}}]{self._usage}{_extra(extra)}}}\n\n'
        )

    def last(self, index: int, choice: Choice, extra: str = "") -> str:
        what = '"delta":{}' if self.chat else '"text":""'
        return (
            f'{self._chunk}{{"index":{index},{what},"logprobs":null,"finish_reason":"{_REASONS[choice.finish_reason]}"}}]'
            f"{self._usage}{_extra(extra)}}}\n\n"
        )

    def usage_chunk(self, done: Sequence[Generation]) -> str:
        return f'{self._chunk}],"usage":{_usage_json(done)}}}\n\n'

    # --- whole

    def choice(self, index: int, choice: Choice, text: str, logprobs: str = "null", extra: str = "") -> str:
        message = f'"message":{{"role":"assistant","content":{quoted(text)},"refusal":null}}'
        what = message if self.chat else f'"text":{quoted(text)}'
        reason = _REASONS[choice.finish_reason]
        return f'{{"index":{index},{what},"logprobs":{logprobs},"finish_reason":"{reason}"{_extra(extra)}}}'

    def whole(self, choices: Sequence[str], done: Sequence[Generation]) -> str:
        return f'{self._whole}{",".join(choices)}],"usage":{_usage_json(done)}}}'


def _extra(extra: str) -> str:
    return f',"steerscope":{extra}' if extra else ""


def _usage_json(done: Sequence[Generation]) -> str:
    prompt = sum(len(one.prompt_token_ids) for one in done)
    generated = sum(len(choice.token_ids) for one in done for choice in one.choices)
    return json.dumps({"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated})


# --- the `steerscope` object


def readings_json(readings: Sequence[Reading], prompt_length: int) -> list[str]:
    """Return one JSON object per row."""
    if not isinstance(readings, Readings) or not len(readings):
        return []
    known = _concepts.setdefault(readings.pack, {})
    found: list[str] = []
    rows = zip(readings.positions.tolist(), readings.indices.tolist(), readings.values.tolist(), strict=True)
    for position, lenses, scores in rows:
        top = ",".join(
            f"{known.get(lens) or _concept_json(readings.pack, lens, known)}{score:.5g}}}"
            for lens, score in zip(lenses, scores, strict=True)
            if lens >= 0
        )
        index = position - prompt_length
        found.append(f'{{"position":{position},"token_index":{index if index >= 0 else "null"},"top":[{top}]}}')
    return found


def _concept_json(pack: Pack, lens: int, known: dict[int, str]) -> str:
    """Return the JSON of a reading up to its score."""
    concept = pack.concepts[lens]
    about = json.dumps({"id": concept.id, "name": concept.name, "path": pack.path(lens)}, separators=(",", ":"))
    known[lens] = f'{about[:-1]},"score":'
    return known[lens]


def firing_json(firing: Firing) -> str:
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


class ChoiceExtras:
    """The `steerscope` objects of one choice: one per chunk, or a single one at the end."""

    def __init__(self, prompt_length: int, whole: bool, prompt: str | None = None) -> None:
        self._prompt_length = prompt_length
        self._whole = whole
        self._prompt = prompt  # JSON of the prompt's tokens, for the first object
        self._tokens: list[str] = []
        self._readings: list[str] = []
        self._rules: list[str] = []
        self._n_read = 0
        self._n_fired = 0

    def rule(self, event: RuleEvent) -> None:
        self._rules.append(firing_json(event.firing))
        self._n_fired += 1

    def token(self, event: TokenEvent) -> str:
        """Return the object of the token's chunk."""
        self._tokens.append(f'{{"i":{event.index},"id":{event.token_id},"t":{quoted(event.text)}}}')
        if len(event.readings):
            self._readings += readings_json(event.readings, self._prompt_length)
            self._n_read += len(event.readings)
        return "" if self._whole else self._taken()

    def last(self, choice: Choice, more: dict[str, object]) -> str:
        """Return the object of the last chunk or of the whole answer: everything still to be sent, and the end."""
        self._readings += readings_json(choice.readings[self._n_read :], self._prompt_length)
        self._rules += [firing_json(firing) for firing in choice.firings[self._n_fired :]]
        t = choice.timings
        end = {
            "finish": {"reason": choice.finish_reason, "stop_string": choice.stop_string, "rule": choice.rule},
            "seed": choice.seed,
            "timings": {"queued_s": t.queued, "first_token_s": t.first_token, "total_s": t.total},
            **more,
        }
        return f"{self._taken()[:-1]},{json.dumps(end)[1:]}"

    def _taken(self) -> str:
        """Return what has come since the last object."""
        rest = f',"readings":[{",".join(self._readings)}]' if self._readings else ""
        if self._rules:
            rest += f',"rules":[{",".join(self._rules)}]'
        if self._prompt is not None:
            rest += f',"prompt":[{self._prompt}]'
            self._prompt = None
        found = f'{{"tokens":[{",".join(self._tokens)}]{rest}}}'
        self._tokens.clear()
        self._readings.clear()
        self._rules.clear()
        return found
