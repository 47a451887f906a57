"""Check in a worker, before it serves, that every tap steers and captures in the compiled code that will run.

The runner's own dummy batches go through the model, one like a decoding request and one like a short prompt. Every
token is steered at every tap: its projection on a direction of that tap is set to a value, which the captured rows must
show. What else is in those rows does not matter, and nothing of the check stays behind.
"""

import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from steerscope.core.slot_table import Column
from steerscope.engines.vllm.guards import graph_sizes
from steerscope.engines.vllm.wire import Wire, WireCapture, WireColumn
from steerscope.engines.vllm.worker.requests import TrackedRequest
from steerscope.engines.vllm.worker.tap import TapMode, launch_mode
from steerscope.specs.errors import UnsupportedModel
from steerscope.specs.steering import Ablate
from steerscope.specs.tokens import EVERYWHERE

log = logging.getLogger("steerscope")
_BATCHES = ((2, False), (1, True))  # tokens, and whether as decoding requests; one token must not be traced first
_DRY_TOKENS = 4
_FACTOR = 4.0  # the steered value, in units of the row's norm without steering
_REACHED = 0.01  # of a row's norm: steering of earlier layers moves the row by more
_BLANK = 7.0  # fills a row before the taps write to it
_MAX_TRIES = 3  # dummy batches may read memory that was never written and is not finite


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
def check_taps(worker: Any, dummy_run: Callable[..., Any]) -> None:
    """Raise UnsupportedModel if a tap does not steer or capture."""
    settings = worker.settings
    if not (settings.steer and settings.capture and worker.taps.keys) or settings.noop:
        return
    if "force_attention" in inspect.signature(dummy_run).parameters:  # else attention returns unwritten memory
        dummy_run = functools.partial(dummy_run, force_attention=True)
    for batch in _BATCHES:
        if not any(_check_batch(worker, dummy_run, batch) for _ in range(_MAX_TRIES)):
            log.warning("vLLM's dummy batches are not finite: the taps were not tried in the worker")


@torch.inference_mode()
def compile_kernels(worker: Any, dummy_run: Callable[..., Any]) -> None:
    """Run every mode of the taps once in a forward that is not replayed, because a kernel is compiled when it is first
    launched."""
    tokens = max(2, max(graph_sizes(worker.runner.vllm_config), default=0) + 1)
    if tokens > len(worker.step_index.index):
        return
    for steer, capture in itertools.product((False, True), repeat=2):
        with launch_mode(TapMode(steer, capture)):
            dummy_run(tokens)


def _check_batch(worker: Any, dummy_run: Callable[..., Any], batch: tuple[int, bool]) -> bool:
    """Check the taps in one dummy batch; return False if its numbers are not finite and show nothing."""
    keys = worker.taps.keys
    rng = np.random.default_rng(0)
    directions = torch.from_numpy(rng.standard_normal((len(keys), worker.hidden)))
    directions = (directions / directions.norm(dim=1, keepdim=True)).float()
    untouched = _run(worker, dummy_run, batch, None)
    norms = untouched.norm(dim=-1).amax(dim=0).clamp(min=1e-3)
    if not norms.isfinite().all():
        return False
    values = _FACTOR * norms
    vectors = dict(zip(keys, directions.numpy(), strict=True))
    coefficients = {
        key: Ablate(vector=[1.0], to=value).coefficients() for key, value in zip(keys, values.tolist(), strict=True)
    }
    rows = _run(worker, dummy_run, batch, Column(EVERYWHERE, 0, vectors, coefficients))
    if not rows.isfinite().all():
        return False
    _check_projections(worker, rows, directions.double(), values)
    _check_later_layers(worker, rows - untouched, directions.double(), norms)
    return True


def _run(worker: Any, dummy_run: Callable[..., Any], batch: tuple[int, bool], column: Column | None) -> torch.Tensor:
    """Run a dummy batch as one request that captures every tap, steered by `column`; return the rows as float64
    [tokens, taps, hidden], NaN if a tap has found them not finite."""
    (tokens, uniform), taps, index, pool = batch, worker.taps, worker.step_index, worker.pool
    capture = WireCapture(taps.keys, EVERYWHERE, False, None, 0, tokens)
    columns = () if column is None else (WireColumn.of(column),)
    wire = Wire("check", None, 0, 0, columns, capture)
    leases = [] if column is None else [taps.table.acquire(column)]
    group = (taps.keys, False, None)
    request = TrackedRequest(wire, leases, taps.join_group(group), len(taps.keys), flag=1)
    index.requests["check"] = request
    plan = index.plan(["check"], np.array([0, tokens]), np.array([0]), worker.reserve, lambda _: None)
    worker.graphs.use(plan.busy)
    pool.upload_index(tokens, precompute=uniform)
    try:
        index.proving = True
        (part,) = plan.slices
        cells = pool.rows(part.cell, tokens, len(taps.keys)).fill_(_BLANK)
        dummy_run(tokens, uniform_decode=uniform)
        rows = cells.double().cpu()
        pool.give(*part.freed)
        _check_captured(worker, rows)
        if pool.overflow_flags[request.flag]:  # the tap has cleared the row
            rows[:] = torch.nan
        return rows
    finally:
        index.proving = False
        pool.overflow_flags[1:] = 0
        index.forget("check")
        index.clear()
        pool.upload_index(0)
        taps.groups.release(group)
        for lease in leases:
            taps.table.release(lease)


def _check_captured(worker: Any, rows: torch.Tensor) -> None:
    if len(blank := (rows == _BLANK).all(dim=-1).any(dim=0).nonzero().flatten()):
        layer, site = worker.taps.keys[int(blank[0])]
        raise UnsupportedModel(
            f"self-test failed: no row of {site} of layer {layer} was captured in the mode that will run"
        )


def _check_projections(worker: Any, rows: torch.Tensor, directions: torch.Tensor, values: torch.Tensor) -> None:
    """Check that every row has the projection it was steered to. A row that was not steered has a projection of about
    norm / √hidden, far more than rounding makes."""
    eps = torch.finfo(worker.dtype).eps
    allowed = max(1e-3, 8 * eps) * values + 8 * eps * rows.norm(dim=-1) / worker.hidden**0.5
    errors = ((rows * directions).sum(dim=-1) - values).abs()
    for i, (layer, site) in enumerate(worker.taps.keys):
        if bool((errors[:, i] > allowed[:, i]).any()):
            raise UnsupportedModel(
                f"self-test failed: steering at {site} of layer {layer} did not arrive in the mode that will run "
                f"(off by {errors[:, i].max():.2g} of {values[i]:.2g}, allowed {allowed[:, i].max():.2g})"
            )


def _check_later_layers(worker: Any, moved: torch.Tensor, directions: torch.Tensor, norms: torch.Tensor) -> None:
    """Check that steering reaches the taps of later layers: rows there move in directions other than their own."""
    keys = worker.taps.keys
    first = min(layer for layer, _ in keys)
    beside = moved - (moved * directions).sum(dim=-1, keepdim=True) * directions
    reached = (beside.norm(dim=-1) > _REACHED * norms).all(dim=0).tolist()
    for (layer, site), found in zip(keys, reached, strict=True):
        in_stream = site.startswith("resid")  # in a dummy batch attention may return the same for any input
        if in_stream and layer > first and not found:
            raise UnsupportedModel(
                f"self-test failed: what is steered before layer {layer} does not reach {site} of that layer in the "
                "mode that will run"
            )
