"""The same job with vLLM as its engine."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steerscope.capture.store import ActivationStore
from steerscope.corpus import reader
from steerscope.corpus.job import CorpusJob, begin
from steerscope.corpus.run import run_here
from steerscope.specs import Capture
from support.waiting import HUNG_S

pytest.importorskip("vllm")


def test_vllm_gives_the_rows_that_transformers_gives(
    tmp_path: Path, model: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"KVCACHE_SPACE": "1", "OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(f"VLLM_CPU_{name}", value)
    eager = functools.partial(reader.load, vllm={"enforce_eager": True})  # without the minute that compiling takes
    for engine in ("hf", "vllm"):
        if engine == "vllm":
            monkeypatch.setattr(reader, "load", eager)
        job = CorpusJob.parse(
            {"model": model, "engine": engine, "dtype": "float32", "batch": 16, "shard_documents": 25}
        )
        begin(tmp_path / engine, [corpus], job, Capture(layers="1,3"), "bfloat16", False)
        assert run_here(tmp_path / engine) is not None
    one, other = ActivationStore(tmp_path / "hf"), ActivationStore(tmp_path / "vllm")
    assert one.index().equals(other.index())
    assert one.bad()["line"].equals(other.bad()["line"])
    for commit in one.commits:
        a, b = one.shard(commit.shard).float(), other.shard(commit.shard).float()
        assert ((a - b).norm(dim=-1) <= 2**-7 * a.norm(dim=-1)).all()  # each is rounded to bfloat16


EAGER = """
import functools
from steerscope.cli.main import main
from steerscope.corpus import reader
reader.load = functools.partial(reader.load, vllm={"enforce_eager": True})
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_told_to_end_leaves_no_engine_behind(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """vLLM's engine core is another process: it must not live on, with all the memory it has."""
    for name, value in {"KVCACHE_SPACE": "1", "OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(f"VLLM_CPU_{name}", value)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # other tests have it otherwise
    data, out = tmp_path / "corpus.jsonl", tmp_path / "rows"
    data.write_text("".join(json.dumps({"text": f"The weather on day {i} was good."}) + "\n" for i in range(4000)))
    command = [sys.executable, "-c", EAGER, "capture", "run", "--model", model, "--data", str(data)]
    command += ["--out", str(out), "--layers", "1", "--engine", "vllm", "--dtype", "float32", "--shard-documents", "10"]
    run = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        patience = time.monotonic() + HUNG_S
        while not list(out.glob("commits/*")):
            assert run.poll() is None, run.stderr and run.stderr.read().decode()
            assert time.monotonic() < patience
            time.sleep(0.05)
        assert len(_of_session(run.pid)) > 1, "the engine core is there"
        run.send_signal(how)
        said = run.communicate(timeout=HUNG_S)[1].decode()
        if how is signal.SIGTERM:
            assert run.returncode == 143, said[-2000:]
            assert "go on with --resume" in said
        until = time.monotonic() + HUNG_S
        while (left := _of_session(run.pid)) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def _of_session(leader: int) -> list[int]:
    """Processes of this session that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
            if int(session) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found
