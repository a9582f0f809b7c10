"""The faults' syntax, and what of it `lorrery up`, `lorrery simulate` and the services read alike."""

import pytest

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.faults import check_faults, load_fails, parse_fault
from lorrery.vocabulary.units import NEVER

S = 10**12


def test_loads_fail_that_begin_from_the_faults_begin_to_just_before_its_end() -> None:
    fault = parse_fault("adapter_load_failure,at=1,for=2")
    found = [load_fails([fault], "a", at_ps) for at_ps in (S - 1, S, 3 * S - 1, 3 * S)]
    assert found == [False, True, True, False]


def test_a_fault_of_one_adapter_leaves_others_loads_alone() -> None:
    faults = [parse_fault("worker_loss,at=0,worker=w"), parse_fault("adapter_load_failure,at=0,adapter=a")]
    assert load_fails(faults, "a", 5 * S)
    assert not load_fails(faults, "b", 5 * S)


def test_a_fault_without_an_end_stays() -> None:
    assert parse_fault("worker_loss,at=1.5,worker=w").until_ps == NEVER


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["worker_loss,at=1,worker=worker-9"], "no such worker; there are worker-0, worker-1"),
        (["adapter_load_failure,at=1,adapter=ghost"], "no such adapter in adapters.registry"),
        (
            [f"worker_loss,at={at},worker=worker-0,for=5" for at in (1, 4)],
            "fault worker_loss,at=4,worker=worker-0,for=5: begins before worker_loss,at=1,worker=worker-0",
        ),
    ],
)
def test_faults_that_do_not_go_with_the_cluster_or_together_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_faults([parse_fault(text) for text in texts], workers=["worker-0", "worker-1"], adapters=["a"])


@pytest.mark.parametrize("number", ["1e999999999", "1e-999999999", "NaN", "Infinity", "1e31"])
def test_a_number_that_no_memory_holds_is_refused_at_once(number: str) -> None:
    with pytest.raises(SettingsError, match="it must be a number"):
        parse_fault(f"delay,seconds={number}")


def test_a_fault_that_would_fill_the_log_is_refused() -> None:
    with pytest.raises(SettingsError, match="has 5014 characters; at most 400"):
        parse_fault("refuse,tenant=" + "x" * 5000)
