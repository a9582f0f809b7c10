"""Schedules the faults of `service.faults.kinds` on a simulation's workers."""

from collections.abc import Iterable, Sequence
from functools import partial

from lorrery.service.faults.kinds import FREEZE_WORKER, WORKER_KINDS, WORKER_LOSS, Fault, check_faults
from lorrery.simulator.engine import Simulation
from lorrery.simulator.fleet import Fleet
from lorrery.simulator.worker import SimulatedWorker
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND
from lorrery.worker.device.steptime import Slowed


def never_began(faults: Iterable[Fault], end_seconds: float) -> tuple[str, ...]:
    """Return a notice for each fault without effect because the run ended before it began.

    Args:
        faults: of the run.
        end_seconds: when its last request ended, from the start of the run.
    """
    return tuple(
        f"the fault {fault.text} had no effect: the run ended at {end_seconds:.1f} s; let it begin earlier, or send for"
        " longer (--duration, --num-requests)"
        for fault in faults
        if fault.at_ps >= end_seconds * PS_PER_SECOND
    )


def num_named(faults: Iterable[Fault], most: int) -> int:
    """Return how many worker processes must exist so that every `worker-N` named by a fault does.

    Args:
        faults: of the run.
        most: most possible processes; names of others do not count.
    """
    names = [fault.worker.removeprefix("worker-").partition(".")[0] for fault in faults if fault.kind in WORKER_KINDS]
    return max((int(name) + 1 for name in names if name.isdecimal() and int(name) < most), default=0)


def schedule_faults(faults: Sequence[Fault], simulation: Simulation, fleets: Sequence[Fleet] = ()) -> None:
    """Schedule the loss, slow-down and freezing of a simulation's workers; times count from now.

    Args:
        faults: in any order.
        simulation: that has the workers.
        fleets: scalable workers, which replace lost ones; empty: the number of workers is fixed.

    Raises:
        SettingsError: a fault names an unknown worker, or overlaps another of its kind and worker.
    """
    start_ps = simulation.now_ps
    workers = [worker.name for worker in simulation.workers]
    adapters = {fault.adapter for fault in faults}
    check_faults(faults, workers=workers, adapters=adapters, replaced=bool(fleets))
    happening = [fault for fault in faults if fault.kind in WORKER_KINDS]
    for fault in sorted(happening, key=lambda fault: fault.at_ps):  # at one time, an end comes before a begin
        if simulation.keeps_histories:
            simulation.at(start_ps + fault.at_ps, partial(simulation.note_fault, fault.text))
        for worker in simulation.workers:
            if fault.concerns(worker.name):
                fleet = next((one for one in fleets if worker.name in one.worker_names), None)
                _schedule(fault, worker, simulation, start_ps, fleet)


def _schedule(
    fault: Fault, worker: SimulatedWorker, simulation: Simulation, start_ps: int, fleet: Fleet | None
) -> None:
    if fault.kind == FREEZE_WORKER:
        until_ps = NEVER if fault.until_ps == NEVER else start_ps + fault.until_ps
        simulation.at(start_ps + fault.at_ps, partial(simulation.freeze, worker, until_ps))
        return
    if fault.kind == WORKER_LOSS and fleet is not None:
        simulation.at(start_ps + fault.at_ps, partial(fleet.lose, worker))
        return
    if fault.kind == WORKER_LOSS:
        begin, end = partial(simulation.membership.lose, worker), partial(simulation.membership.attach, worker)
    else:
        begin = partial(simulation.change_pace, worker, Slowed(worker.step_time, fault.factor))
        end = partial(simulation.change_pace, worker, worker.step_time)
    simulation.at(start_ps + fault.at_ps, begin)
    if fault.until_ps < NEVER:
        simulation.at(start_ps + fault.until_ps, end)
