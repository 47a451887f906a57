"""What the pages say about corpora: the measured store, and the arithmetic."""

import json
from pathlib import Path

from bench.tables.scale import scale

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_the_measured_store_keeps_up_with_the_disk() -> None:
    found = json.loads((RESULTS / "store.json").read_text())
    assert found["rows"] == 1_000_000
    assert len(found["rounds"]) >= 5
    assert found["ratios"]["write"] >= 0.6
    assert found["ratios"]["read"] >= 0.6


def test_a_billion_tokens_by_hand() -> None:
    lines = {line.split("|")[1].strip(): line.split("|") for line in scale(RESULTS).splitlines() if line.count("|") > 6}
    one, everything = lines["one layer, every token"], lines["all 36 layers, every token"]
    assert [one[2].strip(), one[3].strip()] == ["4,096", "4.1 TB"]  # 2048 × 2 bytes
    assert [everything[2].strip(), everything[3].strip()] == ["147,456", "147.5 TB"]
    assert lines["all 36 layers, mean of each document"][3].strip() == "147 GB"
