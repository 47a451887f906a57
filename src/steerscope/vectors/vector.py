"""SteeringVector: directions of one site, per layer or shared by all layers, with their provenance.

Values are immutable: algebra returns new vectors. Scaling keeps the dtype of the directions (float32 and bfloat16
survive files bit for bit); a sum has the wider dtype. `add`, `cap` and `ablate` make ops for a request.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.steering import Ablate, Add, Cap, LayersLike, Site, VectorData, checked_layers

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """Directions to steer along: `directions` maps layer → [hidden]; a direction shared by all layers has the key None.

    Vectors of the same shape can be added, subtracted and scaled; `add`, `cap` and `ablate` make ops.

    ```python
    import torch

    import steerscope as ss

    up = ss.SteeringVector({10: torch.randn(64), 11: torch.randn(64)}, model="my-model")
    down = (-0.5 * up).normalised()
    print(down.layers, down.norms(), up.cosine(down), up.add(2.0, layers=10).scale)
    ```
    """

    directions: Mapping[int | None, Tensor]
    model: str | None = None
    site: Site = "resid_post"
    method: str | None = None
    provenance: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if not self.directions:
            problems.append(Problem("directions", "there are none", "give at least one layer"))
        if None in self.directions and len(self.directions) > 1:
            problems.append(Problem("directions", "shared and per-layer directions are mixed", "give one kind"))
        if len({tuple(direction.shape) for direction in self.directions.values()}) > 1:
            problems.append(Problem("directions", "sizes differ between layers", "all need the same hidden size"))
        problems += filter(None, (_problem(layer, direction) for layer, direction in self.directions.items()))
        if problems:
            raise InvalidRequest(problems)
        ordered = sorted(self.directions, key=lambda layer: -1 if layer is None else layer)
        # Copies: the caller's tensors and dict may change later.
        frozen = {layer: self.directions[layer].detach().cpu().clone().contiguous() for layer in ordered}
        object.__setattr__(self, "directions", frozen)
        object.__setattr__(self, "provenance", copy.deepcopy(self.provenance))

    @classmethod
    def shared(cls, direction: Tensor, model: str | None = None, site: Site = "resid_post") -> "SteeringVector":
        """Make a vector of one direction for all layers."""
        return cls({None: direction}, model=model, site=site)

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The layers with a direction; None when one is shared by all."""
        return None if None in self.directions else tuple(layer for layer in self.directions if layer is not None)

    @property
    def hidden(self) -> int:
        """The size of a direction."""
        return next(iter(self.directions.values())).numel()

    def __getitem__(self, layer: int) -> Tensor:
        key = None if None in self.directions else layer
        if key not in self.directions:
            raise InvalidRequest.of("layer", f"this vector has no layer {layer}", f"it has {self._layers_text()}")
        return self.directions[key]

    def at(self, layers: LayersLike) -> "SteeringVector":
        """Return a vector of only these layers; a shared vector becomes per-layer."""
        wanted = checked_layers(layers)
        if wanted == "all":
            return self
        return replace(self, directions={layer: self[layer] for layer in wanted})

    # --- algebra

    def _map(self, operation: Callable[[Tensor], Tensor], method: str) -> "SteeringVector":
        changed = {layer: operation(direction).to(direction.dtype) for layer, direction in self.directions.items()}
        return replace(self, directions=changed, method=method, provenance={**self.provenance, "name": None})

    def _join(
        self, other: "SteeringVector", operation: Callable[[Tensor, Tensor], Tensor], sign: str
    ) -> "SteeringVector":
        self._same_shape(other)
        joined = {layer: operation(direction, other.directions[layer]) for layer, direction in self.directions.items()}
        known = {name for name in (self.model, other.model) if name is not None}
        model = known.pop() if len(known) == 1 else None
        method = f"{self._name()} {sign} {other._name()}"
        return replace(self, directions=joined, model=model, method=method, provenance={})

    def _same_shape(self, other: "SteeringVector") -> None:
        problems = []
        if self.hidden != other.hidden:
            problems.append(Problem("hidden", f"{self.hidden} against {other.hidden}", "use vectors of one model"))
        if self.directions.keys() != other.directions.keys():
            what = f"layers {self._layers_text()} against {other._layers_text()}"
            problems.append(Problem("layers", what, "pick common ones with .at(layers)"))
        if self.site != other.site:
            problems.append(Problem("site", f"{self.site} against {other.site}", "use vectors of one site"))
        if problems:
            raise InvalidRequest(problems)

    def __add__(self, other: "SteeringVector") -> "SteeringVector":
        return self._join(other, torch.add, "+")

    def __sub__(self, other: "SteeringVector") -> "SteeringVector":
        return self._join(other, torch.sub, "-")

    def __mul__(self, factor: float) -> "SteeringVector":
        return self._map(lambda direction: direction * factor, f"{factor:g} * {self._name()}")

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "SteeringVector":
        return self._map(lambda direction: direction / divisor, f"{self._name()} / {divisor:g}")

    def __neg__(self) -> "SteeringVector":
        return self._map(torch.neg, f"-{self._name()}")

    def normalised(self) -> "SteeringVector":
        """Scale every direction to length 1; an all-zero direction is refused."""
        zero = [layer for layer, norm in self.norms().items() if norm == 0]
        if zero:
            raise InvalidRequest.of("directions", f"zero at layers {zero}", "leave those layers out")
        return self._map(lambda direction: direction.double() / direction.double().norm(), f"unit {self._name()}")

    # --- measures

    def norms(self) -> dict[int | None, float]:
        """Return the length at each layer."""
        return {layer: float(direction.double().norm()) for layer, direction in self.directions.items()}

    def cosine(self, other: "SteeringVector") -> dict[int | None, float]:
        """Return the cosine similarity per layer; 0 where a direction is zero."""
        self._same_shape(other)
        result = {}
        for layer, direction in self.directions.items():
            a = direction.double()
            b = other.directions[layer].double()
            scale = float(a.norm() * b.norm())
            result[layer] = float(a @ b) / scale if scale else 0.0
        return result

    def projection(self, rows: Tensor, layer: int) -> Tensor:
        """Return the component of rows [..., hidden] along the unit direction of a layer, float32."""
        direction = self[layer].double()
        return rows.float() @ (direction / direction.norm()).float().to(rows.device)

    def equals(self, other: "SteeringVector") -> bool:
        """Return whether two vectors are equal bit for bit, metadata included."""
        names = ("model", "site", "method", "provenance")
        if any(getattr(self, name) != getattr(other, name) for name in names):
            return False
        mine = self.directions
        theirs = other.directions
        return mine.keys() == theirs.keys() and all(_same_bits(mine[layer], theirs[layer]) for layer in mine)

    # --- ops

    def to_spec(self) -> VectorData:
        """Return the numbers in the form of a request."""
        packed = {layer: one.float().numpy().astype("<f4").tobytes() for layer, one in self.directions.items()}
        if None in packed:
            return VectorData(shared=packed[None])
        return VectorData(per_layer={layer: data for layer, data in packed.items() if layer is not None})

    def add(self, scale: float = 1.0, *, layers: LayersLike | None = None, tokens: str = "all") -> Add:
        """Make an op that adds the vector times `scale`, at its layers or some of them."""
        return Add.parse({**self._op(layers, tokens), "scale": scale})

    def cap(
        self,
        min: float | None = None,
        max: float | None = None,
        *,
        layers: LayersLike | None = None,
        tokens: str = "all",
    ) -> Cap:
        """Make an op that keeps the projection on the vector between `min` and `max`."""
        return Cap.parse({**self._op(layers, tokens), "min": min, "max": max})

    def ablate(
        self, scale: float = 0.0, *, to: float | None = None, layers: LayersLike | None = None, tokens: str = "all"
    ) -> Ablate:
        """Make an op that keeps `scale` of the component along the vector, or sets that component `to` a value."""
        return Ablate.parse({**self._op(layers, tokens), "scale": scale, "to": to})

    def _op(self, layers: LayersLike | None, tokens: str) -> dict[str, object]:
        return {"vector": self.to_spec(), "layers": layers, "site": self.site, "tokens": tokens}

    # --- words

    def _name(self) -> str:
        name = str(self.provenance.get("name") or self.method or "vector")
        return f"({name})" if " " in name else name

    def _layers_text(self) -> str:
        return "all (shared)" if self.layers is None else ", ".join(map(str, self.layers))

    def __repr__(self) -> str:
        what = f"layers {self._layers_text()}, hidden {self.hidden}, {self.site}, model {self.model}"
        return f"SteeringVector({self._name()}, {what})"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _problem(layer: int | None, direction: Tensor) -> Problem | None:
    where = "shared" if layer is None else f"layer {layer}"
    if direction.dim() != 1 or not direction.numel():
        shape = list(direction.shape)
        return Problem(where, f"has shape {shape}", "give one direction of shape [hidden] per layer")
    if direction.dtype not in DTYPES:
        return Problem(where, f"has dtype {direction.dtype}", "convert it to float32 or bfloat16")
    if layer is not None and layer < 0:
        return Problem(where, "is negative", "layers count from 0")
    if not torch.isfinite(direction).all():
        return Problem(where, "holds NaN or infinity", "remove them at the source")
    return None
