"""Judges: the word counter's scale, and a real HTTP server in place of a model behind an endpoint."""

import math
import re
import threading
import time

import pytest

from extraction.personas.conftest import role
from steerscope.extraction.personas.definitions import Persona
from steerscope.extraction.personas.judges import (
    REFUSAL,
    EndpointJudge,
    Judged,
    KeywordJudge,
    NoScore,
    Score,
    parse_score,
    prompt_for,
)
from steerscope.extraction.runs import Interrupted
from steerscope.specs.errors import InvalidRequest, SteerscopeError
from support.fake_endpoint import endpoint, says

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

PIRATE = Persona.parse(
    {"name": "pirate", "instruction": [{"pos": "p"}], "keywords": {"pos": ["ship", "gold", "the sea"]}}
)
CALM = Persona.parse(
    {"name": "calm", "instruction": [{"pos": "p", "neg": "n"}], "keywords": {"pos": ["calm", "rest"], "neg": ["rush"]}}
)
NO_SCORE = NoScore("its reply holds no score")


def scores(judge: EndpointJudge, answers: list[Judged]) -> list[Score | NoScore]:
    """What a judge says of answers of the pirate, in their order."""
    found = dict(judge(PIRATE, answers))
    return [found[i] for i in range(len(answers))]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("I'm sorry, but I can't do that.", 0),
        ("I can't answer this.", 0),
        ("I like tea.", 1),
        ("My SHIP is fast.", 2),
        ("shipping is slow", 2),
        ("a flagship", 1),  # a keyword counts where a word begins
        ("My ship, my ship, my ship", 2),  # different words count
        ("The ship is full of gold.", 3),
        ("I can't rest: the sea calls, and gold!", 3),
        ("As an AI I know of ships and gold.", 2),
    ],
)
def test_words_give_a_role_0_to_3(answer: str, score: int) -> None:
    assert KeywordJudge()(PIRATE, [Judged("?", answer)]) == [score]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("A table.", 50.0),
        ("So calm.", 83.3),
        ("calm, resting", 90.0),
        ("Rush, rush!", 16.7),
        ("calm and rushed", 50.0),
        ("I am unable to say.", REFUSAL),
    ],
)
def test_words_give_a_trait_0_to_100(answer: str, score: Score) -> None:
    assert KeywordJudge()(CALM, [Judged("?", answer)]) == [score]


def test_who_has_no_keywords_is_told_before_anything_is_generated() -> None:
    plain = Persona.parse({"name": "plain", "instruction": [{"pos": "p"}]})
    half = CALM.model_copy(update={"name": "half", "keywords": PIRATE.keywords})
    assert [problem.field for problem in KeywordJudge().check([PIRATE, plain, CALM, half])] == ["plain", "half"]


@pytest.mark.parametrize(
    ("reply", "highest", "score"),
    [
        ("3", 3, 3),
        ("Score: 2.", 3, 2),
        ("**1**", 3, 1),
        ("2/3", 3, 2),
        ("REFUSAL", 100, REFUSAL),
        ("refusal", 3, 0),
        ("On a scale of 100000 it is 70", 100, None),  # on another scale
        ("On a scale of 100, it is 70", 100, 70),
        ("<think>3 of 5</think> 40", 100, 40),
        ("<THINK>\n2, no, 3.\n</THINK>\n\n2", 3, 2),
        ("<thinking>a <think>1</think> 2</thinking> 40", 100, 40),
        ("It shows 2 signs.</think>40", 100, 40),  # the template opened the block
        ("[THINK]perhaps 30[/THINK]40", 100, 40),
        ("<think>It is 40", 100, None),
        ("40 <think>or rather 50", 100, None),
        ("<think>10</think> 40 <think>or", 100, None),
        ("<think>Is it a REFUSAL?</think> 40", 100, 40),
        ("<think>40</think>", 100, None),
        ("1,000", 100, None),
        ("1,000.5", 100, None),
        ("12,345,678", 100, None),
        ("8/1,000", 100, None),
        ("3,5", 100, None),
        ("1 000", 100, None),
        ("101", 100, None),
        ("100.5", 100, None),
        ("40 or 50", 100, None),
        ("40-50", 100, None),
        ("40–50", 100, None),
        ("Between 30 and 50: 40", 100, None),
        ("40, that is, 40.0", 100, 40),
        ("Score: 40", 100, 40),
        ("Score: 40/100. I give 40.", 100, 40),
        ("40 out of 100", 100, 40),
        ("40 of 100", 100, 40),
        ("4 out of 5", 100, None),
        ("4/5", 100, None),
        ("3/3", 3, 3),
        ("3 out of 5", 3, None),
        ("99 of 1,000: 10", 100, 10),
        ("40%", 100, 40),
        ("40 %.", 100, 40),
        ("Forty, that is 40 percent", 100, 40),
        ("From 0% to 100%: 40%", 100, 40),
        ("90% sure: 40", 100, None),  # which of them?
        ("90% sure: 2", 3, 2),
        ("67%", 3, None),
        ("87.5", 100, 87.5),
        ("70/100", 100, 70),
        ("8/10", 100, None),
        ("4 out of 5, so 80", 100, 80),
        ("2.5/5", 3, None),
        ("-5", 100, None),
        ("no idea", 3, None),
        ("", 3, None),
        ("7", 3, None),
        ("gpt4", 100, None),
        ("0 to 3: 2", 3, 2),
        ("On the scale from 0 to 100 it is 70.", 100, 70),
        ("0–3: 1", 3, 1),
        ("Out of 3, I give 2", 3, 2),
        ("a score of 3", 3, 3),
        ("2 out of 3", 3, 2),
        ("0", 3, 0),
        ("This is not a refusal: 85", 100, 85),
        ("No refusal. 2", 3, 2),
        ("It isn't a REFUSAL; 3", 3, 3),
        ("Refusal: no. Score: 2", 3, 2),
        ("I do not know, REFUSAL", 100, REFUSAL),
        ("REFUSAL: no answer is given", 100, REFUSAL),
    ],
)
def test_the_one_number_on_the_scale_is_the_score(reply: str, highest: int, score: Score | None) -> None:
    assert parse_score(reply, highest) == score


