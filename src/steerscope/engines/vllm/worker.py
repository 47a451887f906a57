"""In every worker process: buffers and taps once the weights are loaded, the index before each forward, rows after it.

The runner's own methods are wrapped on the instance. Nothing here may stop the engine: what goes wrong with a request
is written into its counters and kept for the client to read, and the request's rows are void.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steerscope.capture.transport import ALIGN, FAILED, HEADER, LEFT, ROWS, STAGES, Arena
from steerscope.engines.vllm.guards import check_config, layer_count, minor_version
from steerscope.engines.vllm.layers import attach, find_layers, returned
from steerscope.engines.vllm.pool import make_pool
from steerscope.engines.vllm.seeds import mend
from steerscope.engines.vllm.settings import Settings
from steerscope.engines.vllm.step import Asker, Books, Filled, Slice
from steerscope.engines.vllm.tap import Shared, Tap
from steerscope.engines.vllm.wire import Wire
from steerscope.residual.reduce import HeldBack, Reducer
from steerscope.residual.table import Column, Key, Slots, SlotTable
from steerscope.specs.errors import UnsupportedModel

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

log = logging.getLogger("steerscope")


class WorkerTaps:
    """What steerscope keeps in one worker."""

    def __init__(self, worker: Any, settings: Settings) -> None:  # noqa: ANN401 - vLLM's worker, whatever its version
        config, runner = worker.vllm_config, worker.model_runner
        check_config(config)
        self.settings, self.runner, self.device = settings, runner, runner.device
        self.hidden, self.dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        layers = layer_count(config)
        found = find_layers(runner.get_model(), layers)
        asked = settings.keys(layers)
        if bad := [f"{site}: {why}" for site, why in found.refused.items() if site in settings.sites]:
            raise UnsupportedModel(f"{type(runner.get_model()).__name__} cannot be tapped at " + "; ".join(bad))
        self.keys: tuple[Key, ...] = tuple(key for key in asked if key[0] in found.found)
        self.returns = returned(next(iter(found.found.values())).module)
        self.layer_class = type(next(iter(found.found.values())).module).__name__
        self.list_name, self.first_layer = found.name, min(found.found)

        from vllm.distributed import get_pp_group, get_tp_group

        self.stage, self.writes = get_pp_group().rank_in_group, get_tp_group().rank_in_group == 0
        if self.stage >= STAGES:
            raise UnsupportedModel(f"pipelines have at most {STAGES} stages here: lower pipeline_parallel_size")
        tokens = max(config.scheduler_config.max_num_batched_tokens, *(_graph_sizes(config) or [1]))
        self.books = Books(tokens, settings.max_columns)
        self.table = SlotTable(self.hidden, settings.slots, self.device)
        self.groups = Slots(settings.groups, "capture group")
        cells = tokens * len(self.keys) if settings.capture else 0
        self.pool = make_pool(self.device, cells, self.hidden, self.dtype, self.books.index, settings)
        self.shared = Shared(
            pool=self.pool.cells,
            index=self.pool.index,
            gates=torch.ones(1 + config.scheduler_config.max_num_seqs, device=self.device),
            before=torch.zeros(settings.groups, dtype=torch.bool, device=self.device),
            faults=self.pool.faults,
        )
        self.taps = {key: self._tap(key) for key in self.keys}
        _count_memory(runner, self.device, self.pool.cells)
        attach(found, self.taps)
        self.vectors: dict[bytes, dict[Key, np.ndarray]] = {}
        self.reducing: dict[str, tuple[int, HeldBack]] = {}  # after how many taps of earlier stages
        self.failures: dict[str, str] = {}
        self.arena: Arena | None = None
        self.counts = {"steps": 0, "asked_steps": 0, "rows": 0, "row_bytes": 0, "recomputed": 0}
        self._filled = Filled()
        self._wrap(runner)

    def _tap(self, key: Key) -> Tap:
        vectors, coefficients = self.table.tensors(key)
        settings = self.settings
        return Tap(self.shared, vectors, coefficients, settings.steer, settings.capture, settings.noop)

    def _wrap(self, runner: Any) -> None:  # noqa: ANN401
        """V2 runners build an input batch for real steps only; V1 runners call `_model_forward` for those only."""
        _around(runner, "execute_model", self._around_step)
        if hasattr(runner, "_model_forward"):
            _around(runner, "_model_forward", self._before_forward)
            _around(runner, "_dummy_run", self._before_dummy)
        else:
            _around(runner, "prepare_inputs", self._after_inputs)

    # --- the step

    def _around_step(self, run: Callable, output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if kwargs.get("dummy_run"):
            return self._before_dummy(run, output, *args, **kwargs)
        self.counts["steps"] += 1
        for name in output.finished_req_ids:
            self._forget(name)
        for new in output.scheduled_new_reqs:
            self._admit(new)
        self._filled = Filled()
        result = run(output, *args, **kwargs)
        self._collect(self._filled)
        return result

    def _before_forward(self, run: Callable, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        batch, runner = self.runner.input_batch, self.runner
        self._stage(batch.req_ids, runner.query_start_loc.np, batch.num_computed_tokens_cpu)
        if self.device.type == "cpu" and batch.generators:
            mend(runner)
        return run(*args, **kwargs)

    def _after_inputs(self, run: Callable, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        batch = run(*args, **kwargs)
        self._stage(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np)
        return batch

    def _before_dummy(self, run: Callable, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Warm-up, graph capture and idle data-parallel ranks must find nothing to do."""
        if not self.books.clean:
            self.books.clear()
            self.pool.send_index(0)
        return run(*args, **kwargs)

    def _stage(self, names: list[str], starts: np.ndarray, computed: np.ndarray) -> None:
        if not self.books.askers and self.books.clean:
            return
        try:
            self._filled = self.books.fill(names, starts, computed, self.pool.reserve)
        except Exception as error:  # a fault of ours: those who asked are told, the step goes on without them
            self.books.clear()
            for asker in [self.books.askers[name] for name in names if name in self.books.askers]:
                self._fail(asker, f"{type(error).__name__}: {error}")
        self.pool.send_index(self._filled.tokens)
        self.counts["asked_steps"] += 1
        self.counts["recomputed"] += self._filled.recomputed
        for asker in self._filled.failed:
            self._fail(asker, asker.failed or "")

    def _collect(self, filled: Filled) -> None:
        for part in filled.slices:
            try:
                if part.asker.failed is None:
                    self._take(part)
            except Exception as error:  # one request's rows are void, the step goes on
                self._fail(part.asker, f"{type(error).__name__}: {error}")
        if filled.slices:
            self.pool.end_step()
        if filled.tokens:
            self._note_faults(self.pool.faulty(filled))

    def _note_faults(self, askers: list[Asker]) -> None:
        for asker in askers:
            if asker.failed is None:
                self._fail(asker, "its steering makes the hidden states not finite; lower the strength")

    def _take(self, part: Slice) -> None:
        asker, capture = part.asker, part.asker.wire.capture
        assert capture is not None
        count = part.stop - part.start
        rows = self.pool.rows(part.cell, count, asker.width)
        if capture.reduce:
            self.reducing[asker.wire.name][1].push(range(part.start, part.stop), rows)
            return
        if not self.writes or self.arena is None:
            return
        first = capture.positions.count(part.start)
        total = capture.positions.count(capture.most)
        block = asker.wire.offset + HEADER + total * asker.before * self.hidden * self.dtype.itemsize
        target = self.arena.view(block, (total, asker.width, self.hidden), self.dtype)[first : first + count]
        self.pool.move(rows, target, functools.partial(self._set, asker, ROWS + self.stage, part.reached))
        self.counts["rows"] += count
        self.counts["row_bytes"] += rows.numel() * rows.element_size()

    def _set(self, asker: Asker, counter: int, value: int) -> None:
        """Tell the client; never again after the region was left."""
        if self.arena is not None and not asker.left:
            asker.left = counter == LEFT + self.stage
            self.arena.words[(asker.wire.offset + ALIGN * counter) // 8] = value

    def _leave(self, asker: Asker) -> None:
        """No more rows: when those under way have arrived, its memory belongs to the client alone."""
        self._release(asker)
        if not self.writes:
            asker.left = True
            return
        self.pool.afterwards(functools.partial(self._set, asker, LEFT + self.stage, 1))

    # --- requests

    def _admit(self, new: Any) -> None:  # noqa: ANN401
        params = new.sampling_params
        packed = ((params.extra_args or {}) if params else {}).get("steerscope")
        if packed is None or new.req_id in self.books.askers:  # a request that was preempted comes again
            return
        try:
            wire = Wire.unpack(packed)
        except Exception as error:
            log.error("a request carries a steerscope entry that cannot be read: %s", error)
            return
        asker = Asker(wire, [], 0, 0)
        try:
            for column in wire.columns:
                here = {key: v for key, v in self.vectors[column.vectors].items() if key in self.taps}
                kept = {key: c for key, c in column.coefficients.items() if key in self.taps}
                asker.leases.append(self.table.acquire(Column(column.positions, column.gate, here, kept)))
            if wire.capture:
                self._join_group(asker)
        except Exception as error:
            self._fail(asker, f"{type(error).__name__}: {error}")
        self.books.askers[new.req_id] = asker

    def _join_group(self, asker: Asker) -> None:
        capture = asker.wire.capture
        assert capture is not None
        keys = tuple(key for key in capture.keys if key in self.taps)
        if not keys:
            return
        asker.group, fresh = self.groups.acquire((keys, capture.before_steering))
        asker.width = len(keys)
        asker.before = sum(layer < self.first_layer for layer, _ in capture.keys)
        if fresh:
            self.shared.before[asker.group] = capture.before_steering
            for key, tap in self.taps.items():
                tap.order[asker.group] = keys.index(key) if key in keys else -1
        if capture.reduce:
            reducer = Reducer(capture.reduce, len(keys), self.hidden, self.device)
            self.reducing[asker.wire.name] = asker.before, HeldBack(reducer, capture.hold)

    def _release(self, asker: Asker) -> None:
        while asker.leases:
            self.table.release(asker.leases.pop())
        if asker.group and asker.wire.capture:
            keys = tuple(key for key in asker.wire.capture.keys if key in self.taps)
            self.groups.release((keys, asker.wire.capture.before_steering))
            asker.group = 0

    def _forget(self, name: str) -> None:
        asker = self.books.askers.pop(name, None)
        if asker is not None:
            self._leave(asker)

    def _fail(self, asker: Asker, why: str) -> None:
        asker.failed = why
        self.failures[asker.wire.name] = why
        self._set(asker, FAILED, 1)

    # --- what the client asks (RPC; every rank answers)

    # What a step makes in inference mode may only be changed in inference mode.

    @torch.inference_mode()
    def attach_arena(self, path: str, size: int) -> None:
        self.arena = Arena(Path(path), size, create=False)
        self.pool.pin(self.arena)

    @torch.inference_mode()
    def detach_arena(self) -> None:
        """The client closes: nothing is written there any more."""
        self.settle()
        if self.arena is not None:
            self.pool.unpin(self.arena)
            self.arena = None

    @torch.inference_mode()
    def register(self, name: bytes, keys: list, data: bytes) -> None:
        """Keep vectors for later requests: float32 [keys, hidden]."""
        rows = np.frombuffer(data, dtype="<f4").reshape(len(keys), self.hidden)
        self.vectors[bytes(name)] = {(layer, site): row for (layer, site), row in zip(keys, rows, strict=True)}

    def unregister(self, name: bytes) -> None:
        self.vectors.pop(bytes(name), None)

    @torch.inference_mode()
    def finish(self, requests: list) -> dict[str, str]:
        """The end of requests is known: [name, rows, offset] each. Nothing is written for them any more, rows are
        brought out, reductions completed. Returns what went wrong, by name."""
        names = {name for name, _, _ in requests}
        for key in [key for key, asker in self.books.askers.items() if asker.wire.name in names]:
            self._forget(key)
        self.pool.drain()
        self._note_faults(self.pool.faulty(None))
        wrong = {}
        for name, rows, offset in requests:
            held = self.reducing.pop(name, None)
            if held is not None and rows and name not in self.failures:
                try:
                    before, reduced = held
                    self._write_reduced(reduced, rows, offset, before)
                except Exception as error:
                    self.failures[name] = f"{type(error).__name__}: {error}"
            if name in self.failures:
                wrong[name] = self.failures.pop(name)
            if self.writes and self.arena is not None:  # also those that never came here
                self.arena.words[(offset + ALIGN * (LEFT + self.stage)) // 8] = 1
        return wrong

    def _write_reduced(self, held: HeldBack, rows: int, offset: int, before: int) -> None:
        reducer = held.finish(rows)
        if self.writes and self.arena is not None:
            value = reducer.result()
            block = offset + HEADER + before * self.hidden * value.itemsize
            self.arena.view(block, tuple(value.shape), torch.float32).copy_(value)
            self.arena.words[(offset + ALIGN * (ROWS + self.stage)) // 8] = reducer.n

    @torch.inference_mode()
    def settle(self) -> None:
        """Nothing runs: every request that is still known has ended."""
        for key in list(self.books.askers):
            self._forget(key)
        self.pool.drain()

    def describe(self) -> dict[str, Any]:
        return {
            "layer_class": self.layer_class,
            "list": self.list_name,
            "taps": [[layer, site] for layer, site in self.keys],
            "stage": self.stage,
            "runner": type(self.runner).__module__,
            "returns": self.returns,
            "pool_bytes": self.pool.cells.numel() * self.pool.cells.element_size(),
        }

    def stats(self) -> dict[str, float]:
        return {**self.counts, **self.pool.stats(), "slots_in_use": self.table.in_use, "askers": len(self.books.askers)}


def _around(target: Any, name: str, wrapper: Callable) -> None:  # noqa: ANN401
    inner = getattr(target, name)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return wrapper(inner, *args, **kwargs)

    setattr(target, name, call)


def _count_memory(runner: Any, device: torch.device, pool: torch.Tensor) -> None:  # noqa: ANN401
    """Older versions size their KV cache by what `load_model` took: what came after it must be added."""
    if device.type == "cuda" and minor_version() < (0, 32) and hasattr(runner, "model_memory_usage"):
        runner.model_memory_usage += pool.numel() * pool.element_size()


def _graph_sizes(config: Any) -> list[int]:  # noqa: ANN401
    return list(config.compilation_config.cudagraph_capture_sizes or [])
