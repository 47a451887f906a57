"""What the docs say of vectors: the committed results hold, and they were measured on what made no part of them."""

import json
import re
from pathlib import Path

import pytest

from steerscope.bench import vector_tables
from steerscope.bench.vector_study import DATA
from steerscope.extraction import load_contrast_set, sentences
from steerscope.extraction.data import shipped_sets

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "bench" / "results"


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", shipped_sets())
def test_every_shipped_set_gives_a_vector_that_reads_and_steers(name: str) -> None:
    found = result("vector_study")["sets"][name]
    assert found["auroc"] >= 0.9
    assert len(found["random_gaps"]) >= 20
    spread = (sum(gap**2 for gap in found["random_gaps"]) / len(found["random_gaps"])) ** 0.5
    assert found["z"] == pytest.approx(found["gaps"][-1] / spread)
    assert found["z"] >= 3
    assert found["gaps"][-1] > max(map(abs, found["random_gaps"]))
    assert [0.0, *found["gaps"]] == sorted([0.0, *found["gaps"]])
    assert found["parts"][-1] == 1
    assert max(found["perplexity_ratio"]) < 2


@pytest.mark.parametrize("name", shipped_sets())
def test_test_prompts_and_words_are_not_in_the_data(name: str) -> None:
    data, asked = load_contrast_set(name), DATA[name]
    texts = [*sentences(data.extraction), *sentences(data.heldout)]
    words = {word for text in texts for word in re.findall(r"[a-z]+", text.lower())}
    assert not words & {*asked["positive"], *asked["negative"]}
    assert not set(asked["positive"]) & set(asked["negative"])
    assert not any(prompt in text for prompt in asked["prompts"] for text in texts)


def test_vectors_are_those_of_the_peers() -> None:
    peers = result("extraction_peers")["peers"]
    assert set(peers) == {"repeng", "steering_vectors"}
    for found in peers.values():
        assert set(found["sets"]) == set(shipped_sets())
        for cells in found["sets"].values():
            for cell in cells.values():
                assert cell["layers"] >= 28
                assert cell["least_cosine"] >= 0.99
                # The two rules for the sign of a PCA part only where pairs are split about evenly.
                assert all(right <= 8 for right in cell["other_sign"].values())
    for cells in peers["steering_vectors"]["sets"].values():
        assert cells["mean"]["lengths"] == pytest.approx([1, 1], abs=1e-4)
        assert not any(cell["other_sign"] for cell in cells.values())


def test_both_engines_give_the_same_vector() -> None:
    cells = result("precision")["cells"]
    assert list(cells) == ["hf float32", "vllm float32", "hf bfloat16", "vllm bfloat16"]
    assert min(cells["vllm float32"]["cosine"]) > 0.99999
    for cell in cells.values():
        assert "error" in cell or min(cell["cosine"]) > 0.9


def test_the_plot_is_that_of_the_committed_results() -> None:
    drawn = (ROOT / "docs" / "vectors.svg").read_text(encoding="utf-8")
    assert drawn == vector_tables.plot(RESULTS), "run: python -m steerscope.bench.tables"
