"""Stack: the weights of many lenses side by side, evaluated together.

The first layer of all lenses is one matrix product, [lenses · width, hidden] × [hidden, rows]; later layers are batched
products. Hidden states are [lenses, width, rows]: with rows last all operands are contiguous, which on a CPU is three
times as fast as rows first.

Weights are stored as float32, bfloat16, or int8 with one scale per output. The last of several layers stays float32:
it is small, and rounding shows most there. Arithmetic is float32 on a CPU; on a GPU it is bfloat16 with float32 sums,
unless weights are float32. Weights stored in another type are converted tile by tile.

On a GPU, one Triton kernel (`fused`) evaluates up to 64 rows of bfloat16 or int8 lenses. It is compared with the matrix
products when the stack is made, and is not used if it differs. An evaluation never synchronises and no shape depends
on a value, so that it can be captured in a CUDA graph.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from steerscope.lenses.spec import EPSILON, PackInfo
from steerscope.lenses.tensors import PER_LENS, layout
from steerscope.specs.errors import InvalidRequest, Problem

log = logging.getLogger("steerscope")
Weights = Literal["fp32", "bf16", "int8"]
WORKSPACE = 256 << 20
_STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_MIN_CAPABILITY = (8, 0)
_MAX_ERROR = 0.03  # relative to the largest logit: another order of rounding makes up to 0.008
_CONVERTED = 8 << 20  # bytes of weights that are converted at a time on a CPU, so that they stay in its cache
_MAX_ROWS = 1024  # of one tile: enough for any matrix product to be efficient


class SlotRange(NamedTuple):
    """Consecutive slots whose lenses take the same input: rows normalised once more (`normed`) or not."""

    start: int
    stop: int
    normed: bool


class Tiles(NamedTuple):
    rows: int
    lenses: int


class Stack:
    """Weights of `slots` lenses on a device. `write` fills slots, `logits` evaluates ranges of them."""

    def __init__(
        self, info: PackInfo, slots: int, device: torch.device, weights: Weights = "fp32", workspace: int = WORKSPACE
    ) -> None:
        if weights not in get_args(Weights):
            known = ", ".join(get_args(Weights))
            raise InvalidRequest([Problem("weights", f"{weights!r} is unknown", f"choose one of {known}")])
        self.info = info
        self.slots = slots
        self.device = device
        self.weights = weights
        self.workspace = workspace
        self.compute = torch.bfloat16 if weights != "fp32" and device.type != "cpu" else torch.float32
        self.depth = len(info.architecture.widths) + 1
        self.tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape, dtype in self._parts()}
        smallest = self.workspace_bytes(1, 1)
        if workspace < smallest:
            what = f"{workspace} bytes do not hold one row and one lens"
            raise InvalidRequest([Problem("workspace", what, f"give at least {smallest}")])
        self.kernels = available_kernels(device)
        if self.kernels is not None and slots and not self._kernels_agree(self.kernels):
            self.kernels = None

    def _kernels_agree(self, kernels: ModuleType) -> bool:
        """Return whether kernels give the logits of the matrix products, on random lenses in the last two slots.

        This also compiles the kernels, so that no request waits for the compiler.
        """
        run = SlotRange(max(0, self.slots - 2), self.slots, False)
        here = slice(run.start, run.stop)
        generator = torch.Generator().manual_seed(0)
        shapes = layout(self.info, run.stop - run.start).items()
        random = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes}
        self.write(here, self.encode(random))
        errors: list[float] = []
        try:
            for n_rows in (most - 1 for most in kernels.ROWS if self._evaluates(kernels, most)):
                rows = torch.randn(n_rows, self.info.hidden, generator=generator).to(self.device)
                inputs = self.inputs(rows, [run])[False]
                found = rows.new_full((n_rows, run.stop - run.start), torch.nan)
                kernels.evaluate(self.tensors, inputs, run.start, run.stop, found)
                expected = self._tile(inputs, run.start, run.stop).T
                errors.append(float((found - expected).abs().max() / expected.abs().max()))
        except Exception as error:
            warn_unused(f"{type(error).__name__}: {error}")
            return False
        finally:
            for tensor in self.tensors.values():
                tensor[here].zero_()
        if not all(error <= _MAX_ERROR for error in errors):  # a NaN is an error too
            warn_unused(f"they are off by {', '.join(f'{error:.2g}' for error in errors)} of the largest logit")
            return False
        return True

    def _evaluates(self, kernels: ModuleType, n_rows: int) -> bool:
        return kernels.evaluates(n_rows, self.info.architecture.widths, self.compute)

    def _stored(self, i: int) -> torch.dtype:
        return torch.float32 if i and i == self.depth - 1 else _STORED[self.weights]

    def _computed(self, i: int) -> torch.dtype:
        return torch.float32 if i and i == self.depth - 1 else self.compute

    def _parts(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        shapes = layout(self.info, self.slots)
        for i in range(self.depth):
            yield f"w{i}", shapes[f"w{i}"], self._stored(i)
            yield f"b{i}", shapes[f"b{i}"], self._computed(i)
            if self._stored(i) == torch.int8:
                yield f"s{i}", shapes[f"b{i}"], self._computed(i)
        for name in PER_LENS:
            yield name, (self.slots,), torch.float32

    @property
    def lens_bytes(self) -> int:
        """Return the bytes of one lens on the device."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) // max(1, self.slots)

    # --- filling

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a pack's tensors, of any lenses, as this stack stores them, with a neutral calibration if absent."""
        lenses = len(tensors["w0"])
        result: dict[str, Tensor] = {}
        for i in range(self.depth):
            weight, bias = tensors[f"w{i}"], tensors[f"b{i}"]
            if self._stored(i) == torch.int8:
                weight, scale = quantise(weight)
                result[f"s{i}"] = scale.to(self._computed(i))
            result[f"w{i}"] = weight.to(self._stored(i))
            result[f"b{i}"] = bias.to(self._computed(i))
        neutral = {"low": 0.0, "high": 0.0, "confidence": 1.0, "floor": -torch.inf, "threshold": 0.0}
        for name, value in neutral.items():
            result[name] = tensors[name] if name in tensors else torch.full((lenses,), value)
        return result

    def write(self, slots: slice, encoded: Mapping[str, Tensor], non_blocking: bool = False) -> None:
        """Write encoded lenses into as many slots."""
        for name, tensor in self.tensors.items():
            tensor[slots].copy_(encoded[name], non_blocking=non_blocking)

    # --- evaluating

    def workspace_bytes(self, rows: int, lenses: int) -> int:
        """Return an upper bound of the memory, beside its result, of an evaluation of that many rows and lenses."""
        hidden, widths = self.info.hidden, self.info.architecture.widths
        inputs = rows * hidden * (2 * 4 + 2 * self.compute.itemsize)  # plain and normalised, as float32 and cast
        sizes = [hidden, *widths, 1]
        wide = 4 if self.compute == torch.float32 else 6  # the last layer's input exists narrow and wide
        pairs = [rows * (into * wide + out * 4) for into, out in zip(sizes[1:], sizes[2:], strict=False)]
        states = max([*pairs, rows * 8])  # two layers' states live at a time
        widened = [
            into * out * self._computed(i).itemsize
            for i, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False))
            if self._stored(i) != self._computed(i)
        ]
        return inputs + lenses * (states + max(widened, default=0))

    def tiles(self, rows: int) -> Tiles:
        """Return how many rows and lenses are evaluated together, so that the workspace suffices."""
        most = max(1, min(rows, _MAX_ROWS))
        while most > 1 and self.workspace_bytes(most, min(8, self.slots)) > self.workspace:
            most = (most + 1) // 2
        inputs, one = self.workspace_bytes(most, 0), self.workspace_bytes(most, 1)
        lenses = (self.workspace - inputs) // (one - inputs)
        if self.device.type == "cpu" and self.weights != "fp32":
            lens_bytes = 4 * self.info.hidden * (self.info.architecture.widths or (1,))[0]
            lenses = min(lenses, _CONVERTED // lens_bytes)
        return Tiles(most, max(1, min(lenses, self.slots)))

    def inputs(self, rows: Tensor, runs: Sequence[SlotRange]) -> dict[bool, Tensor]:
        """Return the input of lenses that normalise once more (True) and of the others (False), where runs need it."""
        needed = {run.normed for run in runs}
        layernorm = self.info.normalisation == "layernorm"
        if layernorm and needed == {False} and rows.dtype == self.compute:
            return {False: _layer_norm(rows)}  # its sums are float32 in any dtype
        plain = _layer_norm(rows.float()) if layernorm else rows.float()
        return {normed: (_layer_norm(plain) if normed else plain).to(self.compute) for normed in needed}

    def logits(self, rows: Tensor, runs: Sequence[SlotRange], out: Tensor) -> None:
        """Write float32 logits of rows [n, hidden] into `out` [n, lenses of the runs], in the order of the runs."""
        tiles = self.tiles(len(rows))
        kernels = self.kernels if self.kernels and self._evaluates(self.kernels, len(rows)) else None
        for first in range(0, len(rows), tiles.rows):
            inputs = self.inputs(rows[first : first + tiles.rows], runs)
            target, column = out[first : first + tiles.rows], 0
            for run in runs:
                step = run.stop - run.start if kernels else tiles.lenses  # a kernel needs no workspace
                for start in range(run.start, run.stop, step):
                    stop = min(start + step, run.stop)
                    here, x = target[:, column : column + stop - start], inputs[run.normed]
                    if kernels:
                        kernels.evaluate(self.tensors, x, start, stop, here)
                    else:
                        here.copy_(self._tile(x, start, stop).T)
                    column += stop - start

    def _tile(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return logits [lenses, n] of consecutive slots by matrix products."""
        h = x.T
        for i in range(self.depth):
            w, b = self.tensors[f"w{i}"][start:stop], self.tensors[f"b{i}"][start:stop].unsqueeze(-1)
            dtype = self._computed(i)
            wide, h = w.to(dtype), h.to(dtype)
            if w.dtype == torch.int8:
                scale = self.tensors[f"s{i}"][start:stop].unsqueeze(-1)
                product = _product(wide, h) if i == 0 else _products(wide, h)
                h = product.mul_(scale).add_(b)
            elif i == 0:
                flat = torch.addmm(b.flatten(0, 1), wide.flatten(0, 1), h)
                h = flat.unflatten(0, wide.shape[:2])
            else:
                h = torch.baddbmm(b, wide, h) if h.is_cuda else _products(wide, h).add_(b)
            if i < self.depth - 1:
                h = h.relu_()
        return h.squeeze(1).float()


@functools.cache
def available_kernels(device: torch.device) -> ModuleType | None:
    """Return the module of Triton kernels if the device may run them: older GPUs have too little shared memory."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return None
    try:
        return importlib.import_module("steerscope.lenses.fused")
    except Exception as error:
        warn_unused(f"{type(error).__name__}: {error}")
        return None


def warn_unused(reason: str) -> None:
    log.warning("lens kernels are not used: %s", reason)


def _product(weights: Tensor, columns: Tensor) -> Tensor:
    """Multiply [lenses, out, in] × [in, n] as one matrix product."""
    return torch.mm(weights.flatten(0, 1), columns).unflatten(0, weights.shape[:2])


def _products(weights: Tensor, columns: Tensor) -> Tensor:
    """Multiply [lenses, out, in] × [lenses, in, n]. On a CPU torch would dispatch once per lens."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.matmul(weights.numpy(), columns.numpy()))
    return torch.bmm(weights, columns)


def _layer_norm(rows: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:], eps=EPSILON)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights […, out, in] as int8 and the scale of each output, whose largest weight becomes ±127."""
    weight = weight.float()
    scale = weight.abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale.unsqueeze(-1)).round_().to(torch.int8), scale


def slot_ranges(slots: Sequence[int], normed: Sequence[bool], bridge: int = 0) -> list[SlotRange]:
    """Group ascending slots into ranges, which end where the input changes or more than `bridge` slots are missing."""
    runs: list[SlotRange] = []
    for slot, flag in zip(slots, normed, strict=True):
        if runs and slot - runs[-1].stop <= bridge and runs[-1].normed == flag:
            runs[-1] = runs[-1]._replace(stop=slot + 1)
        else:
            runs.append(SlotRange(slot, slot + 1, flag))
    return runs


def columns_of(slots: Sequence[int], runs: Sequence[SlotRange]) -> list[int]:
    """Return the result column of each of the ascending slots among the columns of runs that bridge gaps."""
    found: list[int] = []
    done, start = 0, 0
    for run in runs:
        while done < len(slots) and slots[done] < run.stop:
            found.append(start + slots[done] - run.start)
            done += 1
        start += run.stop - run.start
    return found
