"""A capture of a corpus: what it is, as data in the store's own description, and the shards that are left to do.

Everything that decides what comes out is fixed when the job begins and compared when it is taken up again. Where and
on how many machines it runs is not part of it.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from steerscope.capture.shards import RowType, StoreInfo
from steerscope.capture.store import PARTS, create, present, read_info
from steerscope.corpus.source import Corpus, Document, SourceFile, check_paths, preview, scan
from steerscope.files import lock
from steerscope.models import check_adapter, resolve
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import BadFile, InvalidRequest, ModelNotFound, Problem
from steerscope.specs.steering import Site, parse_layers

_SHARD_BYTES = 256 << 20
_MOST_DOCUMENTS = 1024  # what a killed worker does again at most
_LOOKED_AT = 64  # documents from which a shard's size is guessed


class Job(Spec):
    """How rows are made: everything that can change one bit of them."""

    model: str
    engine: Literal["hf", "vllm"] = "hf"
    dtype: str | None = None  # of the weights
    batch: int = Field(default=32, ge=1)  # documents that are read together
    max_tokens: int | None = Field(default=None, ge=1)  # longer documents are cut
    shard_documents: int | None = Field(default=None, ge=1)  # lines of one shard; None: about 256 MiB of rows
    files: tuple[SourceFile, ...] = ()


def job_of(info: StoreInfo) -> Job:
    return Job.parse(info.job)


def corpus_of(job: Job) -> Corpus:
    assert job.shard_documents is not None
    return Corpus(job.files, job.shard_documents)


def begin(folder: Path, data: Sequence[Path], job: Job, capture: Capture, dtype: RowType, resume: bool) -> StoreInfo:
    """Describe the store, or see that the one that is there is the same."""
    check_paths(data)
    known = read_info(folder) if (folder / "store.json").is_file() else None
    if known is not None and not resume:
        what = f"{folder} already holds a capture"
        raise InvalidRequest([Problem("out", what, "add --resume to go on with it, or choose another folder")])
    if known is None and any(map(_foreign, folder.glob("*"))):
        raise InvalidRequest([Problem("out", f"{folder} is not empty", "choose another folder")])
    layers, hidden = _sizes(job.model)
    keys = _keys(capture, layers)
    size = job.shard_documents or (job_of(known).shard_documents if known else None)
    row_bytes = len(keys) * hidden * (4 if dtype == "float32" else 2)
    size = size or _guess(data, job, 1 if capture.reduce else None, row_bytes)
    files = tuple(scan(path, size) for path in data)
    job = job.model_copy(update={"shard_documents": size, "files": files})
    shards = Corpus(files, size).shards
    described = {"job": job.model_dump(mode="json"), "keys": keys, "capture": capture, "shards": shards}
    info = StoreInfo.parse({"model": job.model, "hidden": hidden, "dtype": dtype, **described})
    if known is not None:
        _compare(known, info)
    create(folder, info)  # again: the files may have moved
    if missing(folder, info):  # a manifest is about a store that is whole
        (folder / "manifest.json").unlink(missing_ok=True)
    return info


def _foreign(path: Path) -> bool:
    """Not what a run leaves that was killed before it described its store."""
    return not path.name.startswith(".") and (path.name not in PARTS or not path.is_dir() or any(path.iterdir()))


def missing(folder: Path, info: StoreInfo) -> list[int]:
    done = set(present(folder))
    return [shard for shard in range(info.shards) if shard not in done]


@contextmanager
def alone(folder: Path) -> Iterator[int]:
    """One run at a time in a folder; what a killed one left half-written is removed.

    The lock is held until every process that has the yielded descriptor has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as held:
        try:
            lock(held.fileno(), wait=False)
        except BlockingIOError:
            raise BadFile(f"another run is writing to {folder}: wait for it, or stop it") from None
        except OSError as error:
            raise BadFile(
                f"cannot lock {folder}/.lock: {error.strerror}: choose a folder that can be locked"
            ) from error
        _clean(folder)
        yield held.fileno()
        _clean(folder)


def _clean(folder: Path) -> None:
    if (folder / "store.json").is_file():  # in another folder they may be somebody else's
        for part in ("", *PARTS):
            for leftover in (folder / part).glob(".steerscope-*"):
                leftover.unlink(missing_ok=True)


def _sizes(model: str) -> tuple[int, int]:
    """Layers and hidden size, from the model's configuration alone."""
    from transformers import AutoConfig

    found = resolve(model)
    check_adapter(found)
    try:
        config = AutoConfig.from_pretrained(found).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"cannot read the configuration of {model}: {str(error).splitlines()[0]}") from error
    return config.num_hidden_layers, config.hidden_size


def _keys(capture: Capture, layers: int) -> list[tuple[int, Site]]:
    parsed = parse_layers(capture.layers)
    wanted = tuple(range(layers)) if parsed == "all" else parsed
    beyond = [layer for layer in wanted if layer >= layers]
    if beyond:
        what = f"layer {', '.join(map(str, beyond))} does not exist"
        raise InvalidRequest([Problem("layers", what, f"the model has layers 0–{layers - 1}")])
    return [(layer, site) for layer in wanted for site in capture.sites]  # type: ignore[misc]


def _guess(data: Sequence[Path], job: Job, rows: int | None, row_bytes: int) -> int:
    """Lines of a shard of the usual size, from the first documents: four signs are about one token."""
    first = islice((one for path in data for one in preview(path, _LOOKED_AT)), _LOOKED_AT)
    tokens = [min(_length(one), job.max_tokens or 1 << 30) for one in first if one.content is not None]
    return shard_size((rows or max(1, sum(tokens) // max(1, len(tokens)))) * row_bytes)


def shard_size(document_bytes: int) -> int:
    """Documents of a shard, when each has so many bytes of rows."""
    return max(1, min(_MOST_DOCUMENTS, _SHARD_BYTES // document_bytes))


def _length(document: Document) -> int:
    content = document.content
    if isinstance(content, list) and isinstance(content[0], int):
        return len(content) + 1
    return len(json.dumps(content, default=str)) // 4 + 1  # Parquet has dates and bytes, too


def _compare(known: StoreInfo, now: StoreInfo) -> None:
    """Every difference that would make one store out of two; a corpus may have moved."""
    problems = [
        Problem(name, f"is {mine}, was {theirs}", "give it as before, or choose another folder")
        for (name, theirs), (_, mine) in zip(_facts(known), _facts(now), strict=True)
        if theirs != mine
    ]
    if not problems and (known.hidden, known.keys) != (now.hidden, now.keys):
        what = f"has {len(now.keys)} keys of {now.hidden} numbers, had {len(known.keys)} of {known.hidden}"
        problems = [Problem("model", what, "give the same one, or choose another folder")]
    if problems:
        raise InvalidRequest(problems)


def _facts(info: StoreInfo) -> list[tuple[str, Any]]:
    job = info.job | {"files": [file.digest for file in job_of(info).files]}
    asked = {f"capture.{name}": value for name, value in info.capture.model_dump(mode="json").items()}
    return list({**job, **asked, "rows": info.dtype}.items())
