"""Drivers and cells of the GPU measurements that `steerscope bench` does not have: watched requests, vLLM's `LLM`, and
vLLM's own extraction of hidden states.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.steps import StepTimes
from bench.random_packs import make_pack
from steerscope.bench.drivers import BareVLLM, Ours, Prompts, TimedRound, check_copies, clocked, vllm_environment
from steerscope.bench.workload import NotMeasured, Setup
from steerscope.capture.handle import CaptureHandle, private
from steerscope.capture.rows import Rows
from steerscope.capture.transport import shared_folder
from steerscope.engines.results import Generation
from steerscope.lenses.stack import Weights
from steerscope.specs import Watch
from steerscope.specs.errors import InvalidRequest, Problem

WATCHES: dict[str, Weights] = {"watch": "bf16", "watch:int8": "int8"}  # cell → weights of the lenses
LENSES, WIDTHS = 267, (128, 64)
_LOAD = re.compile(r"(\d+)x(\d+)\+(?:(\d+):)?(\d+)")


def load_of(setup: Setup, text: str) -> Setup:
    """Return the setup with another load: `64x512+128` is 64 requests of 512 + 128 tokens.

    With `+32:128` their texts end one after the other, the shortest with 32 tokens."""
    found = _LOAD.fullmatch(text)
    sizes = [int(one) for one in found.group(1, 2, 4)] if found else [0]
    if found is None or 0 in sizes:
        remedy = "say BATCHxPREFILL+DECODE, or BATCHxPREFILL+SHORTEST:LONGEST"
        raise InvalidRequest([Problem("loads", f"{text!r} is not a load", remedy)])
    batch, prefill, decode = sizes
    shortest = int(found.group(3) or decode)
    sizes = {"batch": batch, "prefill": prefill, "decode": decode, "stagger": decode - shortest}
    return setup.model_copy(update=sizes)


def widest(loads: Sequence[Setup]) -> Setup:
    """Return the setup of engines that can run all of these loads."""
    sizes = {name: max(getattr(one, name) for one in loads) for name in ("batch", "prefill", "decode")}
    return loads[0].model_copy(update=sizes | {"stagger": 0})


class Watching(Ours):
    """steerscope, also with watched requests: 267 lenses read every generated token at the middle layer. The times of
    steps are reported, too."""

    def __init__(self, setup: Setup, scratch: Path, budget: int) -> None:
        super().__init__(setup, scratch, budget)
        outputs = self.engine.aio.outputs  # type: ignore[attr-defined]
        outputs.step = self._steps = StepTimes(outputs.step)
        self.clock = self._steps.clocked
        self._done: list[Generation] = []

    def run(self, prompts: Prompts, cell: str, verify: bool = False, fetch: bool = False) -> TimedRound:
        stalled = self.engine.stats()["worker_stall_s"]
        run = super().run(prompts, cell, verify, fetch)
        counts = self.setup.decodes()
        if cell in WATCHES and any(len(one.readings) != n - 1 for one, n in zip(self._done, counts, strict=True)):
            raise NotMeasured("readings are missing")
        stats = self.engine.stats()
        told = self._steps.told(self.setup.prompt_steps())
        run.extra |= told | {"stall_s": stats["worker_stall_s"] - stalled}
        if verify and not self.noop:
            run.extra["stats"] = stats
        return run

    def asking(self, prompts: Prompts, cell: str) -> Callable[[], list[Generation]]:
        call = super().asking(prompts, cell)

        def kept() -> list[Generation]:
            self._done = call()
            return self._done

        return kept

    def options(self, cell: str) -> dict[str, Any]:
        asked = super().options(cell)
        if cell in WATCHES:
            asked["watch"] = self._watch(WATCHES[cell])
        return asked

    def count(self, run: TimedRound, handles: list[CaptureHandle], wanted: int, verify: bool, fetch: bool) -> None:
        """Also time a copy into fresh memory, before the copy that closes the handles."""
        fresh: list[Rows] = []
        if verify and fetch:
            rows = self.engine.fetch_all(handles)
            run.extra["fetch_fresh"], fresh = clocked(lambda: private(rows))
        super().count(run, handles, wanted, verify, fetch)
        if fresh:
            check_copies(run, fresh)

    def _watch(self, weights: Weights) -> Watch:
        if weights not in self.engine.packs:
            pack = make_pack([LENSES], self.facts.hidden, WIDTHS, layer=self.facts.layers // 2)
            self.engine.register_pack(weights, pack, any_model=True, weights=weights)
        return Watch(pack=weights, tokens="generated")


class StockVLLM(BareVLLM):
    """Stock vLLM, with the times of its steps."""

    def __init__(self, setup: Setup, scratch: Path, extra: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(setup, scratch, extra, **more)
        self._steps = StepTimes(self.engine.step)
        self.engine.step = self._steps
        self.clock = self._steps.clocked

    def run(self, prompts: Prompts, cell: str, verify: bool = False, fetch: bool = False) -> TimedRound:
        run = super().run(prompts, cell, verify, fetch)
        run.extra |= self._steps.told(self.setup.prompt_steps())
        return run


class VLLMBatch(StockVLLM):
    """Stock vLLM through its `LLM` class."""

    def start(self, arguments: dict[str, Any]) -> Any:
        from vllm import LLM

        self.llm: Any = LLM(**arguments)
        return self.llm.llm_engine

    def generate(self, prompts: Prompts) -> tuple[list[list[int]], int]:
        asked = [self.params(tokens) for tokens in self.setup.decodes()]
        done = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done], self._steps.n_done


class HiddenStates(StockVLLM):
    """vLLM's own `extract_hidden_states`.

    A drafter keeps rows in a KV cache, and a connector writes a file per request. Rows are the inputs of layers, so
    the last layer's are missing."""

    def __init__(self, setup: Setup, scratch: Path) -> None:
        # In a core of its own: files of the last requests are written by steps after the last answer.
        setup = setup.model_copy(update={"core": "process"})
        vllm_environment(setup, plugins=False)
        from vllm.config import KVTransferConfig

        layers = setup.config.num_hidden_layers
        drafter = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(range(1, layers))}}
        method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": drafter}
        folder = shared_folder(2 * setup.row_bytes()) / "steerscope-hidden-states"
        where = {"shared_storage_path": str(folder)}
        transfer = KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector", kv_role="kv_producer", kv_connector_extra_config=where
        )
        more = {"speculative_config": method, "kv_transfer_config": transfer, "kv_cache_memory_bytes": None}
        extra = {"kv_transfer_params": {"include_output_tokens": True}}
        super().__init__(setup, scratch, extra=extra, **more)
        self._layers = layers - 1
        self._last: list[Any] = []

    def start(self, arguments: dict[str, Any]) -> Any:
        engine = super().start(arguments)
        step = engine.step

        def kept() -> list[Any]:
            outputs = step()
            self._last += [output for output in outputs if output.finished]
            return outputs

        engine.step = kept
        return engine

    def run(self, prompts: Prompts, cell: str, verify: bool = False, fetch: bool = False) -> TimedRound:
        """The clock stops when every file is complete: only then has the client its rows."""
        del fetch
        from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

        load = getattr(connector, "load_hidden_states", _load_file)
        self._last = []
        done = super().run(prompts, cell)
        paths = [one.kv_transfer_params["hidden_states_path"] for one in self._last]
        seconds, found = clocked(lambda: [load(path)["hidden_states"] for path in paths])
        for path in paths:
            for name in (path, f"{path}.lock"):
                Path(name).unlink(missing_ok=True)
        rows = sum(one.shape[0] * one.shape[1] for one in found)
        made = sum(self.setup.decodes()) - len(prompts)
        wanted = self._layers * (sum(map(len, prompts)) + made)
        if rows != wanted:
            raise NotMeasured(f"{rows} rows are in vLLM's files, {wanted} were asked for")
        size = sum(one.numel() * one.element_size() for one in found)
        checksum = sum(float(one.abs().sum(dtype=torch.float64)) for one in found) if verify else None
        times = {**done.extra, "tokens_s": done.seconds, "files_s": seconds}
        return TimedRound(done.seconds + seconds, done.tokens, done.steps, 0.0, rows, size, checksum, times)


def _load_file(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def make_driver(kind: str, setup: Setup, scratch: Path, budget: int = 0) -> Watching | StockVLLM:
    """Return a driver: `baseline`, `llm` (the same through vLLM's LLM), `ours`, or `hidden-states`."""
    if kind == "ours":
        return Watching(setup, scratch, budget)
    if kind == "hidden-states":
        return HiddenStates(setup, scratch)
    return VLLMBatch(setup, scratch) if kind == "llm" else StockVLLM(setup, scratch)
