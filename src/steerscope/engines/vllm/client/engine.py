"""VLLMEngine: the Engine protocol on stock vLLM, driven from a thread of its own.

The thread owns the vLLM engine: it lets requests in while there are slots and shared memory for them, steps, turns new
tokens into text with the same code as the transformers engine, and ends requests. Vectors are given to the workers, and
acknowledged by all of them, before the first request that uses them.
"""

import contextlib
import dataclasses
import functools
import itertools
import secrets
import time
from pathlib import Path
from typing import Any

from steerscope.capture.budget import ByteBudget
from steerscope.capture.transport import Arena, Regions, shared_folder
from steerscope.engines.detokenizer import Decoder
from steerscope.engines.engine_thread import ThreadedEngine
from steerscope.engines.outbox import together
from steerscope.engines.packs import Packs
from steerscope.engines.plan import Plan
from steerscope.engines.results import Job
from steerscope.engines.vllm.client.capacity import Room
from steerscope.engines.vllm.client.core_outputs import Exit
from steerscope.engines.vllm.client.pack_sync import WorkerStore
from steerscope.engines.vllm.client.running import Running, SamplingParamsOf
from steerscope.engines.vllm.client.start import (
    device_of_workers,
    eos_ids,
    mode_of,
    start_vllm,
    tokenizer_of,
    watch_core,
)
from steerscope.engines.vllm.client.start_check import self_test
from steerscope.engines.vllm.client.submit import Entrance, WorkerVectors
from steerscope.engines.vllm.guards import adapter_refusal, check_version, facts_of
from steerscope.engines.vllm.settings import Settings
from steerscope.engines.vllm.wire import OVERFLOW, spoil
from steerscope.specs.errors import Problem, RequestFailed, Unsteerable, UnsupportedModel
from steerscope.specs.sampling import Sampling

_COUNTERS = 4 << 20
_SOON = 0.002  # seconds, for the results of all that end with one step; then they are asked for
_RESIDENT = 256  # vectors that workers keep, used or not
_FAILURES = 3  # steps that fail in a row: the engine is beyond help


