"""What Prometheus is told: how long tokens take, how many there were, who waits, and what was refused."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from steerscope.engines.results import Event, Generation, TokenEvent
from steerscope.serving.access import serving_of

if TYPE_CHECKING:
    from steerscope.serving.state import Serving

router = APIRouter()
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_STATS_S = 2.0
# What the engine counts itself: name → (its word, help).
_COUNTED = {
    "rows": ("rows", "captured rows"),
    "readings": ("readings", "rows that lenses have read"),
    "steps": ("engine_steps", "steps of the engine"),
    "failed": ("engine_failed", "choices that failed in the engine"),
    "capture_reserved": ("capture_reserved_bytes", "bytes reserved for captured rows"),
    "capture_released": ("capture_released_bytes", "bytes of those that were given back"),
    "lens_seconds": ("lens_seconds", "seconds spent on lenses"),
}


class Metrics:
    def __init__(self, serving: "Serving") -> None:
        self.registry = CollectorRegistry()
        r, name = self.registry, "steerscope"
        self.first = Histogram(f"{name}_ttft_seconds", "time to the first token", buckets=_FIRST, registry=r)
        self.between = Gaps()
        self.total = Histogram(f"{name}_request_seconds", "time of a whole request", buckets=_FIRST, registry=r)
        self.tokens = Counter(f"{name}_generated_tokens", "generated tokens", registry=r)
        self.prompt_tokens = Counter(f"{name}_prompt_tokens", "tokens of prompts", registry=r)
        self.requests = Counter(f"{name}_requests", "HTTP requests", ["route", "status"], registry=r)
        self.rejected = Counter(f"{name}_rejected", "requests that were refused", ["reason"], registry=r)
        self.cancelled = Counter(f"{name}_cancelled", "requests whose client left", registry=r)
        self.fired = Counter(f"{name}_rule_firings", "rules that went on", ["action"], registry=r)
        self.stats: dict[str, float] = {}
        self.rate = 0.0
        self.made, self.counted = 0, (time.monotonic(), 0)
        r.register(_Now(serving, self))  # type: ignore[arg-type]
        r.register(self.between)  # type: ignore[arg-type]

    def tally(self) -> "Tally":
        return Tally(self)

    async def refresh(self, serving: "Serving") -> None:
        """The engine's own counters; one that is too busy to say is shown as it was."""
        try:
            async with asyncio.timeout(_STATS_S):
                self.stats = await asyncio.to_thread(serving.engine.stats)
        except Exception:  # loading, stopping, dead, or in a long step
            return


class Gaps:
    """Times between tokens. A histogram of prometheus_client's takes two locks for each; this one has one writer."""

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(_BETWEEN) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(_BETWEEN, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        most = map(floatToGoString, (*_BETWEEN, float("inf")))
        buckets = list(zip(most, accumulate(self._counts), strict=True))
        what = "time between tokens of a choice"
        yield HistogramMetricFamily("steerscope_inter_token_seconds", what, buckets, self._sum)


class Tally:
    """The times of one request. Tokens that came together share the time since the ones before."""

    __slots__ = ("_last", "_metrics", "born")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self.born = metrics, time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # by prompt and choice

    def tokens(self, prompt: int, batch: Sequence[Event]) -> None:
        now = time.perf_counter()
        counts: dict[int, int] = {}
        for event in batch:
            if isinstance(event, TokenEvent):
                counts[event.choice] = counts.get(event.choice, 0) + 1
        for choice, count in counts.items():
            before = self._last.get((prompt, choice))
            self._last[prompt, choice] = now
            if before is None:
                self._metrics.first.observe(now - self.born)
                before, count = now, count - 1
            if count:
                self._metrics.between.add((now - before) / count, count)

    def untold(self, generation: Generation) -> None:
        """Of a request whose tokens nobody saw one by one: the mean between them."""
        for choice in generation.choices:
            t, count = choice.timings, len(choice.token_ids)
            self._metrics.first.observe(t.first_token)
            if count > 1:
                self._metrics.between.add((t.total - t.first_token) / (count - 1))

    def done(self, generation: Generation) -> None:
        made = sum(len(choice.token_ids) for choice in generation.choices)
        self._metrics.made += made
        self._metrics.tokens.inc(made)
        self._metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
        self._metrics.total.observe(time.perf_counter() - self.born)
        for choice in generation.choices:
            for firing in choice.firings:
                self._metrics.fired.labels(firing.action).inc()


class _Now:
    """What is true at the moment of asking."""

    def __init__(self, serving: "Serving", metrics: Metrics) -> None:
        self._serving, self._metrics = serving, metrics

    def collect(self) -> Iterator[Metric]:
        serving, stats = self._serving, self._metrics.stats
        gauges = {
            "ready": (float(serving.ready), "1 when requests are taken"),
            "running_choices": (float(serving.admission.running), "choices given to the engine"),
            "waiting_requests": (float(serving.admission.waiting), "requests in the queue"),
            "engine_running": (stats.get("running", 0.0), "choices in the engine's batch"),
            "engine_waiting": (stats.get("waiting", 0.0), "choices that wait in the engine"),
            "captures": (float(len(serving.captures)), "captures that wait to be fetched"),
            "capture_bytes": (stats.get("capture_bytes", 0.0), "bytes of captured rows"),
            "vectors": (float(len(serving.vectors)), "vectors known by name"),
            "tokens_per_second": (self._per_second(), "generated tokens per second since the last scrape"),
        }
        for name, (value, about) in gauges.items():
            yield GaugeMetricFamily(f"steerscope_{name}", about, value=value)
        for key, (name, about) in _COUNTED.items():
            if key in stats:
                yield CounterMetricFamily(f"steerscope_{name}", about, value=stats[key])

    def _per_second(self) -> float:
        metrics = self._metrics
        now, (then, before) = time.monotonic(), metrics.counted
        if now - then >= 1.0:
            metrics.rate, metrics.counted = (metrics.made - before) / (now - then), (now, metrics.made)
        return metrics.rate


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    serving = serving_of(request)
    await serving.metrics.refresh(serving)
    return Response(generate_latest(serving.metrics.registry), media_type=CONTENT_TYPE_LATEST)
