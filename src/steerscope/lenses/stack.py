"""Stack: the weights of many lenses side by side, evaluated together.

The first layer of all lenses is one matrix product, [lenses · width, hidden] × [hidden, rows]; later layers are batched
products. Hidden states are [lenses, width, rows]: with rows last all operands are contiguous, which on a CPU is three
times as fast as rows first.

Weights are stored as float32, bfloat16, or int8 with one scale per output. The last of several layers stays float32:
it is small, and rounding shows most there. Arithmetic is float32 on a CPU; on a GPU it is bfloat16 with float32 sums,
unless weights are float32. Weights stored in another type are converted when they are used, on a CPU in blocks that fit
its cache.

Some packs mix lenses that normalise their input once more with lenses that do not. Their stack evaluates all lenses on
both inputs.

On a GPU, one Triton kernel (`fused`) evaluates up to 64 rows of bfloat16 or int8 lenses. It is compared with the matrix
products when the stack is made, and is not used if it differs. An evaluation of all slots never synchronises and no
shape depends on a value, so that it can be captured in a CUDA graph.
"""

import importlib
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from steerscope.lenses.hierarchy import as_slice
from steerscope.lenses.pack import Calibration, Pack
from steerscope.lenses.spec import EPSILON
from steerscope.lenses.tensors import PER_LENS, layout
from steerscope.specs.errors import InvalidRequest, Problem

log = logging.getLogger("steerscope")
Weights = Literal["fp32", "bf16", "int8"]
WORKSPACE = 256 << 20
_STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_MIN_CAPABILITY = (8, 0)
_UNUSED = "lens kernels are not used: %s"
_MAX_ERROR = 0.03  # relative to the largest logit: another order of rounding makes up to 0.008
_CONVERTED = 3 << 18  # bytes of weights that are converted at a time on a CPU, so that they stay in its cache
_MAX_ROWS = 1024  # of one tile: enough for any matrix product to be efficient


class Tiles(NamedTuple):
    rows: int
    lenses: int


