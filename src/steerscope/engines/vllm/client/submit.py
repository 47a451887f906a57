"""The way into vLLM.

vLLM judges the sampling parameters of every request, completes them from the model's configuration, and looks at its
prompt in several ways. For equal parameters that comes to the same each time, and prompts were judged here: so the
first request with such parameters goes that way, and those that follow are made from it. Names come from us and never
come again: vLLM keeps each request under its name, instead of one with a random end that nobody could look up.
"""

import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from steerscope.core.slot_table import Column

_KEPT = 64


class Entrance:
    def __init__(self, llm: "LLMEngine") -> None:
        self._llm = llm
        self._known: dict[int, tuple[SamplingParams, Any]] = {}  # by identity: they are kept, so it stays theirs

    def add(
        self,
        name: str,
        ids: list[int],
        salt: str | None,
        params: "SamplingParams",
        extra: dict[str, Any] | None,
        booked: bool,
    ) -> None:
        """A request with a name of its own. Whoever passes the same parameters again must not have changed them. It is
        in vLLM's books beside its core if it is to be `booked` (`leaving`)."""
        if id(params) not in self._known:
            self._known[id(params)] = params, self._judged(name, ids, params)
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        _, known = self._known[id(params)]
        request = copy.copy(known)
        request.request_id = request.external_req_id = name
        request.prompt_token_ids, request.cache_salt, request.arrival_time = ids, salt, time.time()
        if extra is not None:
            request.sampling_params = copy.copy(known.sampling_params)
            request.sampling_params.extra_args = extra
        if booked:
            self._llm.output_processor.add_request(request, None, None, 0)
        self._llm.engine_core.add_request(request)

    def _judged(self, name: str, ids: list[int], params: "SamplingParams") -> Any:
        tasks = self._llm.get_supported_tasks()
        prompt: Any = {"prompt_token_ids": ids}
        return self._llm.input_processor.process_inputs(name, prompt, params, supported_tasks=tasks)


class WorkerVectors:
    """The vectors that every worker was given, so that requests name them by the hash of their content."""

    def __init__(self, rpc: Callable[..., Any], in_use: Callable[[], set[bytes]], most: int) -> None:
        self._rpc, self._in_use, self._most = rpc, in_use, most
        self._given: dict[bytes, None] = {}  # last used last

    def give(self, column: "Column") -> None:
        """Send the vectors of a column to every worker, unless they have them."""
        name = column.vector_key
        if name in self._given:
            self._given[name] = self._given.pop(name)
            return
        data = b"".join(vector.tobytes() for vector in column.vectors.values())
        self._rpc("register", name, [list(key) for key in column.vectors], data)
        self._given[name] = None
        if len(self._given) > self._most:
            self._take_back(self._in_use() | {name})

    def _take_back(self, used: set[bytes]) -> None:
        """Those used longest ago, but none of these."""
        spare = [known for known in self._given if known not in used]
        for oldest in spare[: len(self._given) - self._most]:
            del self._given[oldest]
            self._rpc("unregister", oldest)
