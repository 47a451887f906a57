"""Prove where the sites of a decoder layer are, by what moves when known numbers are put there.

A layer of vLLM may return the stream as `delta + residual`, as `delta` beside a residual that the next layer ignores,
or in another way, and may scale what its attention and MLP add. Names do not tell, and a tap in the wrong place reads
rows that are off by 100 % without an error. So a dummy batch runs through the model before anything is tapped. What
each layer returns is replaced by small random integers, whose sums are exact in every dtype, and each layer is also run
alone, with integers in the places of its inputs and of what its modules return:

- a part of a layer's input belongs to the stream when a change of it changes the output; of two parts only the sum may
  count;
- returned parts are the stream when their sum is what enters the next layer;
- modules return the addends when resid_pre + attn_out + mlp_out is resid_post exactly (times the layer's multiplier).
  The attention is the one that the other replies to, or, in a parallel block, the one that reads the cache;
- a module is given the stream between the two when that is resid_pre + attn_out, and what is added there leaves the
  layer.

All ranks of a tensor-parallel group draw the same integers.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steerscope.engines.vllm.worker.model_layout import Layers, Place, Where, hook_at
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site

_LARGEST = 8  # of the integers: sums of a dozen of them are exact in bfloat16
_ROUNDINGS = 4  # of the dtype's epsilon: how far sums of rounded tensors may differ, relative to the integers
_EXACT = 1e-6  # sums of integers in float64
_EFFECT = 0.01  # of what a module returns: a smaller change is none
Tensors = dict[Where, Tensor]  # stream-shaped ones, by where they lie in a call


def prove_layers(layers: Layers, hidden: int, sites: Sequence[Site], run: Callable[[], object]) -> Layers:
    """Return the layers with the places of these sites. `run` runs a dummy batch through the uncompiled model. Raises
    UnsupportedModel, naming every site that cannot be proven."""
    _check_scaled_stream(layers)
    proof = _Proof(layers, hidden, sites)
    with torch.inference_mode(), proof.listening():
        run()
    proof.close(run)
    if proof.refused:
        kind = type(next(iter(layers.found.values())).module).__name__
        raise UnsupportedModel(
            f"{kind} cannot be tapped at " + "; ".join(f"{site}: {why}" for site, why in proof.refused.items())
        )
    found = {number: replace(layer, places=proof.places[number]) for number, layer in layers.found.items()}
    return replace(layers, found=found)


def _check_scaled_stream(layers: Layers) -> None:
    """Refuse DeepSeek's layers in float16: they divide the stream by a factor, and the rows would be of that."""
    for layer in layers.found.values():
        factor = getattr(layer.module, "routed_scaling_factor", 1.0)
        dtype = next((p.dtype for p in layer.module.parameters() if p.dtype.is_floating_point), None)
        if factor != 1.0 and dtype == torch.float16:
            raise UnsupportedModel(
                f"{type(layer.module).__name__} divides the residual stream by {factor:g} in float16, so its rows are "
                "not the model's: load it with dtype bfloat16"
            )


@dataclass
class _Run:
    """What one run of a layer showed, in float64 on the host."""

    returned: Tensors
    seen: dict[Place, Tensor]  # the stream or addend at each candidate, after it was changed


@dataclass
class _Examined:
    """A layer that was run alone. It is judged when the next one shows what it takes from it."""

    number: int
    call: "_Call"
    inputs: list[Where]  # the parts of the stream that enters
    candidates: list[Place]
    returned: Tensors = field(default_factory=dict)  # in the dummy batch: integers

    @property
    def kind(self) -> type:
        return type(self.call.module)


