"""Damaged input of every kind, a little each time: a value, or one clear error. The long run is a program."""

import json
from pathlib import Path

import pytest

from bench.stress import readers
from bench.stress.fuzz import Found, fuzz, targets

RESULTS = Path(__file__).parents[2] / "bench" / "results"
with targets() as _known:
    READERS = list(_known)


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_gives_a_value_or_one_clear_error(name: str) -> None:
    found = fuzz(60.0, seed=11, only=name, inputs=25)[name]
    assert found.findings == []
    assert found.inputs == 25
    assert found.refused > 0, "nothing was damaged enough to be noticed"


def test_good_input_is_read() -> None:
    for name, (read, good) in readers.PLAIN.items():
        for one in good:
            assert read(json.loads(json.dumps(one))) is not None, name


def test_what_is_no_error_of_ours_is_a_finding() -> None:
    found = Found()
    for broken in (KeyError("x"), RecursionError(), MemoryError()):

        def read(_: object, broken: Exception = broken) -> None:
            raise broken

        found.one(read, b"input")
    assert [one["error"].partition(":")[0] for one in found.findings] == ["KeyError", "RecursionError", "MemoryError"]


def test_the_committed_run_covers_every_reader_and_found_nothing() -> None:
    known = json.loads((RESULTS / "fuzz.json").read_text())
    assert set(known["readers"]) == set(READERS)
    assert not any(one["findings"] for one in known["readers"].values())
