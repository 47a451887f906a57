"""Kill vLLM's engine core while a request runs; print, in JSON, what became of that request, of the next one, and of
closing the engine.

    python tests/engines/vllm/kill_script.py MODEL
"""

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

from steerscope.engines.results import TokenPrompt
from steerscope.engines.vllm.client.engine import VLLMEngine
from steerscope.specs import Capture, Sampling


async def outcome(task: Any) -> tuple[str, float]:
    began = time.monotonic()
    try:
        await asyncio.wait_for(task, 60)
    except BaseException as error:
        return type(error).__name__, time.monotonic() - began
    return "done", time.monotonic() - began


async def main(engine: VLLMEngine) -> dict[str, Any]:
    assert engine.facts.context is not None
    long = Sampling(max_tokens=engine.facts.context - 3, ignore_eos=True)
    running = asyncio.ensure_future(engine.generate(TokenPrompt([20, 21, 22]), long, capture=Capture()))
    before = engine._counts["steps"]
    while not engine._running or engine._counts["steps"] < before + 3:
        await asyncio.sleep(0.001)
    for process in engine._llm.engine_core.resources.engine_manager.processes:  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGKILL)
    found = {"running": await outcome(running)}
    found["next"] = await outcome(engine.generate(TokenPrompt([20, 21]), Sampling(max_tokens=2)))
    found["close"] = await outcome(engine.close())
    return {**found, "alive": engine._thread.is_alive()}


if __name__ == "__main__":
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_num_seqs": 8}
    options |= {"kv_cache_memory_bytes": 32 << 20, "capture_budget": 8 << 20, "max_num_batched_tokens": 64}
    print(json.dumps(asyncio.run(main(VLLMEngine(sys.argv[1], **options)))))  # noqa: T201
    sys.stdout.flush()
    os._exit(0)
