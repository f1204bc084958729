"""The engine's metrics as Prometheus text, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .runner import Runner


class Metrics(Collector):
    """Metrics read when they are requested; nothing is counted twice."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, runner: Runner, model: str) -> None:
        self._runner = runner
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> str:
        """All metrics as text."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        runner, scheduler = self._runner, self._runner.scheduler
        prefixes = runner.generator.prefixes
        gauges = {
            "num_requests_running": ("Answers being sampled.", len(scheduler.running)),
            "num_requests_waiting": ("Answers in line.", len(scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of the room for keys and values.", scheduler.share),
        }
        counters = {
            "num_preemptions": ("Answers put back in line.", runner.displaced),
            "prompt_tokens": ("Tokens of prompts.", runner.read_tokens),
            "generation_tokens": ("Tokens sampled.", runner.sampled_tokens),
            "prefix_cache_queries": ("Tokens looked for among old ones.", prefixes.asked),
            "prefix_cache_hits": ("Tokens found among old ones.", prefixes.found),
            "iterations": ("Steps of the batch.", runner.steps),
        }
        for name, (words, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", words, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (words, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", words, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
