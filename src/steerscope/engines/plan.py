"""From specs to a plan: one request resolved against one model, with every problem found before anything runs.

Selectors become positions, names become vectors, ops become columns. Both engines run plans and nothing else.
"""

import difflib
import functools
import hashlib
from array import array
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from steerscope.core.sites import TABLE, refusal, tap_of
from steerscope.core.slot_table import Column, Key, PlacedOp, pack
from steerscope.lenses.monitor import WatchPlan
from steerscope.lenses.pack import Pack
from steerscope.lenses.reader import Registered
from steerscope.lenses.rules import compile_rules
from steerscope.specs.capture import Capture
from steerscope.specs.errors import InvalidRequest, Problem
from steerscope.specs.sampling import Sampling
from steerscope.specs.steering import (
    Ablate,
    Add,
    Cap,
    Coefficients,
    LayersLike,
    Site,
    Steering,
    VectorData,
    parse_layers,
)
from steerscope.specs.tokens import END, MessageSpan, Positions, SelectorError, resolve
from steerscope.specs.watch import InlinePack, Steer, Watch

_MAX_TEMPLATES = 128


@dataclass(frozen=True, slots=True)
class Facts:
    """What a request must fit: the model's sizes and what the engine can tap."""

    name: str
    layers: int
    hidden: int
    vocab: int
    context: int | None
    max_columns: int
    refused_sites: Mapping[Site, str]  # site → why it cannot be had
    tapped: frozenset[Key] | None = None  # what was tapped at the start; None: everything can be, at any time
    steers: bool = True  # False: the taps only read
    captures: bool = True  # False: the taps only write
    switches: bool = True  # False: what rules find comes too late for layers of other pipeline stages


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, with message spans when they came from a chat."""

    token_ids: list[int]
    messages: tuple[MessageSpan, ...] | None = None
    open_message: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """Where one op of a request really acts: shown to the user as `generation.steered`."""

    op: Add | Cap | Ablate
    layers: tuple[int, ...]
    positions: Positions
    rule: str | None = None  # it acts there only while this rule has switched it on


@dataclass(frozen=True, slots=True, eq=False)
class CapturePlan:
    asked: tuple[Key, ...]  # as the user named them
    keys: tuple[Key, ...]  # the taps they come from, without repeats
    positions: Positions
    spec: Capture

    def n_bytes(self, most_rows: int, hidden: int, itemsize: int) -> int:
        """Return the host bytes of its rows, of a text with `most_rows` rows; a reduction is one row of float32."""
        n_rows = 1 if self.spec.reduce else self.positions.count(most_rows)
        return n_rows * len(self.keys) * hidden * (4 if self.spec.reduce else itemsize)


@dataclass(eq=False)
class RequestTemplate:
    """What requests share that ask for the same, with prompts of one length."""

    prompt_length: int
    most_rows: int  # p + max_tokens − 1: the last sampled token has no row
    columns: tuple[Column, ...] = ()
    applied: tuple[Applied, ...] = ()
    capture: CapturePlan | None = None
    watch: WatchPlan | None = None
    engine_part: Any = None  # what an engine makes of it, once

    @functools.cached_property
    def tapped(self) -> frozenset[Key]:
        steered = {key for column in self.columns for key in column.vectors}
        read = {self.watch.key} if self.watch else set()
        return frozenset(steered | read | set(self.capture.keys if self.capture else ()))


@dataclass(slots=True)  # not frozen: that would make it twice as expensive to make
class Plan:
    request_id: str
    choice: int
    prompt: Prompt
    sampling: Sampling  # of a request for several texts, each has its own seed
    template: RequestTemplate

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.template.columns

    @property
    def capture(self) -> CapturePlan | None:
        return self.template.capture

    @property
    def watch(self) -> WatchPlan | None:
        return self.template.watch

    @property
    def most_rows(self) -> int:
        return self.template.most_rows


class RequestSpecs(NamedTuple):
    """What one request asks for beside its prompt."""

    sampling: Sampling
    steering: Steering
    capture: Capture | None = None
    watch: Watch | None = None


class Planner:
    """Collects the problems of one request while resolving it."""

    def __init__(
        self, facts: Facts, vectors: Mapping[str, VectorData], packs: Mapping[str, Registered] | None = None
    ) -> None:
        self.facts = facts
        self.vectors = vectors
        self.packs = packs or {}
        self.problems: list[Problem] = []

    def plan(
        self, request_id: str, prompt: Prompt, sampling: Sampling, steering: Steering, capture: Capture | None
    ) -> Plan:
        self.check_prompt(prompt, sampling)
        return Plan(request_id, 0, prompt, sampling, self.template(prompt, RequestSpecs(sampling, steering, capture)))

    def template(self, prompt: Prompt, specs: RequestSpecs) -> RequestTemplate:
        """Resolve everything but the prompt's tokens. Raises InvalidRequest with all problems found so far."""
        sampling, steering, capture, watch = specs
        if steering.ops:
            self._check_steers("steer")
        if capture:
            self._check_captures("capture")
        most = len(prompt.token_ids) + sampling.max_tokens - 1
        placed = self._place(steering, prompt, most, "steer")
        watch_plan = self._watch(watch, prompt, most) if watch else None
        placed += self._switched(watch, prompt, most) if watch else []
        columns = columns_of(tuple(placing for placing, _ in placed))
        if len(columns) > self.facts.max_columns:
            what = f"the ops need {len(columns)} columns, the engine has {self.facts.max_columns} per token"
            self._problem("steer.ops", what, "use fewer ops with differing tokens, or start it with more max_columns")
        capture_plan = self._capture(capture, prompt, most) if capture else None
        if self.problems:
            raise InvalidRequest(self.problems)
        applied = tuple(applied for _, applied in placed)
        return RequestTemplate(len(prompt.token_ids), most, columns, applied, capture_plan, watch_plan)

    def _problem(self, field: str, what: str, remedy: str) -> None:
        self.problems.append(Problem(field, what, remedy))

    def _check_steers(self, field: str) -> None:
        if not self.facts.steers:
            self._problem(field, "the engine was started with taps that only read", "start it with steer on")

    def _check_captures(self, field: str) -> None:
        if not self.facts.captures:
            self._problem(field, "the engine was started with taps that only write", "start it with capture on")

    def check_prompt(self, prompt: Prompt, sampling: Sampling) -> None:
        ids = prompt.token_ids
        facts = self.facts
        if not ids:
            self._problem("prompt", "the prompt is empty", "give at least one token")
        if not ids_exist(ids, facts.vocab):
            bad = [i for i in ids if not isinstance(i, int | np.integer) or not 0 <= i < facts.vocab]
            self._problem("prompt", f"token id {bad[0]!r} does not exist", f"{facts.name} has ids 0–{facts.vocab - 1}")
        if facts.context is None or len(ids) + sampling.max_tokens <= facts.context:
            return
        if len(ids) >= facts.context:
            what = f"the prompt has {len(ids)} tokens, the context of {facts.name} holds {facts.context}"
            self._problem("prompt", what, f"shorten it to at most {facts.context - 1} tokens")
        else:
            what = f"{len(ids)} prompt tokens + max_tokens {sampling.max_tokens} exceed the context of {facts.context}"
            self._problem("sampling.max_tokens", what, f"lower max_tokens to {facts.context - len(ids)}")

    def _place(
        self, steering: Steering, prompt: Prompt, most: int, field: str, gate: int = 0, rule: str | None = None
    ) -> list[tuple["Placing", Applied]]:
        placed: list[tuple[Placing, Applied]] = []
        # What a rule switches acts on generated rows only: how a prompt is cut into steps must change nothing.
        generated = Positions(((len(prompt.token_ids), END),))
        for i, op in enumerate(steering.ops):
            here = f"{field}.ops[{i}]"
            data = self._vector(op, here)
            positions = self._positions(op.tokens, prompt, most, here)
            layers = self._op_layers(op, data, here)
            self._check_site(op.site, f"{here}.site")
            if not TABLE[op.site].steerable:
                self._problem(f"{here}.site", f"{op.site} can only be read", "use resid_post")
            if data is None or positions is None or layers is None:
                continue
            positions = positions & generated if gate else positions
            if positions.count(most) == 0:
                what = "selects no generated row" if gate else "selects no token of this request"
                self._problem(f"{here}.tokens", f"{op.tokens!r} {what}", "widen it")
            self._check_tapped(layers, op.site, f"{here}.layers")
            placing = Placing(raw_of(data, layers), layers, op.site, op.unit, op.coefficients(), positions, gate)
            placed.append((placing, Applied(op, layers, positions, rule)))
        return placed

    def _switched(self, watch: Watch, prompt: Prompt, most: int) -> list[tuple["Placing", Applied]]:
        """The steerings of rules, each behind a gate of its own: 1 + the number of its rule."""
        placed: list[tuple[Placing, Applied]] = []
        for i, rule in enumerate(watch.rules):
            if isinstance(rule.then, Steer):
                field = f"watch.rules[{i}].then.steering"
                self._check_steers(field)
                if not self.facts.switches:
                    what = "the layers are spread over pipeline stages, which do not hear of a rule in time"
                    self._problem(field, what, "set pipeline_parallel_size to 1, or use flag or stop")
                placed += self._place(rule.then.steering, prompt, most, field, i + 1, rule.name)
        return placed

    def _watch(self, watch: Watch, prompt: Prompt, most: int) -> WatchPlan | None:
        self._check_captures("watch")
        positions = self._positions(watch.tokens, prompt, most, "watch")
        if positions is not None and positions.count(most) == 0:
            self._problem("watch.tokens", f"{watch.tokens!r} selects no row of this request", "widen it")
        found = self._pack(watch)
        if found is None:
            return None
        info = found.pack.info
        options = found.options
        facts = self.facts
        misfits = found.pack.check(facts.hidden, facts.layers, model=facts.name, any_model=options.any_model)
        self.problems += [problem.under("watch.pack") for problem in misfits]
        self._check_site(info.site, "watch.pack")
        self._check_tapped((info.layer,), info.site, "watch.pack")
        compiled, problems = compile_rules(watch.rules, found.pack, found.readable)
        self.problems += [problem.under("watch") for problem in problems]
        beyond = [str(level) for level in watch.levels or () if level >= found.pack.levels]
        if beyond:
            what = f"level {', '.join(beyond)} does not exist"
            self._problem("watch.levels", what, f"this pack has levels 0–{found.pack.levels - 1}")
        if watch.levels is not None and options.tiered:
            self._problem("watch.levels", "the pack is kept in tiers, which go down the levels", "leave them out")
        if positions is None:
            return None
        return WatchPlan(found, tap_of(info.layer, info.site), positions, compiled, watch)

    def _pack(self, watch: Watch) -> Registered | None:
        name = watch.pack_name
        if name in self.packs:
            return self.packs[name]
        if isinstance(name, InlinePack) and isinstance(name.pack, Pack):
            found = Registered(name.pack)
            _ = found.digest  # hashes a large pack here, not in the engine's thread
            return found
        for known in self.packs.values():
            if name == f"digest:{known.pack.digest}":
                return known
        near = difflib.get_close_matches(name, self.packs, n=3, cutoff=0.4) or sorted(self.packs)
        self._problem("watch.pack", f"no pack is named {name!r}", f"register it; known: {', '.join(near) or 'none'}")
        return None

    def _vector(self, op: Add | Cap | Ablate, field: str) -> VectorData | None:
        data = self.vectors.get(op.source) if isinstance(op.source, str) else op.source
        if data is None:
            known = ", ".join(sorted(self.vectors)) or "none"
            self._problem(f"{field}.vector", f"no vector is named {op.vector!r}", f"register it; known: {known}")
        elif data.hidden != self.facts.hidden:
            what = f"the vector has {data.hidden} numbers, {self.facts.name} has hidden size {self.facts.hidden}"
            self._problem(f"{field}.vector", what, "use a vector made for this model")
            return None
        return data

    def _op_layers(self, op: Add | Cap | Ablate, data: VectorData | None, field: str) -> tuple[int, ...] | None:
        if data is None:
            if op.layers is not None:  # can be judged without the vector
                self._check_layers(self._all(op.layers), f"{field}.layers")
            return None
        if op.layers is None and data.shared is not None:
            self._problem(f"{field}.layers", "the vector is the same for every layer", "say which layers to steer")
            return None
        layers = tuple(data.per_layer) if op.layers is None else self._all(op.layers)
        missing = [] if data.shared is not None else [layer for layer in layers if layer not in data.per_layer]
        if missing:
            has = ", ".join(map(str, sorted(data.per_layer)))
            self._problem(f"{field}.layers", f"the vector has no layers {missing}", f"it has {has}")
            return None
        return layers if self._check_layers(layers, f"{field}.layers") else None

    def _all(self, layers: LayersLike) -> tuple[int, ...]:
        parsed = parse_layers(layers)
        return tuple(range(self.facts.layers)) if parsed == "all" else parsed

    def _check_layers(self, layers: tuple[int, ...], field: str) -> bool:
        beyond = [str(layer) for layer in layers if not 0 <= layer < self.facts.layers]
        if beyond:
            named = ", ".join(beyond[:8]) + ("…" if len(beyond) > 8 else "")
            what = f"layer {named} is out of range" if len(beyond) == 1 else f"layers {named} are out of range"
            self._problem(field, what, f"{self.facts.name} has layers 0–{self.facts.layers - 1}")
        return not beyond

    def _check_site(self, site: Site, field: str) -> None:
        reason = self.facts.refused_sites.get(site)
        if reason:
            self.problems.append(refusal(field, site, self.facts.name, reason))

    def _check_tapped(self, layers: tuple[int, ...], site: Site, field: str) -> None:
        tapped = self.facts.tapped
        if tapped is not None and not tapped.issuperset(_taps_of(layers, (site,))[1]):
            missing = [layer for layer in layers if tap_of(layer, site) not in tapped]
            what = f"{site} of layers {', '.join(map(str, missing))} was not tapped when the engine started"
            self._problem(field, what, "start it with these layers and sites")

    def _positions(self, tokens: str, prompt: Prompt, most: int, field: str) -> Positions | None:
        try:
            return resolve(tokens, len(prompt.token_ids), prompt.messages, prompt.open_message, most)
        except SelectorError as error:
            self.problems.append(Problem.of(f"{field}.tokens", error))
            return None

    def _capture(self, capture: Capture, prompt: Prompt, most: int) -> CapturePlan | None:
        layers = self._all(capture.layers)
        positions = self._positions(capture.tokens, prompt, most, "capture")
        sites: tuple[Site, ...] = tuple(capture.sites)  # type: ignore[assignment]
        for site in sites:
            self._check_site(site, "capture.sites")
        if not self._check_layers(layers, "capture.layers") or positions is None:
            return None
        for site in sites:
            self._check_tapped(layers, site, "capture.layers")
        if positions.count(most) == 0:
            self._problem("capture.tokens", f"{capture.tokens!r} selects no row of this request", "widen it")
        return CapturePlan(*_taps_of(layers, sites), positions, capture)


