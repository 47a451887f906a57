"""The same job with vLLM as its engine."""

from pathlib import Path

import pytest

from steerscope.capture.store import ActivationStore
from steerscope.corpus.job import Job, begin
from steerscope.corpus.run import run_here
from steerscope.specs import Capture

pytest.importorskip("vllm")


def test_vllm_gives_the_rows_that_transformers_gives(
    tmp_path: Path, model: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"KVCACHE_SPACE": "1", "OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(f"VLLM_CPU_{name}", value)
    for engine in ("hf", "vllm"):
        job = Job.parse({"model": model, "engine": engine, "dtype": "float32", "batch": 16, "shard_documents": 25})
        begin(tmp_path / engine, [corpus], job, Capture(layers="1,3"), "bfloat16", False)
        assert run_here(tmp_path / engine) is not None
    one, other = ActivationStore(tmp_path / "hf"), ActivationStore(tmp_path / "vllm")
    assert one.index().equals(other.index())
    assert one.bad()["line"].equals(other.bad()["line"])
    for commit in one.commits:
        a, b = one.shard(commit.shard).float(), other.shard(commit.shard).float()
        assert ((a - b).norm(dim=-1) <= 2**-7 * a.norm(dim=-1)).all()  # each is rounded to bfloat16
