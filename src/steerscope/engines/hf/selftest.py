"""Proof at start-up, in the dtype and on the device that will serve.

Steering: a known vector is pushed through every tap of every layer; what leaves each tapped module must be, element by
element, what entered plus the vector. Batching: two texts of different lengths, prefilled
together and continued by one token through the batch's cache, must give the logits of plain forwards.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from steerscope.engines.hf.blocks import keep_input, keep_output
from steerscope.engines.hf.kv import BatchCache
from steerscope.engines.hf.taps import Pass, Taps
from steerscope.residual.table import Key, PlacedOp, SlotTable, pack
from steerscope.specs.errors import SteerscopeError, UnsupportedModel
from steerscope.specs.steering import Site
from steerscope.specs.tokens import EVERYWHERE

_TOKENS = 3
_TOGETHER: tuple[tuple[Site, ...], ...] = (
    ("resid_pre", "attn_out", "mlp_out", "resid_post"),
    ("resid_mid",),  # tapped where attn_out is
)
_SCALE = 0.5


def self_test(model: PreTrainedModel, taps: Taps, table: SlotTable) -> None:
    name = type(model).__name__
    try:
        with torch.no_grad():
            for sites in _TOGETHER:
                _steering(model, taps, table, [site for site in sites if site not in taps.blocks.refused])
            _batching(model, len(taps.blocks))
    except SteerscopeError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"self-test of {name} failed: {type(error).__name__}: {error}") from error


def _steering(model: PreTrainedModel, taps: Taps, table: SlotTable, sites: Sequence[Site]) -> None:
    layers = range(len(taps.blocks))
    # The other resid_pre are taps of resid_post.
    keys: list[Key] = [(layer, site) for site in sites for layer in ([0] if site == "resid_pre" else layers)]
    if not keys:
        return
    raw: dict[Key, Tensor] = {}
    after: dict[Key, Tensor] = {}
    vector = np.linspace(-1, 1, table.hidden, dtype=np.float32)
    coefficients = (_SCALE, 0.0, 0.0, -np.inf, np.inf)
    lease = table.acquire(pack([PlacedOp(key, EVERYWHERE, vector, coefficients) for key in keys])[0])
    entry = torch.tensor([[[lease.vector_slot, lease.coefficient_slot, 0]]] * _TOKENS, device=model.device)
    # Hooks run in the order of their registration: these see what enters the taps, those below what leaves them.
    handles = [_watch(taps, key, raw) for key in keys]
    taps.attach(keys)
    handles += [_watch(taps, key, after) for key in keys]
    try:
        with taps.during(Pass(torch.arange(_TOKENS, device=model.device), entry)):
            model(input_ids=torch.arange(_TOKENS, device=model.device).unsqueeze(0), use_cache=False)
    finally:
        taps.attach(())
        table.release(lease)
        for handle in handles:
            handle.remove()
    wanted = _SCALE * torch.from_numpy(vector).to(model.device)
    for layer, site in keys:
        entered, left = raw[layer, site], after[layer, site]
        if not torch.equal(left, (entered.float() + wanted).to(entered.dtype)) or torch.equal(left, entered):
            raise UnsupportedModel(
                f"self-test of {type(model).__name__} failed: a vector added at {site} of layer {layer} did not arrive"
            )


def _watch(taps: Taps, key: Key, place: dict[Key, Tensor]) -> torch.utils.hooks.RemovableHandle:
    layer, site = key
    block = taps.blocks[layer]
    if site == "resid_pre":
        return block.module.register_forward_pre_hook(keep_input(place, key), with_kwargs=True)
    modules = {"resid_post": block.module, "mlp_out": block.mlp_addend}
    module = modules.get(site, block.attn_addend)
    assert isinstance(module, nn.Module)
    return module.register_forward_hook(keep_output(place, key))


def _batching(model: PreTrainedModel, layers: int) -> None:
    # Ordinary tokens: the first ids are special, and in bfloat16 SmolLM2's rows of those round ten times as coarsely.
    a, b, c, last = (len(model.get_input_embeddings().weight) // part for part in (2, 3, 5, 7))  # type: ignore[arg-type]
    device, texts = model.device, ([a, b, c], [b])
    padded = torch.tensor([[a, b, c], [a, a, b]], device=device)
    mask = torch.tensor([[True] * 3, [False, False, True]], device=device)
    prefilled, cache = DynamicCache(), BatchCache(layers)
    positions = torch.tensor([[0, 1, 2], [0, 0, 0]], device=device)
    model(input_ids=padded, attention_mask=mask, position_ids=positions, past_key_values=prefilled, use_cache=True)
    cache.join(prefilled, [3, 1])
    cache.make_room()
    together = model(
        input_ids=torch.tensor([[last], [last]], device=device),
        attention_mask=cache.mask(device),
        position_ids=torch.tensor([[3], [1]], device=device),
        past_key_values=cache,
        use_cache=True,
    ).logits[:, -1]
    for row, text in zip(together, texts, strict=True):
        alone = model(input_ids=torch.tensor([[*text, last]], device=device), use_cache=False).logits[0, -1]
        error = (row.float() - alone.float()).norm() / alone.float().norm()
        # Rounding differs between batch shapes; a cache or a mask that is not understood is off by far more.
        if not error < max(1e-3, 8 * torch.finfo(alone.dtype).eps):
            raise UnsupportedModel(
                f"self-test of {type(model).__name__} failed: texts in one batch do not give the logits they give "
                f"alone (relative difference {float(error):.2g})"
            )