@functools.lru_cache(maxsize=256)
def _taps_of(layers: tuple[int, ...], sites: tuple[Site, ...]) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """Return the sites of layers, and the taps where these are, without repeats."""
    asked: tuple[Key, ...] = tuple((layer, site) for layer in layers for site in sites)
    return asked, tuple(dict.fromkeys(tap_of(layer, site) for layer, site in asked))


def ids_exist(ids: Sequence[int], vocab: int) -> bool:
    """Return whether all ids are whole numbers in [0, vocab)."""
    found = array("I")  # refuses negative ones, and what is not whole
    try:
        found.fromlist(list(ids))
    except (TypeError, OverflowError):
        return False
    return not found or int(np.frombuffer(found, dtype=np.uint32).max()) < vocab


# --- ops to the columns of a token, with results kept for equal ones


class Placing(NamedTuple):
    """An op that will be placed, as far as columns depend on it."""

    raw: tuple[bytes, ...]  # a direction per layer
    layers: tuple[int, ...]
    site: Site
    unit: bool
    coefficients: Coefficients
    positions: Positions
    gate: int = 0


def raw_of(data: VectorData, layers: tuple[int, ...]) -> tuple[bytes, ...]:
    """Return the direction of each of these layers, which the vector must have."""
    if data.shared is not None:
        return (data.shared,) * len(layers)
    return tuple(data.per_layer[layer] for layer in layers)


