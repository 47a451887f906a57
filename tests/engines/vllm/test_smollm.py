"""The embedded model, SmolLM2-135M-Instruct, by its name on vLLM: mixed requests together in steps of 32 tokens, every
row, count and greedy token against the transformers engine."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT
from engines.vllm.mode_script import CHUNK, LIMIT, Shape, first_wave, mixed
from steerscope.models import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
]
SMOLLM = Shape(576, (100, 49000), ("all", "0", "10-15", "29"), ("all", "3,17,28", "0", "10-12", "29"), ends=False)


def test_mixed_requests_on_the_embedded_model_have_exact_rows_counts_and_tokens() -> None:
    import steerscope
    from support.ledger import Ledger
    from support.oracle import Oracle

    for variable, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options = {"enforce_eager": True, "max_model_len": 256, "max_num_batched_tokens": CHUNK, "max_num_seqs": CHUNK}
    engine = steerscope.load(
        "smollm2-135m",
        engine="vllm",
        dtype="float32",
        taps={"sites": ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")},
        vllm={**options, "kv_cache_memory_bytes": 256 << 20, "block_size": 32},
        capture_budget=512 << 20,
    )
    model = AutoModelForCausalLM.from_pretrained(resolve("smollm2-135m"), dtype=torch.float32).eval()
    try:
        ledger = Ledger()
        found = first_wave(engine, Oracle(model), mixed(24, SMOLLM), ledger)
        assert ledger.wrong == []
        assert ledger.worst_row < LIMIT
        assert found["together"] == 24
        assert found["greedy"] >= 20
        assert found["longest"] > 2 * CHUNK
        assert ledger.rows > 10_000
        assert engine.stats()["capture_bytes"] == 0
    finally:
        engine.close()
