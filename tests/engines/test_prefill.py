"""Prompts in pieces on the transformers engine: a long prompt does not stop running streams, and nothing that is asked
of it depends on how it was cut. The oracle is one plain forward over the whole text (`reference.py`)."""

import asyncio
import contextlib
import copy
import functools
import gc
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from engines.test_faults import OTHER, PACK, RULES, once, same
from steerscope.core.rows import RowBuffer
from steerscope.engines.hf import HFEngine
from steerscope.engines.hf.decode_batch import BatchCache
from steerscope.engines.hf.forward_index import Gather
from steerscope.engines.results import Generation, TokenEvent, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Ablate, Add, Cap, Capture, Sampling, Steering
from steerscope.specs.errors import RequestFailed
from steerscope.specs.steering import SITES, Site
from steerscope.specs.watch import Watch
from support import tiny
from support.reference import Reference, RefOp, distance, same_until_tie
from support.waiting import HUNG_S

pytestmark = pytest.mark.filterwarnings("ignore::steerscope.capture.handle.UnfetchedRows")
ARCHITECTURES = ("llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "qwen3_moe", "gpt_oss", "deepseek_v3")
CHUNK = 7
ENDLESS = Sampling(max_tokens=230, ignore_eos=True)
SHORT = Sampling(max_tokens=5, ignore_eos=True)


def start(architecture: str = "llama", **options: Any) -> SyncEngine:
    options = {"prefill_chunk": CHUNK, **options}
    return HFEngine(tiny.model(architecture), tiny.tokenizer(), name=architecture, **options).sync


def random_prompt(rng: np.random.Generator, low: int = 40, high: int = 120) -> TokenPrompt:
    return TokenPrompt(rng.integers(4, 512, size=int(rng.integers(low, high))).tolist())


@contextlib.contextmanager
def widths_of(engine: SyncEngine) -> Iterator[list[int]]:
    """The tokens per row of each forward meanwhile."""
    widths: list[int] = []

    def note(_module: object, _args: tuple, kwargs: dict[str, Any]) -> None:
        if "input_ids" in kwargs:  # not a forward of the reference
            widths.append(kwargs["input_ids"].shape[1])

    hook = engine.aio.model.register_forward_pre_hook(note, with_kwargs=True)  # type: ignore[attr-defined]
    try:
        yield widths
    finally:
        hook.remove()


@contextlib.contextmanager
def beside_a_stream(engine: SyncEngine) -> Iterator[list[int]]:
    """A stream runs meanwhile, the whole time. Yields the widths of all forwards."""
    stream = engine.stream(TokenPrompt([20, 21, 22]), ENDLESS)
    next(stream)
    with widths_of(engine) as widths:
        yield widths
    assert engine.stats()["running"] >= 1, "the stream has ended: nothing was computed in pieces"
    stream.close()  # type: ignore[attr-defined]
    idle(engine)


def idle(engine: SyncEngine) -> None:
    deadline = time.monotonic() + HUNG_S
    while engine.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.005)
    found = engine.stats()
    assert not any(found[name] for name in ("running", "waiting", "slots_in_use")), found


def caches() -> int:
    return sum(isinstance(one, DynamicCache) for one in gc.get_objects())


