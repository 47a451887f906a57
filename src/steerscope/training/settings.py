"""Settings and the result of a training run."""

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
    site: Site = "resid_post"
    tokens: Tokens = "all"
    rank: int = Field(default=0, ge=0, le=64)
    learning_rate: float = Field(default=1.0, gt=0, le=100)
    schedule: Literal["cosine", "constant"] = "cosine"
    epochs: int = Field(default=6, ge=1)
    batch: int = Field(default=8, ge=1)
    target_tokens: int | None = Field(default=None, ge=1)
    val_tokens: int | None = Field(default=None, ge=1)
    patience: int | None = Field(default=None, ge=1)
    init: str = "zero"
    gradient_checkpointing: bool = False
    seed: int = Field(default=0, ge=0, lt=2**31)

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
