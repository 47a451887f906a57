"""Where taps are put in a model, and what the norm behind one gives. (What a tap does is tested against the float64
oracle by the contract suite, and the CUDA kernels against the tap in test_kernel.py.)"""

import pytest
import torch
from torch import Tensor, nn

from steerscope.engines.vllm.worker.index_layout import CELL, ENTRIES, GROUP
from steerscope.engines.vllm.worker.layer_proof import prove_layers
from steerscope.engines.vllm.worker.model_layout import Layers, attach, find_layers
from steerscope.engines.vllm.worker.tap import Tap, TappedNorm, TapTables

TOKENS, HIDDEN, LAYERS = 3, 16, 3


class RMSNorm(nn.Module):
    """As vLLM's is called and what it returns."""

    variance_size_override = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        normed = stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight
        return normed if residual is None else (normed, stream)


class LlamaDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.mlp = RMSNorm(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.mlp(self.input_layernorm(hidden)), hidden
        normed, residual = self.input_layernorm(hidden, residual)
        return self.mlp(normed), residual


class UnknownLayer(LlamaDecoderLayer):
    pass


class OtherNorm(RMSNorm):
    pass


class PPMissingLayer(nn.Module):
    def forward(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return parts


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = LlamaDecoderLayer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        self.norm: nn.Module = RMSNorm()

    def forward(self, hidden: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.norm(hidden, residual)[0]


def proven(model: Model) -> Layers:
    return prove_layers(find_layers(model, LAYERS), HIDDEN, ["resid_post"], lambda: model(torch.randn(TOKENS, HIDDEN)))


def taps() -> dict:
    """Each adds 3 to the first number of the first token, and captures the rows of the second."""
    shared = TapTables(
        pool=torch.zeros(LAYERS, HIDDEN),
        step_index=torch.zeros(TOKENS, ENTRIES + 3, dtype=torch.int32),
        vectors=torch.zeros(2, HIDDEN),
        coefficients=torch.zeros(2, 5),
        gates=torch.ones(1),
        order=torch.full((2,), -1, dtype=torch.int32),
        before=torch.zeros(2, dtype=torch.bool),
        overflow_flags=torch.zeros(2, dtype=torch.int32),
    )
    shared.overflow_flags[0] = 1
    shared.step_index[0, ENTRIES : ENTRIES + 2] = 1
    shared.step_index[1, [CELL, GROUP]] = torch.tensor([0, 1], dtype=torch.int32)
    shared.vectors[1, 0], shared.coefficients[1, 0] = 1.0, 3.0
    shared.coefficients[:, 3:] = torch.tensor([-torch.inf, torch.inf])
    found = {}
    for layer in range(LAYERS):
        found[layer, "resid_post"] = Tap(shared._replace(order=torch.tensor([-1, layer], dtype=torch.int32)))
    return found


def run(model: Model, norms: bool) -> tuple[Tensor, Tensor]:
    made = taps()
    attach(proven(model), made, norms=norms)
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    return model(hidden), made[0, "resid_post"].pool


@torch.no_grad()
def test_before_the_next_norm_is_behind_the_layer() -> None:
    torch.manual_seed(0)
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    plain = model(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)))
    (out, rows), (wanted, wanted_rows) = run(model, True), run(other, False)
    assert isinstance(model.norm, TappedNorm)
    assert [isinstance(layer.input_layernorm, TappedNorm) for layer in model.layers] == [False, True, True]
    assert not any(isinstance(module, TappedNorm) for module in other.modules())
    assert torch.equal(out, wanted)
    assert torch.equal(rows, wanted_rows)
    assert not torch.allclose(out[0], plain[0])
    assert torch.equal(out[1:], plain[1:])
    assert rows.ne(0).any(1).all()


@pytest.mark.parametrize("why", ["unknown layer", "other norm", "the next stage has it"])
def test_where_the_norm_is_not_known_the_tap_is_a_hook(why: str) -> None:
    model = Model(UnknownLayer if why == "unknown layer" else LlamaDecoderLayer)
    if why == "other norm":
        model.norm = OtherNorm()
    elif why == "the next stage has it":
        model.norm = PPMissingLayer()
    last = find_layers(model, LAYERS).found[LAYERS - 1]
    assert last.next_norm is None
    attach(proven(model), {(LAYERS - 1, "resid_post"): taps()[2, "resid_post"]})
    assert len(last.module._forward_hooks) == 1
    assert not isinstance(model.norm, TappedNorm)


@torch.no_grad()
def test_when_nobody_asks_a_tap_reads_nothing() -> None:
    model, made = Model(), taps()
    attach(proven(model), made)
    shared = made[0, "resid_post"]
    shared.overflow_flags[0] = 0
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    for layer in range(LAYERS):
        made[layer, "resid_post"].step_index = torch.empty(TOKENS, 0)  # reading it would fail
    model(hidden)
    assert not shared.pool.any()
