"""Check at start-up, in the dtype and on the device that will serve.

Taps: while known integers stand in for all streams and addends, each tap of each layer adds a vector of its own. The
rows that it reads must be the integers with the vector, and what the next block is given must have moved by exactly the
vectors. Batching: two texts of different lengths, prefilled together and continued by one token through the batch's
cache, must give the logits of plain forwards. Pieces: a random prompt computed in three pieces must give the rows and
the logits of the same prompt computed at once; else prompts are computed whole.
"""

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from steerscope.core.sites import TABLE
from steerscope.core.slot_table import Key, Lease, PlacedOp, SlotTable, pack
from steerscope.engines.hf.blocks import (
    PROBE_TOKENS,
    Blocks,
    Probe,
    forward,
    keep_input,
    keep_output,
    other_than_sum,
    stream_scale,
)
from steerscope.engines.hf.decode_batch import BatchCache, prompt_cache
from steerscope.engines.hf.forward_index import Gather, Pass, SteeredTokens
from steerscope.engines.hf.prefill import prefill_inputs
from steerscope.engines.hf.settings import context_of
from steerscope.engines.hf.taps import Taps
from steerscope.specs.errors import SteerscopeError, UnsupportedModel
from steerscope.specs.steering import Site
from steerscope.specs.tokens import EVERYWHERE

_TOGETHER: tuple[tuple[Site, ...], ...] = (
    ("resid_pre", "attn_out", "mlp_out", "resid_post"),
    ("resid_mid",),  # tapped where attn_out is
)
_ADD = (1.0, 0.0, 0.0, -np.inf, np.inf)
_LAST_PIECE = 24  # tokens; they lie behind a sliding window of up to _LONGEST_WINDOW
_LONGEST_WINDOW = 1024
log = logging.getLogger("steerscope")


def self_test(model: PreTrainedModel, taps: Taps, table: SlotTable) -> None:
    name = type(model).__name__
    try:
        with torch.no_grad():
            for sites in _TOGETHER:
                _steering(model, taps, table, [site for site in sites if site not in taps.blocks.refused])
            _batching(model)
    except SteerscopeError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"self-test of {name} failed: {type(error).__name__}: {error}") from error


def _steering(model: PreTrainedModel, taps: Taps, table: SlotTable, sites: Sequence[Site]) -> None:
    blocks = taps.blocks
    # The other resid_pre are taps of resid_post.
    keys: list[Key] = [
        (layer, site) for site in sites for layer in ([0] if site == "resid_pre" else range(len(blocks)))
    ]
    if not keys:
        return
    numbers = np.random.default_rng(0).integers(-8, 9, size=(len(keys), table.hidden)).astype(np.float32)
    ops = [PlacedOp(key, EVERYWHERE, vector, _ADD) for key, vector in zip(keys, numbers, strict=True)]
    lease = table.acquire(pack(ops)[0])
    probe = Probe.of(model, len(blocks))
    try:
        rows, entered, left = _tapped(model, taps, probe, keys, lease)
    finally:
        table.release(lease)
    given = [*(probe.arrived[layer] for layer in range(1, len(blocks))), left]
    added = {op.key: torch.from_numpy(op.vector).to(model.device) for op in ops}
    for layer in range(len(blocks)):
        lost = _lost(layer, blocks, probe, given[layer], rows, added)
        if layer == 0 and "resid_pre" in sites and not torch.equal(entered, rows[0, "resid_pre"]):
            lost = "resid_pre"
        if lost:
            raise UnsupportedModel(
                f"self-test of {type(model).__name__} failed: a vector added at {lost} of layer {layer} did not arrive"
            )


def _tapped(
    model: PreTrainedModel, taps: Taps, probe: Probe, keys: list[Key], lease: Lease
) -> tuple[dict[Key, Tensor], Tensor, Tensor]:
    """Run the taps on known integers: the rows that they read, what enters the first block and what leaves the last."""
    blocks = taps.blocks
    entry = torch.tensor([[[lease.vector_slot, lease.coefficient_slot, 0]]] * PROBE_TOKENS, device=model.device)
    staged = Gather(tuple(keys), tokens=list(range(PROBE_TOKENS)))
    staged.allocate(PROBE_TOKENS, taps.table.hidden, model.dtype, model.device)
    now = Pass(captured=[staged], steered=SteeredTokens(entries=entry))
    entered: dict[int, Tensor] = {}
    left: dict[int, Tensor] = {}
    with (
        probe.inside(blocks.blocks),
        taps.attached(keys),
        # Hooks run in the order of their registration: these see what leaves the first tap and the last.
        blocks[0].module.register_forward_pre_hook(keep_input(entered, 0), with_kwargs=True),
        blocks[len(blocks) - 1].module.register_forward_hook(keep_output(left, 0)),
        taps.during(now),
    ):
        forward(model)
    return dict(zip(keys, staged.stage.unbind(1), strict=True)), entered[0][0], left[0][0]


