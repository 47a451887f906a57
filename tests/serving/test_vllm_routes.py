"""Our routes on vLLM's own OpenAI server, mounted by vLLM itself as an endpoint plugin."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT, saved
from engines.vllm.test_stock_frontend import wait_for
from steerscope.engines.hf import HFEngine
from steerscope.engines.results import TokenPrompt
from steerscope.specs import Add, Sampling
from steerscope.vectors import SteeringVector, save
from support import tiny
from support.waiting import HUNG_S

pytestmark = [pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"), pytest.mark.slow]
KEY = "sesame"
MOST_VECTORS = 3
VECTOR = (3 * np.random.default_rng(5).standard_normal(64)).astype(np.float32)


@dataclass
class Stock:
    url: str
    folder: Path

    def call(self, method: str, path: str, key: str = KEY, **more: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=HUNG_S, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    folder = tmp_path_factory.mktemp("stock")
    (folder / "vectors").mkdir()
    (folder / "rows").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {"vectors": str(folder / "vectors"), "captures": str(folder / "rows"), "capture_budget": 4 << 20}
    settings["max_vectors"] = MOST_VECTORS
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment |= {"STEERSCOPE": json.dumps(settings), "VLLM_PLUGINS": "steerscope"}
    if not entry_points(group="vllm.endpoint_plugins"):  # an installation from before there was one
        named = folder / "meta" / "steerscope_routes-0.dist-info"
        named.mkdir(parents=True)
        (named / "METADATA").write_text("Metadata-Version: 2.1\nName: steerscope-routes\nVersion: 0\n")
        line = "[vllm.endpoint_plugins]\nsteerscope = steerscope.serving.vllm_routes:Plugin\n"
        (named / "entry_points.txt").write_text(line)
        environment["PYTHONPATH"] = f"{folder / 'meta'}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--model", str(saved("llama", "bytes", None, {})), "--dtype", "float32", "--enforce-eager"]
    command += ["--block-size", "32", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(32 << 20)]
    command += ["--max-num-batched-tokens", "64", "--api-key", KEY]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            wait_for(f"http://127.0.0.1:{port}", process, log)
            yield Stock(f"http://127.0.0.1:{port}", folder)
        finally:
            process.terminate()
            process.wait(timeout=HUNG_S)


def asking(prompt: list[int], entry: dict[str, object], **more: object) -> dict[str, object]:
    body = {"model": str(saved("llama", "bytes", None, {})), "prompt": prompt, "max_tokens": 6, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": {"steerscope": json.dumps(entry)}}
    return body | more


def test_vllm_mounts_our_routes_under_its_key(stock: Stock, tmp_path: Path) -> None:
    about = stock.call("GET", "/v1/capabilities")
    assert about.status_code == 200
    assert (about.json()["layers"], about.json()["hidden"], about.json()["engine"]) == (4, 64, "vllm")
    for method, path in (("GET", "/v1/capabilities"), ("GET", "/v1/vectors"), ("DELETE", "/v1/captures/x")):
        assert stock.call(method, path, key="wrong").status_code == 401

    save(SteeringVector({1: torch.from_numpy(VECTOR)}), tmp_path / "joy.safetensors")
    data = (tmp_path / "joy.safetensors").read_bytes()
    assert stock.call("POST", "/v1/vectors?name=joy", content=data).status_code == 201
    assert [one["id"] for one in stock.call("GET", "/v1/vectors").json()["data"]] == ["joy"]
    assert stock.call("GET", "/v1/vectors/joy").json()["layers"] == [1]

    prompt, entry = [7, 8, 9, 10, 11], {"steer": [{"op": "add", "vector": "joy", "scale": 2.0}]}
    entry |= {"capture": {"layers": [2]}, "save_as": "monday"}
    body = asking(prompt, entry)
    done = stock.call("POST", "/v1/completions", json=body)
    assert done.status_code == 200, done.text
    with HFEngine(tiny.model(), tiny.tokenizer(), name="llama").sync as truth:
        steer = Add(vector=VECTOR, scale=2.0, layers=1)
        wanted = truth.generate(TokenPrompt(prompt), Sampling(max_tokens=6, ignore_eos=True), steer=steer)
    assert done.json()["choices"][0]["token_ids"] == wanted.token_ids

    assert done.json()["steerscope"] == {"captures": [{"id": "monday", "saved": True}]}
    again = stock.call("POST", "/v1/completions", json=body)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "name_in_use")
    whole = stock.call("GET", "/v1/captures/monday")
    assert whole.content == (stock.folder / "rows" / "monday.safetensors").read_bytes()
    headers = {"Authorization": f"Bearer {KEY}", "Range": "bytes=8-15"}
    part = httpx.get(f"{stock.url}/v1/captures/monday", headers=headers)
    assert (part.status_code, part.content) == (206, whole.content[8:16])
    assert stock.call("DELETE", "/v1/captures/monday").json()["deleted"]
    assert stock.call("GET", "/v1/captures/monday").status_code == 404
    assert stock.call("DELETE", "/v1/vectors/joy").json()["deleted"]
    assert stock.call("POST", "/v1/completions", json=body).status_code == 400, "nobody knows the vector any more"


def test_one_of_many_requests_gets_a_name_and_a_stream_says_what_was_saved(stock: Stock) -> None:
    """The rows of the second stream meet a file that another program has written meanwhile."""
    rows, entry = stock.folder / "rows", {"capture": {"layers": [2]}, "save_as": "tuesday"}
    with ThreadPoolExecutor(8) as threads:
        body = asking([7, 8, 9], entry, max_tokens=200)
        codes = sorted(threads.map(lambda _: stock.call("POST", "/v1/completions", json=body).status_code, range(8)))
    assert codes == [200] + [409] * 7
    headers = {"Authorization": f"Bearer {KEY}"}
    for name, theirs in (("good", None), ("late", b"theirs")):
        body = asking([7, 8, 9], {**entry, "save_as": name}, max_tokens=200, stream=True)
        with httpx.stream("POST", f"{stock.url}/v1/completions", json=body, headers=headers, timeout=HUNG_S) as answer:
            lines = (line for line in answer.iter_lines() if line)
            events = [next(lines)]
            if theirs is not None:
                (rows / f"{name}.safetensors").write_bytes(theirs)
            events += lines
        assert events.pop() == "data: [DONE]"
        told = json.loads(events.pop().removeprefix("data: "))["steerscope"]["captures"]
        assert [(one["id"], one["saved"]) for one in told] == [(name, theirs is None)]
        tokens = [t for e in events for c in json.loads(e[6:])["choices"] for t in c["token_ids"]]
        assert len(tokens) == 200, "the text is not lost"
    body = asking([7, 8, 9], {**entry, "save_as": "left"}, max_tokens=1000, stream=True)
    with httpx.stream("POST", f"{stock.url}/v1/completions", json=body, headers=headers, timeout=HUNG_S) as answer:
        next(answer.iter_lines())
    deadline, body = time.monotonic() + HUNG_S, {**body, "stream": False, "max_tokens": 6}
    while (code := stock.call("POST", "/v1/completions", json=body).status_code) == 409:
        assert time.monotonic() < deadline, "the name of a client that left is not freed"
    assert code == 200
    assert (rows / "late.safetensors").read_bytes() == b"theirs"
    refused = stock.call("POST", "/v1/completions", json=asking([7], entry, stream=True)).text
    assert '"name_in_use"' in refused
    assert [path.name for path in rows.iterdir() if path.name.startswith(".")] == []


def test_no_more_vectors_than_may_be_are_kept(stock: Stock, tmp_path: Path) -> None:
    save(SteeringVector({1: torch.from_numpy(VECTOR)}), tmp_path / "v.safetensors")
    data = (tmp_path / "v.safetensors").read_bytes()
    with ThreadPoolExecutor(8) as threads:
        sent = list(threads.map(lambda i: stock.call("POST", f"/v1/vectors?name=v{i}", content=data), range(12)))
    kept = [one["id"] for one in stock.call("GET", "/v1/vectors").json()["data"]]
    assert sorted(one.json()["id"] for one in sent if one.status_code == 201) == kept
    assert len(kept) == MOST_VECTORS == stock.call("GET", "/v1/capabilities").json()["limits"]["max_vectors"]
    refused = next(one for one in sent if one.status_code == 400)
    assert "holds 3 vectors" in refused.text
    assert "max_vectors" in refused.text
    assert stock.call("POST", f"/v1/vectors?name={kept[0]}", content=data).status_code == 201, "in its own place"
    for name in kept:
        stock.call("DELETE", f"/v1/vectors/{name}")


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "a%00b", ".hidden", "a%2fb"])
def test_names_are_names(stock: Stock, name: str, tmp_path: Path) -> None:
    save(SteeringVector({1: torch.from_numpy(VECTOR)}), tmp_path / "v.safetensors")
    data = (tmp_path / "v.safetensors").read_bytes()
    assert stock.call("POST", f"/v1/vectors?name={name}", content=data).status_code == 400
    for place in ("vectors", "captures"):
        assert stock.call("GET", f"/v1/{place}/{name}").status_code in (400, 404)
        assert stock.call("DELETE", f"/v1/{place}/{name}").status_code in (400, 404, 405)
    assert {path.name for path in (stock.folder / "vectors").iterdir()} <= {".uploads.lock"}


def test_what_is_no_vector_or_does_not_fit_is_refused(stock: Stock, tmp_path: Path) -> None:
    assert stock.call("POST", "/v1/vectors?name=x", content=b"\x80\x04 a pickle").status_code == 400
    save(SteeringVector.shared(torch.ones(32)), tmp_path / "v.safetensors")
    wrong = stock.call("POST", "/v1/vectors?name=x", content=(tmp_path / "v.safetensors").read_bytes())
    assert wrong.status_code == 400
    assert "hidden size is 64" in wrong.text
