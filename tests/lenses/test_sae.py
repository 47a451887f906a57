"""SAEs as packs: the activations of the SAE, and its decoder as steering vectors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lenses.packs import make, rows
from steerscope.lenses import Pack
from steerscope.lenses.bank import Bank
from steerscope.lenses.formats.saelens import feature, load_sae
from steerscope.specs.errors import BadFile, InvalidRequest

HIDDEN, FEATURES = 10, 40
NEW = {"metadata": {"model_name": "gemma-2-2b", "hook_name": "blocks.7.hook_resid_post"}}
OLD = {"model_name": "gpt2-small", "hook_name": "blocks.7.hook_resid_pre", "hook_layer": 7}


def weights(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (HIDDEN, FEATURES), "b_enc": (FEATURES,), "W_dec": (FEATURES, HIDDEN), "b_dec": (HIDDEN,)}
    found = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {**found, "threshold": torch.randn(FEATURES, generator=draw)}


def write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps({"d_in": HIDDEN, "d_sae": FEATURES, **config}))
    save_file(tensors, folder / "sae_weights.safetensors")
    return folder


def encode(config: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """The SAE's own encode, in float64."""
    w = {name: tensor.double() for name, tensor in w.items()}
    x = x.double()
    pre = (x - w["b_dec"] if config["apply_b_dec_to_input"] else x) @ w["W_enc"] + w["b_enc"]
    match config["architecture"]:
        case "standard":
            return pre.clamp(min=0)
        case "jumprelu":
            return torch.where(pre > w["threshold"].clamp(min=0), pre, 0).clamp(min=0)
    if config.get("rescale_acts_by_decoder_norm"):
        pre = pre * w["W_dec"].norm(dim=-1)
    best = pre.topk(config["k"], dim=-1)
    return torch.zeros_like(pre).scatter(-1, best.indices, best.values.clamp(min=0))


@pytest.mark.parametrize("subtracted", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "standard"},
        {"architecture": "jumprelu"},
        {"architecture": "topk", "k": 5},
        {"architecture": "topk", "k": 5, "rescale_acts_by_decoder_norm": True},
    ],
)
def test_a_pack_gives_the_activations_of_the_sae(tmp_path: Path, config: dict, subtracted: bool):
    config = {**config, **NEW, "apply_b_dec_to_input": subtracted}
    pack = load_sae(write(tmp_path / "sae", config, weights()))
    x = rows(20, HIDDEN)
    expected = encode(config, weights(), x)
    assert 0 < (expected > 0).double().mean() < 0.6
    torch.testing.assert_close(Bank(pack).probabilities(x).double(), expected, atol=1e-4, rtol=1e-5)
    assert (pack.info.model, pack.info.layer, pack.info.site) == ("gemma-2-2b", 7, "resid_post")
    pack.save(tmp_path / "pack")
    torch.testing.assert_close(Bank(Pack.load(tmp_path / "pack")).top(x, 3), Bank(pack).top(x, 3))


def test_old_configs_and_their_topk_are_understood(tmp_path: Path):
    config = {**OLD, "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 4}, "apply_b_dec_to_input": True}
    pack = load_sae(write(tmp_path / "sae", config, weights()))
    assert (pack.info.architecture.output, pack.info.architecture.k, pack.info.site) == ("topk", 4, "resid_pre")
    expected = encode({"architecture": "topk", "k": 4, "apply_b_dec_to_input": True}, weights(), rows(6, HIDDEN))
    torch.testing.assert_close(Bank(pack).scores(rows(6, HIDDEN)).double(), expected, atol=1e-4, rtol=1e-5)


def test_a_log_threshold_of_a_training_checkpoint_is_read(tmp_path: Path):
    w = weights()
    w["log_threshold"] = w.pop("threshold")
    pack = load_sae(write(tmp_path / "sae", {"architecture": "jumprelu", **NEW}, w))
    torch.testing.assert_close(pack.tensors["threshold"], w["log_threshold"].exp())


@pytest.mark.parametrize("rescaled", [False, True])
def test_adding_features_by_their_activations_is_the_decoder(tmp_path: Path, rescaled: bool):
    config = {"architecture": "topk", "k": 6, "apply_b_dec_to_input": True, "rescale_acts_by_decoder_norm": rescaled}
    pack = load_sae(write(tmp_path / "sae", {**config, **NEW}, weights()))
    x = rows(3, HIDDEN)
    acts = Bank(pack).probabilities(x)
    rebuilt = sum(acts[:, i, None] * feature(pack, i)[7] for i in range(FEATURES))
    scale = 1 / weights()["W_dec"].norm(dim=-1) if rescaled else torch.ones(FEATURES)
    torch.testing.assert_close(rebuilt, (acts * scale) @ weights()["W_dec"], atol=1e-4, rtol=1e-4)
    vector = feature(pack, "17")
    assert (vector.layers, vector.site, vector.model) == ((7,), "resid_post", "gemma-2-2b")
    assert vector.provenance["name"] == "sae/17"
    with pytest.raises(InvalidRequest, match="0–39"):
        feature(pack, 40)
    with pytest.raises(InvalidRequest, match="no decoder"):
        feature(make(), 0)


def test_everything_that_cannot_be_read_is_named_in_one_error(tmp_path: Path):
    w = weights()
    del w["b_enc"]
    w["W_dec"] = w["W_dec"][:, :5].contiguous()
    config = {
        "architecture": "gated",
        "normalize_activations": "layer_norm",
        "activation_fn_str": "tanh-relu",
        "reshape_activations": "hook_z",
        "hook_name": "blocks.3.attn.hook_z",
    }
    with pytest.raises(BadFile) as caught:
        load_sae(write(tmp_path / "sae", config, w))
    named = ("'gated'", "'layer_norm'", "'tanh-relu'", "'hook_z'", "b_enc: is missing", "W_dec: has shape [40, 5]")
    for expected in (*named, "pass model", "pass layer", "pass site"):
        assert expected in str(caught.value)


def test_a_folder_without_its_files_is_refused_by_name(tmp_path: Path):
    with pytest.raises(BadFile, match=r"cfg\.json"):
        load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text("{}")
    with pytest.raises(BadFile, match=r"sae_weights\.safetensors"):
        load_sae(tmp_path)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"xx")
    with pytest.raises(BadFile, match=r"sae_weights\.safetensors is not a readable SAE"):
        load_sae(tmp_path)
