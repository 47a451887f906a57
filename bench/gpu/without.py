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


def page_turns(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    from steerscope.engines.vllm.worker.decode_fast_path import NEVER

    return (patch.object(type(parts.worker.step_index), "_period", property(returning(NEVER))),)


def plan_at_first_tap(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(parts.worker, "_largest_replayed", HUGE),)


def prefill_sums(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(parts.worker.taps, "span", 0),)


def one_column(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    del parts
    from steerscope.engines.vllm.worker import tap, worker

    def mode(steer: bool, capture: bool, runs: Any = None, covered: int = 0, columns: int = 0) -> tap.TapMode:
        del columns
        return tap.TapMode(steer, capture, runs, covered)

    return (patch.object(worker, "TapMode", mode),)


def many_kernel(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    from steerscope.engines.vllm.cuda import fused_norm

    return (patch.object(fused_norm, "FEW", HUGE), *prefill_sums(parts))


def capture_graphs(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    graphs = parts.worker.graphs
    use = graphs.use
    return (patch.object(graphs, "use", lambda steers=False, busy=False: use(steers or busy, steers or busy)),)


def idle_graphs(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    graphs = parts.worker.graphs
    use = graphs.use
    return (patch.object(graphs, "use", lambda *_: use(True, True)),)


def deferred_admission(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    del parts
    from steerscope.engines.vllm.worker import admission

    return (patch.object(admission, "waits", returning(False)),)


def prompt_wait(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(type(parts.pool), "_must_wait", returning(False)),)


def behind_tokens(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(type(parts.pool), "_record_tokens_copied", returning(False)),)


def pacing(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(type(parts.pool.pace), "beside", returning(HUGE)),)


def seldom_timed(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(type(parts.pool.pace), "timed", returning(True)),)


def runtime_copies(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    copies = parts.pool
    return (patch.object(copies, "_copy_bytes", copies._copy_by_torch),)


def known_stream(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    del parts
    import torch

    from steerscope.engines.vllm.cuda.streams import CurrentStream

    return (patch.object(CurrentStream, "__call__", lambda self: torch.cuda.current_stream(self._known.device)),)


def copies_at_the_end(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(parts.pool, "copy_waiting_now", returning(None)),)


def early_results(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    from steerscope.engines.vllm.client.requests import VLLMText

    lacks = VLLMText.lacks
    return (
        patch.object(parts.worker.delivery.reductions, "write_early", returning(None)),
        patch.object(VLLMText, "lacks", lambda self, *_: lacks(self)),
    )


def core_outputs(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    return (patch.object(parts.engine.outputs, "direct", False),)


def accepted_once(parts: Parts) -> Sequence[AbstractContextManager[Any]]:
    del parts
    from steerscope.engines.vllm.client import submit

    def like(self: Any, name: str, ids: list[int], sampling: Any, reads_cached: bool, seed: int | None) -> Any:
        return self._accept(name, ids, submit.sampling_params(seed=seed, **submit._fields(sampling, reads_cached)))

    return (patch.object(submit.Submitter, "_like", like),)


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


def stage(parts: Parts | None) -> Sequence[AbstractContextManager[Any]]:
    del parts
    from steerscope.engines.vllm.cuda import kernel

    return (patch.object(kernel, "_MAX_STAGE_BYTES", 0),)


def fused_norms(parts: Parts | None) -> Sequence[AbstractContextManager[Any]]:
    del parts
    from steerscope.engines.vllm.worker import worker

    return (patch.object(worker, "plain_norms", returning(False)),)


ROWS = ("all-layers", "generated")
FAST_PATHS = {
    "precomputed_ops": FastPath("decoding ops computed when the batch changes", ("add", "cap"), precomputed_ops),
    "decode_fast_path": FastPath("repeated steps planned by one comparison", ("all-layers", "add"), decode_fast_path),
    "page_turns": FastPath("pages flushed in turns before they are full", ROWS, page_turns),
    "plan_at_first_tap": FastPath("long steps planned beside first layers", ("all-layers", "add"), plan_at_first_tap),
    "prefill_sums": FastPath("prompts of a mean summed by the taps", ("mean",), prefill_sums),
    "one_column": FastPath("kernel for tokens with one op", ("add", "cap"), one_column),
    "many_kernel": FastPath("kernel for long steps", ("all-layers", "add"), many_kernel),
    "capture_graphs": FastPath("CUDA graphs that only capture", ROWS, capture_graphs),
    "idle_graphs": FastPath("CUDA graphs without taps", ("zero-layer",), idle_graphs),
    "deferred_admission": FastPath("requests registered after their prompts", ("generated",), deferred_admission),
    "prompt_wait": FastPath("rows wait for eight steps behind a prompt", ("all-layers",), prompt_wait),
    "behind_tokens": FastPath("rows copied behind sampled tokens", ("all-layers",), behind_tokens),
    "pacing": FastPath("bytes beside a step limited", ("all-layers",), pacing),
    "seldom_timed": FastPath("two copies in seven timed", ("generated",), seldom_timed),
    "runtime_copies": FastPath("copies launched by the CUDA runtime, not torch", ("all-layers",), runtime_copies),
    "known_stream": FastPath("the current stream kept", ("watch",), known_stream),
    "copies_at_the_end": FastPath("waiting rows copied when a text ends", ("generated",), copies_at_the_end),
    "early_results": FastPath("reductions written beside the last token", ("mean",), early_results),
    "core_outputs": FastPath("tokens read from vLLM's core", ("zero-layer", "all-layers"), core_outputs),
    "accepted_once": FastPath("equal parameters checked by vLLM once", ("zero-layer",), accepted_once),
    "templates": FastPath("equal requests planned once", ("all-layers",), templates),
    "lens_graphs": FastPath("CUDA graphs of the lens read-out, on a side stream", ("watch",), lens_graphs),
    "stage": FastPath("rows left on a stage until the step ends", ROWS, stage, at_start=True),
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
