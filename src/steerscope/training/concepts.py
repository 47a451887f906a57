"""Concepts to train lenses on: JSON Lines, one concept a line, with texts sorted by form.

    {"id": "cooking", "name": "Cooking", "definition": "…", "parents": ["food"], "opposites": [],
     "texts": {"question": ["How long should I simmer …?"], "dialogue": ["Mia: …"], …}}

The form of a text (question, dialogue, headline, …) is what tests are split by: a lens that is tested on forms it has
never seen cannot have learnt the form. A text also counts for everything above its concept, so a parent needs none of
its own.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import Field

from steerscope.files import reading
from steerscope.lenses import Concept
from steerscope.lenses.fit import TEST, TRAIN, VALIDATION, Relations
from steerscope.lenses.hierarchy import problems_of
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem, not_json

FOLDS = 4
GENERATED = "generated"  # the form of texts a model wrote: for training only


class ConceptTexts(Spec):
    """One line of the file."""

    id: str = Field(min_length=1)
    name: str = ""
    definition: str = ""
    parents: tuple[str, ...] = ()
    opposites: tuple[str, ...] = ()
    texts: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Example:
    """One text, the index of the concept it was written for, and its form."""

    text: str
    concept: int
    form: str


@dataclass(frozen=True)
class ConceptSet:
    """Valid by construction: all that is wrong with a file is told at once."""

    concepts: tuple[ConceptTexts, ...]

    def __post_init__(self) -> None:
        if problems := _problems(self.concepts):
            raise InvalidRequest(problems)

    def __len__(self) -> int:
        return len(self.concepts)

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        return tuple(
            Example(text, i, form)
            for i, concept in enumerate(self.concepts)
            for form, texts in concept.texts.items()
            for text in texts
        )

    @cached_property
    def forms(self) -> tuple[str, ...]:
        return tuple(sorted({example.form for example in self.examples} - {GENERATED}))

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Roots are at level 0, everything else one below its deepest parent."""
        return tuple(_levels(self.concepts).values())

    @cached_property
    def relations(self) -> Relations:
        place = {concept.id: i for i, concept in enumerate(self.concepts)}
        parents = [[place[name] for name in concept.parents] for concept in self.concepts]
        return Relations.of(parents, [[place[name] for name in concept.opposites] for concept in self.concepts])

    def parts(self, fold: int = 0) -> dict[str, int]:
        """Form → training, validation or test. Every form is tested in exactly one of the `FOLDS` folds.

        Forms are dealt out by the alphabet, so nobody chose which are easy. The next fold's forms are for validation,
        but for the last of them where there are several: training needs it more.
        """
        if not 0 <= fold < FOLDS:
            raise InvalidRequest([Problem("fold", f"{fold} does not exist", f"choose 0–{FOLDS - 1}")])
        dealt = [self.forms[i::FOLDS] for i in range(FOLDS)]
        tested, judged = dealt[fold], dealt[(fold + 1) % FOLDS]
        judged = judged[: max(1, len(judged) - 1)]
        return {form: TEST if form in tested else VALIDATION if form in judged else TRAIN for form in self.forms}

    def under(self, names: Sequence[str]) -> "ConceptSet":
        """Only these, with all below them and all above them."""
        parents = {concept.id: concept.parents for concept in self.concepts}
        if unknown := [name for name in names if name not in parents]:
            raise InvalidRequest(
                [Problem("concepts", f"{name} does not exist", "name one of the file") for name in unknown]
            )

        def above(name: str) -> set[str]:
            return {name}.union(*(above(parent) for parent in parents[name]))

        below = {name for name in parents if above(name) & set(names)}
        kept = below.union(*(above(name) for name in names))
        return ConceptSet(
            tuple(
                concept.model_copy(
                    update={
                        "parents": tuple(parent for parent in concept.parents if parent in kept),
                        "opposites": tuple(other for other in concept.opposites if other in kept),
                    }
                )
                for concept in self.concepts
                if concept.id in kept
            )
        )

    def lens_concepts(self, metrics: Sequence[dict[str, float]]) -> list[Concept]:
        """As a pack has them, in the order of the file."""
        return [
            Concept(id=c.id, name=c.name, definition=c.definition, parents=c.parents, level=level, metrics=found)
            for c, level, found in zip(self.concepts, self.levels, metrics, strict=True)
        ]


