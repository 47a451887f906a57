"""HatCat packs: all variants of its files give the scores of its own modules."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lenses.packs import rows
from steerscope.lenses import Pack
from steerscope.lenses.bank import Bank
from steerscope.lenses.formats.hatcat import load_hatcat
from steerscope.specs.errors import BadFile

HIDDEN = 12


def lens(seed: int, affine: bool = False) -> nn.Sequential:
    """As HatCat builds it."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = [nn.Linear(HIDDEN, 8), nn.ReLU(), nn.Dropout(0.2)]
    parts += [nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4, 1)]
    if affine:
        norm = nn.LayerNorm(HIDDEN)
        norm.weight.data = 1 + torch.randn(HIDDEN) / 2
        norm.bias.data = torch.randn(HIDDEN) / 2
        parts.insert(0, norm)
    return nn.Sequential(*parts).eval()


def state(module: nn.Sequential, prefix: str = "net.") -> dict[str, Tensor]:
    return {f"{prefix}{key}": tensor for key, tensor in module.state_dict().items()}


def score(module: nn.Sequential, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(nn.functional.layer_norm(x, (HIDDEN,))).sigmoid().flatten()


@pytest.fixture
def modules() -> dict[str, nn.Sequential]:
    names = ["Thing:0", "Animal:1", "Plant:1", "Dog:2", "Rose:2"]
    return {name: lens(i, affine=i % 2 == 1) for i, name in enumerate(names)}


@pytest.fixture
def folder(tmp_path: Path, modules: dict[str, nn.Sequential]) -> Path:
    """A pack with plain and affine lenses, old and new keys, and both ways to name a file."""
    path = tmp_path / "hatcat"
    for i, (key, module) in enumerate(modules.items()):
        name, level = key.split(":")
        file = path / f"layer{level}" / (f"{name}_classifier.pt" if i % 3 == 0 else f"{name}.pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state(module, "" if i == 2 else "net."), file)
    write(path / "pack_info.json", {"model": "google/gemma-3-4b-pt", "source_pack": "sumo", "pack_version": "3"})
    return path


def write(file: Path, data: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data))


def assert_scores(pack: Pack, modules: dict[str, nn.Sequential]) -> None:
    x = rows(6, HIDDEN)
    found = Bank(pack).probabilities(x)
    for key, module in modules.items():
        torch.testing.assert_close(found[:, pack.index(key)], score(module, x), atol=1e-5, rtol=0)


def test_every_variant_of_a_file_gives_the_scores_of_its_module(folder, modules):
    pack = load_hatcat(folder, layer=14)
    assert_scores(pack, modules)
    assert pack.tensors["normed"].sum() == 2
    assert (pack.info.model, pack.info.layer, pack.info.version) == ("google/gemma-3-4b-pt", 14, "3")
    assert pack.info.architecture.widths == (8, 4)
    assert [pack.level(n) for n in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 5)]


def test_files_in_a_folder_of_classifiers_and_half_precision_are_read(tmp_path: Path):
    modules = {f"C{i}:0": lens(i).bfloat16() for i in range(2)}
    (tmp_path / "layer0" / "classifiers").mkdir(parents=True)
    for key, module in modules.items():
        torch.save(state(module), tmp_path / "layer0" / "classifiers" / f"{key[:2]}_classifier.pt")
    pack = load_hatcat(tmp_path, layer=1, model="m")
    assert pack.tensors["w0"].dtype == torch.bfloat16
    assert torch.equal(pack.tensors["w0"][1], modules["C1:0"][0].weight)
    assert_scores(pack, {key: module.float() for key, module in modules.items()})


# --- the hierarchy


def test_hierarchy_json_gives_first_and_further_parents(folder):
    links = {"Animal:1": "Thing:0", "Plant:1": "Thing:0", "Dog:2": "Animal:1", "Rose:2": "Plant:1"}
    more = {"Thing:0": ["Animal:1", "Plant:1"], "Animal:1": ["Dog:2", "Rose:2"]}
    write(folder / "hierarchy.json", {"child_to_parent": links, "parent_to_children": more})
    pack = load_hatcat(folder, layer=14)
    assert pack.concepts[pack.index("Rose")].parents == ("Plant:1", "Animal:1")
    assert pack.path(pack.index("Dog")) == ("Thing", "Animal", "Dog")
    assert "parents_left_out" not in pack.info.training


def test_lists_of_concepts_give_parents_by_name_and_definitions(folder, tmp_path):
    concepts = tmp_path / "concepts"
    first = [{"sumo_term": "Thing", "layer": 0, "category_children": ["Animal", "Missing"]}]
    write(concepts / "hierarchy" / "layer0.json", {"concepts": first})
    second = [{"sumo_term": "Plant", "parent_concepts": ["Thing", "Rose"], "definition": "grows"}]
    write(concepts / "hierarchy" / "layer1.json", second)
    write(concepts / "hierarchy" / "layer2.json", {"concepts": [{"sumo_term": "Dog", "parent_concepts": ["Animal"]}]})
    pack = load_hatcat(folder, layer=14, concept_pack=concepts)
    parents = {concept.id: concept.parents for concept in pack.concepts}
    assert parents["Animal:1"] == parents["Plant:1"] == ("Thing:0",)
    assert parents["Dog:2"] == ("Animal:1",)
    assert parents["Rose:2"] == ()
    assert pack.concepts[pack.index("Plant")].definition == "grows"
    assert pack.info.training["parents_left_out"] == 2, "Missing has no lens, and Rose is below Plant"


