"""How many requests and tokens a step has, and the tables and the pool that follow from it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, saved, start_vllm
from steerscope.engines.results import TokenPrompt
from steerscope.engines.vllm.client.start import batched_tokens
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.specs import Add, Capture, InvalidRequest, Sampling

needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
SMALL, LARGE = (36, 2048), (80, 8192)  # layers and hidden size of a 3B and a 70B model
GIB = 1 << 30


def config(shape: tuple[int, int], requests: int, tokens: int, settings: VLLMSettings | None = None) -> Any:
    """The parts of a VllmConfig that are looked at."""
    layers, hidden = shape
    model = SimpleNamespace(
        get_hidden_size=lambda: hidden, hf_text_config=SimpleNamespace(num_hidden_layers=layers), dtype=torch.bfloat16
    )
    scheduler = SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=tokens, enable_chunked_prefill=True)
    extra = {} if settings is None else settings.additional_config()
    return SimpleNamespace(model_config=model, scheduler_config=scheduler, additional_config=extra)


@pytest.mark.parametrize(
    ("shape", "requests", "asked", "slots", "groups"),
    [
        (SMALL, 1024, {}, 1025, 1025),  # each has a vector of its own: 302 MB
        (SMALL, 8, {}, 64, 64),
        (LARGE, 1024, {}, 204, 1025),  # 512 MiB of vectors
        (LARGE, 1024, {"layers": [1, 2]}, 1025, 1025),
        (LARGE, 1024, {"slots": 3000, "groups": 2}, 3000, 2),
    ],
)
def test_tables_have_room_for_every_request_within_their_memory(
    shape: tuple[int, int], requests: int, asked: dict[str, Any], slots: int, groups: int
) -> None:
    found = VLLMSettings.parse(asked).sized(config(shape, requests, 8192))
    assert (found.slots, found.groups) == (slots, groups)
    assert found.sized(config(shape, 7, 8192)) == found, "what is filled in stays"


@pytest.mark.parametrize("name", ["slots", "groups"])
def test_a_table_with_no_row_to_use_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}: 1 leaves none to use; give at least 2"):
        VLLMSettings.parse({name: 1})


@needs_vllm
@pytest.mark.parametrize(
    ("shape", "asked", "memory", "tokens"),
    [
        (SMALL, {}, 141 * GIB, 8192),  # 1.7 GiB of rows
        (LARGE, {}, 80 * GIB, 2048),
        (LARGE, {"capture": False}, 80 * GIB, 8192),
        (LARGE, {"layers": "0-9"}, 80 * GIB, 8192),
        (SMALL, {}, 24 * GIB, 4096),
        (SMALL, {"pool_bytes": GIB}, 141 * GIB, 4096),
    ],
)
def test_a_step_has_vllms_tokens_unless_their_rows_take_too_much_memory(
    shape: tuple[int, int], asked: dict[str, Any], memory: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: memory)
    assert batched_tokens(config(shape, 1024, 8192, VLLMSettings.parse(asked))) == tokens


@needs_vllm
def test_an_engine_has_the_sizes_of_vllms_server_and_runs_as_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with much memory: none of 150 requests waits, though each has a vector of its own."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    server, other = UsageContext.OPENAI_API_SERVER, UsageContext.LLM_CLASS
    defaults = {server: 8192, other: 16384}, {server: 1024, other: 1024}
    monkeypatch.setattr(EngineArgs, "get_batch_defaults", lambda *_: defaults)
    options: dict[str, object] = {"max_batch": None, "max_num_batched_tokens": None, "slots": 0, "groups": 0}
    options |= {"sites": ("resid_post",), "num_gpu_blocks_override": 1024}
    count = 150
    with start_vllm(saved("llama", "bytes", None, {}), "llama", options) as engine:
        aio: Any = engine.aio
        scheduler = aio._llm.vllm_config.scheduler_config
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (1024, 8192)
        assert (aio.settings.slots, aio.settings.groups) == (1025, 1025)
        vectors = np.random.default_rng(0).normal(size=(count, engine.facts.hidden)).astype(np.float32)
        steer = [Add(vector=vector, layers=i % 3) for i, vector in enumerate(vectors)]
        prompts = [TokenPrompt([20 + i % 50, 3, 4]) for i in range(count)]
        asked: dict[str, Any] = {"sampling": Sampling(max_tokens=4, ignore_eos=True)}
        asked["capture"] = [Capture(layers=i % 3, tokens="prompt") for i in range(count)]
        plain, before = engine.generate(prompts, **asked), engine.stats()["steps"]
        done = engine.generate(prompts, steer=steer, **asked)
        assert engine.stats()["steps"] - before <= 5
        for i, (one, other) in enumerate(zip(done, plain, strict=True)):
            moved = one.rows[i % 3] - other.rows[i % 3]
            assert np.allclose(moved.numpy(), vectors[i], atol=1e-3)
