"""What reads input from outside, and good input for each of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steerscope.capture.rows import Rows, load_rows
from steerscope.capture.shards import DocumentEntry, DocumentRows, StoreInfo, write_shards
from steerscope.capture.store import ActivationStore, create, finish
from steerscope.client.answers import DONE, EventReader, Gathered, ServerEvent, answer_of, job_event
from steerscope.core.rows import make_labels
from steerscope.lenses import Pack
from steerscope.serving.bodies import ChatBody, CompletionBody
from steerscope.specs import Capture, Sampling, Steering
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import MessageSpan, SelectorError, resolve
from steerscope.specs.watch import Watch
from steerscope.vectors import SteeringVector, save
from steerscope.vectors import load as load_vector
from support.model import make_pack

_VECTOR = [0.5, -1.0, 0.25, 2.0]
_STEER = [
    {"op": "add", "vector": _VECTOR, "scale": 2.0, "layers": "4-8", "tokens": "prompt & !role=system"},
    {"op": "cap", "vector": {"per_layer": {"3": _VECTOR}}, "min": -1, "max": 1, "site": "mlp_out"},
    {"op": "ablate", "vector": "AAAAPwAAgL8AAIA+AAAAQA==", "to": 0.5, "layers": [1, "3-4"]},
    {"op": "add", "vector": "happy"},
]
_CAPTURE = {"layers": "all", "sites": ["resid_post", "mlp_out"], "tokens": "generated", "reduce": "mean"}
_WATCH = {
    "pack": "moods", "top_k": 3, "levels": [0, 1], "tokens": "all",
    "rules": [
        {"when": {"kind": "when", "concept": "anger", "above": 0.8, "for_tokens": 2},
         "then": {"kind": "stop", "name": "a"}},
        {"when": {"kind": "all_of", "of": [{"kind": "when", "concept": "joy", "above": 0.5},
                                           {"kind": "not", "of": {"kind": "when", "concept": "irony", "below": 0.2}}]},
         "then": {"kind": "steer", "name": "b", "steering": [_STEER[0]], "off_for": 2}},
    ],
}  # fmt: skip
_SAMPLING = {
    "max_tokens": 20,
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["\n", "END"],
    "logprobs": 2,
    "n": 2,
}
_BODY = {**_SAMPLING, "prompt": "Hello", "stream": True, "steerscope": {"steer": _STEER, "capture": _CAPTURE}}
_CHAT = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "max_tokens": 20, "stream": False, "steerscope": {"watch": _WATCH, "project": ["happy"]},
}  # fmt: skip
_SELECTORS = ["prompt & !role=system", "positions=[0, 3, 8:12, -1] | generated", "!(message=1+template | last_prompt)"]
_OURS = {
    "tokens": [{"i": 0, "id": 5, "t": "Hi"}],
    "readings": [{"position": 3, "token_index": None, "top": [{"id": "a", "name": "A", "path": ["A"], "score": 0.5}]}],
    "rules": [{"name": "r", "action": "flag", "position": 3, "score": 0.9}],
    "captures": {"id": "cap-1", "rows": 4, "bytes": 64, "layers": [0], "sites": ["resid_post"]},
    "finish": {"reason": "length", "stop_string": None, "rule": None},
}
_CHOICE = {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "length"}
_ANSWER = {"id": "cmpl-1", "model": "m", "choices": [{**_CHOICE, "steerscope": _OURS}],
           "usage": {"prompt_tokens": 3, "completion_tokens": 1}}  # fmt: skip
_CHUNK = {"id": "cmpl-1", "model": "m", "choices": [_CHOICE], "steerscope": _OURS}
_STREAM = (
    f": hello\n\nevent: token\nid: 4\ndata: {json.dumps(_CHUNK)}\n\ndata: {json.dumps(_ANSWER)}\n\ndata: {DONE}\n\n"
)
_SPANS = (MessageSpan(0, "system", (2, 5), (0, 6)), MessageSpan(1, "user", (8, 12), None))


def _select(given: bytes) -> None:
    try:
        resolve(given.decode(errors="replace"), 14, _SPANS, False, 40)
    except SelectorError as error:
        what, _, remedy = str(error).rpartition("; ")
        raise InvalidRequest([Problem("tokens", what, remedy)]) from None


def _events(given: bytes) -> list[ServerEvent]:
    reader = EventReader()
    return [event for line in given.decode(errors="replace").split("\n") if (event := reader.feed(line)) is not None]


def _stream(given: bytes) -> None:
    """As the clients do it, with what they take a stream for."""
    gathered = Gathered()
    for event in _events(given):
        gathered.read(event)
    gathered.answer()


def _job(given: bytes) -> None:
    for event in _events(given):
        job_event(event)


PLAIN: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
    "Steering": (Steering.parse, [_STEER, {"ops": _STEER[:1], "reset": True}]),
    "Capture": (Capture.parse, [_CAPTURE, {"layers": "0,4-6"}]),
    "Watch": (Watch.parse, [_WATCH]),
    "Sampling": (Sampling.parse, [_SAMPLING]),
    "body of a completion": (CompletionBody.parse, [_BODY, {"prompt": [[1, 2], [3]], "max_tokens": 2}]),
    "body of a chat": (ChatBody.parse, [_CHAT]),
    "answer of a server": (answer_of, [_ANSWER]),
}
TEXTS: dict[str, tuple[Callable[[bytes], object], list[str]]] = {
    "selector": (_select, _SELECTORS),
    "Steering as JSON": (Steering.from_json, [json.dumps({"ops": _STEER})]),
    "Watch as JSON": (Watch.from_json, [json.dumps(_WATCH)]),
    "stream of events": (_stream, [_STREAM]),
    "stream of a job": (_job, [_STREAM]),
}


def good_files(folder: Path) -> dict[str, tuple[Callable[[Path], object], Path]]:
    """Folders with one good thing each, and what reads it out of such a folder."""
    vector = SteeringVector({1: torch.randn(16), 2: torch.randn(16)}, model="m")
    for suffix in ("safetensors", "gguf"):
        (folder / suffix).mkdir(parents=True)
        save(vector, folder / suffix / f"v.{suffix}")
    for name in ("pt", "pack", "rows", "store"):
        (folder / name).mkdir()
    torch.save({"vector": torch.randn(3, 16)}, folder / "pt" / "v.pt")
    make_pack().save(folder / "pack" / "p")
    labels = make_labels("r", np.arange(5), [7] * 5, 3, None, False)
    Rows({(0, "resid_post"): torch.randn(5, 16)}, labels, "m").save(folder / "rows" / "r.safetensors")
    _store(folder / "store" / "s")
    return {
        "vector, safetensors": (lambda at: load_vector(at / "v.safetensors"), folder / "safetensors"),
        "vector, GGUF": (lambda at: load_vector(at / "v.gguf"), folder / "gguf"),
        "vector, .pt": (lambda at: load_vector(at / "v.pt"), folder / "pt"),
        "lens pack": (lambda at: Pack.load(at / "p"), folder / "pack"),
        "rows": (lambda at: load_rows(at / "r.safetensors"), folder / "rows"),
        "store": (_read_store, folder / "store"),
    }


def _store(folder: Path) -> None:
    info = StoreInfo(model="m", hidden=16, keys=((2, "resid_post"),), shards=1)
    create(folder, info)
    labels = make_labels("d0", np.arange(6), [9] * 6, 6, None, False)
    piece = DocumentRows(DocumentEntry(0, "c.jsonl", 1, "d0", 6), torch.randn(6, 1, 16), labels)
    list(write_shards(folder, info, [(0, iter([[piece]]))]))
    finish(folder, info)


def _read_store(at: Path) -> None:
    store = ActivationStore(at / "s")
    store.verify()
    for number in store.documents(columns=["document"])["document"].to_pylist():
        store.document(number)
