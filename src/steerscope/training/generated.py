"""Texts about a concept that the model itself writes: more to learn from, never anything to be measured by.

They are written once and kept in the work folder, then read like any other text, without the prompt that asked for
them: a lens must not learn to see the request.
"""

import hashlib
import json
from pathlib import Path

from steerscope.engines.sync import SyncEngine
from steerscope.files import atomic_path, reading
from steerscope.specs.sampling import Sampling
from steerscope.training.concepts import GENERATED, ConceptSet, ConceptTexts, Example
from steerscope.training.rows import Progress

_BATCH = 32
_SHORTEST = 40  # signs; what is shorter says too little


def generated_examples(
    engine: SyncEngine, concepts: ConceptSet, each: int, folder: Path, progress: Progress | None = None
) -> list[Example]:
    """Up to `each` texts for every concept that has texts of its own; too short ones and repetitions are left out."""
    wanted = [
        (i, n, _prompt(concept))
        for i, concept in enumerate(concepts.concepts)
        if concept.texts and concept.definition
        for n in range(each)
    ]
    known = {example.text.strip() for example in concepts.examples}
    examples = []
    for start in range(0, len(wanted), _BATCH):
        batch = wanted[start : start + _BATCH]
        for (concept, _, _), text in zip(batch, _texts(engine, batch, folder), strict=True):
            if len(text) >= _SHORTEST and text not in known:
                known.add(text)
                examples.append(Example(text, concept, GENERATED))
        if progress:
            progress("generating texts", min(len(wanted), start + _BATCH), len(wanted))
    return examples


def _prompt(concept: ConceptTexts) -> str:
    return f"A short text about {concept.name or concept.id} ({concept.definition}):\n\n"


def _texts(engine: SyncEngine, batch: list[tuple[int, int, str]], folder: Path) -> list[str]:
    content = json.dumps([engine.facts.name, [[n, prompt] for _, n, prompt in batch]])
    path = folder / f"generated-{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"
    if path.is_file():
        with reading(path, "file of generated texts"):
            return list(json.loads(path.read_text(encoding="utf-8"))["texts"])
    samplings = [Sampling(max_tokens=48, temperature=0.9, top_p=0.95, seed=n) for _, n, _ in batch]
    texts = [done.text.strip() for done in engine.generate([prompt for _, _, prompt in batch], samplings)]
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps({"texts": texts}, ensure_ascii=False), encoding="utf-8")
    return texts
