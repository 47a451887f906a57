"""Steering: an ordered list of ops, each a vector, layers, a site, tokens and a strength.

Vectors are given by name (registered with the engine) or inline as float32 bytes, an object with a `to_spec()` method
(SteeringVector), a torch tensor, a numpy array or a list of floats. No torch is imported here.
"""

import base64
import binascii
import math
import re
import struct
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, Self, get_args, runtime_checkable

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from steerscope.specs.base import Spec
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.tokens import Tokens

if TYPE_CHECKING:
    import numpy
    import torch

Site = Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]
SITES: tuple[Site, ...] = get_args(Site)
LayersLike = int | str | Sequence[int | str]  # as users write it; see parse_layers
# The equation is computed in float32, so larger numbers would be infinite.
Strength = Annotated[float, Field(ge=-3.4028234663852886e38, le=3.4028234663852886e38)]
_MOST_NAMED = 10_000  # layers, in one text
MOST_OPS = 512
Coefficients = tuple[float, float, float, float, float]  # c, s, m, lo, hi of the one equation


def parse_layers(value: object) -> tuple[int, ...] | Literal["all"]:
    """`12`, `"10-14"`, `"4,8,10-14"`, `[4, "10-14"]` or `"all"` → ascending layer numbers."""
    if value == "all":
        return "all"
    parts: Iterable[object] = value if isinstance(value, list | tuple | range | set | frozenset) else [value]
    layers: set[int] = set()
    named = 0  # repeated layers count again, so that many wide ranges cannot take hours
    for part in parts:
        if isinstance(part, int) and not isinstance(part, bool):
            layers.add(part)
            continue
        for item in str(part).split(","):
            match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", item) if isinstance(part, str) else None
            if match is None:
                raise ValueError(f"{part!r} is not a layer; write 12, '10-14', '4,8,10-14' or 'all'")
            first = int(match[1])
            last = int(match[2] or match[1])
            if last < first:
                raise ValueError(f"layer range {item.strip()!r} runs backwards; write '{last}-{first}'")
            named += last + 1 - first
            if named > _MOST_NAMED:
                raise ValueError(f"more than {_MOST_NAMED} layers are named; name each once")
            layers.update(range(first, last + 1))
    if not layers:
        raise ValueError("no layers given; write 12, '10-14', '4,8,10-14' or 'all'")
    if min(layers) < 0:
        raise ValueError(f"layer {min(layers)} is negative; layers count from 0")
    return tuple(sorted(layers))


def checked_layers(value: object, field: str = "layers") -> tuple[int, ...] | Literal["all"]:
    """Do the same as `parse_layers`, but raise InvalidRequest for a named field."""
    try:
        return parse_layers(value)
    except ValueError as error:
        raise InvalidRequest([Problem.of(field, error)]) from None


# Fields accept all forms and hold the normal form. Type checkers see the accepted ones.
if TYPE_CHECKING:
    Layers = LayersLike
else:
    Layers = Annotated[tuple[int, ...] | Literal["all"], BeforeValidator(parse_layers)]


def _pack(value: object) -> bytes:
    """Convert one direction to little-endian float32 bytes."""
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, str):
        try:
            data = base64.b64decode(value, validate=True)
        except binascii.Error:
            raise ValueError("vector is not base64; send float32 bytes, little-endian, base64-encoded") from None
    else:
        detached = value.detach().cpu().float() if hasattr(value, "detach") else value  # type: ignore[union-attr]
        numbers = detached.tolist() if hasattr(detached, "tolist") else detached  # type: ignore[union-attr]
        if not isinstance(numbers, list | tuple) or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError("vector is not one-dimensional; give one direction of shape [hidden] per layer")
        try:
            data = struct.pack(f"<{len(numbers)}f", *numbers)
        except (OverflowError, struct.error):
            raise ValueError("vector holds a number beyond float32; scale it down at the source") from None
    if not data or len(data) % 4:
        raise ValueError(f"vector has {len(data)} bytes; send a non-empty multiple of 4 (float32)")
    return data


Float32Bytes = Annotated[
    bytes,
    BeforeValidator(_pack),
    PlainSerializer(lambda b: base64.b64encode(b).decode(), return_type=str, when_used="json"),
]


class VectorData(Spec):
    """The numbers of a vector, float32 little-endian: one direction `shared` by all layers, or one `per_layer`."""

    shared: Float32Bytes | None = None
    per_layer: dict[int, Float32Bytes] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.shared is None) == (not self.per_layer):
            raise ValueError("give either shared or per_layer; exactly one of them")
        sizes = {len(data) // 4 for _, data in self.items()}
        if len(sizes) > 1:
            raise ValueError(f"directions have different sizes {sorted(sizes)}; all layers need the same hidden size")
        for layer, data in self.items():
            numbers = struct.unpack(f"<{len(data) // 4}f", data)
            where = "" if layer is None else f" of layer {layer}"
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"vector{where} holds NaN or infinity; remove them at the source")
            if not any(numbers):
                raise ValueError(f"vector{where} is all zero and has no direction; leave the layer out")
        return self

    def __hash__(self) -> int:
        return hash((self.shared, frozenset(self.per_layer.items())))

    def items(self) -> Iterator[tuple[int | None, bytes]]:
        if self.shared is not None:
            yield None, self.shared
        yield from self.per_layer.items()

    @property
    def hidden(self) -> int:
        return len(next(data for _, data in self.items())) // 4


