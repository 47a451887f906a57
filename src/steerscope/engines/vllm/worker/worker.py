"""In every worker process: buffers and taps once the weights are loaded, the index before each forward's
taps, rows after it.

The runner's own methods are wrapped on the instance. Nothing here may stop the engine: what goes wrong with a request
is written into its counters and kept for the client to read, and the request's rows are void.
"""

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from steerscope.capture.transport import STAGES
from steerscope.core.slot_table import Key, SlotPool, SlotTable
from steerscope.engines.vllm.cuda.graphs import Graphs, around
from steerscope.engines.vllm.cuda.prefill_sums import FEW
from steerscope.engines.vllm.cuda.streams import sent
from steerscope.engines.vllm.guards import check_config, count_memory, graph_sizes, layer_count, plain_norms
from steerscope.engines.vllm.settings import NAME, VLLMSettings, least_room
from steerscope.engines.vllm.wire import OVERFLOW, Wire, waits
from steerscope.engines.vllm.worker.decode_fast_path import Filled
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.layer_proof import prove_layers
from steerscope.engines.vllm.worker.lenses import Group, Watching, groups_of, places_of
from steerscope.engines.vllm.worker.model_layout import attach, find_layers, in_norms, returned
from steerscope.engines.vllm.worker.overflow import Faults
from steerscope.engines.vllm.worker.pool import clear_faults, make_pool
from steerscope.engines.vllm.worker.requests import Asker
from steerscope.engines.vllm.worker.seeds import mend
from steerscope.engines.vllm.worker.step_index import Books
from steerscope.engines.vllm.worker.tap import Doing, Shared, Tap, before_first, over
from steerscope.engines.vllm.worker.worker_check import dry_run, prove, replayed
from steerscope.specs.errors import CapacityExceeded, UnsupportedModel
from steerscope.specs.steering import SITES, Site

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

log = logging.getLogger("steerscope")
NOTHING = Filled()
HERE: "weakref.WeakSet[WorkerTaps]" = weakref.WeakSet()  # those of this process


