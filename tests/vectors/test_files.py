"""Saving and loading steering vectors: every bit survives, nothing is half-written, bad files are refused by name."""

import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from steerscope.files import atomic_path
from steerscope.specs.errors import BadFile
from steerscope.vectors import SteeringVector, load, save

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


def bits(vector: SteeringVector) -> dict:
    """The raw bits of every direction: -0.0 and 0.0 differ here, as they do not in torch.equal."""
    return {layer: (t.dtype, t.view(BITS[t.dtype]).tolist()) for layer, t in vector.directions.items()}


def meta(vector: SteeringVector) -> tuple:
    return (vector.model, vector.site, vector.method, vector.provenance)


def some_vector(dtype: torch.dtype = torch.float32) -> SteeringVector:
    torch.manual_seed(0)
    directions: dict[int | None, torch.Tensor] = {layer: torch.randn(8).to(dtype) for layer in (1, 4, 12)}
    return SteeringVector(directions, "org/model", method="mean difference", provenance={"name": "joy", "n": [1, 2.5]})


@st.composite
def vectors(draw, first_layer: int = 0, shared: bool = True, sites: tuple = ("resid_post", "attn_out")):
    dtype = draw(st.sampled_from(list(BITS)))
    hidden = draw(st.integers(1, 6))
    layers: list = draw(st.lists(st.integers(first_layer, 200), min_size=1, max_size=4, unique=True))
    if shared and draw(st.booleans()):
        layers = [None]
    direction = st.lists(FLOATS, min_size=hidden, max_size=hidden).map(lambda x: finite(x, dtype))
    text = st.none() | st.text(max_size=8)
    value = st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=8)
    tree = st.recursive(value, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3))
    return SteeringVector(
        {layer: draw(direction) for layer in layers},
        draw(text),
        draw(st.sampled_from(sites)),
        draw(text),
        draw(st.dictionaries(st.text(max_size=8), tree, max_size=3)),
    )


def finite(numbers: list[float], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    return torch.where(torch.isfinite(tensor), tensor, torch.ones_like(tensor))


# --- round trips


@settings(max_examples=60, deadline=None)
@given(vector=vectors())
def test_safetensors_gives_back_every_bit_and_all_metadata(vector: SteeringVector):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v.safetensors"
        save(vector, path)
        back = load(path)
    assert bits(back) == bits(vector)
    assert meta(back) == meta(vector)


@settings(max_examples=60, deadline=None)
@given(vector=vectors(first_layer=1, shared=False, sites=("resid_post",)))
def test_gguf_gives_back_metadata_and_every_bit_except_that_float64_becomes_float32(vector: SteeringVector):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v.gguf"
        save(vector, path)
        back = load(path)
    rounded = {k: t.float() if t.dtype == torch.float64 else t for k, t in vector.directions.items()}
    assert bits(back) == bits(SteeringVector(rounded))
    assert meta(back) == meta(vector)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_negative_zero_subnormals_and_extremes_survive_bit_for_bit(tmp_path: Path, dtype: torch.dtype, suffix: str):
    info = torch.finfo(dtype)
    smallest = torch.ones(2, dtype=BITS[dtype]).view(dtype)  # the bit pattern 1: the smallest subnormal
    others = torch.tensor([-0.0, 0.0, info.max, info.min, info.tiny, -info.tiny / 2], dtype=dtype)
    vector = SteeringVector({3: torch.cat([others, smallest])})
    assert bits(vector)[3][1][0] == torch.iinfo(BITS[dtype]).min, "the input itself must hold -0.0"
    save(vector, tmp_path / f"v{suffix}")
    assert bits(load(tmp_path / f"v{suffix}")) == bits(vector)


def test_layers_that_share_memory_can_be_saved(tmp_path: Path):
    vector = SteeringVector.shared(torch.tensor([1.0, 2.0])).at("4-6")
    save(vector, tmp_path / "v.safetensors")
    assert load(tmp_path / "v.safetensors").layers == (4, 5, 6)


def test_a_loaded_vector_does_not_change_when_its_file_does(tmp_path: Path):
    for path in (tmp_path / "v.safetensors", tmp_path / "v.gguf"):
        save(some_vector(), path)
        back = load(path)
        path.write_bytes(b"\0" * path.stat().st_size)
        assert bits(back) == bits(some_vector())


def test_the_content_decides_when_the_suffix_is_wrong(tmp_path: Path):
    for good, other in (("v.gguf", "v.safetensors"), ("w.safetensors", "w.bin")):
        save(some_vector(), tmp_path / good)
        os.rename(tmp_path / good, tmp_path / other)
        assert bits(load(tmp_path / other)) == bits(some_vector())


@settings(max_examples=30, deadline=None)
@given(vector=vectors(first_layer=1, shared=False, sites=("resid_post",)))
def test_equal_vectors_have_equal_bytes_under_any_name_in_every_format(vector: SteeringVector):
    """Key order is no part of a vector: the second one has its layers and its provenance the other way round."""
    turned = SteeringVector(
        dict(reversed(vector.directions.items())),
        vector.model,
        vector.site,
        vector.method,
        dict(reversed(vector.provenance.items())),
    )
    for suffix in (".safetensors", ".gguf"):
        found = set()
        for number in range(6):  # an order by chance would have to fall alike six times
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"v{number}{suffix}"
                save((vector, turned)[number % 2], path)
                found.add(path.read_bytes())
                assert load(path).model == vector.model
        assert len(found) == 1


def test_another_process_writes_the_same_bytes(tmp_path: Path):
    """Hashes of text differ between processes."""
    code = (
        "import sys, torch, steerscope as ss\n"
        "about = {name: [1.5, {name: None}] for name in sorted({'a', 'b', 'c', 'd'}, key=hash)}\n"
        "vector = ss.SteeringVector({3: torch.ones(5), 2: -torch.ones(5)}, 'm', method='x', provenance=about)\n"
        "[ss.save_vector(vector, sys.argv[1] + suffix) for suffix in ('.safetensors', '.gguf')]\n"
    )
    for name in "12":
        environment = {**os.environ, "PYTHONHASHSEED": name}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True, env=environment)
    for suffix in (".safetensors", ".gguf"):
        assert (tmp_path / f"1{suffix}").read_bytes() == (tmp_path / f"2{suffix}").read_bytes()


