"""Rules on tensors do what rules in plain Python do, however their rows are cut into steps."""

import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lenses.packs import make
from steerscope.lenses.rules import MOST_CLAUSES, MOST_RULES, MOST_TERMS, Rules, compile_rules
from steerscope.specs import Add
from steerscope.specs.errors import CapacityExceeded
from steerscope.specs.watch import Condition, Rule, all_of, any_of, flag, not_, steer, stop, when
from support.plain_rules import Event, play

CONCEPTS = ["c0.0", "c0.1", "c0.2"]
PACK = make([3, 4])
PUSH = Add(vector=[1.0] * 24, layers=0)
GRID = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]

leaves = st.builds(
    lambda concept, kind, bound, need: when(concept, for_tokens=need, **({kind: bound})),
    st.sampled_from(CONCEPTS),
    st.sampled_from(["above", "below"]),
    st.sampled_from([0.3, 0.5, 0.7]),
    st.integers(1, 3),
)
conditions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: all_of(*parts)),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: any_of(*parts)),
        inner.map(not_),
    ),
    max_leaves=4,
)
highs = st.lists(
    st.builds(lambda c, need: when(c, above=0.5, for_tokens=need), st.sampled_from(CONCEPTS), st.integers(1, 3)),
    min_size=1,
    max_size=2,
).map(lambda parts: any_of(*parts))
actions = st.one_of(
    st.just(flag("x")), st.just(stop("x")), st.builds(lambda n: steer(PUSH, name="x", off_for=n), st.integers(1, 3))
)
latches = st.builds(
    lambda condition, low, n: condition.then(steer(PUSH, name="x", off_below=low, off_for=n)),
    highs,
    st.sampled_from([0.1, 0.3, 0.5]),
    st.integers(1, 3),
)
rules = st.one_of(st.builds(lambda c, a: c.then(a), conditions, actions), latches)


def scores_of(rows: int, rng: random.Random) -> list[dict[str, float]]:
    """They stay for a while: independent draws would hardly ever hold for three rows."""
    now = {c: rng.choice(GRID) for c in CONCEPTS}
    found = []
    for _ in range(rows):
        now = {c: rng.choice(GRID) if rng.random() < 0.4 else value for c, value in now.items()}
        found.append(dict(now))
    return found


class SteppedRequests:
    """Requests that go through the tensors in steps, some rows of each at a time."""

    def __init__(self, requests: list[tuple[list[Rule], list[dict[str, float]]]]) -> None:
        self.rules = Rules(slots=8)
        self.requests = requests
        self.compiled = [compile_rules(mine, PACK)[0] for mine, _ in requests]
        self.slots = [self.rules.admit(c, [term.lens for term in c.terms]) for c in self.compiled]
        self.done = [0] * len(requests)
        self.events: list[list[Event]] = [[] for _ in requests]
        self.gates: list[dict[int, list[bool]]] = [{} for _ in requests]

    def step(self, counts: list[int], again: int, rng: random.Random) -> None:
        """`counts` rows of each request, after `again` rows of each that were there before; padding in between."""
        owner: list[tuple[int, int]] = []
        order = list(range(len(self.requests)))
        rng.shuffle(order)
        for i in order:
            if counts[i]:
                start, stop_ = max(0, self.done[i] - again), self.done[i] + counts[i]
                owner += [(i, t) for t in range(start, min(stop_, len(self.requests[i][1])))]
            owner += [(-1, 0)] * rng.randint(0, 2)
        scores = torch.full((len(owner), MOST_TERMS), 0.9)
        slot, position = torch.zeros(len(owner), dtype=torch.long), torch.zeros(len(owner), dtype=torch.long)
        for n, (i, t) in enumerate(owner):
            if i < 0:
                continue
            slot[n], position[n] = self.slots[i], t
            values = self.requests[i][1][t]
            for k, term in enumerate(self.compiled[i].terms):
                scores[n, k] = values[PACK.concepts[term.lens].id]
        changes = self.rules.advance(scores, slot, position)
        for n, (i, t) in enumerate(owner):
            for kind, table in (("on", changes.on), ("off", changes.off)):
                found = table[n].nonzero().flatten().tolist()
                assert i >= 0 or not found, "nobody's rows change nothing"
                self.events[i] += [(t, r, kind) for r in found]
        for i in range(len(self.requests)):
            if counts[i]:
                self.done[i] = min(self.done[i] + counts[i], len(self.requests[i][1]))
                count = len(self.compiled[i].rules)
                ids = [self.rules.gate(self.slots[i], r) for r in range(count)]
                self.gates[i][self.done[i] - 1] = [bool(self.rules.gates[g]) for g in ids]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(rules, min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 2**20))
def test_any_rules_in_any_chunks_do_what_plain_rules_do(many, seed):
    assume(not any(compile_rules(mine, PACK)[1] for mine in many))  # some contradict themselves
    rng = random.Random(seed)
    requests = [(mine, scores_of(rng.randint(1, 30), rng)) for mine in many]
    run = SteppedRequests(requests)
    while any(done < len(rows) for done, (_, rows) in zip(run.done, requests, strict=True)):
        run.step([rng.choice([0, 1, 1, 2, 5, 12]) for _ in requests], rng.choice([0, 0, 1, 4]), rng)
    for i, (mine, rows) in enumerate(requests):
        events, states = play(mine, rows)
        assert sorted(run.events[i]) == sorted(events)
        for t, gates in run.gates[i].items():
            assert gates == states[t], "the gates are the states after the last row"
    assert run.rules.gates[0] == 1


