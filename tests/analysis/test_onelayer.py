"""One layer at a time gives what hooks on the whole, real model see."""

from pathlib import Path

import pytest
import torch
from torch import nn

from analysis.families import FAMILIES, family, saved, watching
from steerscope.analysis.attention import logits
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.analysis.onelayer import OneLayer
from steerscope.engines.hf.blocks import decoder_layers
from steerscope.specs.errors import UnsupportedModel
from support import tiny

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
IDS = torch.tensor([[5, 99, 17, 300, 41, 8]])  # shorter than the sliding window


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, OneLayer]:
    """The whole model, and its checkpoint a layer at a time."""
    model = family(request.param)
    return model, OneLayer(Checkpoint(saved(model, tmp_path_factory.mktemp(request.param))))


def addends(layer: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The norm in front of the MLP, and whose outputs are added to the stream: attention's and the MLP's."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return layer.pre_feedforward_layernorm, layer.post_attention_layernorm, layer.post_feedforward_layernorm
    return layer.post_attention_layernorm, layer.self_attn, layer.mlp


@pytest.mark.parametrize("number", [0, 1, 3])
@torch.no_grad()
def test_the_mlp_adds_what_it_adds_in_the_whole_model(pair: tuple, number: int) -> None:
    model, one = pair
    norm, _, mlp = addends(model.model.layers[number])
    with watching(norm, mlp) as seen:
        model(IDS)
    with one.at(number):
        torch.testing.assert_close(one.mlp(seen[0][0][0]), seen[1][1][0], **CLOSE)


@pytest.mark.parametrize("number", [0, 1, 3])
@torch.no_grad()
def test_logits_give_the_attention_weights_of_the_whole_model(pair: tuple, number: int) -> None:
    model, one = pair
    with watching(model.model.layers[number]) as seen:
        real = model(IDS, output_attentions=True).attentions[number][0]
    count = IDS.shape[1]
    with one.at(number):
        heads = one.heads(seen[0][0][0], torch.arange(count))
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    weights = logits(heads, heads).masked_fill(later, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, real, **CLOSE)
    assert real[:, -1].std() > 0.01, "attention that looks everywhere alike proves nothing"


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("distance", [0, 4])
@torch.no_grad()
def test_affinity_at_a_distance_is_the_real_logit_at_that_distance(pair: tuple, number: int, distance: int) -> None:
    """Eager weights tell differences of logits: a key `distance` before the query against the query's own position."""
    model, one = pair
    with watching(model.model.layers[number]) as seen:
        real = model(IDS, output_attentions=True).attentions[number][0].log()
    rows = seen[0][0][0]
    with one.at(number):
        queries = one.heads(rows, torch.full((len(rows),), distance))
        keys = one.heads(rows, torch.zeros(len(rows)))
        near = one.heads(rows, torch.zeros(len(rows)))
        apart = logits(queries, keys) - logits(near, keys, paired=True).unsqueeze(-1)
    for i in range(distance, len(rows)):
        j = i - distance
        torch.testing.assert_close(apart[:, i, j], real[:, i, j] - real[:, i, i], **CLOSE)


@pytest.mark.parametrize("number", [0, 3])
@torch.no_grad()
def test_a_token_alone_adds_what_all_heads_write_when_they_look_at_it(pair: tuple, number: int) -> None:
    model, one = pair
    layer = model.model.layers[number]
    with watching(layer, addends(layer)[1]) as seen:
        model(IDS.T)  # every token is a text of its own
    with one.at(number):
        torch.testing.assert_close(one.attention(seen[0][0][:, 0]), seen[1][1][:, 0], **CLOSE)


@torch.no_grad()
def test_a_head_writes_what_the_real_projection_makes_of_it_alone(pair: tuple) -> None:
    model, one = pair
    layer = model.model.layers[1]
    with watching(layer, layer.self_attn.o_proj) as seen:
        model(IDS.T)
    mixed = seen[1][0][:, 0]
    with one.at(1):
        heads, out = one.heads(seen[0][0][:, 0], torch.zeros(IDS.shape[1])), one.writing()
    size = mixed.shape[1] // len(out.matrix)
    for head, matrix in enumerate(out.matrix):
        alone = torch.zeros_like(mixed)
        alone[:, head * size : (head + 1) * size] = mixed[:, head * size : (head + 1) * size]
        real = layer.self_attn.o_proj(alone)
        torch.testing.assert_close(heads.values[:, head // heads.group] @ matrix + out.bias, real, **CLOSE)


@pytest.mark.parametrize("name", ["mistral", "phi3", "olmo2", "gpt_neox", "gpt2", "glm4"])
@torch.no_grad()
def test_further_families_are_found_by_structure(name: str, tmp_path: Path) -> None:
    """A token alone: what attention and MLP add leads from the block's input to its output."""
    model = tiny.model(name)
    block, one = decoder_layers(model)[2], OneLayer(Checkpoint(saved(model, tmp_path)))
    with watching(block) as seen:
        model(IDS.T)
    before, after = (rows[:, 0] for rows in seen[0])
    with one.at(2):
        added = one.attention(before)
        found = before + added + one.mlp(before if name == "gpt_neox" else before + added)  # it is parallel
    torch.testing.assert_close(found, after, **CLOSE)


def test_weights_of_a_layer_are_there_only_while_it_is_used(tmp_path: Path) -> None:
    one = OneLayer(Checkpoint(saved(family("llama"), tmp_path)))
    real = lambda: [p for m in one._modules for p in m.parameters() if p.device.type != "meta"]  # noqa: E731
    with one.at(2):
        assert sum(p.numel() for p in real()) == sum(p.numel() for p in family("llama").model.layers[2].parameters())
    assert real() == []


def test_a_model_that_scales_what_it_adds_is_refused(tmp_path: Path) -> None:
    one = OneLayer(Checkpoint(saved(tiny.model("granite", residual_multiplier=0.5), tmp_path)))
    with one.at(0), pytest.raises(UnsupportedModel, match="GraniteDecoderLayer adds to the stream is not"):
        one.mlp(torch.randn(3, 64))


@pytest.mark.parametrize("name", ["bloom", "mpt", "opt"])
def test_a_layer_that_needs_more_of_its_model_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model = tiny.model(name)
    one = OneLayer(Checkpoint(saved(model, tmp_path)))
    with one.at(0), pytest.raises(UnsupportedModel, match=f"{type(decoder_layers(model)[0]).__name__} cannot be run"):
        one.attention(torch.randn(3, 64))


def test_a_layer_that_does_not_fit_its_class_is_told(tmp_path: Path) -> None:
    config = saved(family("qwen3"), tmp_path) / "config.json"
    config.write_text(config.read_text().replace('"model_type": "qwen3"', '"model_type": "llama"'))
    one = OneLayer(Checkpoint(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"layer 1 of .*self_attn\.q_norm\.weight"), one.at(1):
        pass
