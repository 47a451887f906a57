"""The benchmark's drivers on the real vLLM: stock, and ours; one process each, as everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT
from steerscope.engines.vllm.settings import VLLMSettings
from support.waiting import HUNG_S

SMALL = ["--engine", "vllm", "--model", "tiny", "--batch", "4", "--prefill", "16", "--decode", "6", "--iterations", "2"]


def bench(output: Path, *words: str, **environment: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "steerscope.cli.main",
        "bench",
        *words,
        *SMALL,
        "--eager",
        "--batched-tokens",
        "512",
    ]
    done = subprocess.run(
        [*command, "--out", str(output)],
        env={**os.environ, **VLLM_ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(output.read_text())


@pytest.mark.long
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.slow
def test_stock_vllm_and_all_layers(tmp_path: Path) -> None:
    bare = bench(tmp_path / "a.json", "capture", "--mode", "baseline")
    ours = bench(tmp_path / "b.json", "capture", "--mode", "all-layers")
    assert bare["verified"]["rows"] == 0
    assert ours["verified"]["rows"] == 4 * (16 + 6 - 1) * 4
    assert ours["verified"]["checksum"] > 0
    assert {"mode", "async_scheduling", "max_num_seqs", "prefix_caching"} <= bare["engine"].keys()
    for name in ("mode", "max_num_seqs", "max_num_batched_tokens", "prefix_caching"):
        assert bare["engine"][name] == ours["engine"][name]
    assert bare["iterations"][0]["steps"] <= 6 + 2


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.long
def test_taps_that_do_nothing_are_timed_without_looking_at_rows(tmp_path: Path) -> None:
    found = bench(tmp_path / "a.json", "capture", "--mode", "all-layers", STEERSCOPE_NOOP="1")
    assert found["engine"]["noop"]
    assert found["verified"]["rows"] == 4 * (16 + 6 - 1) * 4
    assert found["verified"]["checksum"] is None


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.long
def test_pairs_of_real_engines(tmp_path: Path) -> None:
    """Three processes: requests end one after the other, rows are counted and copied, and what steers does; and hooks
    are timed."""
    output = tmp_path / "pairs.json"
    words = "--model tiny --loads 4x16+11:16 2x40+8 --tokens 2048 --eager --rounds 4 --warmups 1 --profile all-layers"
    cells = ["--cells", "noise", "all-layers", "generated", "cap", "watch"]
    cells += ["--rounds-of", *(f"2x40-8/{cell}=0" for cell in cells[1:] if cell != "generated")]
    command = [sys.executable, "-m", "bench.gpu.paired", *words.split(), *cells, "--out", str(output)]
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    hooks = json.loads((tmp_path / "profile-all-layers.json").read_text())["profile"]["hooks"]
    assert hooks["WorkerTaps._prepare_step"]["calls_per_step"] == pytest.approx(1, abs=0.1)
    assert hooks["WorkerTaps._prepare_step"]["median_call_us"] > 0
    other = json.loads((tmp_path / "pairs-2x40-8.json").read_text())["cells"]
    assert {name: (cell["rows"], cell["steps"]) for name, cell in other.items()} == {"generated": (4 * 2 * 7, [8, 8])}
    found = json.loads((tmp_path / "pairs-4x16-11-16.json").read_text())["cells"]
    made = 15 + 14 + 12 + 10
    assert found["all-layers"]["rows"] == 4 * (4 * 16 + made)
    assert found["generated"]["rows"] == 4 * made
    assert all(found[cell]["verified"] is True for cell in ("all-layers", "generated", "cap"))
    assert [found[cell]["same_tokens"] for cell in ("noise", "all-layers", "generated")] == [1.0] * 3
    assert found["cap"]["same_tokens"] < 1  # its bounds are reached
    for cell in found.values():
        assert cell["steps"] == [16, 16]
        for seconds, parts in zip(cell["tapped_s"], cell["phases_of_rounds"]["tapped"], strict=True):
            assert sum(parts[:-1]) == pytest.approx(1e3 * seconds, abs=0.1)  # the last is that of one step


def test_noop_is_part_of_what_vllm_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEERSCOPE_NOOP", raising=False)
    plain = VLLMSettings().additional_config()
    monkeypatch.setenv("STEERSCOPE_NOOP", "1")
    assert VLLMSettings().noop
    assert VLLMSettings().additional_config() != plain