def test_the_oracle_sees_rules_fire_so_that_agreeing_with_it_means_something():
    rng = random.Random(3)
    latch = when("c0.0", above=0.5, for_tokens=2).then(steer(PUSH, off_below=0.3, off_for=2))
    events = play([latch], scores_of(200, rng))[0]
    assert [kind for _, _, kind in events][:4] == ["on", "off", "on", "off"]


def test_hysteresis_holds_between_the_two_thresholds():
    rule = when("c0.0", above=0.7).then(steer(PUSH, off_below=0.3, off_for=2))
    values = [0.5, 0.8, 0.5, 0.5, 0.2, 0.5, 0.2, 0.2, 0.5, 0.8]
    run = SteppedRequests([([rule], [dict.fromkeys(CONCEPTS, v) for v in values])])
    run.step([len(values)], 0, random.Random(0))
    assert run.events[0] == [(1, 0, "on"), (7, 0, "off"), (9, 0, "on")]


def test_a_slot_that_is_used_again_remembers_nothing():
    rule = when("c0.0", above=0.5, for_tokens=2).then(flag("x"))
    tensors = Rules(slots=1)
    compiled, _ = compile_rules([rule], PACK)
    high = torch.full((1, MOST_TERMS), 0.9)
    for _ in range(2):
        slot = tensors.admit(compiled, [0])
        for t in range(2):
            changes = tensors.advance(high, torch.tensor([slot]), torch.tensor([t]))
            assert bool(changes.on.any()) == (t == 1)
        with pytest.raises(CapacityExceeded, match="all 1 places"):
            tensors.admit(compiled, [0])
        tensors.release(slot)
    assert tensors.gates.sum() == 1


@pytest.mark.parametrize("bound", ["above", "below"])
def test_a_score_that_lies_on_a_threshold_is_on_neither_side_of_it(bound: str):
    run = SteppedRequests([([when("c0.0", **{bound: 0.5}).then(flag("x"))], [dict.fromkeys(CONCEPTS, 0.5)])])
    run.step([1], 0, random.Random(0))
    assert run.events[0] == []


def test_a_score_that_is_not_a_number_meets_nothing():
    compiled, _ = compile_rules([when("c0.0", above=0.1).then(flag("x"))], PACK)
    tensors = Rules(slots=1)
    slot = tensors.admit(compiled, [0])
    scores = torch.full((1, MOST_TERMS), torch.nan)
    assert not tensors.advance(scores, torch.tensor([slot]), torch.tensor([0])).on.any()


class NoWaiting(TorchDispatchMode):
    """Refuses operators that would make the host wait, or give a shape that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


def test_advancing_never_asks_the_device_for_a_value():
    compiled, _ = compile_rules([(when("c0.0", above=0.1) | when("c0.1", above=0.4)).then(flag("x"))], PACK)
    tensors = Rules()
    slot = tensors.admit(compiled, [0, 1])
    inputs = torch.rand(5, MOST_TERMS), torch.tensor([slot, slot, 0, 0, 0]), torch.arange(5)
    with NoWaiting():
        tensors.advance(*inputs)
    with pytest.raises(AssertionError), NoWaiting():  # the guard itself works
        torch.ones(3).nonzero()


# --- what is refused


def refused(*asked: Rule, **pack: object) -> list[str]:
    return [str(problem) for problem in compile_rules(asked, make([3, 4], **pack))[1]]  # type: ignore[arg-type]


def test_unknown_concepts_are_told_with_those_near_them_and_where():
    bad: Condition = all_of(when("c0.0", above=0.5), not_(when("c0.9", above=0.5)))
    where = "rules[0].when.of[1].of.concept"
    near = f"{where}: 'c0.9' is not in pack 'test'; near it are c0.2, c0.1, c0.0"
    assert refused(bad.then(flag("x"))) == [near]


def test_thresholds_that_no_score_passes_are_refused():
    assert "above: 1 is never passed: probabilities end at 1" in refused(when("c0.0", above=1.0).then(flag("x")))[0]
    assert "every score is below 1.5" in refused(when("c0.0", below=1.5).then(flag("x")))[0]
    pack = make([3, 4], calibrated=True)
    most = float(pack.calibration.confidence[0])  # type: ignore[union-attr]
    name = pack.concepts[0].id
    assert f"end at {most:.3g}" in refused(when(name, above=most).then(flag("x")), calibrated=True)[0]
    assert refused(when(name, above=most - 0.01).then(flag("x")), calibrated=True) == []
    assert refused(when("c0.0", above=40.0).then(flag("x")), output="relu") == []


def test_combinations_that_cannot_hold_or_grow_too_large_are_refused():
    one = when("c0.0", above=0.5)
    assert "can never hold" in refused((one & ~one).then(flag("x")))[0]
    pairs = [any_of(when("c0.0", above=i / 50), when("c0.1", above=i / 50)) for i in range(1, 7)]
    assert f"more than {MOST_CLAUSES} alternatives" in refused(all_of(*pairs).then(flag("x")))[0]
    many = [when("c0.0", above=0.5).then(flag(str(i))) for i in range(MOST_RULES + 1)]
    assert refused(*many) == [f"rules: are {MOST_RULES + 1}; give at most {MOST_RULES}"]


def test_lenses_that_are_not_always_there_are_refused():
    _, problems = compile_rules([when("c1.0", above=0.5).then(flag("x"))], PACK, lambda lens: lens < 3)
    assert "not always on the device; register the pack with it in pinned" in str(problems[0])
