"""Descriptions of packs and lenses as plain data, without torch."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from steerscope.specs.base import Spec
from steerscope.specs.steering import Site

FORMAT = "steerscope-pack"
VERSION = 1
Output = Literal["sigmoid", "relu", "jumprelu", "topk"]
Normalisation = Literal["layernorm", "none"]
EPSILON = 1e-5  # of every LayerNorm here, torch's default


class Architecture(Spec):
    """Linear layers with ReLU between them, from `hidden` over `widths` to one number; no widths: a linear probe.

    `output` turns that number into a probability or an activation of a sparse autoencoder. `topk` keeps the `k` largest
    of all lenses in a row, so such a pack can only be evaluated as a whole.
    """

    widths: tuple[int, ...] = ()
    output: Output = "sigmoid"
    k: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(width < 1 for width in self.widths):
            raise ValueError(f"widths {list(self.widths)} are not all positive; give sizes of hidden layers")
        if (self.k is None) == (self.output == "topk"):
            raise ValueError("k and the output topk belong together; give both or neither")
        return self


class PackInfo(Spec):
    """The `model`, `layer` and `site` that the lenses read, and how a row becomes a score.

    `normalisation` of every row is a LayerNorm without parameters, or none. `training` and `calibration` are notes, as
    plain JSON, on how weights and calibration were made.
    """

    name: str = Field(min_length=1)
    model: str = Field(min_length=1)
    hidden: int = Field(ge=1)
    layer: int = Field(ge=0)
    site: Site = "resid_post"
    version: str = "1"
    normalisation: Normalisation = "layernorm"
    architecture: Architecture = Architecture()
    training: dict[str, JsonValue] = {}
    calibration: dict[str, JsonValue] = {}


class Concept(Spec):
    """The concept that one lens detects. `parents` are ids, the main one first; roots have none.

    `metrics` are held-out measures of this lens by name (auroc, f1, …).
    """

    id: str = Field(min_length=1)
    name: str = ""
    definition: str = ""
    parents: tuple[str, ...] = ()
    level: int = Field(default=0, ge=0)
    metrics: dict[str, float] = {}

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: object) -> object:
        return {**data, "name": data.get("name") or data.get("id", "")} if isinstance(data, dict) else data


class TensorEntry(Spec):
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class Manifest(Spec):
    """The content of `pack.json`; `digest` is a hash of the whole pack. Files of earlier versions have more fields."""

    model_config = ConfigDict(extra="ignore")
    format: Literal["steerscope-pack"] = FORMAT
    format_version: Literal[1] = VERSION
    info: PackInfo
    entries: dict[str, TensorEntry]
    digest: str


class ConceptList(Spec):
    """The content of `concepts.json`."""

    concepts: tuple[Concept, ...]
