"""One engine and the shards it reads.

Documents of a shard run in groups that depend on the shard alone, one group at a time. So a shard that is read again,
by any worker, has the same bits on the same kind of machine. A group holds texts of similar length from a window of
documents whose rows fit in memory; rows are written in the order of the corpus. A document that cannot be read is
recorded with the reason.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from steerscope.capture.rows import Rows
from steerscope.capture.shards import Commit, DocumentRows, StoreInfo, stacked, write_shards
from steerscope.capture.store import read_info
from steerscope.corpus.job import job_of
from steerscope.corpus.source import Corpus, Document
from steerscope.engines.load import LoadOptions, load
from steerscope.engines.plan import Prompt
from steerscope.engines.results import Generation, TokenPrompt
from steerscope.engines.sync import SyncEngine
from steerscope.files import atomic_path, reading
from steerscope.specs.capture import Capture
from steerscope.specs.errors import BadFile, CapacityExceeded, InvalidRequest, RequestFailed
from steerscope.specs.sampling import Sampling

_READ_ONLY = Sampling(max_tokens=1)
_WINDOW_BYTES = 512 << 20
_ELSE = "give it as before, or choose another folder"
_PROBE = "The quick brown fox jumps over the lazy dog, and then it rains."


def open_engine(info: StoreInfo, device: str | None = None) -> SyncEngine:
    """Load the engine of a job. vLLM taps only the captured layers and sites."""
    job = job_of(info)
    options: LoadOptions = {"engine": job.engine, "dtype": job.dtype, "device": device, "max_batch": job.batch}
    if job.engine == "vllm":
        taps = {"layers": sorted({layer for layer, _ in info.keys}), "sites": info.capture.sites, "steer": False}
        options["taps"] = taps
    return load(job.model, **options)


class ShardReader:
    def __init__(self, engine: SyncEngine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.info = read_info(folder)
        self.job = job_of(self.info)
        assert self.job.shard_documents is not None
        self.corpus = Corpus(self.job.files, self.job.shard_documents)
        check_probe(engine, folder, self.info)

    def read(self, shards: Iterable[int]) -> Iterator[Commit]:
        """Read and write shards, and yield the commit of each when it is on disk."""
        return write_shards(self.folder, self.info, ((shard, self._read(shard)) for shard in shards))

    def _read(self, shard: int) -> Iterator[list[DocumentRows]]:
        for window in self._windows(self.corpus.documents(shard)):
            yield self._read_window(window)

    def _windows(self, documents: Iterator[Document]) -> Iterator[list[Document]]:
        """Yield runs of documents whose rows fit in memory together, with their prompts as content."""
        window: list[Document] = []
        held = 0
        for document in map(self._tokenized, documents):
            size = self._row_bytes(document)
            if window and held + size > _WINDOW_BYTES:
                yield window
                window = []
                held = 0
            window.append(document)
            held += size
        yield window

    def _row_bytes(self, document: Document) -> int:
        """Return the bytes of a document's rows in an engine, which may hold them in float32. Bad ones have none."""
        if document.content is None:
            return 0
        rows = 1 if self.info.capture.reduce else len(document.content.token_ids)
        return rows * len(self.info.keys) * self.info.hidden * 4

    def _tokenized(self, document: Document) -> Document:
        """Return a document with its prompt as content, cut where it is too long."""
        if document.content is None:
            return document
        try:
            prompt = self._tokens(document.content)
        except Exception as error:  # tokenizers and templates raise any type; it concerns this document alone
            named = "" if isinstance(error, InvalidRequest) else f"{type(error).__name__}: "
            return document.failed(f"{named}{error}")
        whole = len(prompt.token_ids)
        kept = min(whole, self.job.max_tokens or whole)
        spans = prompt.messages and tuple(s for s in prompt.messages if (s.whole or s.content)[1] <= kept)
        prompt = replace(prompt, token_ids=prompt.token_ids[:kept], messages=spans)
        return replace(document, entry=replace(document.entry, tokens=kept, cut=whole - kept), content=prompt)

    def _tokens(self, content: str | list[Any]) -> Prompt:
        if isinstance(content, str):
            return self.engine.aio.tokenize(content)
        if isinstance(content[0], dict):
            ends = isinstance(content[-1], dict) and content[-1].get("role") == "assistant"
            return self.engine.aio.render(content, continue_final_message=ends)
        return self.engine.aio.tokenize(TokenPrompt(content))

    def _read_window(self, window: Sequence[Document]) -> list[DocumentRows]:
        good = [document for document in window if document.content is not None]
        good.sort(key=lambda document: len(document.content.token_ids))
        found: dict[int, Rows | str] = {}
        for start in range(0, len(good), self.job.batch):
            group = good[start : start + self.job.batch]
            outcomes = self._read_group([document.content for document in group])
            found |= {document.entry.document: got for document, got in zip(group, outcomes, strict=True)}
        pieces = []
        for document in window:
            got = found.get(document.entry.document)
            if isinstance(got, Rows):
                pieces.append(self._piece(document, got))
            else:
                pieces.append(DocumentRows((document.failed(got) if got else document).entry))
        return pieces

    def _piece(self, document: Document, rows: Rows) -> DocumentRows:
        kept = {key: tensor.to("cpu", self.info.torch_dtype) for key, tensor in rows.tensors.items()}
        tensor = stacked(kept, self.info.keys)
        if self.info.capture.reduce is None:
            return DocumentRows(document.entry, tensor, rows.labels)
        return DocumentRows(document.entry, tensor, rows.labels.take(np.array([rows.n - 1])), rows.n)

    def _read_group(self, prompts: list[Prompt]) -> list[Rows | str]:
        """Return the rows of each prompt, or the reason why it has none."""
        try:
            return [done if isinstance(done, str) else _rows(done) for done in self._generate(prompts)]
        except InvalidRequest as error:  # the error names the refused prompts; the others are read without them
            found = (re.match(r"prompts\[(\d+)\]\.?(.*)", str(problem), re.S) for problem in error.problems)
            refused = {int(match[1]): match[2] for match in found if match}
            if not refused:
                raise
        kept = [prompt for i, prompt in enumerate(prompts) if i not in refused]
        read = iter(self._read_group(kept) if kept else ())
        return [refused[i] if i in refused else next(read) for i in range(len(prompts))]

    def _generate(self, prompts: list[Prompt]) -> Sequence[Generation | str]:
        try:
            return self.engine.generate(prompts, _READ_ONLY, capture=self.info.capture)
        except RequestFailed as error:
            if self.engine.aio.closed or (len(prompts) > 1 and not any(error.completed)):
                raise  # no document's fault
            probe(self.engine, self.info)  # raises when the engine fails, and not a document
            return [done or str(error) for done in error.completed] if len(prompts) > 1 else [str(error)]
        except CapacityExceeded as error:
            if len(prompts) > 1:  # too large together, so each is tried alone
                return [one for prompt in prompts for one in self._generate([prompt])]
            probe(self.engine, self.info)
            return [str(error)]


