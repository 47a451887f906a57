"""A capture job on one machine: every good document's rows, every bad one's reason, and each exactly once whatever
happens to the process."""

import datetime
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from corpus import conftest
from steerscope.capture.store import ActivationStore, committed, read_info
from steerscope.corpus import run
from steerscope.corpus.job import CorpusJob, alone, begin, missing
from steerscope.corpus.reader import ShardReader, check_probe, open_engine, probe
from steerscope.corpus.run import run_here, run_workers
from steerscope.engines.hf import HFEngine
from steerscope.engines.load import load
from steerscope.specs import Capture, InvalidRequest
from steerscope.specs.errors import BadFile, RequestFailed
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

CAPTURE = Capture(layers="1,3", sites=("resid_post", "mlp_out"))


def start(
    folder: Path, model: str, corpus: Path, capture: Capture = CAPTURE, resume: bool = False, **job: object
) -> None:
    begin(
        folder,
        [corpus],
        CorpusJob.parse({"model": model, "batch": 4, "shard_documents": 7, **job}),
        capture,
        "bfloat16",
        resume,
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, model: str, corpus: Path) -> ActivationStore:
    folder = tmp_path_factory.mktemp("local") / "store"
    start(folder, model, corpus)
    assert run_here(folder) is not None
    return ActivationStore(folder)


def test_rows_are_those_of_plain_transformers(local: ActivationStore) -> None:
    """To the rounding of bfloat16, which is at most 2⁻⁸ of each number; other layers and positions are far off."""
    network = tiny.model()
    lines = local.documents().to_pylist()
    for line in (line for line in lines if not line["error"]):
        rows = local.document(line["document"])
        ids = torch.from_numpy(rows.labels.token_id.copy()).unsqueeze(0)
        with torch.no_grad():
            hidden = network(ids, output_hidden_states=True).hidden_states
        wanted, found = hidden[2][0], rows[1, "resid_post"].float()
        assert (wanted - found).norm() < 2**-8 * wanted.norm()
        assert (hidden[3][0] - found).norm() > 0.1 * wanted.norm()
    assert len(lines) == conftest.LINES - 1
    order = local.index(columns=["document"])["document"].to_pylist()
    assert order == sorted(order)  # that of the corpus, though texts of like length are read together


def test_bad_documents_are_told_and_stop_nothing(local: ActivationStore, corpus: Path) -> None:
    bad = {line["line"] - 1: line for line in local.bad().to_pylist()}
    assert set(bad) == set(conftest.BAD)
    for i, why in conftest.BAD.items():
        assert why in bad[i]["error"]
        assert bad[i]["file"] == str(corpus)
    assert sum(commit.bad for commit in local.commits) == len(bad)


HOSTILE = [
    {"token_ids": [1, "a"]}, {"token_ids": [1, [2]]}, {"token_ids": [True]}, {"token_ids": [1.5]},
    {"token_ids": [2**70]}, {"token_ids": [-1]}, {"token_ids": "12"}, {"messages": ["hi"]}, {"messages": [{"role": 3}]},
    {"messages": [{"role": "user", "content": "a"}, 7]}, {"messages": {}}, {"text": 5}, {"text": "\ud800"},
    {"messages": [{"role": "\ud800", "content": "\udfff"}]}, None, 7, "text",
]  # fmt: skip


def test_no_document_whatever_it_is_stops_a_run(tmp_path: Path, model: str) -> None:
    odd = {"text": "The weather.", "id": "\ud800", "\ud800": ["\udfff", {"deep": [1e999]}]}
    many = {"messages": [{"role": f"r{i}", "content": "a"} for i in range(20)]}
    deep = b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    lines = [*(json.dumps(line).encode() for line in [odd, *HOSTILE, many]), deep, b"\x00", b"\xff\xfe{}"]
    (tmp_path / "c.jsonl").write_bytes(b"\r\n".join(lines))
    start(tmp_path / "s", model, tmp_path / "c.jsonl")
    assert run_here(tmp_path / "s")
    store = ActivationStore(tmp_path / "s")
    good = [line["line"] for line in store.documents().to_pylist() if line["error"] is None]
    assert good == [1, len(HOSTILE) + 2]
    assert len(store.documents()) == len(lines)
    assert sum(commit.tokens for commit in store.commits) == len(store)


def test_chats_and_ids_are_documents_too(local: ActivationStore) -> None:
    chat, ids = local.document(25), local.document(26)
    assert set(chat.labels.table()["role"]) == {None, "user", "assistant"}
    assert chat.labels.request == "25"
    assert ids.labels.token_id.tolist() == [20, 21, 22, 23]


