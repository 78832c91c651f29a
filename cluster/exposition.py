"""The figures as Prometheus text, with vLLM's names where vLLM has the metric. No label holds a request's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from orcaserve.cluster import figures
from orcaserve.cluster.figures import BOUNDS, Buckets, Labels
from orcaserve.cluster.wire import GroupState, View
from orcaserve.engine.errors import QueueFull
from orcaserve.engine.messages import FinishReason

_HISTOGRAMS = {
    figures.FIRST_TOKEN: "From arrival to the first token.",
    figures.INTER_TOKEN: "Between two chunks of a stream.",
    figures.LATENCY: "From arrival to the last byte of an answered request.",
    figures.QUEUE_TIME: "From arrival to being scheduled first.",
    figures.TENANT_QUEUE_TIME: "From arrival to being scheduled first, by tenant.",
    figures.STEP_TIME: "One model step of one group, as its scheduler sees it.",
    figures.STEP_TOKENS: "Tokens computed in one step of one group.",
    figures.PLAN_TIME: "The scheduler's time to plan one step.",
}
_COUNTERS = {
    figures.PROMPT_TOKENS: "Prompt tokens of requests that have ended.",
    figures.GENERATION_TOKENS: "Tokens handed out.",
    figures.SUCCESS: "Choices, by how they ended.",
    figures.REFUSED: "Requests refused, by the code of the error.",
    figures.HTTP_REQUESTS: "HTTP requests, by route and status.",
}
_LABELS = {
    figures.SUCCESS: ("finished_reason",),
    figures.REFUSED: ("code",),
    figures.HTTP_REQUESTS: ("path", "status"),
    figures.TENANT_QUEUE_TIME: ("tenant",),
}
# Shown as 0 from the start, so that a rate over them is right when the first one comes.
_ZEROS: dict[str, list[Labels]] = {
    figures.PROMPT_TOKENS: [()],
    figures.GENERATION_TOKENS: [()],
    figures.SUCCESS: [(reason,) for reason in get_args(FinishReason)],
    figures.REFUSED: [(QueueFull.code,), ("invalid_request",)],
}
_NO_TENANT = "default"

Values = dict[Labels, float]


def expose(model_name: str, view: View | None) -> bytes:
    """Prometheus exposition text. Without a view the scheduler is away, and there is nothing else to say."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(model_name, view))
    return generate_latest(registry)


class _Families:
    """A collector in prometheus_client's sense."""

    def __init__(self, model_name: str, view: View | None) -> None:
        self._model_name = model_name
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view
        yield self._gauge("orcaserve:scheduler_up", "Whether the scheduler answers.", {(): float(view is not None)})
        if view is not None:
            yield from self._requests(view)
            yield from self._engine(view)
            yield from self._groups(view)
            yield from self._cluster(view)

    def _requests(self, view: View) -> Iterator[Metric]:
        for name, text in _HISTOGRAMS.items():
            yield self._histogram(name, text, view.figures.histograms.get(name, {}))
        for name, text in _COUNTERS.items():
            values = dict.fromkeys(_ZEROS.get(name, []), 0.0) | view.figures.counters.get(name, {})
            yield self._counter(name, text, values, _LABELS.get(name, ()))

    def _engine(self, view: View) -> Iterator[Metric]:
        stats = view.status.scheduler
        yield self._gauge("vllm:num_requests_running", "Choices in running batches.", {(): stats.running})
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", {(): stats.waiting})
        tenants = dict.fromkeys(view.figures.histograms.get(figures.TENANT_QUEUE_TIME, {("",): None}), 0.0)
        waiting = tenants | {(tenant,): float(count) for tenant, count in stats.waiting_by_tenant.items()}
        yield self._gauge("orcaserve:waiting_requests", "Requests in the queue, by tenant.", waiting, ("tenant",))
        for name, text, value in (
            ("vllm:num_preemptions", "Requests put back into the queue for want of KV blocks.", stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", stats.num_drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted),
            ("orcaserve:computed_prompt_tokens", "Prompt tokens computed, again included.", stats.prompt_tokens),
            ("orcaserve:padding_tokens", "Tokens computed for nobody.", stats.padding_tokens),
            ("orcaserve:migrations", "Requests that lost their group and went on.", stats.num_migrations),
            (
                "orcaserve:imported_kv_blocks",
                "KV blocks that requests took along from the pool of a lost group.",
                stats.num_imported_blocks,
            ),
            ("orcaserve:steps", "Model steps of all groups.", stats.num_steps),
        ):
            yield self._counter(name, text, {(): float(value)})

    def _groups(self, view: View) -> Iterator[Metric]:
        limits, groups = view.limits, view.status.scheduler.groups
        used: Values = {(str(group.group_id),): group.used_blocks / group.total_blocks for group in groups}
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of a group's KV blocks, 0 to 1.", used, ("engine",))
        names = ("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching")
        described: Values = {
            (str(group.group_id), str(limits.block_size), str(group.total_blocks), str(limits.enable_prefix_caching)): 1
            for group in groups
        }
        yield self._gauge("vllm:cache_config_info", "A group's KV cache, in labels.", described, names)
        seats: Values = {(str(group.group_id),): float(group.running) for group in groups}
        yield self._gauge("orcaserve:group_running", "Slots in use, by group.", seats, ("engine",))

    def _cluster(self, view: View) -> Iterator[Metric]:
        status = view.status
        states: Values = {(state,): 0.0 for state in get_args(GroupState)}
        for group in status.groups:
            states[(group.state,)] += 1
        yield self._gauge("orcaserve:groups", "Tensor-parallel groups, by state.", states, ("state",))
        yield self._gauge("orcaserve:routers", "Connected routers.", {(): status.num_routers})
        yield self._gauge("orcaserve:uptime_seconds", "Age of the scheduler.", {(): status.uptime_s})
        losses: Values = {(): float(status.num_group_losses)}
        yield self._counter("orcaserve:group_losses", "Groups that died while they worked.", losses)
        refused: Values = {(): float(status.num_refused_connections)}
        yield self._counter("orcaserve:connections_refused", "Channel connections without the key.", refused)

    def _gauge(self, name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self._model_name, *_shown(labels, key)), value)
        return family

    def _counter(self, name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self._model_name, *_shown(labels, key)), value)
        return family

    def _histogram(self, name: str, text: str, values: dict[Labels, Buckets]) -> Metric:
        labels = _LABELS.get(name, ())
        family = HistogramMetricFamily(name, text, labels=("model_name", *labels))
        empty = Buckets([0] * (len(BOUNDS[name]) + 1), 0.0)
        for key, buckets in (values or {("",) * len(labels): empty}).items():
            below, cumulative = 0, []
            for bound, count in zip((*BOUNDS[name], float("inf")), buckets.counts, strict=True):
                below += count
                cumulative.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
            family.add_metric((self._model_name, *_shown(labels, key)), cumulative, buckets.total)
        return family


def _shown(labels: tuple[str, ...], values: tuple[str, ...]) -> list[str]:
    """Prometheus takes an empty label for none at all, so the nameless tenant gets a name."""
    return [value or _NO_TENANT if label == "tenant" else value for label, value in zip(labels, values, strict=True)]
