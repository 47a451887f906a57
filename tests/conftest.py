"""One thread per process: the models are tiny, and idle OpenMP threads on shared cores cost more than they give.

Files that train, serve or run commands are marked slow here, as a whole: what is left, `make test-fast`, is for those
who wait for it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import logging
from pathlib import Path

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
logging.getLogger("transformers").setLevel(logging.ERROR)

HERE = Path(__file__).parent
SLOW = {
    *("analysis/attention", "analysis/device", "analysis/mlp", "analysis/statistics", "analysis/susceptibility"),
    *("bench/stress", "cli/chat", "cli/doctor", "cli/generate", "cli/lens_watch", "cli/vectors_cli", "corpus/run"),
    *("engines/lifecycle", "engines/parity", "evals/classifier", "evals/judge", "extraction/extract"),
    *("extraction/personas/judges", "extraction/personas/run", "extraction/quality", "lenses/fit", "serving/attacks"),
    *("serving/client", "serving/faults", "serving/guard", "serving/jobs", "serving/kept_vectors", "training/lenses"),
    *("training/sweep", "training/vectors"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(HERE)
        if (path.parent / path.stem.removeprefix("test_")).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)
