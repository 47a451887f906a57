"""Rows by position, and what their labels say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerscope.core.rows import Label, RowBuffer, make_labels, selected
from steerscope.core.slot_table import Key
from steerscope.specs.errors import RequestFailed
from steerscope.specs.tokens import EVERYWHERE, MessageSpan, Positions

PROPERTY = settings(deadline=None, max_examples=80, derandomize=True)
KEYS: list[Key] = [(0, "resid_post"), (3, "mlp_out")]
HIDDEN = 3
SELECTIONS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4).map(Positions.of)
SPANS = (
    MessageSpan(0, "system", (1, 3), (0, 4)),
    MessageSpan(1, "user", (5, 7), (4, 8)),
)


def rows_of(positions: np.ndarray) -> torch.Tensor:
    """A row that says which position and key it is."""
    base = torch.from_numpy(positions).float().reshape(-1, 1, 1)
    return base + torch.arange(len(KEYS)).reshape(1, -1, 1) / 10 + torch.zeros(1, 1, HIDDEN)


@PROPERTY
@given(SELECTIONS, st.integers(0, 25))
def test_selected_lists_the_chosen_positions_below_the_end_in_order(positions: Positions, stop: int):
    assert selected(positions, stop).tolist() == [i for i in range(stop) if i in positions]


@PROPERTY
@given(
    positions=SELECTIONS,
    most=st.integers(1, 22),
    cut=st.integers(0, 30),
    chunks=st.lists(st.integers(1, 6), min_size=25, max_size=25),
)
def test_rows_written_in_any_chunks_come_back_by_position_and_cut_to_what_was_computed(positions, most, cut, chunks):
    buffer = RowBuffer(KEYS, positions, most, HIDDEN, torch.float32)
    start = 0
    for size in chunks:
        stop = min(start + size, most)
        chosen = np.array([i for i in range(start, stop) if i in positions], dtype=np.int64)
        if len(chosen):
            buffer.write(start, rows_of(chosen))
        start = stop
    index = np.array([i for i in range(min(cut, most)) if i in positions], dtype=np.int64)
    assert torch.equal(buffer.finish(len(index)), rows_of(index))


def test_a_missing_row_is_an_error_and_never_a_gap():
    buffer = RowBuffer(KEYS, EVERYWHERE, 10, HIDDEN, torch.float32)
    buffer.write(0, rows_of(np.arange(3)))
    with pytest.raises(RequestFailed, match="row 3 is missing: position 5 would be row 5"):
        buffer.write(5, rows_of(np.arange(5, 7)))
    with pytest.raises(RequestFailed, match="2 of 5 rows were never computed"):
        buffer.finish(5)
    assert buffer.finish(3).shape == (3, 2, HIDDEN)


def test_rows_written_twice_are_an_error():
    buffer = RowBuffer(KEYS, EVERYWHERE, 10, HIDDEN, torch.float32)
    buffer.write(0, rows_of(np.arange(3)))
    with pytest.raises(RequestFailed):
        buffer.write(1, rows_of(np.arange(1, 3)))


def test_the_memory_of_rows_that_were_never_needed_is_given_back():
    buffer = RowBuffer(KEYS, EVERYWHERE, 1000, HIDDEN, torch.bfloat16)
    buffer.write(0, torch.ones(4, 2, HIDDEN))
    rows = buffer.finish(4)
    assert rows.untyped_storage().nbytes() == 4 * 2 * HIDDEN * 2
    assert rows.dtype == torch.bfloat16


# --- labels


def test_labels_say_request_position_token_phase_message_and_role():
    labels = make_labels("r7", np.array([0, 1, 6, 9, 10]), list(range(100, 112)), 9, SPANS, False)
    assert list(labels) == [
        Label("r7", 0, 100, "prompt", None, None),  # template text belongs to no message
        Label("r7", 1, 101, "prompt", 0, "system"),
        Label("r7", 6, 106, "prompt", 1, "user"),
        Label("r7", 9, 109, "generated", 2, "assistant"),
        Label("r7", 10, 110, "generated", 2, "assistant"),
    ]


def test_generated_rows_continue_an_open_message():
    spans = (SPANS[0], MessageSpan(1, "assistant", (5, 8), (4, 8)))
    labels = make_labels("r", np.arange(10), list(range(10)), 8, spans, True)
    assert [label.message for label in labels][5:] == [1, 1, 1, 1, 1]
    assert labels[9].role == "assistant"
    assert labels.roles == ("system", "assistant")


def test_without_a_chat_there_is_no_message_and_no_role():
    labels = make_labels("r", np.arange(4), [5, 6, 7, 8], 3, None, False)
    assert [(label.phase, label.message, label.role) for label in labels] == [("prompt", None, None)] * 3 + [
        ("generated", None, None)
    ]


@PROPERTY
@given(positions=SELECTIONS, prompt_length=st.integers(1, 21), open_message=st.booleans())
def test_labels_of_any_selection_agree_with_the_spans(positions: Positions, prompt_length: int, open_message: bool):
    index = selected(positions, 21)
    labels = make_labels("r", index, list(range(1000, 1021)), prompt_length, SPANS, open_message)
    assert len(labels) == len(index)
    for label, position in zip(labels, index, strict=True):
        inside = [span.index for span in SPANS if span.content[0] <= position < span.content[1]]
        message = (1 if open_message else 2) if position >= prompt_length else inside[0] if inside else None
        assert label.position == position
        assert label.token_id == 1000 + position
        assert label.phase == ("generated" if position >= prompt_length else "prompt")
        assert label.message == message


def test_labels_become_plain_columns_and_can_be_picked():
    labels = make_labels("r", np.arange(5, 9), list(range(20)), 8, SPANS, False)
    table = labels.table()
    assert table["position"] == [5, 6, 7, 8]
    assert table["role"] == ["user", "user", None, "assistant"]
    assert set(table) == {"request", "position", "token_id", "phase", "message", "role"}
    assert list(labels.take(np.array([3, 0]))) == [labels[3], labels[0]]
