"""Prove where the sites of a decoder layer are, by what moves when noise is put there.

A layer of vLLM may return the stream as `delta + residual`, as `delta` beside a residual that the next layer ignores,
or in another way, and may scale what its attention and MLP add. Names do not tell, and a tap in the wrong place reads
rows that are off by 100 % without an error. So a dummy batch runs through the model before anything is tapped. Each
layer is also run alone, on the inputs that it was given, with noise in one place at a time:

- a part of a layer's input belongs to the stream when noise in it changes the output; of two parts only the sum may
  count;
- returned parts are the stream when their sum, noise included, is what enters the next layer;
- a child module returns an addend when noise in it moves the layer's output by exactly that noise (times the layer's
  multiplier), apart from what the modules behind it add in reply;
- resid_pre + attn_out + mlp_out must be resid_post.

Noise is as large as the stream, so an addend that is scaled by a few percent stands out of rounding in the dtype that
serves. All ranks of a tensor-parallel group draw the same noise.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steerscope.engines.vllm.layers import Layers, Place, Where, hook_at
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Site

_ROUNDINGS = 4  # of the dtype's epsilon: how far sums of rounded tensors may differ, relative to the noise
_EXACT = 1e-4  # … at least
_NOISE = 2.0  # its size, in root mean squares of the stream
_EFFECT = 0.01  # of what a module returns: a smaller change is no effect of the noise
_TRIES = 3  # a dummy batch may read memory that was never written and is not finite
Tensors = dict[Where, Tensor]  # stream-shaped ones, by where they lie in a call


def prove_layers(layers: Layers, hidden: int, sites: Sequence[Site], run: Callable[[], object]) -> Layers:
    """Return the layers with the places of these sites. `run` runs a dummy batch through the uncompiled model. Raises
    UnsupportedModel, naming every site that cannot be proven."""
    _check_scaled_stream(layers)
    proof = _Proof(layers, hidden, sites)
    with torch.inference_mode():
        for _ in range(_TRIES):
            proof = _Proof(layers, hidden, sites)
            with proof.listening():
                run()
            if proof.finite:
                break
    proof.close()
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
    seen: dict[Place, Tensor]  # the stream or addend at each candidate, with its noise


@dataclass
class _Examined:
    """A layer that was run alone. It is judged when the next one shows what it takes from it."""

    number: int
    module: nn.Module
    limit: float  # relative to the noise
    noise: Tensor
    entered: Tensor  # the stream
    inputs: list[Where]  # its parts
    base: _Run
    with_noise: dict[Place, _Run]  # by candidate
    returned: Tensors = field(default_factory=dict)  # in the dummy batch, with noise in every part


class _Proof:
    def __init__(self, layers: Layers, hidden: int, sites: Sequence[Site]) -> None:
        self._layers, self._hidden, self._sites = layers, hidden, sites
        self.places: dict[int, dict[Site, Place]] = {}
        self.refused: dict[Site, str] = {}
        self.finite = True
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

    def close(self) -> None:
        """Judge a last layer that nothing of its owner follows as the others of its class are."""
        last, self._pending = self._pending, None
        if last is not None:
            parts = self._parts.get(type(last.module))
            if parts is None:
                raise UnsupportedModel(
                    f"{type(last.module).__name__} cannot be tapped: no module behind layer {last.number} shows which "
                    "of the tensors that it returns is the residual stream"
                )
            self._judge(last, parts)
        for number, layer in self._layers.found.items():
            if number not in self.places:
                raise UnsupportedModel(f"{type(layer.module).__name__} of layer {number} did not run in a dummy batch")

    # --- in the dummy batch

    def _before_layer(self, number: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            examined = self._examine(number, module, args, kwargs)
            if self._pending is not None:
                self._connect(self._pending, examined.entered)
            self._pending = examined

        return hook

    def _after_layer(self, _module: nn.Module, _args: tuple, output: object) -> None:
        """Put other noise into every returned part, in place, as a tap does."""
        assert self._pending is not None
        parts = _stream_shaped(_by_place(output), self._hidden)
        for i, part in enumerate(parts.values()):
            generator = torch.Generator().manual_seed(1000 * self._pending.number + i + 1)
            rms = self._pending.noise.pow(2).mean().sqrt()
            part += (rms * torch.randn(part.shape, generator=generator, dtype=torch.float64)).to(part)
        self._pending.returned = {where: _on_host(part) for where, part in parts.items()}

    def _behind_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The first module behind the last layer, the final norm, is given what that layer returned."""
        last = self._pending
        if last is None or last.number != max(self._layers.found) or not last.returned:
            return
        call = _Call(module, args, kwargs, self._hidden)
        if call.inputs:
            self._pending = None
            counting = _inputs_that_count(call, last.noise, last.limit, returned=1)
            self._connect(last, _total(_on_host(call.inputs[where]) for where in counting))

    def _connect(self, before: _Examined, entered: Tensor) -> None:
        """Find the returned parts whose sum entered the next module, and judge the layer with them."""
        found = before.returned
        for parts in [*([where] for where in found), *([list(found)] if len(found) == 2 else [])]:
            total = _total(found[where] for where in parts)
            if total.shape == entered.shape and _off(total - entered, before.noise) < before.limit:
                self._parts[type(before.module)] = parts
                self._judge(before, parts)
                return
        raise UnsupportedModel(
            f"{type(before.module).__name__} cannot be tapped: of the {len(found)} tensors that layer {before.number} "
            "returns, neither one nor the sum of two is what enters the next layer"
        )

    # --- one layer alone

    def _examine(self, number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> _Examined:
        call = _Call(module, args, kwargs, self._hidden)
        if not call.inputs:
            raise UnsupportedModel(
                f"{type(module).__name__} cannot be tapped: layer {number} is given no tensor [tokens, {self._hidden}] "
                "(layers of vLLM's Transformers backend carry a batch dimension)"
            )
        inside = bool({"attn_out", "mlp_out", "resid_mid"} & set(self._sites))
        candidates = call.candidates() if inside else []
        base = call.run(candidates)
        self.finite &= all(bool(part.isfinite().all()) for part in base.returned.values())
        stream = _total(_on_host(part) for part in call.inputs.values())
        scale = min(1.0, *(abs(scale) for scale in _multipliers(module)))
        generator = torch.Generator().manual_seed(1000 * number)
        noise = torch.randn(stream.shape, generator=generator, dtype=torch.float64)
        noise *= _NOISE * float(stream.pow(2).mean().sqrt()) / scale
        limit = max(_EXACT, _ROUNDINGS * torch.finfo(next(iter(call.inputs.values())).dtype).eps)
        inputs = _inputs_that_count(call, noise, limit)
        entered = _total(_on_host(call.inputs[where]) for where in inputs)
        with_noise = {place: call.run(candidates, noisy=place, noise=noise) for place in candidates}
        return _Examined(number, module, limit, noise, entered, inputs, base, with_noise)

    def _judge(self, examined: _Examined, parts: list[Where]) -> None:
        module, judged = examined.module, _Judged(examined, parts)
        places: dict[Site, Place] = {
            "resid_pre": _stream_place(module, "before", examined.inputs),
            "resid_post": _stream_place(module, "after", parts),
        }
        self.places[examined.number] = places
        if examined.with_noise:
            inside, refused = judged.places()
            places |= inside
            for site, why in refused.items():
                if site in self._sites:
                    self.refused.setdefault(site, f"layer {examined.number}: {why}")


def _stream_place(module: nn.Module, when: Any, parts: list[Where]) -> Place:
    delta, *rest = parts
    return Place(module, when, delta, rest[0] if rest else None, bool(rest))


class _Call:
    """A layer and the inputs that it was given in the dummy batch."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], hidden: int) -> None:
        self.module, self._hidden, self._positional = module, hidden, len(args)
        self._given = {key: _copied(value) for key, value in {**dict(enumerate(args)), **kwargs}.items()}
        self.inputs = _stream_shaped(self._given, hidden)

    def run(
        self, candidates: Sequence[Place] = (), noisy: Place | None = None, noise: Tensor | None = None,
        inputs: Tensors | None = None,
    ) -> _Run:  # fmt: skip
        """Run the layer on copies of its inputs, with noise at one candidate, or with other inputs."""
        seen: dict[Place, Tensor] = {}

        def visit(place: Place, delta: Tensor, residual: Tensor | None) -> None:
            if place == noisy:
                assert noise is not None
                delta += noise.to(delta)
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
            where = list(self._like_stream({**dict(enumerate(args)), **kwargs}))
            if len(where) in (1, 2):
                calls.append(_stream_place(module, "before", where))

        def after(module: nn.Module, _args: tuple, kwargs: dict[str, Any], output: object) -> None:
            written = {"output": kwargs["output"]} if output is None and "output" in kwargs else {}
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
        shape = next(iter(self.inputs.values())).shape
        return {where: part for where, part in _stream_shaped(values, self._hidden).items() if part.shape == shape}

    def _forward(self, inputs: Tensors) -> Tensors:
        given = {key: _copied(inputs.get(key, value)) for key, value in self._given.items()}
        args = [given[i] for i in range(self._positional)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        returned = self.module.forward(*args, **kwargs)
        return {where: _on_host(part) for where, part in _stream_shaped(_by_place(returned), self._hidden).items()}


def _inputs_that_count(call: _Call, noise: Tensor, limit: float, returned: int | None = None) -> list[Where]:
    """Return the parts of the input that change what is returned (or the first `returned` parts of it); of two, only
    the sum may."""
    name, base = type(call.module).__name__, list(call.run().returned.values())[:returned]

    def change(inputs: Tensors) -> float:
        found = list(call.run(inputs=inputs).returned.values())[:returned]
        return max((_off(part - before, before) for part, before in zip(found, base, strict=True)), default=0.0)

    counting = [where for where, part in call.inputs.items() if change({where: part + noise.to(part)}) > _EFFECT]
    if len(counting) not in (1, 2):
        raise UnsupportedModel(
            f"{name} cannot be tapped: {len(counting)} of the {len(call.inputs)} tensors given to it change what it "
            "returns; looked for the residual stream, whole or in two parts"
        )
    if len(counting) == 2:
        one, other = counting
        total = call.inputs[one] + call.inputs[other]
        if (error := change({one: total, other: torch.zeros_like(total)})) > max(_EFFECT, 2 * limit):
            raise UnsupportedModel(f"{name} cannot be tapped: its two inputs do not count as their sum ({error:.2g})")
    return counting


class _Judged:
    """The runs of one layer, of which is known what the stream is."""

    def __init__(self, examined: _Examined, parts: list[Where]) -> None:
        self._examined, self._parts, self._base = examined, parts, examined.base
        self._runs = examined.with_noise

    def _left(self, run: _Run) -> Tensor:
        return _total(run.returned[where] for where in self._parts)

    def _moves(
        self, place: Place, scale: float, behind: tuple[Place, ...] = (), behind_scale: float | None = None
    ) -> bool:
        """Whether noise there moves what leaves the layer by exactly `scale` times it, and by the reply of the addends
        behind it."""
        run, noise = self._runs[place], scale * self._examined.noise
        replies = [run.seen[addend] - self._base.seen[addend] for addend in behind]
        wanted = noise + (scale if behind_scale is None else behind_scale) * sum(replies, torch.zeros_like(noise))
        return _off(self._left(run) - self._left(self._base) - wanted, noise) < self._examined.limit

    def places(self) -> tuple[dict[Site, Place], dict[Site, str]]:
        """Return the sites inside the layer, and why others cannot be had."""
        name = type(self._examined.module).__name__
        for scale in _multipliers(self._examined.module):
            feeds = [p for p in self._outputs() if not _attends(p.module) and self._moves(p, scale)]
            for feed in [*((feed,) for feed in feeds), *([tuple(feeds)] if len(feeds) > 1 else [])]:
                for attention in self._outputs():
                    causal = attention not in feed and self._moves(attention, scale, feed)
                    if causal and self._complete(attention, feed, scale):
                        return self._inside(attention, feed, scale)
        for attention in self._outputs():
            for middle in self._inputs():
                if self._same_stream(attention, middle):
                    why = f"{name} changes the stream after its MLP has added to it"
                    return {"attn_out": attention, "resid_mid": middle}, {"mlp_out": why}
        why = f"what {name} adds to the stream is not the sum of what its modules return"
        return {}, dict.fromkeys(("attn_out", "mlp_out", "resid_mid"), why)

    def _outputs(self) -> list[Place]:
        return [place for place in self._runs if place.when == "after"]

    def _inputs(self) -> list[Place]:
        return [place for place in self._runs if place.when == "before"]

    def _inside(
        self, attention: Place, feed: tuple[Place, ...], scale: float
    ) -> tuple[dict[Site, Place], dict[Site, str]]:
        found: dict[Site, Place] = {"attn_out": replace(attention, scale=scale)}
        refused: dict[Site, str] = {}
        if len(feed) == 1:
            found["mlp_out"] = replace(feed[0], scale=scale)
        else:
            names = " and ".join(type(place.module).__name__ for place in feed)
            refused["mlp_out"] = f"it is the sum of what several modules return ({names})"
        middle = self._middle(attention, feed, scale)
        if middle is None:
            refused["resid_mid"] = "attention and MLP read the same input (parallel block)"
        else:
            found["resid_mid"] = middle
        return found, refused

    def _complete(self, attention: Place, feed: tuple[Place, ...], scale: float) -> bool:
        """Whether resid_pre + attn_out + mlp_out = resid_post, measured against the addends."""
        for place in (attention, *feed):
            run = self._runs[place]
            added = scale * _total(run.seen[one] for one in (attention, *feed))
            if _off(self._left(run) - self._examined.entered - added, added) > self._examined.limit:
                return False
        return True

    def _middle(self, attention: Place, feed: tuple[Place, ...], scale: float) -> Place | None:
        """Return where a module is given the stream between attention and MLP."""
        run = self._runs[attention]
        between = self._examined.entered + scale * run.seen[attention]
        for place in self._inputs():
            if _off(run.seen[place] - between, between) < self._examined.limit and self._moves(place, 1.0, feed, scale):
                return place
        return None

    def _same_stream(self, attention: Place, middle: Place) -> bool:
        """Whether noise in what attention returns and noise in a later module's input do the same to that input and to
        what leaves the layer."""
        first, second, limit = self._runs[attention], self._runs[middle], self._examined.limit
        between = self._examined.entered + first.seen[attention]
        return (
            _off(first.seen[middle] - between, between) < limit
            and _off(second.seen[middle] - between, between) < limit
            and _off(self._left(first) - self._left(second), self._examined.noise) < limit
        )


def _multipliers(layer: nn.Module) -> list[float]:
    """Return what the layer may multiply its addends by."""
    found = [1.0]
    if (multiplier := getattr(layer, "residual_multiplier", None)) is not None:
        found.append(float(multiplier))
    config = getattr(layer, "config", None)
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


def _total(parts: Any) -> Tensor:
    first, *rest = parts
    return sum(rest, first)


def _off(difference: Tensor, wanted: Tensor) -> float:
    """The size of a difference, relative to what is wanted; infinite if it is not finite."""
    error = float(difference.norm() / wanted.norm())
    return error if math.isfinite(error) else math.inf
