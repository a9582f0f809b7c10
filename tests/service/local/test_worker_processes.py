"""Names and ports of the worker processes of one machine."""

from lorrery.service.local.overrides import WorkerProcesses
from lorrery.service.settings.cluster import load


def test_fixed_worker_ports_count_up() -> None:
    settings = load(None, ["worker.listen=127.0.0.1:0", "worker.metrics=127.0.0.1:9103"])
    processes = WorkerProcesses(settings, 3)
    overrides = [processes.overrides(name, "host:1") for name in processes.workers]
    assert overrides[0] == [
        *("worker.name=worker-0", "worker.scheduler=host:1"),
        *("worker.listen=127.0.0.1:0", "worker.metrics=127.0.0.1:9103"),
    ]
    assert [override[3] for override in overrides[1:]] == [
        "worker.metrics=127.0.0.1:9104",
        "worker.metrics=127.0.0.1:9105",
    ]


def test_a_name_that_is_free_again_is_taken_before_a_new_one() -> None:
    processes = WorkerProcesses(load(None, ["worker.gpus=2"]), 2)
    assert processes.free_name(None, lambda name: name == "worker-1") == "worker-1"
    assert processes.free_name(None, lambda name: False) == "worker-2"
    assert processes.workers["worker-2"] == ("worker-2.0", "worker-2.1")
