"""Whatever a user gives, an error says in our words where it is wrong and what to do; nothing of a library's shows."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

import steerscope as ss
from steerscope.analysis.checkpoint import Checkpoint
from steerscope.capture.rows import load_rows
from steerscope.corpus.source import preview, scan
from steerscope.evals.conditions import caps
from steerscope.evals.items import load_items
from steerscope.evals.run import load_run as load_eval_run
from steerscope.extraction.data import load_examples
from steerscope.extraction.personas.definitions import load_persona_file, load_questions
from steerscope.extraction.personas.run import load_run as load_persona_run
from steerscope.lenses.formats.hatcat import load_hatcat
from steerscope.lenses.formats.probes import load_probes
from steerscope.lenses.formats.saelens import load_sae
from steerscope.lenses.pack import Pack
from steerscope.serving.bodies import ChatBody, CompletionBody
from steerscope.serving.errors import api_error
from steerscope.specs.base import Spec
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem, SteerscopeError
from steerscope.specs.sampling import Sampling
from steerscope.specs.watch import Watch
from steerscope.training.concepts import load_concepts
from steerscope.training.texts import load_training_set
from steerscope.vectors.legacy import load_capping, load_persona
from support.wording import foreign_words

pytestmark = pytest.mark.slow

WRONG = (None, -3, 1.5, "?", "", [], {}, [3], {"k": [3]}, True, 1e999, "\ud800")


def broken(data: object) -> Iterator[object]:
    """The data with every part in turn missing, of another type, or with one field too many."""
    for path in list(places(data)):
        for value in (*WRONG, ..., "more"):
            made = copy.deepcopy(data)
            holder = made
            for key in path[:-1]:
                holder = holder[key]  # type: ignore[index]
            if not path:
                made = value
            elif value is ...:
                del holder[path[-1]]  # type: ignore[attr-defined]
            elif value == "more":
                if isinstance(holder, dict):
                    holder["surplus"] = 1
            else:
                holder[path[-1]] = value  # type: ignore[index]
            if made is not ...:
                yield made


def places(data: object, before: tuple = ()) -> Iterator[tuple]:
    yield before
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*before, key))


def refusal(read: Callable[[Any], object], given: object) -> SteerscopeError | None:
    try:
        read(given)
    except SteerscopeError as error:
        return error
    return None


# --- specs and bodies

OPS = [
    {"op": "add", "vector": {"per_layer": {"3": "AACAPw=="}}, "scale": 2.0, "layers": "1-3", "tokens": "prompt"},
    {"op": "cap", "vector": "v", "max": 1.0, "site": "attn_out"},
]
RULES = [
    {
        "when": {"kind": "not", "of": {"kind": "when", "concept": "a", "above": 0.5}},
        "then": {"kind": "stop", "name": "s"},
    }
]
WATCH = {"pack": "p", "top_k": 3, "levels": [0], "rules": RULES}
EXTRA = {"steer": {"ops": OPS}, "capture": {"layers": [1], "sites": ["resid_pre"], "reduce": "mean"}, "watch": WATCH}
EXTRA |= {"project": ["v"], "prompt": "all"}
BODY = {"temperature": 0.5, "n": 2, "stop": ["a"], "seed": 1, "top_p": 0.5, "max_tokens": 5, "logit_bias": None}
BODY |= {"stream": True, "stream_options": {"include_usage": True}, "steerscope": EXTRA}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {"a": 1}}
READERS: list[tuple[Callable[[dict], Spec], dict]] = [
    (ss.Steering.parse, {"ops": OPS}),
    (Sampling.parse, {"max_tokens": 3, "temperature": 0.5, "stop": ["a"], "seed": 3, "n": 2}),
    (Capture.parse, {"layers": "1-3", "sites": ["resid_pre"], "tokens": "all", "reduce": "last"}),
    (Watch.parse, WATCH),
    (ChatBody.read, {**BODY, **CHAT, "logprobs": True, "top_logprobs": 2}),
    (CompletionBody.read, {**BODY, "prompt": ["a", "b"], "logprobs": 2}),
]


@pytest.mark.parametrize(("read", "good"), READERS, ids=lambda one: getattr(one, "__qualname__", ""))
def test_data_that_are_wrong_are_told_field_by_field(read: Callable[[dict], Spec], good: dict) -> None:
    read(good)
    errors = [error for data in broken(good) if isinstance(data, dict) and (error := refusal(read, data))]
    assert len(errors) > 20
    for error in errors:
        assert isinstance(error, InvalidRequest)
        assert not foreign_words(str(error)), error
        assert all(problem.what and problem.remedy and problem.field for problem in error.problems), error
        assert api_error(error).status == 400


def test_all_that_is_wrong_comes_in_one_error_once() -> None:
    body = {**BODY, **CHAT, "temperature": "hot", "top_p": 3, "n": 1.5, "stop": 3, "nonsense": 1, "max_tokens": 0}
    body |= {"chat_template_kwargs": {"k": [1]}, "steerscope": {"steer": [{"op": "ad"}], "capture": {"layers": "x"}}}
    with pytest.raises(InvalidRequest) as caught:
        ChatBody.read(body)
    fields = [problem.field for problem in caught.value.problems]
    assert sorted(fields) == sorted(set(fields))
    assert set(fields) == {
        *("temperature", "top_p", "n", "stop", "nonsense", "max_tokens", "chat_template_kwargs.k"),
        *("steerscope.steer.ops[0]", "steerscope.capture.layers"),
    }


@pytest.mark.parametrize(
    "text", ["", "{", '{"a": }', "[1, 2", "\x00", '{"n": 1} x', '{"n": ' + "9" * 5000 + "}", "[" * 10**5]
)
def test_what_is_no_json_says_where(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Sampling.from_json(text)
    assert not foreign_words(str(caught.value))


# --- files


def write_all(folder: Path) -> None:
    """A good file of every kind."""
    vector = ss.SteeringVector({1: torch.randn(8), 2: torch.randn(8)})
    ss.save_vector(vector, folder / "own.safetensors")
    ss.save_vector(vector, folder / "own.gguf")
    torch.save(torch.randn(3, 8), folder / "plain.pt")
    torch.save({"pos_3": torch.randn(3, 8), "default_1": torch.randn(3, 8)}, folder / "persona.pt")
    cap = {"id": "x", "interventions": [{"vector": "a", "cap": 1.0}]}
    torch.save({"vectors": {"a": {"vector": torch.randn(8), "layer": 1}}, "experiments": [cap]}, folder / "caps.pt")
    chatspace = folder / "chatspace"
    chatspace.mkdir()
    torch.save({"steering_vector": torch.randn(8)}, chatspace / "steering_vector.pt")
    texts = {"cap-p25.json": ss.Steering.of(ss.Cap(vector=[1.0, 2.0], max=1, layers=1)).to_json()}
    data: dict[str, object] = {
        "chatspace/steering_config.json": {"model_name": "m", "target_layer": 2},
        "questions.json": [{"question": "a", "answer": "b"}],
        "role.json": {"instruction": [{"pos": "a"}], "questions": ["q"], "keywords": {"pos": ["x"]}},
        "eval/run.json": {"conditions": [{"name": "a"}], "items": [{"question": "q", "dataset": "d"}], "n": 1},
        "personas/run.json": {
            "personas": [{"name": "a", "instruction": [{"pos": "x"}]}],
            "default": {"name": "default", "instruction": [{"pos": "x"}]},
            "shared": ["q"],
        },
        "sae/cfg.json": {"architecture": "standard", "hook_name": "blocks.1.hook_resid_post", "model_name": "m"},
        "hatcat/pack_info.json": {"model": "m", "model_layer": 2},
        "hatcat/calibration.json": {"A_L0": {"self_mean": 1, "cross_mean": 0.5}},
        "hatcat/layer0/results.json": {"A": {"f1": 1}},
        "hatcat/hierarchy/layer0.json": [{"sumo_term": "A", "definition": "x"}],
        "model/config.json": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "num_attention_heads": 2,
        },
    }
    texts |= {name: json.dumps(one) for name, one in data.items()}
    lines: dict[str, list[object]] = {
        "examples.jsonl": [{"positive": "a", "negative": f"b{i}"} for i in range(4)],
        "texts.jsonl": [
            {"text": "a"},
            {"prompt": "a", "response": "b"},
            {"messages": [{"role": "user", "content": "x"}]},
        ],
        "concepts.jsonl": [{"id": "a", "name": "a", "definition": "d", "parents": []}],
        "questions.jsonl": [
            {"question": "a", "answer_matching_behavior": "(A)", "answer_not_matching_behavior": "(B)"}
        ],
        "plain.jsonl": [{"question": "a"}],
        "corpus.jsonl": [{"text": "a"}],
    }
    texts |= {name: "".join(json.dumps(one) + "\n" for one in some) for name, some in lines.items()}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    np.savez(folder / "probes.npz", coef_=np.ones((2, 8)), intercept_=np.zeros(2))
    safetensors.torch.save_file({"coef": torch.ones(2, 8), "intercept": torch.zeros(2)}, folder / "probes.safetensors")
    sae = {"W_enc": torch.randn(8, 4), "W_dec": torch.randn(4, 8), "b_enc": torch.zeros(4), "b_dec": torch.zeros(8)}
    safetensors.torch.save_file(sae, folder / "sae" / "sae_weights.safetensors")
    net = {"net.0.weight": torch.randn(4, 8), "net.0.bias": torch.zeros(4)}
    net |= {"net.2.weight": torch.randn(1, 4), "net.2.bias": torch.zeros(1)}
    torch.save(net, folder / "hatcat" / "layer0" / "A_classifier.pt")
    load_hatcat(folder / "hatcat").save(folder / "pack")
    weights = {f"model.layers.0.{name}.weight": torch.randn(8, 8) for name in ("self_attn.q_proj", "mlp.up_proj")}
    safetensors.torch.save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
    pq.write_table(pa.table({"text": ["a", "b"]}), folder / "corpus.parquet")


def _probes(path: Path) -> Pack:
    return load_probes(path, model="m", layer=1)


def _corpus(path: Path) -> None:
    """`preview` reports each document that it cannot read."""
    scan(path, 2)
    errors = [one.entry.error for one in preview(path, 3) if one.entry.error]
    if errors:
        raise InvalidRequest([Problem(str(path), error, "correct the document") for error in errors])


def _up(read: Callable[[Path], object], levels: int = 1) -> Callable[[Path], object]:
    return lambda path: read(path.parents[levels - 1])


FILES: dict[str, Callable[[Path], object]] = {
    "own.safetensors": ss.load_vector,
    "own.gguf": ss.load_vector,
    "plain.pt": ss.load_vector,
    "chatspace/steering_vector.pt": _up(ss.load_vector),
    "chatspace/steering_config.json": _up(ss.load_vector),
    "persona.pt": load_persona,
    "caps.pt": load_capping,
    "cap-p25.json": lambda path: caps([path]),
    "probes.npz": _probes,
    "probes.safetensors": _probes,
    "sae/cfg.json": _up(load_sae),
    "sae/sae_weights.safetensors": _up(load_sae),
    "hatcat/pack_info.json": _up(load_hatcat),
    "hatcat/calibration.json": _up(load_hatcat),
    "hatcat/layer0/results.json": _up(load_hatcat, 2),
    "hatcat/layer0/A_classifier.pt": _up(load_hatcat, 2),
    "hatcat/hierarchy/layer0.json": _up(load_hatcat, 2),
    "pack/pack.json": _up(Pack.load),
    "pack/concepts.json": _up(Pack.load),
    "pack/lenses.safetensors": _up(Pack.load),
    "questions.json": load_items,
    "questions.jsonl": load_items,
    "plain.jsonl": load_questions,
    "role.json": load_persona_file,
    "eval/run.json": _up(load_eval_run),
    "personas/run.json": _up(load_persona_run),
    "examples.jsonl": load_examples,
    "texts.jsonl": load_training_set,
    "concepts.jsonl": load_concepts,
    "model/config.json": _up(Checkpoint),
    "model/model.safetensors": _up(Checkpoint),
    "corpus.parquet": _corpus,
    "corpus.jsonl": _corpus,
    "rows.safetensors": load_rows,
}
OTHERS = ("own.safetensors", "own.gguf", "plain.pt", "probes.npz", "questions.json", "role.json", "corpus.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    write_all(made)
    safetensors.torch.save_file({"x": torch.ones(2)}, made / "rows.safetensors")
    return made


def damaged(name: str, folder: Path) -> Iterator[bytes]:
    data, chance = (folder / name).read_bytes(), random.Random(name)
    yield from (data[:end] for end in (0, 1, 7, 9, len(data) // 2, len(data) - 1))
    yield from ((folder / other).read_bytes() for other in OTHERS)
    yield from (b"\xff" * 50, b"hello\n", b"[" * 100_000, data + b"\n{}\n")
    for _ in range(30):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 3))):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        yield bytes(changed)
    if name.endswith(".json"):
        yield from (json.dumps(one).encode() for one in broken(json.loads(data)))
    if name.endswith(".jsonl"):
        first, *rest = data.splitlines(keepends=True)
        yield from (json.dumps(one).encode() + b"\n" + b"".join(rest) for one in broken(json.loads(first)))


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_damaged_or_others_are_refused_in_our_words(name: str, folder: Path) -> None:
    path, errors = folder / name, list[SteerscopeError]()
    good = path.read_bytes()
    try:
        for data in damaged(name, folder):
            path.write_bytes(data)
            errors += filter(None, [refusal(FILES[name], path)])
    finally:
        path.write_bytes(good)
    assert len(errors) >= (3 if name.startswith("corpus") else 10)
    for text in map(str, errors):
        assert not foreign_words(text), text
        assert name.partition("/")[0] in text, text
        assert ";" in text or "expected" in text, text


def test_no_file_and_a_folder_in_its_place_are_told(folder: Path) -> None:
    for name, read in FILES.items():
        path = folder / "nowhere" / name
        with pytest.raises(SteerscopeError) as caught:
            read(path)
        assert not foreign_words(str(caught.value)), (name, caught.value)
