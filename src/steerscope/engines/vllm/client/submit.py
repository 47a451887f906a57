"""Submitting requests to vLLM.

Prompts and sampling parameters are checked before, so that a caller sees our errors and not vLLM's. vLLM keeps each
request under our name, which never comes again, so that it can be looked up.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from steerscope.specs.sampling import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from steerscope.core.slot_table import Column


class Submitter:
    def __init__(self, llm: "LLMEngine") -> None:
        self._llm = llm

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
        tasks = self._llm.get_supported_tasks()
        prompt: Any = {"prompt_token_ids": ids}
        params = sampling_params(sampling, reads_cached)
        request = self._llm.input_processor.process_inputs(name, prompt, params, supported_tasks=tasks)
        request.request_id = request.external_req_id = name
        request.cache_salt = salt
        params = request.sampling_params
        assert params is not None
        params.extra_args = extra
        if in_output_processor:
            self._llm.output_processor.add_request(request, None, None, 0)
        self._llm.engine_core.add_request(request)


def sampling_params(sampling: Sampling, reads_cached: bool) -> "SamplingParams":
    """Return vLLM's parameters, without the deep copy that vLLM would make of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = sampling.greedy
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=0.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k or 0,
        min_p=0.0 if greedy else sampling.min_p,
        seed=None if greedy else sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        skip_reading_prefix_cache=None if reads_cached else True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


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
