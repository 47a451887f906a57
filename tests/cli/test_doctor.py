"""`steerscope doctor`: it finds what works and what does not, and says what to do."""

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import Result

import steerscope as ss
from steerscope import SteeringVector, __version__
from steerscope.cli import doctor as module
from steerscope.cli import options
from steerscope.engines.hf.decode_batch import BatchCache, cache_bytes, prompt_cache
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

Cli = Callable[..., Result]
SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")


def test_a_working_model_is_described_and_tried(cli: Cli, model: str) -> None:
    result = cli("doctor", model, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report) == {"installed", "hardware", "model", "engines", "problems", "verdict"}
    assert report["verdict"] == f"verdict: {model} works, with every site of 4 layers"
    assert report["problems"] == []
    assert report["installed"]["steerscope"] == __version__
    assert report["installed"]["torch"] == metadata.version("torch")
    assert report["hardware"]["cores"] >= 1
    found = report["model"]
    assert (found["layers"], found["hidden"], found["block"]) == (4, 64, "LlamaDecoderLayer")
    assert (found["device"], found["dtype"]) == ("cpu", "torch.float32")
    assert [found[site] for site in SITES] == ["available"] * 5
    assert found["self-test"].startswith("passed")
    assert found["plain"].startswith("8 tokens in ")
    assert found["steered"].startswith("8 tokens in ")
    assert report["engines"]["hf"] == "works"


def test_the_same_is_shown_as_tables(cli: Cli, model: str) -> None:
    result = cli("doctor", model, "--dtype", "bfloat16")
    assert result.exit_code == 0
    for text in ("installed", "hardware", "engines", "LlamaDecoderLayer", "torch.bfloat16", "no problems"):
        assert text in result.stdout


def test_a_refused_site_is_shown_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    tiny.model("gpt_neox").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    result = cli("doctor", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["model"]
    assert found["resid_mid"].startswith("refused: ")
    assert "parallel" in found["resid_mid"]
    assert found["resid_post"] == "available"


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "falcon_h1"])
def test_the_memory_of_a_load_is_what_the_batch_then_takes(cli: Cli, tmp_path: Path, architecture: str) -> None:
    tiny.model(architecture).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with ss.load(tmp_path) as engine:
        said = engine.aio.room_for(3, 700)
        config = engine.aio.model.config
        cache, prompts = BatchCache(config), prompt_cache(config)
        with torch.no_grad():
            engine.aio.model(torch.zeros(3, 700, dtype=torch.long), past_key_values=prompts)
        cache.join(prompts, [700] * 3)
        tensors = [tensor for layer in cache.own for tensor in (layer.keys, layer.values)]
        for layer in cache.stateful:
            tensors += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        taken = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        assert cache_bytes(engine.aio.model, 3, 700) == taken
    assert re.fullmatch(
        r"3 × 700 tokens need [\d.]+ GiB \(weights 0.00 GiB, cache [\d.]+ GiB\) of .* GiB: they fit", said
    )
    result = cli("doctor", tmp_path, "--fit", "3x700")
    assert result.exit_code == 0, result.output
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith(f"verdict: {tmp_path} works, with every site ")
    assert last.endswith("GiB: they fit")


@pytest.mark.parametrize("fit", ["8", "x", "0x5", "8x", "-1x5", "8x4k"])
def test_a_load_that_is_none_is_refused_before_the_model_is_loaded(cli: Cli, fit: str) -> None:
    result = cli("doctor", "nowhere", "--fit", fit)
    assert result.exit_code == 2
    assert f"--fit: cannot be {fit!r}; give the number of texts and their tokens, such as 8x4096" in result.output


def test_without_a_model_and_without_the_wheel_a_tiny_one_is_made(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has", lambda _: False)
    result = cli("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["model"]
    assert found["name"] == "a tiny model made on the spot"
    assert found["block"] == "LlamaDecoderLayer"


def test_a_model_that_is_not_there_is_a_problem_with_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    result = cli("doctor", tmp_path / "nowhere", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert "model" not in report
    assert str(tmp_path / "nowhere") in report["problems"][0]
    assert report["engines"]["hf"] != "works"
    shown = cli("doctor", tmp_path / "nowhere")
    assert shown.exit_code == 1
    assert "problem: " in shown.stdout
    assert "Traceback" not in shown.output


def test_any_failure_of_a_model_is_told(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(options, "open_engine", fails)
    result = cli("doctor", model, "--json")
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.endswith("RuntimeError: operator torchvision::nms does not exist")


def test_a_package_that_breaks_transformers_is_named_with_the_remedy(
    cli: Cli, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("torchaudio", "raise OSError('undefined symbol')"), ("torchcodec", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = cli("doctor", model, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"] == [
        "torchaudio is installed but does not import: run pip uninstall torchaudio"
    ]


def test_steering_without_effect_is_a_problem(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SteeringVector.add
    monkeypatch.setattr(SteeringVector, "add", lambda self, _scale: real(self, 0.0))
    result = cli("doctor", model, "--json")
    assert result.exit_code == 1
    assert "did not change the text" in json.loads(result.stdout)["problems"][0]
