"""What every engine promises, told as a user would see it. Runs on each engine of the conftest."""

import asyncio
import contextlib
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from engines.conftest import Start
from steerscope.capture.handle import UnfetchedRows, fetch_all
from steerscope.capture.rows import Rows
from steerscope.engines import api
from steerscope.engines.results import EndEvent, Generation, Timings, TokenEvent, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Ablate, Add, Cap, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.errors import CapacityExceeded, CaptureClosed, EngineClosed, RequestFailed
from steerscope.vectors import SteeringVector
from support import tiny
from support.reference import Reference, distance, same_until_tie
from support.waiting import HUNG_S

PROMPT = "The quick brown fox jumps over"
SHORT = Sampling(max_tokens=8, ignore_eos=True)
RNG = np.random.default_rng(11)
VECTOR = RNG.normal(size=64).astype(np.float32)


def mixed_requests(count: int) -> tuple[list[str], list[Sampling], list[Steering], list[Capture | None]]:
    """Requests that differ in everything."""
    rng = np.random.default_rng(5)
    words = tiny.TEXT.split()
    prompts, samplings, steers, captures = [], [], [], []
    for i in range(count):
        start = int(rng.integers(0, len(words) - 12))
        prompts.append(" ".join(words[start : start + int(rng.integers(1, 12))]))
        temperature = float(rng.choice([0.0, 0.7, 1.3]))
        most = int(rng.integers(1, 14))
        samplings.append(Sampling(max_tokens=most, temperature=temperature, seed=i, ignore_eos=True))
        vector = rng.normal(size=64).astype(np.float32)
        layer, tokens = int(rng.integers(0, 4)), str(rng.choice(["all", "prompt", "last_prompt", "positions=[0]"]))
        op = [
            Add(vector=vector, scale=float(rng.normal()), layers=layer, tokens=tokens),
            Cap(vector=vector, min=-0.3, max=0.3, layers="all", tokens=tokens),
            Ablate(vector=vector, layers=layer, site="attn_out", tokens=tokens),
        ][i % 3]
        steers.append(Steering() if i % 4 == 0 else Steering.of(op, Add(vector=vector, layers=1, scale=0.5)))
        captures.append([None, Capture(), Capture(layers=layer, tokens="prompt"), Capture(reduce="mean")][i % 4])
    return prompts, samplings, steers, captures


