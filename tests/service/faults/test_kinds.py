"""The faults' syntax, and what of it `lorrery up`, `lorrery simulate` and the services read alike."""

from collections.abc import Iterable

import pytest

from lorrery.service.errors import SettingsError
from lorrery.service.faults.kinds import FREEZE_WORKER, LOAD_FAILURE, SLOW_LOAD, check_faults, parse_fault
from lorrery.service.faults.rules import LoadRules, RuleBook
from lorrery.vocabulary.units import NEVER
from lorrery.worker.build import spells_of

S = 10**12


def loads(*texts: str, worker: str = "w", adapters: str = "a", at_ps: Iterable[int] = (0,)) -> list[list[str]]:
    """Return the kinds of the faults that loads meet which begin at these times; "aab" are three at each."""
    book = RuleBook()
    book.plan(map(parse_fault, texts), 0)
    rules = LoadRules(book, worker)
    return [[fault.kind for fault in rules.choose(adapter, at)] for at in at_ps for adapter in adapters]


def test_loads_fail_that_begin_from_the_faults_begin_to_just_before_its_end() -> None:
    fault = "adapter_load_failure,at=1,for=2"
    assert loads(fault, at_ps=(S - 1, S, 3 * S - 1, 3 * S)) == [[], [LOAD_FAILURE], [LOAD_FAILURE], []]


def test_a_fault_of_one_adapter_or_worker_leaves_others_loads_alone() -> None:
    faults = ("worker_loss,worker=w", "adapter_load_failure,adapter=a", "slow_adapter_load,factor=2,worker=w")
    assert loads(*faults, adapters="ab") == [[LOAD_FAILURE, SLOW_LOAD], [SLOW_LOAD]]
    assert loads(*faults, adapters="ab", worker="v") == [[LOAD_FAILURE], []]


@pytest.mark.parametrize(
    ("worker", "is_its"),
    [("n.a", True), ("n.a.0", True), ("n.a.12", True), ("n.a.x", False), ("n.a0", False), ("n", False)],
)
def test_a_fault_of_a_process_is_one_of_each_of_its_gpus(worker: str, is_its: bool) -> None:
    texts = ("freeze_worker,worker=n.a", "slow_adapter_load,factor=2,worker=n.a")
    book = RuleBook()
    book.plan(map(parse_fault, texts), 0)
    assert (book.going_on(FREEZE_WORKER, worker, 0) is not None) == is_its
    assert loads(*texts, worker=worker) == ([[SLOW_LOAD]] if is_its else [[]])
    assert (spells_of(book.sets, worker).thaw_ps(0) > 0) == is_its


def test_a_fault_of_a_process_and_one_of_its_gpu_must_not_overlap() -> None:
    texts = ("slow_worker,worker=n,factor=2,for=5", "slow_worker,worker=n.1,factor=3,at=4")
    for faults in (texts, texts[::-1]):
        with pytest.raises(SettingsError, match=r"slow_worker,worker=n.1,factor=3,at=4: begins before slow_worker,w"):
            check_faults([parse_fault(text) for text in faults], workers=["n.0", "n.1"], adapters=[])


@pytest.mark.parametrize("text", ["slow_worker,worker=,factor=2", "refuse,tenant=", "adapter_load_failure,adapter="])
def test_a_fault_of_an_empty_name_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is empty; name one"):
        parse_fault(text)


def test_loads_are_counted_and_drawn_for_each_worker() -> None:
    assert loads("adapter_load_failure,first=2,adapter=a", adapters="abaa") == [[LOAD_FAILURE], [], [LOAD_FAILURE], []]
    fault, many = "slow_adapter_load,factor=3,share=0.3,seed=5", "a" * 200
    met = loads(fault, adapters=many)
    assert 40 <= sum(map(len, met)) <= 80
    assert loads(fault, adapters=many) == met
    assert loads(fault, adapters=many, worker="v") != met


def test_an_operators_rules_hold_from_their_time_to_that_of_the_next() -> None:
    book = RuleBook()
    rules = LoadRules(book, "w")
    book.take([parse_fault("adapter_load_failure,first=1")], 10)
    book.take([parse_fault("slow_adapter_load,factor=2,at=1e-12")], 20)
    at = (9, 10, 11, 20, 21)
    assert [[f.kind for f in rules.choose("a", at_ps)] for at_ps in at] == [[], [LOAD_FAILURE], [], [], [SLOW_LOAD]]
    for at_ps in range(30, 40):
        book.take([], at_ps)
    assert len(book.sets) <= RuleBook.MAX_REPLACED + 1


def test_rules_that_are_added_count_and_draw_for_themselves_and_go_with_the_others() -> None:
    book = RuleBook()
    rules = LoadRules(book, "w")
    book.take([parse_fault("adapter_load_failure,first=2")], 10)
    book.take([parse_fault("slow_adapter_load,factor=2,for=2e-11")], 20, add=True)
    at = (10, 20, 39, 40)
    assert [[f.kind for f in rules.choose("a", at_ps)] for at_ps in at] == [
        [LOAD_FAILURE],
        [LOAD_FAILURE, SLOW_LOAD],
        [SLOW_LOAD],
        [],
    ]
    book.take([], 50)
    assert rules.choose("a", 50) == []
    share = parse_fault("slow_adapter_load,factor=2,share=0.5")
    for add in (False, True):
        book.take([share], 60, add=add)
    met = [len(rules.choose("a", 60)) for _ in range(100)]
    assert met.count(1) > 20  # the second is drawn by itself


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
    why = "it must be below 1e31, and 0 or at least 1e-30" if "1e" in number else "it must be a number"
    with pytest.raises(SettingsError, match=why):
        parse_fault(f"delay,seconds={number}")


def test_a_fault_that_would_fill_the_log_is_refused() -> None:
    with pytest.raises(SettingsError, match="has 5014 characters; at most 400"):
        parse_fault("refuse,tenant=" + "x" * 5000)
