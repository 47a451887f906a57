"""Proof at start-up that steering reaches the model: a known vector is pushed through every layer's tap in one forward,
and the next block must receive exactly its block's output plus that vector."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from steerscope.engines.hf.blocks import keep_input, keep_output
from steerscope.engines.hf.taps import Pass, Taps
from steerscope.residual.table import Key, PlacedOp, SlotTable, pack
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.tokens import EVERYWHERE

_TOKENS = 3


def self_test(model: PreTrainedModel, taps: Taps, table: SlotTable) -> None:
    raw: dict[int, Tensor] = {}
    received: dict[int, Tensor] = {}
    handles = []
    # These hooks come before the taps', so they see what the block itself returned.
    for i, block in enumerate(taps.blocks.blocks):
        handles.append(block.module.register_forward_hook(keep_output(raw, i)))
        if i:
            handles.append(block.module.register_forward_pre_hook(keep_input(received, i - 1), with_kwargs=True))
    vector = np.linspace(-1, 1, table.hidden, dtype=np.float32)
    keys: list[Key] = [(layer, "resid_post") for layer in range(len(taps.blocks))]
    column = pack([PlacedOp(key, EVERYWHERE, vector, (0.5, 0.0, 0.0, -np.inf, np.inf)) for key in keys])[0]
    lease = table.acquire(column)
    entry = torch.tensor([[[lease.vector_slot, lease.coefficient_slot, 0]]] * _TOKENS, device=model.device)
    taps.attach(keys)
    taps.current = Pass(torch.arange(_TOKENS, device=model.device), entry)
    ids = torch.arange(_TOKENS, device=model.device).unsqueeze(0)
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        taps.current = None
        taps.attach(())
        table.release(lease)
        for handle in handles:
            handle.remove()
    wanted = 0.5 * torch.from_numpy(vector).to(model.device)
    for layer, after in received.items():
        gained = after.float() - raw[layer].float()
        allowed = 4 * torch.finfo(after.dtype).eps * (raw[layer].abs().max().float() + 1)
        if (gained - wanted).abs().max() > allowed:
            raise UnsupportedModel(
                f"self-test of {type(model).__name__} failed: a vector added after layer {layer} did not reach the next"
            )
