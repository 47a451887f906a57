"""What is fixed when a vLLM engine starts: which layers and sites are tapped, and how large the tables are.

The settings travel in vLLM's `additional_config["steerscope"]`, so that every worker process has them and vLLM's
compile cache, which hashes that field, never hands out code that was traced with other taps or by another version.
vLLM's own front ends may be given them in the environment variable STEERSCOPE instead: `1`, or JSON. STEERSCOPE_NOOP=1
makes every tap do nothing, to tell its cost from the cost of what surrounds it; rows are void then, and nothing is
steered.
"""

import os
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from steerscope.core.sites import tap_of
from steerscope.core.slot_table import Key
from steerscope.specs.base import Spec
from steerscope.specs.capture import Sites
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import SITES, Layers, parse_layers
from steerscope.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NAME = "steerscope"
ENVIRONMENT = "STEERSCOPE"
NOOP = "STEERSCOPE_NOOP"
PAGE = 128  # rows of a page, at most
# slots and groups; bytes of all slots together
_LEAST = 64
_TABLE_BYTES = 512 << 20


class VLLMSettings(Spec):
    """Everything the traced code depends on, and the sizes of its buffers."""

    version: str = __version__
    layers: Layers = "all"  # which layers have taps
    sites: Sites = ("resid_post",)
    steer: bool = True  # False: the taps only read
    capture: bool = True  # False: the taps only write
    max_columns: int = Field(default=4, ge=1, le=64)  # ops of one token at one site
    # Vectors in use at once, and different sets of captured layers. 0: one for each request that can run at once, but
    # at least 64, and for vectors within 512 MiB of device memory.
    slots: int = Field(default=0, ge=0, le=65536)
    groups: int = Field(default=0, ge=0, le=65536)
    # Device memory for rows that were not sent yet. None: those of one step and a quarter, which is the least, and on a
    # GPU up to twice as many, within a twentieth of its memory.
    pool_bytes: int | None = Field(default=None, ge=0)
    # For vLLM's own front ends:
    vectors: str | None = None  # a folder; its files are the named vectors
    max_vectors: int = Field(default=1000, ge=0)  # files in that folder above which uploads are refused
    captures: str | None = None  # a folder for rows that are asked for over HTTP
    capture_budget: int = Field(default=1 << 30, ge=1 << 20)  # bytes of rows that may wait to be fetched

    noop: bool = Field(default_factory=lambda: os.environ.get(NOOP, "") == "1")  # for measurements only

    @field_validator("slots", "groups")
    @classmethod
    def _usable(cls, value: int) -> int:
        if value == 1:  # the first one means "nothing"
            raise InvalidRequest([Problem("", "1 leaves none to use", "give at least 2, or 0 for one per request")])
        return value

    def sized(self, config: "VllmConfig") -> "VLLMSettings":
        """Fill in the sizes that follow from vLLM's own."""
        requests = config.scheduler_config.max_num_seqs
        model = config.model_config
        slot_bytes = 4 * model.get_hidden_size() * len(self.keys(model.hf_text_config.num_hidden_layers))
        slots = self.slots or max(_LEAST, min(requests + 1, _TABLE_BYTES // slot_bytes))
        groups = self.groups or max(_LEAST, requests + 1)
        return self.model_copy(update={"slots": slots, "groups": groups})

    def keys(self, layers: int) -> tuple[Key, ...]:
        """Return the taps of a model with `layers` layers."""
        parsed = parse_layers(self.layers)
        wanted = range(layers) if parsed == "all" else parsed
        beyond = [layer for layer in wanted if layer >= layers]
        if beyond:
            what = f"layers {beyond} do not exist"
            raise InvalidRequest([Problem("layers", what, f"the model has layers 0–{layers - 1}")])
        found = {tap_of(layer, site) for layer in wanted for site in SITES if site in self.sites}
        return tuple(sorted(found, key=lambda key: (key[0], SITES.index(key[1]))))

    def additional_config(self) -> dict[str, Any]:
        return {NAME: self.model_dump(mode="json")}


def asked_for(config: "VllmConfig") -> VLLMSettings | None:
    """Return the settings of an engine with taps; None leaves vLLM untouched."""
    extra = config.additional_config
    given = extra.get(NAME) if isinstance(extra, dict) else None
    text = os.environ.get(ENVIRONMENT, "").strip()
    if given is not None:
        return VLLMSettings.parse(given)
    if text in ("", "0"):
        return None
    try:
        return VLLMSettings.from_json(text) if text.startswith("{") else VLLMSettings()
    except InvalidRequest as error:
        raise InvalidRequest([problem.under(ENVIRONMENT) for problem in error.problems]) from None


def smallest_pool(tokens: int, requests: int) -> tuple[int, int]:
    """Return the rows of a page when every request captures, and the rows of the smallest pool that holds a full step
    (beside open pages and rows that wait to be copied), for steps of at most `tokens` tokens of `requests` requests."""
    page = max(1, min(PAGE, tokens // (4 * requests)))
    return page, tokens + page * requests + tokens // 4
