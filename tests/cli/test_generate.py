"""`steerscope generate`: every flag changes what it says, and every mistake is reported."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from steerscope import SteeringVector, load_rows, save_vector
from support import tiny
from support.waiting import HUNG_S

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

Cli = Callable[..., Result]
Refused = Callable[..., list[str]]

PROMPT = "The quick brown fox"
KEYS = {
    "text",
    "token_ids",
    "prompt_token_ids",
    "finish_reason",
    "stop_string",
    "timings",
    "seed",
    "capture",
}


@pytest.fixture
def ask(cli: Cli, model: str) -> Callable[..., dict]:
    def run(*arguments: object, prompt: str = PROMPT) -> dict:
        result = cli("generate", model, prompt, "--max-tokens", 12, "--json", *arguments)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


Ask = Callable[..., dict]


# --- output


def test_json_is_the_only_output_and_has_exactly_the_promised_keys(ask: Ask) -> None:
    answer = ask()
    assert set(answer) == KEYS
    assert set(answer["timings"]) == {"queued", "first_token", "total"}
    assert answer["prompt_token_ids"] == tiny.tokenizer()(PROMPT)["input_ids"]
    assert len(answer["token_ids"]) == 12
    assert answer["text"] == tiny.tokenizer().decode(answer["token_ids"])
    assert (answer["finish_reason"], answer["stop_string"], answer["capture"]) == ("length", None, None)


def test_without_json_the_text_goes_to_stdout_and_the_summary_to_stderr(cli: Cli, model: str, ask: Ask) -> None:
    result = cli("generate", model, PROMPT, "--max-tokens", 12)
    assert result.stdout == ask()["text"] + "\n"
    assert "12 tokens" in result.stderr
    assert "tokens/s" in result.stderr
    assert "finish: length" in result.stderr


def test_several_choices_are_printed_one_after_the_other(cli: Cli, model: str, ask: Ask) -> None:
    flags = ("--n", 2, "--temperature", 1, "--seed", 3)
    result = cli("generate", model, PROMPT, "--max-tokens", 12, *flags)
    assert result.stdout == "".join(choice["text"] + "\n" for choice in ask(*flags)["choices"])


# --- sampling


def test_max_tokens_is_obeyed(cli: Cli, model: str) -> None:
    answer = json.loads(cli("generate", model, PROMPT, "--max-tokens", 3, "--json").stdout)
    assert len(answer["token_ids"]) == 3
    assert len(json.loads(cli("generate", model, PROMPT, "--json").stdout)["token_ids"]) == 64


def test_a_seed_repeats_a_text_and_another_seed_gives_another(ask: Ask) -> None:
    first, again, other = (ask("--temperature", 1, "--seed", seed) for seed in (1, 1, 2))
    assert first["token_ids"] == again["token_ids"]
    assert first["token_ids"] != other["token_ids"]
    assert (first["seed"], other["seed"]) == (1, 2)


def test_temperature_leaves_the_greedy_text(ask: Ask) -> None:
    assert ask("--temperature", 1.5, "--seed", 1)["token_ids"] != ask()["token_ids"]


@pytest.mark.parametrize("flag", [("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)])
def test_top_k_top_p_and_min_p_at_their_narrowest_are_greedy(ask: Ask, flag: tuple[str, float]) -> None:
    assert ask("--temperature", 1.5, "--seed", 1, *flag)["token_ids"] == ask()["token_ids"]


def test_the_repetition_penalty_ends_repetition_and_its_window_limits_it(ask: Ask, vector: str) -> None:
    steer = ("--steer", f"{vector}:5")
    assert len(set(ask(*steer)["token_ids"])) < 12
    everywhere = ask(*steer, "--repetition-penalty", 10)["token_ids"]
    assert len(set(everywhere)) == 12
    window = ask(*steer, "--repetition-penalty", 10, "--repetition-window", 1)["token_ids"]
    assert len(set(window)) < 12
    assert all(a != b for a, b in zip(window, window[1:], strict=False))


def test_a_stop_string_ends_the_text_before_it(ask: Ask) -> None:
    text = ask()["text"]
    stops = text[6:8], text[15:17]
    assert (text.index(stops[0]), text.index(stops[1])) == (6, 15)
    answer = ask("--stop", stops[1], "--stop", stops[0])
    assert answer["text"] == text[: text.index(stops[0])]
    assert (answer["finish_reason"], answer["stop_string"]) == ("stop_string", stops[0])
    assert ask("--stop", stops[1])["stop_string"] == stops[1]


def test_ignore_eos_goes_on_after_the_end_token(cli: Cli, model: str, ask: Ask, tmp_path: Path) -> None:
    third = ask()["token_ids"][2]
    ending = tmp_path / "ending"
    shutil.copytree(model, ending)
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": third}))
    short = json.loads(cli("generate", ending, PROMPT, "--max-tokens", 12, "--json").stdout)
    whole = json.loads(cli("generate", ending, PROMPT, "--max-tokens", 12, "--json", "--ignore-eos").stdout)
    assert (short["finish_reason"], whole["finish_reason"]) == ("stop", "length")
    assert len(short["token_ids"]) <= 3
    assert whole["token_ids"] == ask()["token_ids"]


def test_n_gives_that_many_different_choices_and_the_first_on_top(ask: Ask) -> None:
    answer = ask("--n", 3, "--temperature", 1, "--seed", 5)
    assert set(answer) == KEYS | {"choices"}
    assert all(set(choice) == KEYS - {"prompt_token_ids"} for choice in answer["choices"])
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert [choice["seed"] for choice in answer["choices"]] == [5, 6, 7]
    assert {key: answer[key] for key in answer["choices"][0]} == answer["choices"][0]


# --- chats


def test_chat_sends_the_prompt_through_the_template_with_the_system_message(ask: Ask) -> None:
    def ids(*messages: tuple[str, str]) -> list[int]:
        chat = [{"role": role, "content": content} for role, content in messages]
        text = tiny.tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value,arg-type]

    assert ask("--chat")["prompt_token_ids"] == ids(("user", PROMPT))
    assert ask("--chat", "--system", "rain")["prompt_token_ids"] == ids(("system", "rain"), ("user", PROMPT))


def test_a_system_message_without_chat_is_refused(refused: Refused, model: str) -> None:
    assert refused("generate", model, PROMPT, "--system", "x") == ["--system: belongs to a chat; add --chat"]


# --- steering


def test_steering_changes_the_text_and_a_scale_of_zero_does_not(ask: Ask, vector: str) -> None:
    plain = ask()["token_ids"]
    assert ask("--steer", f"{vector}@1-2:5")["token_ids"] != plain
    assert ask("--steer", f"{vector}@1-2:0")["token_ids"] == plain
    assert ask("--steer", f"{vector}@1:5")["token_ids"] != ask("--steer", f"{vector}@2:5")["token_ids"]


def test_several_steerings_act_together(ask: Ask, vector: str) -> None:
    both = ask("--steer", f"{vector}@1:5", "--steer", f"{vector}@2:5")["token_ids"]
    assert both == ask("--steer", f"{vector}:5")["token_ids"]
    assert both != ask("--steer", f"{vector}@2:5")["token_ids"]


def test_the_steered_rows_show_the_cap(ask: Ask, vector: str, tmp_path: Path) -> None:
    from steerscope import load_vector

    out = tmp_path / "rows.safetensors"
    capture = ("--capture", 2, "--out", out)
    direction = load_vector(vector)[2]
    unit = direction / direction.norm()
    ask(*capture)
    assert (load_rows(out)[2] @ unit).max() > 0.5
    ask(*capture, "--steer", f"{vector}@2:cap=..0.5")
    assert (load_rows(out)[2] @ unit).max() <= 0.5 + 1e-4
    ask(*capture, "--steer", f"{vector}@2:cap=1..;tokens=generated")
    projected = load_rows(out)[2] @ unit
    count = len(tiny.tokenizer()(PROMPT)["input_ids"])  # type: ignore[arg-type]
    assert projected[:count].min() < 1
    assert projected[count:].min() >= 1 - 1e-4


# --- capture


def test_capture_writes_a_row_for_every_token_but_the_last(ask: Ask, tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    answer = ask("--capture", "0,2-3", "--out", out)
    rows = load_rows(out)
    assert answer["capture"] == str(out)
    assert rows.layers == (0, 2, 3)
    assert rows.sites == ("resid_post",)
    expected = len(answer["prompt_token_ids"]) + len(answer["token_ids"]) - 1
    assert [tuple(tensor.shape) for tensor in rows.tensors.values()] == [(expected, 64)] * 3


def test_sites_tokens_and_reduce_choose_what_is_captured(ask: Ask, tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    ask("--capture", 1, "--out", out, "--sites", "attn_out,mlp_out")
    assert set(load_rows(out)) == {(1, "attn_out"), (1, "mlp_out")}
    ask("--capture", 1, "--out", out, "--tokens", "generated")
    generated = load_rows(out)
    assert generated[1].shape == (11, 64)
    ask("--capture", 1, "--out", out, "--tokens", "generated", "--reduce", "mean")
    torch.testing.assert_close(load_rows(out)[1], generated[1].mean(0))
    ask("--capture", 1, "--out", out, "--tokens", "generated", "--reduce", "last")
    torch.testing.assert_close(load_rows(out)[1], generated[1][-1])


def test_several_choices_write_a_file_each(ask: Ask, tmp_path: Path) -> None:
    flags = ("--n", 2, "--temperature", 1, "--seed", 1, "--capture", 1)
    answer = ask(*flags, "--out", tmp_path / "rows.safetensors")
    files = [tmp_path / f"rows.{i}.safetensors" for i in range(2)]
    assert [choice["capture"] for choice in answer["choices"]] == list(map(str, files))
    assert sorted(tmp_path.iterdir()) == files
    first, second = (load_rows(file)[1] for file in files)
    assert not torch.equal(first, second)


def test_the_summary_names_the_file_and_its_shape(cli: Cli, model: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    result = cli("generate", model, PROMPT, "--max-tokens", 4, "--capture", "0-2", "--out", out)
    assert f"{out}: 3 × [{len(tiny.tokenizer()(PROMPT)['input_ids']) + 3}, 64]" in result.stderr  # type: ignore[arg-type]


def test_dtype_is_the_dtype_of_the_model(ask: Ask, tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    ask("--capture", 1, "--out", out, "--dtype", "bfloat16", "--device", "cpu")
    assert load_rows(out)[1].dtype == torch.bfloat16
    ask("--capture", 1, "--out", out)
    assert load_rows(out)[1].dtype == torch.float32


def test_capture_and_out_need_each_other(refused: Refused, model: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.safetensors"
    alone = refused("generate", model, PROMPT, "--capture", 1)
    assert alone == ["--capture: has nowhere to put its rows; add --out rows.safetensors"]
    assert refused("generate", model, PROMPT, "--out", out) == ["--out: captures nothing; add --capture LAYERS"]
    details = refused("generate", model, PROMPT, "--tokens", "all", "--sites", "mlp_out", "--reduce", "mean")
    assert details == ["--sites --tokens --reduce: captures nothing; add --capture LAYERS"]


# --- mistakes


def test_a_missing_folder_for_the_rows_is_found_before_anything_runs(refused: Refused, tmp_path: Path) -> None:
    (line,) = refused(
        "generate", "no-such-model", PROMPT, "--capture", 1, "--out", tmp_path / "no" / "rows.safetensors"
    )
    assert "name a file in a folder that exists" in line


def test_a_missing_model_is_named(refused: Refused, tmp_path: Path) -> None:
    (line,) = refused("generate", tmp_path / "nowhere", PROMPT)
    assert str(tmp_path / "nowhere") in line


def test_a_folder_without_a_model_is_named(refused: Refused, tmp_path: Path) -> None:
    (line,) = refused("generate", tmp_path, PROMPT)
    assert str(tmp_path) in line


def test_a_missing_vector_is_named_and_the_forms_are_listed(refused: Refused, model: str, tmp_path: Path) -> None:
    (line,) = refused("generate", model, PROMPT, "--steer", f"{tmp_path}/gone.safetensors@1:2")
    assert f"there is no file '{tmp_path}/gone.safetensors'" in line
    assert "FILE[@LAYERS][:SCALE]" in line


def test_a_layer_out_of_range_is_named_with_the_range(refused: Refused, model: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared.safetensors"
    save_vector(SteeringVector.shared(torch.ones(64)), shared)
    (line,) = refused("generate", model, PROMPT, "--steer", f"{shared}@9:1")
    assert "layer 9 is out of range" in line
    assert "0–3" in line


def test_a_vector_of_the_wrong_size_is_refused_with_both_sizes(refused: Refused, model: str, tmp_path: Path) -> None:
    small = tmp_path / "small.safetensors"
    save_vector(SteeringVector({1: torch.ones(32)}), small)
    (line,) = refused("generate", model, PROMPT, "--steer", small)
    assert "32" in line
    assert "64" in line


def test_five_stop_strings_are_one_too_many(refused: Refused, model: str) -> None:
    stops = [flag for text in "abcde" for flag in ("--stop", text)]
    (line,) = refused("generate", model, PROMPT, *stops)
    assert line.startswith("stop: ")
    assert "4" in line


def test_an_empty_prompt_is_refused(refused: Refused, model: str) -> None:
    assert refused("generate", model, "") == ["prompt: the prompt is empty; give at least one token"]


def test_a_prompt_that_is_not_utf8_is_refused(refused: Refused, model: str) -> None:
    assert refused("generate", model, os.fsdecode(b"\xff")) == ["prompt: the text is not UTF-8; convert it first"]


def test_unknown_devices_and_sites_are_refused(refused: Refused, model: str, tmp_path: Path) -> None:
    (device,) = refused("generate", model, PROMPT, "--device", "abacus")
    assert device.startswith("--device abacus: ")
    (site,) = refused(
        "generate", model, PROMPT, "--capture", 1, "--sites", "attic", "--out", tmp_path / "r.safetensors"
    )
    assert "resid_post" in site


def test_mistakes_in_flags_are_told_together(refused: Refused, model: str) -> None:
    lines = refused(
        "generate", model, "", "--top-p", 2, "--n", 0, "--steer", "gone:1", "--steer", "lost", "--capture", 1
    )
    starts = ["top_p", "n", "--capture", "steer 'gone:1'", "steer 'lost'"]
    assert [line.partition(":")[0] for line in lines if not line.startswith("steer")] == starts[:3]
    assert [line.partition(": there")[0] for line in lines if line.startswith("steer")] == starts[3:]


def test_mistakes_that_need_the_model_are_told_together(
    refused: Refused, model: str, vector: str, tmp_path: Path
) -> None:
    out = tmp_path / "rows.safetensors"
    lines = refused("generate", model, "", "--steer", f"{vector}@3:1", "--capture", 7, "--out", out)
    assert [line.partition(":")[0] for line in lines] == ["prompt", "steer.ops[0].layers", "capture.layers"]
    assert not out.exists()


# --- a real process


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("long")
    tiny.model(max_position_embeddings=8192).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_text_is_streamed_and_ctrl_c_ends_with_130_and_no_traceback(long_model: str) -> None:
    command = [sys.executable, "-m", "steerscope.cli.main", "generate", long_model, PROMPT, "--max-tokens", "8000"]
    process = subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert len(process.stdout.read(8)) == 8  # long before the 8,000 tokens are there
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=HUNG_S)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert b"tokens/s" not in stderr


@pytest.mark.slow
def test_a_reader_that_leaves_early_ends_it_quietly(long_model: str) -> None:
    command = [sys.executable, "-m", "steerscope.cli.main", "generate", long_model, PROMPT, "--max-tokens", "8000"]
    process = subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(8)
    process.stdout.close()
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    assert process.wait(timeout=HUNG_S) == 1
