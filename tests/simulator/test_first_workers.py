"""Which workers of a scaled cluster may be named before it runs."""

from typing import Any

import pytest

from lorrery.service.settings.cluster import changed
from lorrery.simulator.fleet import possible_names

ON = {"enabled": True, "max_replicas": 3}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({}, ["worker-0", "worker-1"]),
        ({"autoscaler": ON}, ["worker-0", "worker-1", "worker-2"]),
        ({"autoscaler": ON, "worker": {"gpus": 2}}, [f"worker-{one}.{gpu}" for one in range(3) for gpu in range(2)]),
        (
            {"autoscaler": ON, "workers": [{"count": 2, "autoscaler": {"max_replicas": 4}}]},
            [f"worker-{one}" for one in range(4)],
        ),
        # which group a later number is of follows from the run
        ({"autoscaler": ON, "workers": [{}, {"gpu": "L4"}]}, ["worker-0", "worker-1"]),
    ],
    ids=["none", "all", "two GPUs", "one group", "groups"],
)
def test_workers_that_may_come_have_names_up_to_the_most_there_may_be(content: dict[str, Any], names: list[str]):
    assert possible_names(changed(content), 2) == names
