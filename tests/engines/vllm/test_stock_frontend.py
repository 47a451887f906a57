"""vLLM's own front ends with the plugin: `LLM` in this process, and the OpenAI server as it is started in production.

The transformers engine, asked for the same, is the truth.
"""

import base64
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capture.test_reserved import full
from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT, saved
from steerscope.capture.rows import RowFile, Rows, load_rows
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.specs import Add, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.errors import NameInUse, SaveFailed
from steerscope.vectors import SteeringVector, save
from support import tiny
from support.reference import distance
from support.waiting import HUNG_S

httpx = pytest.importorskip("httpx", reason="it comes with vLLM")
pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")

RNG = np.random.default_rng(5)
VECTOR = (3 * RNG.standard_normal(64)).astype(np.float32)
LONG = RNG.integers(4, 500, 96).tolist()  # three whole blocks of the cache
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 32 << 20,
    "max_num_batched_tokens": 64, "max_num_seqs": 16,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"slots": 4, "capture_budget": 4 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Named vectors."""
    made = tmp_path_factory.mktemp("vectors")
    write(made / "joy.safetensors", VECTOR)
    return made


def write(path: Path, vector: np.ndarray) -> None:
    save(SteeringVector({1: torch.from_numpy(vector)}, model="tiny"), path)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    os.environ.update({name: os.environ.get(name, value) for name, value in VLLM_ENVIRONMENT.items()})
    from vllm import LLM

    asked = {"steerscope": {**SETTINGS, "vectors": str(folder)}}
    made = LLM(str(saved("llama", "bytes", None, {})), additional_config=asked, **OPTIONS)
    yield made
    made.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def truth() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer("bytes"), name="llama", max_columns=16).sync as engine:
        yield engine


def ask(llm: Any, *entries: object, prompts: list[list[int]] | None = None, **sampling: Any) -> list[Any]:
    """One request per entry, all at once."""
    from vllm import SamplingParams

    prompts = prompts or [[7, 8, 9, 10, 11]] * len(entries)
    base = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    extra = [None if entry is None else {"steerscope": entry} for entry in entries]
    params = [SamplingParams(**{**base, **sampling}, extra_args=one) for one in extra]
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def wanted(truth: SyncEngine, prompt: list[int], steer: Steering | None = None, capture: Capture | None = None) -> Any:
    return truth.generate(
        TokenPrompt(prompt), Sampling(max_tokens=6, ignore_eos=True), steer=steer or Steering(), capture=capture
    )


def same(rows: Rows, one: Generation) -> bool:
    return rows.n == one.rows.n and all(distance(rows[key], one.rows[key]) < 1e-4 for key in one.rows)


ADD = {"op": "add", "vector": "joy", "scale": 2.0}


def test_rows_and_steering_equal_those_of_transformers_in_one_mixed_batch(llm: Any, truth: SyncEngine) -> None:
    prompts = [RNG.integers(4, 500, n).tolist() for n in (5, 70, 33, 9)]
    inline = {"shared": base64.b64encode(VECTOR.tobytes()).decode()}
    entries: list[Any] = [
        {"capture": {"layers": "all"}},
        {"steer": [ADD], "capture": {"layers": [1, 3]}},
        json.dumps({"steer": [{"op": "ablate", "vector": inline, "layers": "0-2", "tokens": "generated"}]}),
        None,
    ]
    done = ask(llm, *entries, prompts=prompts)
    ablate = Steering.parse(json.loads(entries[2])["steer"])
    steers = [None, Steering.of(Add(vector=VECTOR, scale=2.0, layers=1)), ablate, None]
    captures = [Capture(), Capture(layers=[1, 3]), None, None]
    for output, prompt, steer, capture in zip(done, prompts, steers, captures, strict=True):
        expected = wanted(truth, prompt, steer, capture)
        assert list(output.outputs[0].token_ids) == expected.token_ids
        handle = getattr(output.outputs[0], "steerscope", None)
        assert (handle is None) == (capture is None)
        if handle is not None:
            assert same(handle.fetch(), expected)
            assert len(handle.fetch().labels) == len(prompt) + 5


def test_each_of_n_texts_has_its_own_rows(llm: Any, truth: SyncEngine) -> None:
    (done,) = ask(llm, {"capture": {"layers": [2]}}, n=3, temperature=1.0, seed=4)
    texts = [list(one.token_ids) for one in done.outputs]
    assert len({tuple(ids) for ids in texts}) == 3
    for one, ids in zip(done.outputs, texts, strict=True):
        again = truth.generate(
            TokenPrompt([7, 8, 9, 10, 11, *ids[:-1]]), Sampling(max_tokens=1), capture=Capture(layers=[2])
        )
        assert distance(one.steerscope.fetch()[2], again.rows[2]) < 1e-4


def test_a_text_that_stops_early_has_its_last_rows(llm: Any, truth: SyncEngine) -> None:
    """It ends inside a page, and in this process no step comes after it."""
    (plain,) = ask(llm, None)
    ids = list(plain.outputs[0].token_ids)
    at = next(i for i in range(2, 6) if ids[i] not in ids[:i])
    (done,) = ask(llm, {"capture": {"layers": [1]}}, stop_token_ids=[ids[at]])
    assert done.outputs[0].finish_reason == "stop"
    fed = TokenPrompt([7, 8, 9, 10, 11, *ids[:at]])
    again = truth.generate(fed, Sampling(max_tokens=1), capture=Capture(layers=[1]))
    assert same(done.outputs[0].steerscope.fetch(), again)


def test_a_steered_prompt_does_not_leak_through_the_prefix_cache(llm: Any, truth: SyncEngine) -> None:
    for entry in ({"steer": [ADD]}, None, {"steer": [ADD]}, {"capture": {"layers": [0]}}):
        (done,) = ask(llm, entry, prompts=[LONG])
        steer = Steering.of(Add(vector=VECTOR, scale=2.0, layers=1)) if entry and "steer" in entry else None
        assert list(done.outputs[0].token_ids) == wanted(truth, LONG, steer).token_ids
        assert (done.num_cached_tokens or 0) == 0 or entry is None or "capture" not in entry
        if entry and "capture" in entry:
            assert done.outputs[0].steerscope.fetch().n == len(LONG) + 5


def test_a_captured_answer_may_use_a_cached_prompt(llm: Any, truth: SyncEngine) -> None:
    ask(llm, None, prompts=[LONG])
    (done,) = ask(llm, {"capture": {"layers": [3], "tokens": "generated"}}, prompts=[LONG])
    assert done.num_cached_tokens > 0
    assert same(done.outputs[0].steerscope.fetch(), wanted(truth, LONG, None, Capture(layers=3, tokens="generated")))


def test_a_file_that_changes_is_another_vector(llm: Any, truth: SyncEngine, folder: Path) -> None:
    write(folder / "mood.safetensors", VECTOR)
    mood = {"steer": [{**ADD, "vector": "mood"}]}
    for vector in (VECTOR, -VECTOR):
        write(folder / "mood.safetensors", vector)
        (done,) = ask(llm, mood, prompts=[LONG])
        expected = wanted(truth, LONG, Steering.of(Add(vector=vector, scale=2.0, layers=1)))
        assert list(done.outputs[0].token_ids) == expected.token_ids


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"steer": [{**ADD, "vector": "nobody", "layers": 99}]}, ["steer.ops[0].vector", "steer.ops[0].layers"]),
        ({"capture": {"sites": ["mlp_out"], "reduce": "mean"}}, ["capture.reduce", "capture.layers"]),
        ({"capture": {"tokens": "role=user"}}, ["capture.tokens"]),
        ({"capture": {}, "save_as": "x"}, ["save_as"]),
        ({"capture": {}, "save_as": "../x"}, ["save_as"]),
        ('{"capture": {}}', ["save_as"]),
        ({"stear": []}, ["stear"]),
        ({"watch": {"pack": "p"}, "capture": {"tokens": "role=user"}}, ["watch", "capture.tokens"]),
        ("{", [""]),
        ({"steer": [{**ADD, "layers": 1}] * 5}, ["steer.ops"]),
    ],
)
def test_every_problem_is_named_and_the_engine_lives_on(llm: Any, entry: object, named: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(llm, entry)
    assert [problem.field for problem in refusal.value.problems] == [f"steerscope.{n}".rstrip(".") for n in named]
    assert len(ask(llm, None)[0].outputs[0].token_ids) == 6


def test_what_finds_no_room_is_refused_and_room_comes_back(llm: Any) -> None:
    """Three slots are for vectors in use; a fourth at once is too many. The same goes for bytes of rows."""
    many = [{"steer": [{"op": "add", "vector": {"shared": [float(i + 1)] * 64}, "layers": 0}]} for i in range(4)]
    with pytest.raises(InvalidRequest, match="all 3 vector slots are in use"):
        ask(llm, *many)
    drop(llm)
    ask(llm, *many[1:])
    room = llm.llm_engine.input_processor.steerscope
    whole = (4 << 20) // (4 * 64 * 4 * (96 + 19))  # four layers, float32
    done = [ask(llm, {"capture": {}}, prompts=[LONG], max_tokens=20)[0] for _ in range(whole)]
    with pytest.raises(InvalidRequest, match="captures hold the whole budget"):
        ask(llm, {"capture": {}}, prompts=[LONG], max_tokens=20)
    for one in done:
        with one.outputs[0].steerscope as handle:
            assert handle.fetch().n == 96 + 19
    assert room.budget.used == 0
    ask(llm, {"capture": {}}, prompts=[LONG])[0].outputs[0].steerscope.close()


def drop(llm: Any) -> None:
    """What a refused call left queued."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    gc.collect()


