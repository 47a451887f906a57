"""The .pt files of prior systems: what each becomes, and that a hostile one never runs."""

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from steerscope.specs.errors import BadFile
from steerscope.specs.steering import Cap, VectorData
from steerscope.vectors import load
from steerscope.vectors.legacy import load_capping, load_chatspace, load_persona


def write(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, path)
    return path


# --- hostile files


class Touch:
    """Unpickled by a trusting reader, this creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_the_hostile_pickle_of_these_tests_does_run_in_a_trusting_reader(tmp_path: Path):
    path = write(tmp_path / "evil.pt", {"vector": Touch(tmp_path / "marker")})
    torch.load(path, weights_only=False)
    assert (tmp_path / "marker").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("reader", [load, load_capping, load_persona])
@pytest.mark.parametrize("protocol", [None, 0, 2, 4])
def test_a_pickle_with_code_is_refused_by_name_and_never_runs(tmp_path: Path, reader, protocol: int | None):
    path, marker = tmp_path / "evil.pt", tmp_path / "marker"
    data = {"vector": torch.ones(2), "evil": Touch(marker)} if protocol is None else Touch(marker)
    if protocol is None:
        torch.save(data, path)
    else:
        path.write_bytes(pickle.dumps(data, protocol))
    with pytest.raises(BadFile, match=r"evil\.pt was not opened.*wants to run code.*convert it"):
        reader(path)
    assert not marker.exists()


def test_a_chatspace_folder_with_a_hostile_vector_is_refused_and_never_runs(tmp_path: Path):
    write(tmp_path / "c" / "steering_vector.pt", {"steering_vector": Touch(tmp_path / "marker")})
    (tmp_path / "c" / "steering_config.json").write_text('{"target_layer": 3}')
    with pytest.raises(BadFile, match=r"steering_vector\.pt was not opened: it wants to run code \(posix\.system\)"):
        load(tmp_path / "c")
    assert not (tmp_path / "marker").exists()


def test_a_tiny_file_that_claims_a_huge_tensor_is_refused_without_allocating_it(tmp_path: Path):
    path = write(tmp_path / "huge.pt", {"pos_neg_50": torch.ones(1).expand(10**7, 10**5)})
    assert path.stat().st_size < 10_000
    with pytest.raises(BadFile, match=r"huge\.pt.*larger than the file"):
        load(path)


@pytest.mark.parametrize("data", [torch.ones(2, 2).to_sparse(), [1, 2], "text", {"a": 1}, {}, None, {1: {2: 3}}])
def test_a_file_without_a_known_vector_is_refused_by_name(tmp_path: Path, data: object):
    with pytest.raises(BadFile, match=r"odd\.pt"):
        load(write(tmp_path / "odd.pt", data))


def test_a_container_that_holds_itself_is_refused(tmp_path: Path):
    loop: dict = {}
    loop["loop"] = loop
    with pytest.raises(BadFile, match=r"loop\.pt"):
        load(write(tmp_path / "loop.pt", loop))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pt_file_cut_at_any_eighth_byte_is_refused_by_name(tmp_path: Path):
    path = write(tmp_path / "v.pt", {"pos_neg_50": torch.ones(3, 4)})
    whole = path.read_bytes()
    for size in range(0, len(whole), 8):
        path.write_bytes(whole[:size])
        with pytest.raises(BadFile, match=r"v\.pt"):
            load(path)


# --- plain tensors


def test_a_bare_tensor_is_shared_or_has_a_layer_per_row(tmp_path: Path):
    shared = load(write(tmp_path / "one.pt", torch.tensor([1.0, 2.0])))
    assert shared.layers is None
    assert shared[5].tolist() == [1.0, 2.0]
    axis = load(write(tmp_path / "axis.pt", torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)))
    assert axis.layers == (0, 1, 2)
    assert axis[1].tolist() == [2.0, 3.0]
    assert axis[1].dtype == torch.bfloat16


def test_a_role_file_of_the_assistant_axis_pipeline_keeps_its_role(tmp_path: Path):
    data = {"vector": torch.arange(4.0).reshape(2, 2), "type": "pos_3", "role": "pirate"}
    vector = load(write(tmp_path / "pirate.pt", data))
    assert vector.layers == (0, 1)
    assert vector.provenance == {"name": "pirate", "file": "pirate.pt", "type": "pos_3", "role": "pirate"}


def test_a_single_row_is_refused_because_it_may_be_any_layer(tmp_path: Path):
    with pytest.raises(BadFile, match=r"shape \[1, 4\]"):
        load(write(tmp_path / "row.pt", torch.ones(1, 4)))


# --- chatspace


def chatspace(folder: Path, data: object, config: object) -> Path:
    write(folder / "steering_vector.pt", data)
    (folder / "steering_config.json").write_text(json.dumps(config))
    return folder


TRAINED = {"model_name": "Qwen/Qwen3-32B", "target_layer": 22, "init_scale": 0.01}


def test_a_trained_chatspace_folder_is_one_layer_at_full_strength(tmp_path: Path):
    folder = chatspace(tmp_path / "kind", {"steering_vector": torch.tensor([3.0, 4.0])}, TRAINED)
    for vector in (load(folder), load(folder / "steering_vector.pt"), load_chatspace(folder)):
        assert vector.layers == (22,)
        assert vector[22].tolist() == [3.0, 4.0]  # init_scale is not a strength
        assert vector.model == "Qwen/Qwen3-32B"
        assert vector.provenance == {"name": "kind", "config": TRAINED}


def test_the_folder_of_a_chatspace_vllm_model_has_a_layer_per_entry(tmp_path: Path):
    data = {
        "layer_vectors": {7: torch.ones(2), 3: torch.zeros(2)},
        "steering_vector": torch.ones(2),
        "projection_caps": {},
        "ablations": {},
    }
    vector = load(chatspace(tmp_path, data, {"model_name": "Qwen/Qwen3-0.6B", "tensor_parallel_size": 1}))
    assert vector.layers == (3, 7)
    assert vector[7].tolist() == [1.0, 1.0]
    assert vector.model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("data", [torch.ones(2), {"vector": torch.ones(2)}])
def test_a_bare_tensor_and_the_short_names_are_taken_too(tmp_path: Path, data: object):
    vector = load(chatspace(tmp_path, data, {"model": "m", "layer": 5}))
    assert vector.layers == (5,)
    assert vector.model == "m"


@pytest.mark.parametrize(
    ("data", "config", "reason"),
    [
        ({"steering_vector": torch.ones(2)}, {"lr": 1, "n": 3}, "keys are lr, n, expected model_name.*target_layer"),
        ({"steering_vector": torch.ones(2)}, {"target_layer": [3]}, "does not say the layer"),
        ({"steering_vector": torch.ones(2)}, {"target_layer": -1}, "-1 is not a layer"),
        ({"steering_vector": torch.ones(2)}, {"target_layer": True}, "True is not a layer"),
        ({"steering_vector": torch.ones(2)}, 5, "not a readable chatspace config"),
        ({"steering_vector": None, "layer_vectors": {}}, TRAINED, "holds no vector.*steering_vector, layer_vectors"),
        ({"steering_vector": [1.0]}, TRAINED, "layer 22 is list"),
        ({"layer_vectors": {"a": torch.ones(2)}}, TRAINED, "'a' is not a layer"),
        ({"layer_vectors": {1: torch.ones(2)}, "projection_caps": {1: {}}}, TRAINED, "also holds projection_caps"),
        ({"steering_vector": torch.tensor([float("nan")])}, TRAINED, "NaN"),
    ],
)
def test_a_chatspace_folder_that_is_not_understood_says_why(tmp_path: Path, data: object, config: object, reason: str):
    with pytest.raises(BadFile, match=reason):
        load(chatspace(tmp_path, data, config))


def test_a_chatspace_vector_without_its_config_is_refused(tmp_path: Path):
    write(tmp_path / "steering_vector.pt", {"steering_vector": torch.ones(2)})
    with pytest.raises(BadFile, match=r"steering_config\.json beside it"):
        load(tmp_path)


# --- assistant-axis capping


def capping() -> dict:
    return {
        "vectors": {
            "layer_0/foo": {"vector": torch.tensor([1.0, 0.0], dtype=torch.float16), "layer": 0},
            "layer_1/bar": {"vector": torch.tensor([0.0, -3.0]), "layer": 1},
            "layer_1/baz": {"vector": torch.tensor([2.0, 2.0]), "layer": 1},
        },
        "experiments": [
            {"id": "b", "interventions": [{"vector": "layer_1/baz", "cap": -0.5}, {"vector": "layer_1/bar", "cap": 2}]},
            {"id": "a", "interventions": [{"vector": "layer_0/foo", "cap": torch.tensor(0.25)}]},
            {"id": "none", "interventions": []},
        ],
    }


def test_each_capping_experiment_becomes_upper_bounds_in_order_two_on_one_layer_included(tmp_path: Path):
    steerings = load_capping(write(tmp_path / "capping_config.pt", capping()))
    assert list(steerings) == ["b", "a", "none"]
    first, second = map(facts, steerings["b"].ops)
    assert first == (None, -0.5, {1: [2.0, 2.0]}, "resid_post", "all")
    assert second == (None, 2.0, {1: [0.0, -3.0]}, "resid_post", "all")
    assert [facts(op) for op in steerings["a"].ops] == [(None, 0.25, {0: [1.0, 0.0]}, "resid_post", "all")]
    assert steerings["none"].ops == ()


def facts(op: object) -> tuple:
    assert isinstance(op, Cap)
    assert isinstance(op.vector, VectorData)
    numbers = {layer: list(struct.unpack("<2f", data)) for layer, data in op.vector.per_layer.items()}
    return (op.min, op.max, numbers, op.site, op.tokens)


def broken(**changes: object) -> dict:
    return capping() | changes


def experiment(**intervention: object) -> list:
    return [{"id": "e", "interventions": [intervention]}]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (broken(experiments=experiment(vector="x", cap=1.0)), "'e' caps unknown vector 'x'; known are layer_0/foo, "),
        (broken(experiments=experiment(vector="layer_1/bar")), "'e' has cap None"),
        (broken(experiments=experiment(vector="layer_1/bar", cap="1")), "has cap '1'"),
        (broken(experiments=experiment(vector="layer_1/bar", cap=float("inf"))), "capping config"),
        (broken(experiments=experiment(vector=["layer_1/bar"], cap=1.0)), "capping config"),
        (broken(experiments=[*capping()["experiments"], *capping()["experiments"]]), "two experiments with the id 'b'"),
        (broken(experiments=[{"interventions": []}]), "capping config"),
        (broken(experiments=5), "capping config"),
        (broken(vectors={"v": {"vector": torch.ones(2)}}), "'v' needs the keys"),
        (broken(vectors={"v": {"vector": torch.ones(2), "layer": None}}), "'v' needs the keys"),
        (broken(vectors={"v": {"vector": torch.ones(2), "layer": "3"}}), "'3' is not a layer"),
        (broken(vectors={"v": {"vector": torch.ones(2, 2), "layer": 3}}), r"layer 3.*\[2, 2\]"),
        (broken(vectors={"v": {"vector": torch.zeros(2), "layer": 3}}), "'v'.*all zero"),
        ({"vectors": {}}, "found vectors"),
        (torch.ones(2), "found Tensor"),
    ],
)
def test_a_capping_config_with_a_fault_is_refused_with_the_place(tmp_path: Path, data: object, reason: str):
    path = write(tmp_path / "capping_config.pt", data)
    with pytest.raises(BadFile, match=reason) as caught:
        load_capping(path)
    assert "capping_config.pt" in str(caught.value)


def test_load_sends_a_capping_config_to_its_own_reader(tmp_path: Path):
    with pytest.raises(BadFile, match=r"capping_config\.pt is a capping config.*use .*load_capping"):
        load(write(tmp_path / "capping_config.pt", capping()))


# --- persona files


def block(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((3, 2), value, dtype=dtype)


def role(dtype: torch.dtype = torch.float32) -> dict:
    return {f"pos_{k}": block(v, dtype) for k, v in {"0": 1.0, "1": 2.0, "2": 3.0, "3": 10.0, "all": 5.0}.items()}


DEFAULTS = {"activations": {"default_1": block(4.0), "pos_1": block(99.0), "all_1": block(7.0)}, "metadata": {"n": 1}}


def values(vector) -> list[float]:
    assert vector.layers == (0, 1, 2)
    return [float(vector[layer][0]) for layer in vector.layers]


@pytest.mark.parametrize("place", ["roles/vectors", "roles"])
def test_a_role_is_pos_3_minus_the_default_beside_it_or_one_folder_up(tmp_path: Path, place: str):
    write(tmp_path / "roles" / "default_vectors.pt", DEFAULTS)
    path = write(tmp_path / place / "pirate.pt", role())
    for vector in (load(path), load_persona(path)):
        assert values(vector) == [6.0] * 3
        assert vector.provenance == {"name": "pirate", "file": "pirate.pt", "key": "pos_3-default_1"}


def test_a_default_inside_the_role_file_is_used_when_there_is_no_other(tmp_path: Path):
    path = write(tmp_path / "v" / "pirate.pt", role() | {"default_1": block(1.0)})
    assert values(load(path)) == [9.0] * 3
    given = write(tmp_path / "given.pt", {"default_1": block(2.0)})
    assert values(load_persona(path, default=given)) == [8.0] * 3


def test_a_given_default_wins_over_the_one_beside_the_file(tmp_path: Path):
    write(tmp_path / "default_vectors.pt", DEFAULTS)
    path = write(tmp_path / "pirate.pt", role())
    given = write(tmp_path / "mine.pt", {"default_1": block(1.0)})
    assert values(load_persona(path, default=given)) == [9.0] * 3


def test_a_trait_is_pos_neg_50_and_needs_no_default(tmp_path: Path):
    (tmp_path / "default_vectors.pt").write_bytes(b"not needed, so not read")
    path = write(tmp_path / "calm.pt", {"pos_neg": block(1.0), "pos_neg_50": block(2.0), "pos_default": block(3.0)})
    assert values(load(path)) == [2.0] * 3
    assert values(load_persona(path, "pos_default")) == [3.0] * 3


def test_what_was_not_judged_is_taken_as_a_whole(tmp_path: Path):
    write(tmp_path / "default_vectors.pt", DEFAULTS)
    for data, key, value in (
        ({"pos_1": block(2.0), "pos_all": block(5.0)}, "pos_all-default_1", 1.0),
        ({"pos_neg": block(3.0), "pos_default": block(7.0), "pos_70": block(9.0)}, "pos_neg", 3.0),
    ):
        vector = load(write(tmp_path / "one.pt", data))
        assert (values(vector), vector.provenance["key"]) == ([value] * 3, key)


def test_keys_and_differences_can_be_chosen_and_the_own_file_goes_first(tmp_path: Path):
    write(tmp_path / "default_vectors.pt", DEFAULTS)
    path = write(tmp_path / "pirate.pt", role())
    assert values(load_persona(path, "pos_1")) == [2.0] * 3  # not the pos_1 of default_vectors.pt
    assert values(load_persona(path, "pos_3 - pos_0")) == [9.0] * 3
    assert values(load_persona(path, "pos_all-all_1")) == [-2.0] * 3
    assert values(load_persona(tmp_path / "default_vectors.pt", "default_1")) == [4.0] * 3


def test_a_difference_of_bfloat16_files_is_taken_in_float32(tmp_path: Path):
    data = {"pos_3": block(256.0, torch.bfloat16), "default_1": block(0.5, torch.bfloat16)}
    vector = load(write(tmp_path / "v.pt", data))
    assert vector[0].dtype == torch.float32
    assert values(vector) == [255.5] * 3  # bfloat16 would give 256


def test_rows_become_layers_in_order(tmp_path: Path):
    vector = load(write(tmp_path / "t.pt", {"pos_neg_50": torch.arange(6.0).reshape(3, 2)}))
    assert [vector[layer].tolist() for layer in range(3)] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("data", "key", "reason"),
    [
        (role(), None, r"has no default_1; keys are pos_0, .*pos_all.*no default_vectors\.pt is near"),
        (role(), "pos_9", "has no pos_9; keys are pos_0, pos_1, pos_2, pos_3, pos_all"),
        (role(), "pos_9-pos_8", "has no pos_9 and no pos_8"),
        (role(), "pos_3-pos_2-pos_1", "one key, or two"),
        ({"x": block(1.0)}, None, "neither a role .* nor a trait .* choose a key of x"),
        ({"pos_3": block(1.0), "default_1": torch.ones(4, 2)}, None, r"subtracts \[4, 2\] from \[3, 2\]"),
        ({"pos_neg_50": block(float("nan"))}, None, "NaN"),
        ({"pos_neg_50": block(1).long()}, None, "int64"),
    ],
)
def test_a_persona_file_that_cannot_answer_says_why(tmp_path: Path, data: dict, key: str | None, reason: str):
    path = write(tmp_path / "sub" / "pirate.pt", data)
    with pytest.raises(BadFile, match=reason) as caught:
        load_persona(path, key)
    assert "pirate.pt" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_zeros_counts_as_missing(tmp_path: Path, dtype: torch.dtype):
    """Other programs write zeros where no answer reached a score: as a measurement it would give -default_1."""
    write(tmp_path / "default_vectors.pt", DEFAULTS)
    unmeasured = write(tmp_path / "pirate.pt", role(dtype) | {"pos_3": block(0.0, dtype)})
    vector = load(unmeasured)
    assert (values(vector), vector.provenance["key"]) == ([1.0] * 3, "pos_all-default_1")
    trait = load(write(tmp_path / "calm.pt", {"pos_neg_50": block(-0.0, dtype), "pos_neg": block(2.0, dtype)}))
    assert (values(trait), trait.provenance["key"]) == ([2.0] * 3, "pos_neg")
    shadowed = write(tmp_path / "sailor.pt", role(dtype) | {"pos_3": block(0.0, dtype), "pos_1": block(0.0, dtype)})
    with pytest.raises(BadFile, match="has no pos_1"):  # not the pos_1 of default_vectors.pt
        load_persona(shadowed, "pos_1")
    for key in ("pos_3", "pos_3-default_1", "pos_all-pos_3"):
        with pytest.raises(BadFile, match=r"has no pos_3; keys are .* \(pos_3: all zeros, so not measured\)"):
            load_persona(unmeasured, key)


def test_a_default_of_zeros_is_not_subtracted(tmp_path: Path):
    path = write(tmp_path / "v" / "pirate.pt", role() | {"default_1": block(0.0)})
    with pytest.raises(BadFile, match=r"has no default_1; .*\(default_1: all zeros, so not measured\)"):
        load(path)
    given = write(tmp_path / "given.pt", {"default_1": block(0.0)})
    with pytest.raises(BadFile, match=r"has no default_1; .*\(default_1: all zeros, so not measured\)"):
        load_persona(path, default=given)
    write(tmp_path / "v" / "default_vectors.pt", DEFAULTS)
    assert values(load(path)) == [6.0] * 3


def test_a_layer_that_is_zero_in_either_block_is_left_out(tmp_path: Path):
    score, default = block(10.0), block(4.0)
    score[0], default[2] = 0.0, 0.0
    vector = load(write(tmp_path / "pirate.pt", {"pos_3": score, "default_1": default}))
    assert vector.layers == (1,)
    assert vector[1].tolist() == [6.0, 6.0]
    score[1] = 0.0
    with pytest.raises(BadFile, match=r"pirate\.pt: pos_3-default_1 has no layer that was measured"):
        load(write(tmp_path / "pirate.pt", {"pos_3": score, "default_1": default}))


def test_a_file_of_nothing_but_zeros_says_so(tmp_path: Path):
    with pytest.raises(BadFile, match=r"choose a key of none \(pos_3, pos_all: all zeros, so not measured\)"):
        load(write(tmp_path / "pirate.pt", {"pos_3": block(0.0), "pos_all": block(0.0)}))


def test_a_compressed_file_is_not_unpacked(tmp_path: Path):
    """torch reads it, and a file of 40 kB becomes 40 MB, or as much more as a stranger likes."""
    plain, packed = write(tmp_path / "plain.pt", torch.zeros(10_000_000)), tmp_path / "packed.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert packed.stat().st_size < plain.stat().st_size / 900
    assert torch.load(packed, weights_only=True).numel() == 10_000_000
    with pytest.raises(BadFile, match="it is compressed, as torch.save never does; save it anew"):
        load(packed)