class TestResults:
    def test_one_prompt_gives_one_generation_and_a_list_gives_as_many(self, engine: SyncEngine) -> None:
        one, many = engine.generate(PROMPT, SHORT), engine.generate([PROMPT], SHORT)
        assert isinstance(one, Generation)
        assert [type(x) for x in many] == [Generation]
        assert one.text == many[0].text
        assert engine.generate([], SHORT) == []

    def test_greedy_text_equals_the_reference_and_ids_and_text_agree(self, engine: SyncEngine) -> None:
        done = engine.generate(PROMPT, SHORT)
        wanted, gaps = Reference(tiny.model()).greedy(done.prompt_token_ids, 8)
        assert same_until_tie(done.token_ids, wanted, gaps)
        assert done.text == tiny.tokenizer().decode(done.token_ids, skip_special_tokens=True)
        assert done.finish_reason == "length"
        assert 0 <= done.timings.queued <= done.timings.first_token <= done.timings.total

    def test_token_prompts_give_the_same_as_their_text(self, engine: SyncEngine) -> None:
        ids = tiny.tokenizer()(PROMPT)["input_ids"]
        assert engine.generate(TokenPrompt(ids), SHORT).token_ids == engine.generate(PROMPT, SHORT).token_ids

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_log_probabilities_are_the_models_own_and_the_best_come_first(
        self, engine: SyncEngine, temperature: float
    ) -> None:
        asked = Sampling(
            max_tokens=5, ignore_eos=True, temperature=temperature, seed=3, logprobs=4, repetition_penalty=1.3
        )
        done, quiet = engine.generate(PROMPT, asked), asked.model_copy(update={"logprobs": None})
        found = done.choices[0].logprobs
        assert [one.token_id for one in found] == done.token_ids
        with torch.no_grad():
            logits = tiny.model()(torch.tensor([done.prompt_token_ids + done.token_ids])).logits[0]
        wanted = torch.log_softmax(logits[len(done.prompt_token_ids) - 1 : -1].float(), -1)
        for one, row in zip(found, wanted, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-3)
            assert [value for _, value in one.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
            assert [value for _, value in one.top] == pytest.approx([float(row[i]) for i, _ in one.top], abs=1e-3)
        streamed = [event.logprobs for event in engine.stream(PROMPT, asked) if isinstance(event, TokenEvent)]
        assert streamed == list(found)
        assert engine.generate(PROMPT, quiet).token_ids == done.token_ids
        assert engine.generate(PROMPT, quiet).choices[0].logprobs == ()
        assert engine.generate(PROMPT, asked.model_copy(update={"logprobs": 0})).choices[0].logprobs[0].top == ()

    @pytest.mark.parametrize("asked", [{"frequency_penalty": 1.5}, {"presence_penalty": -2.0}])
    def test_penalties_are_subtracted_for_generated_tokens_only(
        self, engine: SyncEngine, asked: dict[str, float]
    ) -> None:
        done = engine.generate(PROMPT, Sampling.parse({"max_tokens": 12, "ignore_eos": True, **asked}))
        seen: list[int] = []
        for at, token in enumerate(done.token_ids):
            with torch.no_grad():
                logits = tiny.model()(torch.tensor([done.prompt_token_ids + seen])).logits[0, -1]
            for one in set(seen):
                logits[one] -= asked.get("presence_penalty", 0.0) + asked.get("frequency_penalty", 0.0) * seen.count(
                    one
                )
            best = logits.topk(2)
            if best.values[0] - best.values[1] > 1e-3:
                assert token == int(best.indices[0]), f"token {at}"
            seen.append(token)

    def test_n_choices_have_their_own_seeds_texts_and_rows(self, engine: SyncEngine) -> None:
        sampling = Sampling(max_tokens=6, temperature=1.5, seed=40, n=3, ignore_eos=True)
        done = engine.generate(PROMPT, sampling, capture=Capture(layers=2))
        assert [c.index for c in done.choices] == [0, 1, 2]
        assert [c.seed for c in done.choices] == [40, 41, 42]
        assert len({tuple(c.token_ids) for c in done.choices}) == 3
        for choice in done.choices:
            assert choice.capture is not None
            rows = choice.capture.fetch()
            fed = [*done.prompt_token_ids, *choice.token_ids[:-1]]
            assert distance(rows[2], Reference(tiny.model()).run(fed)[1][2, "resid_post"]) < 1e-5
            alone = engine.generate(PROMPT, sampling.model_copy(update={"n": 1, "seed": choice.seed}))
            assert alone.token_ids == choice.token_ids

    def test_the_generation_says_which_tokens_were_steered(self, engine: SyncEngine) -> None:
        done = engine.generate(PROMPT, SHORT, steer=Add(vector=VECTOR, layers="1-2", tokens="positions=[1:3]"))
        assert done.steered[0].layers == (1, 2)
        assert done.steered[0].positions.intervals == ((1, 3),)


class TestMixedBatches:
    def test_sixteen_different_requests_in_one_batch_equal_the_same_requests_alone(self, start: Start) -> None:
        engine, alone = start(), start(max_batch=1)
        prompts, samplings, steers, captures = mixed_requests(16)
        together = engine.generate(prompts, samplings, steer=steers, capture=captures)
        for i, done in enumerate(together):
            single = alone.generate(prompts[i], samplings[i], steer=steers[i], capture=captures[i])
            assert single.token_ids == done.token_ids, i
            if captures[i] is None:
                assert done.capture is None
                continue
            assert done.rows.n == single.rows.n
            for key, rows in done.rows.items():
                assert distance(rows, single.rows[key]) < 1e-4, (i, key)

    def test_prompts_that_ask_alike_are_answered_as_each_alone(self, engine: SyncEngine) -> None:
        """They are planned once, as far as they are alike: not where a length or a chat decides what is asked."""
        vector = np.random.default_rng(3).standard_normal(engine.facts.hidden).astype(np.float32)
        prompts = [TokenPrompt(ids) for ids in ([5, 6, 7, 8], [9, 10, 11, 12], [5, 6, 7, 8, 9], [12, 11, 10, 9])]
        asked: Any = {"steer": Add(vector=vector, scale=2.0, layers=1, tokens="last_prompt")}
        asked["capture"] = Capture(layers="all", tokens="positions=[-2, -1]")
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        for prompt, done in zip(prompts, engine.generate(prompts, sampling, **asked), strict=True):
            single = engine.generate(prompt, sampling, **asked)
            done.prompt_token_ids.clear()  # of a copy
            assert done.prompt_token_ids == list(prompt.token_ids)
            assert done.token_ids == single.token_ids
            assert [label.position for label in done.rows.labels] == [
                len(prompt.token_ids) - 2,
                len(prompt.token_ids) - 1,
            ]
            assert [op.positions for op in done.steered] == [op.positions for op in single.steered]
            for key, rows in done.rows.items():
                assert distance(rows, single.rows[key]) < 1e-4
        beyond = TokenPrompt([5, 6, 7, engine.facts.vocab])
        with pytest.raises(InvalidRequest, match=r"prompts\[1\].*does not exist"):
            engine.generate([prompts[0], beyond], sampling, **asked)

    def test_requests_join_a_running_batch_and_nobody_notices(self, start: Start) -> None:
        engine = start()
        prompts, samplings, steers, captures = mixed_requests(12)
        long = [s.model_copy(update={"max_tokens": 12 + 5 * i}) for i, s in enumerate(samplings)]

        async def staggered() -> list[Generation]:
            async def one(i: int) -> Generation:
                await asyncio.sleep(0.004 * i)
                return await engine.aio.generate(prompts[i], long[i], steer=steers[i], capture=captures[i])

            return await asyncio.gather(*(one(i) for i in range(12)))

        for i, done in enumerate(asyncio.run(staggered())):
            single = engine.generate(prompts[i], long[i], steer=steers[i], capture=captures[i])
            assert single.token_ids == done.token_ids
            if captures[i] is not None:
                assert all(distance(rows, single.rows[key]) < 1e-4 for key, rows in done.rows.items())

    def test_more_requests_than_the_batch_holds_wait_and_all_finish(self, start: Start) -> None:
        engine = start(max_batch=3)
        done = engine.generate([f"{PROMPT} {i}" for i in range(10)], SHORT, capture=Capture(layers=0))
        assert [len(d.token_ids) for d in done] == [8] * 10
        assert all(d.rows.n == len(d.prompt_token_ids) + 7 for d in done)

    def test_an_unsteered_request_beside_a_steered_one_is_untouched(self, engine: SyncEngine) -> None:
        plain = engine.generate(PROMPT, SHORT, capture=Capture())
        steer = [None, Add(vector=VECTOR, scale=9, layers="all"), None]
        beside = engine.generate([PROMPT] * 3, SHORT, steer=steer, capture=Capture())
        assert beside[0].token_ids == beside[2].token_ids == plain.token_ids
        assert distance(beside[0].rows[3], plain.rows[3]) < 1e-5
        assert distance(beside[1].rows[3], plain.rows[3]) > 0.1

    def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(self, engine: SyncEngine) -> None:
        seeded = Sampling(max_tokens=10, temperature=1.0, top_p=0.9, seed=123, ignore_eos=True)
        alone = engine.generate(PROMPT, seeded)
        crowd = engine.generate(["x", PROMPT, "Hello world how are you"], [None, seeded, SHORT])
        other = engine.generate(PROMPT, seeded.model_copy(update={"seed": 124}))
        assert crowd[1].text == alone.text
        assert other.token_ids != alone.token_ids

    def test_many_threads_may_use_one_engine(self, engine: SyncEngine) -> None:
        wanted = [engine.generate(f"{i} {PROMPT}", SHORT).text for i in range(6)]
        found: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: engine.generate(f"{i} {PROMPT}", SHORT).text}))
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(6)] == wanted


