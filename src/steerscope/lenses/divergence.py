"""Divergence between the concepts of the lenses and those of the text.

For every token the concepts of a pack are ranked twice: by the lenses, and by the similarity of their definitions to
the last few words of the text. A concept that ranks first by lenses and last by text is one that the model represents
and does not write about.

    for found in divergence(generation.readings, texts):
        print(found.position, found.value, found.unsaid)

The embedder is any function from texts to vectors. The default (TF-IDF of character n-grams) needs no model and misses
synonyms; `sentence_embedder()` needs sentence-transformers and finds some.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steerscope.lenses.readings import Readings
from steerscope.specs.errors import InvalidRequest, Problem

Embedder = Callable[[list[str]], np.ndarray]
_FEATURES = 8192


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of one token: `value` is 0 if the text supports all concepts of the reading, and 1 if none.

    `ranks` holds (concept id, probability, rank among the lenses, rank in the text) for the concepts of the reading;
    ranks count from 0, and equal similarities share their mean rank.
    """

    position: int
    value: float
    ranks: tuple[tuple[str, float, int, float], ...]

    @property
    def unsaid(self) -> str | None:
        """Return the concept whose rank in the text is furthest behind, weighted by its probability."""
        behind = [(probability * (text - lens), concept) for concept, probability, lens, text in self.ranks]
        gap, concept = max(behind, default=(0.0, ""))
        return concept if gap > 0 else None


def tfidf_embedder(corpus: Sequence[str]) -> Embedder:
    """Return an embedder with weights from a corpus, such as the definitions: common n-grams count little."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    model = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), max_features=_FEATURES, sublinear_tf=True)
    model.fit(list(corpus))
    return lambda texts: model.transform(texts).toarray().astype(np.float32)  # type: ignore[union-attr]


def sentence_embedder(model: str = "sentence-transformers/all-MiniLM-L6-v2") -> Embedder:
    """Return an embedder by sentence-transformers, which must be installed."""
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]
    except ImportError:
        what = "sentence-transformers is not installed"
        raise InvalidRequest([Problem("embedder", what, "install it, or leave the embedder out")]) from None
    loaded = SentenceTransformer(model)
    return lambda texts: np.asarray(loaded.encode(texts, show_progress_bar=False))


def divergence(
    readings: Readings, texts: Sequence[str], embedder: Embedder | None = None, window: int = 12
) -> list[Divergence]:
    """Return the divergence of every reading. `texts` are the texts of all tokens, prompt and generated; the context of
    a token is itself and the `window` − 1 tokens before it."""
    concepts = readings.pack.concepts
    if window < 1 or (len(readings) and len(texts) <= int(readings.positions[-1])):
        what = f"{len(texts)} texts and a window of {window} do not cover the rows"
        raise InvalidRequest([Problem("texts", what, "give the text of every token, and a window of at least 1")])
    described = [f"{concept.name.replace('_', ' ')}. {concept.definition}" for concept in concepts]
    embed = embedder or tfidf_embedder(described)
    contexts = ["".join(texts[max(0, t + 1 - window) : t + 1]) for t in readings.positions.tolist()]
    if not contexts:
        return []
    from scipy.stats import rankdata
    from sklearn.metrics.pairwise import cosine_similarity

    similar = cosine_similarity(embed(contexts), embed(described))
    text_ranks = rankdata(-np.round(similar, 9), axis=1) - 1
    return [_of(readings, i, text_ranks[i]) for i in range(len(readings))]


def _of(readings: Readings, i: int, text_ranks: np.ndarray) -> Divergence:
    found = zip(readings.indices[i].tolist(), readings.values[i].tolist(), strict=True)
    lenses = [(lens, value) for lens, value in found if lens >= 0]
    most = max(1, len(text_ranks) - 1)
    ranks: list[tuple[str, float, int, float]] = []
    gap = weight = 0.0
    for rank, (lens, value) in enumerate(lenses):
        text = float(text_ranks[lens])
        ranks.append((readings.pack.concepts[lens].id, value, rank, text))
        gap += value * max(0.0, text - rank) / most
        weight += value
    return Divergence(int(readings.positions[i]), gap / weight if weight else 0.0, tuple(ranks))
