"""Submitting requests to vLLM.

vLLM checks the sampling parameters of every request, completes them from the model's configuration, and looks at its
prompt in several ways. For equal parameters that comes to the same each time, and prompts were checked here: so the
first request with such parameters goes through vLLM's input processor, and those that follow are copies of it. vLLM
keeps each request under our name, which never comes again, so that it can be looked up.
"""

import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steerscope.specs.sampling import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from steerscope.core.slot_table import Column

_MAX_KEPT = 64


class Submitter:
    def __init__(self, llm: "LLMEngine") -> None:
        self._llm = llm
        self._accepted: dict[tuple[object, ...], Any] = {}  # vLLM's requests, by all parameters but the seed's number

    def add(
        self,
        name: str,
        ids: list[int],
        salt: str | None,
        sampling: Sampling,
        reads_cached: bool,
        extra: dict[str, Any] | None,
        in_output_processor: bool,
    ) -> None:
        """Queue a request in vLLM's core, and register it in vLLM's output processor if that is to see its tokens."""
        seed = None if sampling.greedy else sampling.seed
        known = self._like(name, ids, sampling, reads_cached, seed)
        request = copy.copy(known)
        request.request_id = request.external_req_id = name
        request.prompt_token_ids = ids
        request.cache_salt = salt
        request.arrival_time = time.time()
        if extra is not None or seed is not None:
            request.sampling_params = copy.copy(known.sampling_params)
            request.sampling_params.extra_args = extra
            request.sampling_params.seed = seed
        if in_output_processor:
            self._llm.output_processor.add_request(request, None, None, 0)
        self._llm.engine_core.add_request(request)

    def _like(self, name: str, ids: list[int], sampling: Sampling, reads_cached: bool, seed: int | None) -> Any:
        """Return a request that vLLM has accepted, with parameters that differ in the seed's number at most."""
        fields = _fields(sampling, reads_cached)
        key = (*fields.values(), seed is None)
        known = self._accepted.get(key)
        if known is None:
            known = self._accepted[key] = self._accept(name, ids, sampling_params(seed=seed, **fields))
            if len(self._accepted) > _MAX_KEPT:
                del self._accepted[next(iter(self._accepted))]
        return known

    def _accept(self, name: str, ids: list[int], params: "SamplingParams") -> Any:
        tasks = self._llm.get_supported_tasks()
        prompt: Any = {"prompt_token_ids": ids}
        return self._llm.input_processor.process_inputs(name, prompt, params, supported_tasks=tasks)


def _fields(sampling: Sampling, reads_cached: bool) -> dict[str, Any]:
    """Return vLLM's parameters, but for the seed."""
    greedy = sampling.greedy
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k or 0,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "skip_reading_prefix_cache": None if reads_cached else True,
    }


def sampling_params(**fields: Any) -> "SamplingParams":
    """Return vLLM's parameters, without the deep copy that vLLM would make of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, skip_clone=True, **fields)


class WorkerVectors:
    """The vectors that every worker has, so that requests name them by the hash of their content."""

    def __init__(self, rpc: Callable[..., Any], in_use: Callable[[], set[bytes]], most: int) -> None:
        self._rpc = rpc
        self._in_use = in_use
        self._most = most
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
        """Remove the vectors used longest ago from the workers, but none of these."""
        spare = [known for known in self._given if known not in used]
        for oldest in spare[: len(self._given) - self._most]:
            del self._given[oldest]
            self._rpc("unregister", oldest)
