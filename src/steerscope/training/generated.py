"""Texts about a concept that the model itself writes: for training only, never for measuring.

They are written once and kept in the work folder, then read without the prompt that asked for them: a lens must not
learn to see the request.
"""

from collections.abc import Sequence
from pathlib import Path

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.runs import Progress, batches, digest, no_progress, read_json, write_json
from steerscope.specs.sampling import Sampling
from steerscope.training.concepts import GENERATED, ConceptSet, ConceptTexts, Example

_BATCH = 32
_SHORTEST = 40  # characters


def generated_examples(
    engine: SyncEngine, concepts: ConceptSet, each: int, folder: Path, progress: Progress = no_progress
) -> list[Example]:
    """Write up to `each` texts for every concept that has texts of its own, without short and repeated ones."""
    wanted = [
        (i, n, _prompt(concept))
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


def _prompt(concept: ConceptTexts) -> str:
    return f"A short text about {concept.name or concept.id} ({concept.definition}):\n\n"


def _texts(engine: SyncEngine, batch: Sequence[tuple[int, int, str]], folder: Path) -> list[str]:
    path = folder / f"generated-{digest(engine.facts.name, [[n, prompt] for _, n, prompt in batch])}.json"
    if path.is_file():
        return list(read_json(path, "file of generated texts")["texts"])
    samplings = [Sampling(max_tokens=48, temperature=0.9, top_p=0.95, seed=n) for _, n, _ in batch]
    texts = [done.text.strip() for done in engine.generate([prompt for _, _, prompt in batch], samplings)]
    write_json(path, {"texts": texts})
    return texts
