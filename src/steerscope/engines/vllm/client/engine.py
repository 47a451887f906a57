"""VLLMEngine: the Engine protocol on stock vLLM, driven from a thread of its own.

The thread owns the vLLM engine: it lets requests in while there are slots and shared memory for them, steps, turns new
tokens into text with the same code as the transformers engine, and ends requests. Vectors are given to the workers, and
acknowledged by all of them, before the first request that uses them.
"""

import contextlib
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steerscope.capture.budget import ByteBudget
from steerscope.capture.transport import Regions
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.engine_thread import ThreadedEngine
from steerscope.engines.packs import Packs
from steerscope.engines.plan import Plan
from steerscope.engines.result_channels import together
from steerscope.engines.results import EngineJob, FinishReason
from steerscope.engines.vllm.client import start
from steerscope.engines.vllm.client.capacity import Capacity, new_arena
from steerscope.engines.vllm.client.core_outputs import CoreOutputs
from steerscope.engines.vllm.client.pack_sync import WorkerStore
from steerscope.engines.vllm.client.requests import VLLMContext, VLLMText
from steerscope.engines.vllm.client.start_check import self_test
from steerscope.engines.vllm.client.submit import Submitter, WorkerVectors
from steerscope.engines.vllm.guards import adapter_refusal, check_version, facts_of
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.engines.vllm.wire import OVERFLOW
from steerscope.specs.errors import Problem, RequestFailed, Unsteerable, UnsupportedModel
from steerscope.specs.sampling import Sampling

_MIN_RESIDENT = 256  # vectors that workers keep, used or not
_MAX_FAILURES = 3  # steps that fail in a row: the engine is beyond help
_Ending = tuple[VLLMText, FinishReason]


