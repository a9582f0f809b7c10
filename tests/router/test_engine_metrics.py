"""What the HTTP edge shows of the cluster as one engine."""

import pytest

from lorrery.router.engine_metrics import EdgeEngine
from lorrery.router.request import Finish, Usage
from lorrery.settings import Settings
from lorrery.vocabulary.finish_reason import FinishReason


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
