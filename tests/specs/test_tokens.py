"""The selector language against an oracle of plain sets, and everything it refuses."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from steerscope.specs.steering import Add
from steerscope.specs.tokens import (
    END,
    EVERYWHERE,
    MessageSpan,
    Positions,
    SelectorError,
    check_selector,
    resolve,
)

PROPERTY = settings(deadline=None, max_examples=60, derandomize=True)
ROWS = 40  # the universe of the oracle: positions 0 … 39
UNIVERSE = frozenset(range(ROWS))


def as_set(positions: Positions, stop: int = ROWS) -> frozenset[int]:
    return frozenset(i for i in range(stop) if i in positions)


# --- positions


def intervals(limit: int = 30) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, limit), st.integers(0, limit)), max_size=6)


def members(parts: list[tuple[int, int]]) -> frozenset[int]:
    return frozenset(i for a, b in parts for i in range(a, b))


@PROPERTY
@given(parts=intervals())
def test_positions_hold_exactly_the_given_intervals_disjoint_and_ascending(parts):
    positions = Positions.of(parts)
    assert as_set(positions) == members(parts)
    edges = [edge for interval in positions.intervals for edge in interval]
    assert edges == sorted(set(edges))  # ascending, none empty, none touching the next


@PROPERTY
@given(left=intervals(), right=intervals())
def test_positions_combine_like_sets(left, right):
    a, b = Positions.of(left), Positions.of(right)
    assert as_set(a & b) == members(left) & members(right)
    assert as_set(a | b) == members(left) | members(right)
    assert as_set(~a) == UNIVERSE - members(left)


@PROPERTY
@given(left=intervals(), right=intervals())
def test_equal_sets_of_positions_are_equal_values_however_they_were_made(left, right):
    a, b = Positions.of(left), Positions.of(right)
    assert ~~a == a
    assert ~(a | b) == ~a & ~b
    assert (a & b) == (b & a)
    assert hash(a | b) == hash(b | a)


@PROPERTY
@given(parts=intervals(), start=st.integers(0, 35), stop=st.integers(0, 35))
def test_within_and_count_cut_the_intervals_to_a_window(parts, start: int, stop: int):
    positions = Positions.of(parts)
    window = list(positions.within(start, stop))
    assert [i for a, b in window for i in range(a, b)] == sorted(members(parts) & set(range(start, stop)))
    assert positions.count(stop) == len([i for i in members(parts) if i < stop])


def test_everywhere_has_no_end_and_its_complement_is_empty():
    assert END - 1 in EVERYWHERE
    assert (~EVERYWHERE).intervals == ()


def test_intersecting_many_single_positions_takes_no_quadratic_time():
    # 20,000 × 20,000 pairs would take minutes: a request with such a list must not hold up the others.
    even, third = (Positions.of([(i, i + 1) for i in range(0, 20_000 * step, step)]) for step in (2, 3))
    assert (even & third).count(END) == len(set(range(0, 40_000, 2)) & set(range(0, 60_000, 3)))


# --- chats for the oracle


@dataclass(frozen=True)
class Chat:
    prompt_length: int
    spans: tuple[MessageSpan, ...] | None
    open_message: bool


@st.composite
def chats(draw) -> Chat:
    """Spans laid out one after another, each with a header, a content (maybe empty) and end marks."""
    if draw(st.booleans()):
        return Chat(draw(st.integers(1, 25)), None, False)
    open_message = draw(st.booleans())
    count = draw(st.integers(1, 4))
    at, spans = 0, []
    for i in range(count):
        last_open = open_message and i == count - 1
        head, own, tail = draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(0, 1))
        role = "assistant" if last_open else draw(st.sampled_from(["system", "user", "assistant"]))
        tail = 0 if last_open else tail
        spans.append(MessageSpan(i, role, (at + head, at + head + own), (at, at + head + own + tail)))
        at += head + own + tail
    at += 0 if open_message else draw(st.integers(0, 2))  # the generation prompt belongs to no message
    assume(at > 0)
    return Chat(at, tuple(spans), open_message)


# --- random expressions: text and, independently, the set they mean


@dataclass(frozen=True)
class Node:
    kind: str  # "atom", "not", "and", "or"
    text: str = ""
    means: frozenset[int] = frozenset()
    parts: tuple["Node", ...] = ()

    def value(self) -> frozenset[int]:
        match self.kind:
            case "atom":
                return self.means
            case "not":
                return UNIVERSE - self.parts[0].value()
            case "and":
                return self.parts[0].value() & self.parts[1].value()
            case _:
                return self.parts[0].value() | self.parts[1].value()


STRENGTH = {"or": 0, "and": 1, "not": 2, "atom": 3}


def write(node: Node, chance: random.Random, least: int = 0) -> str:
    """With brackets only where precedence needs them (and sometimes where it does not), and any spacing."""

    def space() -> str:
        return chance.choice(["", " ", "  ", "\n"])

    own = STRENGTH[node.kind]
    if node.kind == "atom":
        body = node.text
    elif node.kind == "not":
        body = "!" + space() + write(node.parts[0], chance, own)
    else:
        sign = "&" if node.kind == "and" else "|"
        body = write(node.parts[0], chance, own) + space() + sign + space() + write(node.parts[1], chance, own)
    if own < least or chance.random() < 0.2:
        return "(" + space() + body + space() + ")"
    return body


@st.composite
def atoms(draw, chat: Chat) -> Node:
    p = chat.prompt_length
    simple = {
        "all": UNIVERSE,
        "prompt": frozenset(range(p)),
        "generated": frozenset(range(p, ROWS)),
        "last_prompt": frozenset([p - 1]),
    }
    kinds = ["simple", "positions"] + (["role", "message"] if chat.spans else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "simple":
        name = draw(st.sampled_from(sorted(simple)))
        return Node("atom", name, simple[name])
    if kind == "positions":
        return draw(position_lists(p))
    assert chat.spans is not None
    template = draw(st.booleans())
    count = len(chat.spans)
    answer = count - 1 if chat.open_message else count
    if kind == "role":
        wanted = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
        chosen = [s for s in chat.spans if s.role == wanted]
        generated = wanted == "assistant"
    else:
        index = draw(st.integers(-answer - 1, answer))
        wanted = str(index)
        index = index + answer + 1 if index < 0 else index
        chosen = [s for s in chat.spans if s.index == index]
        generated = index == answer
    means = frozenset(i for s in chosen for i in range(*(s.whole if template and s.whole else s.content)))
    means |= frozenset(range(p, ROWS)) if generated else frozenset()
    return Node("atom", f"{kind}={wanted}{'+template' if template else ''}", means)


@st.composite
def position_lists(draw, p: int) -> Node:
    items: list[str] = []
    means: set[int] = set()
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            position = draw(st.integers(-p, ROWS - 1))
            items.append(str(position))
            means.add(position + p if position < 0 else position)
            continue
        ends = [draw(st.none() | st.integers(-p - 3, ROWS + 5)) for _ in range(2)]
        items.append(":".join("" if end is None else str(end) for end in ends))
        first, last = (None if end is None else max(0, end + p) if end < 0 else end for end in ends)
        open_end = p if ends[0] is not None and ends[0] < 0 else ROWS
        means.update(range(first or 0, open_end if last is None else min(last, ROWS)))
    gap = draw(st.sampled_from(["", " "]))
    return Node("atom", f"positions={gap}[{gap}{(',' + gap).join(items)}{gap}]", frozenset(means))


def expressions(chat: Chat) -> st.SearchStrategy[Node]:
    def grow(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        pairs = st.tuples(inner, inner)
        return (
            inner.map(lambda node: Node("not", parts=(node,)))
            | pairs.map(lambda pair: Node("and", parts=pair))
            | pairs.map(lambda pair: Node("or", parts=pair))
        )

    return st.recursive(atoms(chat), grow, max_leaves=6)


@settings(PROPERTY, max_examples=150)
@given(data=st.data())
def test_any_expression_resolves_to_the_set_it_means_and_so_does_its_normal_form(data):
    chat = data.draw(chats())
    node = data.draw(expressions(chat))
    text = write(node, random.Random(data.draw(st.integers(0, 99))))
    found = resolve(text, chat.prompt_length, chat.spans, chat.open_message, rows=ROWS)
    assert as_set(found) == node.value()
    normal = check_selector(text)
    assert check_selector(normal) == normal
    assert resolve(normal, chat.prompt_length, chat.spans, chat.open_message, rows=ROWS) == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("last_prompt | positions=[0] & generated", {5}),  # & before |
        ("(last_prompt | positions=[0]) & generated", set()),
        ("!prompt & positions=[4, 7]", {7}),  # ! before &
        ("!(prompt & positions=[4, 7])", set(range(10)) - {4}),
        ("!!prompt", set(range(6))),
        ("positions=[1] | positions=[2] & positions=[3] | positions=[4]", {1, 4}),
    ],
)
def test_not_binds_before_and_which_binds_before_or(text: str, expected: set[int]):
    assert as_set(resolve(text, 6), stop=10) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("positions=[0, 3, 8:12, -1]", {0, 3, 8, 9, 10, 11, 5}),
        ("positions=[:2]", {0, 1}),
        ("positions=[-2:6]", {4, 5}),
        ("positions=[-100:2]", {0, 1}),  # a range is cut to what exists, a single position is not
        ("positions=[-2:]", {4, 5}),  # counted from the prompt's end, an open range ends there
        ("positions=[4:]", set(range(4, 20))),  # otherwise it runs on into what is generated
        ("positions=[:]", set(range(20))),
        ("positions=[5:2]", set()),
        ("positions=[]", set()),
        ("positions=[15:1000]", set(range(15, 20))),
    ],
)
def test_negative_positions_count_from_the_end_of_the_prompt_and_ranges_are_half_open(text: str, expected: set[int]):
    assert as_set(resolve(text, 6, rows=20), stop=20) == expected


# --- chats, by hand

SPANS = (
    MessageSpan(0, "system", (2, 4), (0, 5)),
    MessageSpan(1, "user", (6, 9), (5, 10)),
    MessageSpan(2, "assistant", (11, 13), (10, 14)),
    MessageSpan(3, "user", (15, 16), (14, 17)),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("role=user", {6, 7, 8, 15}),
        ("role=user+template", {5, 6, 7, 8, 9, 14, 15, 16}),
        ("role=assistant", {11, 12, 18, 19}),
        ("role=assistant & prompt", {11, 12}),
        ("role=system | message=3", {2, 3, 15}),
        ("message=1+template", {5, 6, 7, 8, 9}),
        ("message=-1", {18, 19}),
        ("message=-2", {15}),
        ("message=4", {18, 19}),  # the answer is the next message
        ("role=tool", set()),
        ("prompt & !role=system", set(range(18)) - {2, 3}),
    ],
)
def test_roles_and_messages_select_their_own_text_and_the_template_only_when_asked(text: str, expected: set[int]):
    assert as_set(resolve(text, 18, SPANS), stop=20) == expected


def test_generated_tokens_continue_an_open_last_message_instead_of_forming_the_next():
    spans = (SPANS[0], SPANS[1], MessageSpan(2, "assistant", (11, 13), (10, 13)))
    assert as_set(resolve("message=2", 13, spans, open_message=True), stop=16) == {11, 12, 13, 14, 15}
    assert as_set(resolve("message=2", 13, spans, open_message=False), stop=16) == {11, 12}
    with pytest.raises(SelectorError, match="message 3 does not exist; the chat has messages 0–2"):
        resolve("message=3", 13, spans, open_message=True)


def test_template_text_that_cannot_be_told_apart_is_refused_but_contents_are_not():
    spans = (MessageSpan(0, "user", (2, 4), None),)
    assert as_set(resolve("role=user", 6, spans)) == {2, 3}
    for text in ("role=user+template", "message=0+template"):
        with pytest.raises(SelectorError, match="cannot be told apart; drop \\+template"):
            resolve(text, 6, spans)


# --- refusals


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "everything",
        "prompt &",
        "& prompt",
        "prompt prompt",
        "prompt || generated",
        "(prompt",
        "prompt)",
        "()",
        "!",
        "role",
        "role=",
        "role=user+temple",
        "message=one",
        "message=",
        "positions",
        "positions=3",
        "positions=[",
        "positions=[a]",
        "positions=[1.5]",
        "positions=[-]",
        "positions=[3:-]",
        "positions=[-:3]",
        "positions=[1:2:3]",
        "positions=[1 2]",
        "positions=[3-4]",
        "positions=[3--4]",
        pytest.param("positions=[" + "9" * 5000 + "]", id="5000 digits"),
        pytest.param("message=" + "9" * 5000, id="message of 5000 digits"),
        "prompt; drop",
        "prompt - generated",
        "PROMPT",
    ],
)
def test_what_is_no_selector_is_refused_when_it_is_written_with_the_language_as_remedy(text: str):
    with pytest.raises(SelectorError) as caught:
        check_selector(text)
    what, _, remedy = str(caught.value).rpartition("; ")
    assert what
    assert remedy.startswith(("use all, prompt, generated", "write 3, -1, 4:8"))


@pytest.mark.parametrize(
    "text", ["(" * 3000 + "all" + ")" * 3000, "!" * 3000 + "all", "(" * 20_000], ids=["()", "!", "("]
)
def test_nesting_without_end_is_refused_and_does_not_exhaust_the_stack(text: str):
    with pytest.raises(SelectorError, match="nested"):
        check_selector(text)


def test_long_flat_selectors_are_fine():
    many = " | ".join(f"positions=[{i}]" for i in range(2000))
    assert resolve(check_selector(many), 2000).intervals == ((0, 2000),)


@pytest.mark.parametrize("value", [None, 3, ["all"], b"all"])
def test_a_selector_that_is_not_text_is_refused(value: object):
    with pytest.raises(SelectorError, match="a selector is text, not"):
        check_selector(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("positions=[-7]", "position -7 is before the prompt's start; the prompt has 6 tokens"),
        ("positions=[10]", "position 10 is never computed; the request has rows 0–9"),
        ("prompt & positions=[3, 99]", "position 99 is never computed; the request has rows 0–9"),
    ],
)
def test_single_positions_that_have_no_row_are_refused(text: str, problem: str):
    with pytest.raises(SelectorError) as caught:
        resolve(text, 6, rows=10)
    assert str(caught.value) == problem


@pytest.mark.parametrize("text", ["role=user", "message=0", "prompt & !role=assistant+template"])
def test_roles_and_messages_without_proven_spans_are_refused_with_what_to_use(text: str):
    with pytest.raises(SelectorError, match=r"needs chat messages with proven spans; use chat\(\) or positions"):
        resolve(text, 6)


@pytest.mark.parametrize("index", [5, -6, 99])
def test_a_message_that_does_not_exist_is_refused_with_those_that_do(index: int):
    with pytest.raises(SelectorError, match=f"message {index} does not exist; the chat has messages 0–4"):
        resolve(f"message={index}", 18, SPANS)


def test_specs_keep_the_normal_form_so_that_equal_selectors_are_equal():
    assert Add(vector="v", tokens=" prompt&! role = user ").tokens == "prompt & !role=user"
    assert Add(vector="v", tokens="( all )|positions=[ 1,  -2 :]") == Add(
        vector="v", tokens="(all) | positions=[1,-2:]"
    )


def test_a_chain_of_parts_is_joined_once(monkeypatch: pytest.MonkeyPatch):
    """Joined one by one, each part would look at all positions named before it: minutes for a long selector."""
    seen = 0

    def counted(spans: Iterable[tuple[int, int]], of: Callable = Positions.of) -> Positions:
        nonlocal seen
        found = list(spans)
        seen += len(found)
        return of(found)

    monkeypatch.setattr(Positions, "of", staticmethod(counted))
    for operator, part in (("|", "positions=[{}]"), ("&", "!positions=[{}]")):
        seen = 0
        text = operator.join(part.format(2 * i) for i in range(500))
        assert len(resolve(text, 2000).intervals) in (500, 501)
        assert seen < 500 * 10


def test_spaces_without_end_are_read_in_one_go():
    """With patterns that try every space as a beginning, these would take hours."""
    spaces = " " * 1_000_000
    assert check_selector(f"positions{spaces}={spaces}[1,{spaces}2:{spaces}4{spaces}]") == "positions=[1,2:4]"
    for text in (f"positions=[1{spaces}2]", f"positions=[{spaces}x]", f"all{spaces}%"):
        with pytest.raises(SelectorError) as refused:
            check_selector(text)
        assert len(str(refused.value)) < 1000
