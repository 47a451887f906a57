"""The console script: quick help, exit codes, no tracebacks for users, tracebacks for bugs."""

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import steerscope
from steerscope import __version__
from steerscope.cli import options
from steerscope.specs.errors import InvalidRequest, ModelNotFound, Problem, SteerscopeError
from support.waiting import HUNG_S

Cli = Callable[..., Result]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=HUNG_S)


def test_building_the_whole_app_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.main import get_command; from steerscope.cli.main import app; get_command(app);"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic', 'safetensors', 'gguf'} & sys.modules.keys()))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
def test_it_runs_as_a_module() -> None:
    done = python("-m", "steerscope.cli.main", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"steerscope {__version__}\n", "")
    done = python("-m", "steerscope.cli.main", "vectors", "show", "/no/such/file.safetensors")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: /no/such/file.safetensors does not exist\n"


STUCK = """
import signal, threading
from steerscope.cli import main as termination
termination._ENDING_S = 0.2
termination.end_on_sigterm()
held = threading.Lock()
held.acquire()
try:
    signal.raise_signal(signal.SIGTERM)
finally:
    held.acquire()  # as when the signal came between a lock and the block that gives it back
"""
LOST = """
import signal, time
from steerscope.cli import main as termination

class Going:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

termination.end_on_sigterm()
try:
    Going()
    time.sleep(30)
finally:
    print("closed")
"""


def test_a_command_that_cannot_close_what_it_has_ends_all_the_same() -> None:
    assert python("-c", STUCK).returncode == 143


def test_a_signal_that_python_drops_comes_once_more() -> None:
    done = python("-c", LOST)
    assert (done.returncode, done.stdout, done.stderr) == (143, "closed\n", "")


def test_help_lists_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    for command in ("generate", "chat", "serve", "vectors", "doctor", "demo"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "capture", "--mode", "custom", "--output", "x.json"), "--layers"),
        (("serve", "no-such-model", "--lens", "no-such-pack"), "no-such-model"),
        (("lens", "fit", "--layer", "all", "--out", "x"), "all is too many"),
        (("train", "--layer", "3", "--data", "no-such-set", "--out", "x"), "no-such-set"),
    ],
)
def test_second_names_of_options_are_understood(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    """What is wrong is said of something else."""
    result = cli(*arguments)
    assert result.exit_code != 0
    assert said in result.stderr
    assert "No such option" not in result.stderr


@pytest.mark.parametrize(
    "arguments", [("generate",), ("nonsense",), ("generate", "m", "p", "--nonsense"), ("vectors", "nonsense")]
)
def test_wrong_usage_is_exit_code_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def problem(field: str) -> Problem:
    return Problem(field, "is wrong", "correct it")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SteerscopeError("no good"), ["no good"]),
        (InvalidRequest([problem("a")]), ["a: is wrong; correct it"]),
        (InvalidRequest([problem("a"), problem("b")]), ["a: is wrong; correct it", "b: is wrong; correct it"]),
        (ExceptionGroup("", [InvalidRequest([problem("a")]), SteerscopeError("x")]), ["a: is wrong; correct it", "x"]),
        (FileNotFoundError(2, "No such file or directory", "rows"), ["[Errno 2] No such file or directory: 'rows'"]),
        (PermissionError(13, "Permission denied", "rows"), ["[Errno 13] Permission denied: 'rows'"]),
    ],
)
def test_what_a_user_did_wrong_is_told_line_by_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: list[str]
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(options, "open_engine", fails)
    result = cli("generate", "m", "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [f"error: {line}" for line in expected]


def test_a_bug_is_not_hidden(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(options, "open_engine", fails)
    result = cli("generate", "m", "p")
    assert isinstance(result.exception, KeyError)


def test_ctrl_c_is_exit_code_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "open_engine", interrupted)
    result = cli("generate", "m", "p")
    assert (result.exit_code, result.stdout) == (130, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("vectors", "extract", "--data", "happy_sad", "--out", "v.safetensors", "--max-batch", 5),
        ("lens", "fit", "--layers", 1, "--out", "pack", "--max-batch", 5),
        ("personas", "run", "--out", "run", "--roles", "pirate", "--limit", 1, "--batch", 5),
    ],
)
def test_commands_with_many_requests_say_how_many_decode_together(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    given: dict[str, object] = {}

    def load(model: str, **options: object) -> None:
        given.update(options, model=model)
        raise ModelNotFound("enough")

    monkeypatch.setattr(steerscope, "load", load)
    assert "enough" in cli(*arguments).stderr
    assert given["max_batch"] == 5


def test_demo_calls_the_demo(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Path, str]] = []
    fake = types.ModuleType("steerscope.demo.run")
    monkeypatch.setattr(fake, "run_demo", lambda out, model: calls.append((out, model)), raising=False)
    monkeypatch.setitem(sys.modules, "steerscope.demo.run", fake)
    assert cli("demo").exit_code == 0
    assert cli("demo", "--out", tmp_path, "--model", "org/name").exit_code == 0
    assert calls == [(Path("demo-report"), "smollm2-135m"), (tmp_path, "org/name")]
