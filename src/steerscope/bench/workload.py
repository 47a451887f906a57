"""What is measured: one setup, the prompts of a round, and what each cell asks of every request.

Cells:
    baseline                    nothing of ours is there
    zero-layer                  the machinery is on, nothing is asked
    all-layers, layers=0,5      capture every row of these layers
    generated, last, mean       capture of all layers: generated tokens only, the last prompt token, the mean
    add, cap, ablate            steer all layers, another vector for every request; with `:one` only the middle layer,
                                with `:same` one vector for all
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from steerscope.specs import Ablate, Add, Cap, Capture
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError

if TYPE_CHECKING:
    import torch

    from steerscope.engines.options import SteerLike

OPS = ("add", "cap", "ablate")
CAPTURES = {
    "all-layers": Capture(),
    "generated": Capture(tokens="generated"),
    "last": Capture(tokens="last_prompt"),
    "mean": Capture(reduce="mean"),
}
# Steps beyond those of one batch: an asynchronous engine prepares ahead and hears of ends late.
_SLACK = {"vllm": 2, "hf": 1}


class NotMeasured(SteerscopeError):
    """The run did not do what its cell says, so its times mean nothing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"not measured: {why}")


class Setup(Spec):
    """One configuration of an engine and its load. Fields with a description are options of `steerscope bench`."""

    model: str = Field(
        default="tiny",
        description="A directory, smollm2-135m, or a shape with random weights: qwen2.5-3b, llama-8b, llama-1b, small, "
        "tiny.",
    )
    engine: Literal["hf", "vllm"] = Field(default="hf", description="hf: transformers; vllm: vLLM, where installed.")
    batch: int = Field(default=32, ge=1, description="Requests that run together.")
    prefill: int = Field(default=512, ge=1, description="Tokens of each prompt.")
    decode: int = Field(default=128, ge=2, description="Tokens that each request generates.")
    stagger: int = Field(default=0, description="Difference in tokens between the longest and the shortest output.")
    dtype: str = Field(default="auto", description="auto: bfloat16 on a GPU, float32 elsewhere.")
    eager: bool = Field(default=False, description="vLLM without compilation and CUDA graphs.")
    tokens: int = Field(default=16384, description="vLLM's max_num_batched_tokens.")
    utilisation: float = 0.35  # vLLM's gpu_memory_utilization
    columns: int = 4
    core: str = "inside"  # vLLM's engine core: in this process, or in one of its own
    most_bytes: int = 48 << 30  # of captured rows
    pool_bytes: int = 0  # of rows on the device; 0: what one step needs

    @property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        default = "bfloat16" if self.device == "cuda" else "float32"
        return getattr(torch, default if self.dtype == "auto" else self.dtype)

    @property
    def config(self) -> Any:
        """Return the model's configuration, of transformers."""
        from steerscope.bench.shapes import model_config

        return model_config(self.model)

    def row_bytes(self) -> int:
        """Return the bytes of all layers' rows of a round."""
        count = self.batch * (self.prefill + self.decode)
        return count * self.config.num_hidden_layers * self.config.hidden_size * self.torch_dtype.itemsize

    def decodes(self) -> list[int]:
        """Return the number of tokens that each request generates."""
        return [self.decode - self.stagger * i // max(1, self.batch - 1) for i in range(self.batch)]

    def prompt_steps(self) -> int:
        """Return the number of steps in which vLLM computes the prompts, while earlier requests decode."""
        room = max(self.tokens - self.batch, 1) if self.batch * self.prefill > self.tokens else self.tokens
        return math.ceil(self.batch * self.prefill / room)

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the prompts of a round: random ones, so that no cache is hit."""
        shape = self.batch, self.prefill
        return np.random.default_rng(seed).integers(2, self.config.vocab_size, shape).tolist()


def steers(cell: str) -> bool:
    return cell.partition(":")[0] in OPS


def capture_of(cell: str, layers: int) -> Capture | None:
    if cell.startswith("layers="):
        return Capture(layers=cell.removeprefix("layers="))
    return Capture(layers=layers // 2) if cell == "one-layer" else CAPTURES.get(cell)


def steering_of(cell: str, layers: int, hidden: int, batch: int) -> "list[SteerLike] | None":
    """Return the op of each request. Scale and bounds are small, since random weights barely keep a stream alive."""
    op, *flags = cell.split(":")
    if op not in OPS:
        return None
    where: dict[str, Any] = {"layers": layers // 2 if "one" in flags else "all"}
    vectors = np.random.default_rng(1).standard_normal((1 if "same" in flags else batch, hidden)).astype(np.float32)
    if op == "add":
        ops: list[SteerLike] = [Add(vector=vector, scale=1e-3, **where) for vector in vectors]
    elif op == "cap":  # nearly every row is beyond these bounds
        ops = [Cap(vector=vector, min=-1e-5, max=1e-5, **where) for vector in vectors]
    else:
        ops = [Ablate(vector=vector, **where) for vector in vectors]
    return ops * batch if "same" in flags else ops


def check_cell(cell: str) -> str:
    _, *flags = cell.split(":")
    steered = steers(cell) and set(flags) <= {"one", "same"}
    plain = cell in ("baseline", "zero-layer", "one-layer", *CAPTURES) or cell.startswith("layers=")
    if not steered and not plain:
        known = ", ".join(["baseline", "zero-layer", "one-layer", "layers=…", *CAPTURES, *OPS])
        raise InvalidRequest([Problem("cell", f"{cell!r} is unknown", f"choose from {known} (:one, :same)")])
    return cell


def most_steps(setup: Setup) -> int:
    """Return the most steps that a batch takes whose requests run together."""
    return (setup.prompt_steps() if setup.engine == "vllm" else 0) + setup.decode - 1 + _SLACK[setup.engine]


def least_of_halves(setup: Setup) -> int:
    """Return the fewest steps of two halves that run one after the other; the first has the longest texts."""
    half = setup.batch // 2
    lengths = setup.decodes()
    reading = [math.ceil(count * setup.prefill / setup.tokens) for count in (half, setup.batch - half)]
    return (sum(reading) if setup.engine == "vllm" else 0) + lengths[0] + lengths[half] - 2


def check_setup(setup: Setup) -> None:
    """Refuse a setup whose batch could not be distinguished from two halves one after the other.

    Of staggered texts, a few that start late go unnoticed; the engines are created with room for all of them."""
    if not 0 <= setup.stagger < setup.decode:
        what = f"{setup.stagger} of {setup.decode} tokens"
        raise InvalidRequest([Problem("stagger", what, "every request makes a token at least")])
    if setup.batch > 1 and least_of_halves(setup) <= most_steps(setup):
        what = f"{setup.decode} tokens do not show whether {setup.batch} requests run together"
        raise InvalidRequest([Problem("decode", what, "decode more tokens, or stagger them less")])


def check_batched(setup: Setup, tokens: Sequence[Sequence[int]], steps: int | None) -> None:
    """Refuse a run whose requests did not all make their tokens, or did not run together."""
    wanted = setup.decodes()
    if len(tokens) != setup.batch:
        raise NotMeasured(f"{len(tokens)} of {setup.batch} requests ended")
    short = sorted({len(ids) for ids, count in zip(tokens, wanted, strict=True) if len(ids) != count})
    if short:
        raise NotMeasured(f"texts of {short} tokens, each should have {_counts(wanted)}")
    if steps is not None and steps > (most := most_steps(setup)):
        raise NotMeasured(f"{steps} steps where a batch takes at most {most}: requests did not run together")


def check_streams(setup: Setup, tokens: Sequence[int], last_first: float, first_end: float) -> None:
    """Refuse streams with missing tokens, or that did not all begin before the first one ended."""
    wanted = setup.decodes()
    if sorted(tokens) != sorted(wanted):
        raise NotMeasured(f"streams of {sorted(set(tokens))} tokens instead of {_counts(wanted)}")
    if last_first > first_end:
        raise NotMeasured("a stream began when another had ended: they did not run together")


def _counts(wanted: Sequence[int]) -> str:
    return str(wanted[0]) if len(set(wanted)) == 1 else f"its own of {min(wanted)} to {max(wanted)}"


def wanted_rows(setup: Setup, cell: str, layers: int) -> int:
    """Return the number of rows that must have arrived with the last token."""
    capture = capture_of(cell, layers)
    if capture is None:
        return 0
    made = sum(setup.decodes()) - setup.batch  # no row of a text's last token
    count = {"generated": made, "last": setup.batch, "mean": setup.batch}.get(cell, setup.batch * setup.prefill + made)
    width = layers if capture.layers == "all" else len(capture.layers)  # type: ignore[arg-type]
    return count * width
