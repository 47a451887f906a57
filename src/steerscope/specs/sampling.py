"""Sampling: how tokens are chosen and when a text ends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem


def _one_text(value: object) -> object:
    return (value,) if isinstance(value, str) else value


if TYPE_CHECKING:
    Stop = str | Sequence[str]
else:
    Stop = Annotated[tuple[str, ...], BeforeValidator(_one_text), Field(max_length=4)]


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

    max_tokens: int = Field(default=128, ge=1, description="Maximum number of generated tokens.")
    temperature: float = Field(default=0.0, ge=0.0, le=2.0, description="0 is greedy.")
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Keep the most likely tokens that together have this probability."
    )
    top_k: int = Field(default=0, ge=0, description="Keep this many of the most likely tokens; 0 keeps all.")
    min_p: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Keep tokens with this probability relative to the most likely one."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0.0, le=10.0, description="Above 1, tokens that occurred before become less likely."
    )
    repetition_window: int | None = Field(
        default=None, ge=1, description="Number of last tokens that the repetition penalty looks at; default: all."
    )
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="The same seed gives the same text.")
    stop: Stop = Field(default=(), description="End before this text; up to 4, repeat the option.")
    ignore_eos: bool = Field(default=False, description="Continue after the end-of-text token.")
    n: int = Field(default=1, ge=1, le=128, description="Number of answers.")
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
