"""Capture: the rows of a request to keep."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from steerscope.specs.base import Spec, one_or_many
from steerscope.specs.steering import Layers, Site
from steerscope.specs.tokens import Tokens

if TYPE_CHECKING:
    Sites = Site | Sequence[Site]
else:
    Sites = Annotated[tuple[Site, ...], BeforeValidator(one_or_many), Field(min_length=1)]


class Capture(Spec):
    """Keep the rows of `layers` × `sites` at the selected tokens; after steering unless `before_steering`.

    `reduce` keeps one float32 row per layer and site instead: the mean over the selected tokens, or the last one.

    ```python
    import steerscope as ss

    with ss.load("smollm2-135m") as model:
        wanted = ss.Capture(layers="8,12", sites=("resid_post", "mlp_out"), tokens="generated")
        rows = model.generate("Once upon a time", ss.Sampling(max_tokens=5), capture=wanted).rows
        print(rows[12, "mlp_out"].shape, rows.labels[0])
    ```
    """

    layers: Layers = "all"
    sites: Sites = ("resid_post",)
    tokens: Tokens = "all"
    reduce: Literal["mean", "last"] | None = None
    before_steering: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.sites)) < len(self.sites):
            raise ValueError("a site is named twice; name each site once")
        return self
