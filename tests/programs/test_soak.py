"""The soak's own judgement: what it must notice, and that what is committed holds."""

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.stress.mixture import Found
from bench.stress.processes import look
from bench.stress.soak import problems, trend
from steerscope.capture.rows import Rows
from steerscope.core.rows import Labels

RESULTS = Path(__file__).parents[2] / "bench" / "results"

FLAT = {"thirds": [100.0, 100.0, 101.0]}
GROWING = {**dict.fromkeys(("threads", "first_token_ms", "token_ms"), FLAT), "memory_mib": {"thirds": [1, 100, 104]}}


def result(**changes: Any) -> dict[str, Any]:
    rest = {"handles": 10, "threads": 4, "shared": 1, "capture_mib": 0.0}
    good = {"wrong": [], "orphans": [], "before": rest, "after": rest}
    return good | {"trends": dict.fromkeys(("memory_mib", "threads", "first_token_ms", "token_ms"), FLAT)} | changes


def test_what_is_flat_holds() -> None:
    assert problems(result()) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"wrong": ["an answer"]}, "an answer"),
        ({"orphans": ["/dev/shm/left"]}, "was left in shared memory"),
        ({"after": {"handles": 11, "threads": 4, "shared": 1, "capture_mib": 0.0}}, "handles at rest"),
        ({"after": {"handles": 10, "threads": 4, "shared": 1, "capture_mib": 0.1}}, "capture_mib at rest"),
        ({"trends": GROWING}, "memory_mib grows"),
    ],
)
def test_what_grows_or_is_wrong_is_told(changes: dict[str, Any], told: str) -> None:
    (problem,) = problems(result(**changes))
    assert told in problem


def test_a_trend_is_found_under_noise_and_minutes_without_values_stay_empty() -> None:
    at = np.arange(0, 600, 5.0)
    at = at[(at < 120) | (at > 180)]
    values = 50 + at / 60 + np.random.default_rng(0).normal(0, 0.1, len(at))
    found = trend(np.stack([at, values], axis=1))
    low, high = found["per_hour"][1:]
    assert low < 60 < high
    assert [minute for minute, value in enumerate(found["by_minute"]) if value is None] == [2]
    assert found["thirds"] == sorted(found["thirds"])


def found(text: str = "a", row: float = 1.0, score: float = 0.5) -> Found:
    at = np.arange(2)
    labels = Labels("one", at, at, at < 0, at, ("user",))
    return Found(text, Rows({(0, "resid_post"): torch.full((2, 4), row)}, labels, "tiny"), [{"joy": score}])


def test_an_answer_that_drifts_is_noticed() -> None:
    assert found().differs(found()) is None
    assert "instead of" in str(found(text="b").differs(found()))
    assert "away" in str(found(row=1.01).differs(found()))
    assert "scores" in str(found(score=0.52).differs(found()))


def test_a_process_is_seen_with_what_it_holds() -> None:
    before = look(os.getpid())
    handle = os.open("/dev/null", os.O_RDONLY)
    kept = mmap.mmap(-1, 64 << 20)  # not from the allocator, which may have kept memory of earlier tests
    for _ in range(64):
        kept.write(b"x" * (1 << 20))
    spent = time.process_time()
    while time.process_time() - spent < 0.1:
        pass
    after = look(os.getpid())
    os.close(handle)
    assert after.handles == before.handles + 1
    assert after.memory_mib > before.memory_mib + 0.9 * len(kept) / 2**20
    assert after.processor_s > before.processor_s


def test_the_committed_hour_holds() -> None:
    data = json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))
    assert data["minutes"] >= 60
    assert problems(data) == []
