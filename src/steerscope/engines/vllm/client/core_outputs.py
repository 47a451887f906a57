"""Reading tokens from vLLM's core.

vLLM's output processor goes through every request in each step: text, stop strings, log-probabilities, statistics.
Most requests here need only their tokens, which are read directly from the engine core; only requests that want
log-probabilities are in the output processor. If vLLM logs statistics or traces, all requests are, and its own step
runs: these count what passes there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class CoreOutputs:
    def __init__(self, llm: "LLMEngine") -> None:
        self._llm = llm
        self._processed = llm.output_processor.request_states  # requests of the output processor
        self.direct = not (llm.log_stats or llm.output_processor.tracing_enabled)
        llm.output_processor.stream_interval = 1  # no tokens are kept back
        self._quiet: dict[str, list[int]] = {}  # tokens of requests that report nothing before their ends

    def keep(self, name: str, tokens: list[int]) -> None:
        """Append what is sampled for this request to `tokens`; `step` reports only its end."""
        self._quiet[name] = tokens

    def step(self) -> list[Any]:
        """Run a step of vLLM. Return outputs of its core, or of its output processor for requests that are there."""
        if not self.direct:
            return self._llm.step()
        quiet = self._quiet
        found: list[Any] = []
        to_process: list[Any] = []
        for one in self._llm.engine_core.get_output().outputs:  # runs for every request in every step
            name = one.request_id
            if name in quiet:
                tokens = quiet[name]
                tokens += one.new_token_ids
                if one.finish_reason is not None:
                    del quiet[name]
                    found.append(one)
            elif name in self._processed:
                to_process.append(one)
            else:
                found.append(one)
        if to_process:
            found += self._llm.output_processor.process_outputs(to_process).request_outputs
        return found

    def abort(self, names: Sequence[str]) -> None:
        """End these requests wherever vLLM knows them."""
        processed = [name for name in names if name in self._processed]
        for name in names:
            self._quiet.pop(name, None)
        if processed:
            self._llm.abort_request(processed)
        self._llm.engine_core.abort_requests([name for name in names if name not in processed])

    def clear_fault(self, names: Sequence[str]) -> set[str] | None:
        """After an exception in a step: abort the requests that a step may have had. Returns the names of the others,
        which wait in vLLM's queue as before; None if vLLM cannot go on."""
        try:
            # A core in a process of its own dies with its step: this fault is the client's, and concerns all.
            core = getattr(self._llm.engine_core, "engine_core", None)
            known = {} if core is None else core.scheduler.requests
            queued = {name for name in names if name in known and known[name].status.name == "WAITING"}
            self.abort([name for name in names if name not in queued])
            # vLLM enters blocks into its prefix cache when it schedules a step, whether or not that step computes them.
            return queued if self._llm.reset_prefix_cache() else None
        except Exception:
            return None
