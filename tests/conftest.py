"""One thread per process: the models are tiny, and idle OpenMP threads on shared cores cost more than they give."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import logging
import re
from collections import Counter

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
logging.getLogger("transformers").setLevel(logging.ERROR)

# The first pattern that a reason for skipping matches says what would run the tests.
ENABLED_BY = {
    r"runs in the process|is that process": "make test-vllm, where tests/engines/vllm/test_kernel.py runs them",
    r"transformers backend|no bf16|has the kernel|tries no step again|no text of its own": "does not apply here",
    r"peft is installed": "an environment without peft",
    r"peft|msgspec|httpx": "pip install the package",
    r"[Tt]riton": "make test-vllm",
    r"vLLM|vllm": "make test-vllm",
    r"GPU": "a machine with an NVIDIA GPU and the CUDA build of torch",
    r"Chromium|playwright": "the package chromium, or CHROMIUM=path/to/chrome",
    r"could not import|pip install|is not installed": "make setup, or pip install the package",
    r"Linux": "Linux",
}


# Fixtures that other tests of the file use too and that take seconds: an engine, a server, a converted model, a report.
SHARED = {"demo", "engine", "live", "llm", "real", "server", "smollm", "start", "stock"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, run the tests of a file that share an engine or a server in one process."""
    for item in items:
        if SHARED.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was skipped, and what would run it: one line per reason."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if left_out := len(terminalreporter.stats.get("deselected", [])):
        terminalreporter.line(f"not selected: {left_out} (by -m or -k; make test-all selects every test)")
    for reason, count in sorted(reasons.items()):
        remedy = next((text for pattern, text in ENABLED_BY.items() if re.search(pattern, reason)), "see the reason")
        terminalreporter.line(f"skipped: {count} ({reason}) – {remedy}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped, without pytest's prefix."""
    _, _, text = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
    return text.removeprefix("Skipped: ")
