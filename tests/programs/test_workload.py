"""What cells ask for, and the refusal to report what was not measured."""

import math

import pytest

from bench.gpu.drivers import load_of, widest
from steerscope.bench.workload import (
    NotMeasured,
    Setup,
    capture_of,
    check_batched,
    check_cell,
    check_setup,
    check_streams,
    steering_of,
    wanted_rows,
)
from steerscope.specs import Add, Cap
from steerscope.specs.errors import InvalidRequest

SETUP = Setup(model="tiny", engine="vllm", batch=4, prefill=16, decode=8, tokens=64)
TOKENS = [[1] * 8] * 4


def test_a_real_batch_passes() -> None:
    check_batched(SETUP, TOKENS, 10)
    check_batched(SETUP, TOKENS, None)


@pytest.mark.parametrize(
    ("tokens", "steps", "why"),
    [
        ([[1] * 8] * 3 + [[1] * 7], 10, "texts of \\[7\\] tokens, each should have 8"),
        ([[1] * 8] * 3, 10, "3 of 4 requests"),
        (TOKENS, 4 * 8 + 4, "did not run together"),
    ],
)
def test_what_is_not_a_batch_is_refused(tokens: list[list[int]], steps: int, why: str) -> None:
    with pytest.raises(NotMeasured, match=why):
        check_batched(SETUP, tokens, steps)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize(
    ("batch", "prefill", "room"), [(2, 6, 2048), (32, 512, 16384), (64, 512, 16384), (5, 40, 64), (256, 512, 16384)]
)
@pytest.mark.parametrize("stagger", [0, 3])
def test_two_halves_one_after_the_other_are_no_batch(
    engine: str, batch: int, prefill: int, room: int, stagger: int
) -> None:
    """However few tokens a text may have: those that could not tell are refused before anything starts."""
    told = 0
    for decode in range(max(2, stagger + 1), 16):
        setup = Setup(
            model="tiny", engine=engine, batch=batch, prefill=prefill, decode=decode, tokens=room, stagger=stagger
        )
        reading = [math.ceil(size * prefill / room) if engine == "vllm" else 0 for size in (batch // 2, -(-batch // 2))]
        ends = setup.decodes()
        halves = sum(reading) + sum(max(half) - 1 for half in (ends[: batch // 2], ends[batch // 2 :]))
        try:
            check_setup(setup)
        except InvalidRequest:
            assert decode < 8 + 2 * stagger
            continue
        texts = [[1] * count for count in ends]
        prompts = setup.prompt_steps() if engine == "vllm" else 0
        check_batched(setup, texts, prompts + decode - 1 + (engine == "vllm"))  # an asynchronous engine is one ahead
        with pytest.raises(NotMeasured, match="did not run together"):
            check_batched(setup, texts, halves)
        told += 1
    assert told


def test_one_request_is_a_batch_of_its_own() -> None:
    check_setup(Setup(model="tiny", engine="vllm", batch=1, decode=2))
    with pytest.raises(InvalidRequest, match="2 tokens do not show whether 2 requests run together"):
        check_setup(Setup(model="tiny", engine="vllm", batch=2, decode=2))


@pytest.mark.parametrize("stagger", [-1, 8])
def test_texts_cannot_end_before_their_first_token(stagger: int) -> None:
    with pytest.raises(InvalidRequest, match="every request makes a token at least"):
        check_setup(Setup(model="tiny", engine="vllm", batch=4, decode=8, stagger=stagger))


def test_requests_may_end_one_after_the_other() -> None:
    setup = Setup(model="tiny", engine="vllm", batch=4, prefill=16, decode=14, stagger=6, tokens=64)
    assert setup.decodes() == [14, 12, 10, 8]
    check_batched(setup, [[1] * count for count in (14, 12, 10, 8)], 15)
    with pytest.raises(NotMeasured, match="texts of \\[14\\] tokens, each should have its own of 8 to 14"):
        check_batched(setup, [[1] * 14] * 4, 15)
    made = 13 + 11 + 9 + 7
    wanted = {"all-layers": 4 * 16 + made, "generated": made, "last": 4, "mean": 4}
    assert {cell: wanted_rows(setup, cell, 6) for cell in wanted} == {cell: 6 * rows for cell, rows in wanted.items()}


def test_streams_that_began_when_another_had_ended_are_not_reported() -> None:
    check_streams(SETUP, [8] * 4, 1.0, 1.0)
    with pytest.raises(NotMeasured, match="did not run together"):
        check_streams(SETUP, [8] * 4, 1.1, 1.0)
    with pytest.raises(NotMeasured, match="streams of \\[7, 8\\] tokens instead of 8"):
        check_streams(SETUP, [8, 8, 8, 7], 0.0, 1.0)


@pytest.mark.parametrize(
    ("batch", "steps"),
    [(1, 1), (32, 1), (33, 2), (64, 3), (256, 9)],  # the last two as vLLM on a GPU told
)
def test_prompts_are_read_in_so_many_steps(batch: int, steps: int) -> None:
    assert Setup(model="qwen2.5-3b", batch=batch).prompt_steps() == steps


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
    alike = steering_of("add:same", 6, 8, 4)
    assert alike is not None
    assert isinstance(alike[0], Add)
    assert alike == [alike[0]] * 4
    capped = steering_of("cap:one:same", 6, 8, 4)
    assert capped is not None
    assert isinstance(capped[0], Cap)
    assert tuple(capped[0].layers) == (3,)


def test_an_unknown_cell_is_refused() -> None:
    for cell in ("nonsense", "add:two", "lens"):
        with pytest.raises(InvalidRequest, match="is unknown"):
            check_cell(cell)


def test_prompts_differ_between_rounds_and_come_again() -> None:
    assert SETUP.prompts(0) == SETUP.prompts(0) != SETUP.prompts(1)
    assert [len(prompt) for prompt in SETUP.prompts(0)] == [16] * 4


def test_bytes_of_a_round_are_those_of_its_rows() -> None:
    assert SETUP.row_bytes() == 4 * 24 * 4 * 128 * SETUP.torch_dtype.itemsize


def test_loads_are_named_as_the_tables_show_them() -> None:
    loads = [load_of(SETUP, text) for text in ("3x10+7", "2x90+4:12")]
    sizes = [(one.batch, one.prefill, one.decode, one.stagger) for one in [*loads, widest(loads)]]
    assert sizes == [(3, 10, 7, 0), (2, 90, 12, 8), (3, 90, 12, 0)]
    assert loads[1].decodes() == [12, 4]
    assert {(one.model, one.tokens) for one in loads} == {("tiny", 64)}


@pytest.mark.parametrize("text", ["8x512", "8x512+128:", "0x512+128", "8x0+128", "8x512+0", "x"])
def test_what_is_no_load_is_refused_with_the_form_of_one(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a load.*BATCHxPREFILL"):
        load_of(SETUP, text)
