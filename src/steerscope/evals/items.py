"""What a model is asked: questions, questions with a known answer, and choices of two.

Read from the public forms unchanged, every bad entry named:

    {"instruction": […], "questions": ["…", …], …}                                 a role or trait: its own questions
    [{"question": …, "answer_matching_behavior": "(A)",                            a set of choices, as for contrastive
      "answer_not_matching_behavior": "(B)"}, …]                                   activation addition
    {"question": …, "answer": "Paris" or ["Paris", …], "system": …, "dataset": …}  JSONL; only the question is needed

A set is named after its file. `questions`, `jailbreak` and `facts` ship with steerscope; `personas` are the questions
that personas are asked.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Self

from pydantic import model_validator

from steerscope.extraction.data import names_in, numbered_lines, parse_all, parse_json
from steerscope.extraction.personas.definitions import load_persona_file, load_questions
from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem

_SHIPPED = resources.files("steerscope.evals") / "data"
_FORMS = 'write {"question": "…"}, with "answer", "system" and "dataset" where wanted, or a choice of two'
# Fields of an item → what users write
_WRITTEN = {"choices[0]": "answer_matching_behavior", "choices[1]": "answer_not_matching_behavior"}


class Item(Spec):
    """One question. `expected`: any of these makes an answer right; `choices`: the wanted one, and the other."""

    question: str
    dataset: str
    system: str = ""
    expected: tuple[str, ...] = ()
    choices: tuple[str, str] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.question.strip():
            raise ValueError("the question is empty; write one")
        if any(not text.strip() for text in (*self.expected, *(self.choices or ()))):
            raise ValueError("an answer is empty; write it, or leave it out")
        if self.choices:
            one, other = self.choices
            if one.startswith(other) or other.startswith(one):
                raise ValueError(f"the choices {one!r} and {other!r} begin alike; write (A) and (B)")
        return self


def shipped() -> list[str]:
    return ["personas", *names_in(_SHIPPED, ".jsonl")]


def load_items(source: str | Path) -> list[Item]:
    """Load a shipped set by its name, or a file; each question of a set once."""
    name = str(source)
    path = Path(source)
    if name == "personas":
        return [Item(question=question, dataset=name) for question in load_questions()]
    if name in shipped():
        entries = numbered_lines(_SHIPPED / f"{name}.jsonl", "set of questions")
    elif not path.is_file():
        remedy = f"give a file, or one of {', '.join(shipped())}"
        raise InvalidRequest([Problem("questions", f"there is no file or set {name!r}", remedy)])
    elif path.suffix == ".json":
        entries = _json_entries(path)
    else:
        entries = numbered_lines(path, "set of questions")
    items = parse_all(entries, lambda entry: _item(entry, path.stem))
    if not items:
        raise InvalidRequest([Problem(name, "holds no question", _FORMS)])
    found: dict[tuple[str, str, str], Item] = {}
    for item in items:
        found.setdefault((item.dataset, item.system, item.question), item)
    return list(found.values())


def _json_entries(path: Path) -> list[tuple[str, object]]:
    with reading(path, "set of questions"):
        data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):
        questions = load_persona_file(path).questions
        return [(f"{path}: questions[{i}]", {"question": one}) for i, one in enumerate(questions)]
    return [(f"{path}: [{i}]", one) for i, one in enumerate(data if isinstance(data, list) else [])]


def _item(entry: object, dataset: str) -> Item:
    data = parse_json(entry, _FORMS) if isinstance(entry, str) else entry
    if not isinstance(data, dict):
        raise InvalidRequest([Problem("", "is not an object", _FORMS)])
    fields: dict[str, object] = {"dataset": dataset}
    fields |= {name: data[name] for name in ("question", "system", "dataset") if name in data}
    if "answer" in data:
        answer = data["answer"]
        fields["expected"] = [answer] if isinstance(answer, str) else answer
    if "answer_matching_behavior" in data:
        pair = [data.get(name) for name in _WRITTEN.values()]
        fields["choices"] = [one.strip() if isinstance(one, str) else one for one in pair]
    try:
        return Item.parse(fields)
    except InvalidRequest as error:
        raise InvalidRequest(
            Problem(_WRITTEN.get(one.field) or one.field.replace("expected", "answer", 1), one.what, one.remedy)
            for one in error.problems
        ) from None
