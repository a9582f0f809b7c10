from array import array

import numpy as np
import pytest

from lorrery.loadgen.workload.arrays import Requests
from lorrery.loadgen.workload.request import WorkloadRequest


def test_rows_come_in_order_of_time_and_keep_their_place_as_index():
    requests = Requests(np.array([1.5, 0.5, 0.5]), [3, 1, 2], (30, 10, 20), ["a", None, "b"], ["x", "y", "z"])
    assert requests.rows() == [
        WorkloadRequest(1, 0.5, 1, 10, None, "y"),
        WorkloadRequest(2, 0.5, 2, 20, "b", "z"),
        WorkloadRequest(0, 1.5, 3, 30, "a", "x"),
    ]


def test_one_adapter_and_one_tenant_stand_for_all():
    rows = Requests([0, 1], [5, 5], [1, 1], "a", "t").rows()
    assert [(row.adapter_id, row.tenant_id) for row in rows] == [("a", "t")] * 2


def test_a_priority_is_given_to_each_or_to_all():
    assert [row.priority for row in Requests([1, 0], [5, 5], [1, 1], priority=[3, -(2**31)]).rows()] == [-(2**31), 3]
    assert [row.priority for row in Requests([0, 1], [5, 5], [1, 1], priority=2).rows()] == [2, 2]
    assert [row.priority for row in Requests([0, 1], [5, 5], [1, 1]).rows()] == [0, 0]


def test_blocks_make_prefixes():
    rows = Requests([0, 1], [600, 5], [1, 1], hash_ids=[np.array([7, 8]), None]).rows()
    assert [row.hash_ids for row in rows] == [array("Q", [7, 8]), None]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (Requests([], [], []), "there are no requests"),
        (Requests([0.0, -1.0], [1, 1], [1, 1]), "at_seconds: every time"),
        (Requests([np.nan], [1], [1]), "at_seconds: every time"),
        (Requests([[0.0]], [1], [1]), "at_seconds: expected one dimension"),
        (Requests(["soon"], [1], [1]), "at_seconds: expected numbers"),
        (Requests([0.0], [1, 2], [1]), "prompt_tokens has 2 rows; at_seconds has 1"),
        (Requests([0.0], [0], [1]), "prompt_tokens: every request"),
        (Requests([0.0], [1], [1.5]), "output_tokens: expected whole numbers"),
        (Requests([True], [1], [1]), "at_seconds: expected numbers, got bool"),
        (Requests(["0"], [1], [1]), "at_seconds: expected numbers, got <U1"),
        (Requests([1j], [1], [1]), "at_seconds: expected numbers, got complex128"),
        (Requests([0], [float("nan")], [1]), "prompt_tokens: expected whole numbers; one is infinite or missing"),
        (Requests([0], [1], [1], adapter_id=5), "adapter_id is 5; expected a list"),
        (Requests([0], [1], [1], adapter_id=[5]), r"adapter_id\[0\] is 5; expected text or None"),
        (Requests([0], [1], [1], tenant_id=None), "tenant_id is None; expected a list"),
        (Requests([0], [1], [1], tenant_id=[None]), r"tenant_id\[0\] is None; expected text"),
        (Requests([0], [1], [1], tenant_id=["\ud800"]), r"tenant_id\[0\] is '.ud800'; half of a surrogate pair"),
        (Requests([0], [1], [1], adapter_id="\udfff"), r"adapter_id\[0\] is '.udfff'; half of a surrogate pair"),
        (
            Requests(np.ma.masked_less([0.0, -1.0], 0), [1, 1], [1, 1]),
            "at_seconds: some values are masked; fill",
        ),
        (Requests([0], [1], [1], hash_ids=5), "hash_ids is 5; expected a list"),
        (Requests([0], [1], [1], hash_ids=["x"]), r"hash_ids\[0\] is 'x'; expected whole numbers"),
        (Requests([0], [1], [1], hash_ids=[[1.5]]), r"hash_ids\[0\] is \[1.5\]; expected whole numbers"),
        (Requests([0.0], [2**70], [1]), "prompt_tokens: a number is too large; at most 9223372036854775807"),
        (Requests([0.0], [1], [1], ["a", "b"]), "adapter_id has 2 rows"),
        (Requests([0.0], [1], [1], tenant_id=[]), "tenant_id has 0 rows"),
        (Requests([0.0], [1], [1], priority=[1, 2]), "priority has 2 rows"),
        (Requests([0.0], [1], [1], priority=[0.5]), "priority: expected whole numbers"),
        (
            Requests([0.0], [1], [1], priority=[2**31]),
            "priority: expected whole numbers from -2147483648 to 2147483647",
        ),
        (Requests([0], [1], [1], hash_ids=[[-1]]), r"hash_ids\[0\] is \[-1\]; expected whole numbers from 0 to"),
        (Requests([0], [1], [1], hash_ids=[[2**64]]), r"expected whole numbers from 0 to 2\*\*64 - 1"),
        (Requests([0.0], [513], [1], hash_ids=[(1,)]), r"hash_ids\[0\] has 1 ids; a prompt of 513 tokens has 2 blocks"),
    ],
)
def test_what_no_request_can_have_is_refused_by_column(requests: Requests, message: str):
    with pytest.raises(ValueError, match=message):
        requests.rows()
