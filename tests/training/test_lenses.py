"""From texts to a pack on a tiny model: rows keep their labels, folders can be taken up again, and a pack says how it
was made."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steerscope.engines.hf import HFEngine
from steerscope.engines.sync import SyncEngine
from steerscope.lenses import Pack
from steerscope.lenses.bank import Bank
from steerscope.lenses.fit import TEST, TRAIN, VALIDATION, FitSettings, logits, normalise
from steerscope.specs import Capture, Sampling
from steerscope.specs.errors import BadFile, InvalidRequest
from steerscope.training import concepts as texts_module
from steerscope.training import lenses, rows
from steerscope.training.concepts import ConceptSet, ConceptTexts
from steerscope.training.lenses import LensSettings, fit_pack, shuffled_labels
from steerscope.training.rows import RowChoice, read_texts
from support import tiny

pytestmark = pytest.mark.slow  # make test-fast leaves this file out

WORDS = {"fox": "quick brown fox", "dog": "lazy dog jumps", "week": "week at work", "beach": "wonderful beach"}
FRAMES = {
    "statement": "There was the {0} and the {0} over here",
    "question": "How was the {0}, and where is the {0} now?",
    "dialogue": "A: The {0}!\nB: I had the {0} too.",
    "story": "And then it rained on the {0}, so the {0} had a time",
    "notes": "1 {0}; 2 the {0}; 3 over the {0} and the {0}",
}
QUICK = FitSettings(widths=(8,), epochs=4, steps=4, batch=16, learning_rate=5e-3)
SETTINGS = LensSettings(layers=(1,), fit=QUICK, name="small")


def concept(name: str, parent: str) -> ConceptTexts:
    texts = {form: (frame.format(WORDS[name]),) for form, frame in FRAMES.items()}
    return ConceptTexts(id=name, name=name, definition=f"about {name}", parents=(parent,), texts=texts)


@pytest.fixture(scope="module")
def concepts() -> ConceptSet:
    leaves = [concept(name, "animals" if name in ("fox", "dog") else "days") for name in WORDS]
    return ConceptSet((*leaves, ConceptTexts(id="animals"), ConceptTexts(id="days")))  # parents last: the pack sorts


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    with HFEngine(tiny.model(), tiny.tokenizer(), name="tiny").sync as engine:
        yield engine


# --- rows


def test_every_row_belongs_to_the_text_it_is_said_to(engine: SyncEngine, concepts: ConceptSet, tmp_path: Path) -> None:
    """Texts are read in another order than they were given in; a mix-up there would exchange labels."""
    texts = [example.text for example in concepts.examples]
    choice = RowChoice(layers=(1, 3), skip=3, most=5)
    found = read_texts(engine, texts, tmp_path, choice)
    for layer in choice.layers:
        got, text = found.at(layer)
        for i, prompt in enumerate(texts):
            alone = engine.generate(prompt, Sampling(max_tokens=1), capture=Capture(layers=layer)).rows[layer]
            alone = alone[3:]
            places = torch.linspace(0, len(alone) - 1, 5).round().long() if len(alone) > 5 else slice(None)
            torch.testing.assert_close(got[text == i], alone[places], atol=1e-4, rtol=1e-4)


def test_texts_that_are_too_short_are_all_named(engine: SyncEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_texts(
            engine, ["Hi", "The quick brown fox jumps over the lazy dog", "No"], tmp_path, RowChoice(layers=(1,))
        )
    assert len(refused.value.problems) == 2


def test_rows_are_read_once(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [example.text for example in concepts.examples]
    monkeypatch.setattr(rows, "_SHARD", 8)
    first = read_texts(engine, texts, tmp_path, RowChoice(layers=(1,)))
    read = counted(monkeypatch)
    again = read_texts(engine, texts, tmp_path, RowChoice(layers=(1,)))
    assert again.shards == first.shards
    assert sum(read) == 1  # the probe sentence
    read_texts(engine, texts, tmp_path, RowChoice(layers=(2,)))
    assert sum(read) == 1 + 1 + len(texts)  # another layer is new


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each later reading reads."""
    read: list[int] = []
    real = rows._read

    def count(engine: SyncEngine, texts: list[str], choice: RowChoice) -> dict[str, torch.Tensor]:
        read.append(len(texts))
        return real(engine, texts, choice)

    monkeypatch.setattr(rows, "_read", count)
    return read


