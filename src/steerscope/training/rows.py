"""Rows of texts, read through an engine and kept in a folder.

Texts are read in shards. A shard is named by the hash of its texts, the model and the choice of rows, and `rows.jsonl`
holds a checksum of each: an interrupted fit resumes with the first missing shard. The rows of a probe sentence show
whether the folder belongs to this model, whatever its name is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from steerscope.engines.sync import SyncEngine
from steerscope.extraction.reading import captured
from steerscope.extraction.runs import Ledger, Progress, Record, batches, digest, file_digest, no_progress
from steerscope.files import atomic_path, reading
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import BadFile, InvalidRequest, Problem
from steerscope.specs.steering import Site

_PROBE = "The quick brown fox jumps over the lazy dog, and then it rains."
_SHARD = 64


class RowChoice(Spec):
    """Which rows of a text are kept: tokens from `skip` on, at most `most` of them, evenly spaced.

    Lenses read single tokens, so they are trained on single tokens. The first few are left out: the first is an
    attention sink, and the next ones cannot know yet what the text is about.
    """

    layers: tuple[int, ...] = Field(min_length=1)
    site: Site = "resid_post"
    skip: int = Field(default=4, ge=1)
    most: int = Field(default=16, ge=1)


@dataclass(frozen=True, slots=True)
class TextRows:
    """Shards on disk, and the numbers of their texts one after the other."""

    shards: tuple[Path, ...]
    order: Tensor

    def at(self, layer: int) -> tuple[Tensor, Tensor]:
        """Load the rows [n, hidden] of a layer and the index of each row's text."""
        rows = []
        counts = []
        for shard in self.shards:
            with reading(shard, "shard of rows"), safe_open(shard, framework="pt") as file:
                rows.append(file.get_tensor(f"layer.{layer}"))
                counts.append(file.get_tensor("counts"))
        return torch.cat(rows), self.order.repeat_interleave(torch.cat(counts))


def read_texts(
    engine: SyncEngine, texts: Sequence[str], folder: Path, choice: RowChoice, progress: Progress = no_progress
) -> TextRows:
    """Read the texts that the folder lacks. Texts of similar length go together: a batch is padded to its longest."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_probe(engine, folder, choice)
    ledger = Ledger(folder / "rows.jsonl", lambda record: _is_intact(folder / record["id"], record))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    paths = []
    n_read = 0
    for shard in batches([texts[i] for i in order], _SHARD):
        path = folder / f"rows-{_key(engine, shard, choice)}.safetensors"
        if path.name not in ledger.records:
            write_tensors(_read(engine, list(shard), choice), path)
            ledger.append([{"id": path.name, "sha256": file_digest(path)}])
        paths.append(path)
        n_read += len(shard)
        progress("reading texts", n_read, len(texts))
    return TextRows(tuple(paths), torch.tensor(order))


def _is_intact(path: Path, record: Record) -> bool:
    return path.is_file() and file_digest(path) == record.get("sha256")


def _key(engine: SyncEngine, texts: Sequence[str], choice: RowChoice) -> str:
    facts = engine.facts
    return digest(facts.name, facts.layers, facts.hidden, facts.vocab, choice.model_dump(mode="json"), list(texts))


def _read(engine: SyncEngine, texts: list[str], choice: RowChoice) -> dict[str, Tensor]:
    wanted = {"layers": list(choice.layers), "sites": choice.site, "tokens": f"positions=[{choice.skip}:]"}
    rows = captured(engine, texts, Capture.parse(wanted))
    problems = [
        Problem("texts", f"{text[:40]!r} has no more than {choice.skip} tokens", "write a longer one, or lower skip")
        for text, row in zip(texts, rows, strict=True)
        if not row.n
    ]
    if problems:
        raise InvalidRequest(problems)
    places = [_spread(row.n, choice.most) for row in rows]
    tensors = {"counts": torch.tensor([len(each) for each in places])}
    for layer in choice.layers:
        chosen = [row[layer, choice.site][each].cpu() for row, each in zip(rows, places, strict=True)]
        tensors[f"layer.{layer}"] = torch.cat(chosen)
    return tensors


def _spread(n: int, most: int) -> Tensor:
    """Return at most `most` of n places, the last one among them."""
    return torch.linspace(0, n - 1, most).round().long() if n > most > 1 else torch.arange(max(0, n - most), n)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    with atomic_path(path) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})


def _check_probe(engine: SyncEngine, folder: Path, choice: RowChoice) -> None:
    """Refuse the folder of another checkpoint with the same name; batches and machines differ by rounding only."""
    found = _read(engine, [_PROBE], choice)
    path = folder / f"probe-{_key(engine, [_PROBE], choice)}.safetensors"
    if not path.is_file():
        write_tensors(found, path)
        return
    with reading(path, "probe of a row folder"):
        known = load_file(path)
    for name, tensor in found.items():
        near = name in known and known[name].shape == tensor.shape
        size = float(tensor.float().abs().mean()) + 1e-6
        if not near or not torch.allclose(known[name].float(), tensor.float(), rtol=0.05, atol=0.05 * size):
            what = f"{folder} holds rows of another model that is called {engine.facts.name}, too"
            raise BadFile(f"{what}: remove the folder or choose another")