class TestSteering:
    def test_scale_zero_gives_byte_identical_text(self, engine: SyncEngine) -> None:
        nothing = Add(vector=VECTOR, scale=0.0, layers="all")
        zero = Steering.of(nothing, Ablate(vector=VECTOR, scale=1.0, layers=2))
        for sampling in (SHORT, Sampling(max_tokens=12, temperature=1.2, seed=3, ignore_eos=True)):
            plain = engine.generate(PROMPT, sampling)
            assert engine.generate(PROMPT, sampling, steer=nothing).text == plain.text
            assert engine.generate(PROMPT, sampling, steer=zero).text == plain.text

    def test_one_spec_per_prompt_in_one_call(self, engine: SyncEngine) -> None:
        ops = [Add(vector=VECTOR, scale=s, layers=2) for s in (-8.0, 0.0, 8.0)]
        rows = [d.rows[2] for d in engine.generate([PROMPT] * 3, SHORT, steer=ops, capture=Capture(tokens="prompt"))]
        direction = torch.from_numpy(VECTOR)
        assert torch.allclose(rows[2] - rows[1], (8 * direction).expand_as(rows[1]), atol=1e-4)
        assert torch.allclose(rows[0] - rows[1], (-8 * direction).expand_as(rows[1]), atol=1e-4)

    def test_default_then_outer_then_inner_then_request(self, engine: SyncEngine) -> None:
        """Caps do not commute: the order is visible in the result."""
        v = np.eye(1, 64, 0, dtype=np.float32)[0]

        def at(value: float) -> Ablate:
            return Ablate(vector=v, to=value, layers=1)

        def seen(steer: Steering | Ablate | None = None) -> float:
            rows = engine.generate("Hello", Sampling(max_tokens=1), steer=steer, capture=Capture(layers=1)).rows
            return round(float(rows[1][-1, 0]), 4)

        natural = seen()
        engine.default_steering = at(1.0)
        assert seen() == 1.0
        with engine.steering(at(2.0)):
            assert seen() == 2.0
            with engine.steering(at(3.0)):
                assert seen() == 3.0
                assert seen(at(4.0)) == 4.0
                assert seen(Steering.none()) == natural
            assert seen() == 2.0
        assert seen() == 1.0
        engine.default_steering = None
        assert seen() == natural

    def test_a_steering_block_reaches_only_its_own_task(self, engine: SyncEngine) -> None:
        async def run() -> tuple[str, str]:
            async def inside() -> str:
                with engine.aio.steering(Add(vector=VECTOR, scale=30, layers="all")):
                    await asyncio.sleep(0.02)
                    return (await engine.aio.generate(PROMPT, SHORT)).text

            async def outside() -> str:
                await asyncio.sleep(0.01)
                return (await engine.aio.generate(PROMPT, SHORT)).text

            a, b = await asyncio.gather(inside(), outside())
            return a, b

        steered, plain = asyncio.run(run())
        assert plain == engine.generate(PROMPT, SHORT).text
        assert steered != plain

    def test_named_vectors_are_hot_swapped_for_later_requests(self, engine: SyncEngine) -> None:
        op = Add(vector="mood", scale=1.0, layers=1)
        with pytest.raises(InvalidRequest, match="mood"):
            engine.generate(PROMPT, SHORT, steer=op)
        rows = {}
        for name, factor in (("first", 4.0), ("second", -4.0)):
            engine.register("mood", SteeringVector.shared(factor * torch.from_numpy(VECTOR)))
            rows[name] = engine.generate(PROMPT, SHORT, steer=op, capture=Capture(tokens="prompt")).rows[1]
        moved = rows["first"] - rows["second"]
        assert torch.allclose(moved, 8 * torch.from_numpy(VECTOR).expand_as(moved), atol=1e-4)

    def test_steering_slots_are_given_back(self, start: Start) -> None:
        engine = start(slots=3)
        for i in range(12):
            engine.generate(PROMPT, Sampling(max_tokens=2), steer=Add(vector=VECTOR + i, layers=1))
        # More different vectors at once than there are slots: they take turns.
        many = engine.generate([PROMPT] * 6, SHORT, steer=[Add(vector=VECTOR * i, layers=1) for i in range(1, 7)])
        assert len({tuple(d.token_ids) for d in many}) > 1
        assert engine.stats()["slots_in_use"] == 0

    def test_an_overflowing_steering_fails_alone_and_leaves_no_trace(self, engine: SyncEngine) -> None:
        plain = engine.generate([PROMPT, "Hello there"], SHORT)
        steer = [None, Add(vector=VECTOR, scale=3e38, layers="all"), None]
        with pytest.raises(RequestFailed, match="not finite") as failure:
            engine.generate([PROMPT, PROMPT, "Hello there"], SHORT, steer=steer)
        others = failure.value.completed
        assert [d.text if d else None for d in others] == [plain[0].text, None, plain[1].text]
        again = engine.generate([PROMPT, "Hello there", "x"], SHORT)  # in the cache rows the failed one used
        assert [d.text for d in again[:2]] == [d.text for d in plain]