def test_the_sorted_header_is_a_valid_one_for_other_readers(tmp_path: Path):
    save(some_vector(), tmp_path / "v.safetensors")
    data = (tmp_path / "v.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    assert list(header) == sorted(header)
    tensors = load_file(tmp_path / "v.safetensors")
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        f"layer.{layer}": direction.tolist() for layer, direction in some_vector().directions.items()
    }


# --- the GGUF convention


def write_gguf(path: Path, tensors: dict[str, np.ndarray], arch: str = "controlvector", **strings: str) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in strings.items():
        writer.add_string(key.replace("__", "."), value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_direction_n_is_layer_n_in_a_file_as_repeng_writes_it(tmp_path: Path):
    directions = {f"direction.{layer}": np.full(4, layer, np.float32) for layer in (27, 3, 1)}
    write_gguf(tmp_path / "r.gguf", directions, controlvector__model_hint="mistral")
    vector = load(tmp_path / "r.gguf")
    assert vector.layers == (1, 3, 27)
    assert [float(vector[layer][0]) for layer in (1, 3, 27)] == [1.0, 3.0, 27.0]
    assert vector.site == "resid_post"
    assert vector.model is None
    assert vector.provenance["model_hint"] == "mistral"


def test_the_written_gguf_has_the_keys_and_tensors_that_llama_cpp_and_repeng_look_for(tmp_path: Path):
    save(some_vector(torch.bfloat16), tmp_path / "v.gguf")
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    values = {key: reader.fields[key].contents() for key in reader.fields}
    assert values["general.architecture"] == "controlvector"
    assert values["controlvector.model_hint"] == "org/model"
    assert values["controlvector.layer_count"] == 3
    assert [tensor.name for tensor in reader.tensors] == ["direction.1", "direction.4", "direction.12"]
    for tensor, layer in zip(reader.tensors, (1, 4, 12), strict=True):
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert tensor.data.tolist() == some_vector(torch.bfloat16)[layer].tolist()


def test_a_vector_without_a_model_still_has_the_model_hint_repeng_insists_on(tmp_path: Path):
    save(SteeringVector({1: torch.ones(2)}), tmp_path / "v.gguf")
    field = gguf.GGUFReader(tmp_path / "v.gguf").get_field("controlvector.model_hint")
    assert field is not None
    assert field.contents() == "unknown"
    assert load(tmp_path / "v.gguf").model is None


def test_a_direction_0_of_another_program_is_layer_0_and_the_other_numbers_stay(tmp_path: Path):
    write_gguf(tmp_path / "z.gguf", {f"direction.{i}": np.full(2, i + 1, np.float32) for i in (2, 0, 1)})
    vector = load(tmp_path / "z.gguf")
    assert {layer: direction.tolist() for layer, direction in vector.directions.items()} == {
        0: [1.0, 1.0],
        1: [2.0, 2.0],
        2: [3.0, 3.0],
    }
    save(vector, tmp_path / "z.safetensors")
    assert load(tmp_path / "z.safetensors").equals(vector)


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        (SteeringVector({0: torch.ones(2), 1: torch.ones(2)}), "direction.0"),
        (SteeringVector.shared(torch.ones(2)), "no shared direction"),
        (SteeringVector({1: torch.ones(2)}, site="attn_out"), "not at attn_out"),
        (SteeringVector({1: torch.tensor([1e300], dtype=torch.float64)}), "beyond float32"),
    ],
)
def test_what_gguf_cannot_say_is_refused_and_no_file_appears(tmp_path: Path, vector: SteeringVector, reason: str):
    with pytest.raises(BadFile, match=reason):
        save(vector, tmp_path / "v.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_language_model_gguf_is_refused_by_name_before_its_vocabulary_is_read(tmp_path: Path):
    path = tmp_path / "llama.gguf"
    write_gguf(path, {"token_embd.weight": np.ones((4, 4), np.float32)}, arch="llama")
    path.write_bytes(path.read_bytes()[:70])  # cut after the architecture: reading on would end in another message
    with pytest.raises(BadFile, match=r"llama\.gguf.*architecture 'llama'.*not a control vector"):
        load(path)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"direction.1": np.ones(2, np.float16)}, "F16"),
        ({"direction.1": np.ones((2, 2), np.float32)}, r"\[2, 2\]"),
        ({"direction.x": np.ones(2, np.float32)}, "direction.x"),
        ({"output.weight": np.ones(2, np.float32)}, "output.weight"),
        ({"direction.1": np.ones(2, np.float32), "direction.2": np.ones(3, np.float32)}, "sizes differ"),
        ({"direction.1": np.array([1.0, np.nan], np.float32)}, "NaN"),
        ({}, "there are none"),
    ],
)
def test_a_gguf_with_other_tensors_is_refused_with_the_reason(tmp_path: Path, tensors: dict, reason: str):
    write_gguf(tmp_path / "v.gguf", tensors)
    with pytest.raises(BadFile, match=rf"v\.gguf.*{reason}"):
        load(tmp_path / "v.gguf")


