"""A model folder that holds an adapter: its base model alone is never loaded in its place without an error."""

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import steerscope as ss
from engines.conftest import HAS_VLLM
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.cli.main import app
from steerscope.engines.hf import HFEngine
from steerscope.engines.load import load_engine
from steerscope.engines.vllm.guards import adapter_refusal
from steerscope.models import has_adapter
from steerscope.specs import Add, Capture, Sampling
from steerscope.specs.errors import InvalidRequest, UnsupportedModel
from support import tiny

HAS_PEFT = importlib.util.find_spec("peft") is not None
without_peft = pytest.mark.skipif(HAS_PEFT, reason="peft is installed")
RANK, HIDDEN, LAYERS = 4, 64, 4
FEW = Sampling(max_tokens=8, ignore_eos=True)
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


# --- models that are loaded already


def test_a_loaded_model_is_used_as_it_is_and_left_as_it_was() -> None:
    model = tiny.model(seed=7)  # no other engine has it
    ids = torch.arange(5, 17).unsqueeze(0)
    before = model(ids).logits
    with ss.load(model, tokenizer=tiny.tokenizer(), max_batch=2) as engine:
        add = Add(vector=torch.ones(HIDDEN), scale=2.0, layers="all")
        plain, steered = engine.generate(["hello"] * 2, FEW, steer=[None, add], capture=Capture())
        assert plain.token_ids != steered.token_ids
        prompt = torch.tensor([plain.prompt_token_ids])
        whole: Any = model
        wanted = whole.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=-1)
        assert wanted[0, prompt.shape[1] :].tolist() == list(plain.token_ids)
    assert torch.equal(model(ids).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, ["tokenizer: a loaded model comes without one"]),
        (
            {"engine": "vllm", "dtype": "float32"},
            ["model: vLLM loads models itself", "tokenizer: ", "dtype: the model is"],
        ),
        ({"tokenizer": 1, "device": "cpu", "adapter": "x"}, ["device: the model is loaded", "adapter: the model is"]),
    ],
)
def test_what_a_loaded_model_cannot_take_is_named_at_once(options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ss.load(tiny.model(), **options)
    assert len(refusal.value.problems) == len(named)
    assert all(name in str(refusal.value) for name in named)


def test_other_modules_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"Linear is no model of transformers"):
        ss.load(torch.nn.Linear(2, 2), tokenizer=tiny.tokenizer())
    with pytest.raises(InvalidRequest, match="adapter: is for transformers; merge it with peft"):
        ss.load("smollm2-135m", engine="vllm", adapter="x")


@without_peft
def test_without_peft_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    with pytest.raises(UnsupportedModel, match="needs peft: run pip install peft"):
        ss.load(base, adapter=write_adapter(tmp_path / "adapter", base))


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_with_peft_adapters_are_on_and_off_in_one_process(tmp_path: Path) -> None:
    """As a folder and as a loaded model of peft: rows and texts are peft's own."""
    from peft import PeftModel, PromptTuningConfig, get_peft_model  # type: ignore[import-not-found]

    base = write_base(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base)
    loaded = PeftModel.from_pretrained(copy.deepcopy(tiny.model()), folder)
    ids = torch.tensor([tiny.tokenizer()("hello").input_ids])
    wanted = loaded.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)
    states = loaded(input_ids=wanted[:, :-1], output_hidden_states=True).hidden_states
    with (
        ss.load(base) as plain,
        ss.load(base, adapter=folder) as from_folder,
        ss.load(loaded, tokenizer=tiny.tokenizer()) as from_peft,
    ):
        without = plain.generate("hello", FEW)
        for engine in (from_folder, from_peft):
            done = engine.generate("hello", FEW, capture=Capture())
            assert list(done.token_ids) == wanted[0, ids.shape[1] :].tolist() != list(without.token_ids)
            for layer in range(LAYERS - 1):
                assert torch.allclose(done.rows[layer], states[layer + 1][0], atol=1e-4, rtol=1e-4)
    tuned = get_peft_model(copy.deepcopy(tiny.model()), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModel, match="puts learned vectors before every prompt"):
        ss.load(tuned, tokenizer=tiny.tokenizer())