class TestStopping:
    def test_every_eos_of_the_generation_config_stops(self, start: Start) -> None:
        engine = start()
        free = engine.generate(PROMPT, SHORT).token_ids
        for end in (free[2], free[4]):
            done = start(eos=[511, end]).generate(PROMPT, Sampling(max_tokens=8), capture=Capture(layers=1))
            at = free.index(end)
            assert done.finish_reason == "stop"
            assert done.token_ids == free[: at + 1]
            assert done.rows.n == len(done.prompt_token_ids) + at

    def test_a_stop_string_is_found_across_tokens_and_cut_from_the_text(self, engine: SyncEngine) -> None:
        free = engine.generate(PROMPT, Sampling(max_tokens=24, ignore_eos=True))
        middle = len(free.text) // 2
        stop = free.text[middle : middle + 5]
        sampling = Sampling(max_tokens=24, ignore_eos=True, stop=("never seen", stop))
        done = engine.generate(PROMPT, sampling, capture=Capture(layers=0))
        assert done.finish_reason == "stop_string"
        assert done.stop_string == stop
        assert done.text == free.text[: free.text.find(stop)]
        assert done.token_ids == free.token_ids[: len(done.token_ids)]
        assert done.rows.n == len(done.prompt_token_ids) + len(done.token_ids) - 1
        pieces = [e.text for e in engine.stream(PROMPT, sampling) if isinstance(e, TokenEvent)]
        assert "".join(pieces) == done.text

    def test_max_tokens_one_gives_the_prompts_rows_only(self, engine: SyncEngine) -> None:
        done = engine.generate(PROMPT, Sampling(max_tokens=1), capture=Capture(layers=3))
        assert done.rows.n == len(done.prompt_token_ids)


