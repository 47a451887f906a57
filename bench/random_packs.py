"""Packs of random lenses, and vLLM's share of a GPU for programs that start several engines."""

from collections.abc import Sequence
from typing import Any

import torch

from steerscope.lenses.pack import Architecture, Concept, Pack, PackInfo
from steerscope.lenses.tensors import layout


def small_share(device: str) -> dict[str, Any]:
    """vLLM's argument that lets several engines share a GPU; without one there is nothing to share."""
    return {"gpu_memory_utilization": 0.05} if device == "cuda" else {}


def make_pack(
    levels: Sequence[int], hidden: int, widths: tuple[int, ...], device: str = "cpu", layer: int = 0, seed: int = 0
) -> Pack:
    """Random lenses; the concepts of each level are spread over those of the level above."""
    draw = torch.Generator(device).manual_seed(seed)
    concepts = [
        Concept(id=f"{level}.{i}", level=level, parents=(f"{level - 1}.{i % levels[level - 1]}",) if level else ())
        for level, count in enumerate(levels)
        for i in range(count)
    ]
    info = PackInfo(name="bench", model="bench", hidden=hidden, layer=layer, architecture=Architecture(widths=widths))
    tensors = {}
    for name, shape in layout(info, len(concepts)).items():
        scale = 1.6 * shape[-1] ** -0.5 if name.startswith("w") else 0.1
        tensors[name] = torch.randn(shape, generator=draw, device=device).mul_(scale)
    return Pack(info, concepts, tensors)
