"""What a router counts, by adapter and tenant and per frame."""

import asyncio
from array import array

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lorrery.router.metrics import OUTCOMES, RouterMetrics
from lorrery.router.open_request import OpenRequest
from lorrery.router.request import Finish, Request
from lorrery.router.sampling import SamplingParams
from lorrery.router.session import Fanout
from lorrery.router.timing import Timing
from lorrery.router.wire import TokensFrame
from lorrery.service.settings.sections import MetricsSettings
from lorrery.v1 import router_pb2

STREAMS = 16
STEP_PS = 10**14


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RouterMetrics:
    return RouterMetrics(registry, MetricsSettings(max_adapters=3, max_tenants=2))


def read(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"lorrery_router_{name}", labels)


def served(metrics: RouterMetrics, adapter_id: str, tenant_id: str, tokens: int = 3) -> None:
    timing = Timing(metrics)
    timing.tenant_id = tenant_id
    timing.adapter_id = adapter_id
    for number in range(1, tokens + 1):
        timing.message(1, number, None)
    timing.finish(7, tokens)
    timing.ended("ok")
    metrics.flush()


def test_a_request_counts_for_its_adapter_and_its_tenant(metrics: RouterMetrics, registry: CollectorRegistry):
    served(metrics, "sql", "acme")
    for label in ({"adapter": "sql"}, {"tenant": "acme"}):
        kind = next(iter(label))
        assert read(registry, f"{kind}_requests_total", outcome="ok", **label) == 1
        assert read(registry, f"{kind}_prompt_tokens_total", **label) == 7
        assert read(registry, f"{kind}_output_tokens_total", **label) == 3
        assert read(registry, f"{kind}_time_to_first_token_seconds_count", **label) == 1
    assert read(registry, "prompt_length_tokens_sum") == 7
    assert read(registry, "output_length_tokens_sum") == 3
    assert read(registry, "inter_token_latency_seconds_count") == 2
    assert read(registry, "tokens_per_message_tokens_count") == 3


def test_base_model_and_no_tenant_have_names_of_their_own(metrics: RouterMetrics, registry: CollectorRegistry):
    served(metrics, "", "")
    assert read(registry, "adapter_requests_total", adapter="base", outcome="ok") == 1
    assert read(registry, "tenant_requests_total", tenant="none", outcome="ok") == 1


def test_refused_requests_count_for_their_tenant(metrics: RouterMetrics, registry: CollectorRegistry):
    timing = Timing(metrics)
    timing.tenant_id = "acme"
    timing.adapter_id = "sql"
    timing.ended("over_quota")
    assert read(registry, "tenant_requests_total", tenant="acme", outcome="over_quota") == 1
    assert read(registry, "adapter_requests_total", adapter="sql", outcome="over_quota") == 1


def test_adapters_that_there_are_not_take_no_place(metrics: RouterMetrics, registry: CollectorRegistry):
    for number in range(100):
        timing = Timing(metrics)
        timing.adapter_id = f"guess-{number}"
        timing.ended("not_found")
    served(metrics, "sql", "acme")
    assert read(registry, "adapter_requests_total", adapter="other", outcome="not_found") == 100
    assert read(registry, "adapter_requests_total", adapter="sql", outcome="ok") == 1


def test_a_request_that_nobody_could_read_counts_too(metrics: RouterMetrics, registry: CollectorRegistry):
    metrics.request_ended("invalid")
    assert read(registry, "adapter_requests_total", adapter="other", outcome="invalid") == 1
    assert read(registry, "tenant_requests_total", tenant="none", outcome="invalid") == 1


def test_series_are_bounded_and_add_up_however_many_names_come(metrics: RouterMetrics, registry: CollectorRegistry):
    for number in range(1000):
        served(metrics, f"adapter-{number}", f'"\n\\tenant-{number}', 1)
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    for kind, most in (("adapter", 3), ("tenant", 2)):
        samples = families[f"lorrery_router_{kind}_requests"].samples
        assert len({sample.labels[kind] for sample in samples}) <= most + 2
        assert sum(sample.value for sample in samples) == 1000


async def test_the_gaps_of_a_frame_count_once_with_their_number(
    metrics: RouterMetrics, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
):
    fanout = Fanout(1.0, max_pending_tokens=8, max_gap_seconds=0.01, metrics=metrics, on_slow_reader=lambda _: None)

    def open_one(handle: int) -> OpenRequest:
        timing = Timing(metrics)
        num_tokens = 0

        def make(
            token_ids: list[int], finish: Finish | None, _scale: float, at: float | None
        ) -> tuple[router_pb2.GenerateResponse, bool]:
            nonlocal num_tokens
            num_tokens += len(token_ids)
            timing.message(len(token_ids), num_tokens, at)
            return router_pb2.GenerateResponse(token_ids=token_ids), finish is not None

        request = Request(str(handle), "", "", b"\1\0\0\0", SamplingParams(), (), 1)
        open_request = OpenRequest(request, make, lambda message: True)
        fanout.add(handle, open_request)
        return open_request

    open_requests = [open_one(handle) for handle in range(STREAMS)]
    handles, times = array("I", range(STREAMS)), []
    waiting = [asyncio.create_task(open_request.next_message()) for open_request in open_requests]
    await asyncio.wait(waiting, timeout=0)
    observe = metrics.itl.observe_many

    def observed(value: float, times_: int) -> None:
        times.append(times_)
        observe(value, times_)

    monkeypatch.setattr(metrics, "itl", type("Itl", (), {"observe_many": staticmethod(observed)}))
    for _ in range(4):
        fanout.deliver(TokensFrame(10**16, STEP_PS, handles, handles, []))
    await asyncio.sleep(0)
    assert sum(times) == 3 * STREAMS
    assert times[-2:] == [STREAMS, STREAMS]
    assert read(registry, "inter_token_latency_seconds_count") == 3 * STREAMS
    assert read(registry, "stream_out_wall_seconds_count") == 4 * STREAMS
    assert read(registry, "admission_wall_seconds_count") == STREAMS
    for task in waiting:
        task.cancel()
    fanout.close()


def test_every_outcome_of_an_adapter_and_a_tenant_begins_with_0(metrics: RouterMetrics, registry: CollectorRegistry):
    metrics.adapters.foresee(["sql"])
    metrics.tenants.foresee(["acme"])
    for outcome in OUTCOMES:
        assert read(registry, "adapter_requests_total", adapter="sql", outcome=outcome) == 0
        assert read(registry, "tenant_requests_total", tenant="acme", outcome=outcome) == 0
