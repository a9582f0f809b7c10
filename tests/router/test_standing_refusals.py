"""What a scheduler has just refused for everybody, or for a tenant, its router refuses by itself for a moment."""

import pytest

from lorrery.router.shard import MAX_HOLD_SECONDS, MAX_RETRY_SECONDS, StandingRefusals
from lorrery.service.errors import Overloaded, Reason, RequestError, Unattainable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("lorrery.router.shard.time", made)
    return made


def full(retry_seconds: float | None = 2.0) -> RequestError:
    return Overloaded("9 requests wait", Reason.QUEUE_FULL, retry_seconds, field="f", limit=9)


def refusal(held: StandingRefusals, tenant_id: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        held.check(tenant_id)
    return caught.value


def test_a_refusal_for_all_holds_for_a_moment_and_each_is_told_to_come_back_one_place_later(clock: Clock) -> None:
    held = StandingRefusals()
    held.check("a")
    held.note(full(), None, 0.25)
    errors = [refusal(held, tenant) for tenant in ("a", "b", "")]
    assert [error.retry_seconds for error in errors] == [2.25, 2.5, 2.75]
    assert {(str(error), error.reason, error.facts["limit"]) for error in errors} == {
        ("9 requests wait", Reason.QUEUE_FULL, "9")
    }
    clock.now += MAX_HOLD_SECONDS
    held.check("a")
    held.note(full(50.0), None, 20.0)
    assert refusal(held, "a").retry_seconds == MAX_RETRY_SECONDS


def test_a_refusal_for_a_tenant_holds_for_no_other(clock: Clock) -> None:
    held = StandingRefusals()
    held.note(full(None), "loud", 0.0)
    held.check("a")
    assert refusal(held, "loud").retry_seconds is None
    clock.now += MAX_HOLD_SECONDS
    held.check("loud")


def test_it_holds_no_longer_than_the_scheduler_expects(clock: Clock) -> None:
    held = StandingRefusals()
    held.note(Unattainable("late", None, 0.01), None, 0.01)
    assert isinstance(refusal(held, "a"), Unattainable)
    clock.now += 0.011
    held.check("a")


def test_what_is_remembered_of_tenants_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorrery.router.shard.MAX_TENANTS", 3)
    held = StandingRefusals()
    for tenant in "abcde":
        held.note(full(), tenant, 0.5)
    assert len(held._of_tenant) == 3
    held.check("d")
    clock.now += 1
    held.note(full(), "d", 0.5)
    assert list(held._of_tenant) == ["d"]