@runtime_checkable
class HasSpec(Protocol):
    def to_spec(self) -> VectorData: ...


def _vector(value: object) -> object:
    if isinstance(value, str | VectorData):
        return value
    if isinstance(value, HasSpec):
        return value.to_spec()
    if isinstance(value, Mapping):
        is_spec = all(key in ("shared", "per_layer") for key in value)
        return VectorData.parse(value) if is_spec else VectorData(per_layer=dict(value))
    return VectorData(shared=value)  # type: ignore[arg-type]


if TYPE_CHECKING:
    _Numbers = Sequence[float] | numpy.ndarray | torch.Tensor
    Vector = str | VectorData | HasSpec | _Numbers | Mapping[int, _Numbers]
else:
    Vector = Annotated[str | VectorData, BeforeValidator(_vector)]


class _Op(Spec):
    unit: ClassVar[bool]  # whether the equation uses the vector at unit length

    vector: Vector
    layers: Layers | None = None  # None: the layers the vector has
    site: Site = "resid_post"
    tokens: Tokens = "all"

    @property
    def source(self) -> str | VectorData:
        """The vector in normal form: a name or numbers."""
        assert isinstance(self.vector, str | VectorData)
        return self.vector

    @abstractmethod
    def coefficients(self) -> Coefficients:
        """c, s, m, lo, hi of the one equation."""


class Add(_Op):
    """Add `scale` times the vector to every selected row: h + scale · v.

    - `vector`: a name that was registered, a `SteeringVector`, an array `[hidden]`, or a dict of layer → array
    - `layers`: `12`, `"10-14"`, `"4,8,10-14"`, `"all"`; default: the layers the vector has
    - `site`: `resid_pre`, `resid_mid`, `resid_post`, `attn_out` or `mlp_out`
    - `tokens`: a selector such as `"generated"` or `"role=user"` ([all of them](../steering.md#tokens))

    ```python
    import steerscope as ss

    happy = ss.load_vector("happy.safetensors")
    push = ss.Add(vector=happy, scale=1.7, layers="18-20", tokens="generated")
    assert push == happy.add(1.7, layers="18-20", tokens="generated")  # the same, shorter
    ```
    """

    unit = False
    op: Literal["add"] = "add"
    scale: Strength = 1.0

    def coefficients(self) -> Coefficients:
        return (self.scale, 0.0, 0.0, -math.inf, math.inf)


class Cap(_Op):
    """Keep the projection on the vector's direction between `min` and `max`; the other fields are those of `Add`.

    ```python
    import steerscope as ss

    limit = ss.load_vector("happy.safetensors").cap(max=4.0, layers="18-20")
    ```
    """

    unit = True
    op: Literal["cap"] = "cap"
    min: Strength | None = None
    max: Strength | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("a cap needs min, max or both; give at least one")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}; swap them")
        return self

    def coefficients(self) -> Coefficients:
        low = -math.inf if self.min is None else self.min
        high = math.inf if self.max is None else self.max
        return (0.0, 1.0, 1.0, low, high)


class Ablate(_Op):
    """Keep only `scale` of the component along the vector (0 removes it), or set the component `to` a value; the other
    fields are those of `Add`.

    ```python
    import steerscope as ss

    without = ss.load_vector("happy.safetensors").ablate(layers="10-15")
    ```
    """

    unit = True
    op: Literal["ablate"] = "ablate"
    scale: Strength = 0.0
    to: Strength | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.to is not None and self.scale:
            raise ValueError("scale and to exclude each other; give one of them")
        return self

    def coefficients(self) -> Coefficients:
        return (self.to or 0.0, self.scale, 1.0, -math.inf, math.inf)


def _few(ops: object) -> object:
    if isinstance(ops, list | tuple) and len(ops) > MOST_OPS:
        raise ValueError(f"there are {len(ops)} ops; give at most {MOST_OPS}")
    return ops


Op = Annotated[Add | Cap | Ablate, Field(discriminator="op")]
if TYPE_CHECKING:
    Ops = Sequence[Add | Cap | Ablate]
else:
    Ops = Annotated[tuple[Op, ...], BeforeValidator(_few)]


class Steering(Spec):
    """Ops of one request, in order. `reset` drops all earlier steerings when steerings are composed.

    ```python
    import steerscope as ss

    happy = ss.load_vector("happy.safetensors")
    steering = ss.Steering.of(happy.add(1.7, layers=19), happy.cap(max=4.0, layers="20-24"))
    assert ss.Steering.from_json(steering.to_json()) == steering  # as a file, or over HTTP
    ```
    """

    ops: Ops = ()
    reset: bool = False

    @model_validator(mode="before")
    @classmethod
    def _from_ops(cls, data: object) -> object:
        return {"ops": data} if isinstance(data, list | tuple) else data

    @classmethod
    def of(cls, *ops: Add | Cap | Ablate) -> Self:
        """Make a steering of these ops, in this order."""
        return cls(ops=ops)

    @classmethod
    def none(cls) -> Self:
        """Switch off the engine's default and every surrounding `with engine.steering(...)`."""
        return cls(reset=True)

    def then(self, later: "Steering") -> "Steering":
        """Return this steering followed by another. A reset in the later one drops this one."""
        if later.reset or not (self.ops or self.reset):
            return later
        return Steering(ops=(*self.ops, *later.ops), reset=self.reset) if later.ops else self