@functools.lru_cache(maxsize=256)
def columns_of(placed: tuple[Placing, ...]) -> tuple[Column, ...]:
    found: list[tuple[bool, PlacedOp]] = []
    for op in placed:
        for layer, raw in zip(op.layers, op.raw, strict=True):
            vector, content = _direction(raw, op.unit)
            key = tap_of(layer, op.site)
            placed_op = PlacedOp(key, op.positions, vector, op.coefficients, op.gate, content)
            found.append((key != (layer, op.site), placed_op))
    # At a shared tap the ops of resid_post come before those of the next layer's resid_pre.
    return tuple(pack([op for _, op in sorted(found, key=lambda pair: pair[0])]))


@functools.lru_cache(maxsize=4096)
def _direction(raw: bytes, unit: bool) -> tuple[np.ndarray, bytes]:
    """Return a direction as numbers, at unit length if asked, and the hash of these."""
    vector = np.frombuffer(raw, dtype="<f4")
    if unit:
        precise = vector.astype(np.float64)
        vector = (precise / np.linalg.norm(precise)).astype(np.float32)
    return vector, hashlib.blake2b(vector.tobytes(), digest_size=16).digest()


class TemplateCache:
    """The last templates of an engine, by the values of the specs they were made of, and those of requests that still
    run. One with a watch is kept only as long as such a request runs: it holds a lens pack in memory."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Hashable, RequestTemplate] = WeakValueDictionary()
        self._kept: deque[RequestTemplate] = deque(maxlen=_MAX_TEMPLATES)

    def plan(self, planner: Planner, name: str, prompt: Prompt, specs: RequestSpecs, version: int) -> Plan:
        """Plan one request. `version` counts changes of what names in specs stand for."""
        planner.check_prompt(prompt, specs.sampling)
        if prompt.messages is not None:  # selectors may depend on the messages
            return Plan(name, 0, prompt, specs.sampling, planner.template(prompt, specs))
        watch = specs.watch
        pack_kind = None if watch is None else type(watch.pack)  # a pack, or only a name that equals its own
        key = version, len(prompt.token_ids), specs, pack_kind
        template = self._known.get(key)
        if template is None or planner.problems:
            template = self._known[key] = planner.template(prompt, specs)
            if watch is None:
                self._kept.append(template)
        return Plan(name, 0, prompt, specs.sampling, template)
