"""Concepts to train lenses on: JSON Lines, one concept a line, with texts sorted by form.

    {"id": "cooking", "name": "Cooking", "definition": "…", "parents": ["food"], "opposites": [],
     "texts": {"question": ["How long should I simmer …?"], "dialogue": ["Mia: …"], …}}

Tests are split by the form of a text (question, dialogue, headline, …): a lens that is tested on forms it has never
seen cannot have learnt the form. A text also counts for every ancestor of its concept, so a parent needs none.

The model itself can write texts about a concept (`generated_examples`): for training only, never for measuring. They
are written once and kept in the work folder, then read without the prompt that asked for them: a lens must not learn
to see the request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import Field

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.data import numbered_lines, parse_all, parse_json
from steerscope.extraction.runs import Progress, batches, digest, no_progress, read_json, write_json
from steerscope.lenses import Concept
from steerscope.lenses.fit import TEST, TRAIN, VALIDATION, Relations
from steerscope.lenses.hierarchy import problems_of
from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.sampling import Sampling

FOLDS = 4
GENERATED = "generated"  # the form of texts a model wrote: for training only
_BATCH = 32  # texts that the model writes together
_SHORTEST = 40  # characters of such a text
PARTS = {TRAIN: "training", VALIDATION: "validation", TEST: "test"}


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
    """Concepts that were checked: all problems of a file are reported together."""

    concepts: tuple[ConceptTexts, ...]

    def __post_init__(self) -> None:
        levels = _levels(self.concepts)
        tree = [Concept(id=one.id, parents=one.parents, level=levels[one.id]) for one in self.concepts]
        problems = [*problems_of(tree), *_text_problems(self.concepts)]
        for one in self.concepts:
            wrong = [name for name in one.opposites if name not in levels or name == one.id]
            whats = [f"its opposite {name!r} is no other concept here" for name in wrong]
            problems += [Problem(f"concept {one.id!r}", what, "add it or leave it out") for what in whats]
        problems = problems or list(self._form_problems())
        if problems:
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
        """Return training, validation or test for each form. Every form is tested in exactly one of the `FOLDS` folds.

        Forms are dealt out in alphabetical order. The next fold's forms are for validation, without the last of them
        where there are several, because training needs it more.
        """
        if not 0 <= fold < FOLDS:
            raise InvalidRequest([Problem("fold", f"{fold} does not exist", f"choose 0–{FOLDS - 1}")])
        dealt = [self.forms[i::FOLDS] for i in range(FOLDS)]
        validation = dealt[(fold + 1) % FOLDS]
        parts = dict.fromkeys(self.forms, TRAIN)
        parts |= dict.fromkeys(validation[: max(1, len(validation) - 1)], VALIDATION)
        return parts | dict.fromkeys(dealt[fold], TEST)

    def under(self, names: Sequence[str]) -> "ConceptSet":
        """Return only these, with their descendants and ancestors."""
        parents = {concept.id: concept.parents for concept in self.concepts}
        if unknown := [name for name in names if name not in parents]:
            raise InvalidRequest(
                [Problem("concepts", f"{name} does not exist", "name one of the file") for name in unknown]
            )

        def above(name: str) -> set[str]:
            return {name}.union(*(above(parent) for parent in parents[name]))

        below = {name for name in parents if above(name) & set(names)}
        kept = below.union(*(above(name) for name in names))
        chosen = []
        for concept in self.concepts:
            if concept.id in kept:
                links = {
                    "parents": tuple(one for one in concept.parents if one in kept),
                    "opposites": tuple(one for one in concept.opposites if one in kept),
                }
                chosen.append(concept.model_copy(update=links))
        return ConceptSet(tuple(chosen))

    def lens_concepts(self, metrics: Sequence[dict[str, float]]) -> list[Concept]:
        """Return the concepts of a pack, in the order of the file."""
        return [
            Concept(id=c.id, name=c.name, definition=c.definition, parents=c.parents, level=level, metrics=found)
            for c, level, found in zip(self.concepts, self.levels, metrics, strict=True)
        ]

    def _form_problems(self) -> Iterator[Problem]:
        """Check that every concept, with its descendants, has texts for each part in every fold."""
        if len(self.forms) < FOLDS:
            what = f"texts have {len(self.forms)} forms ({', '.join(self.forms) or 'none'})"
            yield Problem("texts", what, f"give at least {FOLDS}, so that some can be held out")
            return
        folds = [self.parts(fold) for fold in range(FOLDS)]
        for concept, positive in zip(self.concepts, self.relations.positive, strict=True):
            own = {form for i in positive.nonzero().flatten().tolist() for form in self.concepts[i].texts}
            for fold, parts in enumerate(folds):
                missing = sorted(PARTS.keys() - {parts[form] for form in own if form in parts})
                if missing:
                    what = f"has no texts for {', '.join(PARTS[part] for part in missing)} in fold {fold}"
                    yield Problem(f"concept {concept.id!r}", what, "give it texts of more forms")
                    break


def shipped() -> Traversable:
    """The file that comes with steerscope."""
    return resources.files("steerscope.lenses") / "data" / "concepts.jsonl"


def load_concepts(path: str | Path | None = None) -> ConceptSet:
    """Read a file of concepts; without a path, the one that ships with steerscope."""
    remedy = "write one object a line"
    lines = numbered_lines(shipped() if path is None else Path(path), "file of concepts")
    if not lines:
        raise InvalidRequest([Problem(str(path), "holds no concept", remedy)])
    concepts = parse_all(lines, lambda line: ConceptTexts.parse(parse_json(line, remedy)))
    try:
        return ConceptSet(tuple(concepts))
    except InvalidRequest as error:
        raise InvalidRequest([problem.under(str(path)) for problem in error.problems]) from None


def _levels(concepts: Sequence[ConceptTexts]) -> dict[str, int]:
    """Return the level of each concept; the members of a cycle, which the check of the tree names, have any level."""
    level = {concept.id: 0 for concept in concepts}
    for _ in concepts:
        after = {c.id: max((level.get(p, -1) + 1 for p in c.parents), default=0) for c in concepts}
        if after == level:
            break
        level = after
    return level


def _text_problems(concepts: Sequence[ConceptTexts]) -> Iterator[Problem]:
    owner: dict[str, str] = {}
    for concept in concepts:
        for form, texts in concept.texts.items():
            where = f"concept {concept.id!r}, form {form!r}"
            for text in map(str.strip, texts):
                if not text:
                    yield Problem(where, "a text is empty", "write one")
                elif text in owner:
                    yield Problem(where, f"{text[:40]!r} is also a text of {owner[text]!r}", "use a text once")
                owner[text] = concept.id


def generated_examples(
    engine: SyncEngine, concepts: ConceptSet, each: int, folder: Path, progress: Progress = no_progress
) -> list[Example]:
    """Write up to `each` texts for every concept that has texts of its own, without short and repeated ones."""
    wanted = [
        (i, n, f"A short text about {concept.name or concept.id} ({concept.definition}):\n\n")
        for i, concept in enumerate(concepts.concepts)
        if concept.texts and concept.definition
        for n in range(each)
    ]
    known = {example.text.strip() for example in concepts.examples}
    examples = []
    n_done = 0
    for batch in batches(wanted, _BATCH):
        for (concept, _, _), text in zip(batch, _texts(engine, batch, folder), strict=True):
            if len(text) >= _SHORTEST and text not in known:
                known.add(text)
                examples.append(Example(text, concept, GENERATED))
        n_done += len(batch)
        progress("generating texts", n_done, len(wanted))
    return examples


def _texts(engine: SyncEngine, batch: Sequence[tuple[int, int, str]], folder: Path) -> list[str]:
    path = folder / f"generated-{digest(engine.facts.name, [[n, prompt] for _, n, prompt in batch])}.json"
    if path.is_file():
        return list(read_json(path, "file of generated texts")["texts"])
    samplings = [Sampling(max_tokens=48, temperature=0.9, top_p=0.95, seed=n) for _, n, _ in batch]
    texts = [done.text.strip() for done in engine.generate([prompt for _, _, prompt in batch], samplings)]
    write_json(path, {"texts": texts})
    return texts
