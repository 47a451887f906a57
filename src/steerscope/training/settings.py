"""Settings and the result of a training run; no torch, so that the command line reads its options here."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from steerscope.specs.base import Spec
from steerscope.specs.steering import Site, parse_layers
from steerscope.specs.tokens import Tokens

_SHARED = ("tokens", "target_tokens", "val_tokens", "batch", "seed", "gradient_checkpointing")


class TrainSettings(Spec):
    """What is learned, and how.

    `init`: zero, mean-diff (of a contrast set), or a vector file. `target_tokens` and `val_tokens` limit the target
    tokens in training and validation; `patience` ends a run after that many epochs without a better one.
    """

    layers: tuple[int, ...] = Field(min_length=1)
    site: Site = Field(default="resid_post", description="Site at which the vector is added.")
    tokens: Tokens = Field(default="all", description="Tokens that are steered: all, generated, prompt, …")
    rank: int = Field(default=0, ge=0, le=64, description="Number of directions to learn to scale, besides the vector.")
    learning_rate: float = Field(default=1.0, gt=0, le=100, description="Learning rate of Adam.")
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="Learning rate over the steps.")
    epochs: int = Field(default=6, ge=1, description="Maximum number of passes over the texts.")
    batch: int = Field(default=8, ge=1, description="Texts per step.")
    target_tokens: int | None = Field(default=None, ge=1, description="Tokens to train on; default: all.")
    val_tokens: int | None = Field(
        default=None, ge=1, description="Tokens to validate on; default: the set's own, or a tenth of the texts."
    )
    patience: int | None = Field(default=None, ge=1, description="Stop after this many epochs without improvement.")
    init: str = Field(default="zero", description="Start vector: zero, mean-diff (of pairs), or a vector file.")
    gradient_checkpointing: bool = Field(default=False, description="Save memory at the cost of time.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the order of texts and of the held-out part.")

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: object) -> object:
        layers = parse_layers(value)
        if layers == "all":
            raise ValueError("all layers at once are too many; name one, or some as 10-14")
        return layers

    @model_validator(mode="after")
    def _init(self) -> Self:
        if self.init not in ("zero", "mean-diff") and not Path(self.init).exists():
            raise ValueError(f"init {self.init!r} is no file; write zero, mean-diff or the name of a vector file")
        return self

    @property
    def shared(self) -> dict[str, Any]:
        """Settings that all runs on one course must have in common."""
        return {name: getattr(self, name) for name in _SHARED}


class TrainResult(Spec):
    """Perplexities are of the validation texts, per target token; `prompted` is that of the best prompt."""

    steered: float
    unsteered: float
    prompted: float | None
    prompt: str | None
    best_epoch: int
    epochs: int
    steps: int
    train_tokens: int
    val_tokens: int
    norms: dict[int, float]
