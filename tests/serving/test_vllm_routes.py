"""Our routes on vLLM's own OpenAI server, mounted by vLLM itself as an endpoint plugin."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

import tiny
from engines.conftest import HAS_VLLM, VLLM_ENVIRONMENT, saved
from engines.vllm.test_front import arrive, wait_for
from steerscope.engines.generation import TokenPrompt
from steerscope.engines.hf import HFEngine
from steerscope.specs import Add, Sampling
from steerscope.vectors import SteeringVector, save
from waiting import HUNG_S

pytestmark = [pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"), pytest.mark.slow]
KEY = "sesame"
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
    body = {"model": str(saved("llama", "bytes", None, {})), "prompt": prompt, "max_tokens": 6, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "vllm_xargs": {"steerscope": json.dumps(entry)}}
    done = stock.call("POST", "/v1/completions", json=body)
    assert done.status_code == 200, done.text
    with HFEngine(tiny.model(), tiny.tokenizer(), name="llama").sync as truth:
        steer = Add(vector=VECTOR, scale=2.0, layers=1)
        wanted = truth.generate(TokenPrompt(prompt), Sampling(max_tokens=6, ignore_eos=True), steer=steer)
    assert done.json()["choices"][0]["token_ids"] == wanted.token_ids

    arrive(stock.folder / "rows" / "monday.safetensors")
    whole = stock.call("GET", "/v1/captures/monday")
    assert whole.content == (stock.folder / "rows" / "monday.safetensors").read_bytes()
    headers = {"Authorization": f"Bearer {KEY}", "Range": "bytes=8-15"}
    part = httpx.get(f"{stock.url}/v1/captures/monday", headers=headers)
    assert (part.status_code, part.content) == (206, whole.content[8:16])
    assert stock.call("DELETE", "/v1/captures/monday").json()["deleted"]
    assert stock.call("GET", "/v1/captures/monday").status_code == 404
    assert stock.call("DELETE", "/v1/vectors/joy").json()["deleted"]
    assert stock.call("POST", "/v1/completions", json=body).status_code == 400, "nobody knows the vector any more"


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "a%00b", ".hidden", "a%2fb"])
def test_names_are_names(stock: Stock, name: str, tmp_path: Path) -> None:
    save(SteeringVector({1: torch.from_numpy(VECTOR)}), tmp_path / "v.safetensors")
    data = (tmp_path / "v.safetensors").read_bytes()
    assert stock.call("POST", f"/v1/vectors?name={name}", content=data).status_code == 400
    for place in ("vectors", "captures"):
        assert stock.call("GET", f"/v1/{place}/{name}").status_code in (400, 404)
        assert stock.call("DELETE", f"/v1/{place}/{name}").status_code in (400, 404, 405)
    assert list((stock.folder / "vectors").iterdir()) == []


def test_what_is_no_vector_or_does_not_fit_is_refused(stock: Stock, tmp_path: Path) -> None:
    assert stock.call("POST", "/v1/vectors?name=x", content=b"\x80\x04 a pickle").status_code == 400
    save(SteeringVector.shared(torch.ones(32)), tmp_path / "v.safetensors")
    wrong = stock.call("POST", "/v1/vectors?name=x", content=(tmp_path / "v.safetensors").read_bytes())
    assert wrong.status_code == 400
    assert "hidden size is 64" in wrong.text
