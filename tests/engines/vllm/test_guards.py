"""What is refused before anything is tapped, each with one clear error; and stress, in a process of its own."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT, saved, start_vllm
from steerscope.engines.load import load_engine
from steerscope.engines.plan import Facts, Planner, Prompt
from steerscope.engines.vllm import guards
from steerscope.engines.vllm.settings import VLLMSettings, asked_for
from steerscope.specs import Add, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.errors import CapacityExceeded, UnsupportedModel
from support.waiting import HUNG_S

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")


def config(**changes: object) -> Any:
    """The parts of a VllmConfig that are looked at, all as they must be."""
    parallel = SimpleNamespace(enable_dbo=False, prefill_context_parallel_size=1, decode_context_parallel_size=1)
    model = SimpleNamespace(enable_sleep_mode=False, enable_prompt_embeds=False, runner_type="generate")
    compilation = SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False))
    made = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        compilation_config=compilation,
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
        additional_config={},
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        part = made
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return made


def test_a_plain_configuration_passes() -> None:
    guards.check_config(config())


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("speculative_config", object(), "speculative_config"),
        ("parallel_config__enable_dbo", True, "enable_dbo"),
        ("parallel_config__prefill_context_parallel_size", 2, "prefill_context_parallel_size"),
        ("parallel_config__decode_context_parallel_size", 2, "decode_context_parallel_size"),
        ("compilation_config__pass_config__enable_sp", True, "pass_config.enable_sp"),
        ("parallel_config__enable_hc_sp", True, "enable_hc_sp"),
        ("kv_transfer_config", object(), "kv_transfer_config"),
        ("model_config__enable_sleep_mode", True, "enable_sleep_mode"),
        ("model_config__enable_prompt_embeds", True, "enable_prompt_embeds"),
        ("lora_config", object(), "lora_config"),
        ("cache_config__kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("parallel_config__data_parallel_size", 2, "data_parallel_size"),
        ("parallel_config___api_process_count", 2, "api_server_count"),
        ("model_config__runner_type", "pooling", "runner"),
    ],
)
def test_what_would_make_rows_wrong_is_refused_by_name(setting: str, value: object, named: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        guards.check_config(config(**{setting: value}))
    assert [problem.field for problem in refusal.value.problems] == [named]


def test_all_refusals_come_together() -> None:
    with pytest.raises(InvalidRequest, match="2 problems"):
        guards.check_config(config(lora_config=object(), speculative_config=object()))


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "vllm_version", lambda: None)
    with pytest.raises(UnsupportedModel, match=r"vLLM is not installed: pip install 'steerscope\[vllm\]'"):
        load_engine("anything", engine="vllm")


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2"])
def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(guards, "vllm_version", lambda: version)
    with pytest.raises(UnsupportedModel, match=f"vLLM {version} is too old: install 0.26 to 0.33"):
        guards.check_version()


@pytest.mark.parametrize("version", ["0.34.0", "1.26.0"])
def test_a_version_beyond_the_supported_ones_is_warned_of(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(guards, "vllm_version", lambda: version)
    with pytest.warns(UserWarning, match=f"vLLM {version} is not supported"):
        guards.check_version()


@pytest.mark.parametrize("minor", guards.SUPPORTED)
def test_a_supported_version_starts_without_a_word(monkeypatch: pytest.MonkeyPatch, minor: str) -> None:
    monkeypatch.setattr(guards, "vllm_version", lambda: f"{minor}.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guards.check_version()


def test_nothing_is_tapped_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEERSCOPE", raising=False)
    assert asked_for(config()) is None
    assert asked_for(config(additional_config={"steerscope": {"layers": "2-3"}})) == VLLMSettings.parse(
        {"layers": "2-3"}
    )
    monkeypatch.setenv("STEERSCOPE", '{"slots": 8}')
    assert asked_for(config()) == VLLMSettings.parse({"slots": 8})
    monkeypatch.setenv("STEERSCOPE", "0")
    assert asked_for(config()) is None


def test_the_settings_travel_in_what_the_compile_cache_hashes() -> None:
    a, b = (VLLMSettings.parse({"layers": layers}).additional_config() for layers in ("all", "1-2"))
    assert a != b
    assert a["steerscope"]["version"]
    assert asked_for(config(additional_config=json.loads(json.dumps(a)))) == VLLMSettings()


def test_the_taps_of_a_model() -> None:
    assert VLLMSettings.parse({"layers": [0, 2], "sites": ("resid_pre", "resid_post")}).keys(4) == (
        (0, "resid_pre"), (0, "resid_post"), (1, "resid_post"), (2, "resid_post"),
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match=r"layers \[9\] do not exist; the model has layers 0–3"):
        VLLMSettings.parse({"layers": "1,9"}).keys(4)


def test_an_untapped_layer_or_site_is_refused_with_the_others() -> None:
    facts = Facts("m", 4, 8, 100, 256, 4, {}, frozenset({(1, "resid_post"), (2, "resid_post")}))
    add = Add(vector=np.ones(8, np.float32), layers="0-2")
    with pytest.raises(InvalidRequest) as refusal:
        Planner(facts, {}).plan("r", Prompt([1, 2]), Sampling(), Steering.of(add), Capture(layers=1, sites="mlp_out"))
    assert [str(problem) for problem in refusal.value.problems] == [
        "steer.ops[0].layers: resid_post of layers 0 was not tapped when the engine started; "
        "start it with these layers and sites",
        "capture.layers: mlp_out of layers 1 was not tapped when the engine started; "
        "start it with these layers and sites",
    ]


def test_taps_that_only_read_or_only_write_refuse_the_other() -> None:
    add = Add(vector=np.ones(8, np.float32), layers=1)
    reads = Facts("m", 4, 8, 100, 256, 4, {}, steers=False)
    writes = Facts("m", 4, 8, 100, 256, 4, {}, captures=False)
    with pytest.raises(InvalidRequest, match="taps that only read"):
        Planner(reads, {}).plan("r", Prompt([1]), Sampling(), Steering.of(add), None)
    with pytest.raises(InvalidRequest, match="taps that only write"):
        Planner(writes, {}).plan("r", Prompt([1]), Sampling(), Steering(), Capture())


@pytest.mark.parametrize(
    ("options", "named"),
    [({"engine": "vlm"}, "engine"), ({"engine": "vllm", "device": "cuda"}, "device"), ({"taps": {"slots": 4}}, "taps")],
)
def test_options_of_the_wrong_engine_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        load_engine("anything", **options)
    assert refusal.value.problems[0].field == named


def test_a_pool_that_cannot_hold_a_step_is_refused_with_what_would_fit() -> None:
    from steerscope.engines.vllm.worker.device import RowPool, pool_cells

    index = np.zeros((64, 14), np.int32)
    with pytest.raises(CapacityExceeded, match="lower max_num_batched_tokens, or raise pool_bytes"):
        pool_cells(64 * 36, 2048 * 4, 64, 1 << 20, 0)
    for limit, cells in ((None, 10), (74 * 64, 10), (100 * 64 + 63, 36)):  # behind them, a row for every token
        pool = RowPool(torch.device("cpu"), pool_cells(10, 64, 64, limit, 0), 8, 16, torch.float32, index)
        assert len(pool.cells) == cells + 64
        assert pool.take(cells) == 0
        assert pool.take(1) is None


@pytest.mark.parametrize(("memory", "cells"), [(0, 100), (20 * 8 * 120, 120), (20 * 8 * 1000, 200)])
def test_a_gpu_has_room_for_two_steps_within_a_twentieth_of_its_memory(memory: int, cells: int) -> None:
    from steerscope.engines.vllm.worker.device import pool_cells

    assert pool_cells(100, 8, 10, None, memory) == cells
    assert pool_cells(100, 8, 10, 8 * 160, memory) == 150  # who says how much is heard
    assert pool_cells(0, 8, 10, None, memory) == 0  # nothing is captured


@needs_vllm
def test_too_many_ops_and_untapped_layers_leave_the_engine_alive() -> None:
    options = {"sites": ("resid_post",), "tapped": "1-2", "max_columns": 1}
    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", options)
    try:
        vector = np.ones(64, np.float32)
        two = Steering.of(Add(vector=vector, layers=1), Add(vector=vector, layers=1, scale=2.0))
        with pytest.raises(InvalidRequest, match="2 columns, the engine has 1"):
            engine.generate("Hello", Sampling(max_tokens=2), steer=two)
        with pytest.raises(InvalidRequest, match="was not tapped"):
            engine.generate("Hello", Sampling(max_tokens=2), steer=Add(vector=vector, layers=3))
        with pytest.raises(InvalidRequest, match="vLLM penalises the whole text"):
            engine.generate("Hello", Sampling(max_tokens=2, repetition_penalty=1.3, repetition_window=4))
        assert engine.generate("Hello", Sampling(max_tokens=2), capture=Capture(layers="1-2")).rows.n > 0
    finally:
        engine.close()


@needs_vllm
@pytest.mark.long
def test_under_stress_nothing_is_wrong_lost_or_left_over(tmp_path: Path) -> None:
    """More requests than each mode of test_modes.py has, and the memory that they leave."""
    output = tmp_path / "stress.json"
    command = [sys.executable, "-m", "bench.stress", "--engine", "vllm", "--requests", "500"]
    environment = {**os.environ, **VLLM_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    options = ["--cached", "384", "--concurrent", "24", "--out", str(output)]
    done = subprocess.run([*command, *options], env=environment, timeout=HUNG_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found["wrong"] == []
    assert found["sent"] == found["finished"] + found["cancelled"] + found["refused"] == 500
    assert found["reserved_bytes"] == found["delivered_bytes"] + found["released_bytes"] > 0
    assert found["preempted"] > 10
    assert set(found["ends"]) == {"length", "stop", "stop_string", "cancelled", "left", "rule"}
    early, late = found["rss_mib"][len(found["rss_mib"]) // 3], found["rss_mib"][-1]
    assert late - early < 48, f"memory grew from {early} to {late} MiB"


@pytest.mark.parametrize(("has", "found"), [(True, None), (False, "float32")])
def test_a_processor_without_bf16_is_not_given_bf16(monkeypatch: pytest.MonkeyPatch, has: bool, found: str | None):
    pytest.importorskip("vllm")
    from steerscope.engines.vllm.client import start

    monkeypatch.setattr(start, "has_bf16", lambda: has)
    assert start.usable_dtype() == found


def test_on_a_cpu_half_of_the_free_memory_is_taken_unless_someone_says(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    import psutil

    from steerscope.engines.vllm.client import start

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 << 30, total=24 << 30))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert start.share_of_memory() == {}
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    assert start.share_of_memory() == {"gpu_memory_utilization": 0.125}
