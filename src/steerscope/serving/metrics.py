"""Metrics for Prometheus: times of tokens and requests, counts of tokens, and what waits or was refused."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from steerscope.engines.results import Event, Generation, TokenEvent

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
# The engine's own statistics: key → (kind, metric, help).
_ENGINE = {
    "running": (GaugeMetricFamily, "engine_running", "choices in the engine's batch"),
    "waiting": (GaugeMetricFamily, "engine_waiting", "choices that wait in the engine"),
    "capture_bytes": (GaugeMetricFamily, "capture_bytes", "bytes of captured rows"),
    "rows": (CounterMetricFamily, "rows", "captured rows"),
    "readings": (CounterMetricFamily, "readings", "rows that lenses have read"),
    "steps": (CounterMetricFamily, "engine_steps", "steps of the engine"),
    "failed": (CounterMetricFamily, "engine_failed", "choices that failed in the engine"),
    "capture_reserved": (CounterMetricFamily, "capture_reserved_bytes", "bytes reserved for captured rows"),
    "capture_released": (CounterMetricFamily, "capture_released_bytes", "bytes of captures that were given back"),
    "lens_seconds": (CounterMetricFamily, "lens_seconds", "seconds spent on lenses"),
}


class Metrics:
    """All metrics of a server. It also collects the values that prometheus_client does not keep."""

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """`gauges` maps names to help and current value."""
        self.registry = CollectorRegistry()
        self.first = self._histogram("ttft_seconds", "time to the first token")
        self.total = self._histogram("request_seconds", "time of a whole request")
        self.tokens = self._counter("generated_tokens", "generated tokens")
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.requests = self._counter("requests", "HTTP requests", "route", "status")
        self.rejected = self._counter("rejected", "requests that were refused", "reason")
        self.cancelled = self._counter("cancelled", "requests whose client left")
        self.fired = self._counter("rule_firings", "firings of rules", "action")
        gauges = {**gauges, "tokens_per_second": ("generated tokens per second since the last scrape", self._rate)}
        for name, (about, value) in gauges.items():
            Gauge(f"steerscope_{name}", about, registry=self.registry).set_function(value)
        self.engine: Mapping[str, float] = {}  # the engine's statistics, as of the last scrape that it answered
        self._gaps = [0] * (len(_BETWEEN) + 1)
        self._gap_seconds = 0.0
        self._recent = 0  # tokens since the last scrape
        self._tokens_per_s = 0.0
        self._scraped = time.monotonic()
        self.registry.register(self)  # type: ignore[arg-type]

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"steerscope_{name}", about, buckets=_FIRST, registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"steerscope_{name}", about, labels, registry=self.registry)

    def gap(self, seconds: float, count: int) -> None:
        """Count times between tokens; a histogram of prometheus_client would take two locks for each token."""
        self._gaps[bisect_left(_BETWEEN, seconds)] += count
        self._gap_seconds += seconds * count

    def collect(self) -> Iterator[Metric]:
        for key, (kind, name, about) in _ENGINE.items():
            if key in self.engine or kind is GaugeMetricFamily:
                yield kind(f"steerscope_{name}", about, value=self.engine.get(key, 0.0))
        bounds = map(floatToGoString, (*_BETWEEN, float("inf")))
        buckets = list(zip(bounds, accumulate(self._gaps), strict=True))
        what = "time between tokens of a choice"
        yield HistogramMetricFamily("steerscope_inter_token_seconds", what, buckets, self._gap_seconds)

    def done(self, generation: Generation, seconds: float) -> None:
        """Count a whole request."""
        n_tokens = sum(len(choice.token_ids) for choice in generation.choices)
        self._recent += n_tokens
        self.tokens.inc(n_tokens)
        self.prompt_tokens.inc(len(generation.prompt_token_ids))
        self.total.observe(seconds)
        for choice in generation.choices:
            for firing in choice.firings:
                self.fired.labels(firing.action).inc()

    def _rate(self) -> float:
        """Return the tokens per second between two scrapes that are at least a second apart."""
        now = time.monotonic()
        if now - self._scraped >= 1.0:
            self._tokens_per_s = self._recent / (now - self._scraped)
            self._recent = 0
            self._scraped = now
        return self._tokens_per_s


class RequestTimes:
    """The times of one request. Tokens that came together share the time since the ones before."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}  # by prompt and choice

    def batch(self, prompt: int, batch: Sequence[Event]) -> None:
        now = time.perf_counter()
        counts: dict[int, int] = {}
        for event in batch:
            if isinstance(event, TokenEvent):
                counts[event.choice] = counts.get(event.choice, 0) + 1
        for choice, count in counts.items():
            before = self._last.get((prompt, choice))
            self._last[prompt, choice] = now
            if before is None:
                self._metrics.first.observe(now - self._started)
                before = now
                count = count - 1
            if count:
                self._metrics.gap((now - before) / count, count)

    def whole(self, generation: Generation) -> None:
        """Count the mean times of a request whose tokens were not streamed."""
        for choice in generation.choices:
            t = choice.timings
            gaps = len(choice.token_ids) - 1
            self._metrics.first.observe(t.first_token)
            if gaps > 0:
                self._metrics.gap((t.total - t.first_token) / gaps, 1)

    def done(self, generation: Generation) -> None:
        self._metrics.done(generation, time.perf_counter() - self._started)
