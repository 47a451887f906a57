"""A text about what the lenses see diverges little, one about something else much; the default embedder is enough."""

import numpy as np
import pytest

from lenses.packs import info, weights
from steerscope.lenses import Concept, Pack
from steerscope.lenses.divergence import divergence, sentence_embedder, tfidf_embedder
from steerscope.lenses.readings import Readings
from steerscope.specs.errors import InvalidRequest

THEMES = {
    "dog": "a dog that barks, a puppy on a leash",
    "ocean": "the ocean, waves and salt water, a beach",
    "money": "money in a bank, coins and a loan",
    "music": "music, a song played on a guitar or piano",
}
CONCEPTS = [Concept(id=name, definition=text) for name, text in THEMES.items()]
PACK = Pack(info(), CONCEPTS, weights(info(), 4))
TEXTS = ["The", " puppy", " barks", " at", " the", " other", " dog", " on", " a", " leash"]


def seen(*best: str) -> Readings:
    """Every row of the text is read as these concepts, in this order."""
    lenses = [PACK.index(name) for name in best]
    n, values = len(TEXTS), np.linspace(0.9, 0.6, len(best), dtype=np.float32)
    at = np.arange(n)
    return Readings(PACK, at, at + 100, np.tile(values, (n, 1)), np.tile(np.array(lenses), (n, 1)))


def test_a_text_about_what_the_lenses_see_diverges_less_than_one_about_something_else():
    agree, differ = divergence(seen("dog"), TEXTS), divergence(seen("money"), TEXTS)
    assert [found.position for found in agree] == list(range(10))
    assert agree[-1].value == 0
    assert agree[-1].unsaid is None
    assert differ[-1].value > 0.3
    assert differ[-1].unsaid == "money"


def test_the_hidden_concept_is_found_beside_one_that_is_said():
    found = divergence(seen("dog", "money"), TEXTS)[-1]
    assert found.unsaid == "money"
    assert [(concept, rank) for concept, _, rank, _ in found.ranks] == [("dog", 0), ("money", 1)]
    assert divergence(seen("money", "dog"), TEXTS)[-1].value > found.value, "the more so if it comes first"


def test_only_the_last_words_count():
    texts = [*TEXTS[:-4], " money", " in", " a", " bank"]
    assert divergence(seen("money"), texts, window=4)[-1].value == 0
    assert divergence(seen("money"), texts, window=4)[5].value > 0.3


def test_any_embedder_will_do_and_its_length_does_not_matter():
    def about(texts: list[str]) -> np.ndarray:
        return np.array([[7.0, 0.0] if "money" in text else [0.0, 3.0] for text in texts])

    found = divergence(seen("money"), TEXTS, embedder=about)[-1]
    assert found.ranks[0][3] == 3, "three concepts are nearer to the text"
    assert found.value == 1.0


def test_a_context_that_is_like_nothing_ranks_all_alike():
    found = divergence(seen("dog"), ["☃"] * 10)[-1]
    assert found.ranks[0][3] == 1.5


def test_texts_that_do_not_cover_the_rows_are_refused():
    with pytest.raises(InvalidRequest, match="3 texts and a window of 12 do not cover the rows"):
        divergence(seen("dog"), TEXTS[:3])


def test_sentence_embeddings_say_what_they_need(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(InvalidRequest, match="sentence-transformers is not installed; install it"):
        sentence_embedder()


def test_shared_letters_make_words_similar():
    embed = tfidf_embedder(list(THEMES.values()))
    one, other, far = embed(["barking puppies", "a puppy barks", "a bank loan"])
    assert one @ other > one @ far
