"""What a result was measured on."""

import os
import platform
import subprocess
from importlib.metadata import version

import torch


def machine() -> dict[str, object]:
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "steerscope")},
    }


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # nosec B607 # the git that the user runs
    return found.stdout.strip() or "unknown"
