"""A model folder that holds an adapter: its base model alone is never loaded in its place without an error."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from engines.conftest import HAS_VLLM
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.cli.main import app
from steerscope.engines.hf import HFEngine
from steerscope.engines.load import load_engine
from steerscope.engines.vllm.guards import adapter_refusal
from steerscope.models import has_adapter
from steerscope.specs import Sampling
from steerscope.specs.errors import UnsupportedModel
from support import tiny

HAS_PEFT = importlib.util.find_spec("peft") is not None
without_peft = pytest.mark.skipif(HAS_PEFT, reason="peft is installed")
RANK, HIDDEN, LAYERS = 4, 64, 4
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["o_proj"],
    "inference_mode": True,
}  # fmt: skip
REFUSED = "holds an adapter (adapter_config.json), which needs peft: run pip install peft"


def write_adapter(folder: Path, base: Path) -> Path:
    """LoRA weights as peft names them, large enough to change every text."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "base_model_name_or_path": str(base)}))
    generator, inner = torch.Generator().manual_seed(0), 4 * 32
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, inner, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    tiny.tokenizer().save_pretrained(folder)
    return folder


def write_base(folder: Path) -> Path:
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=["beside its base", "alone"])
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    base = write_base(tmp_path / "base")
    return write_adapter(base if request.param == "beside its base" else tmp_path / "adapter", base)


@without_peft
@pytest.mark.parametrize("load", [load_engine, HFEngine.from_pretrained], ids=["load", "HFEngine"])
def test_without_peft_transformers_does_not_load_the_base_alone(adapter: Path, load: Callable) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        load(adapter)
    assert f"{adapter} {REFUSED}" in str(refusal.value)


@without_peft
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "{}", "hello"),
        ("vectors", "extract", "--model", "{}", "--data", "happy_sad", "--out", "v.safetensors"),
        ("capture", "run", "--model", "{}", "--data", "texts.jsonl", "--layers", "1", "--out", "store"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_peft_commands_say_what_to_install(
    adapter: Path, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text(json.dumps({"text": "one"}))
    result = CliRunner().invoke(app, [part.format(adapter) for part in arguments])
    assert (result.exit_code, REFUSED in result.stderr) == (2, True), result.output


@without_peft
def test_without_peft_the_server_ends_with_the_reason(adapter: Path) -> None:
    command = [sys.executable, "-m", "steerscope.cli.main", "serve", str(adapter), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert REFUSED in done.stderr


def test_vllm_and_the_reader_of_checkpoints_say_to_merge_it(adapter: Path) -> None:
    assert has_adapter(adapter)
    what, remedy = adapter_refusal(adapter) or ("", "")
    assert what == f"{adapter} holds an adapter (adapter_config.json), which vLLM leaves out"
    assert "pip install peft" in remedy
    if (adapter / "config.json").is_file():
        with pytest.raises(UnsupportedModel, match="holds an adapter: merge it"):
            Checkpoint(adapter)


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_an_engine_of_vllm_does_not_load_the_base_alone(adapter: Path) -> None:
    with pytest.raises(UnsupportedModel, match="which vLLM leaves out; merge it with peft"):
        load_engine(adapter, engine="vllm")


def test_a_model_without_an_adapter_and_a_name_that_leads_nowhere_have_none(tmp_path: Path) -> None:
    assert not has_adapter(write_base(tmp_path / "base"))
    for name in ("no-such-organisation/no-such-model", "a model", str(tmp_path / "nowhere")):
        assert not has_adapter(name)


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_with_peft_the_adapter_acts(adapter: Path, tmp_path: Path) -> None:
    plain = write_base(tmp_path / "plain")
    texts = []
    for folder in (plain, adapter):
        with load_engine(folder).sync as engine:
            texts.append(engine.generate("hello", Sampling(max_tokens=8, ignore_eos=True)).token_ids)
    assert texts[0] != texts[1]
