"""Questions from every form that is promised, and what is wrong with a file, entry by entry."""

import json
from pathlib import Path

import pytest

from steerscope.evals.items import Item, load_items, shipped
from steerscope.specs.errors import BadFile, InvalidRequest


def test_shipped_sets_are_read_whole_and_no_question_stands_in_two_of_them() -> None:
    sets = {name: load_items(name) for name in shipped()}
    assert {name: len(items) for name, items in sets.items()} == {
        "personas": 24,
        "facts": 24,
        "jailbreak": 12,
        "questions": 20,
    }
    questions = [item.question for items in sets.values() for item in items]
    assert len(set(questions)) == len(questions)
    assert all(item.dataset == name for name, items in sets.items() for item in items)
    letters = [item.choices[0] for item in sets["facts"] if item.choices]
    assert letters.count("(A)") == letters.count("(B)") == 12  # always answering A is right half the time


def test_a_public_trait_file_gives_its_questions(tmp_path: Path) -> None:
    path = tmp_path / "calm.json"
    data = {"instruction": [{"pos": "p", "neg": "n"}], "questions": ["Why?", "How?", "Why?"], "eval_prompt": "{answer}"}
    path.write_text(json.dumps(data), encoding="utf-8")
    assert load_items(path) == [Item(question="Why?", dataset="calm"), Item(question="How?", dataset="calm")]


@pytest.mark.parametrize("lines", [False, True])
def test_public_choices_of_two_are_taken_unchanged(tmp_path: Path, lines: bool) -> None:
    data = [
        {"question": "Q1", "answer_matching_behavior": " (B)", "answer_not_matching_behavior": " (A)", "id": 7},
        {"question": "Q2", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(B)"},
    ]
    path = tmp_path / ("set.jsonl" if lines else "set.json")
    path.write_text("\n".join(map(json.dumps, data)) if lines else json.dumps(data), encoding="utf-8")
    assert [(item.question, item.choices) for item in load_items(path)] == [
        ("Q1", ("(B)", "(A)")),
        ("Q2", ("(A)", "(B)")),
    ]


def test_lines_may_have_answers_systems_and_sets_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        '{"question": "Capital?\\u2028", "answer": "Paris"}',
        "",
        '{"question": "Q", "answer": ["a", "b"], "dataset": "d", "system": "s"}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert load_items(path) == [
        Item(question="Capital?\u2028", dataset="mine", expected=("Paris",)),
        Item(question="Q", dataset="d", expected=("a", "b"), system="s"),
    ]


def test_everything_wrong_in_a_file_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    same = '{"question": "Q", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(A)"}'
    path.write_text(
        "\n".join(["{", '{"question": " "}', "[]", '{"question": "fine"}', same, '{"text": "x"}']), encoding="utf-8"
    )
    with pytest.raises(InvalidRequest) as caught:
        load_items(path)
    told = [str(problem) for problem in caught.value.problems]
    assert [line.split(": ")[0].removeprefix(str(path)) for line in told] == [":1", ":2", ":3", ":5", ":6.question"]
    assert "is not JSON" in told[0]
    assert "the question is empty; write one" in told[1]
    assert "begin alike; write (A) and (B)" in told[3]


def test_a_set_that_is_not_there_or_empty_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequest, match="there is no file or set 'nothing'; give a file, or one of personas, facts"
    ):
        load_items("nothing")
    (tmp_path / "none.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"none\.jsonl: holds no question"):
        load_items(tmp_path / "none.jsonl")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadFile, match="is not a readable set of questions"):
        load_items(tmp_path / "broken.json")