def test_a_request_that_ends_before_anybody_met_it_leaves_nothing_behind(llm: Any) -> None:
    from vllm import SamplingParams

    engine = llm.llm_engine
    ask(llm, {"capture": {}})[0].outputs[0].steerscope.close()
    front = engine.input_processor.steerscope
    gc.collect()
    before = front.capacity.regions.used
    for i in range(20):
        params = SamplingParams(max_tokens=8, extra_args={"steerscope": {"capture": {}}})
        engine.add_request(f"gone-{i}", {"prompt_token_ids": [5, 6, 7]}, params)
        engine.abort_request([f"gone-{i}"])
    gc.collect()
    assert front.capacity.regions.used <= before
    assert front.budget.used == 0


def test_a_failure_in_a_worker_ends_that_request_only(llm: Any) -> None:
    huge = {"steer": [{"op": "add", "vector": {"shared": [3e38] * 64}, "layers": 0, "scale": 1e3}]}
    done = ask(llm, huge, {"capture": {"layers": [1]}}, max_tokens=12)
    assert done[0].outputs[0].finish_reason == "error"
    assert "not finite" in done[0].outputs[0].stop_reason
    assert len(done[0].outputs[0].token_ids) < 12
    assert done[1].outputs[0].finish_reason == "length"
    assert done[1].outputs[0].steerscope.fetch().n == 16


