"""What a worker counts that its other tests do not see."""

import pytest
from prometheus_client import CollectorRegistry

from lorrery.worker.device.batch import PARTS, Batch, LoraWork, PrefillChunk, StepCost
from lorrery.worker.device.roofline import Roofline
from lorrery.worker.metrics import WorkerMetrics
from tests.worker.device.known import deployment


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> WorkerMetrics:
    return WorkerMetrics(registry, "worker", 1000)


def read(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"lorrery_worker_{name}", {"worker": "worker", **labels})


def adapters(registry: CollectorRegistry) -> tuple[float | None, float | None]:
    """(resident, loads)."""
    return read(registry, "resident_adapters"), read(registry, "adapter_loads_total")


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


def test_parts_of_steps_add_up_to_the_modelled_time(metrics: WorkerMetrics, registry: CollectorRegistry):
    model = Roofline(deployment("H100", "Llama-3-8B", 2, engine="present-day"))
    lora = LoraWork.of([(16, 5), (64, 900)])
    for batch in (Batch((PrefillChunk(900, 0, samples=True),), 5, 500, 100, lora), Batch((), 6, 1500, 900)):
        step_ps = model.step_ps(batch)
        metrics.step_done(batch, model.step_cost(batch), 6, step_ps, step_ps, 0, 0.0)
    parts = {part: read(registry, "step_part_seconds_total", kind=part) or 0.0 for part in PARTS}
    assert sum(parts.values()) == pytest.approx(read(registry, "step_modelled_seconds_sum"))
    assert {part for part, seconds in parts.items() if not seconds} == {"whole"}
    assert read(registry, "flops_total") > 2 * 6.9e9 / 2 * 900
    assert read(registry, "memory_bytes_total") > 2 * 14e9 / 2


@pytest.mark.parametrize(
    ("prompts", "num_decodes", "output_tokens", "kind", "size", "tokens"),
    [
        ([900], 5, 6, "mixed", 6, 905),
        ([512], 0, 0, "prefill", 1, 512),  # a chunk that does not end its prompt
        ([100, 20], 0, 2, "prefill", 2, 120),
        ([], 6, 6, "decode", 6, 6),
        ([], 4, 1, "decode", 4, 4),  # three of these have ended, and keep their places
        ([], 0, 0, "empty", 0, 0),
    ],
)
def test_a_step_counts_the_tokens_that_it_computes_not_those_that_it_gives(
    metrics: WorkerMetrics,
    registry: CollectorRegistry,
    prompts: list[int],
    num_decodes: int,
    output_tokens: int,
    kind: str,
    size: int,
    tokens: int,
):
    chunks = tuple(PrefillChunk(new_tokens, 0, samples=output_tokens > 0) for new_tokens in prompts)
    metrics.step_done(Batch(chunks, num_decodes, 100, 100), StepCost(), output_tokens, 10**9, 10**9, 0, 0.0)
    assert read(registry, "steps_total", kind=kind) == 1
    assert (read(registry, "batch_size_sum"), read(registry, "batch_tokens_sum")) == (size, tokens)
    assert (read(registry, "output_tokens_total"), read(registry, "prefill_tokens_total")) == (
        output_tokens,
        sum(prompts),
    )


def test_peaks_are_the_data_sheets():
    registry = CollectorRegistry()
    WorkerMetrics(registry, "worker", 1000, peak_flops=1e15, peak_bytes=2e12)
    assert read(registry, "peak_flops_per_second") == 1e15
    assert read(registry, "peak_memory_bytes_per_second") == 2e12
