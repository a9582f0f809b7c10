"""What the HTTP edge shows of the cluster as one engine."""

import pytest

from lorrery.router.engine_metrics import EdgeEngine
from lorrery.router.request import Finish, Usage
from lorrery.service.settings.cluster import Settings, load
from lorrery.vocabulary.endings import FinishReason


@pytest.mark.parametrize("loading", ["blocking", "background"])
def test_who_waits_for_an_adapter_is_queued_before_its_admission_and_in_prefill_after_it(loading: str) -> None:
    settings = Settings.model_validate({"engine": "vllm", "adapters": {"loading": loading}})
    engine = EdgeEngine.of(settings)
    assert engine is not None
    usage = Usage(8, 4, queue_seconds=1.0, adapter_load_seconds=4.0, prefill_seconds=0.5, waited_seconds=4.75)
    engine.finished(8, 4, Finish(FinishReason.LENGTH, usage))
    shown = {sample.name: sample.value for family in engine.registry.collect() for sample in family.samples}
    assert shown["vllm:request_queue_time_seconds_sum"] == 4.75
    assert shown["vllm:request_prefill_time_seconds_sum"] == 0.75


def adapters_shown(engine: EdgeEngine) -> list[tuple[str, str]]:
    """Scrape; return the running and the waiting adapters of each sample, the latest one last."""
    engine.update(0, None)
    found = [
        sample
        for family in engine.registry.collect()
        for sample in family.samples
        if sample.name == "vllm:lora_requests_info"
    ]
    found.sort(key=lambda sample: sample.value)
    return [(sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]) for sample in found]


@pytest.mark.parametrize("engine_name", ["vllm-0.32", "vllm-0.24"])
def test_adapters_of_requests_are_shown_as_the_version_of_vllm_shows_them(engine_name: str) -> None:
    engine = EdgeEngine.of(load(None, [f"engine={engine_name}", "worker.gpu=H100-SXM"]))
    assert engine is not None
    shown = [adapters_shown(engine)]
    for name in "ab":
        engine.submitted(name)
        shown.append(adapters_shown(engine))
    engine.started("a", 0.1, 8)
    shown.append(adapters_shown(engine))
    engine.ended("ok", "a", submitted=True, started=True)
    shown.append(adapters_shown(engine))
    if engine_name == "vllm-0.32":  # as a server of that version does: none before the first, old ones stay
        assert shown == [[], [("", "")], [("", "")], [("", ""), ("a", "a")], [("a", "a"), ("", "")]]
    else:
        assert shown == [[("", "")], [("", "a")], [("", "a,b")], [("a", "b")], [("", "b")]]