def test_nothing_stays_in_shared_memory_under_a_name(llm: Any) -> None:
    ask(llm, {"steer": [ADD]})
    assert not llm.llm_engine.input_processor.steerscope.arena.path.exists()


def test_a_name_is_kept_by_one_request_until_that_has_ended(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back when the request fails or is cancelled; a file keeps it."""
    from vllm import SamplingParams

    ask(llm, {"capture": {}})[0].outputs[0].steerscope.close()
    front, engine = llm.llm_engine.input_processor.steerscope, llm.llm_engine
    monkeypatch.setattr(front, "settings", front.settings.model_copy(update={"captures": str(tmp_path)}))
    entry = {"capture": {"layers": [1]}, "save_as": "monday"}
    huge = {"steer": [{"op": "add", "vector": {"shared": [3e38] * 64}, "layers": 0, "scale": 1e3}]}
    with pytest.raises(NameInUse, match="'monday' is in use: another request"):
        ask(llm, entry, entry)
    drop(llm)
    with pytest.raises(InvalidRequest, match="no layers"):
        ask(llm, {**entry, "steer": [{**ADD, "layers": 77}]})
    assert ask(llm, {**huge, **entry}, max_tokens=12)[0].outputs[0].finish_reason == "error"
    engine.add_request("gone", {"prompt_token_ids": [5]}, SamplingParams(extra_args={"steerscope": entry}))
    engine.step()
    engine.abort_request(["gone"])
    gc.collect()
    assert os.listdir(tmp_path) == []
    (done,) = ask(llm, entry, n=2, temperature=1.0)
    files = [tmp_path / f"monday-{i}.safetensors" for i in range(2)]
    assert [one.steerscope.saved(HUNG_S) for one in done.outputs] == files
    with pytest.raises(NameInUse, match="'monday-1' is in use: a capture of that name exists"):
        ask(llm, {**entry, "save_as": "monday-1"})
    assert sorted(tmp_path.iterdir()) == files


def test_a_handle_whose_rows_were_not_saved_says_so_and_has_them(
    llm: Any, truth: SyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(llm, {"capture": {}})[0].outputs[0].steerscope.close()
    front = llm.llm_engine.input_processor.steerscope
    monkeypatch.setattr(front, "settings", front.settings.model_copy(update={"captures": str(tmp_path)}))
    monkeypatch.setattr(RowFile, "pieces", full)
    (done,) = ask(llm, {"capture": {"layers": [1]}, "save_as": "monday"})
    with done.outputs[0].steerscope as handle:
        with pytest.raises(SaveFailed, match="No space left"):
            handle.saved(HUNG_S)
        assert same(handle.fetch(), wanted(truth, [7, 8, 9, 10, 11], None, Capture(layers=[1])))
    assert os.listdir(tmp_path) == []


# --- the OpenAI server


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    captures = tmp_path_factory.mktemp("captures")
    settings = {**SETTINGS, "vectors": str(folder), "captures": str(captures)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["STEERSCOPE"] = json.dumps(settings)
    model = str(saved("llama", "bytes", None, {}))
    options = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "8"]
    options += ["--kv-cache-memory-bytes", str(32 << 20), "--max-num-batched-tokens", "64"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    log = captures / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, *options, "--host", "127.0.0.1"], env=environment, stdout=out, stderr=out)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(url, process, log)
            yield url, captures
        finally:
            process.terminate()
            process.wait(timeout=HUNG_S)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=HUNG_S).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def arrive(*files: Path) -> None:
    deadline = time.monotonic() + HUNG_S
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.1)


def complete(url: str, prompt: list[int], entry: dict[str, Any] | None, **more: Any) -> Any:
    body: dict[str, Any] = {"model": str(saved("llama", "bytes", None, {})), "prompt": prompt, "max_tokens": 6}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True} | more
    if entry is not None:
        body["vllm_xargs"] = {"steerscope": json.dumps(entry)}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=HUNG_S)


def test_the_openai_server_steers_captures_and_answers_400(server: tuple[str, Path], truth: SyncEngine) -> None:
    url, captures = server
    prompt = [7, 8, 9, 10, 11]
    steer = Steering.of(Add(vector=VECTOR, scale=2.0, layers=1))
    plain, steered = complete(url, prompt, None), complete(url, prompt, {"steer": [ADD]})
    assert plain.json()["choices"][0]["token_ids"] == wanted(truth, prompt).token_ids
    assert steered.json()["choices"][0]["token_ids"] == wanted(truth, prompt, steer).token_ids
    entry = {"steer": [ADD], "capture": {"layers": [0, 3]}, "save_as": "first"}
    assert complete(url, prompt, entry).status_code == 200
    arrive(captures / "first.safetensors")
    assert same(load_rows(captures / "first.safetensors"), wanted(truth, prompt, steer, Capture(layers=[0, 3])))
    wrong = complete(url, prompt, {**entry, "steer": [{**ADD, "layers": 77}]})
    assert wrong.status_code == 400
    assert "the vector has no layers [77]" in wrong.text
    assert "'first' is in use" in wrong.text
    two = complete(url, prompt, {"capture": {"layers": [2]}, "save_as": "two"}, n=2, temperature=1, seed=1).json()
    files = [captures / f"two-{i}.safetensors" for i in range(2)]
    arrive(*files)
    for choice, file in zip(two["choices"], files, strict=True):
        fed = TokenPrompt([*prompt, *choice["token_ids"][:-1]])
        again = truth.generate(fed, Sampling(max_tokens=1), capture=Capture(layers=[2]))
        assert same(load_rows(file), again), "each file holds the rows of its own choice"
    huge = {"steer": [{"op": "add", "vector": {"shared": [3e38] * 64}, "layers": 0, "scale": 1e3}]}
    assert complete(url, prompt, huge).status_code == 500
    assert complete(url, prompt, None).status_code == 200
