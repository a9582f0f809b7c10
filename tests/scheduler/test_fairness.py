import pytest

from lorrery.scheduler.subscribers.metrics import MAX_TENANTS, ServedByTenant


def test_the_index_is_of_this_minute_and_the_one_before() -> None:
    served = ServedByTenant()
    assert served.jain_index(0) == 1
    served.add("a", 30, 1)
    assert served.jain_index(1) == 1
    served.add("b", 10, 59)
    assert served.jain_index(60) == pytest.approx(1600 / 2000)
    served.add("b", 20, 61)
    assert served.jain_index(119) == 1
    assert served.jain_index(121) == 1  # only b's last
    served.add("c", 1, 130)
    assert served.jain_index(130) == pytest.approx(21**2 / (2 * (20**2 + 1)))
    assert served.jain_index(1000) == 1


def test_who_names_many_tenants_takes_no_more_memory() -> None:
    served = ServedByTenant()
    for number in range(MAX_TENANTS + 10):
        served.add(str(number), 1, 0)
    assert len(served._now) == MAX_TENANTS
