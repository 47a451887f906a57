"""Read sparse autoencoders as packs: encoder rows become linear lenses, decoder rows steering vectors.

The format is that of SAELens: a directory with `cfg.json` and `sae_weights.safetensors` (`W_enc [d, f]`, `b_enc`,
`W_dec [f, d]`, `b_dec`, and `threshold` or `log_threshold`). Architectures: `standard` (ReLU), `jumprelu` (a threshold
per feature; below 0 it counts as 0), `topk`. A bias that is subtracted from the input (`apply_b_dec_to_input`, on by
default as in SAELens) is folded into the encoder's, and the decoder norms of `rescale_acts_by_decoder_norm` into both
encoder and decoder. Other architectures, activations and normalisations of the input are refused by name.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from steerscope.core.sites import TABLE
from steerscope.files import reading
from steerscope.lenses.pack import Architecture, Concept, Pack, PackInfo
from steerscope.lenses.spec import Output
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.steering import Site
from steerscope.vectors.vector import SteeringVector

_OUTPUTS: dict[str, Output] = {"standard": "relu", "jumprelu": "jumprelu", "topk": "topk"}
_SITES: dict[str, Site] = {facts.hook_name: site for site, facts in TABLE.items()}


def load_sae(path: str | Path, *, model: str | None = None, layer: int | None = None, site: Site | None = None) -> Pack:
    """Read a directory of SAELens. Model, layer and site are those of its config unless given."""
    path = Path(path)
    with reading(path / "cfg.json", "config of an SAE"):
        config = dict(json.loads((path / "cfg.json").read_bytes()))
        meta = config.get("metadata")
        flat = {**(meta if isinstance(meta, Mapping) else {}), **config}
    file = next((f for f in sorted(path.glob("*.safetensors")) if "sparsity" not in f.name), None)
    if file is None:
        raise BadFile(f"{path} has no sae_weights.safetensors")
    with reading(file, "SAE"):
        weights = {name: tensor.float() for name, tensor in load_file(file).items()}
    hook = str(flat.get("hook_name") or flat.get("hook_point") or "")
    found = re.fullmatch(r"blocks\.(\d+)\.(\w+)", hook)
    if layer is None:
        layer = int(found[1]) if found else flat.get("hook_layer")
    site = site or (_SITES.get(found[2]) if found else None)
    model = model or flat.get("model_name")
    problems = _problems(flat, weights)
    for name, value in (("model", model), ("layer", layer), ("site", site)):
        if value is None:
            problems.append(Problem(name, f"is not in cfg.json (hook {hook!r})", f"pass {name}=…"))
    if problems or model is None or layer is None or site is None:
        raise BadFile(f"{path} cannot be read as lenses: {InvalidRequest(problems)}")
    return _pack(path, flat, weights, str(model), int(layer), site)


def _activation(config: Mapping) -> str:
    return str(config.get("activation_fn") or config.get("activation_fn_str") or "relu")


def _architecture(config: Mapping) -> str:
    """Return the architecture. Old configs call an SAE with a topk activation "standard"."""
    return "topk" if _activation(config) == "topk" else str(config.get("architecture", "standard"))


def _k(config: Mapping) -> int | None:
    inner = config.get("activation_fn_kwargs") or config.get("activation_fn_str_kwargs")
    k = config.get("k", inner.get("k") if isinstance(inner, Mapping) else None)
    return int(k) if k is not None else None


def _problems(config: Mapping, weights: Mapping[str, Tensor]) -> list[Problem]:
    name = _architecture(config)
    values = {
        "architecture": (name, tuple(_OUTPUTS)),
        "activation_fn": (_activation(config), ("relu", "topk")),
        "normalize_activations": (config.get("normalize_activations") or "none", ("none",)),
        "reshape_activations": (config.get("reshape_activations") or "none", ("none",)),
    }
    found = [
        Problem(field, f"{value!r} is not known", f"known: {', '.join(known)}")
        for field, (value, known) in values.items()
        if value not in known
    ]
    if name == "topk" and _k(config) is None:
        found.append(Problem("k", "is missing", "a topk SAE needs it"))
    if config.get("rescale_acts_by_decoder_norm") and name != "topk":
        found.append(Problem("rescale_acts_by_decoder_norm", "is known for topk only", "fold it into the weights"))
    return found + _shape_problems(name, weights)


def _shape_problems(architecture: str, weights: Mapping[str, Tensor]) -> list[Problem]:
    if "W_enc" not in weights or weights["W_enc"].dim() != 2:
        return [Problem("W_enc", "is missing or not a matrix", "expected [hidden, features]")]
    hidden, features = weights["W_enc"].shape
    wanted = {"b_enc": (features,), "W_dec": (features, hidden), "b_dec": (hidden,)}
    if architecture == "jumprelu":
        wanted["log_threshold" if "log_threshold" in weights else "threshold"] = (features,)
    found = []
    for name, shape in wanted.items():
        if name not in weights:
            found.append(Problem(name, "is missing", f"expected {list(shape)}"))
        elif tuple(weights[name].shape) != shape:
            found.append(Problem(name, f"has shape {list(weights[name].shape)}", f"expected {list(shape)}"))
    return found


def _pack(path: Path, config: Mapping, weights: Mapping[str, Tensor], model: str, layer: int, site: Site) -> Pack:
    output = _OUTPUTS[_architecture(config)]
    encoder = weights["W_enc"]
    decoder = weights["W_dec"]
    bias = weights["b_enc"]
    if config.get("apply_b_dec_to_input", True):
        bias = (bias.double() - weights["b_dec"].double() @ encoder.double()).float()
    if config.get("rescale_acts_by_decoder_norm"):
        norms = decoder.norm(dim=-1)
        encoder = encoder * norms
        bias = bias * norms
        decoder = decoder / norms.unsqueeze(-1)
    tensors = {"w0": encoder.T.unsqueeze(1).contiguous(), "b0": bias.unsqueeze(1), "decoder": decoder}
    if output == "jumprelu":
        threshold = weights["log_threshold"].exp() if "log_threshold" in weights else weights["threshold"]
        tensors["threshold"] = threshold.relu()
    kept: dict[str, Any] = {k: value for k, value in config.items() if isinstance(value, str | int | float | bool)}
    with reading(path, "SAE"):
        info = PackInfo(
            name=path.absolute().name,
            model=model,
            hidden=encoder.shape[0],
            layer=layer,
            site=site,
            normalisation="none",
            architecture=Architecture(output=output, k=_k(config) if output == "topk" else None),
            training={"source": "saelens", "config": kept},
        )
        return Pack(info, [Concept(id=str(i)) for i in range(encoder.shape[1])], tensors)


def feature(pack: Pack, i: int | str) -> SteeringVector:
    """Return a feature's row of the decoder, at the layer and site that the lenses read."""
    if "decoder" not in pack.tensors:
        raise InvalidRequest([Problem("pack", "has no decoder", "only packs made of an SAE can steer")])
    place = pack.index(i) if isinstance(i, str) else i
    if not 0 <= place < len(pack):
        raise InvalidRequest([Problem("feature", f"{i} does not exist", f"the pack has 0–{len(pack) - 1}")])
    info = pack.info
    about = f"{pack.info.name}/{pack.concepts[place].id}"
    direction = pack.tensors["decoder"][place]
    return SteeringVector({info.layer: direction}, info.model, info.site, "sae decoder", {"name": about})
