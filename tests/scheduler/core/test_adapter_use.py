"""Who is on the GPU without a use, least recently used first: as a list of all says, whatever comes and goes."""

from hypothesis import given
from hypothesis import strategies as st

from lorrery.scheduler.core.running import AdapterUse
from lorrery.scheduler.core.sequence import Adapter

ADAPTERS = [Adapter(f"a{number}", 8 + number) for number in range(5)]
CHANGES = st.tuples(st.sampled_from(["pin", "unpin", "come", "ask", "go"]), st.sampled_from(ADAPTERS))


@given(st.lists(CHANGES, max_size=60), st.sets(st.sampled_from(ADAPTERS)))
def test_the_unused_are_those_on_the_gpu_that_nobody_has_in_order_of_their_last_use(
    changes: list[tuple[str, Adapter]], staying: set[Adapter]
) -> None:
    use, stay = AdapterUse(), {one.key: one for one in staying}
    on_gpu: list[str] = []  # least recently used first
    pinned: list[Adapter] = []
    for what, adapter in changes:
        key = adapter.key
        if what == "pin":
            use.pin(adapter)
            pinned.append(adapter)
        elif what == "unpin" and adapter in pinned:
            use.unpin(adapter)
            pinned.remove(adapter)
            if key in on_gpu and adapter not in pinned:
                on_gpu.remove(key)
                on_gpu.append(key)
        elif what == "come" and key not in on_gpu:
            use.came(key)
            on_gpu.append(key)
        elif what == "ask" and key in on_gpu:
            use.asked_for(key)
            on_gpu.remove(key)
            on_gpu.append(key)
        elif what == "go" and key in on_gpu:
            use.went(key)
            on_gpu.remove(key)
        in_use = {one.key for one in pinned}
        expected = [one for one in on_gpu if one not in in_use]
        assert use.unused(()) == expected
        others = [one for one in expected if one not in stay]
        assert use.unused(stay) == others
        assert use.first_unused(stay) == (others[0] if others else None)
        assert (use.pins.keys(), use.slots) == (in_use, sum(one.slots for one in set(pinned)))
