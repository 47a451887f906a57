"""Quantised checkpoints: the taps see activations, whatever the weights are stored in.

The reference is transformers with the weights that the checkpoint stands for. The kernels also round what goes into
each linear layer, to 8 bits per token; that alone moves rows by 3 to 30 % in a model this small, so the reference does
the same, and then only float32 rounding is left, and now and then an activation that falls to the other side of a step.
Where the kernel cuts off instead of rounding (int8 on ARM) that is no rare case: the largest activation of a token lies
at exactly 127 steps, and its last bit decides between 127 and 126. Those rows agree to one step of 8 bits.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engines.conftest import HAS_VLLM, start_vllm
from engines.vllm import quantised
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.engines.vllm import guards
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.errors import InvalidRequest, ModelNotFound
from support.reference import Reference, RefOp

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
PROMPTS = [TokenPrompt(np.random.default_rng(n).integers(4, 500, n).tolist()) for n in (40, 3, 21)]
FEW = Sampling(max_tokens=6, ignore_eos=True)
VECTOR = (2 * np.random.default_rng(3).standard_normal(64)).astype(np.float32)
STEP = 1 / 127
USUAL, USUAL_CUT = 1e-5, 4 * STEP  # the median row, where activations are rounded and where they are cut off
WORST = 16 * STEP  # each of seven linear layers in four blocks may take another step
MISTAKE = 0.4  # so far apart are neighbouring rows and layers, and rows with and without the vector


def int8_symmetric(x: Tensor) -> Tensor:
    """With vLLM's own rounding: on ARM it is towards zero."""
    from vllm import _custom_ops as ops

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    whole, scale, _ = ops.onednn_scaled_int8_quant(flat, None, None, True)
    return (whole * scale.view(-1, 1)).view_as(x)


def int8_asymmetric(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-128 - low / scale).round().clamp(-128, 127)
    return ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale


def fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


LOADED: dict[str, Callable[[Tensor], Tensor]] = {
    "int8 W8A8": int8_symmetric,
    "int4 W4A8": int8_asymmetric,
    "fp8 W8A8": fp8,
}
# Without an operator in the ARM build: vLLM loads these and fails with the first forward, which is our self-test.
WITHOUT_KERNEL = ("int4 W4A16", "GPTQ", "AWQ")
X86 = platform.machine() in ("x86_64", "AMD64")
# With AMX the int8 kernel takes half precision only; 4-bit weights have a kernel for x86-64 alone, which does so too.
EXACT = [(form, torch.float32) for form in LOADED if not (form == "int8 W8A8" and torch.cpu._is_amx_tile_supported())]
EXACT += [(form, torch.float16) for form in ("int8 W8A8", *WITHOUT_KERNEL) if X86]
# The median row and the worst in float16. Where activations are rounded, its rounding decides more often to which step.
HALF = {"int8 W8A8": (0.08, 0.32)}
HALF_UNROUNDED = 0.005, 0.03


def far(rows: Tensor, wanted: Tensor) -> Tensor:
    return (rows.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)


def round_inputs(model: nn.Module, rounding: Callable[[Tensor], Tensor]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _module, args: (rounding(args[0]),))


def distances(reference: Reference, done: list[Generation], ops: list[RefOp]) -> Tensor:
    """Of every row, with exact counts."""
    found = []
    for one in done:
        fed = [*one.prompt_token_ids, *one.token_ids[:-1]]
        assert one.rows.n == len(fed) == len(one.prompt_token_ids) + len(one.token_ids) - 1
        wanted = reference.run(fed, ops)[1]
        found += [far(rows, wanted[key]) for key, rows in one.rows.items()]
    return torch.cat(found)


def serve(folder: Path, dtype: torch.dtype = torch.float32) -> SyncEngine:
    """The start includes the self-test of every tap."""
    return start_vllm(folder, "quantised", {"dtype": dtype, "max_num_batched_tokens": 32})