class VLLMEngine(ThreadedEngine[VLLMText]):
    def __init__(
        self,
        model: str | Path,
        *,
        name: str | None = None,
        tokenizer: Any = None,  # anything like a transformers tokenizer
        settings: VLLMSettings | None = None,
        capture_budget: int = 1 << 30,
        capture_wait: float = 60.0,
        capture_ttl: float = 600.0,
        **vllm_options: Any,  # vLLM's EngineArgs
    ) -> None:
        super().__init__(ByteBudget(capture_budget, capture_wait))
        check_version()
        if adapter := adapter_refusal(model):
            raise UnsupportedModel("; ".join(adapter))
        self.capture_ttl = capture_ttl
        self.tokenizer = tokenizer or start.tokenizer_of(model)
        name = name or str(model)
        self._llm, self.settings = start.start_vllm(model, name, settings or VLLMSettings(), vllm_options)
        try:
            self._begin(self._llm.vllm_config, name, capture_budget)
        except BaseException:
            self._llm.engine_core.shutdown()
            raise
        self._run()
        start.watch_core(self._llm.engine_core, self._thread)
        try:
            self_test(self.sync, self.settings)
        except BaseException:
            self.sync.close()
            raise

    def _begin(self, config: Any, name: str, capture_budget: int) -> None:
        self.dtype = config.model_config.dtype
        self.device = start.device_of_workers()
        self.mode = start.mode_of(config)
        self.facts = facts_of(config, self.settings, name)
        regions = self._share(capture_budget)
        stage = {(layer, site): one["stage"] for one in self._rpc("describe") for layer, site in one["taps"]}
        self._places = config.scheduler_config.max_num_seqs
        self.capacity = Capacity(self.facts, self.dtype, self.settings, stage, regions)
        self._submitter = Submitter(self._llm)
        self.outputs = CoreOutputs(self._llm)
        self.context = VLLMContext(
            facts=self.facts,
            decoder=Decoder(self.tokenizer),
            eos=start.eos_ids(config, self.tokenizer),
            budget=self.budget,
            capture_ttl=self.capture_ttl,
            capacity=self.capacity,
            outputs=self.outputs,
            core_is_apart=hasattr(self._llm.engine_core, "outputs_queue"),
        )
        self._text_numbers = itertools.count()
        self._lenses = Packs(WorkerStore(self._rpc, self._call), self._call, self._put, self._packs_in_use)
        self._resident = WorkerVectors(self._rpc, self._vectors_in_use, max(_MIN_RESIDENT, self.settings.slots))
        self._running: dict[str, VLLMText] = {}
        self._without_token: list[VLLMText] = []  # deferred texts before their first token
        self._closing: list[_Ending] = []  # texts that have ended, but their last rows are still coming
        self._ended: list[str] = []  # texts that have ended, which the workers may not know
        self._spent: tuple = ()  # what is left of ended texts: freeing it can wait until their callers are woken
        self._failures = 0  # failures in the shared memory when it was last read

    def _share(self, capture_budget: int) -> Regions:
        arena = new_arena(capture_budget)
        try:
            self._rpc("attach_arena", str(arena.path), arena.size)
        except Exception as error:
            if "steerscope_attach_arena" not in str(error):
                raise
            raise UnsupportedModel(
                "vLLM did not load the steerscope plugin in its workers: VLLM_PLUGINS must name steerscope or be unset"
            ) from error
        finally:
            arena.unlink()  # it is mapped everywhere: its memory is freed with the mappings
        return Regions(arena, functools.partial(self._inbox.put, _do_nothing))  # an idle thread tidies them

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker; from the engine's thread, or before that runs."""
        return self._llm.collective_rpc(f"steerscope_{method}", args=args)

    # --- the Engine's side (any thread)

    def _row_bytes(self, plan: Plan) -> int:
        return self.capacity.shared(plan).n_bytes

    def _check_sampling(self, sampling: Sampling) -> list[Problem]:
        if sampling.repetition_window is None or sampling.repetition_penalty == 1.0:
            return []
        remedy = "leave it out, or use engine hf"
        return [Problem("sampling.repetition_window", "vLLM penalises the whole text", remedy)]

    def _vectors_in_use(self) -> set[bytes]:
        return {column.vector_key for one in self._running.values() for column in one.plan.columns}

    def stats(self) -> dict[str, float]:
        """Return counters of this process and of the workers."""
        workers = self._call(lambda: self._rpc("stats"), "stats()")
        largest = {name: max(one[name] for one in workers) for name in workers[0]}
        now = {"running": len(self._running) + len(self._closing), "waiting": len(self._waiting)}
        now["slots_in_use"] = self.capacity.vectors.in_use
        now |= {name: largest[name] for name in ("readings", "packs", "lens_seconds")}
        workers_own = {f"worker_{name}": value for name, value in largest.items()}
        return {**workers_own, **self._counts, **now, **self.budget.stats()}

    def describe(self) -> list[dict[str, Any]]:
        """Return what is tapped, per worker."""
        return self._call(lambda: self._rpc("describe"), "describe()")

    def room_for(self, batch: int, tokens: int) -> str:
        cache = self._llm.vllm_config.cache_config
        held = (cache.num_gpu_blocks or 0) * cache.block_size
        fit = "they fit" if batch * tokens <= held else "some of them wait"
        return f"{batch} × {tokens} tokens of the {held} that vLLM's cache holds: {fit}"

    # --- the thread

    def _loop(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        failures = 0
        # Where the host is slower than the device, every step waits for this condition.
        while failures < _MAX_FAILURES and ((self._running and self._inbox.empty()) or self._receive()):
            try:
                self._turn()
                failures = 0
            except Exception as error:
                failures = _MAX_FAILURES if isinstance(error, EngineDeadError) else failures + bool(self._running)
                if not self._recover(error, dead=failures >= _MAX_FAILURES):
                    break
        self._end_all()
        with contextlib.suppress(Exception):
            self._rpc("detach_arena")
        with contextlib.suppress(Exception):
            self._llm.engine_core.shutdown()
        del self._llm, self._submitter, self.outputs, self.context

    def _turn(self) -> None:
        """Do what is between two steps, and a step."""
        if self._noticed.is_set():
            self._drop_cancelled()
        if self._waiting:
            self._spent = ()
            self._admit()
        if self._running:
            self._step()
            self._lenses.sweep()
        if self._closing:
            self._close_late()

    def _end_all(self) -> None:
        self._refuse_rest()
        try:
            self._conclude([(one, "cancelled") for one in self._running.values()], abort=True)
            self._close_late()
        except Exception as error:
            for one in [*self._running.values(), *(late for late, _ in self._closing)]:
                self._failed(one, error)
        self._drop_waiting(cancelled_only=False)

    def _recover(self, error: Exception, dead: bool) -> bool:
        """End the requests that a fault may have damaged. Requests that only wait, here or in vLLM's queue, go on if
        the engine lives. Returns whether it does."""
        idle = not (self._running or self._closing)
        queued = None if dead else self.outputs.clear_fault(list(self._running))
        if queued is None:
            with self._lock:  # before a caller sees the error and tries again
                self.closed = True
            unbegun = list(self._waiting)
        else:  # a fault while nothing ran comes from the request that was to be admitted, and would come again with it
            unbegun = self._waiting[:1] if idle else []
        begun = [one for key, one in self._running.items() if key not in (queued or ())]
        begun += [late for late, _ in self._closing]
        self._closing = []
        for one in begun:
            self._lose(one, f"a step of {self.facts.name} failed: {error}")
        for one in unbegun:
            self._lose(one, f"{self.facts.name} failed before this request began: {error}")
        self._waiting = [one for one in self._waiting if not one.over]
        return queued is not None

    def _lose(self, one: VLLMText, why: str) -> None:
        if one.allocation is not None:
            one.allocation.withdraw()
        self._failed(one, RequestFailed(why))

    def _all_requests(self) -> list[VLLMText]:
        return [*self._running.values(), *self._waiting]

    def _sequence(self, job: EngineJob) -> VLLMText:
        key = f"{job.plan.request_id}.{job.plan.choice}.{next(self._text_numbers)}"
        return VLLMText(job, self.context, key)

    def _busy(self) -> bool:
        return bool(self._running)

    def _untidy(self) -> bool:
        return bool(self._ended or self._spent) or self.capacity.regions.untidy

    def _tidy(self) -> None:
        self._spent = ()
        with contextlib.suppress(Exception):
            self.capacity.regions.tidy()
            if self._forget():
                self.capacity.regions.tidy()

    def _forget(self) -> bool:
        """Tell the workers which requests have ended, before the next step does; return whether any have."""
        ended = self._ended
        self._ended = []
        if ended:
            with contextlib.suppress(Exception):  # a dead engine fails the next step, or the next request
                self._rpc("forget", ended)
        return bool(ended)

    def _drop_cancelled(self) -> None:
        self._noticed.clear()
        self._drop_waiting(cancelled_only=True)
        if gone := [one for one in self._running.values() if one.job.cancelled]:
            self._conclude([(one, "cancelled") for one in gone], abort=True)

    def _admit(self) -> None:
        """Submit waiting requests to vLLM, in order, while there are slots and shared memory for them. A request that
        needs neither may overtake one that waits for them, and any request one whose pack is being loaded."""
        from vllm.v1.engine.exceptions import EngineDeadError

        blocked: VLLMText | None = None
        for one in list(self._waiting):
            free = len(self._running) < self._places
            if blocked is not None and not self._overtakes(one, blocked, free):
                continue
            if one.job.cancelled:  # before it came here
                self._waiting.remove(one)
                one.end("cancelled")
                continue
            try:
                if not self._lenses.ready(one):
                    continue
                if not one.prepare() and not self._make_room(one):
                    blocked = one  # until a running request ends
                    continue
                self._begin_text(one)
            except EngineDeadError:
                raise
            except Exception as error:
                if one.allocation is not None:
                    one.allocation.withdraw()
                self._waiting.remove(one)
                self._failed(one, error)

    def _begin_text(self, one: VLLMText) -> None:
        for column in one.plan.columns:
            self._resident.give(column)
        one.submit(self._submitter)
        self._waiting.remove(one)
        self._running[one.key] = one
        if one.deferred:
            self._without_token.append(one)

    def _make_room(self, one: VLLMText) -> bool:
        """Take back what ended requests still hold. Raises CapacityExceeded when no request is left that could give
        anything back."""
        if self._forget() and one.prepare():
            return True
        if self._closing or any(other.allocation is not None for other in self._running.values()):
            return False
        self._rpc("settle")
        assert one.allocation is not None
        one.allocation.take()
        one.started()
        return True

    def _step(self) -> None:
        ended = len(self._ended)
        outputs = self.outputs.step()
        del self._ended[:ended]  # the step said so
        self._counts["steps"] += 1
        if self._without_token:
            running = [one for one in self._without_token if one.key in self._running]
            self._without_token = [one for one in running if one.without_token()]
        if outputs or self.capacity.regions.arena.failures != self._failures:
            self._spent = outputs, self._hear(outputs)

    @together()
    def _hear(self, outputs: list[Any]) -> list[_Ending]:
        """Take the outputs of a step. Return the texts that have ended with it."""
        done: list[_Ending] = []
        stopped: list[str] = []
        if self.capacity.regions.arena.failures != self._failures:
            self._give_up()
        for output in outputs:
            one = self._running.get(output.request_id)
            if one is None:
                continue
            try:
                reason = one.take(output)
            except Exception as error:
                self.outputs.abort([one.key])
                if one.lacks():
                    self._rpc("finish", [one.ending()])
                self._failed(one, error)
                continue
            if reason:
                done.append((one, reason))
                if not output.finished:
                    stopped.append(one.key)
        if stopped:
            self.outputs.abort(stopped)
        if done:
            self._conclude(done)
        return done

    def _give_up(self) -> None:
        """End the requests that the workers report as failed."""
        self._failures = self.capacity.regions.arena.failures
        failed = [one for one in self._running.values() if one.failure is not None]
        self._conclude([(one, "cancelled") for one in failed], abort=True)

    def _conclude(self, done: Sequence[_Ending], abort: bool = False) -> None:
        """End texts. Texts that miss only rows are parked in `_closing` while others run: later steps deliver the rows.
        Anything else needs an RPC, one for all, which blocks on the running forward."""
        if abort:
            for one, _ in done:
                one.catch_up()
            self.outputs.abort([one.key for one, _ in done])
        others_run = len(self._running) > sum(one.key in self._running for one, _ in done)
        asked: list[VLLMText] = []
        now: list[_Ending] = []
        for one, reason in done:
            lack = one.lacks()
            if lack == "rows" and others_run:
                self._running.pop(one.key, None)
                self._closing.append((one, reason))
                continue
            now.append((one, reason))
            if lack is not None:
                asked.append(one)
        if asked:
            self._rpc("finish", [one.ending() for one in asked])
        for one, reason in now:
            self._end_text(one, reason)

    def _end_text(self, one: VLLMText, reason: FinishReason) -> None:
        why = one.failure
        if why is not None:
            if why == OVERFLOW and one.allocation is not None:
                self.capacity.salts.spoil(one.allocation.shared)
            kind = Unsteerable if why == OVERFLOW else RequestFailed
            self._failed(one, kind(f"{one.name} failed: {why}"))
            return
        self._leave(one)
        self._counts["finished"] += 1
        self._counts["tokens"] += one.count
        one.end(reason)

    @together()
    def _close_late(self) -> None:
        """End the texts whose rows have come since; when no request runs, no later step will bring them."""
        done: list[_Ending] = [
            (one, why) for one, why in self._closing if not (self._running and one.lacks() == "rows")
        ]
        if done:
            self._conclude(done)
            self._closing = [late for late in self._closing if late not in done]

    def _leave(self, one: VLLMText) -> None:
        self._running.pop(one.key, None)
        if one.allocation is not None:
            self._ended.append(one.key)

    def _failed(self, one: VLLMText, error: Exception) -> None:
        self._leave(one)
        super()._failed(one, error)


def _do_nothing() -> None:
    """Wake a thread that waits for work."""
