"""The table of sites: where a layer's activations can be read and changed. Adding a site is adding a row.

Rows of every site are as wide as the stream (`hidden`). With transformers a site is the input or the output of a module
of a block (`engines/hf/blocks.py`). vLLM's layers differ too much for a name: `engines/vllm/worker/layer_proof.py`
finds the parts of a layer whose sum is `term`.
"""

from dataclasses import dataclass
from typing import Literal

from steerscope.core.slot_table import Key
from steerscope.specs.errors import Problem
from steerscope.specs.steering import Site


@dataclass(frozen=True, slots=True)
class SiteFacts:
    module: Literal["module", "attn_addend", "mlp_addend"]  # of a transformers block
    side: Literal["input", "output"]  # of that module
    term: int | None  # of stream + attention + MLP, the sum that a block returns: what its ops change; None: the sum
    hook_name: str  # in TransformerLens and SAELens
    replicated: bool = True  # every rank of tensor parallelism has the whole row
    steerable: bool = True


TABLE: dict[Site, SiteFacts] = {  # in the order in which a forward reaches them
    "resid_pre": SiteFacts("module", "input", 0, "hook_resid_pre"),
    "attn_out": SiteFacts("attn_addend", "output", 1, "hook_attn_out"),
    "resid_mid": SiteFacts("attn_addend", "output", 1, "hook_resid_mid"),
    "mlp_out": SiteFacts("mlp_addend", "output", 2, "hook_mlp_out"),
    "resid_post": SiteFacts("module", "output", None, "hook_resid_post"),
}


def tap_of(layer: int, site: Site) -> Key:
    """Return the tap of a site: `resid_pre` of layer i > 0 is `resid_post` of layer i−1."""
    return (layer - 1, "resid_post") if site == "resid_pre" and layer > 0 else (layer, site)


def refusal(field: str, site: Site, model: str, reason: str, remedy: str = "use resid_post") -> Problem:
    """Return the problem of a site that a model lacks."""
    return Problem(field, f"{site} cannot be had on {model}: {reason}", remedy)
