"""A capture job of a corpus, as data in the store's description, and the shards that are missing.

All settings that change the result are fixed when the job begins and compared when it resumes. Machines and their
number are not part of it.
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
from steerscope.files import lock_folder
from steerscope.models import check_adapter, resolve
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, ModelNotFound, Problem
from steerscope.specs.steering import Site, parse_layers

_SHARD_BYTES = 256 << 20
_MOST_DOCUMENTS = 1024  # lost at most when a worker is killed
_SAMPLE_DOCUMENTS = 64  # from which the size of shards is estimated


class CorpusJob(Spec):
    """All settings that can change a bit of the rows."""

    model: str
    engine: Literal["hf", "vllm"] = "hf"
    dtype: str | None = None  # of the weights
    batch: int = Field(default=32, ge=1)  # documents per forward
    max_tokens: int | None = Field(default=None, ge=1)  # longer documents are cut
    shard_documents: int | None = Field(default=None, ge=1)  # lines of one shard; None: about 256 MiB of rows
    files: tuple[SourceFile, ...] = ()


def job_of(info: StoreInfo) -> CorpusJob:
    return CorpusJob.parse(info.job)


def begin(
    folder: Path, data: Sequence[Path], job: CorpusJob, capture: Capture, dtype: RowType, resume: bool
) -> StoreInfo:
    """Create the store's description, or check that an existing one is the same."""
    check_paths(data)
    known = read_info(folder) if (folder / "store.json").is_file() else None
    if known is not None and not resume:
        what = f"{folder} already holds a capture"
        raise InvalidRequest([Problem("out", what, "add --resume to continue it, or choose another folder")])
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
    create(folder, info)  # also when it exists: the files may have moved
    if missing(folder, info):  # a manifest describes a complete store
        (folder / "manifest.json").unlink(missing_ok=True)
    return info


def _foreign(path: Path) -> bool:
    """Return whether a path is not a leftover of a run that was killed before it described its store."""
    return not path.name.startswith(".") and (path.name not in PARTS or not path.is_dir() or any(path.iterdir()))


def missing(folder: Path, info: StoreInfo) -> list[int]:
    done = set(present(folder))
    return [shard for shard in range(info.shards) if shard not in done]


@contextmanager
def alone(folder: Path) -> Iterator[int]:
    """Lock a folder for one run and remove partial files of a killed one.

    The lock is held until every process with the yielded descriptor has ended."""
    with lock_folder(folder) as descriptor:
        _clean(folder)
        yield descriptor
        _clean(folder)


def _clean(folder: Path) -> None:
    if (folder / "store.json").is_file():  # elsewhere the files may belong to another program
        for part in ("", *PARTS):
            for leftover in (folder / part).glob(".steerscope-*"):
                leftover.unlink(missing_ok=True)


def _sizes(model: str) -> tuple[int, int]:
    """Return the number of layers and the hidden size, from the model's configuration."""
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


def _guess(data: Sequence[Path], job: CorpusJob, rows: int | None, row_bytes: int) -> int:
    """Estimate the lines of a shard from the first documents, at four characters per token."""
    first = islice((one for path in data for one in preview(path, _SAMPLE_DOCUMENTS)), _SAMPLE_DOCUMENTS)
    tokens = [min(_length(one), job.max_tokens or 1 << 30) for one in first if one.content is not None]
    return shard_size((rows or max(1, sum(tokens) // max(1, len(tokens)))) * row_bytes)


def shard_size(document_bytes: int) -> int:
    """Return the documents of a shard, given the bytes of rows per document."""
    return max(1, min(_MOST_DOCUMENTS, _SHARD_BYTES // document_bytes))


def _length(document: Document) -> int:
    content = document.content
    if isinstance(content, list) and isinstance(content[0], int):
        return len(content) + 1
    return len(json.dumps(content, default=str)) // 4 + 1  # default: Parquet also has dates and bytes


def _compare(known: StoreInfo, now: StoreInfo) -> None:
    """Refuse to resume a job with other settings. Only the paths of the corpus may differ."""
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
