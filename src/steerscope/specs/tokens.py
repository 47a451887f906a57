"""The `tokens` selector language: the positions of a request that an op or a capture applies to.

    all   prompt   generated   last_prompt
    positions=[0, 3, 8:12, -1]   absolute positions and half-open ranges; negative ones count from the prompt's end,
                                 where a range such as -4: also ends
    role=user   role=user+template   message=2   message=2+template
    A & B   A | B   !A   (A)         intersection, union, complement: `prompt & !role=system`

`resolve` converts a selector to `Positions`, disjoint half-open intervals, given the prompt's length and message spans.
Positions are absolute: the prompt is 0 … p−1, generated tokens follow.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

END = sys.maxsize
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Positions:
    """Disjoint, ascending, half-open intervals of absolute positions."""

    intervals: tuple[Interval, ...] = ()

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> "Positions":
        merged: list[Interval] = []
        for start, stop in sorted((a, b) for a, b in intervals if a < b):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return cls(tuple(merged))

    def __contains__(self, position: int) -> bool:
        return any(start <= position < stop for start, stop in self.intervals)

    def __and__(self, other: "Positions") -> "Positions":
        return ~(~self | ~other)  # linear in the number of intervals, not quadratic

    def __or__(self, other: "Positions") -> "Positions":
        return Positions.of((*self.intervals, *other.intervals))

    def __invert__(self) -> "Positions":
        edges = [0, *(edge for interval in self.intervals for edge in interval), END]
        return Positions.of(zip(edges[::2], edges[1::2], strict=True))

    def within(self, start: int, stop: int) -> Iterator[Interval]:
        """Yield the parts of the intervals that lie in [start, stop), in order."""
        for a, b in self.intervals:
            low = max(a, start)
            high = min(b, stop)
            if low < high:
                yield low, high

    def count(self, stop: int) -> int:
        """Return the number of selected positions below `stop`."""
        found = 0
        for a, b in self.intervals:
            if a >= stop:
                break
            found += min(b, stop) - a
        return found


EVERYWHERE = Positions(((0, END),))


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """The place of one chat message in the prompt. `content` is the message's own text; `whole` adds the template's
    header and end marks, and is None where these cannot be told apart."""

    index: int
    role: str
    content: Interval
    whole: Interval | None


class SelectorError(ValueError):
    """A selector that cannot be parsed or cannot be resolved for this request ("what; remedy")."""


_TOKEN = re.compile(
    r"\s*(positions\s*=\s*\[[^\]]*\]|role\s*=\s*[\w-]+(?:\+template)?|message\s*=\s*-?\d{1,9}(?:\+template)?|\w+|[&|!()])"
)
_ITEM = re.compile(r"(-?\d{1,18})|(-?\d{1,18})?\s*:\s*(-?\d{1,18})?")  # a position, or a range
_DEEPEST = 50  # nested brackets and !
_LANGUAGE = (
    "use all, prompt, generated, last_prompt, positions=[0, 4:8, -1], role=user, message=0 "
    "(+template), and combine with & | ! ( )"
)


def _lex(text: str) -> list[str]:
    tokens = []
    at = 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SelectorError(f"cannot read {text[at:]!r:.200} in selector {text!r:.200}; {_LANGUAGE}")
        tokens.append(re.sub(r" ?([=\[\],:]) ?", r"\1", " ".join(match.group(1).split())))
        at = match.end()
    return tokens


@dataclass(frozen=True, slots=True)
class _Context:
    prompt_length: int
    messages: Sequence[MessageSpan] | None
    open_message: bool  # the prompt ends inside the last message: generated tokens continue it
    rows: int  # no position at or beyond this can be computed


class _Parser:
    """A recursive-descent parser. With a context it evaluates to Positions; without, it only checks."""

    def __init__(self, text: str, context: _Context | None) -> None:
        self.text = text
        self.context = context
        self.tokens = _lex(text)
        self.at = 0
        self.depth = 0

    def run(self) -> Positions:
        result = self._union()
        if self.at < len(self.tokens):
            raise self._unexpected()
        return result

    def _peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _unexpected(self) -> SelectorError:
        found = self._peek()
        return SelectorError(
            f"unexpected {'end' if found is None else repr(found)} in selector {self.text!r:.200}; {_LANGUAGE}"
        )

    def _union(self) -> Positions:
        parts = self._parts("|", self._intersection)
        return parts[0] if len(parts) == 1 else Positions.of(span for part in parts for span in part.intervals)

    def _intersection(self) -> Positions:
        parts = self._parts("&", self._unary)
        return parts[0] if len(parts) == 1 else ~Positions.of(span for part in parts for span in (~part).intervals)

    def _parts(self, operator: str, part: Callable[[], Positions]) -> list[Positions]:
        """Of one chain, to be joined at once: joined one by one, a chain of n parts would cost n²."""
        found = [part()]
        while self._peek() == operator:
            self.at += 1
            found.append(part())
        return found

    def _unary(self) -> Positions:
        token = self._peek()
        if token is None or token in "&|)":
            raise self._unexpected()
        self.at += 1
        if token not in "!(":
            return self._atom(token)
        self.depth += 1
        if self.depth > _DEEPEST:
            raise SelectorError(f"a selector is nested more than {_DEEPEST} deep; {_LANGUAGE}")
        if token == "!":
            inner = ~self._unary()
        else:
            inner = self._union()
            if self._peek() != ")":
                raise self._unexpected()
            self.at += 1
        self.depth -= 1
        return inner

    def _atom(self, token: str) -> Positions:
        name, _, value = token.partition("=")
        if name == "positions" and value:
            return self._positions(value[1:-1])
        if name in ("role", "message") and value:
            return self._message(name, value)
        p = self.context.prompt_length if self.context else 0
        simple = {"all": (0, END), "prompt": (0, p), "generated": (p, END), "last_prompt": (p - 1, p)}
        if token not in simple:
            raise SelectorError(f"{token!r} is not a selector; {_LANGUAGE}")
        return Positions.of([simple[token]])

    def _positions(self, body: str) -> Positions:
        intervals: list[Interval] = []
        for item in filter(None, body.split(",")):
            match = _ITEM.fullmatch(item.strip())
            if match is None:
                raise SelectorError(f"{item!r:.60} is not a position or range; write 3, -1, 4:8, :5 or -4:")
            if self.context:
                intervals.append(self._interval(*match.groups()))
        return Positions.of(intervals)

    def _interval(self, single: str | None, first: str | None, last: str | None) -> Interval:
        assert self.context
        p = self.context.prompt_length

        def absolute(text: str) -> int:
            return int(text) + p if int(text) < 0 else int(text)

        if single is None:
            start = max(0, absolute(first)) if first else 0
            # Counted from the prompt's end, an open range ends there: -4: is the last four tokens of the prompt.
            open_end = p if first and int(first) < 0 else END
            return start, (max(0, absolute(last)) if last else open_end)
        position = absolute(single)
        if position < 0:
            raise SelectorError(f"position {single} is before the prompt's start; the prompt has {p} tokens")
        if position >= self.context.rows:
            raise SelectorError(f"position {single} is never computed; the request has rows 0–{self.context.rows - 1}")
        return position, position + 1

    def _message(self, name: str, value: str) -> Positions:
        if self.context is None:
            return Positions()
        wanted, _, template = value.partition("+")
        spans = self.context.messages
        if spans is None:
            raise SelectorError(f"{name}={value} needs chat messages with proven spans; use chat() or positions=[…]")
        # Generated tokens are the assistant's: they continue an open last message, or form the next one.
        answer = len(spans) - 1 if self.context.open_message else len(spans)
        if name == "message" and not -answer - 1 <= int(wanted) <= answer:
            raise SelectorError(f"message {wanted} does not exist; the chat has messages 0–{answer} (the answer)")
        index = int(wanted) % (answer + 1) if name == "message" else 0
        chosen = [s for s in spans if (s.index == index if name == "message" else s.role == wanted)]
        parts: list[Interval] = []
        for span in chosen:
            if template and span.whole is None:
                raise SelectorError(
                    f"{name}={value}: this chat template's own text cannot be told apart; drop +template"
                )
            parts.append(span.whole if template and span.whole else span.content)
        if wanted == "assistant" or (name == "message" and index == answer):
            parts.append((self.context.prompt_length, END))
        return Positions.of(parts)


def check_selector(text: object) -> str:
    """Validate a selector's text and normalise its spacing."""
    if not isinstance(text, str):
        raise SelectorError(f"a selector is text, not {type(text).__name__}; {_LANGUAGE}")
    _Parser(text, None).run()
    return " ".join(_lex(text)).replace("! ", "!").replace("( ", "(").replace(" )", ")")


Tokens = Annotated[str, BeforeValidator(check_selector)]


def resolve(
    selector: str,
    prompt_length: int,
    messages: Sequence[MessageSpan] | None = None,
    open_message: bool = False,
    rows: int = END,
) -> Positions:
    """Return the absolute positions of a selector, for one request that computes at most `rows` rows."""
    if messages is None:
        return _plain(selector, prompt_length, open_message, rows)
    return _Parser(selector, _Context(prompt_length, messages, open_message, rows)).run()


@functools.lru_cache(maxsize=1024)
def _plain(selector: str, prompt_length: int, open_message: bool, rows: int) -> Positions:
    """Resolve a selector without messages; many requests share a selector and a prompt length."""
    return _Parser(selector, _Context(prompt_length, None, open_message, rows)).run()
