"""Sampling: how tokens are chosen and when a text ends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from steerscope.specs.base import Spec, one_or_many
from steerscope.specs.errors import InvalidRequest, Problem

if TYPE_CHECKING:
    Stop = str | Sequence[str]
else:
    Stop = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(max_length=4)]


class Sampling(Spec):
    """How tokens are chosen, and when a text ends.

    `temperature` 0 is greedy. `top_k` 0 is off. `repetition_window` counts the last tokens, prompt included; the
    frequency and presence penalties, which are subtracted, count generated tokens only. `logprobs` returns log
    probabilities of each token and of this number of best ones.

    ```python
    import steerscope as ss

    sampling = ss.Sampling(max_tokens=40, temperature=0.8, top_p=0.95, seed=1, stop=["\\n\\n"])
    ```
    """

    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    repetition_window: int | None = Field(default=None, ge=1)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Stop = ()
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=128)
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; dividing by a lower temperature would overflow float32."""
        return self.temperature < 1e-6

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not text for text in self.stop):
            raise InvalidRequest([Problem("stop", "a text is empty", "remove it")])
        return self
