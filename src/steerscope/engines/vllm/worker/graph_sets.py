"""Three sets of vLLM's CUDA graphs of whole decoding steps: with taps that steer and capture, with taps that only
capture, so that the model's norms wait for nothing, and without taps. A step without work for the taps replays the last
set, which is what vLLM would replay without steerscope."""

from collections.abc import Callable
from typing import Any

from steerscope.engines.vllm.worker.tap import launch_mode

_LESS = ((False, True), (False, False))  # what taps do in the further sets: steer, capture


class GraphSets:
    """The graph sets of a V2 runner, which keeps its graphs in one place. Other runners have one set, with all taps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sets: dict[tuple[bool, bool], Any] = {}  # by what their taps do: steer, capture
        self._profiling = False

    def profile(self, run: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Wrap vLLM's estimate of the memory for CUDA graphs, which captures some graphs and discards them."""
        self._profiling = True
        try:
            return run(*args, **kwargs)
        finally:
            self._profiling = False

    def capture(self, run: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Wrap vLLM's own capturing: once with everything, then whole steps again with less. Return the bytes taken; in
        an estimate, include the bytes of the further sets."""
        size = run(*args, **kwargs)
        manager = getattr(self._runner, "cudagraph_manager", None)
        if not getattr(manager, "graphs", None) or not hasattr(manager, "_capture_descs"):
            return size
        assert manager is not None
        every = manager._capture_descs
        whole = {mode: found for mode, found in every.items() if mode.name == "FULL"}
        if self._profiling or kwargs.get("profile_only"):
            # vLLM extrapolates from its own samples: the first holds the pool, each later one the cost of a graph.
            samples = getattr(manager, "_capture_mem_samples", None) or []
            return size + len(_LESS) * sum(map(len, whole.values())) * max([0, *samples[1:2]])
        self._sets[True, True] = manager.graphs
        try:
            manager._capture_descs = whole
            for less in _LESS:
                manager.graphs = {}
                with launch_mode(*less):
                    size += run(*args, **kwargs)
                self._sets[less] = manager.graphs
        finally:
            manager._capture_descs = every
        return size

    def use(self, steers: bool = False, busy: bool = False) -> None:
        if self._sets:
            self._runner.cudagraph_manager.graphs = self._sets[steers, steers or busy]