def test_a_gguf_that_promises_an_endless_array_is_refused_at_once(tmp_path: Path):
    key = b"a"
    array = struct.pack("<QsIIQ", len(key), key, 9, 0, 2**60)  # an array of 2**60 bytes that are not in the file
    (tmp_path / "v.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array)
    with pytest.raises(BadFile, match="promises at least"):
        load(tmp_path / "v.gguf")


# --- foreign and hostile safetensors


def test_a_single_one_dimensional_tensor_of_others_is_a_shared_vector(tmp_path: Path):
    save_file({"whatever": torch.arange(4.0)}, tmp_path / "f.safetensors")
    vector = load(tmp_path / "f.safetensors")
    assert vector.layers is None
    assert vector[7].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert vector.provenance == {"name": "f", "file": "f.safetensors", "tensor": "whatever"}


def test_a_single_two_dimensional_tensor_of_others_has_a_layer_per_row(tmp_path: Path):
    save_file({"x": torch.arange(6.0).reshape(3, 2)}, tmp_path / "f.safetensors")
    vector = load(tmp_path / "f.safetensors")
    assert vector.layers == (0, 1, 2)
    assert vector[2].tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a": torch.ones(2), "b": torch.ones(2)}, r"2 tensors \(a, b\)"),
        ({"a": torch.ones(1, 4)}, r"shape \[1, 4\]"),
        ({"a": torch.ones(2, 2, 2)}, r"shape \[2, 2, 2\]"),
        ({"a": torch.ones(10**15, 0)}, "shape"),
        ({"a": torch.ones(3, dtype=torch.int64)}, "int64"),
        ({"a": torch.tensor([float("inf")])}, "NaN or infinity"),
    ],
)
def test_an_ambiguous_safetensors_of_others_is_refused_with_the_reason(tmp_path: Path, tensors: dict, reason: str):
    save_file(tensors, tmp_path / "f.safetensors")
    with pytest.raises(BadFile, match=rf"f\.safetensors.*{reason}"):
        load(tmp_path / "f.safetensors")