def _lost(
    layer: int, blocks: Blocks, probe: Probe, given: Tensor, rows: dict[Key, Tensor], added: dict[Key, Tensor]
) -> str | None:
    """The sites of a layer whose rows, or what the next block is given, are not what their vectors make of them."""
    block = blocks[layer]
    returned = probe.returned[layer][0]
    scale = stream_scale(block)
    eps = torch.finfo(returned.dtype).eps
    exact = scale == block.multiplier == 1
    terms = probe.terms(layer, block)
    for site, facts in TABLE.items():
        term = facts.term
        if (layer, site) not in added or term is None:
            continue
        terms[term] += added[layer, site]
        wanted = terms[:2].sum(0) if site == "resid_mid" else terms[term]
        error = (rows[layer, site].double() - wanted).norm() / wanted.norm()
        if not error <= (0 if exact else 2 * eps):
            return site
    tapped = [site for site, facts in TABLE.items() if (layer, site) in added and facts.term is not None]
    if "attn_out" not in blocks.refused and tapped and other_than_sum(returned.double() / scale, terms, eps, exact):
        return " or ".join(tapped)
    if (layer, "resid_post") not in added:
        return None
    wanted = (returned.float() + added[layer, "resid_post"]).to(returned.dtype)
    arrived = torch.equal(given, wanted) and torch.equal(rows[layer, "resid_post"], wanted)
    return None if arrived else "resid_post"


def _batching(model: PreTrainedModel) -> None:
    # Ordinary tokens: the first ids are special, and in bfloat16 SmolLM2's rows of those round ten times as coarsely.
    a, b, c, last = (len(model.get_input_embeddings().weight) // part for part in (2, 3, 5, 7))  # type: ignore[arg-type]
    device = model.device
    texts = ([a, b, c], [b])
    prefilled = prompt_cache(model.config)
    cache = BatchCache(model.config)
    model(**prefill_inputs(texts, 0, device), past_key_values=prefilled, use_cache=True)
    cache.join(prefilled, [3, 1])
    together = model(**cache.inputs([last, last], device), use_cache=True).logits[:, -1]
    for row, text in zip(together, texts, strict=True):
        alone = model(input_ids=torch.tensor([[*text, last]], device=device), use_cache=False).logits[0, -1]
        error = (row.float() - alone.float()).norm() / alone.float().norm()
        if not error < _rounding(alone.dtype):
            raise UnsupportedModel(
                f"self-test of {type(model).__name__} failed: texts in one batch do not give the logits they give "
                f"alone (relative difference {float(error):.2g})"
            )


def _rounding(dtype: torch.dtype) -> float:
    """Relative difference that batch shapes may make; a cache or a mask that is not understood is off by far more."""
    return max(1e-3, 8 * torch.finfo(dtype).eps)


def can_continue(model: PreTrainedModel, blocks: Blocks, last_only: dict[str, int]) -> bool:
    """Return whether a prompt computed in pieces, each continuing the cache of those before it, is exact."""
    try:
        with torch.no_grad():
            fault = _piece_fault(model, blocks, last_only)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        log.warning("%s computes prompts whole, which stops streams meanwhile: %s", type(model).__name__, fault)
    return not fault


def _piece_fault(model: PreTrainedModel, blocks: Blocks, last_only: dict[str, int]) -> str | None:
    config = model.config.get_text_config(decoder=True)
    window = min(getattr(config, "sliding_window", None) or 0, _LONGEST_WINDOW)
    n_tokens = min(window + 2 * _LAST_PIECE, context_of(config) or _LONGEST_WINDOW)
    vocab = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    ids = torch.randint(vocab // 8, vocab, (n_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    last = min(_LAST_PIECE, n_tokens // 2)
    cuts = (0, n_tokens // 4, n_tokens - last, n_tokens)
    last_only = dict.fromkeys(last_only, last)
    whole, wanted = _in_pieces(model, blocks, ids, (0, n_tokens), last_only)
    pieces, logits = _in_pieces(model, blocks, ids, cuts, last_only)
    limit = _rounding(model.dtype)
    # Medians: a router of experts may choose differently for a few tokens, by rounding alone.
    compared = [(pieces[a:b], whole[a:b]) for a, b in itertools.pairwise(cuts)]
    compared.append((logits[-last:], wanted[-last:]))
    found = [float(((x - y).norm(dim=-1) / y.norm(dim=-1)).median()) for x, y in compared]
    if all(error < limit for error in found):
        return None
    return f"a prompt in pieces differs from the same at once by {max(found):.2g}, where {limit:.2g} is rounding"


def _in_pieces(
    model: PreTrainedModel, blocks: Blocks, ids: list[int], cuts: Sequence[int], last_only: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """Return the rows [tokens, hidden] that leave the last block, and logits of the last tokens."""
    cache = prompt_cache(model.config)
    kept = dict[int, Tensor]()
    rows: list[Tensor] = []
    logits = torch.empty(0)
    with blocks[len(blocks) - 1].module.register_forward_hook(keep_output(kept, 0)):
        for start, stop in itertools.pairwise(cuts):
            inputs = prefill_inputs([ids[start:stop]], start, model.device)
            logits = model(**inputs, past_key_values=cache, **last_only, use_cache=True).logits[0]
            rows.append(kept[0][0].float())
    return torch.cat(rows), logits.float()
