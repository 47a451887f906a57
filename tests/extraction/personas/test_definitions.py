"""Role and trait files: the shipped ones are whole, the public shape is taken as it is, every mistake is reported."""

import json
from pathlib import Path

import pytest

from steerscope.extraction.personas.definitions import load_default, load_personas, load_questions, names
from steerscope.extraction.personas.judges import EndpointJudge, KeywordJudge
from steerscope.specs.errors import InvalidRequest


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_the_shipped_personas_are_enough_and_whole() -> None:
    roles, traits = load_personas("roles", ["all"]), load_personas("traits", ["all"])
    assert len(roles) >= 12
    assert len(traits) >= 8
    every = [*roles, *traits]
    assert KeywordJudge().check(every) == []
    assert EndpointJudge("http://x", "m").check(every) == []
    texts = [text for one in every for told in one.instructions for text in (told.pos, told.neg) if text]
    assert len(texts) == len(set(texts)) == 3 * (len(roles) + 2 * len(traits))
    assert all(len(one.questions) >= 3 and one.eval_prompt and "{question}" in one.eval_prompt for one in every)
    questions = load_questions()
    assert len(questions) >= 20
    assert not set(questions) & {question for one in every for question in one.questions}
    for one in traits:
        assert not set(one.keywords.pos) & set(one.keywords.neg), one.name


def test_the_default_is_nobody_and_no_role() -> None:
    default = load_default()
    assert default.instructions[0].pos == ""
    assert "default" not in names("roles")


def test_the_public_shape_is_taken_unchanged(tmp_path: Path) -> None:
    pirate = {
        "instruction": [{"pos": "You are a pirate."}, {"pos": "Act as a pirate."}],
        "questions": ["Where is the gold?"],
        "eval_prompt": "Rate {question} {answer}",
        "an unknown field": 1,
    }
    write(tmp_path / "pirate.json", pirate)
    write(tmp_path / "default.json", {"instruction": [{"pos": ""}, {"pos": "You are {model_name}."}]})
    (one,) = load_personas("roles", ["all"], tmp_path)
    assert (one.name, one.kind, one.questions) == ("pirate", "roles", ("Where is the gold?",))
    assert [told.pos for told in one.instructions] == ["You are a pirate.", "Act as a pirate."]
    assert len(load_default(tmp_path).instructions) == 2
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        '{"question": "Who?", "id": 0}\n\n{"question": "Why?"}\n{"question": "Who?"}\n', encoding="utf-8"
    )
    assert load_questions(questions) == ["Who?", "Why?"]
    trait = {"instruction": [{"pos": "Be calm.", "neg": "Be wild."}], "questions": [], "eval_prompt": "{answer}"}
    write(tmp_path / "calm.json", trait)
    assert load_personas("traits", ["calm"], tmp_path)[0].kind == "traits"


def test_every_name_and_file_that_is_wrong_is_told(tmp_path: Path) -> None:
    write(tmp_path / "half.json", {"instruction": [{"pos": "a", "neg": "b"}, {"pos": "c"}]})
    write(tmp_path / "bare.json", {"questions": []})
    write(tmp_path / "empty.json", {"instruction": [{"pos": " "}]})
    write(tmp_path / "list.json", [1])
    write(tmp_path / "trait.json", {"instruction": [{"pos": "a", "neg": "b"}]})
    (tmp_path / "torn.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidRequest) as caught:
        load_personas("roles", ["half", "bare", "empty", "list", "torn", "nobody", "trait"], tmp_path)
    told = [problem.what for problem in caught.value.problems]
    assert len(told) == 7
    expected = [
        "neg in some instructions only",
        "instruction",
        "is empty",
        "expected an object",
        "torn.json",
        "'nobody'",
    ]
    for text, found in zip([*expected, "trait is one of the traits"], told, strict=True):
        assert text in found


def test_a_line_separator_inside_a_question_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes('{"question": "Who\u2028are you?"}\r\n{"question": "Why\x85?"}\n'.encode())
    assert load_questions(path) == ["Who\u2028are you?", "Why\x85?"]


def test_lines_without_a_question_are_told_by_number(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Who?"}\nno json\n{"question": " "}\n[1]\n{"q": "x"}\n', encoding="utf-8")
    with pytest.raises(InvalidRequest) as caught:
        load_questions(path)
    assert [problem.field for problem in caught.value.problems] == [f"{path}:{line}" for line in (2, 3, 4, 5)]
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="holds no question"):
        load_questions(path)
