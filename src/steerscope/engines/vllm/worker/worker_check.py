"""Proof in a worker, before it serves: every tap steers and captures in the compiled code and graphs that will run.

The runner's own dummy batches go through the model, one like a decoding request and one like a short prompt. Every
token is steered at every tap: its projection on a direction of that tap is set to a value. The rows that the taps
captured must show it. What else is in those rows does not matter, and nothing of this stays behind.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steerscope.core.slot_table import Column, Key
from steerscope.engines.vllm.cuda.prefill_sums import FEW, LINE
from steerscope.engines.vllm.guards import graph_sizes
from steerscope.engines.vllm.wire import Wire, WireCapture, WireColumn
from steerscope.engines.vllm.worker.requests import Asker
from steerscope.engines.vllm.worker.tap import Doing, before_first, over
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Ablate
from steerscope.specs.tokens import EVERYWHERE

if TYPE_CHECKING:
    from steerscope.engines.vllm.worker.worker import WorkerTaps

log = logging.getLogger("steerscope")
_BATCHES = ((2, False), (1, True))  # tokens, and whether as decoding requests; one token must not be traced first
_DRY_TOKENS = 4
_FACTOR = 4.0  # the value, in units of what the row's norm is without it
_REACHED = 0.01  # of a row's norm: steering of earlier layers moves it by more
_BLANK = 7.0  # what a row holds before the taps write to it
_TRIES = 3  # dummy batches may read memory that was never written: now and then it is not finite


def dry_run(runner: Any) -> None:
    """Run a dummy batch through the model as it was written, before it is compiled and has a cache."""
    compiled = [module for module in runner.get_model().modules() if getattr(module, "do_not_compile", None) is False]
    known = inspect.signature(runner._dummy_run).parameters
    options = {name: True for name in ("skip_attn", "is_profile", "skip_eplb") if name in known}
    for module in compiled:
        module.do_not_compile = True
    try:
        with torch.compiler.set_stance("force_eager"):  # single operators, too
            runner._dummy_run(_DRY_TOKENS, **options)
    finally:
        for module in compiled:
            module.do_not_compile = False


@torch.inference_mode()
def prove(taps: "WorkerTaps", dummy_run: Callable[..., Any]) -> None:
    if not (taps.settings.steer and taps.settings.capture and taps.keys) or taps.settings.noop:
        return
    if "force_attention" in inspect.signature(dummy_run).parameters:  # else its output is memory never written
        dummy_run = functools.partial(dummy_run, force_attention=True)
    for batch in _BATCHES:
        if not any(_try(taps, dummy_run, batch) for _ in range(_TRIES)):
            log.warning("vLLM's dummy batches are not finite: the taps were not tried in the worker")


@torch.inference_mode()
def replayed(taps: "WorkerTaps", dummy_run: Callable[..., Any], most: int) -> int:
    """Forwards of more tokens than this call their taps one by one, as one of them shows; `most`: none does."""
    largest, seen = max(graph_sizes(taps.runner.vllm_config), default=0), list[bool]()
    if largest >= most or not taps.keys:
        return most
    runs = torch.zeros(1, LINE, dtype=torch.int32, device=taps.pool.index.device)

    def run(tokens: int, doing: Doing) -> None:
        before_first(taps.pool.index, lambda: seen.append(True) or doing)
        try:
            dummy_run(tokens)
        finally:
            over(taps.pool.index)

    few, many = max(2, largest + 1), max(largest, FEW) + 1
    run(few, Doing())
    if not seen:
        return most
    if taps.device.type == "cuda":  # kernels are compiled when they are first needed: now
        less = Doing(False, False), Doing(False, True), Doing(True, False)
        with_one = tuple(Doing(True, keeps, columns=1) for keeps in (False, True))
        for tokens in [few] if most < many else sorted({few, many}):
            for doing in less + with_one if tokens > FEW else less:
                if taps.settings.steer or not doing.steer:
                    run(tokens, doing)
        if taps.span and most >= many:
            run(many, Doing(False, True, runs))
    return largest


def _try(taps: "WorkerTaps", dummy_run: Callable[..., Any], batch: tuple[int, bool]) -> bool:
    """False: the batch says nothing."""
    rng = np.random.default_rng(0)
    directions = {key: _unit(rng.standard_normal(taps.hidden)) for key in taps.keys}
    untouched = _run(taps, dummy_run, batch, None)
    norms = untouched.norm(dim=-1).amax(dim=0).clamp(min=1e-3)
    if not norms.isfinite().all():
        return False
    values = {key: _FACTOR * float(norm) for key, norm in zip(taps.keys, norms, strict=True)}
    coefficients = {key: Ablate(vector=[1.0], to=value).coefficients() for key, value in values.items()}
    column = Column(EVERYWHERE, 0, directions, coefficients)
    rows = _run(taps, dummy_run, batch, column)
    if rows.isfinite().all():
        _judge(taps, rows, directions, values)
        _judge_later(taps, rows - untouched, norms, directions)
        return True
    return False


def _unit(direction: np.ndarray) -> np.ndarray:
    return (direction / np.linalg.norm(direction)).astype(np.float32)


def _run(
    taps: "WorkerTaps", dummy_run: Callable[..., Any], batch: tuple[int, bool], column: Column | None
) -> torch.Tensor:
    """A dummy batch as if one request asked for it, captured at every tap: float64 [tokens, taps, hidden]."""
    tokens, uniform = batch
    capture = WireCapture(taps.keys, EVERYWHERE, False, None, 0, tokens)
    columns = () if column is None else (WireColumn.of(column),)
    wire = Wire("proof", None, 0, 0, columns, capture)
    leases = [] if column is None else [taps.table.acquire(column)]
    asker = Asker(wire, leases, 0, len(taps.keys), number=1)
    group = (taps.keys, False, None)
    asker.group, _ = taps.groups.acquire(group)
    taps.set_group(asker.group, group)
    taps.books.askers["proof"] = asker
    filled = taps.books.fill(["proof"], np.array([0, tokens]), np.array([0]), taps.reserve, lambda _: None)
    taps.graphs.use(filled.steers, filled.busy)
    taps.pool.send_index(tokens, lay=uniform)
    try:
        taps.books.proving = True
        (part,) = filled.slices
        cells = taps.pool.rows(part.cell, tokens, len(taps.keys)).fill_(_BLANK)
        dummy_run(tokens, uniform_decode=uniform)
        rows = cells.double().cpu()
        taps.pool.give(*part.room)
        _judge_kept(taps, rows)
        if taps.shared.faults[asker.number]:  # a tap found a row that is not finite, and made it zero
            rows[:] = torch.nan
        return rows
    finally:
        taps.books.proving = False
        taps.shared.faults[1:] = 0
        taps.books.forget("proof")
        taps.books.clear()
        taps.pool.send_index(0)
        taps.groups.release(group)
        for lease in leases:
            taps.table.release(lease)


def _judge_later(
    taps: "WorkerTaps", moved: torch.Tensor, norms: torch.Tensor, directions: dict[Key, np.ndarray]
) -> None:
    """What taps change must reach the taps of later layers: rows there move in other directions than their own."""
    first = min(layer for layer, _ in taps.keys)
    for i, key in enumerate(taps.keys):
        own = torch.from_numpy(directions[key].astype(np.float64))
        beside = moved[:, i] - (moved[:, i] @ own)[:, None] * own
        in_stream = key[1].startswith("resid")  # (in a dummy batch attention may return the same whatever it reads)
        if in_stream and key[0] > first and not bool((beside.norm(dim=-1) > _REACHED * norms[i]).all()):
            raise UnsupportedModel(
                f"self-test failed: what is steered before layer {key[0]} does not reach {key[1]} of that layer in the "
                "mode that will run"
            )


def _judge_kept(taps: "WorkerTaps", rows: torch.Tensor) -> None:
    if len(blank := (rows == _BLANK).all(dim=-1).any(dim=0).nonzero().flatten()):
        layer, site = taps.keys[int(blank[0])]
        raise UnsupportedModel(
            f"self-test failed: no row of {site} of layer {layer} was captured in the mode that will run"
        )


def _judge(taps: "WorkerTaps", rows: torch.Tensor, directions: dict[Key, np.ndarray], values: dict[Key, float]) -> None:
    """A row that was not steered has a projection of about norm / √hidden; rounding makes far less."""
    eps = torch.finfo(taps.dtype).eps
    for i, key in enumerate(taps.keys):
        got = rows[:, i] @ torch.from_numpy(directions[key].astype(np.float64))
        allowed = max(1e-3, 8 * eps) * values[key] + 8 * eps * rows[:, i].norm(dim=-1) / taps.hidden**0.5
        error = (got - values[key]).abs()
        if bool((error > allowed).any()):
            raise UnsupportedModel(
                f"self-test failed: steering at {key[1]} of layer {key[0]} did not arrive in the mode that will run "
                f"(off by {float(error.max()):.2g} of {values[key]:.2g}, allowed {float(allowed.max()):.2g})"
            )
