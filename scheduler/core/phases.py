"""How a request's time divides: four phases, in device time, that add up to its time in the scheduler.

    queue         arrival -> first admission, less adapter_load
    adapter_load  before its first token, while only its own adapter is missing
    prefill       first admission -> first token, less adapter_load
    decode        first token -> end

`adapter_load` begins when an admission pass finds that a sequence lacks only its adapter, and ends when that has been
loaded, or when the sequence leaves the queue: the wait for a place on the GPU, if adapters in use hold all of them, is
included. Under blocking loads it is the rest of its own adapter's load when the sequence is admitted; its prefill step
may wait longer, for other adapters, which counts as prefill.

A preemption, a loss and the recomputation after it count where they happen: in prefill before the first token, in
decode after it. A request that brings tokens from another scheduler has no prefill: it decodes from its admission.
A phase that has not begun at the end has zero time.
"""

from typing import NamedTuple

from lorrery.vocabulary.compiling import mypyc_attr


@mypyc_attr(acyclic=True)
class LoadEnd:
    """The end of a load that sequences wait for; they share it, and read the time when they leave.

    Attributes:
        at_ps: when the adapter was loaded; None: not yet.
    """

    __slots__ = ("at_ps",)

    def __init__(self) -> None:
        self.at_ps: int | None = None


class Phases(NamedTuple):
    """The parts of a request's time, in picoseconds; see the module."""

    queue_ps: int
    adapter_load_ps: int
    prefill_ps: int
    decode_ps: int


def split(
    arrived_ps: int, admitted_ps: int, first_token_ps: int, end_ps: int, queue_load_ps: int, prefill_load_ps: int
) -> Phases:
    """Split a request's time from its arrival to its end.

    Args:
        arrived_ps: its arrival.
        admitted_ps: its first admission; the end, if there was none.
        first_token_ps: its first token; the end, if there was none.
        end_ps: its end; later times count as this, since a client may leave before the step ends that it waits for.
        queue_load_ps: waits for its adapter before its first admission.
        prefill_load_ps: waits for its adapter after it.
    """
    end_ps = max(end_ps, arrived_ps)
    admitted_ps = min(max(admitted_ps, arrived_ps), end_ps)
    first_token_ps = max(admitted_ps, min(first_token_ps, end_ps))  # workers' clocks may differ
    queue_ps, prefill_ps = admitted_ps - arrived_ps, first_token_ps - admitted_ps
    queue_load_ps, prefill_load_ps = min(queue_load_ps, queue_ps), min(prefill_load_ps, prefill_ps)
    return Phases(
        queue_ps - queue_load_ps,
        queue_load_ps + prefill_load_ps,
        prefill_ps - prefill_load_ps,
        end_ps - first_token_ps,
    )