class TestStreams:
    @pytest.mark.parametrize("kind", ["bytes", "metaspace"])
    def test_streamed_pieces_concatenate_to_the_text_and_end_with_one_end_event(self, start: Start, kind: str) -> None:
        engine = start(tokenizer=kind)
        for seed in range(4):
            sampling = Sampling(max_tokens=40, temperature=2.0, seed=seed, ignore_eos=True)
            events = list(engine.stream(PROMPT, sampling))
            tokens, end = events[:-1], events[-1]
            assert isinstance(end, EndEvent)
            assert all(isinstance(e, TokenEvent) for e in tokens)
            assert [e.token_id for e in tokens if isinstance(e, TokenEvent)] == end.generation.token_ids
            assert "".join(e.text for e in tokens if isinstance(e, TokenEvent)) == end.generation.text
            decoded = tiny.tokenizer(kind).decode(
                end.generation.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            assert end.generation.text == decoded == engine.generate(PROMPT, sampling).text

    def test_streams_of_several_choices_interleave_and_each_is_whole(self, engine: SyncEngine) -> None:
        sampling = Sampling(max_tokens=6, temperature=1.0, seed=1, n=2, ignore_eos=True)
        events = list(engine.stream(PROMPT, sampling))
        end = events[-1]
        assert isinstance(end, EndEvent)
        for choice in end.generation.choices:
            mine = [e for e in events if isinstance(e, TokenEvent) and e.choice == choice.index]
            assert [e.index for e in mine] == list(range(6))
            assert "".join(e.text for e in mine) == choice.text

    def test_leaving_a_stream_cancels_the_request(self, engine: SyncEngine) -> None:
        before = engine.stats()["tokens"]
        for event in engine.stream(PROMPT, Sampling(max_tokens=240, ignore_eos=True)):
            assert isinstance(event, TokenEvent)
            if event.index == 3:
                break
        deadline = time.monotonic() + HUNG_S
        while engine.stats()["running"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats()["running"] == 0
        assert engine.stats()["tokens"] - before < 200

    def test_rows_that_came_before_a_client_left_its_stream_are_given_back_without_a_warning(
        self, engine: SyncEngine, recwarn: pytest.WarningsRecorder
    ) -> None:
        async def run() -> None:
            events = engine.aio.stream(PROMPT, SHORT, capture=Capture())
            await anext(events)
            while engine.stats()["running"]:  # then all the rest has come, its end too, and is taken at once
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert isinstance(await anext(events), TokenEvent)
            await events.aclose()

        asyncio.run(run())
        gc.collect()
        assert engine.stats()["capture_bytes"] == 0
        assert not [one for one in recwarn if one.category is UnfetchedRows]

    def test_a_cancelled_request_ends_with_what_it_has(self, engine: SyncEngine) -> None:
        events = []
        sampling = Sampling(max_tokens=240, ignore_eos=True)
        for event in engine.stream(PROMPT, sampling, capture=Capture(layers=1), request_id="mine"):
            events.append(event)
            if len(events) == 4:
                assert engine.cancel("mine")
        end = events[-1]
        assert isinstance(end, EndEvent)
        done = end.generation
        assert done.finish_reason == "cancelled"
        assert 4 <= len(done.token_ids) < 240
        assert done.rows.n == len(done.prompt_token_ids) + len(done.token_ids) - 1
        assert not engine.cancel("mine")

    def test_so_does_one_that_nobody_was_listening_to(self, engine: SyncEngine) -> None:
        found: list[Generation] = []
        sampling, before = Sampling(max_tokens=240, ignore_eos=True), engine.stats()["steps"]

        def ask() -> None:
            found.append(engine.generate(PROMPT, sampling, capture=Capture(layers=1)))

        thread = threading.Thread(target=ask)
        thread.start()
        while engine.stats()["steps"] < before + 6:
            time.sleep(0.005)
        for name in list(engine.aio._jobs):
            engine.cancel(name)
        thread.join(timeout=HUNG_S)
        (done,) = found
        assert done.finish_reason == "cancelled"
        assert 4 <= len(done.token_ids) < 240
        assert done.rows.n == len(done.prompt_token_ids) + len(done.token_ids) - 1
        assert done.timings.first_token < done.timings.total
        assert done.token_ids == engine.generate(PROMPT, sampling).token_ids[: len(done.token_ids)]

    def test_a_cancelled_task_frees_the_engine(self, engine: SyncEngine) -> None:
        async def run() -> None:
            long = Sampling(max_tokens=240, ignore_eos=True)
            task = asyncio.create_task(engine.aio.generate(PROMPT, long, capture=Capture()))
            await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            until = time.monotonic() + HUNG_S
            while engine.stats()["running"] or engine.stats()["capture_bytes"]:
                assert time.monotonic() < until, engine.stats()
                await asyncio.sleep(0.01)

        asyncio.run(run())
        assert len(engine.generate(PROMPT, SHORT).token_ids) == 8


class TestCapture:
    def test_selected_tokens_only_and_labels_say_which(self, engine: SyncEngine) -> None:
        whole = engine.generate(PROMPT, SHORT, capture=Capture(layers=2))
        p = len(whole.prompt_token_ids)
        for tokens, wanted in {
            "prompt": range(p),
            "generated": range(p, p + 7),
            "last_prompt": [p - 1],
            "positions=[0, 2, -1]": [0, 2, p - 1],
            "!positions=[1:-1]": [0, *range(p - 1, p + 7)],
        }.items():
            rows = engine.generate(PROMPT, SHORT, capture=Capture(layers=2, tokens=tokens)).rows
            assert list(rows.labels.position) == list(wanted)
            assert distance(rows[2], whole.rows[2][list(wanted)]) < 1e-5
            assert [label.phase for label in rows.labels] == ["prompt" if i < p else "generated" for i in wanted]

    def test_reductions_equal_the_rows_they_stand_for_and_carry_their_number(self, engine: SyncEngine) -> None:
        for tokens in ("all", "generated", "prompt & !positions=[0]"):
            rows = engine.generate(PROMPT, SHORT, capture=Capture(tokens=tokens)).rows
            mean = engine.generate(PROMPT, SHORT, capture=Capture(tokens=tokens, reduce="mean")).rows
            last = engine.generate(PROMPT, SHORT, capture=Capture(tokens=tokens, reduce="last")).rows
            assert mean.n == last.n == rows.n
            for layer in range(4):
                assert mean[layer].dtype == torch.float32
                assert distance(mean[layer], rows[layer].mean(0)) < 1e-5
                assert distance(last[layer], rows[layer][-1]) < 1e-5

    def test_fetch_all_gives_the_rows_of_every_handle(self, engine: SyncEngine) -> None:
        done = engine.generate([PROMPT, "Hello"], SHORT, capture=Capture(layers=1))
        handles = [d.capture for d in done if d.capture is not None]
        assert [rows.n for rows in engine.fetch_all(handles)] == [d.rows.n for d in done]

    def test_rows_that_were_copied_are_the_callers_and_the_engine_has_its_room_again(self, engine: SyncEngine) -> None:
        done = engine.generate([PROMPT, "Hello"], SHORT, capture=Capture())
        handles = [d.capture for d in done if d.capture is not None]
        whole = [{key: tensor.clone() for key, tensor in d.rows.items()} for d in done]
        assert engine.stats()["capture_bytes"]
        room = torch.zeros(1 << 20, dtype=torch.uint8)
        for found in (engine.fetch_all(handles, copy=True), engine.fetch_all(handles, copy=True, room=room)):
            assert engine.stats()["capture_bytes"] == 0
            for other in engine.generate(["Others have", "that memory now"], SHORT, capture=Capture()):
                assert other.capture is not None
                with other.capture:
                    assert other.rows.n
            for copies, rows in zip(found, whole, strict=True):
                assert all(torch.equal(copies[key], rows[key]) for key in rows)

    def test_rows_are_copied_for_who_awaits_them_without_holding_up_the_loop(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads: list[int] = []

        def fetch(*given: object) -> list[Rows]:
            threads.append(threading.get_ident())
            return fetch_all(*given)  # type: ignore[arg-type]

        async def run() -> list[Rows]:
            done = await engine.aio.generate(PROMPT, SHORT, capture=Capture(layers=1))
            assert done.capture is not None
            return await engine.aio.fetch_all([done.capture], copy=True)

        monkeypatch.setattr(api, "fetch_all", fetch)
        (rows,) = asyncio.run(run())
        assert threading.get_ident() not in threads
        assert len(threads) == 1
        assert torch.equal(rows[1], engine.generate(PROMPT, SHORT, capture=Capture(layers=1)).rows[1])

    def test_capturing_some_layers_costs_some_layers(self, engine: SyncEngine) -> None:
        sizes = []
        for layers in ("0", "all"):
            done = engine.generate(PROMPT, SHORT, capture=Capture(layers=layers))
            sizes.append(engine.stats()["capture_bytes"])
            assert done.capture is not None
            done.capture.close()
        assert sizes[1] == 4 * sizes[0] == 4 * done.prompt_token_ids.__len__() * 64 * 4 + 4 * 7 * 64 * 4
        assert engine.stats()["capture_bytes"] == 0

    def test_a_capture_that_can_never_fit_is_refused_with_the_remedy(self, start: Start) -> None:
        engine = start(capture_budget=10_000)
        with pytest.raises(CapacityExceeded, match="capture_budget"):
            engine.generate(PROMPT, SHORT, capture=Capture())
        assert len(engine.generate(PROMPT, SHORT).token_ids) == 8

    def test_a_capture_waits_for_room_and_is_refused_when_none_comes(self, start: Start) -> None:
        engine = start(capture_budget=20_000, capture_wait=0.3)
        first = engine.generate(PROMPT, SHORT, capture=Capture())
        with pytest.raises(CapacityExceeded, match="close handles"):
            engine.generate(PROMPT, SHORT, capture=Capture())
        assert first.capture is not None
        engine.aio.budget.wait_s = HUNG_S
        threading.Timer(0.1, first.capture.close).start()
        assert engine.generate(PROMPT, SHORT, capture=Capture()).rows.n > 0

    def test_unfetched_rows_expire_even_when_nobody_asks_for_anything(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("steerscope.engines.engine_thread.SWEEP_S", 0.02)
        engine = start(capture_ttl=0.05)
        first = engine.generate(PROMPT, SHORT, capture=Capture())
        deadline = time.monotonic() + HUNG_S
        while engine.stats()["capture_bytes"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats()["capture_bytes"] == 0
        with pytest.raises(CaptureClosed, match="capture_ttl"):
            _ = first.rows

    def test_unfetched_rows_expire_and_say_so(self, start: Start) -> None:
        engine = start(capture_budget=20_000, capture_ttl=0.05, capture_wait=HUNG_S)
        first = engine.generate(PROMPT, SHORT, capture=Capture())
        time.sleep(0.1)
        engine.aio.capture_ttl = HUNG_S
        second = engine.generate(PROMPT, SHORT, capture=Capture())
        assert second.rows.n > 0
        with pytest.raises(CaptureClosed, match="capture_ttl"):
            _ = first.rows


class TestChat:
    MESSAGES = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "How was your week?"},
    ]

    def test_a_chat_answers_its_rendered_prompt(self, engine: SyncEngine) -> None:
        done = engine.chat(self.MESSAGES, SHORT)
        text = tiny.tokenizer().decode(done.prompt_token_ids)
        assert text.endswith("<|im_start|>assistant\n")
        assert done.token_ids == engine.generate(TokenPrompt(done.prompt_token_ids), SHORT).token_ids
        both = engine.chat([self.MESSAGES, self.MESSAGES[1:]], SHORT)
        assert both[0].token_ids == done.token_ids

    def test_an_open_message_is_continued(self, engine: SyncEngine) -> None:
        messages = [*self.MESSAGES, {"role": "assistant", "content": "It was a wonderful"}]
        done = engine.chat(messages, SHORT, continue_final_message=True, capture=Capture(layers=0))
        text = tiny.tokenizer().decode(done.prompt_token_ids)
        assert text.endswith("<|im_start|>assistant\nIt was a wonderful")
        assert {label.role for label in done.rows.labels if label.phase == "generated"} == {"assistant"}
        assert done.capture is not None
        assert set(done.capture.message(2).labels.generated) == {False, True}
        with pytest.raises(InvalidRequest, match="assistant"):
            engine.chat(self.MESSAGES, SHORT, continue_final_message=True)

    def test_rows_by_message_and_selectors_by_role_mean_the_same_tokens(self, engine: SyncEngine) -> None:
        tokenizer = tiny.tokenizer()
        with engine.chat(self.MESSAGES, SHORT, capture=Capture(layers=1)).capture as handle:  # type: ignore[union-attr]
            for i, message in enumerate(self.MESSAGES):
                rows = handle.message(i)
                assert tokenizer.decode(list(rows.labels.token_id)) == message["content"]
                capture = Capture(layers=1, tokens=f"role={message['role']}")
                role = engine.chat(self.MESSAGES, SHORT, capture=capture).rows
                assert list(role.labels.position) == list(rows.labels.position)
                assert distance(role[1], rows[1]) < 1e-5
            answer = handle.message(2)
            assert set(answer.labels.generated) == {True}
            assert answer.n == 7
        whole = engine.chat(self.MESSAGES, SHORT, capture=Capture(layers=1, tokens="role=user+template")).rows
        assert tokenizer.decode(list(whole.labels.token_id)) == "<|im_start|>user\nHow was your week?<|im_end|>\n"

    def test_steering_one_role_changes_no_row_before_it(self, engine: SyncEngine) -> None:
        plain = engine.chat(self.MESSAGES, SHORT, capture=Capture(layers=2)).rows
        op = Add(vector=VECTOR, scale=5, layers=2, tokens="role=user")
        steered = engine.chat(self.MESSAGES, SHORT, steer=op, capture=Capture(layers=2)).rows
        user = plain.labels.message == 1
        prompt = ~plain.labels.generated
        gained = (steered[2] - plain[2])[torch.from_numpy(user & prompt)]
        assert torch.allclose(gained, 5 * torch.from_numpy(VECTOR).expand_as(gained), atol=1e-4)
        others = torch.from_numpy(~user & prompt)
        assert distance(steered[2][others], plain[2][others]) < 1e-5

    def test_a_role_selector_without_messages_is_refused(self, engine: SyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="chat"):
            engine.generate(PROMPT, SHORT, capture=Capture(tokens="role=user"))


class TestRefusals:
    def test_all_problems_of_all_prompts_come_together(self, engine: SyncEngine) -> None:
        with pytest.raises(InvalidRequest) as error:
            engine.generate(
                ["", PROMPT],
                Sampling(max_tokens=500),
                steer=[None, Steering.of(Add(vector=VECTOR[:10], layers=1), Add(vector=VECTOR, layers="3-5"))],
                capture=[Capture(layers=9), None],
            )
        fields = [problem.field for problem in error.value.problems]
        assert fields == [
            "prompts[0].prompt",
            "prompts[0].sampling.max_tokens",
            "prompts[0].capture.layers",
            "prompts[1].sampling.max_tokens",
            "prompts[1].steer.ops[0].vector",
            "prompts[1].steer.ops[1].layers",
        ]
        assert "llama has layers 0–3" in str(error.value)

    def test_a_prompt_longer_than_the_context_is_refused(self, engine: SyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="the context of llama holds 256"):
            engine.generate("word " * 400, SHORT)

    def test_text_that_is_not_unicode_is_refused(self, engine: SyncEngine) -> None:
        for call in (
            lambda: engine.generate("caf\udce9", SHORT),
            lambda: engine.chat([{"role": "user", "content": "\udc80"}], SHORT),
        ):
            with pytest.raises(InvalidRequest, match="not valid Unicode"):
                call()

    def test_an_option_nobody_knows_is_refused(self, engine: SyncEngine) -> None:
        for call in (engine.generate, engine.stream):
            with pytest.raises(TypeError, match="stear"):
                call(PROMPT, SHORT, stear=None)  # type: ignore[call-overload,call-arg]
        with pytest.raises(TypeError, match="stear"):
            engine.chat([{"role": "user", "content": "Hi"}], SHORT, stear=None)  # type: ignore[call-overload]

    def test_a_list_of_specs_must_match_the_prompts(self, engine: SyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="2 specs for 3 prompts"):
            engine.generate(["a", "b", "c"], steer=[None, None])
        with pytest.raises(InvalidRequest, match="Steering"):
            engine.generate("a", steer=[Add(vector=VECTOR, layers=1)])  # type: ignore[call-overload]

    def test_the_engine_lives_on_after_refusals(self, engine: SyncEngine) -> None:
        for _ in range(3):
            with pytest.raises(InvalidRequest):
                engine.generate("", SHORT)
        assert len(engine.generate(PROMPT, SHORT).token_ids) == 8

    def test_default_steering_is_checked_when_it_is_set(self, engine: SyncEngine) -> None:
        with pytest.raises(InvalidRequest, match="out of range"):
            engine.default_steering = Add(vector=VECTOR, layers=77)
        assert engine.default_steering == Steering()


class TestLife:
    def test_the_sync_engine_works_inside_a_running_loop(self, engine: SyncEngine) -> None:
        async def notebook_cell() -> str:
            return engine.generate(PROMPT, SHORT).text

        assert asyncio.run(notebook_cell()) == engine.generate(PROMPT, SHORT).text

    def test_closing_ends_running_requests_and_refuses_new_ones(self, start: Start) -> None:
        engine = start()
        results: list[Generation] = []
        long = Sampling(max_tokens=240, ignore_eos=True)
        thread = threading.Thread(target=lambda: results.append(engine.generate(PROMPT, long)))
        thread.start()
        while not engine.stats()["running"]:
            time.sleep(0.005)
        asyncio.run(engine.aio.close())
        thread.join(timeout=HUNG_S)
        assert results[0].finish_reason == "cancelled"
        with pytest.raises(EngineClosed):
            engine.generate(PROMPT, SHORT)

    def test_a_stream_left_open_when_the_engine_closes_ends_and_nothing_hangs(self, start: Start) -> None:
        engine = start()
        stream = engine.stream(PROMPT, Sampling(max_tokens=200, ignore_eos=True))
        first = next(stream)
        engine.close()
        *rest, last = stream
        assert isinstance(last, EndEvent)
        assert last.generation.finish_reason == "cancelled"
        told, text = "".join(e.text for e in (first, *rest) if isinstance(e, TokenEvent)), last.generation.text
        assert text in (told, told + "\ufffd")  # half a character was waiting for the rest
        with pytest.raises(EngineClosed):
            engine.generate(PROMPT, SHORT)

    def test_a_fault_at_the_end_of_a_text_is_told_to_who_waits_for_it(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And to no other request."""
        wanted, faults = engine.generate(PROMPT, SHORT).text, iter([True])

        def timings(*times: float) -> Timings:
            if next(faults, False):
                raise ZeroDivisionError("a fault")
            return Timings(*times)

        async def two() -> list[Generation | BaseException]:
            both = (engine.aio.generate(PROMPT, SHORT, capture=Capture(layers=0)) for _ in range(2))
            return await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), HUNG_S)

        monkeypatch.setattr("steerscope.engines.sequence.Timings", timings)
        broken, whole = sorted(asyncio.run(two()), key=lambda one: isinstance(one, Generation))
        assert isinstance(broken, RequestFailed)
        assert "ZeroDivisionError: a fault" in str(broken)
        assert isinstance(whole, Generation)
        assert whole.text == wanted
        assert whole.capture is not None
        whole.capture.close()
        assert engine.stats()["capture_bytes"] == 0

    def test_a_fault_inside_the_engine_fails_the_requests_and_not_the_engine(
        self, engine: SyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = engine.generate(PROMPT, SHORT).text
        target = type(engine.aio)

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a fault")

        monkeypatch.setattr(target, "_admit", broken)
        with pytest.raises(RequestFailed, match="a fault"):
            engine.generate([PROMPT, "Hello"], SHORT, capture=Capture())
        monkeypatch.undo()
        assert engine.generate(PROMPT, SHORT).text == wanted
        assert engine.stats()["capture_bytes"] == 0
