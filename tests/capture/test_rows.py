"""Rows in hand and on disk: access that teaches, files that are exact, whole, or refused."""

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from steerscope.capture.rows import Rows, load_rows
from steerscope.core.rows import make_labels
from steerscope.core.slot_table import Key
from steerscope.specs.errors import BadFile, InvalidRequest, SteerscopeError
from steerscope.specs.tokens import MessageSpan

SPANS = (MessageSpan(0, "system", (0, 1), (0, 1)), MessageSpan(1, "user", (1, 3), None))
KEYS: list[Key] = [(4, "resid_post"), (4, "attn_out"), (9, "resid_post"), (9, "attn_out")]


def make(
    n: int = 5,
    keys: list[Key] = KEYS,
    dtype: torch.dtype = torch.float32,
    reduce: str | None = None,
    spans: tuple[MessageSpan, ...] | None = SPANS,
) -> Rows:
    """Tensors are views of one block, as an engine makes them: [rows, keys, hidden]."""
    labels = make_labels("r1", np.arange(n), list(range(50, 50 + max(n, 4))), 3, spans, False)
    generator = torch.Generator().manual_seed(n)
    block = torch.randn(*([] if reduce else [n]), len(keys), 6, generator=generator).to(dtype)
    return Rows({key: block[..., j, :] for j, key in enumerate(keys)}, labels, "tiny", reduce, spans)


def same(a: Rows, b: Rows) -> bool:
    """Bit for bit, labels and all."""
    assert a.tensors.keys() == b.tensors.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        assert a[key].shape == b[key].shape
        assert a[key].contiguous().view(torch.uint8).tolist() == b[key].contiguous().view(torch.uint8).tolist()
    assert list(a.labels) == list(b.labels)
    assert a.labels.roles == b.labels.roles
    return (a.model, a.reduce, a.messages, a.n) == (b.model, b.reduce, b.messages, b.n)


# --- access


def test_rows_are_found_by_layer_and_site_and_by_layer_alone_where_one_site_was_captured():
    rows = make()
    assert rows[9, "attn_out"].shape == (5, 6)
    one = make(keys=[(4, "mlp_out"), (9, "mlp_out")])
    assert torch.equal(one[9], one[9, "mlp_out"])
    assert torch.equal(one[np.int64(9)], one[9])  # type: ignore[index]
    assert (rows.layers, rows.sites, rows.n, len(rows)) == ((4, 9), ("resid_post", "attn_out"), 5, 4)
    assert list(rows) == KEYS


@pytest.mark.parametrize("key", [(7, "resid_post"), (4, "mlp_out"), (-1, "resid_post"), ("x", "y")])
def test_rows_that_were_not_captured_are_refused_with_what_was(key):
    with pytest.raises(
        InvalidRequest, match="was not captured; captured: layers .4, 9., sites .'resid_post', 'attn_out'"
    ):
        make()[key]
    assert key not in make()


@pytest.mark.parametrize("key", [7, -1, "x", "resid_post"])
def test_a_layer_that_was_not_captured_is_refused_with_those_that_were(key):
    rows = make(keys=[(4, "mlp_out")])
    with pytest.raises(InvalidRequest, match=f"layer {key} at mlp_out was not captured; captured: layers .4,."):
        rows[key]
    assert key not in rows


def test_a_layer_alone_is_refused_where_several_sites_were_captured():
    with pytest.raises(InvalidRequest, match="2 sites were captured; name one of"):
        make()[4]


def test_what_was_captured_can_be_asked_for():
    rows = make()
    assert (4, "attn_out") in rows
    assert 9 in rows
    assert [key for key, _ in rows.items()] == KEYS


def test_messages_of_reduced_rows_are_refused():
    with pytest.raises(InvalidRequest, match="rows were reduced to one; capture without reduce"):
        make(reduce="mean").message(0)


# --- files


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    n=st.integers(0, 6),
    keys=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["resid_pre", "resid_post", "attn_out"])),
        min_size=1,
        max_size=4,
        unique=True,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    spans=st.sampled_from([SPANS, (), None]),
    reduce=st.sampled_from([None, "mean", "last"]),
)
def test_rows_survive_a_file_bit_for_bit_labels_included(tmp_path_factory, n, keys, dtype, spans, reduce):
    rows = make(n, keys, dtype, reduce, spans)
    path = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    assert rows.save(path) == path
    assert same(load_rows(path), rows)


def test_nan_inf_and_negative_zero_survive_a_file(tmp_path: Path):
    tensor = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]])
    rows = Rows({(0, "resid_post"): tensor}, make_labels("r", np.arange(1), [7], 1, None, False), "m")
    assert same(load_rows(rows.save(tmp_path / "rows")), rows)


@pytest.mark.parametrize(("n", "reduce"), [(5, "mean"), (5, "last"), (1, None), (5, None)])
def test_sites_that_come_from_one_tap_are_saved_though_they_share_memory(tmp_path: Path, n: int, reduce: str | None):
    """resid_pre of layer 1 is resid_post of layer 0: an engine gives the same tensor under both names."""
    block = torch.randn(*([] if reduce else [n]), 2, 6, generator=torch.Generator().manual_seed(0))
    shared, own = block[..., 0, :], block[..., 1, :]
    tensors: dict[Key, torch.Tensor] = {(0, "resid_post"): shared, (1, "resid_pre"): shared, (1, "resid_post"): own}
    rows = Rows(tensors, make_labels("r", np.arange(n), [7] * 5, 3, None, False), "m", reduce)
    assert same(load_rows(rows.save(tmp_path / "rows")), rows)


def test_a_file_is_plain_safetensors_that_others_can_read(tmp_path: Path):
    rows = make()
    tensors = load_file(rows.save(tmp_path / "rows.safetensors"))
    assert torch.equal(tensors["layer.9.attn_out"], rows[9, "attn_out"])
    assert tensors["label.position"].tolist() == [0, 1, 2, 3, 4]


