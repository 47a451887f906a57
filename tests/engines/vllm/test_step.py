"""The books of a step, driven with what a scheduler can order: chunks, mixed batches, preemption, steps too many.

An independent oracle recomputes, token by token, what every index row must say.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.engines.vllm.step import CELL, ENTRIES, GROUP, Asker, Books, Filled
from steerscope.engines.vllm.wire import Wire, WireCapture, WireColumn
from steerscope.residual.table import Lease
from steerscope.specs.tokens import END, EVERYWHERE, Positions

COLUMNS, TOKENS = 2, 64


def asker(
    name: str, positions: Positions | None, columns: tuple[Positions, ...] = (), most: int = 1000, slot: int = 1
) -> Asker:
    capture = positions and WireCapture(((0, "resid_post"), (1, "resid_post")), positions, False, None, 0, most)
    wire = Wire(name, None, 0, 0, tuple(WireColumn(b"", None, {}, p, 0) for p in columns), capture)
    leases = [Lease(slot + k, slot + k, b"", b"") for k in range(len(columns))]
    return Asker(wire, leases, 3 if positions else 0, 2 if positions else 0)


class Pool:
    """Hands out cells one step after another, never the same twice."""

    def __init__(self) -> None:
        self.next = 1

    def reserve(self, cells: int) -> int:
        first, self.next = self.next, self.next + cells
        return first


def step(books: Books, pool: Pool, *parts: tuple[str, int, int]) -> Filled:
    """Requests with their first position and number of tokens, in batch order."""
    starts = np.cumsum([0, *(count for _, _, count in parts)])
    return books.fill([name for name, _, _ in parts], starts, np.array([at for _, at, _ in parts]), pool.reserve)


def test_a_chunk_in_a_mixed_batch_is_addressed_by_absolute_position() -> None:
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["a"] = asker("a", Positions(((0, 2), (5, 9))))
    step(books, pool, ("a", 0, 4))
    filled = step(books, pool, ("plain", 40, 1), ("a", 4, 6), ("other", 0, 3))
    assert [(s.start, s.stop) for s in filled.slices] == [(5, 9)]
    assert books.index[:11, GROUP].tolist() == [0, 0, 3, 3, 3, 3, 0, 0, 0, 0, 0]
    cell = filled.slices[0].cell
    assert books.index[2:6, CELL].tolist() == [cell, cell + 2, cell + 4, cell + 6]


def test_columns_act_at_their_own_positions_only() -> None:
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["a"] = asker("a", None, (EVERYWHERE, Positions(((3, END),))), slot=5)
    step(books, pool, ("x", 0, 1), ("a", 2, 3))
    assert books.index[:5, ENTRIES:].tolist() == [
        [0] * 6,
        [5, 5, 0, 0, 0, 0],
        [5, 5, 0, 6, 6, 0],
        [5, 5, 0, 6, 6, 0],
        [0] * 6,
    ]


def test_nothing_stays_in_the_index_when_an_asker_is_gone() -> None:
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["a"] = asker("a", EVERYWHERE, (EVERYWHERE,))
    step(books, pool, ("a", 0, 10))
    assert not books.clean
    del books.askers["a"]
    filled = step(books, pool, ("b", 0, 20))
    assert filled.tokens == 0
    assert books.clean
    assert not books.index.any()


def test_a_preempted_request_writes_the_same_rows_again() -> None:
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["a"] = one = asker("a", EVERYWHERE)
    step(books, pool, ("a", 0, 8))
    step(books, pool, ("a", 8, 1))
    filled = step(books, pool, ("a", 0, 9))
    assert [(s.start, s.stop) for s in filled.slices] == [(0, 9)]
    assert one.seen == 9
    assert one.failed is None


def test_rows_that_were_never_computed_void_the_request_and_only_that() -> None:
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["cached"], books.askers["b"] = asker("cached", EVERYWHERE), asker("b", EVERYWHERE)
    filled = step(books, pool, ("cached", 16, 4), ("b", 0, 4))
    assert [s.asker.wire.name for s in filled.slices] == ["b"]
    assert "before position 16 were never computed" in str(books.askers["cached"].failed)
    assert books.index[:4, GROUP].tolist() == [0] * 4


def test_a_void_capture_goes_on_being_steered() -> None:
    """Its keys and values are cached under the salt of its steering: they must be steered ones."""
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["a"] = one = asker("a", EVERYWHERE, (EVERYWHERE,), slot=5)
    one.failed = "rows are missing"
    filled = step(books, pool, ("a", 0, 3))
    assert filled.slices == []
    assert books.index[:3, ENTRIES].tolist() == [5, 5, 5]


def test_a_slice_says_how_many_rows_are_there_with_it_and_not_with_the_next() -> None:
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["a"] = asker("a", Positions(((0, 2), (4, 5), (7, 10))))
    assert [part.reached for part in step(books, pool, ("a", 0, 9)).slices] == [2, 3, 5]
    assert [part.reached for part in step(books, pool, ("a", 0, 10)).slices] == [5, 5, 6], "fed again: none is lost"


def test_steps_too_many_have_no_rows() -> None:
    """An asynchronous scheduler runs on until it hears that the text has ended."""
    books, pool = Books(TOKENS, COLUMNS), Pool()
    books.askers["a"] = asker("a", EVERYWHERE, most=9)
    step(books, pool, ("a", 0, 8))
    assert len(step(books, pool, ("a", 8, 1)).slices) == 1
    for at in (9, 10, 11):
        assert step(books, pool, ("a", at, 1)).slices == []
        assert not books.index[:, GROUP].any()


POSITIONS = st.builds(
    lambda cuts: Positions.of(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)),
    st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
)


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[str, int, int]]]:
    """Steps of up to four requests: chunked prompts, decoding, preemption to 0, in any batch order."""
    at = dict.fromkeys("abcd", 0)
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        parts = []
        for name in names:
            if draw(st.integers(0, 9)) == 0:
                at[name] = 0  # preempted: everything is computed again
            count = draw(st.integers(1, 12))
            parts.append((name, at[name], count))
            at[name] += count
        steps.append(parts)
    return steps


@settings(max_examples=150, deadline=None)
@given(histories(), st.lists(POSITIONS, min_size=4, max_size=4), st.lists(POSITIONS, min_size=4, max_size=4))
def test_every_index_row_says_what_an_oracle_says(
    history: list[list[tuple[str, int, int]]], captured: list[Positions], steered: list[Positions]
) -> None:
    books, pool = Books(TOKENS, COLUMNS), Pool()
    for i, name in enumerate("abcd"):
        if i < 3:  # "d" asks for nothing
            books.askers[name] = asker(name, captured[i] if i else None, (steered[i],), most=50, slot=1 + i)
    for parts in history:
        filled = step(books, pool, *parts)
        cells = {
            (s.asker.wire.name, s.start + i): s.cell + 2 * i for s in filled.slices for i in range(s.stop - s.start)
        }
        assert len(set(cells.values())) == len(cells)
        token = 0
        for name, at, count in parts:
            for position in range(at, at + count):
                row, number = books.index[token], "abcd".index(name)
                wanted = name in "bc" and position in captured[number] and position < 50
                assert row[GROUP] == (3 if wanted else 0)
                assert row[CELL] == (cells[name, position] if wanted else 0)
                acts = name in "abc" and position in steered[number]
                assert row[ENTRIES:].tolist() == ([1 + number, 1 + number, 0] if acts else [0] * 3) + [0] * 3
                token += 1
        assert not books.index[token:].any()


@pytest.mark.parametrize("packed_through_msgpack", [False, True])
def test_the_wire_survives_its_way(packed_through_msgpack: bool) -> None:
    wire = Wire(
        "r0.0",
        ("/somewhere", 1 << 30),
        4096,
        2**61 + 1,
        (
            WireColumn(
                b"\x00\xff", b"\x01\x02", {(3, "resid_post"): (0.0, 1.0, 1.0, float("-inf"), 2.5)}, EVERYWHERE, 0
            ),
        ),
        WireCapture(((1, "resid_mid"), (2, "attn_out")), Positions(((0, 4),)), True, "mean", 4, 17),
    )
    packed = wire.pack()
    if packed_through_msgpack:
        msgspec = pytest.importorskip("msgspec")
        packed = msgspec.msgpack.decode(msgspec.msgpack.encode(packed))
    assert Wire.unpack(packed) == wire
