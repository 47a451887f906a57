"""The shipped file of concepts is sound, and files that are not are refused with every reason."""

import json
from collections import Counter
from pathlib import Path

import pytest

from steerscope.lenses.fit import TEST, TRAIN, VALIDATION
from steerscope.specs.errors import BadFile, InvalidRequest
from steerscope.training.concepts import FOLDS, ConceptSet, ConceptTexts, load_concepts

FORMS = ("statement", "question", "dialogue", "story")


def concept(name: str, *parents: str, forms: tuple[str, ...] = FORMS, **more: object) -> dict[str, object]:
    return {"id": name, "parents": parents, "texts": {form: [f"{form} about {name}"] for form in forms}, **more}


def refused(*concepts: dict[str, object]) -> list[str]:
    with pytest.raises(InvalidRequest) as error:
        ConceptSet(tuple(ConceptTexts.parse(each) for each in concepts))
    return [str(problem) for problem in error.value.problems]


# --- what is shipped


def test_there_are_more_than_a_hundred_concepts_in_three_levels() -> None:
    shipped = load_concepts()
    levels = Counter(shipped.levels)
    assert len(shipped) >= 110
    assert len(levels) >= 3
    assert levels[0] < levels[1] < levels[2]
    assert any(len(each.parents) > 1 for each in shipped.concepts)


def test_every_concept_has_many_texts_of_many_forms_and_no_text_is_used_twice() -> None:
    shipped = load_concepts()
    positive = shipped.relations.positive.tolist()
    for i, each in enumerate(shipped.concepts):
        own = [example for example in shipped.examples if positive[i][example.concept]]
        assert len(own) >= 10, each.id
        assert len({example.form for example in own}) >= 10, each.id
        assert each.name
        assert each.definition
    texts = [" ".join(example.text.lower().split()) for example in shipped.examples]
    assert len(texts) == len(set(texts))
    assert min(len(text) for text in texts) > 35


@pytest.mark.parametrize("fold", range(FOLDS))
def test_every_concept_has_texts_of_forms_that_are_not_trained_on(fold: int) -> None:
    shipped = load_concepts()
    parts, positive = shipped.parts(fold), shipped.relations.positive.tolist()
    for i in range(len(shipped)):
        found = Counter(parts[example.form] for example in shipped.examples if positive[i][example.concept])
        assert found[TRAIN] >= 6
        assert found[VALIDATION] >= 2
        assert found[TEST] >= 3


def test_every_form_is_tested_in_exactly_one_fold() -> None:
    shipped = load_concepts()
    tested = [form for fold in range(FOLDS) for form, part in shipped.parts(fold).items() if part == TEST]
    assert sorted(tested) == sorted(shipped.forms)


# --- what is refused


def test_all_problems_of_a_file_are_told_together() -> None:
    told = refused(
        concept("a", "b"),
        concept("b", "a"),
        concept("c", "nowhere", opposites=["c", "d"]),
        {"id": "c"},
        {"id": "e", "texts": {"story": ["story about a", " "]}},
    )
    for part in ("a → b", "'nowhere'", "two concepts have this id", "opposite 'c'", "opposite 'd'", "empty", "also a"):
        assert sum(part in line for line in told) == 1, (part, told)


def test_a_concept_without_held_out_forms_is_refused() -> None:
    told = refused(concept("a"), concept("b", forms=("statement", "question")))
    assert len(told) == 1
    assert "concept 'b'" in told[0]
    assert "test" in told[0]


def test_too_few_forms_are_refused() -> None:
    assert "at least 4" in refused(concept("a", forms=("statement", "question", "story")))[0]


def test_a_parent_needs_no_texts_of_its_own() -> None:
    made = ConceptSet(tuple(map(ConceptTexts.parse, ({"id": "a"}, concept("b", "a"), concept("c")))))
    assert made.levels == (0, 1, 0)


def test_lines_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "concepts.jsonl"
    path.write_text('{"id": "a"\n\n' + json.dumps({"id": "b", "text": {}, "parents": "x"}) + "\n", encoding="utf-8")
    with pytest.raises(InvalidRequest) as error:
        load_concepts(path)
    fields = [problem.field for problem in error.value.problems]
    assert fields == [f"{path}:{place}" for place in ("1", "3.parents", "3.text")]
    with pytest.raises(BadFile, match=r"nowhere\.jsonl"):
        load_concepts(tmp_path / "nowhere.jsonl")


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "concepts.jsonl"
    path.write_text("\n".join(each.to_json() for each in load_concepts().concepts), encoding="utf-8")
    assert load_concepts(path) == load_concepts()