def shipped() -> Traversable:
    """The file that comes with steerscope."""
    return resources.files("steerscope.lenses") / "data" / "concepts.jsonl"


def load_concepts(path: str | Path | None = None) -> ConceptSet:
    """Read a file of concepts; without a path, the one that ships with steerscope."""
    with reading(str(path), "file of concepts"):
        text = (shipped() if path is None else Path(path)).read_text(encoding="utf-8")
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    concepts, problems = [], [] if lines else [Problem(str(path), "holds no concept", "write one object a line")]
    for number, line in lines:
        try:
            concepts.append(ConceptTexts.parse(json.loads(line)))
        except InvalidRequest as error:
            problems += [problem.under(f"{path}:{number}") for problem in error.problems]
        except (ValueError, RecursionError) as error:
            problems.append(Problem(f"{path}:{number}", not_json(error), "write one object a line"))
    if problems:
        raise InvalidRequest(problems)
    try:
        return ConceptSet(tuple(concepts))
    except InvalidRequest as error:
        raise InvalidRequest([problem.under(str(path)) for problem in error.problems]) from None


def _levels(concepts: Sequence[ConceptTexts]) -> dict[str, int]:
    """Without recursion; a cycle leaves its members where the rounds end, for the check of the tree to name them."""
    level = {concept.id: 0 for concept in concepts}
    for _ in concepts:
        after = {c.id: max((level.get(p, -1) + 1 for p in c.parents), default=0) for c in concepts}
        if after == level:
            break
        level = after
    return level


def _problems(concepts: Sequence[ConceptTexts]) -> list[Problem]:
    level = _levels(concepts)
    tree = [Concept(id=c.id, parents=c.parents, level=level[c.id]) for c in concepts]
    found = problems_of(tree) + list(_text_problems(concepts))
    for concept in concepts:
        for other in concept.opposites:
            if other not in level or other == concept.id:
                where = f"concept {concept.id!r}"
                found.append(
                    Problem(where, f"its opposite {other!r} is no other concept here", "add it or leave it out")
                )
    return found or _form_problems(concepts)


def _text_problems(concepts: Sequence[ConceptTexts]) -> Iterator[Problem]:
    owner: dict[str, str] = {}
    for concept in concepts:
        for form, texts in concept.texts.items():
            for text in texts:
                where, short = f"concept {concept.id!r}, form {form!r}", text.strip()[:40]
                if not short:
                    yield Problem(where, "a text is empty", "write one")
                elif text.strip() in owner:
                    yield Problem(where, f"{short!r} is also a text of {owner[text.strip()]!r}", "use a text once")
                owner[text.strip()] = concept.id


def _form_problems(concepts: Sequence[ConceptTexts]) -> list[Problem]:
    """In any fold a concept, with what lies below it, needs texts to learn from, to stop by and to be tested on."""
    unchecked = object.__new__(ConceptSet)
    object.__setattr__(unchecked, "concepts", tuple(concepts))
    if len(unchecked.forms) < FOLDS:
        what = f"texts have {len(unchecked.forms)} forms ({', '.join(unchecked.forms) or 'none'})"
        return [Problem("texts", what, f"give at least {FOLDS}, so that some can be held out")]
    positive, found = unchecked.relations.positive, []
    forms: list[set[str]] = [set(concept.texts) for concept in concepts]
    names = {TRAIN: "training", VALIDATION: "validation", TEST: "test"}
    splits = [unchecked.parts(fold) for fold in range(FOLDS)]
    for i, concept in enumerate(concepts):
        own = {form for j in positive[i].nonzero().flatten().tolist() for form in forms[j]}
        for fold, split in enumerate(splits):
            missing = set(names) - {split[form] for form in own if form in split}
            if missing:
                lacking = ", ".join(names[part] for part in sorted(missing))
                what = f"has no texts for {lacking} in fold {fold}"
                found.append(Problem(f"concept {concept.id!r}", what, "give it texts of more forms"))
                break
    return found
