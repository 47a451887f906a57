"""Run one decoder layer alone, with known integers in the places of its inputs and of what its modules return."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steerscope.engines.vllm.worker.model_layout import Place, Where, hook_at
from steerscope.specs.errors import UnsupportedModel

_LARGEST = 8  # of the integers: sums of a dozen of them are exact in bfloat16
EXACT = 1e-6  # relative error of sums of integers in float64
EFFECT = 0.01  # of what a module returns: a smaller change is none
Tensors = dict[Where, Tensor]  # stream-shaped ones, by their place in a call


@dataclass
class LayerRun:
    """What one run of a layer showed, in float64 on the host."""

    returned: Tensors
    seen: dict[Place, Tensor]  # the stream or addend at each candidate, after it was changed


class LayerCall:
    """A module and what it was given in the dummy batch, with integers in place of the stream."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], hidden: int, seed: int) -> None:
        self.module, self.seed, self._hidden, self._positional = module, seed, hidden, len(args)
        self._all = {key: _copied(value) for key, value in {**dict(enumerate(args)), **kwargs}.items()}
        self.given = stream_shaped(self._all, hidden)
        self.inputs = {
            where: integers(part.shape, seed, 10 + i).to(part) for i, (where, part) in enumerate(self.given.items())
        }

    def run(
        self, candidates: Sequence[Place] = (), put: Mapping[Place, Tensor] | None = None,
        add: Mapping[Place, Tensor] | None = None, inputs: Tensors | None = None,
    ) -> LayerRun:  # fmt: skip
        """Run the module on copies, with tensors put or added in place at some of the candidates."""
        seen: dict[Place, Tensor] = {}

        def visit(place: Place, delta: Tensor, residual: Tensor | None) -> None:
            if put and place in put:
                delta.copy_(put[place])
            if add and place in add:
                delta += add[place].to(delta)
            seen[place] = sum_of(on_host(part) for part in (delta, residual) if part is not None)

        handles = [hook_at(place, visit) for place in candidates]
        try:
            returned = self._forward(inputs or {})
        finally:
            for handle in handles:
                handle.remove()
        return LayerRun(returned, seen)

    def candidates(self) -> list[Place]:
        """Return where sites inside the layer may be, in the order of the calls: before and after each of its modules
        that is called once and takes or returns the shape of the stream."""
        calls: list[Place] = []

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            values: dict[Where, Any] = {**dict(enumerate(args)), **kwargs}
            where = list(self._like_stream(values))
            if len(where) in (1, 2):
                calls.append(stream_place(module, "before", where))

        def after(module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
            written: dict[Where, Any] = {"output": kwargs["output"]} if output is None and "output" in kwargs else {}
            where = list(self._like_stream(written or by_place(output)))
            if where:
                calls.append(Place(module, "after", where[0]))

        handles: list[RemovableHandle] = []
        for child in self.module.children():
            handles.append(child.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(child.register_forward_hook(after, with_kwargs=True))
        try:
            self._forward({})
        finally:
            for handle in handles:
                handle.remove()
        times = Counter((place.module, place.when) for place in calls)
        return [place for place in calls if times[place.module, place.when] == 1]

    def _like_stream(self, values: dict[Where, Any]) -> Tensors:
        shape = next(iter(self.given.values())).shape
        return {where: part for where, part in stream_shaped(values, self._hidden).items() if part.shape == shape}

    def _forward(self, inputs: Tensors) -> Tensors:
        given = {key: _copied(value) for key, value in {**self._all, **self.inputs, **inputs}.items()}
        args = [given[i] for i in range(self._positional)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        returned = self.module.forward(*args, **kwargs)
        return {where: on_host(part) for where, part in stream_shaped(by_place(returned), self._hidden).items()}


@dataclass
class ExaminedLayer:
    """A layer that was run alone. It is judged when the next one shows what it takes from it."""

    number: int
    call: LayerCall
    inputs: list[Where]  # the parts of the stream that enters
    candidates: list[Place]
    returned: Tensors = field(default_factory=dict)  # in the dummy batch: integers

    @property
    def kind(self) -> type:
        return type(self.call.module)


def stream_inputs(call: LayerCall, returned: int | None = None) -> list[Where]:
    """Return the parts of the input that change what is returned (or the first `returned` parts of it); of two, only
    the sum may."""
    name, base = type(call.module).__name__, list(call.run().returned.values())[:returned]

    def change(inputs: Tensors) -> float:
        found = list(call.run(inputs=inputs).returned.values())[:returned]
        return max((relative_error(part, before) for part, before in zip(found, base, strict=True)), default=0.0)

    counting = [where for where, part in call.inputs.items() if change({where: -part}) > EFFECT]
    if len(counting) not in (1, 2):
        raise UnsupportedModel(
            f"{name} cannot be tapped: {len(counting)} of the {len(call.inputs)} tensors given to it change what it "
            "returns; looked for the residual stream, whole or in two parts"
        )
    if len(counting) == 2:
        one, other = counting
        total = call.inputs[one] + call.inputs[other]
        if (error := change({one: total, other: torch.zeros_like(total)})) > EFFECT:
            raise UnsupportedModel(f"{name} cannot be tapped: its two inputs do not count as their sum ({error:.2g})")
    return counting


def stream_place(module: nn.Module, when: Any, parts: list[Where]) -> Place:
    delta, *rest = parts
    return Place(module, when, delta, rest[0] if rest else None, bool(rest))


def by_place(output: object) -> dict[Where, Any]:
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {None: output}


def stream_shaped(values: dict[Where, Any], hidden: int) -> Tensors:
    return {
        where: value
        for where, value in values.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2 and value.shape[1] == hidden
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def on_host(part: Tensor) -> Tensor:
    return part.detach().to("cpu", torch.float64, copy=True)


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def integers(shape: torch.Size, *seed: int) -> Tensor:
    """Random integers, as float64 on the host: the same for the same numbers."""
    generator = torch.Generator().manual_seed(seed[0] * 1000 + seed[1])
    return torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=generator).double()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The difference, relative to what is wanted; infinite if it is not finite."""
    error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf
