"""What holds on the vLLM that is installed here, for the table of supported versions.

    python -m bench.versions --out bench/results/vllm_versions.json

Starts real engines on a tiny model, eager and compiled: the self-test, random requests together in small steps with
every row, count and text against the transformers engine, and a few refusals. The result is put beside those of other
versions in the same file; `bench.tables.__main__` makes the table of docs/vllm.md from it.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.stress.run import Plan, stress
from steerscope.engines.results import TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.engines.vllm.settings import VLLMSettings
from steerscope.files import atomic_path
from steerscope.specs import Add, Capture, InvalidRequest, Sampling, Steering
from steerscope.specs.steering import SITES
from support.model import HIDDEN, make_model
from support.oracle import Oracle
from support.targets import EngineTarget

LIMIT = 1e-4  # relative L2 of a row in float32
MODES = ("eager", "compiled")
_ONE = TokenPrompt([20, 21, 22])
_FEW = Sampling(max_tokens=2, ignore_eos=True)
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_CI_ENV": "1",  # compiled: Dynamo's graph, without Inductor's minutes
}


def start(folder: Path, mode: str, **changes: Any) -> SyncEngine:
    from steerscope.engines.vllm.client.engine import VLLMEngine

    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "enforce_eager": mode == "eager"}
    options |= {"max_num_seqs": 24, "max_num_batched_tokens": 32, "block_size": 32, "num_gpu_blocks_override": 24}
    if not torch.cuda.is_available():
        options["kv_cache_memory_bytes"] = 64 << 20
    settings = VLLMSettings(sites=SITES)
    return VLLMEngine(folder, name="versions", settings=settings, capture_budget=128 << 20, **options | changes).sync


def refusals(engine: SyncEngine, folder: Path) -> dict[str, bool]:
    """Each must be refused by name, before anything runs; the engine lives on."""
    vector = np.ones(HIDDEN, np.float32)
    many = Steering.of(*(Add(vector=vector, layers=0, scale=float(i + 1)) for i in range(5)))
    window = Sampling(max_tokens=2, repetition_penalty=1.3, repetition_window=4)

    def ask(sampling: Sampling = _FEW, **more: Any) -> Callable[[], object]:
        return lambda: engine.generate(_ONE, sampling, **more)

    cases: dict[str, tuple[Callable[[], object], str]] = {
        "a layer that does not exist": (ask(steer=Add(vector=vector, layers=9)), "layers"),
        "too many ops": (ask(steer=many), "columns"),
        "a vector of another size": (ask(steer=Add(vector=vector[:7], layers=0)), "vector"),
        "a repetition window": (ask(window), "repetition_window"),
        "LoRA": (lambda: start(folder, "eager", enable_lora=True), "lora_config"),
        "speculative decoding": (lambda: start(folder, "eager", speculative_config=_DRAFTS), "speculative_config"),
        "prompt embeddings": (lambda: start(folder, "eager", enable_prompt_embeds=True), "enable_prompt_embeds"),
    }
    return {name: _refused(*case) for name, case in cases.items()}


_DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def _refused(act: Callable[[], object], word: str) -> bool:
    try:
        act()
    except InvalidRequest as error:
        return word in str(error)
    except Exception:
        return False
    return False


def measure(mode: str, folder: Path, requests: int) -> dict[str, Any]:
    """One engine in one mode."""
    model, _ = make_model(folder, torch.float32, "cpu")
    engine = start(folder, mode)  # the self-test is part of it
    try:
        plan = Plan(requests, seed=2, concurrent=24, watched=False, limit=LIMIT)
        ledger, _ = asyncio.run(stress(EngineTarget(engine.aio), Oracle(model), plan))
        found: dict[str, Any] = {"runner": engine.aio.describe()[0]["runner"], "mode": engine.aio.mode}  # type: ignore[attr-defined]
        found |= {"requests": ledger.sent, "rows": ledger.rows, "tokens": ledger.tokens}
        found |= {"worst_row": ledger.worst_row, "wrong": ledger.wrong, "self_test": True}
        if mode == "eager":
            found["refused"] = refusals(engine, folder)
        found["alive"] = engine.generate(_ONE, _FEW, capture=Capture(layers=0)).rows.n == len(_ONE.token_ids) + 1
    finally:
        engine.close()
    return found


def holds(found: dict[str, Any], requests: int) -> bool:
    checked = found["requests"] == requests and found["rows"] > 0 and found["worst_row"] < LIMIT
    return checked and not found["wrong"] and all(found.get("refused", {}).values()) and found["alive"]


def record(requests: int) -> dict[str, Any]:
    import vllm

    names = ("torch", "transformers")
    result: dict[str, Any] = {"vllm": vllm.__version__, **{name: importlib.metadata.version(name) for name in names}}
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result["cells"] = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = measure(mode, Path(scratch) / "model", requests)
                result["cells"][mode] = {**found, "holds": holds(found, requests)}
            except Exception as error:  # this version does not run: that is a result too
                result["cells"][mode] = {"error": f"{type(error).__name__}: {error}"[:300], "holds": False}
    return {**result, "holds": all(cell["holds"] for cell in result["cells"].values())}


def merged(known: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """One entry per version and device, in the order of versions."""
    both = {**known, f"{result['vllm']} {result['device']}": result}
    return dict(sorted(both.items(), key=lambda item: [int(part) for part in item[1]["vllm"].split(".")[:2]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results of other versions in it are kept")
    parser.add_argument("--requests", type=int, default=144)
    args = parser.parse_args()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    warnings.filterwarnings("ignore", message="vLLM .* is not supported")  # this is the run
    result = record(args.requests)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    with atomic_path(args.out) as partial:
        partial.write_text(json.dumps(merged(known, result), indent=1) + "\n")
    print(json.dumps(result))  # noqa: T201
    raise SystemExit(0 if result["holds"] else 1)


if __name__ == "__main__":
    main()