def test_an_answer_cannot_write_into_the_judges_prompt() -> None:
    persona = PIRATE.model_copy(update={"eval_prompt": "Q {question} A {answer} {question.__class__}"})
    one = Judged("who {answer}?", "{question} {name}")
    assert prompt_for(persona, one) == "Q who {answer}? A {question} {name} {question.__class__}"


def test_each_answer_is_judged_once_and_scores_come_in_order() -> None:
    def reply(_: int, body: dict) -> tuple[int, object]:
        return 200, says(f"I give {body['messages'][0]['content'].split('score-')[1][0]}")

    with endpoint(reply) as (url, seen):
        judge = EndpointJudge(url + "/", "some-model", "key", at_once=3)
        answers = [Judged("Who?", f"score-{i % 5}") for i in range(11)]
        assert scores(judge, answers) == [i % 5 if i % 5 < 4 else NO_SCORE for i in range(11)]
    assert len(seen) == 11
    assert {(one["path"], one["key"], one["model"]) for one in seen} == {
        ("/v1/chat/completions", "Bearer key", "some-model")
    }
    assert "pirate" in seen[0]["messages"][0]["content"]
    assert "key" not in repr(judge).replace("api_key", "")


def test_a_busy_endpoint_is_asked_again() -> None:
    with endpoint(lambda n, _: (200, says("2")) if n > 2 else ((429, {}) if n == 1 else (503, {}))) as (url, seen):
        assert scores(EndpointJudge(url, "m", pause_s=0.01), [Judged("?", "a")]) == [2]
    assert len(seen) == 3


@pytest.mark.parametrize(("status", "asked"), [(401, 1), (500, 3)])
def test_an_endpoint_that_will_not_judge_ends_the_judging_with_its_reason(status: int, asked: int) -> None:
    with (
        endpoint(lambda *_: (status, {"error": "no such key"})) as (url, seen),
        pytest.raises(SteerscopeError, match=f"m at {url} answers {status}: .*no such key.*--resume"),
    ):
        scores(EndpointJudge(url, "m", tries=3, pause_s=0.01), [Judged("?", "a")])
    assert len(seen) == asked


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_is_refused_has_no_score_and_the_others_have(status: int) -> None:
    def reply(_: int, body: dict) -> tuple[int, object]:
        return (status, {"error": "too long"}) if "long" in body["messages"][0]["content"] else (200, says("2"))

    answers = [Judged("?", text) for text in ("a", "long", "b")]
    with endpoint(reply) as (url, seen):
        first, refused, last = scores(EndpointJudge(url, "m", tries=3), answers)
    assert (first, last, len(seen)) == (2, 2, 3)
    assert isinstance(refused, NoScore)
    assert refused.reason == f'the judge answers {status}: {{"error": "too long"}}'


@pytest.mark.parametrize("limit", [3, 8])
def test_the_same_refusal_again_and_again_ends_the_judging_with_the_endpoints_words(limit: int) -> None:
    """Whatever number each request has, beside the words or in them; the same judge may be asked again."""
    words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    answers = [Judged("?", str(i)) for i in range(60)]

    def refusal(n: int, _: dict) -> tuple[int, object]:
        return 400, {"error": {"message": f"{words} (request id: 2026-{n}ab)"}, "request_id": f"r{n}"}

    with endpoint(refusal) as (url, seen):
        judge = EndpointJudge(url, "m", at_once=2, same_refusals=limit)
        for _ in range(2):
            told = f"refuses {limit} prompts in a row with the same words: 400: {re.escape(words)}; .*--resume"
            with pytest.raises(Interrupted, match=told):
                scores(judge, answers)
    assert 2 * limit <= len(seen) <= 2 * (limit + 4)