def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_permissions(tmp_path: Path):
    path = tmp_path / "rows"
    usual = os.umask(0o022)
    try:
        make().save(path)
    finally:
        os.umask(usual)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o664)
    make().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_loaded_rows_outlive_their_file(tmp_path: Path):
    rows = make()
    loaded = load_rows(rows.save(tmp_path / "rows"))
    make(n=2).save(tmp_path / "rows")
    (tmp_path / "rows").unlink()
    assert same(loaded, rows)


# --- what goes wrong


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, part: float):
    whole = make(n=50).save(tmp_path / "whole").read_bytes()
    path = tmp_path / "short"
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(BadFile, match=str(path)):
        load_rows(path)


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path: Path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(BadFile, match=str(path)):
            load_rows(path)


def test_a_safetensors_file_of_something_else_is_refused_with_what_was_expected(tmp_path: Path):
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(BadFile, match="holds no captured rows: expected format steerscope-rows-1, found None"):
        load_rows(path)


def tampered(path: Path, change) -> Path:
    """The file of good rows with its tensors and header changed."""
    from safetensors import safe_open

    make().save(path)
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    change(tensors, header)
    save_file(tensors, path, metadata=header)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda t, _: t.pop("label.position"),
        lambda t, _: t.update({"layer.x.resid_post": torch.ones(5, 6)}),
        lambda t, _: t.update({"layer.3": torch.ones(5, 6)}),
        lambda t, _: t.update({"layer.3.nowhere": torch.ones(5, 6)}),
        lambda t, _: t.update({"layer.4.resid_post": torch.ones(4, 6)}),  # fewer rows than labels
        lambda t, _: t.update({"label.token_id": torch.ones(4, dtype=torch.int64)}),
        lambda _, h: h.pop("roles"),
        lambda _, h: h.update(roles="not json"),
        lambda _, h: h.update(roles="[]"),  # labels speak of messages that have no role
        lambda _, h: h.update(messages='[["a"]]'),
        lambda _, h: h.update(messages="3"),
        lambda _, h: h.pop("model"),
    ],
    ids=[
        "label missing",
        "layer not a number",
        "site missing",
        "site unknown",
        "rows against labels",
        "labels of two lengths",
        "roles missing",
        "roles not json",
        "roles too few",
        "messages malformed",
        "messages not a list",
        "model missing",
    ],
)
def test_a_file_whose_parts_do_not_fit_together_is_refused_by_name(tmp_path: Path, change):
    path = tampered(tmp_path / "rows", change)
    with pytest.raises(BadFile, match=str(path)):
        load_rows(path)


def test_a_header_that_claims_gigabytes_is_refused(tmp_path: Path):
    path = tmp_path / "hostile"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(BadFile):
        load_rows(path)


def test_saving_where_there_is_no_folder_says_so(tmp_path: Path):
    with pytest.raises(BadFile, match="does not exist; create it first"):
        make().save(tmp_path / "no" / "rows")


MEMORY = """
import resource, sys
import numpy as np, torch
from steerscope.capture.rows import Rows
from steerscope.core.rows import make_labels

block = torch.ones(4000, 8, 4096, dtype=torch.bfloat16)  # 250 MiB, strided as an engine's rows are
labels = make_labels("r", np.arange(4000), [7] * 4000, 9, None, False)
rows = Rows({(j, "resid_post"): block[:, j] for j in range(8)}, labels, "m")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(3):
    assert sum(map(len, rows.file().pieces())) == rows.file().size > 250 << 20
rows.save(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_file_is_made_without_a_copy_of_the_rows(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "rows")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 20 << 10, "KiB beyond the 250 MiB that the rows take"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    n=st.integers(0, 700),
    reduce=st.sampled_from([None, "mean"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cuts=st.lists(st.integers(0, 10**6), min_size=2, max_size=2),
)
def test_any_range_of_the_bytes_is_that_part_of_the_file(tmp_path_factory, n, reduce, dtype, cuts):
    rows = make(n, dtype=dtype, reduce=reduce)
    whole = rows.save(tmp_path_factory.mktemp("rows") / "rows.safetensors").read_bytes()
    file = rows.file()
    start, stop = sorted(cut % (len(whole) + 1) for cut in cuts)
    assert (file.size, b"".join(file.pieces(start, stop))) == (len(whole), whole[start:stop])


FULL_DISK = """
import resource, signal, sys
import numpy as np, torch
from steerscope.capture.rows import Rows
from steerscope.core.rows import make_labels
from steerscope.specs.errors import SteerscopeError

labels = make_labels("r", np.arange(100), [7] * 100, 9, None, False)
rows = Rows({(0, "resid_post"): torch.ones(100, 1000)}, labels, "m")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for path in sys.argv[1:]:
    try:
        rows.save(path)
    except SteerscopeError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file_whole_and_nothing_half_written(tmp_path: Path):
    """The limit on file size makes the kernel refuse the write in the middle, as a full disk does."""
    path = tmp_path / "rows"
    make().save(path)
    before = path.read_bytes()
    targets = [str(path), str(tmp_path / "new")]
    done = subprocess.run([sys.executable, "-c", FULL_DISK, *targets], capture_output=True, text=True, check=False)
    assert done.stdout.count("File too large") == 2, done.stderr
    for target, line in zip(targets, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"BadFile cannot write {target}: ")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rows"]


def test_a_disk_that_reports_late_leaves_the_old_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "rows"
    make().save(path)
    before = path.read_bytes()

    def late(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", late)
    with pytest.raises(SteerscopeError, match=f"cannot write {path}: No space left on device"):
        make(n=3).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rows"]
