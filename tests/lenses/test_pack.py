"""Packs: order, hierarchy, files that are whole or refused with every problem, and where a pack fits."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lenses.packs import info, make, tree, weights
from steerscope.lenses import Calibration, Concept, Pack, PackInfo
from steerscope.lenses.hierarchy import indices
from steerscope.specs.errors import BadFile, InvalidRequest

FULL = {"normed": True, "calibrated": True}


def same(one: Pack, other: Pack) -> bool:
    return (
        one.info == other.info
        and one.concepts == other.concepts
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    )


# --- order and hierarchy


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_levels_are_slices_children_are_whole_and_every_lens_keeps_its_weights(counts, seed):
    concepts = tree(counts, seed)
    given_weights = weights(info(), len(concepts), seed)
    pack = Pack(info(), concepts, given_weights)
    assert sorted(pack.concepts, key=lambda c: c.id) == sorted(concepts, key=lambda c: c.id)
    before = {concept.id: i for i, concept in enumerate(concepts)}
    for i, concept in enumerate(pack.concepts):
        assert torch.equal(pack.tensors["w0"][i], given_weights["w0"][before[concept.id]])
        assert i in range(len(pack))[pack.level(concept.level)]
        assert set(indices(pack.children(i))) == {
            j for j, other in enumerate(pack.concepts) if concept.id in other.parents
        }
        first = [j for j, other in enumerate(pack.concepts) if other.parents[:1] == (concept.id,)]
        assert first == list(range(first[0], first[0] + len(first))) if first else True
    assert [pack.level(n).stop - pack.level(n).start for n in range(pack.levels)] == counts


def test_children_are_a_slice_unless_one_of_them_has_another_first_parent():
    concepts = [Concept(id="a"), Concept(id="b")]
    concepts += [Concept(id=f"a{i}", level=1, parents=("a",)) for i in range(3)]
    concepts += [Concept(id="b0", level=1, parents=("b",)), Concept(id="b1", level=1, parents=("b", "a"))]
    pack = make(concepts=concepts)
    assert pack.children(pack.index("b")) == slice(5, 7)
    assert pack.children(pack.index("a")) == (2, 3, 4, 6)
    assert pack.children(pack.index("b0")) == slice(0, 0)


def test_a_path_runs_from_the_root_by_first_parents():
    concepts = [
        Concept(id="1", name="Thing"),
        Concept(id="2", name="Other"),
        Concept(id="3", name="Animal", level=1, parents=("1",)),
        Concept(id="4", name="Dog", level=3, parents=("3", "2")),
    ]
    pack = make(concepts=concepts)
    assert pack.path(pack.index("Dog")) == ("Thing", "Animal", "Dog")
    assert pack.level(2) == slice(3, 3)
    with pytest.raises(InvalidRequest, match="levels 0–3"):
        pack.level(4)


def test_a_concept_is_found_by_id_or_by_a_name_that_is_alone():
    concepts = [Concept(id="Bank:0", name="Bank"), Concept(id="Bank:1", name="Bank", level=1, parents=("Bank:0",))]
    pack = make(concepts=[*concepts, Concept(id="River:0", name="River")])
    assert pack.concepts[pack.index("River")].id == "River:0"
    assert pack.index("Bank:1") == 2
    with pytest.raises(InvalidRequest, match="2 are named 'Bank'; use an id: Bank:0, Bank:1"):
        pack.index("Bank")
    with pytest.raises(InvalidRequest, match="'Rivr' is not in pack 'test'; near it are River"):
        pack.index("Rivr")


# --- what is refused, all at once


def test_every_problem_of_the_parts_is_in_one_error():
    concepts = [
        Concept(id="a"),
        Concept(id="a"),
        Concept(id="lost", level=1, parents=("nobody",)),
        Concept(id="deep", level=1, parents=("deeper",)),
        Concept(id="deeper", level=2),
        Concept(id="x", level=1, parents=("y",)),
        Concept(id="y", level=2, parents=("z",)),
        Concept(id="z", level=3, parents=("x",)),
    ]
    tensors = weights(info(), len(concepts))
    del tensors["b1"]
    tensors["w0"] = tensors["w0"][:, :, 1:]
    tensors["w1"] = tensors["w1"].half()
    tensors["extra"] = torch.zeros(3)
    tensors["low"] = torch.zeros(8)
    with pytest.raises(InvalidRequest) as caught:
        Pack(info(), concepts, tensors)
    text = str(caught.value)
    for expected in (
        "'a': two concepts have this id",
        "parent 'nobody' is not in the pack",
        "'deep': is at level 1, its parent 'deeper' at 2",
        "is its own ancestor (x → y → z → x)",
        "b1: is missing",
        "w0: has shape [8, 8, 23]; expected [8, 8, 24]",
        "w1: has dtype float16",
        "extra: is no tensor of a pack",
        "high: is missing",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("w1", lambda t: t[4].fill_(torch.nan), r"w1: holds NaN or infinity \(c1.1\)"),
        ("b0", lambda t: t[0].fill_(torch.inf), r"b0: holds NaN or infinity"),
        ("high", lambda t: t[2:4].fill_(0.0), r"low, high: are not 0 ≤ low < high \(c0.2, c1.0\)"),
        ("low", lambda t: t[0].fill_(-0.1), r"low, high"),
        ("confidence", lambda t: t[0].fill_(-1), r"confidence: is negative"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_the_lens(name, change, reason):
    concepts = sorted(tree([3, 6]), key=lambda c: c.id)
    concepts = [concept.model_copy(update={"parents": ("c0.0",)}) if concept.level else concept for concept in concepts]
    pack = make(concepts=concepts, calibrated=True)
    changed = pack.tensors[name].clone()
    change(changed)
    with pytest.raises(InvalidRequest, match=reason):
        pack.replace(tensors={name: changed})


def test_an_architecture_that_makes_no_sense_is_refused():
    for wrong in ({"widths": (0,)}, {"output": "topk"}, {"k": 3}, {"output": "tanh"}):
        with pytest.raises(InvalidRequest):
            info(**wrong)
    with pytest.raises(InvalidRequest, match="threshold: is missing"):
        make([3], widths=(), output="jumprelu")
    with pytest.raises(InvalidRequest, match="k: is 9, with 3 lenses"):
        make([3], widths=(), output="topk", k=9)
    with pytest.raises(InvalidRequest, match="concepts: there are none"):
        Pack(info(), [], weights(info(), 0))


# --- calibration


def test_the_curve_goes_through_its_three_points_and_stays_between():
    curve = Calibration(torch.tensor([0.2, 0.5]), torch.tensor([0.6, 1.0]), torch.tensor([0.8, 1.0]))
    scores = torch.tensor([[0.0, 0.0], [0.1, 0.3], [0.2, 0.5], [0.4, 0.7], [0.6, 1.0], [0.9, 1.0]])
    expected = torch.tensor([[0.0, 0.0], [0.2, 0.3], [0.4, 0.5], [0.6, 0.7], [0.8, 1.0], [0.8, 1.0]])
    torch.testing.assert_close(curve.apply(scores), expected)


def test_a_curve_with_a_low_of_zero_is_finite():
    curve = Calibration(torch.zeros(1), torch.ones(1), torch.ones(1))
    assert curve.apply(torch.tensor([[0.0], [0.5], [1.0]])).flatten().tolist() == [0.5, 0.75, 1.0]


# --- files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pack_survives_its_file_bit_for_bit(tmp_path: Path, dtype):
    pack = make([3, 6, 12], dtype=dtype, **FULL)
    measured = [c.model_copy(update={"metrics": {"auroc": 0.9}, "definition": "é\n"}) for c in pack.concepts]
    pack = pack.replace(concepts=measured, info=pack.info.model_copy(update={"training": {"rows": [1, "x", None]}}))
    pack.save(tmp_path / "p")
    back = Pack.load(tmp_path / "p")
    assert same(back, pack)
    assert back.digest == pack.digest
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["p"]
    assert sorted(os.listdir(tmp_path / "p")) == ["concepts.json", "lenses.safetensors", "pack.json"]


def test_the_digest_follows_every_part():
    pack = make()
    changed = pack.tensors["w0"].clone()
    changed[3, 2, 1] += 1
    others = [
        pack.replace(tensors={"w0": changed}),
        pack.replace(info=pack.info.model_copy(update={"layer": 4})),
        pack.replace(concepts=[c.model_copy(update={"definition": "x"}) for c in pack.concepts]),
        pack.replace(tensors={"floor": torch.zeros(len(pack))}),
    ]
    assert len({pack.digest, *(other.digest for other in others)}) == 5
    assert pack.replace().digest == pack.digest
    assert others[3].replace(tensors={"floor": None}).digest == pack.digest


def test_opening_without_verifying_reads_no_weights(tmp_path: Path):
    make([4], hidden=512, widths=(256,)).save(tmp_path / "p")
    pack = Pack.load(tmp_path / "p", verify=False)
    mapped = Path("/proc/self/smaps").read_text()
    assert "lenses.safetensors" in mapped, "tensors are views of the mapped file"
    block = mapped.split("lenses.safetensors")[1]
    resident = int(block.split("Rss:")[1].split()[0])
    assert resident * 1024 < pack.tensors["w0"].nbytes / 4


def test_a_pack_takes_the_place_of_a_pack_and_of_nothing_else(tmp_path: Path):
    first, second = make(seed=1), make(seed=2)
    first.save(tmp_path / "p")
    still_open = Pack.load(tmp_path / "p")
    second.save(tmp_path / "p")
    assert same(Pack.load(tmp_path / "p"), second)
    assert same(still_open, first), "who has it open keeps what he opened"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("x")
    with pytest.raises(BadFile, match="has no pack.json"):
        first.save(tmp_path / "mine")
    with pytest.raises(BadFile, match="does not exist"):
        first.save(tmp_path / "no" / "p")
    assert sorted(os.listdir(tmp_path)) == ["mine", "p"]


def test_a_write_that_fails_leaves_the_old_pack_and_nothing_beside_it(tmp_path: Path, monkeypatch):
    first = make(seed=1)
    first.save(tmp_path / "p")

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("steerscope.lenses.formats.own.save_file", full)
    with pytest.raises(BadFile, match="No space left"):
        make(seed=2).save(tmp_path / "p")
    assert same(Pack.load(tmp_path / "p"), first)
    assert os.listdir(tmp_path) == ["p"]


def test_an_old_pack_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path, monkeypatch):
    first = make(seed=1)
    first.save(tmp_path / "p")
    real, calls = os.rename, []

    def second_fails(source, target):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr("steerscope.lenses.formats.own.os.rename", second_fails)
    with pytest.raises(BadFile, match="Input/output error"):
        make(seed=2).save(tmp_path / "p")
    assert same(Pack.load(tmp_path / "p"), first)
    assert os.listdir(tmp_path) == ["p"]


def test_notes_that_are_not_json_are_refused():
    parts = info().model_dump()
    for notes in ({"x": float("nan")}, {"x": (1, 2)}, {"x": {1: 2}}, {"x": object()}):
        with pytest.raises(InvalidRequest, match=r"training\.x"):
            PackInfo(**{**parts, "training": notes})


# --- damaged files


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path):
    make([2, 3], hidden=6, widths=(3,)).save(tmp_path / "p")
    for name in ("concepts.json", "lenses.safetensors", "pack.json"):
        whole = (tmp_path / "p" / name).read_bytes()
        for size in range(0, len(whole), max(1, len(whole) // 25)):
            (tmp_path / "p" / name).write_bytes(whole[:size])
            with pytest.raises(BadFile, match=name.replace(".", r"\.")):
                Pack.load(tmp_path / "p", verify=False)
        (tmp_path / "p" / name).write_bytes(whole)
    Pack.load(tmp_path / "p")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_with_a_changed_byte_a_pack_is_refused_or_still_the_same(tmp_path_factory, data):
    """The same: a blank for a line break changes nothing."""
    folder = tmp_path_factory.mktemp("bytes") / "p"
    pack = make([2, 3], hidden=6, widths=(3,), **FULL)
    pack.save(folder)
    name = data.draw(st.sampled_from(["concepts.json", "lenses.safetensors", "pack.json"]))
    raw = bytearray((folder / name).read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(raw)
    back = load_or_refusal(folder)
    shutil.rmtree(folder)
    assert isinstance(back, BadFile) or same(back, pack)


def load_or_refusal(folder: Path) -> Pack | BadFile:
    try:
        pack = Pack.load(folder)
    except BadFile as error:
        return error
    return Pack(pack.info, pack.concepts, {name: tensor.clone() for name, tensor in pack.tensors.items()})


def test_a_changed_weight_is_refused_by_the_name_of_its_tensor(tmp_path: Path):
    make().save(tmp_path / "p")
    raw = bytearray((tmp_path / "p" / "lenses.safetensors").read_bytes())
    raw[-5] ^= 1
    (tmp_path / "p" / "lenses.safetensors").write_bytes(raw)
    with pytest.raises(BadFile, match="w2: has another checksum"):
        Pack.load(tmp_path / "p")


def test_every_problem_of_a_directory_is_in_one_error(tmp_path: Path):
    make(**FULL).save(tmp_path / "p")
    tensors = load_file(tmp_path / "p" / "lenses.safetensors")
    del tensors["w1"]
    tensors["b0"] = tensors["b0"][:5].clone()
    tensors["zzz"] = torch.zeros(1)
    save_file(tensors, tmp_path / "p" / "lenses.safetensors")
    (tmp_path / "p" / "concepts.json").write_text('{"concepts": [{"id": "a", "colour": 1}, {"level": -1}]}')
    with pytest.raises(BadFile) as caught:
        Pack.load(tmp_path / "p")
    text = str(caught.value)
    for expected in (
        "concepts.json",
        "colour",
        "[1].id",
        "level",
        "w1: is missing, pack.json says",
        "zzz: is float32 [1], pack.json says nothing",
        "b0: is",
    ):
        assert expected in text


def test_a_pack_that_was_edited_by_hand_is_refused(tmp_path: Path):
    make().save(tmp_path / "p")
    manifest = json.loads((tmp_path / "p" / "pack.json").read_text())
    manifest["info"]["layer"] = 7
    (tmp_path / "p" / "pack.json").write_text(json.dumps(manifest))
    with pytest.raises(BadFile, match="was changed"):
        Pack.load(tmp_path / "p")
    manifest["format_version"] = 2
    (tmp_path / "p" / "pack.json").write_text(json.dumps(manifest))
    with pytest.raises(BadFile, match="format_version"):
        Pack.load(tmp_path / "p")
    (tmp_path / "p" / "pack.json").rename(tmp_path / "p" / "pack_info.json")
    with pytest.raises(BadFile, match="use load_hatcat"):
        Pack.load(tmp_path / "p")


def test_a_pack_of_an_earlier_version_is_read(tmp_path: Path):
    """It has the sizes of its files and a summary of its hierarchy too."""
    make().save(tmp_path / "p")
    manifest = json.loads((tmp_path / "p" / "pack.json").read_text())
    manifest["hierarchy"] = {"levels": [3, 6], "roots": 3, "several_parents": 0}
    manifest["concepts"] = {"file": "concepts.json", "bytes": 1, "sha256": "0"}
    (tmp_path / "p" / "pack.json").write_text(json.dumps(manifest))
    assert same(Pack.load(tmp_path / "p"), make())


@pytest.mark.parametrize("name", ["concepts.json", "lenses.safetensors"])
def test_a_file_that_is_missing_is_named(tmp_path: Path, name: str):
    make().save(tmp_path / "p")
    (tmp_path / "p" / name).unlink()
    with pytest.raises(BadFile, match=f"{name}: is missing"):
        Pack.load(tmp_path / "p")


# --- where it fits


def test_a_pack_of_another_model_layer_or_site_is_refused_with_every_reason():
    pack = make()
    assert pack.check(24, 12, layer=3, site="resid_post", model="org/model") == []
    found = pack.check(32, 3, layer=4, site="mlp_out", model="org/another")
    assert [problem.field for problem in found] == ["hidden", "layer", "layer", "site", "model"]
    assert [problem.field for problem in pack.check(32, 12, model="org/another", any_model=True)] == ["hidden"]


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("org/model", True),
        ("Org/Model", True),
        ("model", True),
        ("/data/models/model", True),
        ("./model/", True),
        ("other/model", False),
        ("org/model-it", False),
        ("", False),
    ],
)
def test_models_are_compared_by_name(name: str, fits: bool):
    assert (make().check(24, 12, model=name) == []) is fits