def _rows(generation: Generation) -> Rows:
    rows = generation.rows
    if generation.capture is not None:
        generation.capture.close()  # releases the budget; the rows stay valid
    return rows


def probe(engine: SyncEngine, info: StoreInfo) -> tuple[Tensor, dict[str, str]]:
    """Return mean rows [keys, hidden] of a fixed sentence, and other facts that change the rows of a document.

    The first token is left out: its rows are much larger than all others and similar in many models."""
    asked = {"layers": [layer for layer, _ in info.keys], "sites": info.capture.sites, "tokens": "!positions=[0]"}
    rows = _rows(engine.generate(_PROBE, _READ_ONLY, capture=Capture.parse(asked)))
    found = stacked(dict(rows.tensors), info.keys)
    template = json.dumps(getattr(engine.aio.tokenizer, "chat_template", None), default=str).encode()
    facts = {"type": str(found.dtype).removeprefix("torch."), "chat template": xxhash.xxh3_128_hexdigest(template)}
    return found.float().mean(0).cpu(), facts


def check_probe(engine: SyncEngine, folder: Path, info: StoreInfo) -> None:
    """Compare the probe's rows with those in the store: another checkpoint may have the same name."""
    (found, facts), path = probe(engine, info), folder / "probe.safetensors"
    if not path.is_file():
        with atomic_path(path) as temporary:
            temporary.write_bytes(save({"rows": found.contiguous()}, facts))
        return
    with reading(path, "probe of a store"), safe_open(path, framework="pt") as file:
        known = file.get_tensor("rows")
        before = file.metadata() or {}
    for name, value in facts.items():
        if before.get(name) != value:
            raise BadFile(f"{folder} holds rows made with {name} {before.get(name)}, this engine has {value}: {_ELSE}")
    near = known.shape == found.shape and ((known - found).norm(dim=-1) <= 0.05 * found.norm(dim=-1)).all()
    if not near:
        raise BadFile(f"{folder} holds rows of another model with the name {info.model}: choose another folder")
