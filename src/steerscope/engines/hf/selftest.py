"""Proof at start-up, in the dtype and on the device that will serve.

Steering: a known vector is pushed through every tap of every layer; what the next block is given must have moved by
exactly these vectors. Batching: two texts of different lengths, prefilled
together and continued by one token through the batch's cache, must give the logits of plain forwards.
"""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from steerscope.engines.hf.blocks import (
    PROBE_TOKENS,
    Blocks,
    Probe,
    forward,
    is_sum,
    keep_input,
    keep_output,
    stream_scale,
)
from steerscope.engines.hf.kv import BatchCache
from steerscope.engines.hf.taps import Pass, Taps
from steerscope.residual.table import Key, PlacedOp, SlotTable, pack
from steerscope.specs.errors import SteerscopeError, UnsupportedModel
from steerscope.specs.steering import Site
from steerscope.specs.tokens import EVERYWHERE

_TOGETHER: tuple[tuple[Site, ...], ...] = (
    ("resid_pre", "attn_out", "mlp_out", "resid_post"),
    ("resid_mid",),  # tapped where attn_out is
)
_TERM: dict[Site, int] = {"resid_pre": 0, "attn_out": 1, "resid_mid": 1, "mlp_out": 2}  # of the sum that a block makes
_ADD = (1.0, 0.0, 0.0, -np.inf, np.inf)


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
    """Add a vector of its own at every tap while all streams and addends are known integers, and compare what the next
    blocks are given."""
    blocks = taps.blocks
    layers = range(len(blocks))
    # The other resid_pre are taps of resid_post.
    keys: list[Key] = [(layer, site) for site in sites for layer in ([0] if site == "resid_pre" else layers)]
    if not keys:
        return
    numbers = np.random.default_rng(0).integers(-8, 9, size=(len(keys), table.hidden)).astype(np.float32)
    vectors = dict(zip(keys, numbers, strict=True))
    lease = table.acquire(pack([PlacedOp(key, EVERYWHERE, vectors[key], _ADD) for key in keys])[0])
    entry = torch.tensor([[[lease.vector_slot, lease.coefficient_slot, 0]]] * PROBE_TOKENS, device=model.device)
    probe = Probe.of(model, len(blocks))
    entered: dict[int, Tensor] = {}
    left: dict[int, Tensor] = {}
    with contextlib.ExitStack() as undo:
        undo.callback(table.release, lease)
        undo.enter_context(probe.inside(blocks.blocks))
        undo.callback(taps.attach, ())
        taps.attach(keys)
        # Hooks run in the order of their registration: these see what leaves the first tap and the last.
        head, tail = blocks[0].module, blocks[layers[-1]].module
        undo.callback(head.register_forward_pre_hook(keep_input(entered, 0), with_kwargs=True).remove)
        undo.callback(tail.register_forward_hook(keep_output(left, layers[-1])).remove)
        undo.enter_context(taps.during(Pass(torch.arange(PROBE_TOKENS, device=model.device), entry)))
        forward(model)
    left = {layer: left[layer][0] if layer in left else probe.arrived[layer + 1] for layer in layers}
    added = {key: torch.from_numpy(vector).to(model.device) for key, vector in vectors.items()}
    lost = [] if _arrived(entered[0][0], probe.stream[0], added.get((0, "resid_pre"))) else [(0, "resid_pre")]
    for layer in layers:
        if not _arrived(left[layer], probe.returned[layer][0], added.get((layer, "resid_post"))):
            lost.append((layer, "resid_post"))
        lost += [(layer, site) for site in _lost_inside(layer, blocks, probe, added)]
    if lost:
        raise UnsupportedModel(
            f"self-test of {type(model).__name__} failed: a vector added at {lost[0][1]} of layer {lost[0][0]} did "
            "not arrive"
        )


def _arrived(after: Tensor, before: Tensor, vector: Tensor | None) -> bool:
    return torch.equal(after, before if vector is None else (before.float() + vector).to(before.dtype))


def _lost_inside(layer: int, blocks: Blocks, probe: Probe, added: dict[Key, Tensor]) -> list[Site]:
    """Sites before the end of a layer, if what it returns is not the sum that their vectors make."""
    block, returned = blocks[layer], probe.returned[layer][0]
    sites = [site for site in _TERM if (layer, site) in added]
    if not sites or "attn_out" in blocks.refused:
        return []
    terms, scale = probe.terms(layer, block), stream_scale(block)
    for site in sites:
        terms[_TERM[site]] += added[layer, site]
    exact = scale == block.multiplier == 1
    fits, _ = is_sum(returned.double() / scale, terms, torch.finfo(returned.dtype).eps, exact)
    return [] if fits else sites


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
