"""When loads of adapters fail; `lorrery simulate` shows what other faults do (tests/cli/test_simulate.py)."""

from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator.faults import load_fails, parse_fault

S = 10**12


def test_loads_fail_that_begin_from_the_faults_begin_to_just_before_its_end() -> None:
    fault = parse_fault("adapter_load_failure,at=1,for=2")
    found = [load_fails([fault], Adapter("a", 8), at_ps) for at_ps in (S - 1, S, 3 * S - 1, 3 * S)]
    assert found == [False, True, True, False]


def test_a_fault_of_one_adapter_leaves_others_loads_alone() -> None:
    faults = [parse_fault("worker_loss,at=0,worker=w"), parse_fault("adapter_load_failure,at=0,adapter=a")]
    assert load_fails(faults, Adapter("a", 8), 5 * S)
    assert not load_fails(faults, Adapter("b", 8), 5 * S)
