"""What a request must have seen, from plain transformers: one forward over the whole text, ops in float64 at hooks,
lenses one by one, rules row by row. Shares no code with the engines but the parsing of selectors.

For blocks like Llama's: `model.layers`, each with `self_attn` and `mlp` whose outputs are added to the stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from steerscope.lenses import Pack
from steerscope.specs.steering import Ablate, Add, Cap, VectorData
from steerscope.specs.tokens import resolve
from steerscope.specs.watch import Rule, Steer, Watch
from support.plain_rules import play
from support.workload import Request

Key = tuple[int, str]
Op = tuple[Tensor, tuple[float, ...], Tensor]  # direction, coefficients, which rows


@dataclass
class Truth:
    """What a text should have. `watched` are the positions that lenses read, `scores` theirs."""

    before: dict[Key, Tensor]
    after: dict[Key, Tensor]
    logits: Tensor
    watched: list[int]
    scores: Tensor
    firings: list[tuple[str, str, int]]  # rule, what it does, row
    margin: float  # how near the nearest score came to a threshold


class Oracle:
    def __init__(self, model: PreTrainedModel, packs: dict[str, Pack] | None = None) -> None:
        self.model, self.packs = model, packs or {}
        self.count = model.config.num_hidden_layers
        self._ops: dict[Key, list[Op]] = {}
        self._before: dict[Key, Tensor] = {}
        self._after: dict[Key, Tensor] = {}
        self._input: Tensor = torch.zeros(0)
        for i, block in enumerate(model.get_submodule("model.layers").children()):
            block.register_forward_pre_hook(self._enter(i), with_kwargs=True)
            block.get_submodule("self_attn").register_forward_hook(self._leave(i, "attn_out", "resid_mid"))
            block.get_submodule("mlp").register_forward_hook(self._leave(i, "mlp_out"))
            block.register_forward_hook(self._leave(i, "resid_post"))

    def truth(self, request: Request, fed: Sequence[int]) -> Truth:
        """Of what the request was fed. A steering that a rule switches depends on rows before it: each turn of the loop
        makes at least one more row right."""
        p, most = len(request.prompt), len(request.prompt) + request.sampling.max_tokens - 1

        def at(selector: str) -> Tensor:
            found = resolve(selector, p, None, False, most)
            return torch.tensor([i in found for i in range(len(fed))])

        watch = request.watch
        watched = torch.nonzero(at(watch.tokens)).flatten().tolist() if watch else []
        gates: dict[str, Tensor] = {}
        while True:
            ops = [(op, at(op.tokens)) for op in request.steer.ops]
            for rule in watch.rules if watch else ():
                if isinstance(rule.then, Steer) and rule.name in gates:
                    ops += [(op, at(op.tokens) & gates[rule.name]) for op in rule.then.steering.ops]
            logits = self._run(fed, ops)  # type: ignore[arg-type]
            if watch is None:
                return Truth(self._before, self._after, logits, [], torch.zeros(0), [], 1.0)
            scores, firings, then = self._read(watch, watched, p, len(fed))
            if all(
                torch.equal(gates.get(name, torch.zeros(len(fed), dtype=torch.bool)), on) for name, on in then.items()
            ):
                margin = self._margin(watch, scores)
                return Truth(self._before, self._after, logits, watched, scores, firings, margin)
            gates = then

    def _read(
        self, watch: Watch, watched: list[int], p: int, rows: int
    ) -> tuple[Tensor, list[tuple[str, str, int]], dict[str, Tensor]]:
        pack = self.packs[watch.pack_name]
        scores = lens_by_lens(pack, self._after[pack.info.layer, pack.info.site][watched])
        named = [{c.id: float(s) for c, s in zip(pack.concepts, row, strict=True)} for row in scores]
        events, states = play(watch.rules, named)
        firings = [
            (watch.rules[r].name, watch.rules[r].then.kind if change == "on" else "steer_off", watched[t])
            for t, r, change in events
            if change == "on" or isinstance(watch.rules[r].then, Steer)
        ]
        gates: dict[str, Tensor] = {}
        for r, rule in enumerate(watch.rules):
            if isinstance(rule.then, Steer):
                on = torch.zeros(rows, dtype=torch.bool)
                for row in range(p, rows):  # never on rows of the prompt
                    seen = int(np.searchsorted(watched, row))  # readings of the rows before it
                    on[row] = bool(seen) and states[seen - 1][r]
                gates[rule.name] = on
        return scores, firings, gates

    def _margin(self, watch: Watch, scores: Tensor) -> float:
        pack = self.packs[watch.pack_name]
        ids = [concept.id for concept in pack.concepts]
        nearest = 1.0
        for rule in watch.rules:
            for concept, bound in _bounds(rule):
                if len(scores):
                    nearest = min(nearest, float((scores[:, ids.index(concept)] - bound).abs().min()))
        return nearest

    # --- one forward

    def _run(self, fed: Sequence[int], ops: Sequence[tuple[Add | Cap | Ablate, Tensor]]) -> Tensor:
        self._ops, self._before, self._after = {}, {}, {}
        for op, rows in ops:
            source = op.source
            assert isinstance(source, VectorData)
            layers = range(self.count) if op.layers == "all" else op.layers or source.per_layer
            for layer in layers:  # type: ignore[union-attr]
                data = source.shared if source.shared is not None else source.per_layer[layer]
                vector = torch.frombuffer(bytearray(data), dtype=torch.float32).double().to(self.model.device)
                vector = vector / vector.norm() if op.unit else vector
                key = (layer, op.site)
                self._ops.setdefault(key, []).append((vector, op.coefficients(), rows.to(self.model.device)))
        with torch.no_grad():
            return self.model(torch.tensor([list(fed)], device=self.model.device), use_cache=False).logits[0]

    def _visit(self, key: Key, delta: Tensor, rest: Tensor | None = None) -> Tensor:
        whole = delta[0] if rest is None else delta[0] + rest[0]
        self._before[key] = whole
        now = whole.double()
        for vector, (c, s, m, lo, hi), rows in self._ops.get(key, ()):
            along = now @ vector
            gain = c + (s * along).clamp(lo, hi) - m * along
            now = now + torch.where(rows, gain, 0.0)[:, None] * vector
        changed = (delta[0].double() + (now - whole.double())).to(delta.dtype) if key in self._ops else delta[0]
        self._after[key] = changed if rest is None else changed + rest[0]
        return changed[None]

    def _enter(self, layer: int) -> Callable[..., object]:
        def hook(_module: object, args: tuple, kwargs: dict) -> object:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._input = self._visit((layer, "resid_pre"), hidden)
            if layer:  # the same tap by another name: its ops come first, and rows are after the ops of both
                same = (layer - 1, "resid_post")
                self._after[same], self._before[layer, "resid_pre"] = (
                    self._after[layer, "resid_pre"],
                    self._before[same],
                )
            return ((self._input, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": self._input})

        return hook

    def _leave(self, layer: int, *sites: str) -> Callable[..., object]:
        def hook(_module: object, _args: tuple, output: Tensor | tuple) -> object:
            hidden = output[0] if isinstance(output, tuple) else output
            for site in sites:
                hidden = self._visit((layer, site), hidden, self._input if site == "resid_mid" else None)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return hook


def lens_by_lens(pack: Pack, rows: Tensor) -> Tensor:
    """Scores [rows, lenses] of linear lenses, in float64."""
    x = rows.double().cpu()
    if pack.info.normalisation == "layernorm":
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    w, b = pack.tensors["w0"].double(), pack.tensors["b0"].double()
    return torch.stack([torch.sigmoid(x @ w[i].flatten() + b[i].flatten()) for i in range(len(pack))], dim=1)


def _bounds(rule: Rule) -> list[tuple[str, float]]:
    found = [(leaf.concept, bound) for _, leaf in rule.when.leaves() for bound in (leaf.above, leaf.below)]
    if isinstance(rule.then, Steer) and rule.then.off_below is not None:
        found += [(leaf.concept, rule.then.off_below) for _, leaf in rule.when.leaves()]
    return [(concept, bound) for concept, bound in found if bound is not None]
