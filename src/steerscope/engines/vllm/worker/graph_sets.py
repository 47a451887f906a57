"""Two sets of vLLM's CUDA graphs of whole decoding steps, with taps and without. A step without work for the taps
replays the second, which is what vLLM would replay without steerscope."""

from collections.abc import Callable
from typing import Any

from steerscope.engines.vllm.worker.tap import TapMode, launch_mode


class GraphSets:
    """The graph sets of a V2 runner, which keeps its graphs in one place. Other runners have one set, with all taps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sets: dict[bool, Any] = {}  # by whether taps do something
        self._profiling = False

    def profile(self, run: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Wrap vLLM's estimate of the memory for CUDA graphs, which captures some graphs and discards them."""
        self._profiling = True
        try:
            return run(*args, **kwargs)
        finally:
            self._profiling = False

    def capture(self, run: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Wrap vLLM's own capturing: once with taps, then whole steps again without. Return the bytes taken; in an
        estimate, include the bytes of the second set."""
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
            return size + sum(map(len, whole.values())) * max([0, *samples[1:2]])
        self._sets[True] = manager.graphs
        try:
            manager._capture_descs = whole
            manager.graphs = {}
            with launch_mode(TapMode(False, False)):
                size += run(*args, **kwargs)
            self._sets[False] = manager.graphs
        finally:
            manager._capture_descs = every
        return size

    def use(self, busy: bool = False) -> None:
        if self._sets:
            self._runner.cudagraph_manager.graphs = self._sets[busy]
