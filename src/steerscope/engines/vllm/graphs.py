"""Three sets of vLLM's CUDA graphs of whole decoding steps: with taps that do everything, with taps that only read, so
that the model's norms wait for nothing, and without. A step in which nobody needs them replays what vLLM would replay
without us."""

import functools
from collections.abc import Callable
from typing import Any

from steerscope.engines.vllm.tap import kernels


def around(target: Any, name: str, wrapper: Callable) -> None:
    """Replace a method of this object by `wrapper(method, …)`."""
    inner = getattr(target, name)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, *args, **kwargs)

    setattr(target, name, call)


class Graphs:
    """Of a V2 runner, which keeps them in one place; other runners replay one set, with the kernels in it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sets: dict[tuple[bool, bool], Any] = {}  # by what their taps do: steer, capture

    def capture(self, run: Callable[[], int]) -> int:
        """In place of vLLM's own capturing: once with everything, then whole steps again with less."""
        size, manager = run(), getattr(self._runner, "cudagraph_manager", None)
        if not getattr(manager, "graphs", None) or not hasattr(manager, "_capture_descs"):
            return size
        assert manager is not None
        every = manager._capture_descs
        self._sets[True, True] = manager.graphs
        try:
            manager._capture_descs = {mode: found for mode, found in every.items() if mode.name == "FULL"}
            for less in ((False, True), (False, False)):
                manager.graphs = {}
                with kernels(*less):
                    size += run()
                self._sets[less] = manager.graphs
        finally:
            manager._capture_descs = every
        return size

    def use(self, steers: bool = False, busy: bool = False) -> None:
        if self._sets:
            self._runner.cudagraph_manager.graphs = self._sets[steers, steers or busy]
