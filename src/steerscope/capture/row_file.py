"""The file of captured rows as bytes, made in small pieces from the tensors' memory.

The format is safetensors: the length of a JSON header, the header, then the tensors. Only one piece is copied at a
time, so writing or sending a capture of gigabytes needs a few hundred KiB.
"""

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_PIECE_BYTES = 256 << 10
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


class RowFile:
    """The bytes of one safetensors file, made on demand. Tensors may be views that share memory."""

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        # The widest dtypes first, so that each tensor is aligned to its item size.
        ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._parts: list[tuple[int, Tensor]] = []  # offset in the file, tensor
        at = 0
        for name in ordered:
            tensor = tensors[name]
            size = tensor.numel() * tensor.element_size()
            header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
            self._parts.append((at, tensor))
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._parts = [(len(self._head) + begin, tensor) for begin, tensor in self._parts]
        self.size = len(self._head) + at

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop`."""
        stop = self.size if stop is None else stop
        if start < len(self._head):
            yield self._head[start:stop]
        for begin, tensor in self._parts:
            yield from _bytes_of(tensor, max(0, start - begin), stop - begin)


def _bytes_of(tensor: Tensor, start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes of one tensor, a few rows at a time."""
    rows = tensor if tensor.dim() > 1 else tensor[None]
    row_bytes = rows[0].numel() * rows.element_size() if len(rows) else 0
    stop = min(stop, len(rows) * row_bytes)
    if start >= stop:
        return
    n_rows = max(1, _PIECE_BYTES // row_bytes)
    for first in range(start // row_bytes, -(-stop // row_bytes), n_rows):
        piece = rows[first : first + n_rows].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        at = first * row_bytes
        yield piece[max(0, start - at) : stop - at]