def test_tokens_and_reductions_are_the_engines(
    tmp_path: Path, model: str, corpus: Path, local: ActivationStore
) -> None:
    start(tmp_path / "s", model, corpus, Capture(layers=3, tokens="!positions=[0]", reduce="mean"))
    run_here(tmp_path / "s")
    store = ActivationStore(tmp_path / "s")
    lines = store.index()
    for line, mean in zip(lines.to_pylist(), store.take(lines).float(), strict=True):
        rows = local.document(line["document"])[3, "resid_post"].float()
        assert (line["n"], line["position"]) == (len(rows) - 1, len(rows) - 1)
        assert (rows[1:].mean(0) - mean).norm() < 2**-7 * mean.norm()
    assert len(store) == len(local.documents()) - len(conftest.BAD)


def test_long_documents_are_cut_where_asked(tmp_path: Path, model: str, corpus: Path, local: ActivationStore) -> None:
    start(tmp_path / "s", model, corpus, max_tokens=12)
    run_here(tmp_path / "s")
    store = ActivationStore(tmp_path / "s")
    lines = {line["document"]: line for line in store.documents().to_pylist()}
    assert (lines[21]["rows"], lines[21]["error"]) == (12, None)
    assert lines[21]["cut"] > 600
    assert max(line["rows"] for line in lines.values()) == 12
    assert set(store.document(25).labels.table()["role"]) == {None, "user"}  # the answer was cut away
    whole, cut = local.document(21 + 1), store.document(22)
    assert torch.allclose(whole[1, "mlp_out"][:12].float(), cut[1, "mlp_out"].float(), rtol=2**-6, atol=0.02)


def test_a_run_goes_on_with_what_is_missing_and_ends_the_same(
    tmp_path: Path, model: str, corpus: Path, local: ActivationStore
) -> None:
    folder = tmp_path / "s"
    start(folder, model, corpus)
    run_here(folder)
    for shard in (2, 5):
        (folder / "commits" / f"{shard:08}.json").unlink()
    kept = (folder / "rows" / "00000001.safetensors").stat().st_mtime_ns
    start(folder, model, corpus, resume=True)
    assert missing(folder, ActivationStore(folder).info) == [2, 5]
    assert not ActivationStore(folder).complete
    assert run_here(folder) == local.checksum
    assert (folder / "rows" / "00000001.safetensors").stat().st_mtime_ns == kept  # nothing is done twice


def test_another_job_in_the_same_folder_is_refused_with_every_difference(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    start(tmp_path / "s", model, corpus)
    with pytest.raises(InvalidRequest, match="already holds a capture; add --resume"):
        start(tmp_path / "s", model, corpus)
    changed = tmp_path / "corpus.jsonl"
    changed.write_bytes(corpus.read_bytes().replace(b"d3", b"D3"))
    with pytest.raises(InvalidRequest) as told:
        start(tmp_path / "s", model, changed, Capture(layers=1), resume=True, batch=5)
    assert {p.field for p in told.value.problems} == {"batch", "files", "capture.layers", "capture.sites"}
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(corpus.read_bytes())
    start(tmp_path / "s", model, moved, resume=True)
    with pytest.raises(InvalidRequest, match="layer 4 does not exist; the model has layers 0–3"):
        start(tmp_path / "t", model, corpus, Capture(layers="3-4"))
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "mine.txt").touch()
    with pytest.raises(InvalidRequest, match="u is not empty"):
        start(tmp_path / "u", model, corpus)


def test_another_model_under_the_same_name_is_refused(tmp_path: Path, corpus: Path) -> None:
    folder, name = tmp_path / "s", tmp_path / "model"
    tiny.model().save_pretrained(name)
    tiny.tokenizer().save_pretrained(name)
    start(folder, str(name), corpus)
    run_here(folder)
    (folder / "commits" / "00000003.json").unlink()
    tiny.model(seed=1).save_pretrained(name)
    with pytest.raises(BadFile, match="holds rows of another model"):
        run_here(folder)


