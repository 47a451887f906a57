"""Layers that return the stream, and add to it, in every way that vLLM's models do: where the sites are is proven by
noise, in the dtype that serves, and what cannot be proven is refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from steerscope.engines.vllm.worker.layer_proof import prove_layers
from steerscope.engines.vllm.worker.model_layout import Layers, find_layers, hook_at
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site

TOKENS, HIDDEN, LAYERS = 5, 32, 3
INSIDE: tuple[Site, ...] = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Norm(nn.Module):
    """As vLLM's RMSNorm: in place on a delta and a residual, or a new tensor."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        normed = (stream.float() / stream.float().pow(2).mean(-1, keepdim=True).sqrt()).to(x.dtype)
        if residual is None:
            return normed
        residual.copy_(stream)
        x.copy_(normed)
        return x, residual


class Block(nn.Module):
    """The parts that all layers here have."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)


class Pair(Block):
    """Llama: delta and residual."""

    def forward(self, _positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, hidden_states = hidden_states.clone(), self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states, residual = self.post_attention_layernorm(self.self_attn(hidden_states), residual)
        return self.mlp(hidden_states), residual


class Whole(Block):
    """StableLM, PhiMoE: the stream, beside a residual that the next layer ignores."""

    scale = 1.0

    def forward(self, _positions: Tensor, hidden_states: Tensor, _residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = hidden_states + self.scale * self.self_attn(self.input_layernorm(hidden_states))
        return hidden + self.scale * self.mlp(self.post_attention_layernorm(hidden)), hidden_states


class Granite(Whole):
    """HyperCLOVAX, Granite: addends times a multiplier that the layer names."""

    scale = residual_multiplier = 0.22


class Scaled(Whole):
    """Nothing names the multiplier."""

    scale = 0.94


class Parallel(Block):
    """Cohere."""

    def forward(self, _positions: Tensor, hidden_states: Tensor, _residual: Tensor | None) -> tuple[Tensor, Tensor]:
        normed = self.input_layernorm(hidden_states)
        return hidden_states + self.self_attn(normed) + self.mlp(normed), hidden_states


class Single(Block):
    """GPT-2: one tensor."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PostNorm(Block):
    """GLM-4: a norm behind attention and MLP each."""

    def __init__(self) -> None:
        super().__init__()
        self.post_self_attn_layernorm, self.post_mlp_layernorm = Norm(), Norm()

    def forward(self, _positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, hidden_states = hidden_states.clone(), self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.post_self_attn_layernorm(self.self_attn(hidden_states))
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.post_mlp_layernorm(self.mlp(hidden_states)), residual


class TwoFeeds(Whole):
    """Granite-4: experts and a shared MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_mlp = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, _positions: Tensor, hidden_states: Tensor, _residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        normed = self.post_attention_layernorm(hidden)
        return hidden + (self.mlp(normed) + self.shared_mlp(normed)), hidden_states


class Rescaled(Block):
    """Gemma 4: the whole stream is scaled at the end."""

    def forward(self, _positions: Tensor, hidden_states: Tensor, _residual: Tensor | None) -> tuple[Tensor, None]:
        hidden = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return (hidden + self.mlp(self.post_attention_layernorm(hidden))) * 0.9, None


class Weighted(Pair):
    """No model: the residual counts for more."""

    def forward(self, _positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().forward(_positions, hidden_states, residual if residual is None else 1.1 * residual)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.norm = nn.ModuleList(kind() for _ in range(LAYERS)), Norm()
        self.to(dtype)

    def forward(self, hidden: Tensor, between: Callable[[int, Tensor], None] = lambda *_: None) -> Tensor:
        """`between` gets the stream that enters each layer, and the one behind the last."""
        residual: Tensor | None = None
        pair = isinstance(self.layers[0], Pair | PostNorm)
        for i, layer in enumerate(self.layers):
            between(i, hidden if residual is None or not pair else hidden + residual)
            if isinstance(layer, Single):
                hidden = layer(hidden)
            else:
                hidden, residual = layer(torch.arange(TOKENS), hidden, residual)
        between(LAYERS, hidden if residual is None or not pair else hidden + residual)
        return self.norm(hidden, residual)[0] if pair else self.norm(hidden)


def prove(model: Model, sites: tuple[Site, ...] = INSIDE) -> Layers:
    dtype = next(model.parameters()).dtype
    return prove_layers(find_layers(model, LAYERS), HIDDEN, sites, lambda: model(torch.randn(TOKENS, HIDDEN).to(dtype)))


@DTYPES
@pytest.mark.parametrize("kind", [Pair, Whole, Granite, Single, PostNorm, Parallel])
@torch.no_grad()
def test_rows_at_proven_places_are_the_streams_and_addends(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """The oracle is the model's own loop, which knows the stream between layers."""
    model = Model(kind, dtype)
    sites = tuple(site for site in INSIDE if kind is not Parallel or site != "resid_mid")
    layers = prove(model, sites)
    rows: dict[tuple[int, str], Tensor] = {}
    for number, layer in layers.found.items():
        for site in sites:

            def keep(place: object, delta: Tensor, residual: Tensor | None, key: tuple = (number, site)) -> None:
                rows[key] = place.scale * (delta if residual is None else delta + residual).double()  # type: ignore[attr-defined]

            hook_at(layer.places[site], keep)
    streams: dict[int, Tensor] = {}
    model(torch.randn(TOKENS, HIDDEN).to(dtype), lambda i, stream: streams.__setitem__(i, stream.double()))
    rounding = 1e-5 if dtype == torch.float32 else 0.03
    for i in range(LAYERS):
        torch.testing.assert_close(rows[i, "resid_pre"], streams[i], rtol=rounding, atol=rounding)
        torch.testing.assert_close(rows[i, "resid_post"], streams[i + 1], rtol=rounding, atol=rounding)
        added = rows[i, "attn_out"] + rows[i, "mlp_out"]
        torch.testing.assert_close(streams[i] + added, streams[i + 1], rtol=rounding, atol=2 * rounding)
        if "resid_mid" in sites:
            middle = streams[i] + rows[i, "attn_out"]
            torch.testing.assert_close(rows[i, "resid_mid"], middle, rtol=rounding, atol=2 * rounding)


@DTYPES
@torch.no_grad()
def test_the_proof_leaves_the_model_as_it_was(dtype: torch.dtype) -> None:
    model, hidden = Model(Pair, dtype), torch.randn(TOKENS, HIDDEN).to(dtype)
    wanted = model(hidden.clone())
    prove(model)
    assert torch.equal(model(hidden.clone()), wanted)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@DTYPES
@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (Scaled, {"attn_out", "mlp_out", "resid_mid"}),
        (Parallel, {"resid_mid"}),
        (TwoFeeds, {"mlp_out"}),
        (Rescaled, {"mlp_out"}),
    ],
)
def test_what_cannot_be_proven_is_refused_by_name(kind: type[nn.Module], refused: set[str], dtype: torch.dtype) -> None:
    model = Model(kind, dtype)
    with pytest.raises(UnsupportedModel, match=f"{kind.__name__} cannot be tapped at") as caught:
        prove(model)
    assert {site for site in INSIDE if f"{site}: layer 0: " in str(caught.value)} == refused
    prove(model, tuple(site for site in INSIDE if site not in refused))


