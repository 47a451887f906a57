"""Damaged input for everything that reads what others wrote: each reader gives a value or one of our own errors.

    python -m bench.stress.fuzz --seconds 20 --out bench/results/fuzz.json      so long for each reader

Inputs are good ones with bytes or values changed, cut, doubled and put elsewhere. Everything that is neither a value
nor a `SteerscopeError` is a finding, and so is an input that takes longer than `_PATIENCE_S`.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import commit
from bench.stress import readers
from steerscope.bench.one import versions, write
from steerscope.specs.errors import SteerscopeError

_PATIENCE_S = 10.0
_ODD: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"),
    "", " ", "all", "none", "\x00", "é\U0001f600", "\ud800", "x" * 5000, "[" * 200, "1e999", [], {}, [[]], [None],
    {"": None},
)  # fmt: skip


def damaged(rng: random.Random, good: bytes) -> bytes:
    """A good file with a few changes."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 3:
                del data[at : at + rng.choice((1, 4, 8, 100))]
            case 4:
                data[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, (2**63 - 1).to_bytes(8, "little")))
            case _:
                start = rng.randrange(len(data) + 1)
                data[at:at] = data[start : start + rng.choice((1, 16, 200))]
    return bytes(data)


def changed(rng: random.Random, good: Any) -> Any:
    """Plain data with a few values exchanged for odd ones, left out, doubled, or under another name."""
    value = json.loads(json.dumps(good))
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = _change(rng, value)
    return value


def _change(rng: random.Random, value: Any) -> Any:
    if rng.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return rng.choice(_ODD)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        replaced = [_change(rng, value[at])] * rng.choice((0, 1, 1, 1, 3))
        return [*value[:at], *replaced, *value[at + 1 :]]
    name = rng.choice(list(value))
    rest = {key: item for key, item in value.items() if key != name}
    wanted = name if rng.random() < 0.9 else rng.choice(("", "x", name.upper(), "__class__", *value))
    return rest if rng.random() < 0.1 else {**rest, wanted: _change(rng, value[name])}


@dataclass
class Found:
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    findings: list[dict[str, str]] = field(default_factory=list)

    def one(self, read: Callable[[Any], object], given: Any) -> None:
        """Read it, and note what became of it."""
        self.inputs += 1
        began = time.monotonic()
        try:
            read(given)
            self.accepted += 1
        except SteerscopeError:
            self.refused += 1
        except Exception as error:
            self.findings.append({"error": f"{type(error).__name__}: {error}"[:300], "input": repr(given)[:500]})
        spent = time.monotonic() - began
        self.slowest_s = max(self.slowest_s, spent)
        if spent > _PATIENCE_S:
            self.findings.append({"error": f"took {spent:.0f} s", "input": repr(given)[:500]})


@contextmanager
def targets() -> Iterator[dict[str, tuple[Callable[[Any], object], Callable[[random.Random], Any]]]]:
    """For each reader: itself, and what draws an input for it."""
    with tempfile.TemporaryDirectory() as scratch:
        files = readers.good_files(Path(scratch) / "good")
        found: dict[str, tuple[Callable[[Any], object], Callable[[random.Random], Any]]] = {}
        for name, (read, good) in readers.PLAIN.items():
            found[name] = (read, lambda rng, good=good: changed(rng, rng.choice(good)))
        for name, (read, texts) in readers.TEXTS.items():
            found[name] = (read, lambda rng, texts=texts: damaged(rng, rng.choice(texts).encode()))
        for name, (read, folder) in files.items():
            here = Path(scratch) / "damaged"
            found[name] = (read, lambda rng, folder=folder, here=here: _damaged_copy(rng, folder, here))
        yield found


def _damaged_copy(rng: random.Random, folder: Path, here: Path) -> Path:
    """The folder with one file of it damaged."""
    import shutil

    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(folder, here)
    victim = rng.choice(sorted(path for path in here.rglob("*") if path.is_file()))
    if victim.suffix == ".json" and rng.random() < 0.7:
        victim.write_text(json.dumps(changed(rng, json.loads(victim.read_text(encoding="utf-8")))))
    else:
        victim.write_bytes(damaged(rng, victim.read_bytes()))
    return here


def fuzz(seconds: float, seed: int, only: str = "", inputs: int = sys.maxsize) -> dict[str, Found]:
    results: dict[str, Found] = {}
    with targets() as known:
        for name, (read, draw) in known.items():
            if only not in name:
                continue
            rng, found, until = random.Random(f"{seed}.{name}"), Found(), time.monotonic() + seconds
            while found.inputs < inputs and time.monotonic() < until:
                found.one(read, draw(rng))
            results[name] = found
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of a reader's name")
    args = parser.parse_args()
    results = fuzz(args.seconds, args.seed, args.only)
    write(
        args.out,
        {
            "commit": commit(),
            "versions": versions(),
            "seed": args.seed,
            "readers": {name: {**vars(found), "findings": found.findings[:20]} for name, found in results.items()},
        },
    )
    for name, found in results.items():
        print(name, found.inputs, "inputs,", found.refused, "refused,", len(found.findings), "findings")  # noqa: T201
        for finding in found.findings[:5]:
            print("   ", finding["error"], "|", finding["input"][:200])  # noqa: T201
    raise SystemExit(any(found.findings for found in results.values()))


if __name__ == "__main__":
    main()
