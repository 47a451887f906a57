"""Whatever generates, driven alike: token prompts in, times and rows out. The clock runs until the last token, and the
last row that was asked for, is in the client's memory; the device is synchronised before it starts and before it stops.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from steerscope.bench.shapes import NoTokenizer, load_model, make_pack, model_config, vllm_model
from steerscope.bench.steps import Steps, clocked
from steerscope.bench.workload import (
    WATCHES,
    NotMeasured,
    Setup,
    capture_of,
    check_batched,
    steering_of,
    steers,
    wanted_rows,
)
from steerscope.capture.handle import CaptureHandle
from steerscope.capture.private import private, private_bytes
from steerscope.capture.rows import Rows
from steerscope.capture.transport import shared_folder
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.lenses.stack import Weights
from steerscope.specs import Capture, Sampling, Watch

_THREADS = min(8, os.cpu_count() or 1)  # that sum rows


@dataclass
class Run:
    """One round."""

    seconds: float
    tokens: list[list[int]]
    steps: int | None = None  # of the engine, where it has such
    fetch: float = 0.0  # seconds to copy the rows into the client's private memory
    rows: int = 0
    bytes: int = 0
    checksum: float | None = None  # sum of absolute values, where it was verified
    extra: dict[str, Any] = field(default_factory=dict)


class Driver(Protocol):
    setup: Setup

    def run(self, prompts: list[list[int]], cell: str, verify: bool = False, fetch: bool = False) -> Run: ...

    def describe(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class BareHF:
    """`model.generate`, nothing else."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model: Any = load_model(setup.model, setup.device, setup.torch_dtype)
        self.model.generation_config.eos_token_id = None

    def run(self, prompts: list[list[int]], cell: str, verify: bool = False, fetch: bool = False) -> Run:
        """All rows as long as the longest: what is longer than it should be is cut off."""
        del cell, verify, fetch
        ids = torch.tensor(prompts, device=self.model.device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": self.setup.decode, "do_sample": False}
        seconds, out = clocked(lambda: self.model.generate(ids, **options)[:, ids.shape[1] :].tolist())
        tokens = [made[:count] for made, count in zip(out, self.setup.decodes(), strict=False)]
        check_batched(self.setup, tokens, None)
        return Run(seconds, tokens)

    def describe(self) -> dict[str, Any]:
        return {"mode": "eager"}

    def close(self) -> None:
        del self.model


def vllm_arguments(setup: Setup, scratch: Path) -> dict[str, Any]:
    """The same for every vLLM, tapped or not."""
    found = vllm_model(setup.model, scratch) | {"dtype": str(setup.torch_dtype).removeprefix("torch.")}
    found |= {"max_model_len": setup.prefill + setup.decode, "max_num_seqs": max(setup.batch, 32)}
    found |= {"max_num_batched_tokens": setup.tokens, "enable_prefix_caching": False, "enforce_eager": setup.eager}
    found |= {"skip_tokenizer_init": True, "disable_log_stats": True}
    config, blocks = model_config(setup.model), -(-(setup.prefill + setup.decode) // 128) + 1
    heads = config.num_key_value_heads * (
        getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    )
    per_token = 2 * config.num_hidden_layers * heads * setup.torch_dtype.itemsize
    # Said, so that nobody has to measure what is free: engines start beside each other.
    found |= {"kv_cache_memory_bytes": max(64 << 20, setup.batch * blocks * 128 * per_token)}
    return found | ({"gpu_memory_utilization": setup.utilisation} if setup.device == "cuda" else {})


def vllm_environment(setup: Setup, plugins: bool) -> None:
    """Before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(setup.core != "inside"))
    if not plugins:
        os.environ["VLLM_PLUGINS"] = ""


class BareVLLM:
    """Stock vLLM without any plugin: its engine in a loop of a thread of its own, as ours is driven, or its `LLM`."""

    def __init__(
        self, setup: Setup, scratch: Path, how: str = "engine", extra: dict[str, Any] | None = None, **more: Any
    ) -> None:
        vllm_environment(setup, plugins=False)
        from vllm import LLM, EngineArgs, SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self.setup, self._count = setup, 0
        arguments = vllm_arguments(setup, scratch) | more
        asked = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "extra_args": extra}
        kind = RequestOutputKind.FINAL_ONLY
        self._params = functools.cache(lambda tokens: SamplingParams(max_tokens=tokens, output_kind=kind, **asked))
        self.llm: Any = LLM(**arguments) if how == "llm" else None
        self.engine: Any = self.llm.llm_engine if self.llm else LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._thread = ThreadPoolExecutor(1)
        self.engine.step = self.steps = Steps(self.engine.step)

    def run(self, prompts: list[list[int]], cell: str, verify: bool = False, fetch: bool = False) -> Run:
        del cell, verify, fetch
        self.steps.clear()
        drive = self._generate if self.llm else self._drive
        seconds, (tokens, last) = clocked(lambda: self._thread.submit(drive, prompts).result(), self.steps)
        check_batched(self.setup, tokens, len(self.steps.done))
        told = self.steps.told(self.setup.prompt_steps())
        return Run(seconds, tokens, len(self.steps.done), extra={"last": last, **told})

    def _generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
        asked = [self._params(tokens) for tokens in self.setup.decodes()]
        done = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done], done

    def _drive(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[Any]]:
        tokens: dict[str, list[int]] = {}
        last: list[Any] = []
        for ids, count in zip(prompts, self.setup.decodes(), strict=True):
            name, self._count = f"b{self._count}", self._count + 1
            tokens[name] = []
            self.engine.add_request(name, {"prompt_token_ids": ids}, self._params(count))
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens[output.request_id] += output.outputs[0].token_ids
                if output.finished:
                    last.append(output)
        return list(tokens.values()), last

    def describe(self) -> dict[str, Any]:
        return describe_vllm(self.engine.vllm_config)

    def close(self) -> None:
        self._thread.shutdown()
        self.engine.engine_core.shutdown()


class HiddenStates(BareVLLM):
    """vLLM's own `extract_hidden_states`: a drafter that keeps rows in a KV cache, and a connector that writes a file
    per request. It hands out what enters a layer, so the last layer's rows are missing; generated tokens' if asked."""

    def __init__(self, setup: Setup, scratch: Path) -> None:
        # In a core of its own: the files of the last requests are written by steps that nobody asks for any more.
        setup = replace(setup, core="process")
        vllm_environment(setup, plugins=False)
        from vllm.config import KVTransferConfig

        layers = model_config(setup.model).num_hidden_layers
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

    def run(self, prompts: list[list[int]], cell: str, verify: bool = False, fetch: bool = False) -> Run:
        """The clock stops when every file is complete: only then has the client its rows."""
        del fetch
        from vllm.distributed.kv_transfer.kv_connector.v1 import (
            example_hidden_states_connector as connector,
        )

        load = getattr(connector, "load_hidden_states", _load_file)
        done = super().run(prompts, cell)
        paths = [one.kv_transfer_params["hidden_states_path"] for one in done.extra["last"]]
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
        return Run(done.seconds + seconds, done.tokens, done.steps, 0.0, rows, size, checksum, times)


def _load_file(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def describe_vllm(config: Any) -> dict[str, Any]:
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


LENSES, WIDTHS = 267, (128, 64)


class Ours:
    """steerscope, on either engine."""

    def __init__(self, setup: Setup, scratch: Path, budget: int) -> None:
        self.setup = setup
        budget = min(setup.most_bytes, budget) + (64 << 20)
        if setup.engine == "hf":
            from steerscope.engines.hf import HFEngine

            model: Any = load_model(setup.model, setup.device, setup.torch_dtype)
            self.engine: SyncEngine = HFEngine(
                model, NoTokenizer(), name=setup.model, max_batch=setup.batch, capture_budget=budget  # type: ignore[arg-type]
            ).sync  # fmt: skip
        else:
            vllm_environment(setup, plugins=True)
            from steerscope.engines.vllm.client.engine import VLLMEngine
            from steerscope.engines.vllm.settings import VLLMSettings

            slots, room = max(64, 2 * setup.batch), setup.pool_bytes or None
            settings = VLLMSettings(max_columns=setup.columns, slots=slots, pool_bytes=room)
            self.engine = VLLMEngine(
                tokenizer=NoTokenizer(), settings=settings, capture_budget=budget, **vllm_arguments(setup, scratch)
            ).sync
        self.facts = self.engine.facts
        self._steer = functools.cache(lambda cell: steering_of(cell, self.facts.layers, self.facts.hidden, setup.batch))
        self._sampling = functools.cache(lambda tokens: Sampling(max_tokens=tokens, ignore_eos=True))
        self._room = torch.empty(0, dtype=torch.uint8)
        self.noop = setup.engine == "vllm" and self.engine.aio.settings.noop  # type: ignore[attr-defined]
        self._steps: Steps | None = None
        if setup.engine == "vllm":
            leaving = self.engine.aio.outputs  # type: ignore[attr-defined]
            leaving.step = self._steps = Steps(leaving.step)

    def run(self, prompts: list[list[int]], cell: str, verify: bool = False, fetch: bool = False) -> Run:
        before = self.engine.stats()
        if self._steps is not None:
            self._steps.clear()
        seconds, done = clocked(self.asking(prompts, cell), self._steps)
        more = {name: value - before.get(name, 0) for name, value in self.engine.stats().items()}
        run = Run(seconds, [one.token_ids for one in done], int(more["steps"]))
        if self._steps is not None:
            run.extra |= self._steps.told(self.setup.prompt_steps()) | {"stall_s": more["worker_stall_s"]}
        check_batched(self.setup, run.tokens, run.steps)
        counts = self.setup.decodes()
        if cell in WATCHES and any(len(one.readings) != n - 1 for one, n in zip(done, counts, strict=True)):
            raise NotMeasured("not measured: readings are missing")
        verify = verify and not self.noop  # taps that do nothing keep no row and steer nothing
        handles = [one.capture for one in done if one.capture is not None]
        if handles:
            self._count(run, handles, wanted_rows(self.setup, cell, self.facts.layers), verify, fetch)
        for handle in handles:
            handle.close()
        if verify and steers(cell):
            self._check_steered(prompts, cell)
        if verify:
            run.extra["stats"] = self.engine.stats()
        return run

    def asking(self, prompts: list[list[int]], cell: str) -> Callable[[], list[Generation]]:
        """The call that is measured."""
        asked: dict[str, Any] = {"steer": self._steering(prompts, cell), "capture": capture_of(cell, self.facts.layers)}
        if cell in WATCHES:
            asked["watch"] = self._watch(WATCHES[cell])
        sampling = [self._sampling(tokens) for tokens in self.setup.decodes()]
        texts = [TokenPrompt(ids) for ids in prompts]
        alike = sampling if self.setup.stagger else sampling[0]
        return lambda: self.engine.generate(texts, alike, **asked)

    def _steering(self, prompts: list[list[int]], cell: str) -> Any:
        steer = self._steer(cell)
        return steer[: len(prompts)] if isinstance(steer, list) else steer

    def _check_steered(self, prompts: list[list[int]], cell: str) -> None:
        """Every request's stream is another one than without its op, at the first layer where that acts. (In some of
        its tokens: one may lie within bounds that nearly every other is beyond.)"""
        where = Capture(layers=self.facts.layers // 2 if ":one" in cell else 0, tokens="positions=[-8:]")
        texts, one = [TokenPrompt(ids) for ids in prompts], self._sampling(1)
        plain = self.engine.generate(texts, one, capture=where)
        steered = self.engine.generate(texts, one, capture=where, steer=self._steering(prompts, cell))
        rows = [[torch.cat([*one.rows.values()]) for one in done] for done in (plain, steered)]
        same = sum(torch.equal(*pair) for pair in zip(*rows, strict=True))
        for done in (*plain, *steered):
            assert done.capture is not None
            done.capture.close()
        if same:
            raise NotMeasured(f"not measured: {cell} changed nothing for {same} of {len(prompts)} requests")

    def _watch(self, weights: Weights) -> Watch:
        if weights not in self.engine.packs:
            pack = make_pack([LENSES], self.facts.hidden, WIDTHS, layer=self.facts.layers // 2)
            self.engine.register_pack(weights, pack, any_model=True, weights=weights)
        return Watch(pack=weights, tokens="generated")

    def _count(self, run: Run, handles: list[CaptureHandle], wanted: int, verify: bool, fetch: bool) -> None:
        """Rows in shared memory; then copies of them in memory that was used before, and once in fresh memory."""
        rows = self.engine.fetch_all(handles)
        run.rows = sum(tensor.numel() // tensor.shape[-1] for one in rows for tensor in one.values())
        run.bytes = sum(tensor.nbytes for one in rows for tensor in one.values())
        if run.rows != wanted:
            raise NotMeasured(f"not measured: {run.rows} rows arrived, {wanted} were asked for")
        copies: list[list[Rows]] = []
        if verify:
            run.checksum = _verified(rows)
        if verify and fetch:
            run.extra["fetch_fresh"], made = clocked(lambda: private(rows))
            copies.append(made)
        if fetch:
            if len(self._room) < private_bytes(rows):
                self._room = torch.ones(private_bytes(rows), dtype=torch.uint8)  # every page is there
            run.fetch, made = clocked(lambda: self.engine.fetch_all(handles, copy=True, room=self._room))
            copies.append(made)
        if verify and any(_verified(made) != run.checksum for made in copies):
            raise NotMeasured("not measured: the private copy of the rows differs from the rows")

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"mode": "eager", "layers": self.facts.layers, "hidden": self.facts.hidden}
        if self.setup.engine == "vllm":
            found |= describe_vllm(self.engine.aio._llm.vllm_config)  # type: ignore[attr-defined]
            found["noop"] = self.noop
        return found

    def close(self) -> None:
        self.engine.close()


def _verified(rows: Sequence[Rows]) -> float:
    """The sum of all absolute values; every row must be finite and hold something."""
    tensors = [tensor for one in rows for tensor in one.values()]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = torch.cat(list(threads.map(lambda tensor: tensor.abs().sum(-1, dtype=torch.float32).view(-1), tensors)))
    if not bool((sums > 0).all()):
        raise NotMeasured("not measured: a row is empty")
    if not bool(sums.isfinite().all()):
        raise NotMeasured("not measured: a row is not finite")
    return float(sums.double().sum())


def make_driver(kind: str, setup: Setup, scratch: Path, budget: int = 0) -> Driver:
    """`baseline` (or `llm`: the same through vLLM's LLM), `ours`, or `hidden-states`."""
    if kind == "ours":
        return Ours(setup, scratch, budget)
    if kind == "hidden-states":
        return HiddenStates(setup, scratch)
    return BareHF(setup) if setup.engine == "hf" else BareVLLM(setup, scratch, "llm" if kind == "llm" else "engine")