def ops_at_prompt_positions(rng: np.random.Generator, length: int) -> tuple[Steering, list[RefOp]]:
    """Each op at a random range of the prompt, over the cuts; the same for the reference."""
    ops, wanted = [], []
    for kind, layer in (("add", 0), ("cap", 1), ("ablate", 2)):
        vector = rng.normal(size=64).astype(np.float32)
        first, last = sorted(rng.choice(length, size=2, replace=False).tolist())
        where = f"positions=[{first}:{last}]"
        unit = vector / np.linalg.norm(vector)
        if kind == "add":
            op: Any = Add(vector=vector, scale=1.5, layers=layer, tokens=where)
            coefficients, used = (1.5, 0.0, 0.0, -np.inf, np.inf), vector
        elif kind == "cap":
            op = Cap(vector=vector, min=-0.1, max=0.2, layers=layer, tokens=where)
            coefficients, used = (0.0, 1.0, 1.0, -0.1, 0.2), unit
        else:
            op = Ablate(vector=vector, layers=layer, tokens=where)
            coefficients, used = (0.0, 0.0, 1.0, -np.inf, np.inf), unit
        ops.append(op)
        inside = functools.partial(lambda a, b, position: a <= position < b, first, last)
        wanted.append(RefOp(layer, "resid_post", used, coefficients, inside))
    return Steering.of(*ops), wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_and_ops_of_a_prompt_in_pieces_are_those_of_one_plain_forward(architecture: str) -> None:
    rng = np.random.default_rng(sum(architecture.encode()))
    reference = Reference(tiny.model(architecture))
    chunk = int(rng.integers(3, 20))
    with start(architecture, prefill_chunk=chunk) as engine:
        sites: list[Site] = [site for site in SITES if site not in engine.facts.refused_sites]
        for _ in range(2):
            prompt = random_prompt(rng)
            steering, ops = ops_at_prompt_positions(rng, len(prompt.token_ids))
            with beside_a_stream(engine) as widths:
                done = engine.generate(prompt, SHORT, steer=steering, capture=Capture(sites=sites))
            assert sum(width > 1 for width in widths) >= len(prompt.token_ids) // chunk
            assert max(widths) <= chunk
            _, wanted = reference.run([*done.prompt_token_ids, *done.token_ids[:-1]], ops)
            assert done.rows.labels.position.tolist() == list(range(len(prompt.token_ids) + 4))
            for key, rows in done.rows.items():
                assert distance(rows, wanted[key]) < 1e-4, key
            assert same_until_tie(done.token_ids, *reference.greedy(prompt.token_ids, 5, ops))


class TestOrder:
    def test_one_step_of_the_running_streams_lies_between_two_pieces(self) -> None:
        with start() as engine:
            with beside_a_stream(engine) as widths:
                engine.generate(TokenPrompt(list(range(20, 121))), SHORT)
            pieces = [i for i, width in enumerate(widths) if width > 1]
            assert [widths[i] for i in pieces] == [CHUNK] * 14 + [3]
            assert {b - a for a, b in zip(pieces, pieces[1:], strict=False)} == {2}

    def test_prompts_are_whole_and_together_and_before_any_step_while_nothing_streams(self) -> None:
        rng = np.random.default_rng(0)
        with start() as engine:
            prompts = [random_prompt(rng) for _ in range(9)]
            with widths_of(engine) as widths:
                engine.generate(prompts, SHORT)
            assert widths == [max(len(prompt.token_ids) for prompt in prompts), 1, 1, 1, 1]
            with widths_of(engine) as widths:
                engine.generate([TokenPrompt([30 + i] * 200) for i in range(50)], SHORT)  # 8,192 tokens in a forward
            assert widths == [200, 200, 1, 1, 1, 1]

    def test_short_prompts_that_come_together_share_forwards_of_four_chunks(self) -> None:
        with start() as engine:
            before = engine.stats()["prefills"]
            with beside_a_stream(engine) as widths:
                engine.generate([TokenPrompt([30 + i, 40, 50, 60]) for i in range(10)], SHORT)
            assert [width for width in widths if width > 1] == [4, 4]  # 7 · 4 tokens, and 3 · 4
            assert engine.stats()["prefills"] == before + 3

    def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one(self) -> None:
        with start() as engine:

            async def both() -> list[str]:
                ended: list[str] = []

                async def one(name: str, length: int) -> None:
                    await engine.aio.generate(TokenPrompt([30] * length), Sampling(max_tokens=1))
                    ended.append(name)

                await asyncio.gather(one("long", 200), one("short", 5))
                return ended

            with beside_a_stream(engine) as widths:
                assert asyncio.run(both()) == ["short", "long"]
            assert [width for width in widths if width > 1].index(5) <= 2


def everything(engine: SyncEngine, prompts: list[TokenPrompt]) -> list[Generation]:
    sampled = Sampling(max_tokens=8, temperature=1.0, top_p=0.9, seed=5, logprobs=3, ignore_eos=True)
    greedy = Sampling(max_tokens=8, logprobs=2, ignore_eos=True)
    vector = np.random.default_rng(2).normal(size=64).astype(np.float32)
    return engine.generate(
        prompts,
        [sampled, greedy, sampled, greedy],
        steer=[Add(vector=vector, layers=1, tokens="prompt"), None, None, Cap(vector=vector, max=0.1, layers=2)],
        capture=[Capture(reduce="mean"), Capture(reduce="last"), Capture(before_steering=True), Capture(layers=2)],
        watch=[Watch(pack="p", rules=RULES), Watch(pack="p", tokens="all"), Watch(pack="other", tokens="all"), None],
    )


