"""`steerscope chat`, fed through a pipe: one answer per line on stdout, everything else on stderr."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from steerscope import Sampling, Steering, load, load_rows, load_vector
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

Cli = Callable[..., Result]
Chat = Callable[..., tuple[list[str], str]]
Answers = Callable[..., list[str]]

MAX = 6


@pytest.fixture
def chat(cli: Cli, model: str) -> Chat:
    """Lines typed → what was answered, and the notes. The tiny model is seeded so that no answer holds a line break."""

    def run(*lines: str, flags: tuple[object, ...] = ()) -> tuple[list[str], str]:
        result = cli("chat", model, "--max-tokens", MAX, *flags, text="".join(line + "\n" for line in lines))
        assert result.exit_code == 0, result.output
        assert "Traceback" not in result.output
        return result.stdout.removesuffix("\n").split("\n") if result.stdout else [], result.stderr

    return run


@pytest.fixture(scope="module")
def answers(model: str) -> Answers:
    """The same conversation through the library."""

    def run(*lines: str, system: str | None = None, steer: Steering | None = None) -> list[str]:
        messages = [{"role": "system", "content": system}] if system else []
        said: list[str] = []
        with load(model) as engine:
            for line in lines:
                messages.append({"role": "user", "content": line})
                said.append(engine.chat(messages, Sampling(max_tokens=MAX), steer=steer).text)
                messages.append({"role": "assistant", "content": said[-1]})
        return said

    return run


def test_each_line_is_answered_with_the_conversation_so_far(chat: Chat, answers: Answers) -> None:
    said, notes = chat("hello", "", "and again")
    assert said == answers("hello", "and again")
    assert said[1] != answers("and again")[0]
    assert notes.count("tokens/s") == 2


def test_nothing_is_answered_after_quit(chat: Chat) -> None:
    assert len(chat("hello", "/quit", "ignored")[0]) == 1
    assert chat("/quit") == ([], "")
    assert chat() == ([], "")


def test_clear_forgets_the_conversation(chat: Chat, answers: Answers) -> None:
    said, _ = chat("hello", "/clear", "and again")
    assert said[1] == answers("and again")[0]


def test_the_system_message_is_set_by_flag_and_by_command(chat: Chat, answers: Answers) -> None:
    assert chat("hello", flags=("--system", "rain"))[0] == answers("hello", system="rain")
    assert chat("/system rain", "hello")[0] == answers("hello", system="rain")
    assert chat("/system", "hello", flags=("--system", "rain"))[0] == answers("hello")
    assert answers("hello", system="rain") != answers("hello")


def test_sampling_flags_are_obeyed(chat: Chat) -> None:
    hot = ("--temperature", 1.5, "--seed")
    assert chat("hello", flags=(*hot, 1))[0] == chat("hello", flags=(*hot, 1))[0]
    assert chat("hello", flags=(*hot, 1))[0] != chat("hello", flags=(*hot, 2))[0]
    assert chat("hello", flags=(*hot, 1, "--top-k", 1))[0] == chat("hello")[0]


def test_a_vector_is_added_changed_by_name_and_removed(chat: Chat, answers: Answers, vector: str) -> None:
    happy = load_vector(vector)

    def steered(scale: float, layers: str) -> str:
        return answers("hello", steer=Steering.of(happy.add(scale, layers=layers)))[0]

    said, notes = chat(
        *(f"/steer {vector}@1 5", "hello", "/clear"),
        *("/steer happy -5", "hello", "/clear"),
        *("/steer happy@2 5", "hello", "/clear"),
        *("/steer happy 0", "hello", "/clear"),
    )
    assert said == [steered(5, "1"), steered(-5, "1"), steered(5, "2"), answers("hello")[0]]
    assert len(set(said)) == 4
    assert "error" not in notes


def test_steer_takes_every_strength_of_the_flag(chat: Chat, vector: str) -> None:
    by_flag = chat("hello", flags=("--steer", f"{vector}@2:cap=8..9"))[0]
    assert chat(f"/steer {vector}@2 cap=8..9", "hello")[0] == by_flag
    assert by_flag != chat("hello")[0]


def test_unsteer_removes_what_flags_and_commands_added(chat: Chat, answers: Answers, vector: str) -> None:
    said, _ = chat(
        "hello", "/clear", "/unsteer", "hello", flags=("--steer", f"{vector}@1:5", "--steer", f"{vector}@2:5")
    )
    assert said == [answers("hello", steer=Steering.of(load_vector(vector).add(5)))[0], answers("hello")[0]]


def test_a_steering_that_does_not_fit_is_refused_and_the_one_before_stays(
    chat: Chat, answers: Answers, vector: str, tmp_path: Path
) -> None:
    said, notes = chat(f"/steer {vector}@1 5", "/steer happy@9 5", f"/steer {tmp_path}/gone.safetensors 1", "hello")
    assert said == answers("hello", steer=Steering.of(load_vector(vector).add(5, layers="1")))
    assert "the vector has no layers [9]" in notes
    assert "there is no file" in notes


def test_capture_tells_rows_and_norm_and_save_writes_them(chat: Chat, model: str, tmp_path: Path) -> None:
    later, first = tmp_path / "later.safetensors", tmp_path / "first.safetensors"
    _, notes = chat(f"/save {first}", "/capture 0,2", "hello", "and again", f"/save {later}", "/capture", "hello")
    shapes = [load_rows(file)[2].shape for file in (first, later)]
    with load(model) as engine:
        prompt = engine.chat([{"role": "user", "content": "hello"}], Sampling(max_tokens=1)).prompt_token_ids
    assert shapes[0] == (len(prompt) + MAX - 1, 64)
    assert shapes[1][0] > shapes[0][0]
    rows = [line.split("│")[1:-1] for line in notes.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row[:3]] for row in rows] == [
        [layer, "resid_post", str(shape[0])] for shape in shapes for layer in ("0", "2")
    ]
    assert float(rows[1][3]) == pytest.approx(float(load_rows(first)[2].mean(0).norm()), rel=1e-3)
    assert f"saved to {first}" in notes
    assert f"saved to {later}" in notes
    assert torch.isfinite(load_rows(later)[0]).all()


def test_a_layer_that_is_not_there_is_refused_at_once(chat: Chat) -> None:
    said, notes = chat("/capture 77", "hello")
    assert "layer 77 is out of range" in notes
    assert len(said) == 1


@pytest.mark.parametrize("line", ["/help", "/what", "/steer", "/save"])
def test_help_and_unknown_commands_list_the_commands(chat: Chat, line: str) -> None:
    said, notes = chat(line)
    assert said == []
    for command in ("steer", "unsteer", "capture", "save", "system", "clear", "quit"):
        assert f"/{command}" in notes


def test_an_answer_that_cannot_be_given_leaves_the_conversation_as_it_was(chat: Chat, answers: Answers) -> None:
    said, notes = chat("hello", "word " * 400, "and again")
    assert said == answers("hello", "and again")
    assert "error: prompt: the prompt has" in notes


def test_mistakes_in_flags_end_it_before_the_first_line(cli: Cli, model: str, vector: str) -> None:
    result = cli("chat", model, "--top-p", 2, "--steer", "gone:1", text="hello\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "error"]
    result = cli("chat", model, "--steer", f"{vector}@3:1", text="hello\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the vector has no layers [3]" in result.stderr


def test_a_model_without_a_chat_template_is_refused(cli: Cli, tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer(template=None).save_pretrained(tmp_path)
    result = cli("chat", tmp_path, text="hello\n")
    assert result.exit_code == 2
    assert "has no chat template; use steerscope generate" in result.stderr


@pytest.mark.slow
def test_ctrl_c_stops_only_the_answer(tmp_path: Path) -> None:
    tiny.model(max_position_embeddings=8192).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    command = [sys.executable, "-m", "steerscope.cli.main", "chat", str(tmp_path), "--max-tokens", "4000"]
    process = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    for line in (b"hello\n", b"and again\n"):
        process.stdin.write(line)
        assert process.stdout.read(1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        while b"finish: cancelled" not in (note := process.stderr.readline()):
            assert note, "the process ended"
        process.stdout.read(1 << 20)  # the rest of this answer, at least its line end
    process.stdin.close()
    assert process.wait(timeout=HUNG_S) == 0
    assert b"Traceback" not in process.stderr.read()
