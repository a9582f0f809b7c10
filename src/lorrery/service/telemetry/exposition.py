"""Prometheus's text formats, for a registry whose series are mostly an `Exporter`'s.

The client library takes 10 us per line; for a thousand series every few seconds that exceeds the cost of all counting.
An `Exporter`'s series are written here instead, with names and labels cached between scrapes; the library writes those
of other collectors.
"""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics_library
from prometheus_client.registry import Collector

from lorrery.service.telemetry.series import Exporter

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
_EOF = b"# EOF\n"


class Registry(CollectorRegistry):
    """A registry that can write its collectors in the order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self._registered: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """Register a collector; an `Exporter` whose series are already shown by another one is joined to it."""
        if isinstance(collector, Exporter) and any(
            isinstance(one, Exporter) and one.joined(collector) for one in self._registered
        ):
            return
        super().register(collector)
        self._registered.append(collector)

    def unregister(self, collector: Collector) -> None:
        """Unregister a collector."""
        super().unregister(collector)
        self._registered.remove(collector)

    def text(self, *, openmetrics: bool) -> bytes:
        """Return all series, in Prometheus's text format or in OpenMetrics."""
        parts = [_text(collector, openmetrics=openmetrics) for collector in list(self._registered)]
        return b"".join([*parts, _EOF] if openmetrics else parts)


def expose(registry: CollectorRegistry, accept: str, *others: CollectorRegistry) -> tuple[str, bytes]:
    """Return content type and text of all series.

    Args:
        registry: fastest if it is a `Registry`.
        accept: Accept header; without OpenMetrics in it, the older text format is used.
        others: shown after it; their series must have other names.
    """
    is_openmetrics = "application/openmetrics-text" in accept
    texts = [_registry_text(one, openmetrics=is_openmetrics) for one in (registry, *others)]
    if is_openmetrics:
        return OPENMETRICS, b"".join([text.removesuffix(_EOF) for text in texts]) + _EOF
    return TEXT, b"".join(texts)


def _registry_text(registry: CollectorRegistry, *, openmetrics: bool) -> bytes:
    if isinstance(registry, Registry):
        return registry.text(openmetrics=openmetrics)
    text: bytes = (openmetrics_library.generate_latest if openmetrics else generate_latest)(registry)
    return text


def _text(collector: Collector, *, openmetrics: bool) -> bytes:
    if isinstance(collector, Exporter):
        return collector.text(openmetrics=openmetrics).encode()
    alone: Any = SimpleNamespace(collect=collector.collect)
    if openmetrics:
        text: bytes = openmetrics_library.generate_latest(alone)  # type: ignore[no-untyped-call]
        return text.removesuffix(_EOF)
    return generate_latest(alone)