class Stack:
    """Weights of `slots` lenses of a pack on a device. `write` fills slots, `logits` evaluates ranges of them."""

    def __init__(
        self, pack: Pack, slots: int, device: torch.device, weights: Weights = "fp32", workspace: int = WORKSPACE
    ) -> None:
        if weights not in get_args(Weights):
            known = ", ".join(get_args(Weights))
            raise InvalidRequest([Problem("weights", f"{weights!r} is unknown", f"choose one of {known}")])
        self.pack = pack
        self.info = pack.info
        self.slots = slots
        self.device = device
        self.weights = weights
        self.workspace = workspace
        # The kinds of inputs that lenses take: normalised once more (True) or not (False).
        self.normed = sorted(set(pack.tensors["normed"].tolist())) if "normed" in pack.tensors else [False]
        self.calibrated = pack.calibration is not None
        self.floored = self.calibrated or "floor" in pack.tensors
        self.compute = torch.bfloat16 if weights != "fp32" and device.type != "cpu" else torch.float32
        self.depth = len(self.info.architecture.widths) + 1
        self.tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape, dtype in self._parts()}
        smallest = self.workspace_bytes(1, 1)
        if workspace < smallest:
            what = f"{workspace} bytes do not hold one row and one lens"
            raise InvalidRequest([Problem("workspace", what, f"give at least {smallest}")])
        kernels = available_kernels(device)
        self.kernels = kernels if kernels and slots and trusted(lambda: self._fault(kernels)) else None

    def _fault(self, kernels: ModuleType) -> str:
        """Return how logits by kernels differ from those by matrix products, on random lenses in the last two slots.

        This also compiles the kernels, so that no request waits for the compiler.
        """
        last = range(self.slots)[-2:]
        here = slice(last.start, last.stop)
        generator = torch.Generator().manual_seed(0)
        shapes = layout(self.info, len(last)).items()
        random = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes}
        self.write(here, self.encode(random))
        errors: list[float] = []
        try:
            for n_rows in (most - 1 for most in kernels.ROWS if self._evaluates(kernels, most)):
                rows = torch.randn(n_rows, self.info.hidden, generator=generator).to(self.device)
                _, inputs = self.inputs(rows)[0]
                found = rows.new_full((n_rows, len(last)), torch.nan)
                kernels.evaluate(self.tensors, inputs, last.start, last.stop, found)
                expected = self._products(inputs, here).T
                errors.append(float((found - expected).abs().max() / expected.abs().max()))
        finally:
            for tensor in self.tensors.values():
                tensor[here].zero_()
        if all(error <= _MAX_ERROR for error in errors):  # a NaN is an error too
            return ""
        return f"they are off by {', '.join(f'{error:.2g}' for error in errors)} of the largest logit"

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
        if len(self.normed) > 1:
            yield "normed", (self.slots,), torch.bool

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
            weight = tensors[f"w{i}"]
            bias = tensors[f"b{i}"]
            if self._stored(i) == torch.int8:
                weight, scale = quantise(weight)
                result[f"s{i}"] = scale.to(self._computed(i))
            result[f"w{i}"] = weight.to(self._stored(i))
            result[f"b{i}"] = bias.to(self._computed(i))
        neutral = {"low": 0.0, "high": 0.0, "confidence": 1.0, "floor": -torch.inf, "threshold": 0.0, "normed": False}
        for name in neutral.keys() & self.tensors.keys():
            result[name] = tensors[name] if name in tensors else torch.full((lenses,), neutral[name])
        return result

    def write(self, slots: slice, encoded: Mapping[str, Tensor], non_blocking: bool = False) -> None:
        """Write encoded lenses into as many slots."""
        for name, tensor in self.tensors.items():
            tensor[slots].copy_(encoded[name], non_blocking=non_blocking)

    def fill(self, lenses: Sequence[int]) -> None:
        """Write these lenses of the pack into the first slots, in parts: the pack may not fit into host memory."""
        step = max(1, self.workspace // max(1, self.lens_bytes) // 2)
        for start in range(0, len(lenses), step):
            part = lenses[start : start + step]
            self.write(slice(start, start + len(part)), self.encode(gather(self.pack.tensors, part)))

    # --- evaluating

    def workspace_bytes(self, rows: int, lenses: int) -> int:
        """Return an upper bound of the memory, beside its result, of an evaluation of that many rows and lenses."""
        sizes = [self.info.hidden, *self.info.architecture.widths, 1]
        pairs = list(itertools.pairwise(sizes))
        inputs = rows * sizes[0] * (2 * 4 + 2 * self.compute.itemsize)  # both kinds, as float32 and cast
        # Two layers' states live at a time, some of them narrow and wide; then the logits on the second input.
        states = rows * (6 * max(map(sum, pairs[1:]), default=2) + 4 * (len(self.normed) - 1))
        narrow = _STORED[self.weights] != self.compute
        widened = self.compute.itemsize * max(into * out for into, out in pairs) if narrow else 0
        return inputs + lenses * (states + widened)

    def tiles(self, rows: int) -> Tiles:
        """Return how many rows and lenses are evaluated together, so that the workspace suffices."""
        most = max(1, min(rows, _MAX_ROWS))
        while most > 1 and self.workspace_bytes(most, min(8, self.slots)) > self.workspace:
            most = (most + 1) // 2
        inputs = self.workspace_bytes(most, 0)
        one = self.workspace_bytes(most, 1)
        lenses = (self.workspace - inputs) // (one - inputs)
        return Tiles(most, max(1, min(lenses, self.slots)))

    def inputs(self, rows: Tensor) -> list[tuple[bool, Tensor]]:
        """Return the inputs of the lenses, and for each whether it is normalised once more."""
        layernorm = self.info.normalisation == "layernorm"
        if layernorm and self.normed == [False] and rows.dtype == self.compute:
            return [(False, _layer_norm(rows))]  # its sums are float32 in any dtype
        plain = _layer_norm(rows.float()) if layernorm else rows.float()
        return [(normed, (_layer_norm(plain) if normed else plain).to(self.compute)) for normed in self.normed]

    def logits(self, rows: Tensor, ranges: Sequence[range], out: Tensor) -> None:
        """Write float32 logits of rows [n, hidden] into `out` [n, lenses of the ranges], in the order of the ranges."""
        tiles = self.tiles(len(rows))
        kernels = self.kernels if self.kernels and self._evaluates(self.kernels, len(rows)) else None
        most = self.slots if kernels and len(self.normed) == 1 else tiles.lenses  # a kernel needs no workspace
        for first in range(0, len(rows), tiles.rows):
            inputs = self.inputs(rows[first : first + tiles.rows])
            target = out[first : first + tiles.rows]
            column = 0
            for part in (slots[at : at + most] for slots in ranges for at in range(0, len(slots), most)):
                self._evaluate(inputs, part, target[:, column : column + len(part)], kernels)
                column += len(part)

    def scores(self, rows: Tensor, ranges: Sequence[range]) -> Tensor:
        """Return scores [n, lenses of the ranges]."""
        slots = [slot for part in ranges for slot in part]
        logits = torch.empty(len(rows), len(slots), device=self.device)
        self.logits(rows, ranges, logits)
        whole = len(slots) == self.slots
        return self.scored(logits, None if whole else torch.tensor(slots, dtype=torch.long, device=self.device))

    def outputs(self, logits: Tensor, slots: Tensor | None = None) -> Tensor:
        """Apply the output function to logits of these slots (None: all), in place where possible."""
        match self.info.architecture.output:
            case "sigmoid":
                return logits.sigmoid_()
            case "relu":
                return logits.relu_()
            case "jumprelu":
                return logits.mul_(logits > self._of("threshold", slots)).relu_()
            case "topk":
                values, indices = logits.topk(self.info.architecture.k or 1, dim=-1)
                return logits.zero_().scatter_(-1, indices, values.relu_())

    def scored(self, logits: Tensor, slots: Tensor | None = None) -> Tensor:
        """Apply the output function, the calibration and the noise floor, in place."""
        result = self.outputs(logits, slots)
        if not self.floored:
            return result
        curve = Calibration(*(self._of(name, slots) for name in Calibration._fields))
        scores = curve.apply(result) if self.calibrated else result
        return result.copy_(torch.where(result > self._of("floor", slots), scores, 0.0))

    def _of(self, name: str, slots: Tensor | None) -> Tensor:
        return self.tensors[name] if slots is None else self.tensors[name][slots]

    def _evaluate(
        self, inputs: Sequence[tuple[bool, Tensor]], slots: range, out: Tensor, kernels: ModuleType | None
    ) -> None:
        """Write logits of consecutive slots."""
        for normed, x in inputs:
            second = normed and len(inputs) > 1
            found = torch.empty_like(out) if second else out
            if kernels:
                kernels.evaluate(self.tensors, x, slots.start, slots.stop, found)
            else:
                found.copy_(self._products(x, slice(slots.start, slots.stop)).T)
            if second:
                out.copy_(torch.where(self.tensors["normed"][slots.start : slots.stop], found, out))

    def _products(self, x: Tensor, slots: slice) -> Tensor:
        """Return logits [lenses, n] by matrix products."""
        h = x.T
        for i in range(self.depth):
            h = self._linear(i, slots, h.to(self._computed(i)))
            if i < self.depth - 1:
                h = h.relu_()
        return h.squeeze(1).float()

    def _linear(self, i: int, slots: slice, h: Tensor) -> Tensor:
        """Apply layer i to h, [hidden, n] for the first layer and [lenses, in, n] for the others."""
        w = self.tensors[f"w{i}"][slots]
        b = self.tensors[f"b{i}"][slots].unsqueeze(-1)
        if w.dtype == h.dtype and i == 0:
            return torch.addmm(b.flatten(0, 1), w.flatten(0, 1), h).unflatten(0, w.shape[:2])
        if w.dtype == h.dtype:
            return torch.baddbmm(b, w, h)
        product = _converted_product(w, h)
        if w.dtype == torch.int8:
            product.mul_(self.tensors[f"s{i}"][slots].unsqueeze(-1))
        return product.add_(b)


def gather(tensors: Mapping[str, Tensor], lenses: Sequence[int]) -> dict[str, Tensor]:
    """Return the tensors of some lenses. Consecutive lenses of a pack on disk are not read yet."""
    chosen = as_slice(lenses)
    index = chosen if isinstance(chosen, slice) else torch.tensor(chosen, dtype=torch.long)
    return {name: tensor[index] for name, tensor in tensors.items() if name != "decoder"}


def available_kernels(device: torch.device) -> ModuleType | None:
    """Return the module of Triton kernels if the device may run them: older GPUs have too little shared memory."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return None
    try:
        return importlib.import_module("steerscope.lenses.fused")
    except Exception as error:
        log.warning(_UNUSED, f"{type(error).__name__}: {error}")
        return None


def trusted(fault_of_kernels: Callable[[], str]) -> bool:
    """Return whether a check of the kernels finds no fault; log the fault that it returns or raises."""
    try:
        fault = fault_of_kernels()
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        log.warning(_UNUSED, fault)
    return not fault


def _converted_product(weights: Tensor, columns: Tensor) -> Tensor:
    """Multiply weights [lenses, out, in], converted to the dtype of `columns`, by [in, n] or [lenses, in, n]."""
    if weights.is_cuda:
        return weights.to(columns.dtype) @ columns
    result = columns.new_empty(*weights.shape[:2], columns.shape[-1])
    step = max(1, _CONVERTED // (4 * weights[0].numel()))
    for start in range(0, len(weights), step):
        part = slice(start, start + step)
        wide = weights[part].to(columns.dtype)
        torch.matmul(wide, columns if columns.dim() == 2 else columns[part], out=result[part])
    return result


def _layer_norm(rows: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:], eps=EPSILON)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights […, out, in] as int8 and the scale of each output, whose largest weight becomes ±127."""
    weight = weight.float()
    scale = weight.abs().amax(-1) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale.unsqueeze(-1)).round_().to(torch.int8), scale


def slot_ranges(slots: Sequence[int]) -> list[range]:
    """Group ascending slots into ranges."""
    ranges: list[range] = []
    for slot in slots:
        if ranges and slot == ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, slot + 1)
        else:
            ranges.append(range(slot, slot + 1))
    return ranges