@pytest.mark.parametrize(("form", "dtype"), EXACT, ids=str)
def test_rows_and_steering_of_a_quantised_checkpoint_are_exact(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    model = quantised.write(tmp_path, form)
    engine = serve(tmp_path, dtype)
    try:
        add = Add(vector=VECTOR, layers=1)
        plain = engine.generate(PROMPTS, FEW, capture=Capture(sites=("resid_post", "mlp_out", "attn_out")))
        before, after = engine.generate(
            [PROMPTS[0]] * 2,
            FEW,
            steer=add,
            capture=[Capture(layers=1, before_steering=early) for early in (True, False)],
        )
        gained = after.rows[1].float() - before.rows[1].float()
        limit = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
        assert far(gained, torch.from_numpy(VECTOR).expand(45, 64)).max() < limit
        steered = engine.generate(PROMPTS, FEW, steer=add, capture=Capture())
        op = RefOp(1, "resid_post", VECTOR, add.coefficients())
        reference = Reference(model)
        if form in LOADED:
            unrounded = distances(reference, plain, [])
            assert unrounded.median() > 1e-2, "the kernel does not round what goes in: this is not the format it says"
            round_inputs(model, LOADED[form])
        usual, worst = USUAL_CUT if form == "int8 W8A8" else USUAL, WORST
        if dtype is not torch.float32:
            usual, worst = HALF.get(form, HALF_UNROUNDED)
        for rows in (distances(reference, plain, []), distances(reference, steered, [op])):
            assert rows.median() < usual
            assert rows.max() < worst
        stream = [plain[0].rows[layer, "resid_post"] for layer in range(4)]
        assert min(float(far(stream[i], stream[i + 1]).median()) for i in range(3)) > MISTAKE
        assert min(float(far(rows[1:], rows[:-1]).median()) for rows in stream) > MISTAKE
        assert distances(reference, steered, []).median() > MISTAKE
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("form", "named"), [("int8 W8A8", "int8 kernel for processors with AMX"), ("int4 W4A16", "int4")]
)
def test_a_dtype_that_a_kernel_of_this_processor_does_not_take_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, named: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(guards, "platform", SimpleNamespace(machine=lambda: "x86_64"))
    quantised.write(tmp_path, form)
    with pytest.raises(InvalidRequest, match=f"{named}.* does not take float32; use float16 or bfloat16") as told:
        serve(tmp_path)
    assert [problem.field for problem in told.value.problems] == ["dtype"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_format_that_runs_in_float32_is_not_refused(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(guards, "platform", SimpleNamespace(machine=lambda: machine))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: machine == "x86_64")
    for form in ("int4 W4A8", "fp8 W8A8", *(LOADED if machine == "aarch64" else ())):
        model = SimpleNamespace(quantization_config=quantised.FORMATS[form][1])
        assert guards._float32_refusal(SimpleNamespace(dtype=torch.float32, hf_config=model)) is None


@pytest.mark.parametrize("form", WITHOUT_KERNEL)
def test_a_format_that_vllm_loads_but_cannot_run_stops_the_start(tmp_path: Path, form: str) -> None:
    from vllm import _custom_ops  # noqa: F401 - registers the operators of this build

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("this build of vLLM has the kernel")
    quantised.write(tmp_path, form)
    with pytest.raises(ModelNotFound, match="no attribute 'cpu_gemm_wna16'"):
        serve(tmp_path, torch.float16)


def test_a_format_that_vllm_does_not_take_is_refused_with_its_reason(tmp_path: Path) -> None:
    quantised.write(tmp_path / "w8a16", "int8 W8A16")
    with pytest.raises(ModelNotFound, match="Failed to find a kernel that can implement the WNA16 linear layer"):
        serve(tmp_path / "w8a16")
    quantised.write(tmp_path / "gptq", "GPTQ")
    with pytest.raises(ModelNotFound, match="float32 is not supported for quantization method"):
        serve(tmp_path / "gptq")
