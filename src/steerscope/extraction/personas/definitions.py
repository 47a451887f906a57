"""What a role or a trait is, and where it is read from.

The JSON is that of the public role and trait sets, taken unchanged: `instruction` is a list of `{"pos": …}` for a role
and of `{"pos": …, "neg": …}` for a trait, `questions` belong to the persona, `eval_prompt` is what a judge is asked,
with `{question}` and `{answer}` in it. `keywords` (`{"pos": […], "neg": […]}`) are ours, for the judge that counts
words; other fields are passed over. The role `default` is nobody: what it is told, nothing among it, is the ground all
others are compared with. Shared questions are JSONL, an object with a `question` per line.
"""

import json
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, ConfigDict, Field, model_validator

from steerscope.files import reading
from steerscope.specs.base import Spec
from steerscope.specs.errors import BadFile, InvalidRequest, Problem

Kind = Literal["roles", "traits"]
DEFAULT = "default"
_SHIPPED = resources.files("steerscope.extraction.personas") / "data"


class _Foreign(Spec):
    model_config = ConfigDict(extra="ignore")  # public sets hold more than is used here


class Instruction(_Foreign):
    """What the model is told to be, and for a trait its opposite."""

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
    name = Path(path.name).stem
    with reading(str(path), "role or trait"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise BadFile(f"{path} is not a readable role or trait: expected an object with the key instruction")
        return Persona.parse({**data, "name": name})


def names(kind: Kind, folder: Path | None = None) -> list[str]:
    """What a folder of JSON files (default: the shipped one) holds; `default` is left out."""
    found = sorted(file.name.removesuffix(".json") for file in _files(kind, folder))
    return [name for name in found if name != DEFAULT]


def load_personas(kind: Kind, wanted: Sequence[str], folder: Path | None = None) -> list[Persona]:
    """Some personas by name, or `all` of a kind; every name and file that is wrong is told."""
    known, problems, found = names(kind, folder), [], []
    for name in dict.fromkeys(known if list(wanted) == ["all"] else wanted):
        if name not in known:
            problems.append(Problem(kind, f"there is no {name!r}", f"choose from {', '.join(known) or 'none'}"))
            continue
        try:
            persona = load_persona_file((folder or _SHIPPED / kind) / f"{name}.json")
        except BadFile as error:
            problems.append(Problem(kind, str(error), "correct the file"))
            continue
        if persona.kind != kind:
            told = "every instruction of a trait has pos and neg, none of a role has neg"
            problems.append(Problem(kind, f"{name} is one of the {persona.kind}", told))
        found.append(persona)
    if problems:
        raise InvalidRequest(problems)
    return found


def load_default(folder: Path | None = None) -> Persona:
    """The `default.json` of a folder of roles, or the shipped one where it has none."""
    own = folder / f"{DEFAULT}.json" if folder else None
    return load_persona_file(own if own and own.is_file() else _SHIPPED / "roles" / f"{DEFAULT}.json")


def load_questions(path: Path | None = None) -> list[str]:
    """Each question once, in the order of the file."""
    source, problems, found = path or _SHIPPED / "questions.jsonl", [], []
    with reading(str(source), "file of questions"):
        lines = source.read_text(encoding="utf-8").split("\n")  # JSON may hold U+2028
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)["question"]
        except (ValueError, KeyError, TypeError, RecursionError):
            question = None
        if isinstance(question, str) and question.strip():
            found.append(question)
        else:
            problems.append(Problem(f"{source}:{number}", "holds no question", 'write {"question": "…"}'))
    if not problems and not found:
        problems.append(Problem(str(source), "holds no question", 'write {"question": "…"} on each line'))
    if problems:
        raise InvalidRequest(problems)
    return list(dict.fromkeys(found))


def _files(kind: Kind, folder: Path | None) -> list[Path | Traversable]:
    if folder is not None and not folder.is_dir():
        raise BadFile(f"{folder} is not a folder of {kind}")
    return [file for file in (folder or _SHIPPED / kind).iterdir() if file.name.endswith(".json")]