def test_a_name_on_two_levels_means_the_nearest_above(tmp_path: Path):
    for i, (name, level) in enumerate([("A", 0), ("A", 1), ("B", 2)]):
        (tmp_path / f"layer{level}").mkdir(exist_ok=True)
        torch.save(state(lens(i)), tmp_path / f"layer{level}" / f"{name}.pt")
    write(tmp_path / "layer2.json", [{"sumo_term": "B", "parent_concepts": ["A"]}])
    pack = load_hatcat(tmp_path, layer=1, model="m")
    assert pack.concepts[pack.index("B")].parents == ("A:1",)


# --- calibration and measures


def test_calibration_is_read_and_what_it_lacks_changes_nothing(folder, modules):
    entries = {
        "Thing_L0": {"self_mean": 0.9, "cross_mean": 0.3, "confidence": 0.5},
        "Animal_L1": {"self_mean": 0.6, "cross_mean": 0.0},
        "Dog_L2": {"self_mean": 0.4, "cross_mean": 0.7},
    }
    write(folder / "calibration.json", {"calibration": entries})
    pack = load_hatcat(folder, layer=14)
    x = rows(30, HIDDEN)
    found = Bank(pack).scores(x)
    raw = {key: score(module, x) for key, module in modules.items()}
    for key in ("Plant:1", "Dog:2"):  # no entry, and one that would turn scores around
        torch.testing.assert_close(found[:, pack.index(key)], raw[key], atol=1e-5, rtol=0)
    line = (raw["Animal:1"] / 0.6).clamp(max=1)
    torch.testing.assert_close(found[:, pack.index("Animal")], line, atol=1e-5, rtol=0)
    thing = torch.where(raw["Thing:0"] < 0.3, raw["Thing:0"] / 0.6, 0.5 + (raw["Thing:0"] - 0.3) / 1.2).clamp(max=1)
    torch.testing.assert_close(found[:, pack.index("Thing")], thing / 2, atol=1e-5, rtol=0)


def test_measures_and_the_layer_are_found_where_hatcat_keeps_them(folder):
    write(folder / "layer1" / "results.json", {"Animal": {"test_f1": 0.8, "accuracy": 0.9, "note": "x"}})
    write(folder / "pack_info.json", {"model_info": {"model_id": "m"}, "lens_pack_id": "name", "model_layer": 15})
    pack = load_hatcat(folder)
    assert pack.concepts[pack.index("Animal")].metrics == {"f1": 0.8, "accuracy": 0.9}
    assert pack.info.layer == 14, "hidden_states[15] is what layer 14 leaves behind"
    assert pack.info.name == "name"


# --- what is refused


def test_every_bad_file_is_named_in_one_error(folder):
    good = state(lens(9))
    (folder / "layer1" / "Cut.pt").write_bytes((folder / "layer1" / "Animal.pt").read_bytes()[:700])
    (folder / "layer1" / "Text.pt").write_text("hello")
    torch.save(torch.ones(3), folder / "layer1" / "Tensor.pt")
    torch.save({**good, "net.3.weight": torch.ones(4, 9)}, folder / "layer2" / "Chain.pt")
    torch.save({**good, "net.9.running": torch.ones(4)}, folder / "layer2" / "Keys.pt")
    torch.save({**good, "net.0.bias": torch.full((8,), torch.nan)}, folder / "layer2" / "Nan.pt")
    torch.save(state(nn.Sequential(nn.Linear(HIDDEN, 1))), folder / "layer2" / "Small.pt")
    torch.save(good, folder / "layer2" / "Economics@L19.pt")
    torch.save(good, folder / "layer2" / "Dog_classifier.pt")
    torch.save(good, folder / "layer2" / "Dog.pt")
    (folder / "pack_info.json").write_text("[")
    with pytest.raises(BadFile) as caught:
        load_hatcat(folder)
    text = str(caught.value)
    names = ("Cut", "Text", "Tensor", "Chain", "Keys", "Nan", "Small", "Economics@L19", "2 files of 'Dog'")
    for name in (*names, "pack_info.json", "pass model", "pass layer"):
        assert name in text
    for fine in ("Animal.pt", "Thing", "Rose"):
        assert fine not in text


def test_a_file_that_would_run_code_is_not_opened(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"net.0.weight": Evil()}, folder / "layer1" / "Evil.pt")
    with pytest.raises(BadFile, match=r"Evil\.pt.*run code"):
        load_hatcat(folder, layer=14)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_pack_is_refused(tmp_path):
    with pytest.raises(BadFile, match="there are none"):
        load_hatcat(tmp_path, layer=1, model="m")
    with pytest.raises(BadFile, match="no directory"):
        load_hatcat(tmp_path / "nowhere", layer=1, model="m")
