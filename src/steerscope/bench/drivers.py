"""Drivers of the engines under test: token prompts in, times and rows out.

The clock runs until the last token and the last captured row are in the client's memory; the device is synchronised
before it starts and before it stops.
"""

import functools
import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from steerscope.bench.shapes import NoTokenizer, load_model, vllm_model
from steerscope.bench.workload import NotMeasured, Setup, capture_of, check_batched, steering_of, steers, wanted_rows
from steerscope.capture.handle import CaptureHandle, private_bytes
from steerscope.capture.rows import Rows
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Capture, Sampling

Prompts = list[list[int]]


@dataclass
class TimedRound:
    seconds: float
    tokens: list[list[int]]
    steps: int | None = None  # of the engine, if it counts them
    fetch: float = 0.0  # seconds to copy the rows into the client's private memory
    rows: int = 0
    bytes: int = 0
    checksum: float | None = None  # sum of absolute values, if the rows were verified
    extra: dict[str, Any] = field(default_factory=dict)  # what drivers of other programs add


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    gc.collect()  # what the last round left must not be swept in this one
    synchronise()
    start = time.perf_counter()
    found = work()
    synchronise()
    return time.perf_counter() - start, found


class BareHF:
    """`model.generate`, nothing else."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model: Any = load_model(setup.model, setup.device, setup.torch_dtype)
        self.model.generation_config.eos_token_id = None

    def run(self, prompts: Prompts, cell: str, verify: bool = False, fetch: bool = False) -> TimedRound:
        """Generate texts as long as the longest one, then cut each to its own length."""
        del cell, verify, fetch
        ids = torch.tensor(prompts, device=self.model.device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": self.setup.decode, "do_sample": False}
        seconds, out = clocked(lambda: self.model.generate(ids, **options)[:, ids.shape[1] :].tolist())
        tokens = [made[:count] for made, count in zip(out, self.setup.decodes(), strict=False)]
        check_batched(self.setup, tokens, None)
        return TimedRound(seconds, tokens)

    def describe(self) -> dict[str, Any]:
        return {"mode": "eager"}

    def close(self) -> None:
        del self.model


def vllm_arguments(setup: Setup, scratch: Path) -> dict[str, Any]:
    """Return vLLM's arguments, equal for the stock engine and ours."""
    found = vllm_model(setup.model, scratch) | {
        "dtype": str(setup.torch_dtype).removeprefix("torch."),
        "max_model_len": setup.prefill + setup.decode,
        "max_num_seqs": max(setup.batch, 32),
        "max_num_batched_tokens": setup.tokens,
        "enable_prefix_caching": False,
        "enforce_eager": setup.eager,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": _kv_cache_bytes(setup),
    }
    return found | ({"gpu_memory_utilization": setup.utilisation} if setup.device == "cuda" else {})


