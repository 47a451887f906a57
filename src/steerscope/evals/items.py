"""What a model is asked: questions, questions with a known answer, and choices of two.

Read from the public forms unchanged, every bad entry named:

    {"instruction": […], "questions": ["…", …], …}                                 a role or trait: its own questions
    [{"question": …, "answer_matching_behavior": "(A)",                            a set of choices, as for contrastive
      "answer_not_matching_behavior": "(B)"}, …]                                   activation addition
    {"question": …, "answer": "Paris" or ["Paris", …], "system": …, "dataset": …}  JSONL; only the question is needed

A set is named after its file. Sets that ship with steerscope are `questions`, `jailbreak` and `facts`; `personas` are
the questions that personas are asked.
"""

import json
from collections.abc import Callable, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from steerscope.extraction.personas.definitions import load_persona_file, load_questions
from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem, not_json

_SHIPPED = resources.files("steerscope.evals") / "data"
_FORMS = 'write {"question": "…"}, with "answer", "system" and "dataset" where wanted, or a choice of two'


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
        if self.choices and (
            self.choices[0].startswith(self.choices[1]) or self.choices[1].startswith(self.choices[0])
        ):
            raise ValueError(f"the choices {self.choices[0]!r} and {self.choices[1]!r} begin alike; write (A) and (B)")
        return self


def shipped() -> list[str]:
    return ["personas", *sorted(Path(file.name).stem for file in _SHIPPED.iterdir() if file.name.endswith(".jsonl"))]


def load_items(source: str | Path) -> list[Item]:
    """A shipped set by its name, or a file; each question of a set once."""
    if str(source) == "personas":
        return [Item(question=question, dataset="personas") for question in load_questions()]
    if str(source) in shipped():
        return _lines(_SHIPPED / f"{source}.jsonl", str(source))
    path = Path(source)
    if not path.is_file():
        what = f"there is no file or set {str(source)!r}"
        raise InvalidRequest([Problem("questions", what, f"give a file, or one of {', '.join(shipped())}")])
    found = _json(path) if path.suffix == ".json" else _lines(path, path.stem)
    if not found:
        raise InvalidRequest([Problem(str(path), "holds no question", _FORMS)])
    return found


def _json(path: Path) -> list[Item]:
    with reading(path, "set of questions"):
        data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict):
        questions = load_persona_file(path).questions
        return _each([(f"{path}: questions[{i}]", {"question": one}) for i, one in enumerate(questions)], path.stem)
    return _each([(f"{path}: [{i}]", one) for i, one in enumerate(data if isinstance(data, list) else [])], path.stem)


def _lines(path: Path | Traversable, dataset: str) -> list[Item]:
    with reading(str(path), "set of questions"):
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold U+2028
    numbered = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    return _each(numbered, dataset, json.loads)


def _each(entries: Sequence[tuple[str, Any]], dataset: str, read: Callable[[str], object] | None = None) -> list[Item]:
    found, problems = dict[tuple[str, str, str], Item](), list[Problem]()
    for where, entry in entries:
        try:
            item = _item(read(entry) if read else entry, dataset)
            found.setdefault((item.dataset, item.system, item.question), item)
        except InvalidRequest as error:
            problems += [_as_written(problem).under(where) for problem in error.problems]
        except (ValueError, RecursionError) as error:
            problems.append(Problem(where, not_json(error), _FORMS))
    if problems:
        raise InvalidRequest(problems)
    return list(found.values())


_WRITTEN = {"choices[0]": "answer_matching_behavior", "choices[1]": "answer_not_matching_behavior"}


def _as_written(problem: Problem) -> Problem:
    """With the field that the user knows."""
    field = _WRITTEN.get(problem.field) or problem.field.replace("expected", "answer", 1)
    return Problem(field, problem.what, problem.remedy)


def _item(entry: object, dataset: str) -> Item:
    if not isinstance(entry, dict):
        raise InvalidRequest([Problem("", "is not an object", _FORMS)])
    fields: dict[str, object] = {"dataset": dataset}
    for name, value in entry.items():
        if name == "answer":
            fields["expected"] = [value] if isinstance(value, str) else value
        elif name == "answer_matching_behavior":
            pair = (value, entry.get("answer_not_matching_behavior"))
            fields["choices"] = [one.strip() if isinstance(one, str) else one for one in pair]
        elif name in ("question", "system", "dataset"):
            fields[name] = value
    return Item.parse(fields)