class WorkerTaps:
    """What steerscope keeps in one worker."""

    def __init__(self, worker: Any, settings: VLLMSettings) -> None:  # vLLM's worker, whatever its version
        config, runner = worker.vllm_config, worker.model_runner
        check_config(config)
        self.settings, self.runner, self.device = settings, runner, runner.device
        self.hidden, self.dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        layers = layer_count(config)
        found = find_layers(runner.get_model(), layers)
        asked = settings.keys(layers)
        sites: list[Site] = [site for site in SITES if site in settings.sites]
        found = prove_layers(found, self.hidden, sites, functools.partial(dry_run, runner))
        self.keys: tuple[Key, ...] = tuple(key for key in asked if key[0] in found.found)
        self.returns = returned(next(iter(found.found.values())).module)
        self.layer_class = type(next(iter(found.found.values())).module).__name__
        self.list_name, self.first_layer = found.name, min(found.found)
        from vllm.distributed import get_pp_group, get_tp_group

        self.stage, self.writes = get_pp_group().rank_in_group, get_tp_group().rank_in_group == 0
        if self.stage >= STAGES:
            raise UnsupportedModel(f"pipelines have at most {STAGES} stages here: lower pipeline_parallel_size")
        tokens = max(config.scheduler_config.max_num_batched_tokens, *(graph_sizes(config) or [1]))
        requests = config.scheduler_config.max_num_seqs
        page, rows = least_room(tokens, requests)
        self.books = Books(tokens, settings.max_columns, page, tokens // 4)
        self.table = SlotTable(self.hidden, settings.slots, self.device)
        table = self.table.reserve(self.keys)
        self.groups = SlotPool(settings.groups, "capture group")
        cells = rows * len(self.keys) if settings.capture else 0
        self.pool = pool = make_pool(
            self.device, cells, 2 * requests + 2, self.hidden, self.dtype, self.books.index, settings.pool_bytes, runner
        )
        self.orders = torch.full((len(self.keys), settings.groups), -1, dtype=torch.int32, device=self.device)
        before = torch.zeros(settings.groups, dtype=torch.bool, device=self.device)
        self._laid = pool.lay_out(*table, self.orders, before, requests) if settings.steer else None
        norms = not settings.noop and plain_norms(config)
        self._staged = pool.make_stage(len(self.keys), requests) if norms and in_norms(found, self.keys) else None
        self.span = 0 if self._staged is None else 4 // self.dtype.itemsize  # cells of a sum, if taps make any
        self.delivery = Delivery(self.pool, self.hidden, self.dtype, self.stage, self.writes)
        self.faults = Faults(requests, self.pool, self.books, self.delivery)
        # As many as can be known at once: those that were preempted are, too.
        self.watching = Watching(self.device, 2 * requests + 1, self.pool.cells, tokens, self.delivery)
        gates = self.watching.monitor.rules.gates
        self.shared = Shared(pool.cells, pool.index, gates, before, pool.faults, self._staged, self.orders)
        self.taps = {key: self._tap(key) for key in self.keys}
        count_memory(runner, self.device, self.pool.cells, *table, self._laid, self._staged)
        attach(found, self.taps, norms)
        self.vectors: dict[bytes, dict[Key, np.ndarray]] = {}
        self.counts = {"steps": 0, "asked_steps": 0, "recomputed": 0, "summed": 0, "stall_s": 0.0}
        self.graphs, self.lock = Graphs(runner), threading.RLock()  # a client here may ask from another thread
        self._share = functools.lru_cache(maxsize=256)(self._share_of)  # requests ask alike
        self._filled, self._output, self._later = NOTHING, cast("SchedulerOutput", None), list[Any]()  # of the step
        self._replayed = tokens  # steps of no more than so many may be CUDA graphs, in which nobody can do anything
        self._wrap(runner)
        around(worker, "compile_or_warm_up_model", self._after_warm_up)
        HERE.add(self)

    def _tap(self, key: Key) -> Tap:
        number, asked = self.keys.index(key), self.settings
        last = self.device.type == "cuda" and number == len(self.keys) - 1
        laid, staged = (None if part is None else part[number] for part in (self._laid, self._staged))
        how = asked.steer, asked.capture, asked.noop, last, laid, self.orders[number], staged
        return Tap(self.shared, *self.table.tensors(key), *how)

    def _wrap(self, runner: Any) -> None:
        """V2 runners build an input batch for real steps only; V1 runners call `_model_forward` for those only."""
        self._dummy_run = runner._dummy_run
        around(runner, "execute_model", self._around_step)
        if hasattr(runner, "_model_forward"):
            around(runner, "_model_forward", self._before_forward)
            around(runner, "_dummy_run", self._before_dummy)
        else:
            around(runner, "prepare_inputs", self._after_inputs)
            around(runner, "capture_model", self.graphs.capture)
            around(runner, "profile_cudagraph_memory", self.graphs.profile)

    # --- the step

    def _around_step(self, run: Callable, output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return self._before_dummy(run, output, *args, **kwargs)
        with self.lock:
            self.counts["steps"] += 1
            for name in output.finished_req_ids:
                self._forget(name)
            self._filled, self._output, self._later = NOTHING, output, []
            try:
                result = run(output, *args, **kwargs)
                if over(self.pool.index):
                    raise RuntimeError("no tap ran in a step, though one did before: its rows would be wrong")
            except Exception:  # an engine in this process goes on: its next step needs the cells, and another forward
                over(self.pool.index)
                self.delivery.drop(*self._filled.slices)
                self.runner.execute_model_state = None
                raise
            if self._filled.looks is not None:
                self.watching.read(self._filled.looks)
            if self._filled.slices:
                self.delivery.bring_out(self._filled.slices)
            if self._filled.steers or self.faults.looking:
                self.faults.look(self._filled.steers)
            if self._later:
                self._admit_all(self._later)  # while the device works
            if not output.total_num_scheduled_tokens:  # nobody runs any more: no later step will bring the rows out
                self.pool.drain()
            return result

    def _before_forward(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        batch, runner = self.runner.input_batch, self.runner
        self._stage(batch.req_ids, runner.query_start_loc.np, batch.num_computed_tokens_cpu)
        if self.device.type == "cpu" and batch.generators:
            mend(runner)
        return run(*args, **kwargs)

    def _after_inputs(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        batch = run(*args, **kwargs)
        self._stage(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np)
        return batch

    def _before_dummy(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """Warm-up, graph capture and idle data-parallel ranks must find nothing to do."""
        if not self.books.clean and not self.books.proving:
            self.books.clear()
            self.pool.send_index(0)
        return run(*args, **kwargs)

    def _after_warm_up(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        prove(self, self._dummy_run)
        self._replayed = replayed(self, self._dummy_run, self._replayed)
        return result

    def _stage(self, names: list[str], starts: np.ndarray, computed: np.ndarray) -> None:
        """While the device reads its inputs, or begins with the first layer."""
        output, books = self._output, self.books

        def ask(span: int = 0) -> Doing:
            """What the taps are to do in this step."""
            if fresh := output.scheduled_new_reqs:
                self._later = self._admit_all(fresh, output.num_scheduled_tokens)
            if books.resting or (not books.askers and books.clean):
                self.graphs.use()
                return Doing(False, False)
            now = self._fill(names, starts, computed, span)
            runs = None if now.runs is None else sent(now.runs, self.device)
            return Doing(now.steers, now.keeps, runs, now.tokens, now.columns)

        if output.total_num_scheduled_tokens > self._replayed:
            span = self.span if output.total_num_scheduled_tokens > FEW else 0
            before_first(self.pool.index, functools.partial(ask, span))
        else:
            ask()
        # Beside the forward: its inputs, which come over the same bus, are there.
        self.pool.pump(output.total_num_scheduled_tokens)

    def _fill(self, names: list[str], starts: np.ndarray, computed: np.ndarray, span: int) -> Filled:
        how = self.reserve, self.delivery.bring_out, span
        try:
            self._filled = self.books.fill(names, starts, computed, *how)
        except Exception as error:  # a fault of ours: those who asked are told, the step goes on without their rows
            for asker in [self.books.askers[name] for name in names if name in self.books.askers]:
                self.delivery.fail(asker, f"{type(error).__name__}: {error}")
            # Steered they must be, or the step must not run: their keys are cached as steered ones.
            self._filled = self.books.fill(names, starts, computed, *how)
        self.graphs.use(self._filled.steers, self._filled.busy)
        if self._filled.advance:
            self.pool.advance(self._filled.tokens)
        elif not self._filled.same:
            self.pool.send_index(self._filled.tokens if self._filled.busy else 0, lay=self._filled.busy)
        self.counts["asked_steps"] += 1
        self.counts["recomputed"] += self._filled.recomputed
        self.counts["summed"] += self._filled.summed
        for asker in self._filled.failed:
            self.delivery.fail(asker, asker.failed or "")
        self.delivery.reductions.join()
        return self._filled

    def reserve(self, cells: int) -> int:
        """Cells in a row. If rows of earlier steps make no room, the last one's leave too; nothing runs meanwhile."""
        first = self.pool.take(cells)
        if first is None:
            began = time.perf_counter()
            if (first := self.pool.take_late(cells)) is None:
                for asker in self.books.askers.values():
                    self.delivery.bring_out(self.books.close(asker))
                self.pool.drain()
                first = self.pool.take(cells)
            self.counts["stall_s"] += time.perf_counter() - began
        if first is None:
            raise CapacityExceeded("the rows of one step do not fit the pool")
        return first

    # --- requests

    def _admit_all(self, requests: list, tokens: dict[str, int] | None = None) -> list:
        """Meet new requests, but for those that want nothing of a step with so many tokens of each: these."""
        later, fresh = [], []
        for new in requests:
            extra = new.sampling_params.extra_args if new.sampling_params else None
            if tokens is not None and waits(extra, new.num_computed_tokens + tokens[new.req_id]):
                later.append(new)
            elif extra is not None and (number := self._admit(new, extra.get(NAME))):
                fresh.append(number)
        clear_faults(self.pool.faults, fresh)
        return later

    def _admit(self, new: Any, packed: bytes | None) -> int:
        """Which fault flag is its own, if it steers."""
        if packed is None or new.req_id in self.books.askers:  # a request that was preempted comes again
            return 0
        try:
            wire = Wire.unpack(packed)
        except Exception as error:
            log.error("a request carries a steerscope entry that cannot be read: %s", error)
            return 0
        asker = Asker(wire, [], 0, 0, cached=new.num_computed_tokens > 0)
        try:
            self.delivery.meet(asker)
            for column in wire.columns:
                known = self.table.lease(column.vectors, column.strengths)
                asker.leases.append(known or self.table.acquire(column.placed(self.vectors, self.taps, self.hidden)))
            if wire.columns:
                self.faults.give(asker)
            if asker.wire.capture or asker.wire.watch:
                self._join_groups(asker)
        except Exception as error:
            self.delivery.fail(asker, f"{type(error).__name__}: {error}")
        if self.faults.inherited(asker):
            self.delivery.fail(asker, OVERFLOW)
        asker.wire = asker.wire.without_content()
        self.books.admit(new.req_id, asker)
        return asker.number

    def _join_groups(self, asker: Asker) -> None:
        """Numbers for its tokens that are captured, watched, or both, as far as these taps are here."""
        capture, watch = asker.wire.capture, asker.wire.watch
        keys, before = self._share(capture.keys) if capture else ((), 0)
        watched = watch.key if watch and watch.key in self.taps else None
        numbers: dict[Group, int] = {}
        for group in groups_of(keys or None, bool(capture and capture.before_steering), watched):
            numbers[group], fresh = self.groups.acquire(group)
            asker.groups.append(group)
            if fresh:
                self.set_group(numbers[group], group)
        found = list(numbers.values())
        if capture and keys:
            asker.group, asker.width, asker.before = found[0], len(keys), before
            self.delivery.expect(asker)
        if watch and watched:
            self.watching.admit(asker, watch, found[1 if keys else 0], found[-1])

    def _share_of(self, keys: tuple[Key, ...]) -> tuple[tuple[Key, ...], int]:
        """Those of these taps that are here, and how many are on earlier stages."""
        return tuple(key for key in keys if key in self.taps), sum(layer < self.first_layer for layer, _ in keys)

    def set_group(self, number: int, group: Group) -> None:
        """From now on, tokens of this group are captured and watched at its taps."""
        self.shared.before[number] = group[1]
        places = torch.tensor(places_of(group, self.keys), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.orders[:, number].copy_(places, non_blocking=True)

    def _release(self, asker: Asker) -> None:
        while asker.leases:
            self.table.release(asker.leases.pop())
        while asker.groups:
            self.groups.release(asker.groups.pop())
        asker.group = 0
        self.watching.release(asker)
        self.faults.release(asker)

    def _forget(self, name: str) -> None:
        asker, rows = self.books.forget(name)
        if asker is not None:
            self.delivery.bring_out(rows)
            self._release(asker)
            self.delivery.leave(asker)

    # --- what the client asks (RPC; every rank answers): tensors of a step may only be changed in inference mode

    @torch.inference_mode()
    def attach_arena(self, path: str, size: int) -> None:
        self.delivery.attach(path, size)

    @torch.inference_mode()
    def detach_arena(self) -> None:
        """The client closes: nothing is written there any more."""
        self.settle()
        self.watching.packs.close()
        self.delivery.detach()

    @torch.inference_mode()
    def register(self, name: bytes, keys: list, data: bytes) -> None:
        """Keep vectors for later requests: float32 [keys, hidden]."""
        rows = np.frombuffer(data, dtype="<f4").reshape(len(keys), self.hidden)
        self.vectors[bytes(name)] = {(layer, site): row for (layer, site), row in zip(keys, rows, strict=True)}

    def unregister(self, name: bytes) -> None:
        self.vectors.pop(bytes(name), None)

    @torch.inference_mode()
    def finish(self, requests: list) -> None:
        """The end of requests is known: [name, rows, offset, whether it steers] each. Nothing is written for them any
        more, rows are brought out, reductions completed."""
        self.delivery.hold(names := {name for name, *_ in requests})
        if any(steers for *_, steers in requests):
            self.faults.look_now()
        known = self.books.called(names)
        for key, asker in known:
            if not asker.complete or asker.page is not None or asker.watched is not None:
                self._forget(key)
        self.delivery.complete(requests, [asker for _, asker in known])

    @torch.inference_mode()
    def forget(self, names: list[str]) -> None:
        """These have ended, which the next step would say too."""
        for key, _ in self.books.called(names):
            self._forget(key)
        self.pool.drain(set(names))

    @torch.inference_mode()
    def settle(self) -> None:
        """Nothing runs: every request that is still known has ended."""
        for key in list(self.books.askers):
            self._forget(key)
        self.pool.drain()

    @torch.inference_mode()
    def settle_idle(self, arena: str) -> None:
        """For a client in the same process, which would otherwise wait for a step that never comes; if it is ours."""
        if arena not in self.delivery.arenas:
            return
        with self.lock:
            for asker in self.books.askers.values():
                self.delivery.bring_out(self.books.close(asker))
            self.pool.drain()

    def describe(self) -> dict[str, Any]:
        found = {"layer_class": self.layer_class, "list": self.list_name, "stage": self.stage, "returns": self.returns}
        found |= {"taps": [list(key) for key in self.keys], "runner": type(self.runner).__module__}
        return found | {"pool_bytes": self.pool.cells.nbytes, "sums": self.span > 0}

    def stats(self) -> dict[str, float]:
        now = {"slots_in_use": self.table.in_use, "askers": len(self.books.askers), "packs": len(self.watching.monitor)}
        return {**self.counts, **self.watching.counts, **self.delivery.counts, **self.pool.stats(), **now}
