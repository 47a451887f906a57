"""Two sets of vLLM's CUDA graphs of whole decoding steps: with the kernels of the taps, and without. A step in which
nobody needs them replays what vLLM would replay without us."""

import functools
from collections.abc import Callable
from typing import Any

from steerscope.engines.vllm.tap import kernels_off


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
        self._sets: dict[bool, Any] = {}

    def capture(self, run: Callable[[], int]) -> int:
        """In place of vLLM's own capturing: once with everything, then whole steps again without."""
        size, manager = run(), getattr(self._runner, "cudagraph_manager", None)
        if not getattr(manager, "graphs", None) or not hasattr(manager, "_capture_descs"):
            return size
        assert manager is not None
        every = manager._capture_descs
        self._sets[True], manager.graphs = manager.graphs, {}
        try:
            manager._capture_descs = {mode: found for mode, found in every.items() if mode.name == "FULL"}
            with kernels_off():
                size += run()
        finally:
            manager._capture_descs = every
        self._sets[False] = manager.graphs
        return size

    def use(self, busy: bool) -> None:
        if self._sets:
            self._runner.cudagraph_manager.graphs = self._sets[busy]
