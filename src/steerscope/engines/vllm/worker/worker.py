"""steerscope in a worker process: makes the taps once the weights are loaded, plans each step before its forward, and
flushes captured rows after it.

Methods of vLLM's model runner are wrapped on the instance. Nothing here may stop the engine: the failure of a request
is written to its counters for the client to read, and its rows are void.
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
from steerscope.engines.vllm.guards import check_config, count_memory, graph_sizes, layer_count, plain_norms
from steerscope.engines.vllm.settings import VLLMSettings, smallest_pool
from steerscope.engines.vllm.worker.admission import RequestAdmission
from steerscope.engines.vllm.worker.decode_fast_path import StepPlan
from steerscope.engines.vllm.worker.delivery import Delivery
from steerscope.engines.vllm.worker.device import Reductions, RowPool, pool_cells
from steerscope.engines.vllm.worker.graph_sets import GraphSets
from steerscope.engines.vllm.worker.layer_proof import prove_layers
from steerscope.engines.vllm.worker.lenses import WorkerLenses
from steerscope.engines.vllm.worker.model_layout import Layers, find_layers, returned
from steerscope.engines.vllm.worker.overflow import OverflowWatch
from steerscope.engines.vllm.worker.seeds import repair_generators
from steerscope.engines.vllm.worker.step_index import StepIndex
from steerscope.engines.vllm.worker.tap import TapMode, launch_mode, set_launch_mode
from steerscope.engines.vllm.worker.tap_set import TapSet
from steerscope.engines.vllm.worker.worker_check import check_taps, compile_kernels, dry_run
from steerscope.engines.vllm.wrap import wrap
from steerscope.specs.errors import CapacityExceeded, UnsupportedModel
from steerscope.specs.steering import SITES, Site

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

log = logging.getLogger("steerscope")
IDLE = StepPlan()
LOCAL_WORKERS: "weakref.WeakSet[WorkerTaps]" = weakref.WeakSet()  # of this process


class WorkerTaps:
    """The taps of one worker, and what runs them in every step."""

    def __init__(self, worker: Any, settings: VLLMSettings) -> None:
        """Tap the model of vLLM's worker, whose weights are loaded."""
        config = worker.vllm_config
        runner = worker.model_runner
        check_config(config)
        self.settings = settings
        self.runner = runner
        self.device = runner.device
        self.hidden = config.model_config.get_hidden_size()
        self.dtype = config.model_config.dtype
        self.stage, self.writes = _place_of_rank()
        layers = self._proven_layers(layer_count(config))
        keys = tuple(key for key in settings.keys(layer_count(config)) if key[0] in layers.found)
        first = next(iter(layers.found.values())).module
        self._layer_facts = {"layer_class": type(first).__name__, "list": layers.name, "returns": returned(first)}

        tokens = max(config.scheduler_config.max_num_batched_tokens, *(graph_sizes(config) or [1]))
        max_requests = config.scheduler_config.max_num_seqs
        page_rows, n_rows = smallest_pool(tokens, max_requests)
        self.step_index = StepIndex(tokens, settings.max_columns, page_rows, shared_rows=tokens // 4)
        self.pool, reductions = self._make_device(n_rows * len(keys) if settings.capture else 0, 2 * max_requests + 2)
        self.delivery = Delivery(self.pool, reductions, self.stage, self.writes)
        self.overflow = OverflowWatch(max_requests, self.pool, self.step_index, self.delivery)
        # Watched requests that run, and as many that were preempted.
        self.lenses = WorkerLenses(self.device, 2 * max_requests + 1, self.pool.cells, tokens, self.delivery)
        gates = self.lenses.monitor.rules.gates
        norms = not settings.noop and plain_norms(config)
        self.taps = TapSet(layers, keys, settings, self.pool, gates, max_requests, norms)
        count_memory(runner, self.device, *self.taps.memory)
        self.admission = RequestAdmission(self.taps, self.step_index, self.delivery, self.overflow, self.lenses)

        self.counts = {"steps": 0, "asked_steps": 0, "recomputed": 0, "stall_s": 0.0}
        self.graphs = GraphSets(runner)
        self.lock = threading.RLock()  # a client in this process calls from another thread
        # of the step
        self._plan = IDLE
        self._output = cast("SchedulerOutput", None)
        self._wrap(worker, runner)
        LOCAL_WORKERS.add(self)

    def _make_device(self, least_cells: int, max_flags: int) -> tuple[RowPool, Reductions]:
        device = self.device
        index = self.step_index.index
        row_bytes = self.hidden * self.dtype.itemsize
        on_gpu = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else 0
        cells = pool_cells(least_cells, row_bytes, len(index), self.settings.pool_bytes, memory)
        arguments = device, cells, max_flags, self.hidden, self.dtype, index
        if not on_gpu:
            pool = RowPool(*arguments)
            return pool, Reductions(pool.cells)
        from steerscope.engines.vllm.cuda.pool import CudaPool  # needs Triton
        from steerscope.engines.vllm.cuda.reductions import CudaReductions

        pool = CudaPool(*arguments)
        return pool, CudaReductions(pool.cells)

    def _proven_layers(self, count: int) -> Layers:
        if self.stage >= STAGES:
            raise UnsupportedModel(f"pipelines have at most {STAGES} stages here: lower pipeline_parallel_size")
        sites: list[Site] = [site for site in SITES if site in self.settings.sites]
        layers = find_layers(self.runner.get_model(), count)
        return prove_layers(layers, self.hidden, sites, functools.partial(dry_run, self.runner))

    def _wrap(self, worker: Any, runner: Any) -> None:
        """Wrap the methods that run a step. V2 runners build an input batch for real steps only; V1 runners call
        `_model_forward` for real steps only."""
        self._dummy_run = runner._dummy_run
        wrap(runner, "execute_model", self._around_step)
        if hasattr(runner, "_model_forward"):
            wrap(runner, "_model_forward", self._before_forward)
            wrap(runner, "_dummy_run", self._before_dummy)
        else:
            wrap(runner, "prepare_inputs", self._after_inputs)
            wrap(runner, "capture_model", self.graphs.capture)
            wrap(runner, "profile_cudagraph_memory", self.graphs.profile)
        wrap(worker, "compile_or_warm_up_model", self._after_warm_up)

    # --- the step

    def _around_step(self, run: Callable, output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return self._before_dummy(run, output, *args, **kwargs)
        with self.lock:
            self.counts["steps"] += 1
            for name in output.finished_req_ids:
                self._forget(name)
            self._plan = IDLE
            self._output = output
            try:
                with launch_mode(TapMode()):
                    result = run(output, *args, **kwargs)
            except Exception:  # an engine in this process goes on: its next step needs the cells and a new forward
                self.delivery.drop(*self._plan.slices)
                self.runner.execute_model_state = None
                raise
            self._after_forward(output)
            return result

    def _after_forward(self, output: "SchedulerOutput") -> None:
        """Read, flush and check the rows of a step, while the device computes it."""
        if self._plan.watched_rows is not None:
            self.lenses.read(self._plan.watched_rows)
        if self._plan.slices:
            self.delivery.flush(self._plan.slices)
        if self._plan.steers or self.overflow.steps_left:
            self.overflow.check(self._plan.steers)
        if not output.total_num_scheduled_tokens:  # no request runs, so no later step copies the rows
            self.pool.wait_for_copies()

    def _before_forward(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        batch = self.runner.input_batch
        runner = self.runner
        self._prepare_step(batch.req_ids, runner.query_start_loc.np, batch.num_computed_tokens_cpu)
        if self.device.type == "cpu" and batch.generators:
            repair_generators(runner)
        return run(*args, **kwargs)

    def _after_inputs(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        batch = run(*args, **kwargs)
        self._prepare_step(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np)
        return batch

    def _before_dummy(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        """Clear the index before a dummy batch (warm-up, graph capture, idle data-parallel ranks)."""
        if not self.step_index.clean and not self.step_index.proving:
            self.step_index.clear()
            self.pool.upload_index(0)
        return run(*args, **kwargs)

    def _after_warm_up(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        check_taps(self, self._dummy_run)
        if self.device.type == "cuda":
            compile_kernels(self, self._dummy_run)
        return result

    def _prepare_step(self, names: list[str], starts: np.ndarray, computed: np.ndarray) -> None:
        """Admit new requests, plan the step and upload the index."""
        self.admission.admit_all(self._output.scheduled_new_reqs)
        if self.step_index.resting or (not self.step_index.requests and self.step_index.clean):
            self.graphs.use(busy=False)
            set_launch_mode(TapMode(False, False))
        else:
            plan = self._plan_step(names, starts, computed)
            self.graphs.use(plan.busy)
            set_launch_mode(TapMode(plan.steers, plan.keeps))
        self.pool.copy_some(self._output.total_num_scheduled_tokens)

    def _plan_step(self, names: list[str], starts: np.ndarray, computed: np.ndarray) -> StepPlan:
        arguments = names, starts, computed, self.reserve, self.delivery.flush
        try:
            self._plan = self.step_index.plan(*arguments)
        except Exception as error:  # our fault: these requests fail, and the step runs without their rows
            for request in [self.step_index.requests[name] for name in names if name in self.step_index.requests]:
                self.delivery.fail(request, f"{type(error).__name__}: {error}")
            # They must still be steered, or the step must not run: their keys are cached as steered ones.
            self._plan = self.step_index.plan(*arguments)
        plan = self._plan
        if plan.advance:
            self.pool.advance(plan.tokens)
        elif not plan.same:
            self.pool.upload_index(plan.tokens if plan.busy else 0, precompute=plan.busy)
        self.counts["asked_steps"] += 1
        self.counts["recomputed"] += plan.recomputed
        for request in plan.failed:
            self.delivery.fail(request, request.failed or "")
        self.delivery.reductions.join()
        return plan

    def reserve(self, cells: int) -> int:
        """Return the first of `cells` adjacent cells. Without room, wait for copies of earlier steps, then close every
        page; no forward runs meanwhile."""
        first = self.pool.take(cells)
        if first is None:
            began = time.perf_counter()
            first = self.pool.take_late(cells)
            if first is None:
                self._flush_pages()
                first = self.pool.take(cells)
            self.counts["stall_s"] += time.perf_counter() - began
        if first is None:
            raise CapacityExceeded("the rows of one step do not fit the pool")
        return first

    def _flush_pages(self) -> None:
        """Copy the rows of all open pages to the clients."""
        for request in self.step_index.requests.values():
            self.delivery.flush(self.step_index.close_page(request))
        self.pool.wait_for_copies()

    def _forget(self, name: str) -> None:
        request, rows = self.step_index.forget(name)
        if request is not None:
            self.delivery.flush(rows)
            self.admission.release(request)
            self.delivery.leave(request)

    # --- RPCs of the client, answered by every rank

    def rpc(self) -> dict[str, Callable[..., Any]]:
        """Return what clients call, by name, in inference mode: tensors of a step may only be changed there."""
        own = self.detach_arena, self.finish, self.forget, self.settle, self.describe, self.stats
        packs = self.lenses.packs
        of_packs = packs.load_pack, packs.load_state, packs.drop_load, packs.keep_pack, packs.drop_pack
        others = self.delivery.attach_arena, self.admission.register, self.admission.unregister
        return {function.__name__: torch.inference_mode()(function) for function in (*own, *others, *of_packs)}

    def detach_arena(self) -> None:
        """Stop writing to the arena of a client that closes."""
        self.settle()
        self.lenses.packs.close()
        self.delivery.detach_arena()

    def finish(self, ended: list) -> None:
        """Complete requests whose end is known, [name, rows, offset, whether it steers] each: copy their rows, write
        their results, leave their regions."""
        names = {name for name, *_ in ended}
        self.delivery.hold_regions(names)
        if any(steers for *_, steers in ended):
            self.overflow.check_now()
        known = self.step_index.by_client_name(names)
        for key, request in known:
            if not request.complete or request.page is not None or request.watched is not None:
                self._forget(key)
        self.delivery.complete(ended, [request for _, request in known])

    def forget(self, names: list[str]) -> None:
        """Stop tracking requests that have ended, before the next step says so."""
        for key, _ in self.step_index.by_client_name(names):
            self._forget(key)
        self.pool.wait_for_copies(set(names))

    def settle(self) -> None:
        """Stop tracking all requests. The engine is idle."""
        for key in list(self.step_index.requests):
            self._forget(key)
        self.pool.wait_for_copies()

    @torch.inference_mode()
    def settle_idle(self, arena: str) -> None:
        """Flush all rows for a client in the same process, which would otherwise wait for a step that never comes; do
        nothing for arenas of other engines."""
        if arena in self.delivery.arenas:
            with self.lock:
                self._flush_pages()

    def describe(self) -> dict[str, Any]:
        taps = [list(key) for key in self.taps.keys]
        where = {"stage": self.stage, "runner": type(self.runner).__module__, "pool_bytes": self.pool.cells.nbytes}
        return self._layer_facts | where | {"taps": taps}

    def stats(self) -> dict[str, float]:
        now = {
            "slots_in_use": self.taps.table.in_use,
            "requests": len(self.step_index.requests),
            "packs": len(self.lenses.monitor),
        }
        return {**self.counts, **self.lenses.counts, **self.delivery.counts, **self.pool.stats(), **now}


def _place_of_rank() -> tuple[int, bool]:
    """Return the pipeline stage, and whether this rank of its tensor-parallel group writes to shared memory."""
    from vllm.distributed import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group == 0
