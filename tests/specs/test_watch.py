"""Watches travel as JSON unchanged, and say everything that is wrong with them at once."""

import pytest

from steerscope.specs import Add, InvalidRequest, Steering
from steerscope.specs.watch import InlinePack, Rule, Watch, all_of, any_of, flag, not_, steer, stop, when

PUSH = Add(vector=[1.0, 2.0], layers=1)


class Pack:
    digest = "abc"


def told(make) -> str:
    with pytest.raises(InvalidRequest) as error:
        make()
    return str(error.value)


def test_a_watch_survives_json():
    watch = Watch(
        pack="p",
        top_k=3,
        levels=2,
        tokens="generated",
        rules=[
            (when("a", above=0.5, for_tokens=2) & ~when("b", below=0.3)).then(stop("x")),
            any_of(when("a", above=0.1), all_of(when("b", above=0.2), not_(when("c", above=0.3)))).then(flag("y")),
            when("c", above=0.5).then(steer(Steering.of(PUSH), off_below=0.2, off_for=4)),
        ],
    )
    again = Watch.from_json(watch.to_json())
    assert again == watch
    assert again.rules[2].then.steering.ops[0] == PUSH  # type: ignore[union-attr]
    assert watch.levels == (2,)


def test_signs_are_the_words():
    a, b = when("a", above=0.5), when("b", above=0.5)
    assert (a & b, a | b, ~a) == (all_of(a, b), any_of(a, b), not_(a))


def test_a_pack_object_travels_as_its_digest():
    watch = Watch(pack=Pack())  # type: ignore[arg-type]
    assert isinstance(watch.pack, InlinePack)
    assert isinstance(watch.model_copy(update={"top_k": 9}).pack, InlinePack)
    assert Watch.from_json(watch.to_json()).pack == "digest:abc"


def test_all_problems_of_nested_rules_are_told_with_their_place():
    bad = {
        "pack": "p",
        "top_k": 0,
        "rules": [
            {
                "when": {"kind": "all_of", "of": [{"kind": "when", "concept": "x"}, {"kind": "nope"}]},
                "then": {"kind": "steer", "steering": {"ops": [{"op": "add", "vector": "v", "scale": "z"}]}},
            }
        ],
    }
    text = told(lambda: Watch.parse(bad))
    assert text.startswith("4 problems")
    assert "top_k: cannot be 0; give at least 1" in text
    assert "rules[0].when.of[0]: a condition needs above, below or both" in text
    assert "rules[0].when.of[1]: {'kind': 'nope'} is not a condition; give one whose kind is when, all_of" in text
    assert "rules[0].then.steering.ops[0].scale" in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: when("a"), "needs above, below or both"),
        (lambda: when("a", above=0.5, below=0.5), "no score is above 0.5 and below 0.5"),
        (lambda: when("a", above=-0.1), "above: cannot be -0.1; give at least 0"),
        (lambda: when("a", above=0.5, for_tokens=0), "for_tokens"),
        (lambda: all_of(), "nothing to combine"),
        (lambda: steer(Steering()), "the steering has no ops"),
        (lambda: steer(Steering.none()), "no ops"),
        (lambda: when("a", above=0.5).then(steer(PUSH, off_below=0.7)), "off_below 0.7 is over above 0.5"),
        (lambda: when("a", below=0.5).then(steer(PUSH, off_below=0.2)), "needs a condition made of scores above"),
        (lambda: (~when("a", above=0.5)).then(steer(PUSH, off_below=0.2)), "needs a condition made of scores above"),
        (lambda: Watch(pack="p", rules=[when("a", above=0.5).then(flag("x"))] * 2), "several rules are named 'x'"),
        (lambda: Watch(pack="p", tokens="nonsense"), "tokens: 'nonsense' is not a selector"),
        (lambda: Watch(pack=""), "pack"),
        (lambda: Watch(pack="p", levels=[]), "levels"),
        (lambda: Rule.parse({"when": {"kind": {}}, "then": {"kind": []}}), "when: {'kind': {}} is not a condition"),
        (lambda: when("a", above=0.5).then(PUSH), "then: Add is not an action; give flag, stop, steer"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make, message: str):
    assert message in told(make)


def test_conditions_nested_without_end_are_refused_not_followed():
    condition: object = {"kind": "when", "concept": "a", "above": 0.5}
    for _ in range(3000):
        condition = {"kind": "not", "of": condition}
    data = {"pack": "p", "rules": [{"when": condition, "then": {"kind": "flag", "name": "f"}}]}
    assert "nested too deep" in told(lambda: Watch.parse(data))
