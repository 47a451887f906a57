"""What an engine is started with: its options, and what is read off the model and its configuration."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from steerscope.specs.errors import InvalidRequest, Problem, UnsupportedModel

_FINAL_NORMS = ("norm", "final_layer_norm", "ln_f")


def check_options(
    max_batch: int, prefill_chunk: int, max_columns: int, slots: int, capture_budget: int, capture_ttl: float
) -> None:
    least = (
        ("max_batch", max_batch, 1),
        ("prefill_chunk", prefill_chunk, 1),
        ("max_columns", max_columns, 1),
        ("slots", slots, 2),
        ("capture_budget", capture_budget, 0),
        ("capture_ttl", capture_ttl, 0),
    )
    problems = [Problem(name, f"is {value}", f"give at least {low}") for name, value, low in least if value < low]
    if problems:
        raise InvalidRequest(problems)


def context_of(config: PreTrainedConfig) -> int | None:
    """The longest text. Some rotary embeddings change for the whole batch when one row passes a length (longrope,
    dynamic): there the shorter length is the limit, so that no request can change another's rows."""
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    flat = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    if most is None or not any(part.get("rope_type") in ("longrope", "dynamic") for part in flat):
        return most
    limits = [getattr(config, "original_max_position_embeddings", None)]
    limits += [part.get("original_max_position_embeddings") for part in flat]
    return min([most, *(limit for limit in limits if limit)])


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end a text, looked up once."""
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """transformers draws progress bars on loading; a library must not."""
    drawn = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            transformers_logging.enable_progress_bar()


@torch.no_grad()
def logits(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Return the logits [..., vocab], float32, that the model makes of rows of its last layer with its final norm and
    its head."""
    base, head = model.base_model, model.get_output_embeddings()
    norm = next((found for name in _FINAL_NORMS if isinstance(found := getattr(base, name, None), nn.Module)), None)
    if norm is None or head is None:
        raise UnsupportedModel(f"{type(model).__name__} has no final norm named {', '.join(_FINAL_NORMS)}, or no head")
    found = head(norm(rows.to(model.device, model.dtype))).float()
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return cap * torch.tanh(found / cap) if cap else found