@DTYPES
def test_two_parts_that_do_not_count_as_their_sum_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModel, match="its two inputs do not count as their sum"):
        prove(Model(Weighted, dtype), ("resid_post",))


def test_a_stream_that_is_changed_between_layers_is_refused() -> None:
    model = Model(Whole, torch.float32)
    model.layers[1].register_forward_pre_hook(lambda _module, args: (args[0], 1.02 * args[1], args[2]))
    with pytest.raises(UnsupportedModel, match="of the 2 tensors that layer 0 returns, neither one nor the sum of two"):
        prove(model, ("resid_post",))


def test_layers_with_a_batch_dimension_are_refused() -> None:
    model = Model(Single, torch.float32)
    layers = find_layers(model, LAYERS)
    with pytest.raises(UnsupportedModel, match=r"Single cannot be tapped: layer 0 is given no tensor \[tokens, 32\]"):
        prove_layers(layers, HIDDEN, ("resid_post",), lambda: model(torch.randn(1, TOKENS, HIDDEN)))


def test_deepseek_in_float16_is_refused_with_the_dtype_that_works() -> None:
    model = Model(Pair, torch.float16)
    for layer in model.layers:
        layer.routed_scaling_factor = 2.5
    with pytest.raises(UnsupportedModel, match=r"divides the residual stream by 2\.5 in float16.*dtype bfloat16"):
        prove(model, ("resid_post",))