class _Proof:
    def __init__(self, layers: Layers, hidden: int, sites: Sequence[Site]) -> None:
        self._layers, self._hidden, self._sites = layers, hidden, sites
        self.places: dict[int, dict[Site, Place]] = {}
        self.refused: dict[Site, str] = {}
        self._pending: _Examined | None = None
        self._parts: dict[type, list[Where]] = {}  # by class of layer: the returned parts that are the stream

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Examine every layer when the dummy batch comes to it."""
        handles: list[RemovableHandle] = []
        for number, layer in self._layers.found.items():
            handles += _settle_attention(layer.module)
            handles.append(layer.module.register_forward_pre_hook(self._before_layer(number), with_kwargs=True))
            handles.append(layer.module.register_forward_hook(self._after_layer))
        for child in self._layers.owner.children():
            if not isinstance(child, nn.ModuleList):
                handles.append(child.register_forward_pre_hook(self._behind_layers, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self, run: Callable[[], object]) -> None:
        """Judge a last layer that nothing of its owner follows as the others of its class are. Attention runs only
        within a forward of the model, so another dummy batch is that forward."""
        last, self._pending = self._pending, None
        if last is not None:
            parts = self._parts.get(last.kind)
            if parts is None:
                raise UnsupportedModel(
                    f"{last.kind.__name__} cannot be tapped: no module behind layer {last.number} shows which "
                    "of the tensors that it returns is the residual stream"
                )
            first = self._layers.found[min(self._layers.found)].module
            handles = _settle_attention(last.call.module)
            handles.append(first.register_forward_pre_hook(lambda *_: self._judge(last, parts)))
            try:
                with torch.inference_mode():
                    run()
            finally:
                for handle in handles:
                    handle.remove()
        for number, layer in self._layers.found.items():
            if number not in self.places:
                raise UnsupportedModel(f"{type(layer.module).__name__} of layer {number} did not run in a dummy batch")

    # --- in the dummy batch

    def _before_layer(self, number: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            examined = self._examine(number, module, args, kwargs)
            if self._pending is not None:
                self._connect(self._pending, examined.call, examined.inputs)
            self._pending = examined

        return hook

    def _after_layer(self, _module: nn.Module, _args: tuple, output: object) -> None:
        """Put integers into every returned part, in place, as a tap does."""
        assert self._pending is not None
        parts = _stream_shaped(_by_place(output), self._hidden)
        for i, part in enumerate(parts.values()):
            part.copy_(_integers(part.shape, self._pending.number, i))
        self._pending.returned = {where: _on_host(part) for where, part in parts.items()}

    def _behind_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The first module behind the last layer, the final norm, is given what that layer returned."""
        last = self._pending
        if last is None or last.number != max(self._layers.found) or not last.returned:
            return
        call = _Call(module, args, kwargs, self._hidden, last.number + 1)
        if call.given:
            self._pending = None
            self._connect(last, call, _inputs_that_count(call, returned=1))

    def _connect(self, before: _Examined, call: "_Call", inputs: list[Where]) -> None:
        """Find the returned parts whose sum entered the next module, and judge the layer with them."""
        found, entered = before.returned, _total(_on_host(call.given[where]) for where in inputs)
        for parts in [*([where] for where in found), *([list(found)] if len(found) == 2 else [])]:
            total = _total(found[where] for where in parts)
            if total.shape == entered.shape and _off(total, entered) < _EXACT:
                self._parts[before.kind] = parts
                self._judge(before, parts)
                return
        raise UnsupportedModel(
            f"{before.kind.__name__} cannot be tapped: of the {len(found)} tensors that layer {before.number} returns, "
            "neither one nor the sum of two is what enters the next layer"
        )

    def _examine(self, number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> _Examined:
        call = _Call(module, args, kwargs, self._hidden, number)
        if not call.given:
            raise UnsupportedModel(
                f"{type(module).__name__} cannot be tapped: layer {number} is given no tensor [tokens, {self._hidden}] "
                "(layers of vLLM's Transformers backend carry a batch dimension)"
            )
        inside = bool({"attn_out", "mlp_out", "resid_mid"} & set(self._sites))
        return _Examined(number, call, _inputs_that_count(call), call.candidates() if inside else [])

    def _judge(self, examined: _Examined, parts: list[Where]) -> None:
        module = examined.call.module
        places: dict[Site, Place] = {
            "resid_pre": _stream_place(module, "before", examined.inputs),
            "resid_post": _stream_place(module, "after", parts),
        }
        self.places[examined.number] = places
        if examined.candidates:
            inside, refused = _Inside(examined, parts).places()
            places |= inside
            for site, why in refused.items():
                if site in self._sites:
                    self.refused.setdefault(site, f"layer {examined.number}: {why}")


def _stream_place(module: nn.Module, when: Any, parts: list[Where]) -> Place:
    delta, *rest = parts
    return Place(module, when, delta, rest[0] if rest else None, bool(rest))


class _Call:
    """A module and what it was given in the dummy batch, with integers in place of the stream."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], hidden: int, seed: int) -> None:
        self.module, self.seed, self._hidden, self._positional = module, seed, hidden, len(args)
        self._all = {key: _copied(value) for key, value in {**dict(enumerate(args)), **kwargs}.items()}
        self.given = _stream_shaped(self._all, hidden)
        self.inputs = {
            where: _integers(part.shape, seed, 10 + i).to(part) for i, (where, part) in enumerate(self.given.items())
        }

    def run(
        self, candidates: Sequence[Place] = (), put: Mapping[Place, Tensor] | None = None,
        add: Mapping[Place, Tensor] | None = None, inputs: Tensors | None = None,
    ) -> _Run:  # fmt: skip
        """Run the module on copies, with tensors put or added in place at some of the candidates."""
        seen: dict[Place, Tensor] = {}

        def visit(place: Place, delta: Tensor, residual: Tensor | None) -> None:
            if put and place in put:
                delta.copy_(put[place])
            if add and place in add:
                delta += add[place].to(delta)
            seen[place] = _total(_on_host(part) for part in (delta, residual) if part is not None)

        handles = [hook_at(place, visit) for place in candidates]
        try:
            returned = self._forward(inputs or {})
        finally:
            for handle in handles:
                handle.remove()
        return _Run(returned, seen)

    def candidates(self) -> list[Place]:
        """Return where sites inside the layer may be, in the order of the calls: before and after each of its modules
        that is called once and takes or returns the shape of the stream."""
        calls: list[Place] = []

        def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            values: dict[Where, Any] = {**dict(enumerate(args)), **kwargs}
            where = list(self._like_stream(values))
            if len(where) in (1, 2):
                calls.append(_stream_place(module, "before", where))

        def after(module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
            written: dict[Where, Any] = {"output": kwargs["output"]} if output is None and "output" in kwargs else {}
            where = list(self._like_stream(written or _by_place(output)))
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
        return {where: part for where, part in _stream_shaped(values, self._hidden).items() if part.shape == shape}

    def _forward(self, inputs: Tensors) -> Tensors:
        given = {key: _copied(value) for key, value in {**self._all, **self.inputs, **inputs}.items()}
        args = [given[i] for i in range(self._positional)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        returned = self.module.forward(*args, **kwargs)
        return {where: _on_host(part) for where, part in _stream_shaped(_by_place(returned), self._hidden).items()}


def _inputs_that_count(call: _Call, returned: int | None = None) -> list[Where]:
    """Return the parts of the input that change what is returned (or the first `returned` parts of it); of two, only
    the sum may."""
    name, base = type(call.module).__name__, list(call.run().returned.values())[:returned]

    def change(inputs: Tensors) -> float:
        found = list(call.run(inputs=inputs).returned.values())[:returned]
        return max((_off(part, before) for part, before in zip(found, base, strict=True)), default=0.0)

    counting = [where for where, part in call.inputs.items() if change({where: -part}) > _EFFECT]
    if len(counting) not in (1, 2):
        raise UnsupportedModel(
            f"{name} cannot be tapped: {len(counting)} of the {len(call.inputs)} tensors given to it change what it "
            "returns; looked for the residual stream, whole or in two parts"
        )
    if len(counting) == 2:
        one, other = counting
        total = call.inputs[one] + call.inputs[other]
        if (error := change({one: total, other: torch.zeros_like(total)})) > _EFFECT:
            raise UnsupportedModel(f"{name} cannot be tapped: its two inputs do not count as their sum ({error:.2g})")
    return counting


class _Inside:
    """Finds the sites inside one layer, of which is known what the stream is."""

    def __init__(self, examined: _Examined, parts: list[Where]) -> None:
        self._call, self._parts, self._candidates = examined.call, parts, examined.candidates
        self._entered = _total(_on_host(self._call.inputs[where]) for where in examined.inputs)
        self._limit = _ROUNDINGS * torch.finfo(self._call.inputs[examined.inputs[0]].dtype).eps
        shape, seed = self._entered.shape, self._call.seed
        self._numbers = {place: _integers(shape, seed, 20 + i) for i, place in enumerate(self._candidates)}
        self._base = self._call.run(self._candidates)
        self._with_more = {
            place: self._call.run(self._candidates, add={place: self._numbers[place]}) for place in self._candidates
        }
        self._outputs = [place for place in self._candidates if place.when == "after"]

    def places(self) -> tuple[dict[Site, Place], dict[Site, str]]:
        """Return the sites, and why others cannot be had."""
        name = type(self._call.module).__name__
        for scale in _multipliers(self._call.module):
            for size in (2, 3):
                for addends in combinations(self._outputs, size):
                    if self._add_up(addends, scale):
                        return self._named(addends, scale)
        for attention in self._outputs:
            if middle := self._middle((attention,), attention, 1.0):
                why = f"{name} changes the stream after its MLP has added to it"
                return {"attn_out": attention, "resid_mid": middle}, {"mlp_out": why}
        why = f"what {name} adds to the stream is not the sum of what its modules return"
        return {}, dict.fromkeys(("attn_out", "mlp_out", "resid_mid"), why)

    def _add_up(self, addends: tuple[Place, ...], scale: float) -> bool:
        """Whether the stream that leaves is exactly the one that entered and these addends, and a change of each moves
        it likewise."""
        for place in addends:
            moved = self._left(self._with_more[place]) - self._left(self._base)
            wanted = self._numbers[place] + _total(self._reply(place, other) for other in addends if other != place)
            if _off(moved, scale * wanted) > max(self._limit, _EFFECT):
                return False
        return self._leaves(addends, scale, torch.zeros_like(self._entered))

    def _leaves(self, addends: tuple[Place, ...], scale: float, more: Tensor, at: Place | None = None) -> bool:
        """With integers as addends, and `more` added at a place, whether their sum leaves the layer."""
        run = self._call.run(
            self._candidates, put={place: self._numbers[place] for place in addends}, add={at: more} if at else None
        )
        wanted = self._entered + scale * _total(self._numbers[place] for place in addends) + more
        return _off(self._left(run), wanted) < self._exactness(scale)

    def _exactness(self, scale: float) -> float:
        return _EXACT if scale == 1.0 else self._limit / 4

    def _left(self, run: _Run) -> Tensor:
        return _total(run.returned[where] for where in self._parts)

    def _reply(self, place: Place, other: Place) -> Tensor:
        """How far a change at one place moves another."""
        return self._with_more[place].seen[other] - self._base.seen[other]

    def _named(self, addends: tuple[Place, ...], scale: float) -> tuple[dict[Site, Place], dict[Site, str]]:
        def leads(place: Place) -> bool:
            replies = [(self._reply(place, other), self._base.seen[other]) for other in addends if other != place]
            return any(float(reply.norm()) > _EFFECT * float(natural.norm()) for reply, natural in replies)

        first = [place for place in addends if leads(place)]
        attention = next(iter(first or [place for place in addends if _attends(place.module)] or addends))
        feed = [place for place in addends if place != attention]
        found: dict[Site, Place] = {"attn_out": replace(attention, scale=scale)}
        refused: dict[Site, str] = {}
        if len(feed) == 1:
            found["mlp_out"] = replace(feed[0], scale=scale)
        else:
            names = " and ".join(type(place.module).__name__ for place in feed)
            refused["mlp_out"] = f"it is the sum of what several modules return ({names})"
        if middle := self._middle(addends, attention, scale):
            found["resid_mid"] = middle
        else:
            refused["resid_mid"] = "attention and MLP read the same input (parallel block)"
        return found, refused

    def _middle(self, addends: tuple[Place, ...], attention: Place, scale: float) -> Place | None:
        """Return where a module is given the stream between attention and MLP. Of a layer whose addends are not all
        known, what is added there must do the same as when the attention adds it."""
        put = {attention: self._numbers[attention]}
        between = self._entered + scale * put[attention]
        run = self._call.run(self._candidates, put=put)
        for place in (place for place in self._candidates if place.when == "before"):
            more = self._numbers[place]
            if _off(run.seen[place], between) > self._exactness(scale):
                continue
            if len(addends) > 1:
                if self._leaves(addends, scale, more, at=place):
                    return place
            else:
                here = self._left(self._call.run(self._candidates, put=put, add={place: more}))
                there = self._left(self._call.run(self._candidates, put={attention: put[attention] + more}))
                if _off(here, there) < _EXACT < _off(here, self._left(run)):
                    return place
        return None


def _multipliers(layer: nn.Module) -> list[float]:
    """Return what the layer may multiply its addends by."""
    found = [1.0]
    if (multiplier := getattr(layer, "residual_multiplier", None)) is not None:
        found.append(float(multiplier))
    config: Any = getattr(layer, "config", None)
    if (depth := getattr(config, "scale_depth", None)) is not None:  # MiniCPM
        found.append(float(depth) / math.sqrt(config.num_hidden_layers))
    return found


def _attention_layers(module: nn.Module) -> list[nn.Module]:
    """vLLM's own attention, Mamba and linear attention layers, which read the cache."""
    try:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    except ImportError:
        return []
    return [part for part in module.modules() if isinstance(part, AttentionLayerBase)]


def _attends(module: nn.Module) -> bool:
    return bool(_attention_layers(module))


def _settle_attention(layer: nn.Module) -> list[RemovableHandle]:
    """Before there is a cache, attention returns memory that was never written: put the same numbers there."""

    def settle(_module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
        target = kwargs.get("output") if output is None else output
        if isinstance(target, Tensor) and target.is_floating_point():
            generator = torch.Generator().manual_seed(1)
            target.copy_(torch.randn(target.shape, generator=generator))

    return [part.register_forward_hook(settle, with_kwargs=True) for part in _attention_layers(layer)]


def _by_place(output: object) -> dict[Where, Any]:
    return dict(enumerate(output)) if isinstance(output, tuple | list) else {None: output}


def _stream_shaped(values: dict[Where, Any], hidden: int) -> Tensors:
    return {
        where: value
        for where, value in values.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2 and value.shape[1] == hidden
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _on_host(part: Tensor) -> Tensor:
    return part.detach().to("cpu", torch.float64, copy=True)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _integers(shape: torch.Size, *seed: int) -> Tensor:
    """Random integers, as float64 on the host: the same for the same numbers."""
    generator = torch.Generator().manual_seed(seed[0] * 1000 + seed[1])
    return torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=generator).double()


def _off(found: Tensor, wanted: Tensor) -> float:
    """The difference, relative to what is wanted; infinite if it is not finite."""
    error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf
