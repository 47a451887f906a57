"""What the docs say of vectors: the committed results hold, and they were measured on what made no part of them."""

import json
import re
from pathlib import Path

import pytest
import torch

from bench.studies import precision
from bench.studies.vectors import DATA
from bench.tables import vectors
from steerscope import SteeringVector, save_vector
from steerscope.extraction import load_contrast_set, sentences
from steerscope.extraction.data import shipped_sets
from steerscope.specs.errors import SteerscopeError

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
                # The two rules for the sign of a PCA part only where the 16 pairs are split about evenly.
                assert all(5 <= right <= 8 for right in cell["other_sign"].values())
    for cells in peers["steering_vectors"]["sets"].values():
        assert cells["mean"]["lengths"] == pytest.approx([1, 1], abs=1e-4)
        assert not any(cell["other_sign"] for cell in cells.values())


@pytest.mark.parametrize("name", ["precision", "gpu/precision"])
def test_both_engines_give_the_same_vector(name: str) -> None:
    cells = result(name)["cells"]
    assert list(cells) == ["hf float32", "vllm float32", "hf bfloat16", "vllm bfloat16"]
    assert min(cells["vllm float32"]["cosine"]) > 0.99999
    assert min(cells["hf float32"]["cosine"]) > 0.999999
    assert min(cells["hf bfloat16"]["cosine"]) > 0.99
    other = cells["vllm bfloat16"]
    assert name == "precision" and "error" in other or min(other["cosine"]) > 0.99, "only some CPUs cannot"


def test_precision_needs_its_baseline_and_a_place_for_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_vector(SteeringVector({0: torch.ones(4)}), tmp_path / "hf-bfloat16.safetensors")
    failed = {
        f"{engine} {dtype}": "no memory" for engine, dtype in precision.CELLS if (engine, dtype) != precision.CELLS[2]
    }
    with pytest.raises(SteerscopeError, match="hf float32 failed: no memory"):
        precision.compare(tmp_path, failed)
    monkeypatch.setattr("sys.argv", ["precision"])
    with pytest.raises(SystemExit):
        precision.main()
    assert "--out is required" in capsys.readouterr().err


def test_the_plot_is_that_of_the_committed_results() -> None:
    drawn = (ROOT / "docs" / "vectors.svg").read_text(encoding="utf-8")
    assert drawn == vectors.plot(RESULTS), "run: python -m bench.tables.__main__"
