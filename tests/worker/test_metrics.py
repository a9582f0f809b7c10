"""What a worker counts that its other tests do not see."""

import pytest
from prometheus_client import CollectorRegistry

from worker.metrics import WorkerMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> WorkerMetrics:
    return WorkerMetrics(registry, 1000)


def adapters(registry: CollectorRegistry) -> tuple[float | None, float | None]:
    """(resident, loads)."""
    read = registry.get_sample_value
    return read("lorrery_worker_resident_adapters"), read("lorrery_worker_adapter_loads_total")


def test_adapter_that_is_on_the_device_is_not_loaded_again(metrics: WorkerMetrics, registry: CollectorRegistry):
    metrics.adapters_changed(["a", "b"], [])
    metrics.adapters_changed(["a", "c"], [])
    assert adapters(registry) == (3, 3)


def test_adapter_that_was_put_out_is_loaded_again(metrics: WorkerMetrics, registry: CollectorRegistry):
    metrics.adapters_changed(["a", "b"], [])
    metrics.adapters_changed(["a"], ["a"])
    assert adapters(registry) == (2, 3)


def test_new_attachment_begins_with_an_empty_device(metrics: WorkerMetrics, registry: CollectorRegistry):
    metrics.adapters_changed(["a"], [])
    metrics.attach(attached=False)
    assert adapters(registry) == (0, 1)
    metrics.attach(attached=True)
    metrics.adapters_changed(["a"], [])
    assert adapters(registry) == (1, 2)
