"""From rows of the last layer to the logits the model would have had: its final norm and its head, nothing else."""

import torch
from torch import Tensor, nn

from steerscope.engines.hf.engine import HFEngine
from steerscope.specs.errors import UnsupportedModel

_NORMS = ("norm", "final_layer_norm", "ln_f")


def logits(engine: HFEngine, rows: Tensor) -> Tensor:
    """[…, hidden] → [..., vocab], float32."""
    model = engine.model
    base, head = model.base_model, model.get_output_embeddings()
    norm = next((found for name in _NORMS if isinstance(found := getattr(base, name, None), nn.Module)), None)
    if norm is None or head is None:
        raise UnsupportedModel(f"{type(model).__name__} has no final norm named {', '.join(_NORMS)}, or no head")
    with torch.no_grad():
        found = head(norm(rows.to(model.device, model.dtype))).float()
        cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        return cap * torch.tanh(found / cap) if cap else found
