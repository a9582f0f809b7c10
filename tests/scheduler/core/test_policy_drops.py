"""Queues that keep whom they have admitted or dropped, or drop what they cannot: each request ends once."""

import pytest

from lorrery.scheduler.core.admission import AdmissionPass
from lorrery.scheduler.core.facts import Dropped, Raised
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.service.installed import core_is_compiled
from lorrery.vocabulary.endings import FinishReason
from tests.scheduler.core.faulty_queue import Faulty, failed, member, submit


class Keeps(Faulty):
    """Tries all that wait, and takes nobody out whom the pass has admitted; tries each as often as it is told to."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        for sequence in list(self):
            for _ in range(self.times):
                admission.admit(sequence)
        return []


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("max_new_tokens", [1, 5])  # the first has ended when it is tried again, or it runs
def test_a_queue_that_keeps_whom_it_has_admitted_has_raised_and_the_batch_goes_on(
    blocks: bool, max_new_tokens: int
) -> None:
    queue = Keeps()
    worker = member(queue, blocks=blocks)
    worker.submit(Sequence(1, 20, max_new_tokens, 0, prompt_token_ids=list(range(20))), 0)
    prefill = worker.plan(0)
    assert isinstance(prefill, Plan)
    ended = ((1, FinishReason.LENGTH),)
    worker.commit(prefill, Ran(1, 10, ended if max_new_tokens == 1 else ()))
    submit(worker, 2, at_ps=10)
    decision = worker.plan(20)
    assert failed(decision) == [2]
    (raised,) = (event for event in decision.events if isinstance(event, Raised))
    assert f"policy {__name__}:Keeps under " in raised.message
    assert "`admit` left a request in the queue that it admitted; check it: `lorrery validate policy`" in raised.message
    assert "2" not in raised.message.partition("raised")[2]  # the same for every request: it is logged once
    if max_new_tokens > 1:
        assert isinstance(decision, Plan)
        worker.commit(decision, Ran(4, 50, ended))
    assert not worker.sequences
    assert not len(worker.replica.running)
    assert len(queue) == 0


class Drops(Faulty):
    """Drops all that wait, and takes them out only if it is told to; or tries them first, or drops something else."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.num_passes = 0

    def admit(self, admission: AdmissionPass, running: Running, at_ps: int) -> list[Sequence]:
        self.num_passes += 1
        found = list(self)
        if self.wrong == "keeps and tries" and self.num_passes > 1:
            for sequence in found:
                admission.admit(sequence)
            return self.clear()
        if self.wrong == "admits too":
            for sequence in found:
                admission.admit(sequence)
            return self.clear()
        if self.wrong == "handles":
            return [sequence.handle for sequence in self.clear()]  # type: ignore[misc]
        return found if self.wrong.startswith("keeps") else 2 * self.clear()


@pytest.mark.parametrize("blocks", [False, True])
def test_a_dropped_request_ends_once_though_its_queue_keeps_it(blocks: bool) -> None:
    queue = Drops("keeps")
    worker = member(queue, blocks=blocks)
    submit(worker, 1, 2)
    worker.cancel(1, 30)  # on its way when the queue drops it
    assert [(type(event), event.sequence.handle) for event in worker.plan(0).events] == [(Dropped, 1), (Dropped, 2)]
    assert not worker.sequences
    later = [event for at_ps in (10, 20, 30) for event in worker.plan(at_ps).events]
    assert all(isinstance(event, Raised) for event in later)
    assert worker.withdraw_waiting(40) == ([], [])
    assert worker.lose(50) == ([], [])


@pytest.mark.parametrize("leave", ["cancel", "withdraw", "lose"])
def test_a_dropped_request_that_is_still_in_the_queue_is_nobodys_any_more(leave: str) -> None:
    queue = Drops("keeps")
    worker = member(queue)
    submit(worker, 1, 2)
    worker.cancel(1, 30)
    worker.recall(2, "other", 30)
    assert len(worker.plan(0).events) == 2
    queue.admit = lambda *_: []  # type: ignore[method-assign]
    if leave == "cancel":
        assert not worker.plan(30).events
    assert (worker.withdraw_waiting(40) if leave == "withdraw" else worker.lose(40)) == ([], [])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("keeps and tries", "`admit` left a request in the queue that it dropped; check it: `lorrery validate policy`"),
        ("twice", "`admit` left a request in the queue that it dropped; check it: `lorrery validate policy`"),
        ("admits too", "`admit` dropped a request that it admitted; check it: `lorrery validate policy`"),
        ("handles", "raised TypeError" if core_is_compiled() else "raised AttributeError"),
    ],
)
@pytest.mark.parametrize("blocks", [False, True])
def test_a_queue_that_drops_what_it_cannot_drop_has_raised(wrong: str, message: str, blocks: bool) -> None:
    worker = member(Drops(wrong), blocks=blocks)
    submit(worker, 1, 2)
    decisions = [worker.plan(0)]
    if wrong == "keeps and tries":
        submit(worker, 3, at_ps=10)
        decisions.append(worker.plan(10))
    raised = [event for decision in decisions for event in decision.events if isinstance(event, Raised)]
    assert f"policy {__name__}:Drops under " in raised[0].message
    assert message in raised[0].message
    assert failed(decisions[-1]) == ([3] if wrong == "keeps and tries" else [1, 2])
    assert not worker.sequences
    assert not len(worker.replica.running)
    use = worker.replica.memory.block_use(worker.replica.running)
    assert use is None or use.used == 0


@pytest.mark.parametrize("blocks", [False, True])
def test_a_queue_that_tries_a_request_again_in_the_pass_that_admitted_it_has_raised(blocks: bool) -> None:
    worker = member(Keeps(times=2), blocks=blocks)
    submit(worker, 1)
    assert failed(worker.plan(0)) == [1]
    assert not worker.sequences
    assert not len(worker.replica.running)
    use = worker.replica.memory.block_use(worker.replica.running)
    assert use is None or use.used == 0