def test_readings_rules_reductions_and_log_probabilities_do_not_depend_on_the_cuts() -> None:
    rng = np.random.default_rng(7)
    with start() as engine:
        engine.register_pack("p", PACK)
        engine.register_pack("other", OTHER)
        for _ in range(3):
            prompts = [random_prompt(rng, 20, 60) for _ in range(4)]
            whole = everything(engine, prompts)
            before = engine.stats()
            with beside_a_stream(engine) as widths:
                pieces = everything(engine, prompts)
            assert max(widths) <= CHUNK
            after = engine.stats()
            for mine, theirs in zip(pieces, whole, strict=True):
                same(mine, theirs)
                told = [one.choices[0].logprobs for one in (mine, theirs)]
                assert len(told[0]) == len(mine.token_ids)
                for a, b in zip(*told, strict=True):
                    assert [token for token, _ in a.top] == [token for token, _ in b.top]
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert after["rows"] - before["rows"] == sum(
                len(prompt.token_ids) + 7 for prompt in prompts
            )  # reduced ones are counted, too


class TestEnds:
    @staticmethod
    async def _in_the_middle(engine: SyncEngine, prompt: TokenPrompt, **asked: Any) -> tuple[asyncio.Task, list[int]]:
        """A request of which some pieces are computed, not all."""
        with widths_of(engine) as widths:
            task = asyncio.ensure_future(engine.aio.generate(prompt, SHORT, **asked))
            while sum(width > 1 for width in widths) < 3:
                await asyncio.sleep(0.001)
        return task, widths

    def test_a_cancelled_prompt_gives_everything_back_and_keeps_exact_rows_of_what_was_computed(self) -> None:
        rng = np.random.default_rng(3)
        prompt = random_prompt(rng, 200, 210)
        steer = Add(vector=rng.normal(size=64).astype(np.float32), layers=1)
        with start(prefill_chunk=5) as engine, beside_a_stream(engine):

            async def run() -> list[Any]:
                events = engine.aio.stream(prompt, SHORT, steer=steer, capture=Capture(layers=[0]), request_id="long")
                end = asyncio.ensure_future(anext(events))
                with widths_of(engine) as widths:
                    while sum(width > 1 for width in widths) < 4:
                        await asyncio.sleep(0.001)
                assert engine.cancel("long")
                return [await end, *[event async for event in events]]

            (end,) = asyncio.run(run())
            assert end.generation.finish_reason == "cancelled"
            rows = end.generation.rows
            assert engine.stats()["slots_in_use"] == 0
            assert engine.stats()["running"] == 1
        assert 20 <= rows.n < 200
        _, wanted = Reference(tiny.model()).run(prompt.token_ids[: rows.n])
        assert distance(rows[0], wanted[0, "resid_post"]) < 1e-5

    def test_a_caller_that_leaves_gives_everything_back(self) -> None:
        prompt = TokenPrompt([30] * 220)
        with start(prefill_chunk=3) as engine:

            async def run() -> None:
                task, _ = await self._in_the_middle(engine, prompt, capture=Capture())
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            deadline = time.monotonic() + HUNG_S
            with beside_a_stream(engine):
                asyncio.run(run())
                while engine.stats()["running"] > 1 and time.monotonic() < deadline:
                    time.sleep(0.005)
                assert (engine.stats()["running"], engine.stats()["capture_bytes"]) == (1, 0)
            while caches() and time.monotonic() < deadline:
                gc.collect()
            assert not caches(), "keys and values of the prompt are still held"

    def test_closing_ends_a_prompt_in_pieces_as_cancelled(self) -> None:
        engine = start(prefill_chunk=2)
        stream = engine.stream(TokenPrompt([20, 21, 22]), ENDLESS)
        next(stream)

        async def run() -> Generation:
            task, _ = await self._in_the_middle(engine, TokenPrompt([30] * 220))
            await engine.aio.close()
            return await task

        assert asyncio.run(run()).finish_reason == "cancelled"


