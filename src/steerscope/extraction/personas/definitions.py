"""Roles and traits, read from the public sets unchanged.

A role has `instruction: [{"pos": …}]`, a trait `[{"pos": …, "neg": …}]`. `questions` belong to the persona;
`eval_prompt`, with `{question}` and `{answer}` in it, is what a judge is asked. `keywords` (`{"pos": […], "neg": […]}`)
are ours, for the judge that counts words; other fields are ignored. All personas are compared with the role `default`.
Shared questions are JSONL, an object with a `question` per line.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, ConfigDict, Field, model_validator

from steerscope.extraction.data import names_in, numbered_lines, parse_all
from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import BadFile, InvalidRequest, Problem

Kind = Literal["roles", "traits"]
DEFAULT = "default"
_SHIPPED = resources.files("steerscope.extraction.personas") / "data"


class _Foreign(Spec):
    model_config = ConfigDict(extra="ignore")  # public sets hold more than is used here


class Instruction(_Foreign):
    """What the model is instructed to be, and for a trait its opposite."""

    pos: str
    neg: str | None = None


class Keywords(_Foreign):
    pos: tuple[str, ...] = ()
    neg: tuple[str, ...] = ()


class Persona(_Foreign):
    name: str = Field(pattern=r"^[\w.-]+$")  # it becomes the name of files
    instructions: tuple[Instruction, ...] = Field(
        validation_alias=AliasChoices("instruction", "instructions"), min_length=1
    )
    questions: tuple[str, ...] = ()
    eval_prompt: str | None = None
    keywords: Keywords = Keywords()

    @property
    def kind(self) -> Kind:
        return "roles" if self.instructions[0].neg is None else "traits"

    @model_validator(mode="after")
    def _check(self) -> Self:
        empty = any(not text.strip() for one in self.instructions for text in (one.pos, one.neg) if text is not None)
        if empty and self.name != DEFAULT:
            raise ValueError(f"an instruction of {self.name} is empty; write it, or remove it")
        if len({one.neg is None for one in self.instructions}) > 1:
            raise ValueError(f"{self.name} has neg in some instructions only; give it in all (a trait) or in none")
        return self


def load_persona_file(path: Path | Traversable) -> Persona:
    with reading(str(path), "role or trait"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise BadFile(f"{path} is not a readable role or trait: expected an object with the key instruction")
        return Persona.parse({**data, "name": Path(path.name).stem})


def names(kind: Kind, folder: Path | None = None) -> list[str]:
    """Names in a folder of JSON files (default: the shipped one), without `default`."""
    if folder is not None and not folder.is_dir():
        raise BadFile(f"{folder} is not a folder of {kind}")
    return [name for name in names_in(folder or _SHIPPED / kind) if name != DEFAULT]


def load_personas(kind: Kind, wanted: Sequence[str], folder: Path | None = None) -> list[Persona]:
    """Load personas by name, or `all` of a kind; every wrong name and file is reported."""
    known = names(kind, folder)

    def load(name: str) -> Persona:
        if name not in known:
            remedy = f"choose from {', '.join(known) or 'none'}"
            raise InvalidRequest([Problem(kind, f"there is no {name!r}", remedy)])
        try:
            persona = load_persona_file((folder or _SHIPPED / kind) / f"{name}.json")
        except BadFile as error:
            raise InvalidRequest([Problem(kind, str(error), "correct the file")]) from None
        if persona.kind != kind:
            remedy = "every instruction of a trait has pos and neg, none of a role has neg"
            raise InvalidRequest([Problem(kind, f"{name} is one of the {persona.kind}", remedy)])
        return persona

    chosen = known if list(wanted) == ["all"] else dict.fromkeys(wanted)
    return parse_all([("", name) for name in chosen], load)


def load_default(folder: Path | None = None) -> Persona:
    """Load the `default.json` of a folder of roles, or the shipped one where it has none."""
    own = folder / f"{DEFAULT}.json" if folder else None
    return load_persona_file(own if own and own.is_file() else _SHIPPED / "roles" / f"{DEFAULT}.json")


def load_questions(path: Path | None = None) -> list[str]:
    """Return each question once, in the order of the file."""
    source = path or _SHIPPED / "questions.jsonl"
    questions = parse_all(numbered_lines(source, "file of questions"), _question)
    if not questions:
        remedy = 'write {"question": "…"} on each line'
        raise InvalidRequest([Problem(str(source), "holds no question", remedy)])
    return list(dict.fromkeys(questions))


def _question(line: str) -> str:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        question = json.loads(line)["question"]
        if isinstance(question, str) and question.strip():
            return question
    raise InvalidRequest([Problem("", "holds no question", 'write {"question": "…"}')])
