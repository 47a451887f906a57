"""The committed figures of banks, tiers and watched requests reached what was asked of them."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent.parent / "bench" / "results"


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def test_on_a_cpu_a_bank_takes_at_most_a_tenth_of_the_loop_for_one_row_and_a_twentieth_for_many() -> None:
    found = read("lens-267.json")
    assert (found["lenses"], found["hidden"]) == (267, 576)
    assert found["banks"]["1"]["bank fp32"]["ratio"] <= 1 / 10
    assert max(cell["ratio"] for name, cell in found["banks"]["32"].items() if name.startswith("bank")) <= 1 / 20


@pytest.mark.parametrize(
    ("name", "rows", "ms"), [("267", 1, 0.1), ("267", 32, 0.1), ("7947", 1, 1.3), ("7947", 32, 1.6)]
)
def test_on_a_gpu_rows_take_less_than_this(name: str, rows: int, ms: float) -> None:
    found = read(f"gpu/lens-{name}.json")
    assert found["hidden"] == 2560
    assert 1e3 * found["banks"][str(rows)]["bank bf16"]["median"] <= ms


def test_in_vllm_267_lenses_cost_at_most_two_percent() -> None:
    found = read("gpu/speed-qwen2.5-3b.json")["cells"]["watch"]
    assert found["rounds"] >= 20
    assert found["ratio"]["interval"][1] <= 1.02


def test_warm_tiers_take_less_than_a_millisecond() -> None:
    found = read("gpu/lens-267.json")
    assert found["budget"] == 500
    assert found["tiers"]["warm"]["ms_per_token"] <= 1.0
