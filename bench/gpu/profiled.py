"""Where the time of a round goes: host functions, kernels, and our own hooks in the worker, in µs per step."""

import functools
import statistics
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from bench.profiles import TOP, profiled, top_functions
from steerscope.bench.drivers import Ours
from steerscope.bench.workload import Setup


class HookTimer:
    """Counts and times every method of the worker's classes, while it is entered. Only for profiles: a wrapper costs
    about a microsecond, and the times of inner methods are in those of outer ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}  # of every call
        self._plain: list[tuple[type, str, FunctionType]] = []

    def __enter__(self) -> "HookTimer":
        from steerscope.engines.vllm.worker import delivery, device, step_index, worker

        classes: list[type] = [worker.WorkerTaps, step_index.StepIndex, delivery.Delivery, device.RowPool]
        if torch.cuda.is_available():
            from steerscope.engines.vllm.cuda import pool

            classes.append(pool.CudaPool)
        self._plain = [
            (one, name, function)
            for one in classes
            for name, function in vars(one).items()
            if isinstance(function, FunctionType) and not name.startswith("__")
        ]
        for one, name, function in self._plain:
            setattr(one, name, self._timed(f"{one.__name__}.{name}", function))
        return self

    def __exit__(self, *_: object) -> None:
        for one, name, function in self._plain:
            setattr(one, name, function)

    def _timed(self, name: str, function: FunctionType) -> Callable[..., Any]:
        times = self.seconds[name] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                times.append(time.perf_counter() - start)

        return call

    def per_step(self, steps: int) -> dict[str, dict[str, float]]:
        found = {
            name: {
                "us_per_step": 1e6 * sum(times) / steps,
                "median_call_us": 1e6 * statistics.median(times),
                "calls_per_step": len(times) / steps,
            }
            for name, times in self.seconds.items()
            if times
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]["us_per_step"]))


def profile(driver: Ours, setup: Setup, cell: str) -> dict[str, Any]:
    """Three rounds, one instrument each, after one that warms up. (What the worker took as a callable when it began is
    not among its hooks: the two that are around vLLM's own work.)"""
    prompts, engine = setup.prompts(0), driver.engine.aio

    def inside(what: Callable[[], None]) -> None:
        """In the thread that drives vLLM."""
        engine._call(what)  # type: ignore[attr-defined]

    driver.run(prompts, cell)
    with HookTimer() as timer:
        plain = driver.run(prompts, cell)
    found: dict[str, Any] = {"cell": cell, "steps": plain.steps, "hooks": timer.per_step(plain.steps or 1)}
    found |= {"hooked_s": plain.seconds, "stats": driver.engine.stats()}
    try:  # whatever these two cannot do here, the rest stands
        found["functions"] = top_functions(profiled(lambda: driver.run(prompts, cell), inside))
        found |= _traced(lambda: driver.run(prompts, cell), inside)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _traced(work: Callable[[], object], inside: Callable[[Callable[[], None]], None]) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities):
        pass  # the library behind it wants to be started by this thread
    tracer = torch.profiler.profile(activities=activities)
    inside(tracer.start)
    work()
    inside(tracer.stop)
    return {"operators": _top(tracer, "self_cpu_time_total"), "kernels": _top(tracer, "self_device_time_total")}


def _top(tracer: Any, by: str) -> list[dict[str, Any]]:
    averages = [one for one in tracer.key_averages() if getattr(one, by, 0) > 0]
    averages.sort(key=lambda one: -getattr(one, by))
    return [{"name": one.key[:120], "calls": one.count, "us": getattr(one, by)} for one in averages[:TOP]]
