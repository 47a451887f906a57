"""The fast paths of the vLLM engine, and how each is taken out of a running engine to see what it earns."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

HUGE = 1 << 40
Patches = Callable[["Parts"], Sequence[AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Parts:
    """The parts of a running engine that hold fast paths."""

    engine: Any
    worker: Any

    @classmethod
    def of(cls, driver: Any) -> "Parts":
        from steerscope.engines.vllm.worker.worker import LOCAL_WORKERS

        (worker,) = LOCAL_WORKERS
        return cls(driver.engine.aio, worker)

    @property
    def pool(self) -> Any:
        return self.worker.pool


@dataclass(frozen=True)
class FastPath:
    what: str
    cells: tuple[str, ...]  # lines that it serves
    without: Patches
    at_start: bool = False  # it is part of compiled code or CUDA graphs


def returning(value: Any) -> Callable[..., Any]:
    """Return a function of any arguments; a mock would take longer than some fast paths save."""

    def function(*_: Any, **__: Any) -> Any:
        return value

    return function


def precomputed_ops(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(parts.pool._precomputed, "rows", 0),)


def decode_fast_path(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(type(parts.worker.step_index), "_fast_path_after", returning(None)),)


def idle_graphs(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    graphs = parts.worker.graphs
    use = graphs.use
    return (patch.object(graphs, "use", lambda *_: use(True)),)


def pacing(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(type(parts.pool.pace), "beside", returning(HUGE)),)


def runtime_copies(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    copies = parts.pool
    return (patch.object(copies, "_copy_bytes", copies._copy_by_torch),)


def core_outputs(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(parts.engine.outputs, "direct", False),)


def templates(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    from steerscope.engines.plan import Plan

    def plan(planner: Any, name: str, prompt: Any, specs: Any, version: int) -> Plan:
        del version
        planner.check_prompt(prompt, specs.sampling)
        return Plan(name, 0, prompt, specs.sampling, planner.template(prompt, specs))

    return (patch.object(parts.engine._templates, "plan", plan),)


def lens_graphs(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    del parts
    from steerscope.engines.vllm.cuda import lens_readout

    return (patch.object(lens_readout, "MOST_LINES", 0),)


def fused_norms(parts: Parts | None) -> Sequence[AbstractContextManager[Any]]:
    del parts
    from steerscope.engines.vllm.worker import worker

    return (patch.object(worker, "plain_norms", returning(False)),)


ROWS = ("all-layers", "generated")
FAST_PATHS = {
    "precomputed_ops": FastPath("decoding ops computed when the batch changes", ("add", "cap"), precomputed_ops),
    "decode_fast_path": FastPath("repeated steps planned by one comparison", ("all-layers", "add"), decode_fast_path),
    "idle_graphs": FastPath("CUDA graphs without taps", ("zero-layer",), idle_graphs),
    "pacing": FastPath("bytes beside a step limited", ("all-layers",), pacing),
    "runtime_copies": FastPath("copies launched by the CUDA runtime, not torch", ("all-layers",), runtime_copies),
    "core_outputs": FastPath("tokens read from vLLM's core", ("zero-layer", "all-layers"), core_outputs),
    "templates": FastPath("equal requests planned once", ("all-layers",), templates),
    "lens_graphs": FastPath("CUDA graphs of the lens read-out, on a side stream", ("watch",), lens_graphs),
    "fused_norms": FastPath("tap and norm in one kernel", ("all-layers",), fused_norms, at_start=True),
}  # fmt: skip


@contextlib.contextmanager
def taken_out(names: Sequence[str], parts: Parts | None = None) -> Iterator[None]:
    """Run the block without these fast paths."""
    with ExitStack() as stack:
        for name in names:
            for one in FAST_PATHS[name].without(parts):  # type: ignore[arg-type]
                stack.enter_context(one)
        yield
