"""Stack: the weights of many lenses side by side, so that all of them are evaluated together.

The first layer of all lenses is one matrix product, [lenses · width, hidden] × [hidden, rows]; the small layers after
it are batched products. Results are columns per row until the end: with this layout every operand lies in memory as
the products want it, which on a CPU is three times as fast as the other way round.

Weights are kept as float32, bfloat16, or int8 with one scale per output (the last layer of several stays float32: it
is small, and it is where rounding shows). The arithmetic is float32 on a CPU, and bfloat16 with float32 sums on a GPU
unless the weights are float32. Where kept and computed types differ, weights are widened tile by tile.

A few rows are one kernel on a GPU (`fused`) unless the weights are float32, and on a CPU likewise one compiled function
a layer (`native`); unless these do not say the same when the stack is made. On a GPU an evaluation waits for nothing
and depends on no values: it can be captured in a CUDA graph.
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
_KEPT = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_LEAST_CAPABILITY = (8, 0)
_FARTHEST = 0.03  # of the largest logit: another order of rounding makes up to 0.008
_MOST_ROWS = 1024  # at once: enough for any matrix product to be efficient


class Run(NamedTuple):
    """Neighbouring slots whose lenses take the same input."""

    start: int
    stop: int
    normed: bool


class Tiles(NamedTuple):
    rows: int
    lenses: int


class Stack:
    """Room for the weights of `slots` lenses on a device. `write` fills slots, `logits` evaluates runs of them."""

    def __init__(
        self, info: PackInfo, slots: int, device: torch.device, weights: Weights = "fp32", workspace: int = WORKSPACE
    ) -> None:
        if weights not in get_args(Weights):
            known = ", ".join(get_args(Weights))
            raise InvalidRequest([Problem("weights", f"{weights!r} is unknown", f"choose one of {known}")])
        self.info, self.slots, self.device, self.weights, self.workspace = info, slots, device, weights, workspace
        self.compute = torch.bfloat16 if weights != "fp32" and device.type != "cpu" else torch.float32
        self.depth = len(info.architecture.widths) + 1
        self.kernels = kernels(device, weights)
        self.tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape, dtype in self._parts()}
        smallest = self._bytes(1, 1)
        if workspace < smallest:
            what = f"{workspace} bytes do not hold one row and one lens"
            raise InvalidRequest([Problem("workspace", what, f"give at least {smallest}")])
        if self.kernels is not None and slots and not self._proved(self.kernels):
            self.kernels = None

    def _proved(self, kernels: ModuleType) -> bool:
        """Whether kernels say of some lenses, the last ones here, what the other way says. They are compiled by this,
        and not while somebody waits for a reading."""
        run = Run(max(0, self.slots - 2), self.slots, False)
        here, chance, distances = slice(run.start, run.stop), torch.Generator().manual_seed(0), list[float]()
        shapes = layout(self.info, run.stop - run.start).items()
        some = {name: torch.randn(shape, generator=chance) / shape[-1] ** 0.5 for name, shape in shapes}
        self.write(here, self.encode(some))
        try:
            for rows in (most - 1 for most in kernels.ROWS if self._evaluates(kernels, most)):
                x = torch.randn(rows, self.info.hidden, generator=chance).to(self.device)
                inputs, found = self.inputs(x, [run])[False], x.new_full((rows, run.stop - run.start), torch.nan)
                kernels.evaluate(self.tensors, inputs, run.start, run.stop, found)
                wanted = self._tile(inputs, run.start, run.stop).T
                distances.append(float((found - wanted).abs().max() / wanted.abs().max()))
        except Exception as error:
            return unused(f"{type(error).__name__}: {error}")
        finally:
            for tensor in self.tensors.values():
                tensor[here].zero_()
        near = all(distance <= _FARTHEST for distance in distances)
        return near or unused(f"they are off by {', '.join(f'{one:.2g}' for one in distances)} of the largest logit")

    def _evaluates(self, kernels: ModuleType, rows: int) -> bool:
        return kernels.evaluates(rows, self.info.architecture.widths, self.compute, self._kept(0))

    def _kept(self, i: int) -> torch.dtype:
        return torch.float32 if i and i == self.depth - 1 else _KEPT[self.weights]

    def _computed(self, i: int) -> torch.dtype:
        return torch.float32 if i and i == self.depth - 1 else self.compute

    def _parts(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        shapes = layout(self.info, self.slots)
        for i in range(self.depth):
            yield f"w{i}", shapes[f"w{i}"], self._kept(i)
            yield f"b{i}", shapes[f"b{i}"], self._computed(i)
            if self._kept(i) == torch.int8:
                yield f"s{i}", shapes[f"b{i}"], self._computed(i)
        for name in PER_LENS:
            yield name, (self.slots,), torch.float32

    @property
    def lens_bytes(self) -> int:
        """What one lens takes on the device."""
        return sum(tensor.nbytes for tensor in self.tensors.values()) // max(1, self.slots)

    # --- filling

    def encode(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A pack's tensors, of any lenses, as this stack keeps them. A calibration that is absent changes nothing."""
        lenses = len(tensors["w0"])
        result: dict[str, Tensor] = {}
        for i in range(self.depth):
            weight, bias = tensors[f"w{i}"], tensors[f"b{i}"]
            if self._kept(i) == torch.int8:
                weight, scale = quantise(weight)
                result[f"s{i}"] = scale.to(self._computed(i))
            result[f"w{i}"] = weight.to(self._kept(i))
            result[f"b{i}"] = bias.to(self._computed(i))
        absent = {"low": 0.0, "high": 0.0, "confidence": 1.0, "floor": -torch.inf, "threshold": 0.0}
        for name, value in absent.items():
            result[name] = tensors[name] if name in tensors else torch.full((lenses,), value)
        return result

    def write(self, slots: slice | Tensor, encoded: Mapping[str, Tensor], non_blocking: bool = False) -> None:
        """Put lenses, encoded and as many as there are slots, into slots."""
        for name, tensor in self.tensors.items():
            if isinstance(slots, slice):
                tensor[slots].copy_(encoded[name], non_blocking=non_blocking)
            else:
                tensor.index_copy_(0, slots, encoded[name].to(self.device, non_blocking=non_blocking))

    # --- evaluating

    def _bytes(self, rows: int, lenses: int) -> int:
        """What an evaluation of so many rows and lenses takes beside its result: a bound."""
        hidden, widths = self.info.hidden, self.info.architecture.widths
        inputs = rows * hidden * (2 * 4 + 2 * self.compute.itemsize)  # plain and normalised, as float32 and cast
        sizes = [hidden, *widths, 1]
        wide = 4 if self.compute == torch.float32 else 6  # the last layer's input is there narrow and wide
        pairs = [rows * (into * wide + out * 4) for into, out in zip(sizes[1:], sizes[2:], strict=False)]
        states = max([*pairs, rows * 8])  # two layers' states live at a time
        widened = [
            into * out * self._computed(i).itemsize
            for i, (into, out) in enumerate(zip(sizes, sizes[1:], strict=False))
            if self._kept(i) != self._computed(i)
        ]
        return inputs + lenses * (states + max(widened, default=0))

    def tiles(self, rows: int) -> Tiles:
        """How many rows and lenses are evaluated together, so that the workspace is enough."""
        most = max(1, min(rows, _MOST_ROWS))
        while most > 1 and self._bytes(most, min(8, self.slots)) > self.workspace:
            most = (most + 1) // 2
        inputs, one = self._bytes(most, 0), self._bytes(most, 1)
        lenses = (self.workspace - inputs) // (one - inputs)
        return Tiles(most, max(1, min(lenses, self.slots)))

    def inputs(self, rows: Tensor, runs: Sequence[Run]) -> dict[bool, Tensor]:
        """What lenses that normalise again, and those that do not, are fed: each made once, if somebody wants it."""
        wanted = {run.normed for run in runs}
        once = self.info.normalisation == "layernorm"
        if once and wanted == {False} and rows.dtype == self.compute:
            return {False: _layer_norm(rows)}  # whose sums are float32 all the same
        plain = _layer_norm(rows.float()) if once else rows.float()
        return {normed: (_layer_norm(plain) if normed else plain).to(self.compute) for normed in wanted}

    def logits(self, rows: Tensor, runs: Sequence[Run], out: Tensor) -> None:
        """Rows [n, hidden] → out [n, lenses of the runs], float32, in the order of the runs."""
        tiles = self.tiles(len(rows))
        kernels = self.kernels if self.kernels and self._evaluates(self.kernels, len(rows)) else None
        for first in range(0, len(rows), tiles.rows):
            inputs = self.inputs(rows[first : first + tiles.rows], runs)
            target, column = out[first : first + tiles.rows], 0
            for run in runs:
                step = run.stop - run.start if kernels and kernels.ALONE else tiles.lenses
                for start in range(run.start, run.stop, step):
                    stop = min(start + step, run.stop)
                    here, x = target[:, column : column + stop - start], inputs[run.normed]
                    if kernels:
                        kernels.evaluate(self.tensors, x, start, stop, here)
                    else:
                        here.copy_(self._tile(x, start, stop).T)
                    column += stop - start

    def _tile(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Logits [lenses, n] of neighbouring slots."""
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
def kernels(device: torch.device, weights: Weights) -> ModuleType | None:
    """Those of Triton, where it can run: older GPUs have too little shared memory; on a CPU those of Numba. Whether
    they do (Triton needs a compiler for C), and rightly, is seen when they are used first."""
    name, needed = {"cuda": ("fused", "triton"), "cpu": ("native", "numba")}.get(device.type, ("", ""))
    if not name or importlib.util.find_spec(needed) is None or (device.type == "cpu" and weights == "fp32"):
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return None
    try:
        return importlib.import_module(f"steerscope.lenses.{name}")
    except Exception as error:
        unused(f"{type(error).__name__}: {error}")
        return None


def unused(why: str) -> bool:
    log.warning("lenses are evaluated without kernels of their own: %s", why)
    return False


def _product(weights: Tensor, columns: Tensor) -> Tensor:
    """[lenses, out, in] × [in, n] as one matrix product."""
    return torch.mm(weights.flatten(0, 1), columns).unflatten(0, weights.shape[:2])


def _products(weights: Tensor, columns: Tensor) -> Tensor:
    """[lenses, out, in] × [lenses, in, n]. On a CPU torch goes through its dispatcher once for every lens."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.matmul(weights.numpy(), columns.numpy()))
    return torch.bmm(weights, columns)


def _layer_norm(rows: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:], eps=EPSILON)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[…, out, in] → int8 and the scale of each output, so that the largest weight of an output is ±127."""
    weight = weight.float()
    scale = weight.abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale.unsqueeze(-1)).round_().to(torch.int8), scale


def runs_of(slots: Sequence[int], normed: Sequence[bool], bridge: int = 0) -> list[Run]:
    """Ascending slots as runs; a run ends where more than `bridge` slots are left out or the input changes."""
    runs: list[Run] = []
    for slot, flag in zip(slots, normed, strict=True):
        if runs and slot - runs[-1].stop <= bridge and runs[-1].normed == flag:
            runs[-1] = runs[-1]._replace(stop=slot + 1)
        else:
            runs.append(Run(slot, slot + 1, flag))
    return runs


def columns_of(slots: Sequence[int], runs: Sequence[Run]) -> list[int]:
    """Where the results of ascending slots are among those of runs that bridge gaps."""
    found: list[int] = []
    done, start = 0, 0
    for run in runs:
        while done < len(slots) and slots[done] < run.stop:
            found.append(start + slots[done] - run.start)
            done += 1
        start += run.stop - run.start
    return found
