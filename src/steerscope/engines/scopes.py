"""Steering that surrounds requests, and vectors and packs by name: what an engine remembers between calls."""

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Unpack

from steerscope.core.sites import refusal
from steerscope.engines.options import PackKeywords, SteerLike
from steerscope.engines.packs import LOAD_S, Packs
from steerscope.engines.plan import Facts, Planner, Prompt
from steerscope.lenses.pack import Pack
from steerscope.lenses.reader import PackOptions, Registered
from steerscope.specs.errors import InvalidRequest, Problem, TimedOut
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import Ablate, Add, Cap, Steering, Vector, VectorData

_NOTHING = Steering()


class Scopes:
    facts: Facts
    _lenses: Packs  # made by the engine, before its thread runs

    def __init__(self) -> None:
        self._vectors: dict[str, VectorData] = {}
        self._packs: dict[str, Registered] = {}
        self._naming = threading.Lock()
        self.names_version = 0  # of what vectors' and packs' names stand for
        self._default = _NOTHING
        self._scope: contextvars.ContextVar[Steering | None] = contextvars.ContextVar("steering", default=None)

    @property
    def default_steering(self) -> Steering:
        """Applied to every request, before surrounding `steering` blocks and the request's own."""
        return self._default

    @default_steering.setter
    def default_steering(self, steering: SteerLike | None) -> None:
        spec = as_steering(steering)
        probe = Prompt([0] * 8)
        neutral = [op.model_copy(update={"tokens": "all"}) for op in spec.ops]  # selectors depend on the request
        sampling = Sampling(max_tokens=1)
        Planner(self.facts, self._vectors).plan("default", probe, sampling, Steering(ops=tuple(neutral)), None)
        self._default = spec

    @contextlib.contextmanager
    def steering(self, steering: SteerLike) -> Iterator[None]:
        """Steer every request made inside the block (in this task or thread). Blocks nest, outer first."""
        token = self._scope.set(as_steering(self._scope.get()).then(as_steering(steering)))
        try:
            yield
        finally:
            self._scope.reset(token)

    def register(self, name: str, vector: Vector) -> None:
        """Give a vector a name that ops may use: `Add(vector="happy", scale=1.7)`. A later registration under the same
        name replaces it for later requests."""
        data = Add.parse({"vector": vector, "layers": 0}).source  # whatever an op takes
        if isinstance(data, str):
            raise InvalidRequest([Problem(name, "is given as a name", "give the vector itself")])
        if data.hidden != self.facts.hidden:
            what = f"has {data.hidden} numbers, {self.facts.name} has hidden size {self.facts.hidden}"
            raise InvalidRequest([Problem(name, what, "use a vector made for this model")])
        with self._naming:
            self._vectors[name] = data
            self.names_version += 1

    def unregister(self, name: str) -> None:
        """Forget a vector's name; requests that run with it go on."""
        with self._naming:
            self._vectors.pop(name, None)
            self.names_version += 1

    @property
    def vectors(self) -> Mapping[str, VectorData]:
        return dict(self._vectors)

    def register_pack(
        self, name: str, pack: Pack | str | Path, *, timeout_s: float = LOAD_S, **options: Unpack[PackKeywords]
    ) -> Pack:
        """Load a lens pack, or the directory of one, under a name that `Watch(pack=…)` may use. Requests run on
        meanwhile; a later registration under the same name replaces it for later requests. Raises TimedOut when it is
        not loaded within `timeout_s`; then it is not registered. In a coroutine, call it by `asyncio.to_thread`.

        Options: `weights` (`"fp32"`, `"bf16"`, `"int8"`), `budget` or `budget_bytes` (keep only so much on the device),
        `base_levels`, `pinned`, `any_model`, `workspace`.
        """
        began = time.monotonic()
        given = {**options, "pinned": tuple(options.get("pinned", ()))}
        found = Registered(pack if isinstance(pack, Pack) else Pack.load(pack), PackOptions(**given))  # type: ignore[arg-type]
        facts = self.facts
        loaded = found.pack
        problems = loaded.check(facts.hidden, facts.layers, model=facts.name, any_model=found.options.any_model)
        problems += found.problems()
        if reason := facts.refused_sites.get(loaded.info.site):
            problems.append(refusal("site", loaded.info.site, facts.name, reason, "use a pack trained at another site"))
        if problems:
            raise InvalidRequest([problem.under(name) for problem in problems])
        self._lenses.register(found, timeout_s, began)
        with self._naming:
            before = self._packs.get(name)
            self._packs[name] = found
            self.names_version += 1
        if before is not None:
            with contextlib.suppress(TimedOut):  # the engine drops the old pack when it gets to it
                self._lenses.unregister(before)
        return loaded

    def unregister_pack(self, name: str) -> None:
        """Forget a pack; requests that it is watching go on."""
        with self._naming:
            before = self._packs.pop(name, None)
            self.names_version += 1
        if before is not None:
            self._lenses.unregister(before)

    @property
    def packs(self) -> Mapping[str, Pack]:
        return {name: found.pack for name, found in self._packs.items()}

    def surrounding(self) -> Steering:
        """What applies to a request made here and now, before its own."""
        return self._default.then(as_steering(self._scope.get()))


def as_steering(steer: SteerLike | None) -> Steering:
    if steer is None:
        return _NOTHING
    if isinstance(steer, Add | Cap | Ablate):
        return Steering.model_construct(ops=(steer,))  # the op is checked already
    return steer