def test_a_probe_that_finds_no_room_is_told_and_another_type_or_chat_template_is_refused(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    start(tmp_path / "s", model, corpus)
    info = read_info(tmp_path / "s")
    with open_engine(info) as engine:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # stands for a disk that is full
        try:
            with pytest.raises(BadFile, match=r"cannot write .*probe\.safetensors"):
                check_probe(engine, tmp_path / "s", info)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        check_probe(engine, tmp_path / "s", info)
        engine.aio.tokenizer.chat_template = "{{ messages }}"
        with pytest.raises(BadFile, match="made with chat template"):
            check_probe(engine, tmp_path / "s", info)
    with (
        load(model, dtype="bfloat16") as engine,
        pytest.raises(BadFile, match="type float32, this engine has bfloat16"),
    ):
        check_probe(engine, tmp_path / "s", info)


def test_a_probe_tells_a_model_of_which_one_layer_was_changed(tmp_path: Path, model: str, corpus: Path) -> None:
    start(tmp_path / "s", model, corpus)
    info = read_info(tmp_path / "s")
    with open_engine(info) as engine:
        check_probe(engine, tmp_path / "s", info)
        found, facts = probe(engine, info)
        at = found.norm(dim=-1).argmin()  # the site whose rows are small beside all others
        found[at] *= 1.1
        (tmp_path / "s" / "probe.safetensors").write_bytes(save({"rows": found}, facts))
        with pytest.raises(BadFile, match="rows of another model"):
            check_probe(engine, tmp_path / "s", info)


def test_a_document_the_engine_fails_on_is_bad_and_an_engine_that_fails_on_all_ends_the_run(
    tmp_path: Path, model: str
) -> None:
    texts = [" ".join(conftest.WORDS[:n]) for n in (9, 5, 8, 6)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    start(tmp_path / "s", model, tmp_path / "c.jsonl", batch=1, shard_documents=2)
    with open_engine(read_info(tmp_path / "s")) as engine:
        reader, wanted = ShardReader(engine, tmp_path / "s"), len(engine.aio.tokenize(texts[1]).token_ids)
        broken: list[bool] = []

        def fail(_module: object, given: tuple[torch.Tensor, ...]) -> None:
            if broken or given[0].shape[-2] == wanted:
                raise RuntimeError("the device is gone")

        assert isinstance(engine.aio, HFEngine)
        engine.aio.model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(fail)
        (commit,) = reader.read([0])
        assert (commit.documents, commit.bad) == (2, 1)
        broken.append(True)
        with pytest.raises(RequestFailed, match="the device is gone"):
            list(reader.read([1]))
    assert [commit.shard for commit in committed(tmp_path / "s")] == [0]


def test_a_folder_that_was_killed_before_its_description_was_there_can_be_used(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    folder = tmp_path / "s"
    (folder / "rows").mkdir(parents=True)
    leftover = folder / ".steerscope-0123456789abcdef.json"
    leftover.touch()
    with alone(folder):
        start(folder, model, corpus, resume=True)
    assert (folder / "store.json").is_file()
    assert not leftover.exists()
    (tmp_path / "t" / "rows").mkdir(parents=True)
    (tmp_path / "t" / "rows" / "mine").touch()
    with pytest.raises(InvalidRequest, match="t is not empty"):
        start(tmp_path / "t", model, corpus)


def test_a_model_of_another_shape_under_the_same_name_leaves_the_description(tmp_path: Path, corpus: Path) -> None:
    name = tmp_path / "model"
    tiny.model().save_pretrained(name)
    tiny.tokenizer().save_pretrained(name)
    start(tmp_path / "s", str(name), corpus, Capture(layers="all"))
    before = (tmp_path / "s" / "store.json").read_bytes()
    config = json.loads((name / "config.json").read_text())
    (name / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(InvalidRequest, match="model: has 3 keys of 64 numbers, had 4 of 64"):
        start(tmp_path / "s", str(name), corpus, Capture(layers="all"), resume=True)
    assert (tmp_path / "s" / "store.json").read_bytes() == before


def test_dates_in_messages_do_not_stop_a_guess_of_sizes(tmp_path: Path, model: str) -> None:
    chat = [{"role": "user", "content": "a", "when": datetime.datetime(2026, 1, 2)}]
    pq.write_table(pa.table({"messages": [chat]}), tmp_path / "c.parquet")
    start(tmp_path / "s", model, tmp_path / "c.parquet", shard_documents=None)


def test_what_no_document_can_have_is_refused_before_any_is_read(tmp_path: Path, corpus: Path) -> None:
    tiny.model("gpt_neox").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    start(tmp_path / "s", str(tmp_path / "model"), corpus, Capture(layers=1, sites="resid_mid"))
    with pytest.raises(InvalidRequest, match="parallel"):
        run_here(tmp_path / "s")
    assert not committed(tmp_path / "s")


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    with alone(tmp_path / "s"), pytest.raises(BadFile, match="another run is writing"), alone(tmp_path / "s"):
        pass


def test_a_folder_that_cannot_be_locked_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(BadFile, match="cannot lock .*No locks available"), alone(tmp_path / "s"):
        pass


@pytest.mark.slow
def test_a_worker_whose_parent_was_gone_before_it_began_ends(tmp_path: Path, model: str, corpus: Path) -> None:
    start(tmp_path / "s", model, corpus)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "steerscope.corpus.run", str(tmp_path / "s"), "0", "1", str(gone.pid)]
    done = subprocess.run(command, start_new_session=True, capture_output=True, check=False, timeout=HUNG_S)
    assert done.returncode == -signal.SIGKILL
    assert missing(tmp_path / "s", read_info(tmp_path / "s"))


def test_a_lock_is_held_as_long_as_a_worker_lives(tmp_path: Path) -> None:
    with alone(tmp_path / "s") as lock:
        worker = subprocess.Popen(["sleep", str(HUNG_S)], pass_fds=(lock,))
    try:
        with pytest.raises(BadFile, match="another run is writing"), alone(tmp_path / "s"):
            pass
    finally:
        worker.kill()
        worker.wait()
    with alone(tmp_path / "s"):
        pass


@pytest.mark.long
def test_killed_at_twenty_random_moments_it_ends_with_the_same_checksum(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    command = ["capture", "run", "--model", model, "--data", str(corpus), "--layers", "1,3"]
    command += ["--sites", "resid_post,mlp_out", "--batch", "4", "--shard-documents", "3"]
    script = Path(__file__).with_name("kill_script.py")
    arguments = [sys.executable, str(script), str(tmp_path), "20", "7", *command]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=HUNG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["kills"]) == 20
    assert len(set(found["checksums"])) == 1
    last = ActivationStore(found["last"])
    assert any(0 < kill["shards"] < last.info.shards for kill in found["kills"])
    assert any(kill["half_written"] for kill in found["kills"])
    assert last.verify() == []
    assert not [*last.folder.glob("*/.steerscope-*")]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_nothing_changes(
    tmp_path: Path, model: str, corpus: Path, local: ActivationStore
) -> None:
    folder = tmp_path / "s"
    start(folder, model, corpus)
    killed: list[int] = []

    def kill() -> None:
        while not committed(folder):
            time.sleep(0.02)
        for child in psutil.Process().children():
            if "steerscope.corpus.run" in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)
                return

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert run_workers(folder, 2) == local.checksum
    killer.join()
    assert killed


def test_a_worker_that_only_dies_is_given_up_though_others_go_on(
    tmp_path: Path, model: str, corpus: Path, local: ActivationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 commits its shards one by one; worker 1 dies at once, each time."""
    start(tmp_path / "s", model, corpus)
    copying = f"for s in 0 2 4 6 8; do sleep 0.2; cp {local.folder}/commits/0000000$s.json commits/; done; sleep 60"
    started: list[int] = []

    def fake(folder: Path, worker: int, *_: object) -> "subprocess.Popen[bytes]":
        started.append(worker)
        (folder / f"worker-{worker}.log").touch()
        script = "kill -9 $$" if worker else copying
        return subprocess.Popen(["sh", "-c", script], cwd=folder, start_new_session=True)

    monkeypatch.setattr(run, "_start", fake)
    monkeypatch.setattr(run, "_POLL_S", 0.1)
    with pytest.raises(RequestFailed, match="worker 1 ended with code -9"):
        run_workers(tmp_path / "s", 2)
    assert (started.count(0), started.count(1)) == (1, 4)


def test_the_processes_a_worker_started_end_with_it() -> None:
    worker = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
    assert worker.stdout is not None
    child = psutil.Process(int(worker.stdout.readline()))
    run._end(worker)
    psutil.wait_procs([child], timeout=HUNG_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    worker.stdout.close()


@pytest.mark.slow
def test_what_a_new_start_would_not_mend_ends_the_workers_with_the_reason(
    tmp_path: Path, model: str, corpus: Path
) -> None:
    start(tmp_path / "s", model, corpus)
    (tmp_path / "s" / "probe.safetensors").write_bytes(b"no")
    with pytest.raises(BadFile, match=r"probe\.safetensors is not a readable probe"):
        run_workers(tmp_path / "s", 1)