def _kv_cache_bytes(setup: Setup) -> int:
    """Return what the batch needs. Without it vLLM measures free memory, which fails when two engines start at once."""
    config = setup.config
    blocks = -(-(setup.prefill + setup.decode) // 128) + 1
    head_dim = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * setup.torch_dtype.itemsize
    return max(64 << 20, setup.batch * blocks * 128 * per_token)


def vllm_environment(setup: Setup, plugins: bool) -> None:
    """Set vLLM's environment variables; call before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(setup.core != "inside"))
    if not plugins:
        os.environ["VLLM_PLUGINS"] = ""


class BareVLLM:
    """Stock vLLM without any plugin: its engine in a loop of a thread of its own, as ours is driven."""

    clock = staticmethod(clocked)

    def __init__(self, setup: Setup, scratch: Path, extra: dict[str, Any] | None = None, **more: Any) -> None:
        vllm_environment(setup, plugins=False)
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.setup = setup
        self._count = 0
        asked = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "extra_args": extra}
        kind = RequestOutputKind.FINAL_ONLY
        self.params = functools.cache(lambda tokens: SamplingParams(max_tokens=tokens, output_kind=kind, **asked))
        self.engine = self.start(vllm_arguments(setup, scratch) | more)
        self._thread = ThreadPoolExecutor(1)

    def start(self, arguments: dict[str, Any]) -> Any:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        return LLMEngine.from_engine_args(EngineArgs(**arguments))

    def run(self, prompts: Prompts, cell: str, verify: bool = False, fetch: bool = False) -> TimedRound:
        del cell, verify, fetch
        seconds, (tokens, steps) = self.clock(lambda: self._thread.submit(self.generate, prompts).result())
        check_batched(self.setup, tokens, steps)
        return TimedRound(seconds, tokens, steps)

    def generate(self, prompts: Prompts) -> tuple[list[list[int]], int | None]:
        """Return the tokens of every request, and the number of steps."""
        tokens: dict[str, list[int]] = {}
        steps = 0
        for ids, count in zip(prompts, self.setup.decodes(), strict=True):
            name = f"b{self._count}"
            self._count += 1
            tokens[name] = []
            self.engine.add_request(name, {"prompt_token_ids": ids}, self.params(count))
        while self.engine.has_unfinished_requests():
            steps += 1
            for output in self.engine.step():
                tokens[output.request_id] += output.outputs[0].token_ids
        return list(tokens.values()), steps

    def describe(self) -> dict[str, Any]:
        return _describe_vllm(self.engine.vllm_config)

    def close(self) -> None:
        self._thread.shutdown()
        self.engine.engine_core.shutdown()


def _describe_vllm(config: Any) -> dict[str, Any]:
    from steerscope.engines.vllm.client.start import mode_of

    scheduler = config.scheduler_config
    return {
        "mode": mode_of(config),
        "async_scheduling": bool(getattr(scheduler, "async_scheduling", False)),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
    }


def _our_engine(setup: Setup, scratch: Path, budget: int) -> SyncEngine:
    if setup.engine == "hf":
        from steerscope.engines.hf import HFEngine

        model: Any = load_model(setup.model, setup.device, setup.torch_dtype)
        tokenizer: Any = NoTokenizer()
        return HFEngine(model, tokenizer, name=setup.model, max_batch=setup.batch, capture_budget=budget).sync
    vllm_environment(setup, plugins=True)
    from steerscope.engines.vllm.client.engine import VLLMEngine
    from steerscope.engines.vllm.settings import VLLMSettings

    slots = max(64, 2 * setup.batch)
    settings = VLLMSettings(max_columns=setup.columns, slots=slots, pool_bytes=setup.pool_bytes or None)
    arguments = vllm_arguments(setup, scratch)
    return VLLMEngine(tokenizer=NoTokenizer(), settings=settings, capture_budget=budget, **arguments).sync


class Ours:
    """steerscope, on either engine."""

    clock = staticmethod(clocked)

    def __init__(self, setup: Setup, scratch: Path, budget: int) -> None:
        self.setup = setup
        self.engine = _our_engine(setup, scratch, min(setup.most_bytes, budget) + (64 << 20))
        self.facts = self.engine.facts
        self._steer = functools.cache(lambda cell: steering_of(cell, self.facts.layers, self.facts.hidden, setup.batch))
        self._sampling = functools.cache(lambda tokens: Sampling(max_tokens=tokens, ignore_eos=True))
        self._room = torch.empty(0, dtype=torch.uint8)
        self.noop = setup.engine == "vllm" and self.engine.aio.settings.noop  # type: ignore[attr-defined]

    def run(self, prompts: Prompts, cell: str, verify: bool = False, fetch: bool = False) -> TimedRound:
        before = self.engine.stats()["steps"]
        seconds, done = self.clock(self.asking(prompts, cell))
        run = TimedRound(seconds, [one.token_ids for one in done], int(self.engine.stats()["steps"] - before))
        check_batched(self.setup, run.tokens, run.steps)
        verify = verify and not self.noop  # taps that do nothing keep no row and steer nothing
        handles = [one.capture for one in done if one.capture is not None]
        if handles:
            self.count(run, handles, wanted_rows(self.setup, cell, self.facts.layers), verify, fetch)
        for handle in handles:
            handle.close()
        if verify and steers(cell):
            self._check_steered(prompts, cell)
        return run

    def asking(self, prompts: Prompts, cell: str) -> Callable[[], list[Generation]]:
        """Return the call that is measured."""
        asked = self.options(cell)
        sampling = [self._sampling(tokens) for tokens in self.setup.decodes()]
        texts = [TokenPrompt(ids) for ids in prompts]
        alike = sampling if self.setup.stagger else sampling[0]
        return lambda: self.engine.generate(texts, alike, **asked)

    def options(self, cell: str) -> dict[str, Any]:
        """Return what a cell asks of the engine."""
        steer = self._steer(cell)
        return {"steer": steer and steer[: self.setup.batch], "capture": capture_of(cell, self.facts.layers)}

    def _check_steered(self, prompts: Prompts, cell: str) -> None:
        """Check that every request's op changed its rows at the first layer where it acts.

        A cap may leave single tokens alone, so one changed token of the last eight is enough."""
        where = Capture(layers=self.facts.layers // 2 if ":one" in cell else 0, tokens="positions=[-8:]")
        texts = [TokenPrompt(ids) for ids in prompts]
        one = self._sampling(1)
        plain = self.engine.generate(texts, one, capture=where)
        steered = self.engine.generate(texts, one, capture=where, steer=self.options(cell)["steer"])
        rows = [[torch.cat([*one.rows.values()]) for one in done] for done in (plain, steered)]
        same = sum(torch.equal(*pair) for pair in zip(*rows, strict=True))
        for done in (*plain, *steered):
            assert done.capture is not None
            done.capture.close()
        if same:
            raise NotMeasured(f"{cell} changed nothing for {same} of {len(prompts)} requests")

    def count(self, run: TimedRound, handles: list[CaptureHandle], wanted: int, verify: bool, fetch: bool) -> None:
        """Count the rows in shared memory, and time a copy of them into memory that was used before."""
        rows = self.engine.fetch_all(handles)
        run.rows = sum(tensor.numel() // tensor.shape[-1] for one in rows for tensor in one.values())
        run.bytes = sum(tensor.nbytes for one in rows for tensor in one.values())
        if run.rows != wanted:
            raise NotMeasured(f"{run.rows} rows arrived, {wanted} were asked for")
        if verify:
            run.checksum = checksum_of(rows)
        if fetch:
            if len(self._room) < private_bytes(rows):
                self._room = torch.ones(private_bytes(rows), dtype=torch.uint8)  # every page is there
            run.fetch, copies = clocked(lambda: self.engine.fetch_all(handles, copy=True, room=self._room))
            check_copies(run, copies)

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"mode": "eager", "layers": self.facts.layers, "hidden": self.facts.hidden}
        if self.setup.engine == "vllm":
            found |= _describe_vllm(self.engine.aio._llm.vllm_config)  # type: ignore[attr-defined]
            found["noop"] = self.noop
        return found

    def close(self) -> None:
        self.engine.close()


def checksum_of(rows: Sequence[Rows]) -> float:
    """Return the sum of all absolute values; every row must be finite and not zero."""
    tensors = [tensor for one in rows for tensor in one.values()]
    sums = torch.cat([tensor.abs().sum(-1, dtype=torch.float32).view(-1) for tensor in tensors])
    if not bool((sums > 0).all()):
        raise NotMeasured("a row is empty")
    if not bool(sums.isfinite().all()):
        raise NotMeasured("a row is not finite")
    return float(sums.double().sum())


def check_copies(run: TimedRound, copies: Sequence[Rows]) -> None:
    """Compare private copies with the rows of a round that was verified."""
    if run.checksum is not None and checksum_of(copies) != run.checksum:
        raise NotMeasured("the private copy of the rows differs from the rows")


Driver = BareHF | BareVLLM | Ours


def make_driver(kind: str, setup: Setup, scratch: Path, budget: int = 0) -> Driver:
    """Return the driver of `ours`, or of the engine without us (`baseline`)."""
    if kind == "ours":
        return Ours(setup, scratch, budget)
    return BareHF(setup) if setup.engine == "hf" else BareVLLM(setup, scratch)
