"""The way out of vLLM: tokens come from its core, and its books beside that are passed by."""

import asyncio
import enum
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engines.conftest import HAS_VLLM, saved, start_vllm
from steerscope.engines.results import EndEvent, Generation, TokenEvent, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.engines.vllm.client.core_outputs import CoreOutputs
from steerscope.specs import Capture, Sampling
from steerscope.specs.errors import ModelNotFound, RequestFailed
from support.waiting import HUNG_S

LEAST_STEP_S = 2e-4  # of vLLM's steps: no machine is as fast


class Why(enum.IntEnum):
    """vLLM's, of which one is 0."""

    STOP = 0
    LENGTH = 1


class LLM:
    """As much of vLLM's engine as the way out needs: steps that were written down before."""

    def __init__(self, *steps: list[Any], booked: Sequence[str] = (), log: bool = False, trace: bool = False) -> None:
        self._steps, self.log_stats = list(steps), log
        self.passed: list[str] = []  # through vLLM's books
        self.aborted: list[tuple[str, list[str]]] = []
        states = dict.fromkeys(booked, object())
        self.output_processor = SimpleNamespace(
            request_states=states, tracing_enabled=trace, process_outputs=self._process, stream_interval=4
        )
        self.engine_core = SimpleNamespace(
            get_output=lambda: SimpleNamespace(outputs=self._steps.pop(0)),
            abort_requests=lambda names: self.aborted.append(("core", names)),
        )

    def _process(self, outputs: list[Any]) -> Any:
        self.passed += [one.request_id for one in outputs]
        return SimpleNamespace(request_outputs=[f"told of {one.request_id}" for one in outputs])

    def abort_request(self, names: list[str]) -> None:
        self.aborted.append(("books", names))

    def step(self) -> list[str]:
        return ["vLLM's own step"]


def told(name: str, *tokens: int, why: Why | None = None) -> Any:
    return SimpleNamespace(request_id=name, new_token_ids=list(tokens), finish_reason=why)


def way_out(llm: LLM) -> CoreOutputs:
    return CoreOutputs(llm)  # type: ignore[arg-type]


def test_tokens_of_a_quiet_text_are_kept_until_its_end_and_others_are_told_at_once() -> None:
    first = [told("quiet", 1), told("loud", 11), told("booked", 21)]
    second = [told("loud", 12, 13, why=Why.LENGTH), told("quiet", 2, 3, why=Why.STOP), told("booked", 22)]
    llm, kept = LLM(first, second, [told("quiet", 4)], booked=["booked"]), list[int]()
    out = way_out(llm)
    out.keep("quiet", kept)
    assert out.step() == [first[1], "told of booked"]
    assert kept == [1]
    assert out.step() == [second[0], second[1], "told of booked"]
    assert kept == [1, 2, 3]
    assert llm.passed == ["booked", "booked"]
    assert llm.output_processor.stream_interval == 1
    assert len(out.step()) == 1  # of one that has ended: its name is unknown
    assert kept == [1, 2, 3]


@pytest.mark.parametrize(("log", "trace"), [(True, False), (False, True)])
def test_if_vllm_is_to_log_or_to_trace_its_own_step_runs(log: bool, trace: bool) -> None:
    out = way_out(LLM(log=log, trace=trace))
    assert not out.direct
    assert out.step() == ["vLLM's own step"]


def test_whoever_is_given_up_is_given_up_where_it_is_known() -> None:
    llm, kept = LLM([told("quiet", 2)], booked=["booked"]), [1]
    out = way_out(llm)
    out.keep("quiet", kept)
    out.abort(["quiet", "booked", "loud"])
    assert llm.aborted == [("books", ["booked"]), ("core", ["quiet", "loud"])]
    out.step()
    assert kept == [1]
    out.abort(["loud"])
    assert llm.aborted[2:] == [("core", ["loud"])]  # nothing is asked of the books that they do not know


def books(engine: SyncEngine) -> tuple[Any, CoreOutputs]:
    return engine.aio._llm.output_processor, engine.aio.outputs  # type: ignore[attr-defined]


