"""The text form of a steering."""

from pathlib import Path

import pytest
import torch

from steerscope import Ablate, Add, Cap, InvalidRequest, SteeringVector, save_vector
from steerscope.specs import VectorData
from steerscope.vectors.text import FORMS, joined, parse


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_vector(SteeringVector({1: torch.ones(4), 2: torch.ones(4)}, site="mlp_out"), "v.safetensors")
    return tmp_path


def op(text: str) -> Add | Cap | Ablate:
    (only,) = parse(text).steering.ops
    return only


@pytest.mark.parametrize(
    ("text", "layers", "scale"),
    [
        ("v.safetensors", None, 1),
        ("v.safetensors@2", (2,), 1),
        ("v.safetensors:6", None, 6),
        ("v.safetensors@1-2:-1.5e1", (1, 2), -15),
        ("v.safetensors@1,2:0", (1, 2), 0),
        ("v.safetensors@all:2", "all", 2),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_vector_is_added(text: str, layers: object, scale: float) -> None:
    found = op(text)
    assert isinstance(found, Add)
    assert (found.layers, found.scale, found.site, found.tokens) == (layers, scale, "mlp_out", "all")
    assert found.vector == SteeringVector({1: torch.ones(4), 2: torch.ones(4)}).to_spec()


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [("-1..2.5", -1, 2.5), ("..3", None, 3), ("-2..", -2, None), ("0..0", 0, 0), (".5...75", 0.5, 0.75)],
)
@pytest.mark.usefixtures("folder")
def test_a_cap_has_one_or_two_bounds(bounds: str, low: float | None, high: float | None) -> None:
    found = op(f"v.safetensors@1:cap={bounds}")
    assert isinstance(found, Cap)
    assert (found.layers, found.min, found.max) == ((1,), low, high)


@pytest.mark.parametrize(("text", "kept"), [("ablate", 0), ("ablate=0.5", 0.5)])
@pytest.mark.usefixtures("folder")
def test_a_direction_is_ablated(text: str, kept: float) -> None:
    found = op(f"v.safetensors:{text}")
    assert isinstance(found, Ablate)
    assert (found.layers, found.scale) == (None, kept)


@pytest.mark.parametrize("strength", ["", ":2", ":cap=..1", ":ablate"])
@pytest.mark.usefixtures("folder")
def test_a_selector_follows_any_form(strength: str) -> None:
    assert op(f"v.safetensors@1{strength};tokens=positions=[0, 4:8] & !role=user").tokens == (
        "positions=[0,4:8] & !role=user"
    )


@pytest.mark.parametrize("name", ["a@b", "a:b", "x@3:4", "a#b", "a;b", "a b"])
def test_the_signs_may_be_part_of_an_existing_path(folder: Path, name: str) -> None:
    inner = folder / name
    inner.mkdir()
    vector = SteeringVector({1: torch.ones(4), 2: torch.ones(4)})
    for file in (inner / "v.safetensors", folder / f"{name}.safetensors"):
        save_vector(vector, file)
        for text in (str(file), f"{file}@2", f"{file}:3", f"{file}@2:3", f"{file}@2:cap=..3;tokens=prompt"):
            assert parse(text).path == str(file)
        found = op(f"{file}@2:3")
        assert isinstance(found, Add)
        assert (found.layers, found.scale) == ((2,), 3)


@pytest.mark.usefixtures("folder")
def test_a_file_whose_name_looks_like_layers_wins_over_the_shorter_one() -> None:
    save_vector(SteeringVector({3: torch.ones(4)}), "v.safetensors@2.safetensors")
    Path("v.safetensors@2.safetensors").rename("v.safetensors@2")
    assert parse("v.safetensors@2").path == "v.safetensors@2"
    assert parse("v.safetensors@1").path == "v.safetensors"


def test_a_chatspace_folder_is_a_vector_too(folder: Path) -> None:
    chatspace = folder / "run@1"
    chatspace.mkdir()
    torch.save({"steering_vector": torch.ones(4)}, chatspace / "steering_vector.pt")
    (chatspace / "steering_config.json").write_text('{"model_name": "m", "target_layer": 3}')
    found = op(f"{chatspace}:2")
    assert isinstance(found, Add)
    assert isinstance(found.vector, VectorData)
    assert list(found.vector.per_layer) == [3]


@pytest.fixture
def capping(folder: Path) -> str:
    vectors = {f"v{layer}": {"vector": torch.ones(4), "layer": layer} for layer in (1, 2)}
    caps = [{"vector": "v1", "cap": 0.25}, {"vector": "v2", "cap": 0.5}]
    experiments = [{"id": "layers_1:3-p0.25", "interventions": caps}, {"id": "one", "interventions": caps[:1]}]
    torch.save({"vectors": vectors, "experiments": experiments}, folder / "capping_config.pt")
    return "capping_config.pt"


def test_an_experiment_of_a_capping_config_gives_its_caps(capping: str) -> None:
    ops = parse(f"{capping}#layers_1:3-p0.25;tokens=generated").steering.ops
    assert [(found.op, found.max, found.tokens) for found in ops if isinstance(found, Cap)] == [
        ("cap", 0.25, "generated"),
        ("cap", 0.5, "generated"),
    ]
    assert len(parse(f"{capping}#one").steering.ops) == 1


def test_an_unknown_experiment_is_refused_with_the_known_ones(capping: str) -> None:
    with pytest.raises(InvalidRequest, match=r"no experiment 'two'; it has layers_1:3-p0.25, one"):
        parse(f"{capping}#two")


@pytest.mark.usefixtures("folder")
def test_steerings_are_joined_in_order() -> None:
    ops = joined([parse("v.safetensors:2"), parse("v.safetensors:ablate")]).ops
    assert [found.op for found in ops] == ["add", "ablate"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gone.safetensors", "there is no file 'gone.safetensors'"),
        ("gone.safetensors@1-2:3", "there is no file 'gone.safetensors'"),
        ("gone.safetensors:cap=1..2", "there is no file 'gone.safetensors'"),
        ("gone.pt#a", "there is no file 'gone.pt'"),
        ("", "there is no file ''"),
        ("folder@2/gone.safetensors:3", "there is no file 'folder@2/gone.safetensors'"),
        ("v.safetensors:x", "'x' is not a strength"),
        ("v.safetensors@1:cap=5", "'cap=5' is not a strength"),
        ("v.safetensors@1:cap=a..b", "'cap=a..b' is not a strength"),
        ("v.safetensors@1:ablate=", "'ablate=' is not a strength"),
        ("v.safetensors:1:2", "'1:2' is not a strength"),
        ("v.safetensors@", "cannot read '@' after v.safetensors"),
        ("v.safetensors:", "cannot read ':' after v.safetensors"),
        ("v.safetensors@1@2:3", "cannot read '@1@2:3' after v.safetensors"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_forms(folder: Path, text: str, what: str) -> None:
    (folder / "folder").mkdir()
    with pytest.raises(InvalidRequest) as caught:
        parse(text)
    (problem,) = caught.value.problems
    assert (problem.field, problem.what, problem.remedy) == (f"steer {text!r}", what, FORMS)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("v.safetensors@x:1", "layers: 'x' is not a layer"),
        ("v.safetensors@2-1:1", "layers: layer range '2-1' runs backwards"),
        ("v.safetensors@1:cap=2..1", "min 2 is above max 1"),
        ("v.safetensors@1:cap=..", "a cap needs min, max or both"),
        ("v.safetensors:nan", "scale: "),
        ("v.safetensors:1;tokens=some", "tokens: 'some' is not a selector"),
        ("v.safetensors:1;tokens=", "tokens: unexpected end"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_the_library_refuses_is_told_with_the_text(text: str, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text)
    (problem,) = caught.value.problems
    assert problem.field.startswith(f"steer {text!r}")
    assert part in str(problem)