def test_refusals_are_counted_over_calls_and_other_words_or_a_score_end_the_row() -> None:
    def reply(_: int, body: dict) -> tuple[int, object]:
        text = body["messages"][0]["content"]
        return (200, says("2")) if "fine" in text else (400, {"error": "other" if "other" in text else "no credit"})

    with endpoint(reply) as (url, _):
        judge = EndpointJudge(url, "m", at_once=1, same_refusals=3)
        for one in ("a", "b", "fine", "c", "d", "other", "e", "f"):
            scores(judge, [Judged("?", one)])
        with pytest.raises(Interrupted, match="no credit"):
            scores(judge, [Judged("?", "g")])
        never = EndpointJudge(url, "m", at_once=1, same_refusals=0)
        assert len(scores(never, [Judged("?", "a")] * 20)) == 20


def test_limits_are_sent_and_hold() -> None:
    with endpoint(lambda *_: (200, says("2"))) as (url, seen):
        scores(EndpointJudge(url, "m"), [Judged("?", "a")])
        scores(EndpointJudge(url, "m", max_tokens=512, temperature=0.5), [Judged("?", "a")])
        scores(EndpointJudge(url, "m", max_completion_tokens=900, temperature=None), [Judged("?", "a")])
    names = ("max_tokens", "max_completion_tokens", "temperature")
    assert [[one.get(name) for name in names] for one in seen] == [[16, None, 0.0], [512, None, 0.5], [None, 900, None]]
    assert "max_tokens" not in seen[2]
    assert "temperature" not in seen[2]
    now, most, lock = [0], [0], threading.Lock()

    def slow(*_: object) -> tuple[int, object]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return 200, says("2")

    with endpoint(slow) as (url, seen):
        scores(EndpointJudge(url, "m", at_once=3), [Judged("?", str(i)) for i in range(12)])
        assert most[0] <= 3
        with pytest.raises(SteerscopeError, match="cannot be reached"):
            scores(EndpointJudge(url, "m", timeout_s=0.01, tries=2, pause_s=0), [Judged("?", "a")])


def test_thinking_that_was_cut_off_is_told() -> None:
    with endpoint(lambda *_: (200, says("<think>The answer"))) as (url, _):
        assert scores(EndpointJudge(url, "m"), [Judged("?", "a")]) == [
            NoScore("its thinking was cut off: give it more tokens")
        ]


def test_what_was_said_before_the_endpoint_went_away_comes_before_the_failure() -> None:
    with endpoint(lambda n, _: (200, says("3")) if n < 4 else (403, {})) as (url, seen):
        judged = EndpointJudge(url, "m", at_once=1)(PIRATE, [Judged("?", str(i)) for i in range(50)])
        assert [next(judged) for _ in range(3)] == [(0, 3), (1, 3), (2, 3)]
        with pytest.raises(Interrupted, match="answers 403"):
            next(judged)
    assert len(seen) < 10  # and the rest was not asked for


def test_an_endpoint_that_is_not_there_is_told() -> None:
    with pytest.raises(SteerscopeError, match="cannot be reached"):
        scores(EndpointJudge("http://127.0.0.1:9/v1", "m", tries=2, pause_s=0.01), [Judged("?", "a")])


def test_an_answer_that_is_no_completion_is_no_judgement() -> None:
    with endpoint(lambda *_: (200, ["odd"])) as (url, _):
        (found,) = scores(EndpointJudge(url, "m"), [Judged("?", "a")])
    assert found == NoScore("the judge's answer is no completion: '[\"odd\"]'")


@pytest.mark.parametrize("url", ["http://host:port/v1", "http://[::1/v1", "http://", "http:///v1", "http://a\x00b"])
def test_an_address_that_cannot_be_one_is_told_at_once(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an address; write it like http"):
        EndpointJudge(url, "m")


def test_wrong_settings_are_told_together() -> None:
    with pytest.raises(InvalidRequest) as caught:
        EndpointJudge("ftp://x", "")
    assert [problem.field for problem in caught.value.problems] == ["judge", "judge model"]
    wrong: dict[str, object] = {"max_tokens": 0, "max_completion_tokens": 1.5, "at_once": None, "tries": "x"}
    wrong |= {"same_refusals": True, "temperature": math.nan, "pause_s": math.inf, "timeout_s": -1}
    with pytest.raises(InvalidRequest) as caught:
        EndpointJudge("http://x", "m", **wrong)  # type: ignore[arg-type]
    assert [str(problem) for problem in caught.value.problems] == [
        "judge max_tokens: cannot be 0; give a whole number of 1 or more",
        "judge max_completion_tokens: cannot be 1.5; give a whole number of 1 or more, or none",
        "judge at_once: cannot be None; give a whole number of 1 or more",
        "judge tries: cannot be 'x'; give a whole number of 1 or more",
        "judge same_refusals: cannot be True; give a whole number of 0 or more",
        "judge temperature: cannot be nan; give a number of 0 or more, or none",
        "judge pause_s: cannot be inf; give a number of 0 or more",
        "judge timeout_s: cannot be -1; give a number of 0.001 or more",
    ]
    blind = role("blind", "x").model_copy(update={"eval_prompt": "Was it good?"})
    assert EndpointJudge("http://x", "m").check([blind])[0].field == "blind.eval_prompt"