async def together(engine: SyncEngine, asked: dict[str, Sampling], streams: Sequence[str]) -> dict[str, Generation]:
    async def one(name: str, sampling: Sampling) -> Generation:
        prompt = TokenPrompt([5 + len(name), 6, 7])
        if name not in streams:
            return await engine.aio.generate(prompt, sampling, capture=Capture())
        events = [event async for event in engine.aio.stream(prompt, sampling, capture=Capture())]
        assert isinstance(events[-1], EndEvent)
        done = events[-1].generation
        assert [event.token_id for event in events if isinstance(event, TokenEvent)] == done.token_ids
        return done

    found = await asyncio.gather(*(one(name, sampling) for name, sampling in asked.items()))
    return dict(zip(asked, found, strict=True))


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_only_who_asks_for_log_probabilities_is_in_vllms_books_and_all_read_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against an engine that logs, where vLLM keeps books of everybody."""
    folder, plain = saved("llama", "bytes", None, {}), Sampling(max_tokens=12, ignore_eos=True)
    asked = {"quiet": plain.model_copy(update={"max_tokens": 200}), "stream": plain, "one": Sampling(max_tokens=1)}
    asked["asking"] = Sampling(max_tokens=12, ignore_eos=True, logprobs=2)
    asked["stopping"] = Sampling(max_tokens=12, ignore_eos=True, stop=["zzzz"])
    found: list[dict[str, Generation]] = []
    passed: list[list[str]] = []
    for logs in (False, True):
        options: dict[str, object] = {"sites": ("resid_post",), "disable_log_stats": not logs, "stream_interval": 5}
        engine = start_vllm(folder, "llama", options)
        try:
            processor, out = books(engine)
            assert out.direct == (not logs)
            names: list[str] = []
            process = processor.process_outputs

            def note(outputs: list[Any], *rest: Any, process: Any = process, names: Any = names, **more: Any) -> Any:
                names.extend(one.request_id for one in outputs)
                return process(outputs, *rest, **more)

            monkeypatch.setattr(processor, "process_outputs", note)
            done = asyncio.run(asyncio.wait_for(together(engine, asked, ["stream"]), HUNG_S))
            found.append(done)
            passed.append(names)
            assert [one.rows.n for one in done.values()] == [len(one.token_ids) + 2 for one in done.values()]
            assert not processor.request_states
            assert not out._quiet
        finally:
            engine.close()
    short, whole = found
    assert len(set(passed[0])) == 1  # one request, in as many steps as it has tokens
    assert len(passed[0]) == 12
    assert len(set(passed[1])) == len(asked)
    for name, one in short.items():
        other = whole[name]
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert 0 < one.timings.first_token <= one.timings.total
    for done in (short, whole):  # the first of many: 199 steps of vLLM lie behind it, however busy the machine is
        assert done["quiet"].timings.total - done["quiet"].timings.first_token > 199 * LEAST_STEP_S
    assert len(short["asking"].choices[0].logprobs) == 12


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_whoever_vllm_gives_up_is_told_so_and_the_next_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import FinishReason

    engine = start_vllm(saved("llama", "bytes", None, {}), "llama", {"sites": ("resid_post",)})
    core = engine.aio._llm.engine_core  # type: ignore[attr-defined]
    get: Callable[[], Any] = core.get_output

    def broken() -> Any:
        found = get()
        for one in found.outputs:
            one.new_token_ids, one.finish_reason = [], FinishReason.ERROR
        return found

    asked: dict[str, Any] = {"sampling": Sampling(max_tokens=20, ignore_eos=True), "capture": Capture()}
    try:
        wanted = engine.generate(TokenPrompt([5, 6, 7]), **asked)
        for ask in (engine.generate, lambda *prompt, **more: list(engine.stream(*prompt, **more))):
            monkeypatch.setattr(core, "get_output", broken)
            with pytest.raises(RequestFailed, match="gave .* up: error"):
                ask(TokenPrompt([5, 6, 7]), **asked)
            monkeypatch.setattr(core, "get_output", get)
            again = engine.generate(TokenPrompt([5, 6, 7]), **asked)
            assert again.token_ids == wanted.token_ids
            assert again.rows.n == 22
        assert engine.stats()["running"] == 0
    finally:
        engine.close()


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("options", "silent"),
    [({}, True), ({"otlp_traces_endpoint": "http://x"}, False), ({"disable_log_stats": False}, False)],
)
def test_vllm_makes_statistics_if_it_is_to_log_or_to_trace(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], silent: bool
) -> None:
    from vllm.engine import arg_utils

    given: dict[str, Any] = {}

    class Refusing(arg_utils.EngineArgs):
        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)
            raise ValueError("seen enough")

    monkeypatch.setattr(arg_utils, "EngineArgs", Refusing)
    with pytest.raises(ModelNotFound, match="seen enough"):
        start_vllm(saved("llama", "bytes", None, {}), "llama", options)
    assert given["disable_log_stats"] is silent
