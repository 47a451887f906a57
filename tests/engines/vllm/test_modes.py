"""The taps in every mode of vLLM that a CPU can run, each in a process of its own (mode_script.py): at least twenty
mixed requests together, in steps of 32 tokens, with every row, count and greedy token checked against transformers.
"""

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.waiting import HUNG_S

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("mode_script.py")
ROOT = Path(__file__).parents[3]
LIMIT, CHUNK = 1e-4, 32
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
Verdict = dict[str, Any]
Mode = Callable[..., Verdict]


@pytest.fixture
def mode(tmp_path: Path) -> Mode:
    """Runs the script with these arguments and environment variables, and checks what holds in every mode."""
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not built for the CPU")

    def run(*arguments: str, **environment: str) -> Verdict:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "STEERSCOPE", "TRITON_"))}
        caches = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        found_in = {"PYTHONPATH": os.pathsep.join([inherited.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests")])}
        verdict = last_line([*arguments], {**inherited, **ENVIRONMENT, **caches, **found_in, **environment})
        check(verdict)
        return verdict

    return run


def last_line(arguments: list[str], environment: dict[str, str]) -> Verdict:
    """The script's verdict. A script that hangs is ended with all processes it started."""
    command = [sys.executable, str(SCRIPT), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as script:
        try:
            output, _ = script.communicate(timeout=HUNG_S)
        except subprocess.TimeoutExpired:
            os.killpg(script.pid, signal.SIGKILL)
            output, _ = script.communicate()
            pytest.fail(f"no verdict after {HUNG_S} s:\n{output[-4000:]}")
    verdicts = [line for line in output.splitlines() if line.startswith("{")]
    assert script.returncode == 0, output[-4000:]
    assert verdicts, output[-4000:]
    return json.loads(verdicts[-1])


def check(verdict: Verdict) -> None:
    assert verdict["wrong"] == []
    assert verdict["worst_row"] < LIMIT
    assert verdict["together"] >= 20
    assert verdict["greedy"] >= 20
    assert verdict["longest"] > 2 * CHUNK
    assert verdict["rows"] > 2000
    assert verdict["preempted"] > 0
    assert {"length", "stop", "stop_string"} <= set(verdict["ends"])
    assert {"cancelled", "left"} & set(verdict["ends"])
    assert verdict["readings"] > 300
    assert verdict["firings"] > 20
    assert verdict["stopped_by_rule"] > 0
    assert not any(verdict["left_over"].values()), verdict["left_over"]
    assert verdict["still_running"] == []


def layers_of(worker: Verdict) -> set[int]:
    return {layer for layer, _ in worker["taps"]}


@pytest.mark.long
def test_inductor_and_again_with_a_damaged_cache(mode: Mode, tmp_path: Path) -> None:
    """Every file that compiling left is cut and has wrong bytes in its middle: the second start must notice."""
    verdict = mode("--compile")
    assert verdict["backend"] == "inductor"
    assert verdict["compiled"]["graphs"] > 0
    assert verdict["compiled"]["breaks"] == 0
    assert verdict["compiled"]["inductor"] > 0
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(left) > 10
    for path in left:
        data = path.read_bytes()
        middle = len(data) // 2
        path.write_bytes(data[:middle] + b"\xff\x00damaged" + data[middle + 9 : middle + 9 + middle // 2])
    assert mode("--compile")["compiled"]["graphs"] > 0


@pytest.mark.long
def test_two_engines_beside_each_other(mode: Mode) -> None:
    """Data parallel by several engines, each with a core process of its own: both serve the same requests under the
    same names at once, and one goes on when the other is closed. Nothing is handed to the cores but their command: the
    entry point alone brings the taps there, and rows come back through shared memory."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "steerscope" not in plugins.names:
        pytest.fail("the entry point is missing: install the package again")
    verdict = mode("--beside", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert verdict["engines"] == 2
    assert verdict["children"] == ["SpawnProcess EngineCore"] * 2


@pytest.mark.long
def test_the_second_model_runner(mode: Mode) -> None:
    """GPUs run it by default. On a CPU its kernels run in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("vLLM's second model runner needs Triton: pip install triton (its interpreter runs on a CPU)")
    (worker,) = mode("--interpret", VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1")["workers"]
    assert worker["runner"] == "vllm.v1.worker.cpu.model_runner"


@pytest.mark.long
def test_tensor_parallel(mode: Mode) -> None:
    """Every rank steers, one writes the rows."""
    workers = mode("--tensor-parallel", "2")["workers"]
    assert [worker["stage"] for worker in workers] == [0, 0]
    assert [layers_of(worker) for worker in workers] == [{0, 1, 2, 3}] * 2


@pytest.mark.long
def test_pipeline_parallel(mode: Mode) -> None:
    """Each stage writes the rows of its own layers. Compiled: without the warm-up of that, vLLM's CPU build never makes
    what a later stage receives its input in."""
    workers = mode("--compile", "--pipeline-parallel", "2")["workers"]
    assert [worker["stage"] for worker in workers] == [0, 1]
    assert [layers_of(worker) for worker in workers] == [{0, 1}, {2, 3}]
