"""The way out of vLLM.

vLLM keeps books of every request beside those of its core, and goes through them in each step: text, stop strings,
log-probabilities, statistics. All that is wanted of most requests here is their tokens, so vLLM's core is asked for
these, and only who asks for log-probabilities is in vLLM's other books. If vLLM is to log statistics or to trace, all
are, and its own step runs: these count what passes there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class Exit:
    def __init__(self, llm: "LLMEngine") -> None:
        self._llm, self._books = llm, llm.output_processor.request_states
        self.direct = not (llm.log_stats or llm.output_processor.tracing_enabled)
        llm.output_processor.stream_interval = 1  # nobody keeps tokens back from us
        self._quiet: dict[str, list[int]] = {}  # the tokens of texts that nobody looks at before their ends

    def keep(self, name: str, tokens: list[int]) -> None:
        """What is sampled for this request, which is not in vLLM's books, goes there until it ends."""
        self._quiet[name] = tokens

    def step(self) -> list[Any]:
        """One of vLLM's. What there is to tell: by vLLM's core, or as vLLM's users know it of who is in its books."""
        if not self.direct:
            return self._llm.step()
        told, quiet = self._llm.engine_core.get_output(), self._quiet
        found, booked = [], []
        for one in told.outputs:  # of every request, in every step: no more than need be
            name = one.request_id
            if name in quiet:
                tokens = quiet[name]
                tokens += one.new_token_ids
                if one.finish_reason is not None:
                    del quiet[name]
                    found.append(one)
            elif name in self._books:
                booked.append(one)
            else:
                found.append(one)
        if booked:
            found += self._llm.output_processor.process_outputs(booked).request_outputs
        return found

    def abort(self, names: Sequence[str]) -> None:
        """Whatever is left of these."""
        booked = [name for name in names if name in self._books]
        for name in names:
            self._quiet.pop(name, None)
        if booked:
            self._llm.abort_request(booked)
        self._llm.engine_core.abort_requests([name for name in names if name not in booked])

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
