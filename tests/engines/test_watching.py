"""Watching while a model runs: readings belong to their rows, and rules act exactly when they say they do."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.conftest import ENGINES, saved, start_vllm
from lenses.packs import make, one_by_one
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import EndEvent, Generation, RuleEvent, TokenEvent
from steerscope.engines.sync import SyncEngine
from steerscope.lenses import Pack
from steerscope.lenses.monitor import Monitor
from steerscope.lenses.rules import MOST_RULES
from steerscope.specs import Add, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.watch import Rule, Watch, flag, steer, stop, when
from support import tiny
from support.plain_rules import play

PROMPT = "The quick brown fox jumps over"
SHORT = Sampling(max_tokens=10, ignore_eos=True)
LAYER = 2
PACK = make([3, 6, 12], hidden=64, normed=True).replace(
    info=make(hidden=64).info.model_copy(update={"layer": LAYER, "model": "llama"})
)
PUSH = Add(vector=np.random.default_rng(4).normal(size=64).astype(np.float32), scale=4.0, layers=1)
ALL = Watch(pack="p", top_k=4)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[SyncEngine]:
    with begin(request.param) as made:
        made.register_pack("p", PACK)
        yield made


def begin(kind: str) -> SyncEngine:
    if kind == "vllm":  # prompts of more than 32 tokens come in chunks
        options: dict[str, object] = {"max_num_batched_tokens": 32, "max_batch": 16}
        return start_vllm(saved("llama", "bytes", None, {}), "llama", options)
    return HFEngine(tiny.model(), tiny.tokenizer(), name="llama").sync


def monitor_of(engine: SyncEngine) -> Monitor:
    if isinstance(engine.aio, HFEngine):
        return engine.aio.monitor
    from steerscope.engines.vllm.worker.worker import LOCAL_WORKERS

    engine.aio._call(lambda: engine.aio._rpc("settle"))  # type: ignore[attr-defined]
    return next(worker for worker in LOCAL_WORKERS if worker.delivery.arena is not None).lenses.monitor


def scores_of(done: Generation, pack: Pack = PACK, layer: int = LAYER) -> torch.Tensor:
    """Of every captured row, lens by lens."""
    return one_by_one(pack, done.rows[layer])


def halfway(scores: torch.Tensor, row: int) -> tuple[str, float]:
    """A concept, and a threshold that its scores first pass on this row."""
    before = scores[:row].max(0).values if row else torch.zeros(scores.shape[1])
    lens = int((scores[row] - before).argmax())
    assert scores[row, lens] > before[lens] + 1e-4, "no lens rises to a new height here"
    return PACK.concepts[lens].id, float(scores[row, lens] + before[lens]) / 2


def fires_on(scores: torch.Tensor, least: int) -> tuple[int, str, float]:
    """The first row from `least` on with which some concept rises to a new height."""
    for row in range(least, len(scores)):
        try:
            return row, *halfway(scores, row)
        except AssertionError:
            continue
    raise AssertionError("no lens ever rises")


class TestReadings:
    @pytest.mark.parametrize("tokens", ["all", "prompt", "generated", "last_prompt", "positions=[0, 3, 9:12]"])
    def test_readings_are_the_lenses_run_one_by_one_on_the_captured_rows(self, engine: SyncEngine, tokens: str):
        watch = ALL.model_copy(update={"tokens": tokens})
        done = engine.generate(PROMPT, SHORT, watch=watch, capture=Capture(layers=LAYER, tokens=tokens))
        assert [r.position for r in done.readings] == done.rows.labels.position.tolist()
        assert [r.token_id for r in done.readings] == done.rows.labels.token_id.tolist()
        assert len(done.readings) > 0
        for scores, reading in zip(scores_of(done), done.readings, strict=True):
            said = [c.probability for c in reading.concepts]
            named = [PACK.index(c.id) for c in reading.concepts]
            assert len(set(named)) == 4
            assert said == pytest.approx(scores[named].tolist(), abs=1e-5), "each says what its lens says"
            assert said == pytest.approx(scores.sort(descending=True).values[:4].tolist(), abs=1e-5), "and is the best"
            assert reading.concepts[0].path == PACK.path(named[0])

    def test_there_are_as_many_as_rows_and_the_last_token_has_none(self, engine: SyncEngine):
        done = engine.generate(PROMPT, SHORT, watch=ALL)
        p, g = len(done.prompt_token_ids), len(done.token_ids)
        assert [r.position for r in done.readings] == list(range(p + g - 1))
        assert [r.token_id for r in done.readings] == [*done.prompt_token_ids, *done.token_ids[:-1]]

    def test_levels_choose_who_competes(self, engine: SyncEngine):
        watch = Watch(pack="p", top_k=3, levels=[1])
        done = engine.generate(PROMPT, SHORT, watch=watch, capture=Capture(layers=LAYER))
        level = PACK.level(1)
        for scores, reading in zip(scores_of(done), done.readings, strict=True):
            best = scores[level].argsort(descending=True)[:3] + level.start
            assert [c.id for c in reading.concepts] == [PACK.concepts[i].id for i in best]

    def test_readings_are_of_rows_after_steering(self, engine: SyncEngine):
        hard = Add(vector=PUSH.vector, scale=8.0, layers=LAYER)
        done = engine.generate(PROMPT, SHORT, steer=hard, watch=ALL, capture=Capture(layers=LAYER))
        plain = engine.generate(PROMPT, SHORT, watch=ALL)
        assert done.readings[0].concepts[0].probability == pytest.approx(float(scores_of(done)[0].max()), abs=1e-5)
        assert done.readings[0] != plain.readings[0]

    def test_n_choices_have_readings_of_their_own(self, engine: SyncEngine):
        sampling = Sampling(max_tokens=5, temperature=1.5, seed=1, n=3, ignore_eos=True)
        done = engine.generate(PROMPT, sampling, watch=ALL)
        for choice in done.choices:
            assert [r.token_id for r in choice.readings] == [*done.prompt_token_ids, *choice.token_ids[:-1]]

    def test_a_chat_is_watched_by_role(self, engine: SyncEngine):
        chat = [{"role": "user", "content": "How was your week"}]
        done = engine.chat(chat, SHORT, watch=Watch(pack="p", tokens="role=user"), capture=Capture(tokens="role=user"))
        assert [r.position for r in done.readings] == done.rows.labels.position.tolist()

    def test_a_pack_object_needs_no_name_and_one_kept_in_tiers_reads_by_expansion(self, engine: SyncEngine):
        inline = engine.generate(PROMPT, SHORT, watch=Watch(pack=PACK, top_k=4))
        assert inline.readings == engine.generate(PROMPT, SHORT, watch=ALL).readings
        engine.register_pack("tiers", PACK, budget=14, base_levels=1, pinned=[PACK.concepts[-1].id])
        rule = when(PACK.concepts[-1].id, above=0.01).then(flag("x"))
        watch = Watch(pack="tiers", top_k=4, rules=[rule])
        done = engine.generate([PROMPT, "x"], SHORT, watch=watch, capture=Capture(layers=LAYER))
        from steerscope.lenses import Bank, BankExpander

        for one in done:
            wanted = BankExpander(Bank(PACK), base_levels=1).expand(one.rows[LAYER], 4)
            for i, reading in enumerate(one.readings):
                assert [c.id for c in reading.concepts] == [c.id for c, _ in wanted.row(i)]
            assert one.firings[0].score == pytest.approx(float(scores_of(one)[one.firings[0].position, -1]), abs=1e-5)
        engine.unregister_pack("tiers")


class TestMixedBatches:
    def test_watched_and_unwatched_requests_in_one_batch_are_what_they_are_alone(self, engine: SyncEngine):
        prompts = [f"{PROMPT} {word}" for word in ["a", "b", "c", "d", "e", "f"]]
        plain = engine.generate(prompts, SHORT, capture=Capture(layers=LAYER))
        _, concept, above = fires_on(scores_of(plain[3]), 9)
        rules = [when(concept, above=above).then(stop("enough"))]
        switch = [when(concept, above=above / 2).then(steer(PUSH, name="push"))]
        watches = [None, ALL, Watch(pack="p", top_k=2, levels=1), Watch(pack="p", rules=rules), None]
        watches.append(Watch(pack="p", tokens="generated", rules=switch))
        together = engine.generate(prompts, SHORT, watch=watches)
        for prompt, watch, done in zip(prompts, watches, together, strict=True):
            alone = engine.generate(prompt, SHORT, watch=watch)
            assert (done.token_ids, done.finish_reason, done.rule) == (alone.token_ids, alone.finish_reason, alone.rule)
            assert [f.position for f in done.firings] == [f.position for f in alone.firings]
            assert [[c.id for c in r.concepts] for r in done.readings] == [
                [c.id for c in r.concepts] for r in alone.readings
            ]
        assert together[3].finish_reason == "rule"
        assert len(together[0].readings) == len(together[4].readings) == 0
        assert together[1].token_ids == plain[1].token_ids, "being watched changes nothing"

    def test_different_packs_layers_and_depths_of_search_in_one_batch(self, engine: SyncEngine):
        early = make([4, 9], seed=3, hidden=64)
        early = early.replace(info=early.info.model_copy(update={"layer": 0, "model": "llama", "name": "early"}))
        engine.register_pack("early", early)
        engine.register_pack("tiers", PACK, budget=14, base_levels=1)
        watches = [Watch(pack="early", top_k=3), ALL, *(Watch(pack="tiers", top_k=k) for k in (1, 2, 5)), None]
        prompts = [f"{PROMPT} {i}" for i in range(6)]
        for prompt, watch, done in zip(prompts, watches, engine.generate(prompts, SHORT, watch=watches), strict=True):
            alone = engine.generate(prompt, SHORT, watch=watch)
            assert [[c.id for c in r.concepts] for r in done.readings] == [
                [c.id for c in r.concepts] for r in alone.readings
            ]
        first = engine.generate(PROMPT, SHORT, watch=watches[0], capture=Capture(layers=0))
        best = scores_of(first, early, 0).max(1).values.tolist()
        assert [r.concepts[0].probability for r in first.readings] == pytest.approx(best, abs=1e-5)
        engine.unregister_pack("early")
        engine.unregister_pack("tiers")

    def test_nobody_watched_means_nothing_is_read(self, engine: SyncEngine):
        before = engine.stats()["readings"]
        engine.generate([PROMPT, "x"], SHORT, capture=Capture(layers=LAYER))
        assert engine.stats()["readings"] == before
        engine.generate([PROMPT, "x"], SHORT, watch=[ALL, None])
        p = len(engine.aio.tokenizer(PROMPT)["input_ids"])  # type: ignore[arg-type]
        assert engine.stats()["readings"] == before + p + 9


class TestRules:
    def test_a_stop_fired_on_row_t_keeps_token_t_plus_one_and_nothing_after_it(self, engine: SyncEngine):
        plain = engine.generate(PROMPT, SHORT, capture=Capture(layers=LAYER))
        p = len(plain.prompt_token_ids)
        row, concept, above = fires_on(scores_of(plain), p)
        assert p <= row < len(scores_of(plain)) - 1, "it must fire on a generated row and before the end"
        watch = Watch(pack="p", rules=[when(concept, above=above).then(stop("enough"))])
        done = engine.generate(PROMPT, SHORT, watch=watch, capture=Capture(layers=LAYER))
        assert (done.finish_reason, done.rule) == ("rule", "enough")
        assert done.token_ids == plain.token_ids[: row + 2 - p]
        assert done.text == tiny.tokenizer().decode(done.token_ids, skip_special_tokens=True)
        assert done.rows.n == len(done.readings) == row + 1
        (firing,) = done.firings
        assert (firing.action, firing.position, firing.token, firing.acts_from) == ("stop", row, row + 1 - p, row + 1)
        assert firing.scores == ((concept, pytest.approx(float(scores_of(plain)[row, PACK.index(concept)]), abs=1e-5)),)

    @pytest.mark.parametrize("row", [0, 2, -1])
    def test_a_stop_fired_on_a_prompt_row_keeps_the_first_token(self, engine: SyncEngine, row: int):
        plain = engine.generate(PROMPT, SHORT, capture=Capture(layers=LAYER))
        p = len(plain.prompt_token_ids)
        row, concept, above = fires_on(scores_of(plain), row % p)
        assert row < p
        done = engine.generate(PROMPT, SHORT, watch=Watch(pack="p", rules=[when(concept, above=above).then(stop("s"))]))
        assert done.token_ids == plain.token_ids[:1]
        assert (done.firings[0].position, done.firings[0].token, done.firings[0].acts_from) == (row, 0, p)
        assert len(done.readings) == p

    def test_a_steering_fired_on_row_t_changes_row_t_plus_one_and_nothing_before_it(self, engine: SyncEngine):
        plain = engine.generate(PROMPT, SHORT, capture=Capture())
        p = len(plain.prompt_token_ids)
        row, concept, above = fires_on(scores_of(plain), p)
        rule = when(concept, above=above).then(steer(PUSH, name="push", off_for=1000))
        done = engine.generate(PROMPT, SHORT, watch=Watch(pack="p", rules=[rule]), capture=Capture())
        assert [(f.action, f.position, f.acts_from) for f in done.firings] == [("steer", row, row + 1)]
        assert done.token_ids[: row + 2 - p] == plain.token_ids[: row + 2 - p]
        for layer in range(4):
            gap = (done.rows[layer] - plain.rows[layer][: done.rows.n]).abs().amax(1)
            assert gap[: row + 1].max() < 1e-5, "rows up to t are those of the unsteered twin"
            assert (gap[row + 1] > 0.1) == (layer >= 1), "row t+1 is pushed at layer 1 and above"
        pushed = done.rows[1][row + 1] - plain.rows[1][row + 1]
        torch.testing.assert_close(pushed, 4.0 * torch.as_tensor(push_numbers()), atol=1e-4, rtol=0)
        assert done.steered[0].rule == "push"
        assert done.steered[0].positions.intervals[0][0] == p, "a switched op has no entries on rows of the prompt"

    def test_a_steering_fired_inside_the_prompt_acts_from_the_first_generated_row(self, engine: SyncEngine):
        plain = engine.generate(PROMPT, SHORT, capture=Capture(layers=1))
        p = len(plain.prompt_token_ids)
        rule = when(PACK.concepts[0].id, above=0.0).then(steer(PUSH, off_for=1000))
        done = engine.generate(PROMPT, SHORT, watch=Watch(pack="p", rules=[rule]), capture=Capture(layers=1))
        assert (done.firings[0].position, done.firings[0].acts_from) == (0, p)
        gap = (done.rows[1][: p + 1] - plain.rows[1][: p + 1]).abs().amax(1)
        assert gap[:p].max() < 1e-5
        assert gap[p] > 0.1

    def test_always_on_and_switched_steering_share_a_request(self, engine: SyncEngine):
        base = Add(vector=np.random.default_rng(9).normal(size=64).astype(np.float32), scale=2.0, layers="0-3")
        plain = engine.generate(PROMPT, SHORT, steer=base, capture=Capture(layers=[1, LAYER]))
        p = len(plain.prompt_token_ids)
        row, concept, above = fires_on(scores_of(plain), p)
        rule = when(concept, above=above).then(steer(Steering.of(PUSH), off_for=1000))
        watch = Watch(pack="p", rules=[rule])
        done = engine.generate(PROMPT, SHORT, steer=base, watch=watch, capture=Capture(layers=[1, LAYER]))
        gap = (done.rows[1] - plain.rows[1]).abs().amax(1)
        assert gap[: row + 1].max() < 1e-5
        assert gap[row + 1] > 0.1

    def test_switching_off_ends_the_push_with_the_next_row(self, engine: SyncEngine):
        """What the rules say on the rows that really came is what switched the gates on those rows."""
        rng = random.Random(1)
        for _ in range(4):
            concept = rng.choice(PACK.concepts).id
            rule = when(concept, above=0.5).then(steer(PUSH, name="push", off_below=0.4, off_for=rng.choice([1, 2])))
            watch = Watch(pack="p", rules=[rule])
            long = SHORT.model_copy(update={"max_tokens": 30})
            done = engine.generate(PROMPT, long, watch=watch, capture=Capture(layers=[0, 1, LAYER]))
            events, states = play([rule], [{concept: float(s)} for s in scores_of(done)[:, PACK.index(concept)]])
            told = [(f.position, 0, "on" if f.action == "steer" else "off") for f in done.firings]
            assert told == events
            fed = [*done.prompt_token_ids, *done.token_ids[:-1]]
            self._rows_match(done, fed, [state[0] for state in states])

    @staticmethod
    def _rows_match(done: Generation, fed: list[int], on: list[bool]) -> None:
        """A plain forward of the same tokens, pushed by hand on exactly the rows that follow an open gate."""
        p = len(done.prompt_token_ids)
        steps = torch.tensor([t >= p and on[t - 1] for t in range(len(fed))], dtype=torch.float32)
        change = 4.0 * steps[:, None] * torch.as_tensor(push_numbers())
        model = tiny.model()
        layers = model.model.layers  # type: ignore[union-attr]
        kept: list[torch.Tensor] = []

        def hook(_module, _args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            changed = hidden + change
            kept.append(changed[0])
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        handle = layers[1].register_forward_hook(hook)
        try:
            with torch.no_grad():
                model(input_ids=torch.tensor([fed]))
        finally:
            handle.remove()
        torch.testing.assert_close(done.rows[1], kept[0], atol=1e-3, rtol=1e-3)

    def test_a_stop_string_before_the_rule_wins_and_the_firing_is_still_told(self, engine: SyncEngine):
        plain = engine.generate(PROMPT, SHORT)
        text = engine.aio.tokenizer.decode(plain.token_ids[:1])
        if not text.strip("�"):
            pytest.skip("the first token has no text of its own")
        rule = when(PACK.concepts[0].id, above=0.0).then(stop("s"))
        stops = SHORT.model_copy(update={"stop": (text,)})
        done = engine.generate(PROMPT, stops, watch=Watch(pack="p", rules=[rule]))
        assert (done.finish_reason, done.rule, done.text) == ("stop_string", None, "")
        assert done.firings[0].rule == "s"


def push_numbers() -> np.ndarray:
    return np.frombuffer(PUSH.source.shared, dtype="<f4").copy()  # type: ignore[union-attr]


class TestStreams:
    @pytest.mark.parametrize("how", ["plain", "stop", "steer"])
    def test_a_stream_tells_the_same_as_the_whole(self, engine: SyncEngine, how: str):
        plain = engine.generate(PROMPT, SHORT, capture=Capture(layers=LAYER))
        p = len(plain.prompt_token_ids)
        _, concept, above = fires_on(scores_of(plain), p)
        action = {"plain": flag("x"), "stop": stop("x"), "steer": steer(PUSH, name="x")}[how]
        watch = Watch(pack="p", top_k=3, rules=[when(concept, above=above).then(action)])
        whole = engine.generate(PROMPT, SHORT, watch=watch)
        events = list(engine.stream(PROMPT, SHORT, watch=watch))
        end, tokens = events[-1], [e for e in events if isinstance(e, TokenEvent)]
        assert isinstance(end, EndEvent)
        assert end.generation.token_ids == whole.token_ids == [e.token_id for e in tokens]
        assert end.generation.readings == whole.readings
        assert end.generation.firings == whole.firings
        assert [r for e in tokens for r in e.readings] == list(whole.readings)
        assert [e.reading for e in tokens] == list(whole.readings)[p - 1 :]
        assert len(tokens[0].readings) == p
        told = [(i, e.firing) for i, e in enumerate(events) if isinstance(e, RuleEvent)]
        assert [firing for _, firing in told] == list(whole.firings)
        for i, firing in told:
            following = next(e for e in events[i:] if isinstance(e, TokenEvent))
            assert following.index == firing.token, "a firing comes just before its token"

    def test_a_token_whose_row_is_not_watched_has_no_reading(self, engine: SyncEngine):
        watch = Watch(pack="p", tokens="positions=[0:2, 7]")
        events = [e for e in engine.stream(PROMPT, SHORT, watch=watch) if isinstance(e, TokenEvent)]
        p = len(engine.aio.tokenizer(PROMPT)["input_ids"])  # type: ignore[arg-type]
        assert [len(e.readings) for e in events][0] == 2
        assert [e.index for e in events if e.reading] == [7 + 1 - p]


class TestRefusals:
    def bad(self, engine: SyncEngine, watch: Watch | list[Watch], **more: object) -> str:
        with pytest.raises(InvalidRequest) as error:
            engine.generate([PROMPT] * len(watch) if isinstance(watch, list) else PROMPT, SHORT, watch=watch, **more)  # type: ignore[call-overload]
        return str(error.value)

    def test_every_problem_of_a_request_is_told_at_once(self, engine: SyncEngine):
        rules = [
            when("nobody", above=0.5).then(stop("a")),
            when(PACK.concepts[0].id, above=0.5).then(steer(Add(vector=[1.0, 2.0], layers=77), name="b")),
            when(PACK.concepts[0].id, above=1.0).then(flag("c")),
        ]
        watch = Watch(pack="p", tokens="positions=[900]", levels=[7], rules=rules)
        text = self.bad(engine, watch, capture=Capture(layers=50))
        assert "capture.layers: layer 50 is out of range" in text
        assert "watch.tokens: position 900 is never computed" in text
        assert "watch.levels: level 7 does not exist; this pack has levels 0–2" in text
        assert "watch.rules[0].when.concept: 'nobody' is not in pack 'test'" in text
        assert "watch.rules[1].then.steering.ops[0].vector: the vector has 2 numbers" in text
        assert "watch.rules[2].when.above: 1 is never passed" in text
        assert text.startswith("6 problems") or text.startswith("7 problems")

    def test_unknown_packs_are_told_with_those_there_are(self, engine: SyncEngine):
        assert self.bad(engine, Watch(pack="q")) == "watch.pack: no pack is named 'q'; register it; known: p"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": "org/other"}, "trained on 'org/other', not 'llama'"),
            ({"layer": 9}, "reads layer 9, the model has layers 0–3"),
            ({"hidden": 24}, "reads rows of size 24, the model has 64"),
        ],
    )
    def test_packs_of_other_models_are_refused(self, engine: SyncEngine, change: dict, message: str):
        hidden = change.get("hidden", 64)
        other = make([2, 2], hidden=hidden)
        other = other.replace(info=other.info.model_copy(update={"layer": LAYER, "model": "llama", **change}))
        assert f"watch.pack.{next(iter(change))}" in self.bad(engine, Watch(pack=other))
        assert message in self.bad(engine, Watch(pack=other))
        with pytest.raises(InvalidRequest, match="other"):
            engine.register_pack("other", other)
        assert "other" not in engine.packs

    def test_a_fine_tune_may_be_watched_when_somebody_says_so(self, engine: SyncEngine):
        other = PACK.replace(info=PACK.info.model_copy(update={"model": "org/other"}))
        engine.register_pack("tuned", other, any_model=True)
        assert len(engine.generate(PROMPT, SHORT, watch=Watch(pack="tuned")).readings) > 0
        engine.unregister_pack("tuned")
        assert "no pack is named 'tuned'" in self.bad(engine, Watch(pack="tuned"))

    def test_a_site_the_model_does_not_have_is_refused(self):
        with HFEngine(tiny.model("gpt_neox"), tiny.tokenizer(), name="llama").sync as parallel:
            other = PACK.replace(info=PACK.info.model_copy(update={"site": "resid_mid"}))
            with pytest.raises(InvalidRequest, match="resid_mid cannot be had"):
                parallel.register_pack("x", other)
            with pytest.raises(InvalidRequest, match="watch.pack: resid_mid cannot be had"):
                parallel.generate(PROMPT, SHORT, watch=Watch(pack=other))

    def test_per_prompt_watches_are_counted_and_typed(self, engine: SyncEngine):
        with pytest.raises(InvalidRequest, match="watch: 1 specs for 2 prompts"):
            engine.generate([PROMPT] * 2, SHORT, watch=[ALL])
        with pytest.raises(InvalidRequest, match="watch: is str; give Watch"):
            engine.generate(PROMPT, SHORT, watch="p")  # type: ignore[call-overload]


class TestLives:
    def test_slots_and_packs_come_back(self, engine: SyncEngine, tmp_path: Path):
        monitor = monitor_of(engine)
        free = len(monitor.rules._free)
        PACK.save(tmp_path / "pack")
        engine.register_pack("disk", tmp_path / "pack")
        assert engine.stats()["packs"] >= 1
        rules: list[Rule] = [when(PACK.concepts[0].id, above=0.0).then(steer(PUSH))]
        engine.generate([PROMPT] * 5, SHORT, watch=Watch(pack="disk", rules=rules))
        assert monitor_of(engine) is monitor
        assert len(monitor.rules._free) == free
        slots = monitor.rules.gates.view(-1, MOST_RULES)[:-1]  # the last is written by everybody
        assert float(slots.sum()) == 1, "no gate is left open"
        before = len(monitor)
        engine.unregister_pack("disk")
        assert len(monitor) == before, "the same pack is still registered as p"
        for i in range(5):
            inline = PACK.replace(info=PACK.info.model_copy(update={"name": f"inline {i}"}))
            engine.generate("x", SHORT, watch=Watch(pack=inline))
        assert len(monitor) <= before + 2, "packs that were not registered do not pile up"

    def test_a_pack_that_is_forgotten_goes_on_reading_for_those_who_run(self, engine: SyncEngine):
        other = PACK.replace(info=PACK.info.model_copy(update={"name": "soon forgotten"}))
        engine.register_pack("soon", other)
        rule = when(PACK.concepts[0].id, above=0.0).then(flag("f"))
        events = engine.stream(PROMPT, SHORT, watch=Watch(pack="soon", rules=[rule]))
        first = next(events)
        engine.unregister_pack("soon")
        *_, end = [first, *events]
        assert isinstance(end, EndEvent)
        assert len(end.generation.readings) == len(end.generation.prompt_token_ids) + 9

    def test_a_watch_through_json_finds_its_pack_by_what_it_is(self, engine: SyncEngine):
        travelled = Watch.from_json(Watch(pack=PACK, top_k=4).to_json())
        assert (
            engine.generate(PROMPT, SHORT, watch=travelled).readings
            == engine.generate(PROMPT, SHORT, watch=ALL).readings
        )

    def test_a_prefill_that_is_tried_again_reads_every_row_once(self, engine: SyncEngine, monkeypatch):
        """Lenses and rules may have seen a batch that failed afterwards."""
        import steerscope.engines.hf.engine as module

        if not isinstance(engine.aio, HFEngine):
            pytest.skip("vLLM tries no step again")

        concept = PACK.concepts[0].id
        rules = [when(concept, above=0.0, for_tokens=3).then(flag("third")), when(concept, above=0.0).then(steer(PUSH))]
        watch, prompts = Watch(pack="p", rules=rules), [PROMPT, f"{PROMPT} and", f"{PROMPT} or"]
        wanted = engine.generate(prompts, SHORT, watch=watch)
        real, failed = module.read, []

        def read_then_fail(monitor, look):
            real(monitor, look)
            if len(look.parts) > 1 and not failed:
                failed.append(True)
                raise RuntimeError("after everything was noted")

        monkeypatch.setattr(module, "read", read_then_fail)
        again = engine.generate(prompts, SHORT, watch=watch)
        assert failed
        for one, other in zip(again, wanted, strict=True):
            assert one.token_ids == other.token_ids
            assert [f.position for f in one.firings] == [f.position for f in other.firings]
            assert [r.position for r in one.readings] == [r.position for r in other.readings]


class TestLateTokens:
    """An engine that takes the tokens of a quiet text many at a time ends it in the same place."""

    def test_tokens_behind_a_stop_are_dropped(self, engine: SyncEngine):
        from steerscope.engines.results import Choice, EngineJob
        from steerscope.engines.sequence import RunningText

        class Running(RunningText):
            needs_slot = False

            def _release(self) -> None: ...

            def _handle(self) -> None: ...

        rule = when(PACK.concepts[0].id, above=0.1).then(stop("s"))
        plan = engine.aio._plan_stream(engine.aio.tokenize(PROMPT), SHORT, {"watch": Watch(pack="p", rules=[rule])})
        told: list[object] = []
        context = dataclasses.replace(engine.aio.context, eos=frozenset())  # type: ignore[attr-defined]
        one = Running(EngineJob(plan, told.append, False, None), context)  # type: ignore[attr-defined]
        assert one.notes is not None
        p = one.prompt_length
        assert one.accept_all([5, 6]) is None
        one.notes.add(range(p + 6), np.full((p + 6, 1), 0.5), np.zeros((p + 6, 1), np.int64))
        one.notes.fire(p + 2, [0], [], np.array([0.7]))
        assert one.accept_all([7, 8, 9, 10]) == "rule"
        one.end("rule")
        (choice,) = told
        assert isinstance(choice, Choice)
        assert choice.token_ids == [5, 6, 7, 8], "row p + 2 is that of the third token: the fourth is the last"
        assert (choice.rule, len(choice.readings)) == ("s", p + 3)
