"""What cells ask for, and the refusal to report what was not measured."""

import pytest

from steerscope.bench.workload import (
    NotMeasured,
    Setup,
    capture_of,
    check_batched,
    check_cell,
    steering_of,
    wanted_rows,
)
from steerscope.specs import Add, Cap
from steerscope.specs.errors import InvalidRequest

SETUP = Setup("tiny", batch=4, prefill=16, decode=8, tokens=64)
TOKENS = [[1] * 8] * 4


def test_a_real_batch_passes() -> None:
    check_batched(SETUP, TOKENS, 10)
    check_batched(SETUP, TOKENS, None)


@pytest.mark.parametrize(
    ("tokens", "steps", "why"),
    [
        ([[1] * 8] * 3 + [[1] * 7], 10, "with \\[7\\] tokens instead of 8"),
        ([[1] * 8] * 3, 10, "3 of 4 requests"),
        (TOKENS, 4 * 8 + 4, "did not run together"),
    ],
)
def test_what_is_not_a_batch_is_refused(tokens: list[list[int]], steps: int, why: str) -> None:
    with pytest.raises(NotMeasured, match=why):
        check_batched(SETUP, tokens, steps)


@pytest.mark.parametrize(
    ("cell", "rows"),
    [("zero-layer", 0), ("all-layers", 4 * 23 * 6), ("layers=0,2", 4 * 23 * 2), ("one-layer", 4 * 23),
     ("generated", 4 * 7 * 6), ("last", 4 * 6), ("mean", 4 * 6), ("add", 0)],
)  # fmt: skip
def test_rows_that_must_arrive(cell: str, rows: int) -> None:
    assert wanted_rows(SETUP, check_cell(cell), 6) == rows
    assert (capture_of(cell, 6) is None) == (rows == 0)


def test_every_request_is_steered_its_own_way_or_all_alike() -> None:
    each = steering_of("add", 6, 8, 4)
    assert isinstance(each, list)
    assert len({str(op.vector.model_dump()) for op in each}) == 4
    assert {op.layers for op in each} == {"all"}
    assert isinstance(steering_of("add:same", 6, 8, 4), Add)
    one = steering_of("cap:one:same", 6, 8, 4)
    assert isinstance(one, Cap)
    assert tuple(one.layers) == (3,)


def test_an_unknown_cell_is_refused() -> None:
    for cell in ("nonsense", "add:two", "lens"):
        with pytest.raises(InvalidRequest, match="is unknown"):
            check_cell(cell)


def test_prompts_differ_between_rounds_and_come_again() -> None:
    assert SETUP.prompts(0) == SETUP.prompts(0) != SETUP.prompts(1)
    assert [len(prompt) for prompt in SETUP.prompts(0)] == [16] * 4


def test_bytes_of_a_round_are_those_of_its_rows() -> None:
    assert SETUP.row_bytes() == 4 * 24 * 4 * 128 * SETUP.torch_dtype.itemsize
