"""The benchmark of a corpus, small: it counts what was written, and finds rows that differ."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bench.corpus_speed import captured, differences, write_corpus
from steerscope.capture.shards import part_path
from support import tiny

pytestmark = pytest.mark.slow


def test_a_corpus_is_captured_timed_and_compared(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.model("llama").save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    data, out, other = tmp_path / "corpus.jsonl", tmp_path / "rows", tmp_path / "other"
    write_corpus(data, documents=12, tokens=9, vocabulary=200)
    found = captured(data, out, ["--model", str(model), "--layers", "all", "--shard-documents", "4"])
    assert (found["shards"], found["bad"]) == (3, 0)
    assert 0 < found["between_s"] < found["seconds"]
    assert found["tokens_per_s"] == pytest.approx(2 * 4 * 9 / found["between_s"])
    assert found["bytes_per_s"] == pytest.approx(found["tokens_per_s"] * 4 * 64 * 2)  # layers × hidden, bfloat16
    assert differences(out, out) == {"rows": 108, "worst_relative_l2": 0.0, "least_cosine": pytest.approx(1.0)}
    shutil.copytree(out, other)
    file = part_path(other, "rows", 1)
    rows = {name: tensor.clone() for name, tensor in load_file(file).items()}
    next(iter(rows.values()))[3] *= -1
    save_file(rows, file)
    found = differences(out, other)
    assert found["worst_relative_l2"] == pytest.approx(2.0)
    assert found["least_cosine"] == pytest.approx(-1.0, abs=1e-3)
