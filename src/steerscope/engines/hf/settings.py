"""What an engine is started with: its options, and what is read off the model and its configuration."""

import contextlib
import os
from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from steerscope.specs.base import Spec
from steerscope.specs.errors import UnsupportedModel

_FINAL_NORMS = ("norm", "final_layer_norm", "ln_f")


class HFSettings(Spec):
    """The options of the engine."""

    max_batch: int = Field(default=64, ge=1)  # sequences that decode together
    prefill_chunk: int = Field(default=512, ge=1)  # tokens of prompts between two steps of running streams
    max_columns: int = Field(default=16, ge=1)  # ops of one token at one site
    slots: int = Field(default=128, ge=2)  # vectors in use at once; slot 0 does nothing
    capture_budget: int = Field(default=4 << 30, ge=0)  # bytes of rows that may wait to be fetched
    capture_wait: float = 60.0  # seconds that a request waits for room in the budget
    capture_ttl: float = Field(default=600.0, ge=0)  # seconds until rows that were not fetched are dropped


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


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has, if the system says so."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


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
    base = model.base_model
    head = model.get_output_embeddings()
    norm = next((found for name in _FINAL_NORMS if isinstance(found := getattr(base, name, None), nn.Module)), None)
    if norm is None or head is None:
        raise UnsupportedModel(f"{type(model).__name__} has no final norm named {', '.join(_FINAL_NORMS)}, or no head")
    found = head(norm(rows.to(model.device, model.dtype))).float()
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return cap * torch.tanh(found / cap) if cap else found
