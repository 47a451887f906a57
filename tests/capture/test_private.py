"""Copies of rows: every element, whatever their layout, in fresh memory or in what the caller brings."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from steerscope.capture import handle as module
from steerscope.capture.handle import private, private_bytes
from steerscope.capture.rows import Rows
from steerscope.core.rows import make_labels
from steerscope.specs.errors import InvalidRequest


def rows_of(*tensors: Tensor, reduce: str | None = None) -> Rows:
    labels = make_labels("r", np.arange(len(tensors[0])), [1] * len(tensors[0]), len(tensors[0]), None, False)
    return Rows({(i, "resid_post"): tensor for i, tensor in enumerate(tensors)}, labels, "tiny", reduce)


@pytest.fixture
def some() -> list[Rows]:
    """Contiguous; two layers of one pool; one dtype beside another; reduced; empty."""
    draw = torch.Generator().manual_seed(0)
    pool = torch.randn(40, 3, 16, generator=draw).bfloat16()
    return [
        rows_of(torch.randn(7, 16, generator=draw)),
        rows_of(pool[:, 0], pool[:, 2]),
        rows_of(torch.randn(5, 3, generator=draw).bfloat16(), torch.randn(5, 3, generator=draw).double()),
        rows_of(torch.randn(16, generator=draw), reduce="mean"),
        rows_of(torch.zeros(0, 16)),
    ]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("part", [1, 64, 4 << 20])
@pytest.mark.parametrize("given", [False, True])
def test_every_element_is_copied(
    some: list[Rows], threads: int, part: int, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART", part)
    room = torch.full((private_bytes(some),), 255, dtype=torch.uint8) if given else None
    found = private(some, room, threads)
    spans: list[tuple[int, int]] = []
    for mine, theirs in zip(found, some, strict=True):
        assert (mine.labels, mine.reduce, mine.model) == (theirs.labels, theirs.reduce, theirs.model)
        for key, tensor in theirs.tensors.items():
            copy = mine[key]
            assert copy.dtype == tensor.dtype
            assert copy.is_contiguous()
            assert torch.equal(copy, tensor)
            spans.append((copy.data_ptr(), copy.data_ptr() + copy.nbytes))
    filled = sorted(span for span in spans if span[0] < span[1])
    assert all(left[1] <= right[0] for left, right in zip(filled, filled[1:], strict=False))
    for theirs in some:  # and nothing of theirs was shared
        for tensor in theirs.tensors.values():
            tensor.zero_()
    assert not torch.equal(found[0][0], some[0][0])


def test_sites_of_one_tap_are_one_tensor_here_too(some: list[Rows]) -> None:
    tensor = some[0][0]
    both = rows_of(tensor, tensor)
    assert private_bytes([both]) == private_bytes([rows_of(tensor)])
    for room in (None, torch.zeros(private_bytes([both]), dtype=torch.uint8)):
        (found,) = private([both], room)
        assert found[0].data_ptr() == found[1].data_ptr() != tensor.data_ptr()
        assert torch.equal(found[1], tensor)


def test_rows_are_kept_by_themselves(some: list[Rows]) -> None:
    """In fresh memory: keeping the rows of one request does not keep all others'."""
    found = private(some)
    assert found[0][0].untyped_storage().nbytes() == private_bytes(some[:1])


def test_columns_of_a_tensor_can_be_copied() -> None:
    wide = torch.arange(40.0).view(5, 8)
    rows = rows_of(wide[:, ::2], wide.T.contiguous().T)
    for found in (private([rows]), private([rows], torch.zeros(private_bytes([rows]), dtype=torch.uint8))):
        assert torch.equal(found[0][0], wide[:, ::2])
        assert torch.equal(found[0][1], wide)


def test_threads_share_one_long_tensor(some: list[Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    real = module._copy

    def copy(part: tuple[Tensor, Tensor]) -> None:
        both.wait(10)  # broken, unless two are here at once
        real(part)

    monkeypatch.setattr(module, "_PART", some[0][0].nbytes // 2 + 64)
    monkeypatch.setattr(module, "_copy", copy)
    assert torch.equal(private(some[:1], threads=2)[0][0], some[0][0])


def test_the_copy_outlives_what_it_was_made_from(some: list[Rows]) -> None:
    wanted = some[0][0].clone()
    found = private(some[:1])[0][0]
    del some[:]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "room",
    [
        torch.zeros(8, dtype=torch.uint8),
        torch.zeros(100_000),
        torch.zeros(100_000, dtype=torch.uint8)[::2],
        torch.zeros(100_000, dtype=torch.uint8)[1:],
        torch.zeros(1000, 100, dtype=torch.uint8),
        torch.zeros(100_000, dtype=torch.uint8, device="meta"),
    ],
)
def test_memory_that_does_not_do_is_refused(some: list[Rows], room: Tensor) -> None:
    with pytest.raises(InvalidRequest, match=f"contiguous tensor of {private_bytes(some)} bytes"):
        private(some, room)
