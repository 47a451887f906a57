"""Weights read layer by layer are those of the model, whatever the files look like; what cannot be read is named."""

import json
from pathlib import Path

import pytest
import torch

from steerscope.analysis.checkpoint import Checkpoint
from steerscope.specs.errors import BadFile, InvalidRequest, ModelNotFound, UnsupportedModel
from support import tiny


def saved(folder: Path, architecture: str = "llama", shard: str = "10GB", **changes: object) -> Path:
    tiny.model(architecture, **changes).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.mark.parametrize("architecture", sorted(set(tiny.ARCHITECTURES) - {"qwen3_moe"}))  # its experts are fused
def test_a_layer_is_the_state_of_the_models_own_layer(architecture: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(saved(tmp_path, architecture, "100KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    model = tiny.model(architecture)
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4)
    assert (checkpoint.layers, checkpoint.hidden) == (4, 64)
    for number in range(4):
        own, found = dict(blocks[number].named_parameters()), checkpoint.layer(number)
        assert set(found) == set(own)
        assert all(torch.equal(found[name], own[name]) for name in own)
    for name, module in ((checkpoint.embedding, "get_input_embeddings"), (checkpoint.head, "get_output_embeddings")):
        assert torch.equal(torch.cat(list(checkpoint.rows(name, 100))), getattr(model, module)().weight)


def test_one_file_gives_what_many_give_and_a_head_that_is_tied_is_the_embedding(tmp_path: Path) -> None:
    one, many = (Checkpoint(saved(tmp_path / size, "gemma", size)) for size in ("10GB", "50KB"))
    assert one.layer(1).keys() == many.layer(1).keys()
    assert all(torch.equal(tensor, many.layer(1)[name]) for name, tensor in one.layer(1).items())
    assert one.head == one.embedding == "model.embed_tokens.weight"


def test_the_decoder_is_found_beside_other_towers_and_deeper_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    weights = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    vision = {f"vision_tower.layers.{i}.self_attn.q.weight": torch.ones(2, 2) for i in range(4)}
    save_file({**weights, **vision}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(
        checkpoint.layer(3)["mlp.down_proj.weight"], tiny.model().get_parameter("model.layers.3.mlp.down_proj.weight")
    )
    assert checkpoint.embedding == "language_model.model.embed_tokens.weight"


def test_no_file_stays_mapped_while_its_tensors_are_in_use(tmp_path: Path) -> None:
    """A mapping keeps every page that was touched: with it, streaming would end with the whole file in memory."""
    checkpoint = Checkpoint(saved(tmp_path))
    held = [checkpoint.layer(1), *checkpoint.rows(checkpoint.embedding, 100)]
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()
    assert len(held) == 7


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"layer 4 is out of range; .* has layers 0-3"):
        Checkpoint(saved(tmp_path)).layer(4)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model directory"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(BadFile, match="config"):
        Checkpoint(tmp_path)
    folder = saved(tmp_path / "shards", shard="100KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    whole = lost.read_bytes()
    lost.write_bytes(whole[:-100])
    with pytest.raises(BadFile, match=f"{lost.name} is not a readable safetensors file"):
        Checkpoint(folder)
    lost.unlink()
    with pytest.raises(BadFile, match=f"{lost.name} does not exist"):
        Checkpoint(folder)
    index = folder / "model.safetensors.index.json"
    lost.write_bytes(whole)
    data = json.loads(index.read_text())
    data["weight_map"]["model.layers.0.self_attn.x.weight"] = lost.name
    index.write_text(json.dumps(data))
    with pytest.raises(BadFile, match=r"lacks 1 tensors of the index, model.layers.0.self_attn.x.weight"):
        Checkpoint(folder)
    index.unlink()
    with pytest.raises(BadFile, match="save_pretrained"):
        Checkpoint(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="merge it"):
        Checkpoint(folder)


def test_quantised_weights_and_models_with_other_names_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = saved(tmp_path) / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.0.mlp.up_proj.weight": torch.ones(2, 2, dtype=torch.int8)}, file)
    with pytest.raises(BadFile, match="is torch.int8"):
        Checkpoint(tmp_path).layer(0)
    save_file({name.replace("layers", "x"): tensor for name, tensor in weights.items() if ".3." not in name}, file)
    with pytest.raises(UnsupportedModel, match=r"families seen: model.x.N \(3\)"):
        Checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedModel, match="quantised"):
        Checkpoint(tmp_path)
