"""What is measured: one setup, the prompts of a round, and what each cell asks of every request.

Cells:
    baseline                    nothing of ours is there
    zero-layer                  the machinery is on, nothing is asked
    all-layers, layers=0,5      capture every row of these layers
    generated, last, mean       capture of all layers: generated tokens only, the last prompt token, the mean
    add, cap, ablate            steer all layers, another vector for every request; with `:one` only the middle layer,
                                with `:same` one vector for all
    watch                       267 lenses in bf16 read every generated token at the middle layer; `:int8` in int8
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steerscope.bench.shapes import model_config
from steerscope.engines.options import SteerLike
from steerscope.lenses.stack import Weights
from steerscope.specs import Ablate, Add, Cap, Capture
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

OPS = ("add", "cap", "ablate")
WATCHES: dict[str, Weights] = {"watch": "bf16", "watch:int8": "int8"}  # the weights of the lenses
CAPTURES = {
    "all-layers": Capture(),
    "generated": Capture(tokens="generated"),
    "last": Capture(tokens="last_prompt"),
    "mean": Capture(reduce="mean"),
}
_SLACK = 8  # steps an engine may run empty: an asynchronous one prepares ahead and hears of ends late


class NotMeasured(SteerscopeError):
    """The run was not what it claims to be, so its times mean nothing."""


@dataclass(frozen=True)
class Setup:
    """One configuration of an engine and its load."""

    model: str
    engine: str = "vllm"
    batch: int = 32
    prefill: int = 512
    decode: int = 128
    dtype: str = "auto"
    eager: bool = False
    tokens: int = 16384  # max_num_batched_tokens; vLLM's own default for batch work on large GPUs
    utilisation: float = 0.35
    columns: int = 4
    core: str = "inside"  # vLLM's engine core: in this process, or in one of its own
    most_bytes: int = 48 << 30  # of captured rows
    pool_bytes: int = 0  # of rows on the device; 0: what one step needs

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(
            torch, ("bfloat16" if self.device == "cuda" else "float32") if self.dtype == "auto" else self.dtype
        )

    def row_bytes(self) -> int:
        """All layers of all tokens of a round: 2 · layers · hidden per token in bf16."""
        config = model_config(self.model)
        count = self.batch * (self.prefill + self.decode)
        return count * config.num_hidden_layers * config.hidden_size * self.torch_dtype.itemsize

    def prompts(self, seed: int) -> list[list[int]]:
        """Other prompts in every round, so that nothing can be reused."""
        vocab = model_config(self.model).vocab_size
        return np.random.default_rng(seed).integers(2, vocab, (self.batch, self.prefill)).tolist()


def capture_of(cell: str, layers: int) -> Capture | None:
    if cell.startswith("layers="):
        return Capture(layers=cell.removeprefix("layers="))
    return Capture(layers=layers // 2) if cell == "one-layer" else CAPTURES.get(cell)


def steering_of(cell: str, layers: int, hidden: int, batch: int) -> SteerLike | Sequence[SteerLike] | None:
    op, *flags = cell.split(":")
    if op not in OPS:
        return None
    where: dict[str, Any] = {"layers": layers // 2 if "one" in flags else "all"}
    vectors = np.random.default_rng(1).standard_normal((1 if "same" in flags else batch, hidden)).astype(np.float32)
    made: dict[str, Any] = {
        # Small: weights that are made up keep a stream alive only just.
        "add": lambda v: Add(vector=v, scale=1e-3, **where),
        "cap": lambda v: Cap(vector=v, min=-1.0, max=1.0, **where),
        "ablate": lambda v: Ablate(vector=v, **where),
    }
    ops = [made[op](vector) for vector in vectors]
    return ops[0] if "same" in flags else ops


def check_cell(cell: str) -> str:
    op, *flags = cell.split(":")
    steers = op in OPS and set(flags) <= {"one", "same"}
    plain = cell in ("baseline", "zero-layer", "one-layer", *WATCHES, *CAPTURES) or cell.startswith("layers=")
    if not steers and not plain:
        known = ", ".join(["baseline", "zero-layer", "one-layer", "layers=…", *WATCHES, *CAPTURES, *OPS])
        raise InvalidRequest([Problem("cell", f"{cell!r} is unknown", f"choose from {known} (:one, :same)")])
    return cell


def check_batched(setup: Setup, tokens: Sequence[Sequence[int]], steps: int | None) -> None:
    """Refuse a run whose requests did not all make their tokens, or did not run together."""
    short = sorted({len(ids) for ids in tokens} - {setup.decode})
    if short or len(tokens) != setup.batch:
        raise NotMeasured(
            f"not measured: {len(tokens)} of {setup.batch} requests ended, with {short or setup.decode} tokens instead "
            f"of {setup.decode}"
        )
    room = max(setup.tokens - setup.batch, 1)  # tokens of prompts in a step in which everybody else decodes
    most = math.ceil(setup.batch * setup.prefill / room) + setup.decode + _SLACK
    if steps is not None and steps > most:
        raise NotMeasured(
            f"not measured: {steps} steps where a batch takes at most {most}: requests did not run together"
        )


def wanted_rows(setup: Setup, cell: str, layers: int) -> int:
    """Rows the client must have when the last token is there."""
    capture = capture_of(cell, layers)
    if capture is None:
        return 0
    count = {"generated": setup.decode - 1, "last": 1, "mean": 1}.get(cell, setup.prefill + setup.decode - 1)
    width = layers if capture.layers == "all" else len(capture.layers)  # type: ignore[arg-type]
    return setup.batch * count * width