class VLLMEngine(ThreadedEngine[Running]):
    def __init__(
        self,
        model: str | Path,
        *,
        name: str | None = None,
        tokenizer: Any = None,  # anything like a transformers tokenizer
        settings: Settings | None = None,
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
        self.tokenizer = tokenizer or tokenizer_of(model)
        self._llm, self.settings = start_vllm(model, name or str(model), settings or Settings(), vllm_options)
        try:
            self._begin(self._llm.vllm_config, name or str(model), capture_budget)
        except BaseException:
            self._llm.engine_core.shutdown()
            raise
        self._run()
        watch_core(self._llm.engine_core, self._thread)
        try:
            self_test(self)
        except BaseException:
            self.sync.close()
            raise

    def _begin(self, config: Any, name: str, capture_budget: int) -> None:
        self.dtype, self.device = config.model_config.dtype, device_of_workers()
        self.mode = mode_of(config)
        alone = config.parallel_config.pipeline_parallel_size == 1
        self.facts = dataclasses.replace(facts_of(config, self.settings, name), watches=True, switches=alone)
        self._decoder = Decoder(self.tokenizer)  # type: ignore[arg-type]
        self._eos = eos_ids(config, self.tokenizer)
        # The budget counts rows; every request that asks for something also has counters, and gaps cost a little.
        arena = self._share(capture_budget + (capture_budget >> 3) + _COUNTERS)
        regions = Regions(arena, functools.partial(self._inbox.put, _look_up))  # an idle thread tidies them
        stage = {(layer, site): one["stage"] for one in self._rpc("describe") for layer, site in one["taps"]}
        self._places = config.scheduler_config.max_num_seqs
        self.room = Room(self.facts, self.dtype, self.settings, stage, regions)
        self.separate = hasattr(self._llm.engine_core, "outputs_queue")  # the engine core is another process
        self.numbers = itertools.count()
        self._entrance, self.exit = Entrance(self._llm), Exit(self._llm)
        self._lenses = Packs(WorkerStore(self._rpc, self._call), self._call, self._put, self._packs_in_use)
        self._resident = WorkerVectors(self._rpc, self._vectors_in_use, max(_RESIDENT, self.settings.slots))
        self._running: dict[str, Running] = {}
        self._unborn: list[Running] = []  # those whose tokens are kept, without one
        self._closing: list[tuple[Running, Any]] = []  # texts that have ended, and why: their last rows are coming
        self._ended: list[str] = []  # those that the workers may not know of
        self._spent: tuple = ()  # what is left of them: to free it takes longer than to wake who waits for them
        self._failures = 0  # what the shared memory said when it was last looked at
        self.sampling_params = SamplingParamsOf()

    def _share(self, size: int) -> Arena:
        arena = Arena(shared_folder(size) / f"steerscope-{secrets.token_hex(8)}", size, create=True)
        try:
            self._rpc("attach_arena", str(arena.path), size)
        except Exception as error:
            if "steerscope_attach_arena" not in str(error):
                raise
            raise UnsupportedModel(
                "vLLM did not load the steerscope plugin in its workers: VLLM_PLUGINS must name steerscope or be unset"
            ) from error
        finally:
            arena.unlink()  # everybody has it mapped: its memory goes when they do
        return arena

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """On every worker; from the engine's thread, or before it runs."""
        return self._llm.collective_rpc(f"steerscope_{method}", args=args)

    # --- the Engine's side (any thread)

    def _row_bytes(self, plan: Plan) -> int:
        return self.room.row_bytes(plan)

    def _check_sampling(self, sampling: Sampling) -> list[Problem]:
        if sampling.repetition_window is None or sampling.repetition_penalty == 1.0:
            return []
        remedy = "leave it out, or use engine hf"
        return [Problem("sampling.repetition_window", "vLLM penalises the whole text", remedy)]

    def _vectors_in_use(self) -> set[bytes]:
        return {column.vector_key for one in self._running.values() for column in one.plan.columns}

    def stats(self) -> dict[str, float]:
        """Counters of this process and of the workers."""
        workers = self._call(lambda: self._rpc("stats"), "stats()")
        summed = {name: max(one[name] for one in workers) for name in workers[0]}
        now = {"running": len(self._running) + len(self._closing), "waiting": len(self._waiting)}
        now["slots_in_use"] = self.room.vectors.in_use
        now |= {name: summed[name] for name in ("readings", "packs", "lens_seconds")}
        workers_own = {f"worker_{name}": value for name, value in summed.items()}
        return {**workers_own, **self._counts, **now, **self.budget.stats()}

    def describe(self) -> list[dict[str, Any]]:
        """What is tapped, per worker."""
        return self._call(lambda: self._rpc("describe"), "describe()")

    # --- the thread

    def _loop(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        failures = 0
        # Every step comes by here, and where the host is slower than the device it waits for this.
        while failures < _FAILURES and ((self._running and self._inbox.empty()) or self._receive()):
            try:
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
                failures = 0
            except Exception as error:
                failures = _FAILURES if isinstance(error, EngineDeadError) else failures + bool(self._running)
                if not self._recover(error, dead=failures >= _FAILURES):
                    break
        self._refuse_rest()
        try:
            self._conclude([(one, "cancelled") for one in self._running.values()], abort=True)
            self._close_late()
        except Exception as error:
            for one in [*self._running.values(), *(late for late, _ in self._closing)]:
                self._failed(one, error)
        self._drop_waiting(cancelled_only=False)
        with contextlib.suppress(Exception):
            self._rpc("detach_arena")
        with contextlib.suppress(Exception):
            self._llm.engine_core.shutdown()
        del self._llm, self._entrance, self.exit

    def _recover(self, error: Exception, dead: bool) -> bool:
        """End the requests that a fault may have damaged. Requests that only wait, here or in vLLM's queue, go on if
        the engine lives. Returns whether it does."""
        idle = not (self._running or self._closing)
        queued = None if dead else self.exit.clear_fault(list(self._running))
        if queued is None:
            with self._lock:  # before a client hears of the fault, and tries again
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

    def _lose(self, one: Running, why: str) -> None:
        if one.claim is not None:
            one.claim.withdraw()
        self._failed(one, RequestFailed(why))

    def _all_requests(self) -> list[Running]:
        return [*self._running.values(), *self._waiting]

    def _sequence(self, job: Job) -> Running:
        return Running(job, self._decoder, self._eos, self)

    def _busy(self) -> bool:
        return bool(self._running)

    def _untidy(self) -> bool:
        return bool(self._ended or self._spent) or self.room.regions.untidy

    def _tidy(self) -> None:
        self._spent = ()
        with contextlib.suppress(Exception):
            self.room.regions.tidy()
            if self._forget():
                self.room.regions.tidy()

    def _forget(self) -> bool:
        """Tell the workers at once which requests have ended, if any have; the next step would tell them too."""
        ended, self._ended = self._ended, []
        if ended:
            with contextlib.suppress(Exception):  # the step after it, or the next request, meets an engine that is dead
                self._rpc("forget", ended)
        return bool(ended)

    def _drop_cancelled(self) -> None:
        self._noticed.clear()
        self._drop_waiting(cancelled_only=True)
        if gone := [one for one in self._running.values() if one.job.cancelled]:
            self._conclude([(one, "cancelled") for one in gone], abort=True)

    def _admit(self) -> None:
        """Hand waiting requests to vLLM, in order, while there are slots and shared memory for them. A request that
        needs neither may overtake one that waits for them, and any request one whose pack is being loaded."""
        from vllm.v1.engine.exceptions import EngineDeadError

        blocked: Running | None = None
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
                for column in one.plan.columns:
                    self._resident.give(column)
                one.enter(self._entrance)
            except EngineDeadError:
                raise
            except Exception as error:
                if one.claim is not None:
                    one.claim.withdraw()
                self._waiting.remove(one)
                self._failed(one, error)
                continue
            self._waiting.remove(one)
            self._running[one.key] = one
            if one.late:
                self._unborn.append(one)

    def _make_room(self, one: Running) -> bool:
        """Take back what requests that have ended still hold. Raises CapacityExceeded when no request is left that
        could give anything back."""
        if self._forget() and one.prepare():
            return True
        if self._closing or any(other.claim is not None for other in self._running.values()):
            return False
        self._rpc("settle")
        assert one.claim is not None
        one.claim.take()
        one.started()
        return True

    def _step(self) -> None:
        ended, outputs = len(self._ended), self.exit.step()
        del self._ended[:ended]  # the step said so
        self._counts["steps"] += 1
        if self._unborn:
            self._unborn = [one for one in self._unborn if one.key in self._running and one.unborn()]
        if outputs or self.room.regions.arena.failures != self._failures:
            self._spent = outputs, self._hear(outputs)

    @together()
    def _hear(self, outputs: list[Any]) -> list[tuple[Running, Any]]:
        """What a step has brought; those that have ended with it."""
        done: list[tuple[Running, Any]] = []
        stopped: list[str] = []
        if self.room.regions.arena.failures != self._failures:
            self._give_up()
        for output in outputs:
            one = self._running.get(output.request_id)
            if one is None:
                continue
            try:
                reason = one.take(output)
            except Exception as error:
                self.exit.abort([one.key])
                if one.lacks():
                    self._rpc("finish", [one.ending()])
                self._failed(one, error)
                continue
            if reason:
                done.append((one, reason))
                if not output.finished:
                    stopped.append(one.key)
        if stopped:
            self.exit.abort(stopped)
        if done:
            self._conclude(done)
        return done

    def _give_up(self) -> None:
        """End what the workers say has failed."""
        self._failures = self.room.regions.arena.failures
        failed = [one for one in self._running.values() if one.failure is not None]
        self._conclude([(one, "cancelled") for one in failed], abort=True)

    def _conclude(self, done: "list[tuple[Running, Any]]", abort: bool = False) -> None:
        """End requests. Whoever lacks nothing but rows waits for them while others run: to ask for them, in one call
        for all, would hold up everybody until the forward that runs now is over."""
        if abort:
            for one, _ in done:
                one.catch_up()
            self.exit.abort([one.key for one, _ in done])
        soon, others = time.monotonic() + _SOON, len(self._running) > sum(one.key in self._running for one, _ in done)
        lacks = [one.lacks(soon) for one, _ in done]
        waits = [what == "rows" and others for what in lacks]
        if asked := [one for (one, _), what, wait in zip(done, lacks, waits, strict=True) if what and not wait]:
            self._rpc("finish", [one.ending() for one in asked])
        for (one, reason), wait in zip(done, waits, strict=True):
            if wait:
                self._running.pop(one.key, None)
                self._closing.append((one, reason))
            elif (why := one.failure) is not None:
                if why == OVERFLOW:
                    spoil(one.plan)
                kind = Unsteerable if why == OVERFLOW else RequestFailed
                self._failed(one, kind(f"{one.name} failed: {why}"))
            else:
                self._leave(one, reason)

    @together()
    def _close_late(self) -> None:
        """Whose rows have come since; and when nobody runs any more, no step will bring them."""
        if done := [(one, why) for one, why in self._closing if not (self._running and one.lacks() == "rows")]:
            self._conclude(done)
            self._closing = [late for late in self._closing if late not in done]

    def _leave(self, one: Running, reason: Any) -> None:
        self._running.pop(one.key, None)
        if one.claim is not None:
            self._ended.append(one.key)
        self._counts["finished"] += 1
        self._counts["tokens"] += one.count
        one.end(reason)

    def _failed(self, one: Running, error: Exception) -> None:
        self._running.pop(one.key, None)
        if one.claim is not None:
            self._ended.append(one.key)
        super()._failed(one, error)


def _look_up() -> None:
    """For a thread that waits for something to do."""
