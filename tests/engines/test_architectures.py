"""Every architecture that users were seen to bring: exact at each site that is offered, refused with a reason else.

`reference.py` names the modules of each family by hand; the engines find them by structure and prove them.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engines.conftest import HAS_VLLM, Start, saved, start_vllm
from steerscope.capture.rows import Rows
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.blocks import find_blocks
from steerscope.engines.hf.taps import Taps
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import SITES, Site
from support import tiny
from support.reference import Reference, RefOp, distance

STATEFUL = ("recurrent_gemma",)  # the state is in its modules
ONE_SUM = ("falcon_h1", "nemotron_h")  # what a block adds has other parts than one mixer's and one MLP's
PARALLEL = ("cohere", "cohere2", "cohere2_moe", "falcon", "gptj", "phi")  # no state between attention and MLP
OFFERED = [name for name in tiny.MORE if name not in STATEFUL]
# Their addends are scaled, normed, split, or returned in another shape than the stream's.
IN_BFLOAT16 = ("bloom", "cohere2", "gemma4_text", "glm4", "granite", "hyperclovax", "llama4_text", "minicpm3", "opt")
PROMPTS = [TokenPrompt(list(range(20, 32))), TokenPrompt([40, 41, 42])]  # the first is longer than sliding windows
LENGTHS = Sampling(max_tokens=6, ignore_eos=True)
TOLERANCE = 1e-5  # of float32
# Prompts and single tokens go through states by different sums; rounding in a router's choice of experts grows.
STATES = dict.fromkeys(
    ("bamba", "granitemoehybrid", "jamba", "kimi_linear", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), 1e-4
)
LAYERS = range(4)


def offered(architecture: str, engine: SyncEngine) -> tuple[Site, ...]:
    """The sites of an engine; the transformers engine has all that the architecture has."""
    if engine.facts.tapped is not None:  # vLLM: what could not be proven was refused when the engine started
        tapped = {site for _, site in engine.facts.tapped}
        return tuple(site for site in SITES if site in tapped)
    refused = engine.facts.refused_sites
    inside = {"attn_out", "mlp_out", "resid_mid"} if architecture in ONE_SUM else set()
    assert set(refused) == ({"resid_mid"} if architecture in PARALLEL else inside)
    assert all(len(why) > 20 for why in refused.values())
    return tuple(site for site in SITES if site not in refused)


def scale_of(model: PreTrainedModel, layer: int) -> float:
    """Gemma 4 multiplies the whole stream at the end of a layer."""
    found = [value for name, value in model.named_buffers() if name.endswith(f"layers.{layer}.layer_scalar")]
    return float(found[0]) if found else 1.0


def added(rows: Rows, layer: int, scale: float) -> Tensor:
    """What a layer adds to its input, in float64."""
    return rows[layer, "resid_post"].double() / scale - rows[layer, "resid_pre"].double()


@pytest.mark.parametrize("architecture", OFFERED, scope="class")  # one after the other, each once
class TestEveryArchitecture:
    def test_rows_of_every_offered_site_and_layer_are_exact(self, start: Start, architecture: str) -> None:
        engine, model = start(architecture), tiny.model(architecture)
        reference = Reference(model)
        sites = offered(architecture, engine)
        tolerance = STATES.get(architecture, TOLERANCE)
        for done in engine.generate(PROMPTS, LENGTHS, capture=Capture(sites=sites)):
            rows = done.rows
            _, wanted = reference.run([*done.prompt_token_ids, *done.token_ids[:-1]])
            assert set(rows) == {(layer, site) for layer in LAYERS for site in sites}
            for key, tensor in rows.items():
                assert distance(tensor, wanted[key]) < tolerance, key
            for layer in LAYERS:
                if layer:
                    assert torch.equal(rows[layer, "resid_pre"], rows[layer - 1, "resid_post"])
                if {"attn_out", "mlp_out"} <= set(sites):
                    total = rows[layer, "attn_out"] + rows[layer, "mlp_out"]
                    assert distance(added(rows, layer, scale_of(model, layer)), total) < TOLERANCE
                if "resid_mid" in sites:
                    total = rows[layer, "resid_pre"] + rows[layer, "attn_out"]
                    assert distance(rows[layer, "resid_mid"], total) < TOLERANCE

    def test_ops_at_every_offered_site_act_with_the_right_projection(self, start: Start, architecture: str) -> None:
        engine, reference = start(architecture), Reference(tiny.model(architecture))
        a, b, c = np.random.default_rng(3).normal(size=(3, 64)).astype(np.float32)
        for site in offered(architecture, engine):
            steering = Steering.of(
                Add(vector=a, scale=0.6, layers="0-1", site=site),
                Cap(vector=b, min=-0.3, max=0.2, layers="1-2", site=site),
                Ablate(vector=c, layers=3, site=site, tokens="!positions=[1]"),
            )
            infinite = np.inf
            ops = [
                *(RefOp(layer, site, a, (0.6, 0, 0, -infinite, infinite)) for layer in (0, 1)),
                *(RefOp(layer, site, b / np.linalg.norm(b), (0, 1, 1, -0.3, 0.2)) for layer in (1, 2)),
                RefOp(3, site, c / np.linalg.norm(c), (0, 0, 1, -infinite, infinite), lambda at: at != 1),
            ]
            done = engine.generate(PROMPTS[1], LENGTHS, steer=steering, capture=Capture())
            _, wanted = reference.run([*done.prompt_token_ids, *done.token_ids[:-1]], ops)
            for layer, tensor in done.rows.items():
                # resid_post of a layer is the tap of the next layer's resid_pre: its rows are after the ops of both.
                key = (layer[0] + 1, "resid_pre") if layer[0] < 3 else layer
                assert distance(tensor, wanted[key]) < 2 * STATES.get(architecture, TOLERANCE), (site, layer)


@pytest.mark.parametrize("architecture", [*STATES, *ONE_SUM, "lfm2"])
def test_states_of_requests_that_join_and_leave_the_batch_are_their_own(architecture: str) -> None:
    engine = HFEngine(tiny.model(architecture), tiny.tokenizer(), name=architecture, max_batch=3).sync
    rng = np.random.default_rng(0)
    prompts = [TokenPrompt(rng.integers(20, 400, size).tolist()) for size in (5, 1, 9, 3, 7, 2)]
    lengths = [Sampling(max_tokens=count, ignore_eos=True) for count in (9, 3, 6, 8, 2, 5)]
    together = engine.generate(prompts, lengths, capture=Capture())
    for i, done in enumerate(together):
        alone = engine.generate(prompts[i], lengths[i], capture=Capture())
        assert done.token_ids == alone.token_ids
        for key, rows in alone.rows.items():
            assert distance(done.rows[key], rows) < STATES.get(architecture, 1e-4), key
    engine.close()


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul")
@pytest.mark.parametrize("architecture", IN_BFLOAT16)
def test_in_bfloat16_what_a_layer_adds_is_its_addends_to_a_hundredth(start: Start, architecture: str) -> None:
    """Rounding of the stream would hide a scaled addend in any single number; it averages out over all of them."""
    engine = start(architecture, dtype=torch.bfloat16)
    model = copy.deepcopy(tiny.model(architecture)).to(torch.bfloat16)
    sites = offered(architecture, engine)
    done = engine.generate(PROMPTS[0], LENGTHS, capture=Capture(sites=sites))
    _, wanted = Reference(model).run([*done.prompt_token_ids, *done.token_ids[:-1]])
    for layer in LAYERS:
        if "mlp_out" in sites:  # on vLLM Gemma 4 has none
            terms = [done.rows[layer, site].double().flatten() for site in ("attn_out", "mlp_out")]
            gain = added(done.rows, layer, scale_of(model, layer)).flatten()
            shares = torch.linalg.lstsq(torch.stack(terms, 1), gain.unsqueeze(1)).solution
            assert float((shares - 1).abs().max()) < 1e-2, layer
        for site in sites:
            found, true = (rows.double().flatten() for rows in (done.rows[layer, site], wanted[layer, site]))
            assert abs(float(found @ true / true.norm() ** 2) - 1) < 1e-2, (layer, site)


@pytest.mark.parametrize("architecture", [*tiny.VISION_LANGUAGE, "gemma3_text", "qwen3_next"])
def test_models_with_and_without_a_tower_load_from_their_folders(architecture: str, tmp_path: Path) -> None:
    model = tiny.model(architecture)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with HFEngine.from_pretrained(tmp_path).sync as engine:
        (done,) = engine.generate(PROMPTS[1:], LENGTHS, capture=Capture())
    _, wanted = Reference(model).run([*done.prompt_token_ids, *done.token_ids[:-1]])
    for layer, rows in done.rows.items():
        assert distance(rows, wanted[layer]) < STATES.get(architecture, TOLERANCE)


@pytest.mark.parametrize("architecture", STATEFUL)
def test_a_model_with_a_state_besides_keys_and_values_is_refused_with_the_reason(architecture: str) -> None:
    model = tiny.model(architecture)
    with pytest.raises(UnsupportedModel, match=rf"{type(model).__name__} is not supported: .*keys and values"):
        HFEngine(model, tiny.tokenizer(), name=architecture)


def test_a_model_without_attention_is_refused_with_the_reason() -> None:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **sizes))
    with pytest.raises(UnsupportedModel, match="Mamba2ForCausalLM is not supported: it returns no keys and values"):
        HFEngine(model, tiny.tokenizer(), name="mamba2")


def test_layers_that_share_keys_and_values_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match="keys and values of 2 of its 4 layers"):
        find_blocks(tiny.model("gemma4_text", num_kv_shared_layers=2))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
        ("falcon", {"parallel_attn": False, "alibi": True}),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}),
        ("stablelm", {"use_parallel_residual": True}),
    ],
)
def test_variants_of_a_family_have_the_sites_that_they_have(architecture: str, changes: dict[str, object]) -> None:
    parallel = "parallel_attn" not in changes and architecture != "gemma4_text"
    assert set(find_blocks(tiny.model(architecture, **changes)).refused) == ({"resid_mid"} if parallel else set())


# --- the proof itself: what is wrong in one late layer is found, in the dtype that serves

Forward = Callable[..., Tensor]


def broken(layer: int, forward: Callable[[torch.nn.Module, Forward], Forward], dtype: torch.dtype) -> PreTrainedModel:
    """A Llama one of whose blocks computes something else."""
    model = copy.deepcopy(tiny.model("llama")).to(dtype)
    block = model.model.layers[layer]
    block.forward = forward(block, block.forward)
    return model


def scales_attention(by: float) -> Callable[[torch.nn.Module, Forward], Forward]:
    def make(block: torch.nn.Module, _forward: Forward) -> Forward:
        def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
            hidden = hidden_states + by * block.self_attn(block.input_layernorm(hidden_states), **kwargs)[0]
            return hidden + block.mlp(block.post_attention_layernorm(hidden))

        return forward

    return make


def changes_its_result(by: Callable[[Tensor], Tensor]) -> Callable[[torch.nn.Module, Forward], Forward]:
    def make(_block: torch.nn.Module, real: Forward) -> Forward:
        return lambda hidden_states, **kwargs: by(real(hidden_states, **kwargs))

    return make


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@DTYPES
@pytest.mark.parametrize("by", [0.94, 1.02])
def test_an_addend_that_is_scaled_by_a_few_percent_is_found(by: float, dtype: torch.dtype) -> None:
    found = find_blocks(broken(2, scales_attention(by), dtype))
    assert set(found.refused) == {"attn_out", "mlp_out", "resid_mid"}
    assert "layer 2 (LlamaDecoderLayer) adds to the stream is not its attention's and MLP's output" in str(found)
    assert f"+ {by:.3g} × attention +" in found.refused["attn_out"]
    assert find_blocks(broken(2, scales_attention(1), dtype)).refused == {}


@DTYPES
def test_a_multiplier_that_is_not_the_one_in_use_is_found(dtype: torch.dtype) -> None:
    """Multipliers make sums inexact: the tolerance that they need must not hide an addend off by six percent."""
    model = copy.deepcopy(tiny.model("granite")).to(dtype)
    assert find_blocks(model).refused == {}
    block = model.model.layers[3]
    real = block.forward
    block.forward = lambda *args, **kwargs: _with_multiplier(block, 1.0, real, *args, **kwargs)
    refused = find_blocks(model).refused
    assert set(refused) == {"attn_out", "mlp_out", "resid_mid"}
    assert "layer 3" in refused["attn_out"]
    assert "1.06 × attention" in refused["attn_out"]


def _with_multiplier(block: torch.nn.Module, value: float, real: Forward, *args: object, **kwargs: object) -> Tensor:
    known, block.residual_multiplier = block.residual_multiplier, value  # type: ignore[assignment]
    try:
        return real(*args, **kwargs)
    finally:
        block.residual_multiplier = known


@DTYPES
@pytest.mark.parametrize(
    ("layer", "change", "why"),
    [
        (3, lambda hidden: 1.01 * hidden, "layer 3 .*1.01 × its input"),
        (2, lambda hidden: hidden + 1, "layer 2 .*something else"),
        (1, lambda hidden: hidden.clamp(-5, 5), "layer 1 .*something else"),
    ],
)
def test_a_block_that_does_more_than_add_is_found(
    layer: int, change: Callable[[Tensor], Tensor], why: str, dtype: torch.dtype
) -> None:
    refused = find_blocks(broken(layer, changes_its_result(change), dtype)).refused
    assert re.search(why, refused["mlp_out"])


@DTYPES
def test_a_block_whose_output_is_not_the_input_of_the_next_is_refused(dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny.model("llama")).to(dtype)
    model.model.layers[3].register_forward_pre_hook(lambda _module, args: (1.01 * args[0], *args[1:]))
    with pytest.raises(UnsupportedModel, match=r"the input of block 3 \(LlamaDecoderLayer\) is not the output of"):
        find_blocks(model)


def test_a_parallel_block_among_sequential_ones_is_found() -> None:
    def parallel(block: torch.nn.Module, _real: Forward) -> Forward:
        def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
            attention = block.self_attn(block.input_layernorm(hidden_states), **kwargs)[0]
            return hidden_states + attention + block.mlp(block.post_attention_layernorm(hidden_states))

        return forward

    assert set(find_blocks(broken(3, parallel, torch.bfloat16)).refused) == {"resid_mid"}


@DTYPES
@pytest.mark.parametrize("architecture", ["granite", "gemma4_text"])
def test_taps_that_forget_what_a_block_does_behind_a_module_fail_the_self_test(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny.model(architecture)).to(dtype)
    if architecture == "granite":
        real = Taps._addend
        monkeypatch.setattr(Taps, "_addend", lambda self, keys, _multiplier: real(self, keys, 1.0))
    else:
        monkeypatch.setattr("steerscope.engines.hf.selftest.stream_scale", lambda _block: 1.0)
    with pytest.raises(UnsupportedModel, match="self-test of .* failed: a vector added at .* did not arrive"):
        HFEngine(model, tiny.tokenizer(), name=architecture)


# --- what only vLLM runs


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_a_hybrid_of_mamba_and_attention_is_exact_on_vllm() -> None:
    """Granite 4: two kinds of layers, scaled addends, and an MLP of two modules that add to the stream."""
    model, engine = tiny.model("granitemoehybrid"), begin_vllm("granitemoehybrid")
    sites = offered("granitemoehybrid", engine)
    assert set(sites) == set(SITES) - {"mlp_out"}
    wanted: dict[tuple[int, str], Tensor] = {}
    handles = []
    for i, layer in enumerate(model.model.layers):
        mixer = layer.mamba if hasattr(layer, "mamba") and layer.mamba is not None else layer.self_attn

        def keep_mixer(_module: nn.Module, _args: tuple, output: Tensor | tuple, i: int = i) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            wanted[i, "attn_out"] = hidden[0] * model.config.residual_multiplier

        def keep_layer(_module: nn.Module, args: tuple, output: Tensor | tuple, i: int = i) -> None:
            wanted[i, "resid_pre"] = args[0][0]
            wanted[i, "resid_post"] = output[0][0] if isinstance(output, tuple) else output[0]

        handles += [mixer.register_forward_hook(keep_mixer), layer.register_forward_hook(keep_layer)]
    try:
        for done in engine.generate(PROMPTS, LENGTHS, capture=Capture(sites=sites)):
            with torch.no_grad():
                model(torch.tensor([[*done.prompt_token_ids, *done.token_ids[:-1]]]), use_cache=False)
            for i in LAYERS:
                wanted[i, "resid_mid"] = wanted[i, "resid_pre"] + wanted[i, "attn_out"]
                for site in sites:
                    assert distance(done.rows[i, site], wanted[i, site]) < 5 * TOLERANCE, (i, site)  # scans in chunks
    finally:
        for handle in handles:
            handle.remove()
        engine.close()


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.parametrize(("architecture", "site"), [("cohere", "resid_mid"), ("gemma4_text", "mlp_out")])
def test_a_site_without_a_proof_is_refused_when_vllm_starts(architecture: str, site: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"DecoderLayer cannot be tapped at {site}: layer 0: "):
        begin_vllm(architecture, sites=("resid_post", site))


def begin_vllm(architecture: str, **options: object) -> SyncEngine:
    return start_vllm(saved(architecture, "bytes", None, {}), architecture, options)
