"""Run the peer scripts, each in its own virtual environment and process, and hold them to the bare-hooks reference.

An environment is made once: torch first, then the rest under a constraint on it, so that no peer pulls another build.
A peer that fails to install, crashes or runs too long becomes an `error` in the result; other tokens or rows than the
reference's become a `wrong` that says so.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REFERENCE = "transformers_hooks"
OURS = "steerscope"  # runs in this environment
CHECKSUM_TOLERANCE = 1e-3  # other kernels move the sum by about 1e-8; missing rows are counted, not summed


def run_peers(
    model: Path,
    prompts: Path,
    max_new_tokens: int,
    repeats: int,
    venv_root: Path,
    peers: Sequence[str] | None = None,
    *,
    cells: Sequence[str] = ("plain", "capture", "steer"),
    layer: int = 8,
    scale: float = 1.0,
    rounds: int = 1,
    timeout_s: float = 900.0,
    progress: Callable[[str], None] = lambda _line: None,
) -> dict[str, dict[str, Any]]:
    """Results by peer, the reference always among them. With several rounds the peers take turns."""
    requirements: dict[str, list[str]] = json.loads((HERE / "requirements.json").read_text())
    requirements[OURS] = []
    names = list(dict.fromkeys([REFERENCE, *(requirements if peers is None else peers)]))
    if unknown := sorted(set(names) - set(requirements)):
        raise ValueError(f"unknown peers {unknown}: the known ones are {sorted(requirements)}")
    workload = [f"--model={model.absolute()}", f"--prompts={prompts.absolute()}", f"--cells={','.join(cells)}"]
    workload += [f"--max-new-tokens={max_new_tokens}", f"--repeats={repeats}", f"--layer={layer}", f"--scale={scale}"]
    results: dict[str, dict[str, Any]] = {}
    for turn in range(rounds):
        for name in [name for name in names if "error" not in results.get(name, {})]:
            progress(f"{name}: round {turn + 1} of {rounds}")
            try:
                made = requirements[name]
                python = ensure_venv(venv_root.absolute() / name, made, progress) if made else Path(sys.executable)
                variants = ["--variants"] if turn == 0 else []  # slower ways of the same: once is enough
                found = run_script(python, name, workload + variants, timeout_s)
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                found = {"peer": name, "error": error_line(error)}
            results[name] = merge(results[name], found) if name in results else found
    for found in results.values():
        compare(found, results[REFERENCE])
    return results


def ensure_venv(folder: Path, requirements: Sequence[str], progress: Callable[[str], None]) -> Path:
    """The environment's Python. It is made when missing or when its requirements, torch first, changed."""
    python, done, wanted = folder / "bin" / "python", folder / "requirements.done", "\n".join(requirements)
    if done.exists() and done.read_text() == wanted:
        return python
    progress(f"{folder.name}: installing {', '.join(requirements)}")
    call([sys.executable, "-m", "venv", "--clear", str(folder)])
    torch, constraint = requirements[0], folder / "constraint.txt"
    constraint.write_text(torch + "\n")
    for wheels in ([torch], requirements):
        call([str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraint), *wheels])
    done.write_text(wanted)
    return python


def run_script(python: Path, name: str, workload: Sequence[str], timeout_s: float) -> dict[str, Any]:
    script = HERE / (f"{name}.py" if name == REFERENCE else f"{name}_peer.py")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        call([str(python), str(script), *workload, f"--out={output}"], timeout_s)
        return json.loads(output.read_text())


def call(command: list[str], timeout_s: float = 1800.0) -> None:
    env = os.environ | {"HF_HUB_OFFLINE": "1"}  # the model is a local folder
    subprocess.run(command, check=True, timeout=timeout_s, capture_output=True, text=True, env=env)


def error_line(error: subprocess.TimeoutExpired | subprocess.CalledProcessError) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"ran longer than {error.timeout:.0f} s"
    lines = [line.strip() for line in error.stderr.splitlines() if line.strip()] or [f"exit {error.returncode}"]
    return ([line for line in lines if "error" in line.lower()] or lines)[-1][:400]


def merge(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """The later round, with the earlier round's times in front; an error of either round stays."""
    if "error" in later:
        return later
    for name, before in earlier["cells"].items():
        cell = later["cells"].get(name)
        if cell is None or "error" in before:
            later["cells"][name] = before
        elif "seconds" in before and "seconds" in cell:
            later["cells"][name] = before | cell | {key: before[key] + cell[key] for key in ("seconds", "cpu_seconds")}
    return later


def compare(found: dict[str, Any], reference: dict[str, Any]) -> None:
    """Write into each cell what differs from the reference's cell of that workload."""
    for name, cell in found.get("cells", {}).items():
        truth = reference.get("cells", {}).get(name.partition(":")[0], {})
        if "error" in cell or "seconds" not in truth:
            continue
        wrong = [cell["wrong"]] if cell.get("wrong") else []
        if cell["tokens_crc"] != truth["tokens_crc"]:
            wrong.append("the generated tokens differ from the reference's")
        if abs(cell["checksum"] - truth["checksum"]) > CHECKSUM_TOLERANCE * truth["checksum"]:
            wrong.append(f"the rows sum to {cell['checksum']:.6g}, the reference's to {truth['checksum']:.6g}")
        if wrong:
            cell["wrong"] = "; ".join(wrong)
