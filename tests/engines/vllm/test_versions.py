"""The program behind the table of supported versions: what counts as holding, and what it does to others' results."""

from typing import Any

import pytest

from bench.versions import holds, merged

GOOD = {
    "requests": 48,
    "rows": 1800,
    "worst_row": 1e-6,
    "wrong": [],
    "refused": {"LoRA": True, "too many ops": True},
    "alive": True,
}


def test_a_good_run_holds() -> None:
    assert holds(GOOD, 48)


@pytest.mark.parametrize(
    "flaw",
    [
        {"requests": 47},
        {"rows": 0},
        {"worst_row": 2e-4},
        {"worst_row": float("nan")},
        {"wrong": ["soak3: 4 rows instead of 5"]},
        {"refused": {"LoRA": False, "too many ops": True}},
        {"alive": False},
    ],
    ids=str,
)
def test_any_flaw_is_enough(flaw: dict[str, Any]) -> None:
    assert not holds({**GOOD, **flaw}, 48)


def test_a_run_replaces_its_own_version_and_leaves_the_others() -> None:
    def run(version: str, device: str = "cpu", number: int = 0) -> dict[str, Any]:
        return {"vllm": version, "device": device, "number": number}

    known: dict[str, Any] = {}
    for result in (run("0.32.0"), run("0.9.1"), run("0.27.0"), run("0.27.0", "H200"), run("0.27.0", number=1)):
        known = merged(known, result)
    assert [name for name in known] == ["0.9.1 cpu", "0.27.0 cpu", "0.27.0 H200", "0.32.0 cpu"]
    assert known["0.27.0 cpu"]["number"] == 1