@pytest.mark.parametrize(
    ("changes", "tensors", "reason"),
    [
        ({"version": "2"}, {}, "version 2.*update steerscope"),
        ({"metadata": "{"}, {}, "not a readable"),
        ({"metadata": "[" * 100_000}, {}, "not a readable"),
        ({"metadata": json.dumps({"site": "moon", "model": 5})}, {}, "(?s)site.*model|model.*site"),
        ({}, {"layer.-1": torch.ones(2)}, "layer.-1"),
        ({}, {"layer.01": torch.ones(2)}, "layer.01"),
        ({}, {"extra": torch.ones(2)}, "extra"),
        ({}, {"shared": torch.ones(2)}, "mixed"),
        ({}, {"layer.2": torch.ones(2).to(torch.float8_e5m2)}, "float8"),
    ],
)
def test_a_file_that_breaks_the_format_it_claims_is_refused(tmp_path: Path, changes: dict, tensors: dict, reason: str):
    header = {"format": "steerscope-vector", "version": "1", "metadata": "{}"} | changes
    save_file({"layer.1": torch.ones(2)} | tensors, tmp_path / "f.safetensors", header)
    with pytest.raises(BadFile, match=reason) as caught:
        load(tmp_path / "f.safetensors")
    assert "f.safetensors" in str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_a_file_cut_at_any_eighth_byte_is_refused_by_name(tmp_path: Path, suffix: str):
    path = tmp_path / f"v{suffix}"
    save(some_vector(), path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 8):
        path.write_bytes(whole[:size])
        with pytest.raises(BadFile, match=f"v{suffix}"):
            load(path)


def load_or_refusal(path: Path) -> SteeringVector | BadFile:
    try:
        return load(path)
    except BadFile as error:
        return error


@settings(max_examples=150, deadline=None)
@given(data=st.data(), suffix=st.sampled_from([".safetensors", ".gguf"]))
def test_damaged_bytes_give_a_vector_or_bad_file_and_nothing_else(data: st.DataObject, suffix: str):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"v{suffix}"
        save(some_vector(), path)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        result = load_or_refusal(path)
    assert path.name in str(result) if isinstance(result, BadFile) else result.hidden >= 1


@pytest.mark.parametrize("name", ["v.txt", "missing.safetensors", "folder"])
def test_what_is_no_vector_file_is_refused_by_name(tmp_path: Path, name: str):
    (tmp_path / "v.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadFile, match=name):
        load(tmp_path / name)


def test_a_suffix_or_a_provenance_that_cannot_be_kept_is_refused_before_writing(tmp_path: Path):
    with pytest.raises(BadFile, match=r"unknown suffix '\.pt'"):
        save(some_vector(), tmp_path / "v.pt")
    for lost in ({"x": (1, 2)}, {"x": float("nan")}, {"x": torch.ones(1)}, {"x": {1: "int key"}}):
        with pytest.raises(BadFile, match="plain JSON"):
            save(SteeringVector({1: torch.ones(2)}, provenance=lost), tmp_path / "v.safetensors")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# --- atomic writing


@contextmanager
def files_limited_to(size: int):
    """The kernel refuses to let any file grow past `size` bytes (EFBIG), as a full disk does with ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
@pytest.mark.parametrize("room", [0, 100, 4096, 20_000])
def test_a_write_that_runs_out_of_room_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, suffix: str, room: int):
    path = tmp_path / f"v{suffix}"
    save(some_vector(), path)
    before = path.read_bytes()
    big = SteeringVector({layer: torch.ones(4096) for layer in range(1, 5)})
    reason = "(File too large|not all of it could be written)"
    with files_limited_to(room), pytest.raises(BadFile, match=f"cannot write .*v{suffix}: {reason}"):
        save(big, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    save(big, path)
    assert bits(load(path)) == bits(big)


def test_a_failing_block_leaves_the_old_file_and_its_error_passes_through(tmp_path: Path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_target_changes_only_when_the_block_ends(tmp_path: Path):
    path = tmp_path / "x.bin"
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert path.read_bytes() == b"new"


def test_an_atomic_write_keeps_permissions_follows_symlinks_and_honours_the_umask(tmp_path: Path):
    target, link, fresh = tmp_path / "target.bin", tmp_path / "link.bin", tmp_path / "fresh.bin"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    with atomic_path(link) as temporary:
        temporary.write_bytes(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o640
    with atomic_path(fresh) as temporary:
        temporary.write_bytes(b"new")
    plain = tmp_path / "plain.bin"
    plain.write_bytes(b"")
    assert fresh.stat().st_mode == plain.stat().st_mode


def test_a_missing_folder_or_a_folder_as_target_is_one_clear_error(tmp_path: Path):
    with pytest.raises(BadFile, match="nowhere does not exist"):
        save(some_vector(), tmp_path / "nowhere" / "v.safetensors")
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(BadFile, match=r"cannot write .*d\.safetensors"):
        save(some_vector(), tmp_path / "d.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["d.safetensors"]


def test_of_a_file_with_too_many_tensors_none_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Perhaps a whole model, or a header of a million tensors of no size."""
    read: list[object] = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: read.append(tensor))
    empty = {f"layer.{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10_001)}
    path = tmp_path / "many.safetensors"
    for about in ({}, {"__metadata__": {"format": "steerscope-vector", "version": "1"}}):
        header = json.dumps({**about, **empty}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(BadFile, match="holds 10001 tensors"):
            load(path)
    assert read == []