class TestFaults:
    @pytest.fixture
    def engine(self) -> Iterator[SyncEngine]:
        with start() as made:
            made.register_pack("p", PACK)
            yield made

    ASKED: dict[str, Any] = {
        "steer": Add(vector=np.ones(64, np.float32), layers=0, tokens="prompt"),
        "capture": Capture(),
        "watch": Watch(pack="p", rules=RULES, tokens="all"),
    }
    PROMPT = TokenPrompt(np.random.default_rng(9).integers(4, 512, size=50).tolist())
    OTHER = TokenPrompt([30, 31, 32])

    @pytest.mark.parametrize("reduce", [None, "mean"])
    @pytest.mark.parametrize("where", ["third piece", "join"])
    def test_a_piece_that_fails_runs_that_prompt_again_from_its_first_token(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch, where: str, reduce: Any
    ) -> None:
        asked: dict[str, Any] = self.ASKED | {"capture": Capture(reduce=reduce)}
        wanted, other = (engine.generate(prompt, SHORT, **asked) for prompt in (self.PROMPT, self.OTHER))
        before = engine.stats()
        with beside_a_stream(engine):
            if where == "join":
                once(monkeypatch, BatchCache, "join", lambda *given: given[2] == [50])
            else:
                real, calls = Gather.take, []

                def broken(self: Gather, key: Any, flat: torch.Tensor) -> None:
                    real(self, key, flat)
                    calls.append(key)
                    if len(flat) == CHUNK and calls.count((2, "resid_post")) == 5:
                        calls.append((2, "resid_post"))
                        raise MemoryError("no room")

                monkeypatch.setattr(Gather, "take", broken)
            found = engine.generate([self.PROMPT, self.OTHER], SHORT, **asked)
        same(found[0], wanted)
        same(found[1], other)
        after = engine.stats()
        assert after["failed"] == before["failed"]
        assert after["readings"] - before["readings"] == sum(len(one.readings) for one in found)

    def test_a_prompt_that_fails_again_fails_alone(self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        alone = "".join(e.text for e in engine.stream("Hello", ENDLESS) if isinstance(e, TokenEvent))
        real = Gather.take

        def broken(self: Gather, key: Any, flat: torch.Tensor) -> None:
            if len(flat) == 1:  # the last piece of 50 tokens; the stream captures nothing
                raise MemoryError("no room")
            real(self, key, flat)

        monkeypatch.setattr(Gather, "take", broken)
        stream = engine.stream("Hello", ENDLESS)
        first = next(stream)
        with widths_of(engine) as widths, pytest.raises(RequestFailed, match="no room"):
            engine.generate(self.PROMPT, SHORT, capture=Capture())
        assert widths.count(CHUNK) == 2 * 7  # tried twice, not for ever
        assert isinstance(first, TokenEvent)
        assert first.text + "".join(e.text for e in stream if isinstance(e, TokenEvent)) == alone
        idle(engine)

    def test_rows_that_cannot_be_kept_end_a_prompt_at_that_piece(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        once(monkeypatch, RowBuffer, "write", lambda *_: True)
        with beside_a_stream(engine) as widths, pytest.raises(RequestFailed, match="rows could not be kept: no room"):
            engine.generate(self.PROMPT, SHORT, **self.ASKED)
        assert sum(width > 1 for width in widths) == 1
        same(*(engine.generate(self.PROMPT, SHORT, **self.ASKED) for _ in range(2)))


def test_a_model_that_cannot_continue_a_prompt_exactly_keeps_whole_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One new token is understood, several are not: the past is taken for padding."""
    model = copy.deepcopy(tiny.model())
    real = model.forward

    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache, ids = kwargs.get("past_key_values"), kwargs["input_ids"]
        if cache is not None and ids.shape[1] > 1 and (seen := cache.get_seq_length()):
            mask = torch.ones(len(ids), seen + ids.shape[1], dtype=torch.bool)
            mask[:, :seen] = False
            kwargs["attention_mask"] = mask
        return real(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="steerscope"):
        engine = HFEngine(model, tiny.tokenizer(), name="forgetful", prefill_chunk=CHUNK).sync
    assert "computes prompts whole, which stops streams meanwhile: a prompt in pieces differs" in caplog.text
    prompt = TokenPrompt(list(range(30, 90)))
    with engine, beside_a_stream(engine) as widths:
        done = engine.generate(prompt, SHORT, capture=Capture())
    assert [width for width in widths if width > 1] == [60]
    _, wanted = Reference(tiny.model()).run([*done.prompt_token_ids, *done.token_ids[:-1]])
    assert all(distance(rows, wanted[key]) < 1e-4 for key, rows in done.rows.items())


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_without_tokens_is_refused(chunk: int) -> None:
    from steerscope.specs import InvalidRequest

    with pytest.raises(InvalidRequest, match="prefill_chunk"):
        start(prefill_chunk=chunk)
