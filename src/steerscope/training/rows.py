"""Texts to rows through an engine, kept in a folder so that what was read once is not read again.

Texts are read in shards. A shard's file is named by the hash of its texts, the model and what is read of them, and
`manifest.json` holds a checksum of each: a fit that was interrupted goes on with the first shard that is not there,
and one with other texts or layers reads what is new to it. The rows of a probe sentence tell whether the folder
belongs to this model, whatever its name is.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from steerscope.capture.rows import Rows
from steerscope.engines.sync import SyncEngine
from steerscope.files import atomic_path, reading
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Site

_READ_ONLY = Sampling(max_tokens=1)
_PROBE = "The quick brown fox jumps over the lazy dog, and then it rains."
_SHARD = 64
Progress = Callable[[str, int, int], None]  # what, how many are done, of how many


class RowChoice(Spec):
    """Which rows of a text are kept: tokens from `skip` on, at most `most` of them, evenly spaced.

    Lenses will read single tokens, so they are trained on single tokens. The first few are left out: the first is an
    attention sink, and the next cannot know yet what the text will be about.
    """

    layers: tuple[int, ...] = Field(min_length=1)
    site: Site = "resid_post"
    skip: int = Field(default=4, ge=1)
    most: int = Field(default=16, ge=1)


@dataclass(frozen=True, slots=True)
class TextRows:
    """Shards on disk and the texts they hold, one after the other; a layer is loaded when it is asked for."""

    shards: tuple[Path, ...]
    order: Tensor

    def at(self, layer: int) -> tuple[Tensor, Tensor]:
        """Rows [n, hidden] of a layer and the index of each row's text."""
        rows, text, before = [], [], 0
        for shard in self.shards:
            with reading(shard, "shard of rows"), safe_open(shard, framework="pt") as file:
                rows.append(file.get_tensor(f"layer.{layer}"))
                counts = file.get_tensor("counts")
            text.append(torch.arange(len(counts)).repeat_interleave(counts) + before)
            before += len(counts)
        return torch.cat(rows), self.order[torch.cat(text)]


def read_texts(
    engine: SyncEngine, texts: Sequence[str], folder: Path, choice: RowChoice, progress: Progress | None = None
) -> TextRows:
    """Read what is not in the folder yet. Texts of like length go together: a batch is padded to its longest."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = _Manifest(folder)
    _check_probe(engine, folder, choice)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    shards = [[texts[j] for j in order[i : i + _SHARD]] for i in range(0, len(texts), _SHARD)]
    paths = []
    for i, shard in enumerate(shards):
        key = _key(engine, shard, choice)
        path = folder / f"rows-{key}.safetensors"
        if not manifest.holds(path):
            _write(_read(engine, shard, choice), path)
            manifest.add(path)
        paths.append(path)
        if progress:
            progress("reading texts", min(len(texts), (i + 1) * _SHARD), len(texts))
    return TextRows(tuple(paths), torch.tensor(order))


def _key(engine: SyncEngine, texts: Sequence[str], choice: RowChoice) -> str:
    facts = engine.facts
    parts = [facts.name, facts.layers, facts.hidden, facts.vocab, choice.model_dump(mode="json"), list(texts)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _read(engine: SyncEngine, texts: list[str], choice: RowChoice) -> dict[str, Tensor]:
    tokens = f"positions=[{choice.skip}:]"
    wanted = Capture.parse({"layers": list(choice.layers), "sites": choice.site, "tokens": tokens})
    done = engine.generate(texts, _READ_ONLY, capture=wanted)
    rows = [generation.rows for generation in done]
    problems = [
        Problem("texts", f"{text[:40]!r} has no more than {choice.skip} tokens", "write a longer one, or lower skip")
        for text, row in zip(texts, rows, strict=True)
        if not row.n
    ]
    if problems:
        raise InvalidRequest(problems)
    index = [_spread(row.n, choice.most) for row in rows]
    tensors = {f"layer.{layer}": _gather(rows, index, layer, choice.site) for layer in choice.layers}
    for generation in done:
        if generation.capture:
            generation.capture.close()  # gives the room back at once
    return {**tensors, "counts": torch.tensor([len(each) for each in index])}


def _gather(rows: Sequence[Rows], index: Sequence[Tensor], layer: int, site: Site) -> Tensor:
    return torch.cat([row[layer, site][each].cpu() for row, each in zip(rows, index, strict=True)])


def _spread(n: int, most: int) -> Tensor:
    """At most `most` of n places, the last one among them."""
    return torch.linspace(0, n - 1, most).round().long() if n > most > 1 else torch.arange(max(0, n - most), n)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, {"format": "pt"})


def _check_probe(engine: SyncEngine, folder: Path, choice: RowChoice) -> None:
    """Another checkpoint under the same name has other rows; batches and machines differ by rounding only."""
    found = _read(engine, [_PROBE], choice)
    path = folder / f"probe-{_key(engine, [_PROBE], choice)}.safetensors"
    if not path.is_file():
        return _write(found, path)
    with reading(path, "probe of a row folder"):
        known = load_file(path)
    for name, tensor in found.items():
        near = name in known and known[name].shape == tensor.shape
        if not near or not torch.allclose(known[name].float(), tensor.float(), rtol=0.05, atol=0.05 * _size(tensor)):
            what = f"{folder} holds rows of another model that is called {engine.facts.name}, too"
            raise BadFile(f"{what}: remove the folder or choose another")
    return None


def _size(tensor: Tensor) -> float:
    return float(tensor.float().abs().mean()) + 1e-6


class _Manifest:
    """Which files of the folder are whole."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "manifest.json"
        self._sums: dict[str, str] = {}
        if self._path.is_file():
            with reading(self._path, "manifest of rows"):
                self._sums = dict(json.loads(self._path.read_text(encoding="utf-8"))["sha256"])

    def holds(self, path: Path) -> bool:
        return path.is_file() and self._sums.get(path.name) == _sha256(path)

    def add(self, path: Path) -> None:
        self._sums[path.name] = _sha256(path)
        with atomic_path(self._path) as temporary:
            temporary.write_text(json.dumps({"sha256": self._sums}, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
