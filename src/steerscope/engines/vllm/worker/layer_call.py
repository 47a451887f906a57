"""Run one decoder layer alone, with known integers in the places of its inputs and of what its modules return."""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    """A layer and what it was given in the dummy batch, with integers in place of the stream."""

    def __init__(self, module: nn.Module, number: int, args: tuple, kwargs: dict[str, Any], hidden: int) -> None:
        self.module = module
        self.number = number
        self._hidden = hidden
        self._positional = len(args)
        self._all = {key: _copied(value) for key, value in {**dict(enumerate(args)), **kwargs}.items()}
        self.given = stream_shaped(self._all, hidden)
        self.inputs = {
            where: integers(part.shape, number, 10 + i).to(part) for i, (where, part) in enumerate(self.given.items())
        }
        self.stream: list[Where] = []  # the given parts that are the stream
        self.returned: Tensors = {}  # in the dummy batch: integers

    @property
    def name(self) -> str:
        return type(self.module).__name__

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

        given = {key: _copied(value) for key, value in {**self._all, **self.inputs, **(inputs or {})}.items()}
        args = [given[i] for i in range(self._positional)]
        with contextlib.ExitStack() as handles:
            for place in candidates:
                handles.enter_context(hook_at(place, visit))
            output = self.module.forward(*args, **{key: given[key] for key in given if isinstance(key, str)})
        returned = stream_shaped(by_place(output), self._hidden)
        return LayerRun({where: on_host(part) for where, part in returned.items()}, seen)

    def find_stream(self, returned: int | None = None) -> None:
        """Find the given parts that change what is returned (or the first `returned` parts of it); of two, only the sum
        may."""
        base = list(self.run().returned.values())[:returned]

        def change(inputs: Tensors) -> float:
            found = list(self.run(inputs=inputs).returned.values())[:returned]
            return max((relative_error(part, before) for part, before in zip(found, base, strict=True)), default=0.0)

        self.stream = [where for where, part in self.inputs.items() if change({where: -part}) > EFFECT]
        if len(self.stream) not in (1, 2):
            raise UnsupportedModel(
                f"{self.name} cannot be tapped: {len(self.stream)} of the {len(self.inputs)} tensors given to it "
                "change what it returns; looked for the residual stream, whole or in two parts"
            )
        if len(self.stream) == 2:
            one, other = self.stream
            total = self.inputs[one] + self.inputs[other]
            if (error := change({one: total, other: torch.zeros_like(total)})) > EFFECT:
                raise UnsupportedModel(
                    f"{self.name} cannot be tapped: its two inputs do not count as their sum ({error:.2g})"
                )

    def candidates(self) -> list[Place]:
        """Return where sites inside the layer may be, in the order of the calls: before and after each of its modules
        that is called once and takes or returns the shape of the stream."""
        calls: list[Place] = []
        shape = next(iter(self.given.values())).shape

        def like_stream(values: Mapping[Where, Any]) -> list[Where]:
            return [where for where, part in stream_shaped(values, self._hidden).items() if part.shape == shape]

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            where = like_stream({**dict(enumerate(args)), **kwargs})
            if len(where) in (1, 2):
                calls.append(stream_place(module, "before", where))

        def after(module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
            written: Mapping[Where, Any] = by_place(output)
            if output is None and "output" in kwargs:
                written = {"output": kwargs["output"]}
            if where := like_stream(written):
                calls.append(Place(module, "after", where[0]))

        with contextlib.ExitStack() as handles:
            for child in self.module.children():
                handles.enter_context(child.register_forward_pre_hook(before, with_kwargs=True))
                handles.enter_context(child.register_forward_hook(after, with_kwargs=True))
            self.run()
        times = Counter((place.module, place.when) for place in calls)
        return [place for place in calls if times[place.module, place.when] == 1]


def stream_place(module: nn.Module, when: Any, parts: list[Where]) -> Place:
    delta, *rest = parts
    return Place(module, when, delta, rest[0] if rest else None, bool(rest))


def by_place(output: object) -> Mapping[Where, Any]:
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {None: output}


def stream_shaped(values: Mapping[Where, Any], hidden: int) -> Tensors:
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
