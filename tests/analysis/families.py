"""Tiny models of the families the analysis promises, with biases and soft caps that count, and their checkpoints."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steerscope.analysis.directions import Directions
from support import tiny

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 4.0},
    "gemma3_text": {"sliding_window_pattern": 2},  # layers of both kinds, whose RoPE differs
}


@functools.cache
def family(name: str, seed: int = 0) -> PreTrainedModel:
    """The whole model, with transformers' eager attention, which tells its weights."""
    model = copy.deepcopy(tiny.model(name, seed=seed, **FAMILIES[name]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):
                parameter.normal_(generator=generator)
    model.set_attn_implementation("eager")
    return model


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def named(count: int, hidden: int = 64, seed: int = 7) -> Directions:
    """Random directions d0, d1, …, the same at all layers."""
    rows = np.random.default_rng(seed).standard_normal((1, count, hidden)).astype(np.float32)
    return Directions(tuple(f"d{i}" for i in range(count)), ("drawn",) * count, (None,), rows)


@contextmanager
def watching(*modules: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Input and output of each module's last call."""
    seen: list = [None] * len(modules)

    def hook(i: int):  # noqa: ANN202
        def keep(_module: nn.Module, args: tuple, kwargs: dict, out: Tensor | tuple) -> None:
            given = args[0] if args else kwargs["hidden_states"]
            seen[i] = given, out[0] if isinstance(out, tuple) else out

        return keep

    handles = [module.register_forward_hook(hook(i), with_kwargs=True) for i, module in enumerate(modules)]
    yield seen
    for handle in handles:
        handle.remove()


def unit_rows(directions: Directions) -> Tensor:
    """[layers, vectors, hidden] of length 1."""
    return torch.from_numpy(directions.rows / directions.norms[..., None])


def negated(directions: Directions) -> Directions:
    names = tuple(f"-{name}" for name in directions.names)
    return replace(directions, names=names, rows=-directions.rows)
