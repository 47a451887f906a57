"""Importing is quick and light: heavy packages come when they are used."""

import subprocess
import sys

import pytest

import steerscope

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "vllm", "plotly", "sklearn", "gguf")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["steerscope", "steerscope.specs"])
def test_importing_brings_in_nothing_heavy(module: str):
    loaded = run(f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))")
    assert loaded == ""


def test_building_and_checking_specs_needs_no_torch():
    code = (
        "import sys, steerscope as ss; s = ss.Steering.of(ss.Add(vector=[1.0, 2.0], layers='1-3', tokens='prompt')); "
        "assert ss.Steering.from_json(s.to_json()) == s; ss.Capture(); ss.Sampling(); print('torch' in sys.modules)"
    )
    assert run(code) == "False"


def test_import_steerscope_takes_less_than_three_tenths_of_a_second():
    code = "import time; t = time.perf_counter(); import steerscope; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.3


def test_every_public_name_can_be_imported_and_a_wrong_one_is_named():
    assert all(getattr(steerscope, name) is not None for name in steerscope.__all__)
    with pytest.raises(AttributeError, match="module 'steerscope' has no attribute 'Steer'"):
        steerscope.Steer  # type: ignore[attr-defined]  # noqa: B018