def test_a_damaged_shard_is_read_again(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [example.text for example in concepts.examples]
    monkeypatch.setattr(rows, "_SHARD", 8)
    first = read_texts(engine, texts, tmp_path, RowChoice(layers=(1,)))
    expected = first.at(1)[0]
    damaged = first.shards[1]
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"oops")
    read = counted(monkeypatch)
    torch.testing.assert_close(read_texts(engine, texts, tmp_path, RowChoice(layers=(1,))).at(1)[0], expected)
    assert read == [1, 8]


def test_rows_of_another_model_with_the_same_name_are_refused(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path
) -> None:
    texts = [example.text for example in concepts.examples]
    read_texts(engine, texts, tmp_path, RowChoice(layers=(1,)))
    with (
        HFEngine(tiny.model(seed=5), tiny.tokenizer(), name="tiny").sync as other,
        pytest.raises(BadFile, match="another model"),
    ):
        read_texts(other, texts, tmp_path, RowChoice(layers=(1,)))


# --- the pack


def test_a_pack_is_whole_and_says_how_it_was_made(engine: SyncEngine, concepts: ConceptSet, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    settings = SETTINGS.model_copy(update={"layers": (1, 2), "control": True})
    done = fit_pack(engine, concepts, tmp_path / "pack", settings, progress=lambda *step: told.append(step))
    pack = Pack.load(tmp_path / "pack")
    assert pack.digest == done.pack.digest
    assert [each.id for each in pack.concepts] == ["animals", "days", "fox", "dog", "week", "beach"]
    assert pack.info.model == "tiny"
    assert pack.info.layer == max(done.layers, key=lambda layer: done.layers[layer])
    assert pack.calibration is not None
    assert set(pack.tensors) == {"w0", "b0", "w1", "b1", "low", "high", "confidence", "floor"}
    forms = pack.info.training["forms"]
    assert forms == {"training": ["question", "statement"], "validation": ["notes"], "test": ["dialogue", "story"]}
    assert {"auroc", "ap", "f1", "text_auroc"} <= set(pack.concepts[2].metrics)
    assert done.control is not None
    assert pack.info.training["control_median_text_auroc"] == float(np.median(done.control[1].auroc))
    assert {what for what, _, _ in told} == {"reading texts", "comparing layers", "fitting", "fitting the control"}
    assert all(0 < done <= total for _, done, total in told)


class Reached(Exception):
    """Rows and labels are together, and the fit begins."""


@pytest.mark.parametrize(("asked", "where"), [(None, "meta"), ("cpu", "cpu")])
def test_lenses_are_fitted_where_the_model_is_unless_a_device_is_named(
    engine: SyncEngine,
    concepts: ConceptSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    where: str,
) -> None:
    """The meta device stands for a GPU."""
    assert engine.aio.device == torch.device("cpu")
    monkeypatch.setattr(engine.aio, "device", torch.device("meta"))
    read_texts = lenses.read_texts

    def read(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.aio, "device", torch.device("cpu"))
            return read_texts(*args)

    monkeypatch.setattr(lenses, "read_texts", read)

    def begin(*tensors: torch.Tensor) -> None:
        assert {tensor.device.type for tensor in tensors} == {where}
        raise Reached

    monkeypatch.setattr(lenses, "LabelledRows", begin)
    for layers in ((1,), (1, 2)):  # of several, quick probes choose one
        settings = SETTINGS.model_copy(update={"layers": layers, "device": asked})
        with pytest.raises(Reached):
            fit_pack(engine, concepts, tmp_path / "pack", settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_fit_on_a_gpu_finds_what_a_fit_on_the_cpu_finds(concepts: ConceptSet, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"layers": (1, 2), "control": True})
    with HFEngine(copy.deepcopy(tiny.model()).cuda(), tiny.tokenizer(), name="tiny").sync as engine:
        here, there = (
            fit_pack(engine, concepts, tmp_path / device, settings.model_copy(update={"device": given}))
            for device, given in (("cuda", None), ("cpu", "cpu"))
        )
    assert here.pack.info.training["settings"]["device"].startswith("cuda")
    assert all(tensor.device.type == "cpu" for tensor in here.pack.tensors.values())
    assert np.nanmedian(here.texts.auroc) > 0.9
    assert np.nanmedian(there.texts.auroc) > 0.9


def test_weights_and_names_stay_together_when_the_pack_sorts_them(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path
) -> None:
    """Misordered labels are the classic bug: each lens of the pack must answer to its own concept's rows."""
    pack = fit_pack(engine, concepts, tmp_path / "pack", SETTINGS).pack
    data, done = kept(engine, concepts, tmp_path / "pack.work")
    for i, each in enumerate(concepts.concepts):
        place = pack.index(each.id)
        assert all(torch.equal(pack.tensors[name][place], tensor[i]) for name, tensor in done.items())
    assert {int(c) for c in data.concept} == {0, 1, 2, 3}
    order = [pack.index(each.id) for each in concepts.concepts]
    torch.testing.assert_close(Bank(pack).logits(data.rows)[:, order], logits(done, normalise(data.rows)))


def kept(engine: SyncEngine, concepts: ConceptSet, folder: Path) -> tuple[lenses.LabelledRows, dict[str, torch.Tensor]]:
    """The data and weights of a fit, from its folder, in the order of the concepts."""
    choice = RowChoice(layers=(1,))
    found = read_texts(engine, [example.text for example in concepts.examples], folder, choice)
    parts, relations = concepts.parts(), concepts.relations
    fitting = lenses._Fitting(SETTINGS, concepts.examples, parts, relations, found, folder, lambda *_: None)
    data = fitting.data(1)
    return data, fitting.fit(data, "").weights


def test_the_same_seed_gives_the_same_pack_and_another_seed_another(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path
) -> None:
    work = tmp_path / "work"  # the same rows
    packs = []
    for i, seed in enumerate((0, 0, 1)):
        settings = SETTINGS.model_copy(update={"seed": seed})
        packs.append(fit_pack(engine, concepts, tmp_path / f"{i}", settings, work=work).pack)
        for file in work.glob("lenses-*"):
            file.unlink()  # so that they are fitted again
    assert packs[0].digest == packs[1].digest
    assert not torch.equal(packs[0].tensors["w0"], packs[2].tensors["w0"])


@pytest.mark.parametrize("where", ["reading", "fitting"])
def test_an_interrupted_fit_goes_on_and_ends_with_the_same_pack(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(rows, "_SHARD", 6)
    monkeypatch.setattr(lenses, "_GROUP", 2)
    whole = fit_pack(engine, concepts, tmp_path / "whole", SETTINGS).pack
    module, name = (rows, "_read") if where == "reading" else (lenses, "fit")
    calls, real = [], getattr(module, name)

    def breaks(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, breaks)
    with pytest.raises(KeyboardInterrupt):
        fit_pack(engine, concepts, tmp_path / "pack", SETTINGS)
    assert not (tmp_path / "pack").exists()
    before = len(calls)
    again = fit_pack(engine, concepts, tmp_path / "pack", SETTINGS).pack
    assert again.digest == whole.digest
    # Reading: the probe, and 3 of the 4 shards. Fitting: 1 of 3 groups.
    assert len(calls) - before == {"reading": 4, "fitting": 1}[where]


def test_the_control_keeps_texts_apart_and_counts_equal(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path
) -> None:
    fit_pack(engine, concepts, tmp_path / "pack", SETTINGS)
    data, _ = kept(engine, concepts, tmp_path / "pack.work")
    wrong = shuffled_labels(data, concepts.examples, seed=0)
    assert not torch.equal(wrong.concept, data.concept)
    assert torch.equal(wrong.part, data.part)
    for part in (TRAIN, VALIDATION, TEST):
        assert (
            wrong.concept[wrong.part == part].bincount().tolist() == data.concept[data.part == part].bincount().tolist()
        )


def test_generated_texts_are_written_once_and_only_trained_on(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "_SHORTEST", 5)
    settings = SETTINGS.model_copy(update={"generate": 2})
    pack = fit_pack(engine, concepts, tmp_path / "pack", settings).pack
    assert pack.info.training["texts"] == len(concepts.examples) + 8
    again = texts_module.generated_examples(engine, concepts, 2, tmp_path / "pack.work")
    assert {example.form for example in again} == {"generated"}
    assert [example.concept for example in again] == [0, 0, 1, 1, 2, 2, 3, 3]
    found = read_texts(
        engine,
        [example.text for example in (*concepts.examples, *again)],
        tmp_path / "pack.work",
        RowChoice(layers=(1,)),
    )
    examples, parts, relations = [*concepts.examples, *again], concepts.parts(), concepts.relations
    fitting = lenses._Fitting(SETTINGS, examples, parts, relations, found, tmp_path, lambda *_: None)
    data = fitting.data(1)
    assert (data.part[len(concepts.examples) :] == TRAIN).all()


def test_a_layer_that_is_not_there_is_refused_before_anything_is_read(
    engine: SyncEngine, concepts: ConceptSet, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="layers 0–3"):
        fit_pack(engine, concepts, tmp_path / "pack", SETTINGS.model_copy(update={"layers": (1, 9)}))
    assert list(tmp_path.iterdir()) == []
