"""Supervises a running local cluster: restarts processes that die, and kills processes for scheduled faults.

A `worker_loss` fault of a process is SIGKILL, followed by a restart when it is over; its times are device seconds from
the moment at which the supervisor starts, when the cluster is ready. A worker of an autoscaler is replaced at once by a
new one. The services apply the other faults themselves.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from lorrery.service.errors import LorreryError
from lorrery.service.faults.kinds import WORKER_LOSS, Fault, parse_fault
from lorrery.service.local.autoscaler import LocalAutoscaler
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ServiceProcess, describe_exit
from lorrery.service.tasks import until_first_ends
from lorrery.vocabulary.units import NEVER, PS_PER_SECOND

FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS = 0.5, 30.0
"""Delay before a restart: doubled each time the process dies within `SOUND_SECONDS` of its start."""
SOUND_SECONDS = 60.0


class Supervisor:
    """Supervises a cluster.

    Args:
        cluster: already entered.
        restart: whether to restart processes that die.
        say: called with a line for each event.
        autoscalers: scale the workers, one per group; empty: no scaling.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        *,
        restart: bool,
        say: Callable[[str], None],
        autoscalers: Sequence[LocalAutoscaler] = (),
    ) -> None:
        self._autoscalers = autoscalers
        self._cluster = cluster
        self._restart = restart
        self._say = say
        self._died: ServiceProcess | None = None
        self._delays: dict[str, float] = {}
        self._started_at: dict[str, float] = {}

    async def run(self) -> ServiceProcess:
        """Supervise until a process dies and is not restarted; return that process."""
        faults = map(parse_fault, self._cluster.settings.faults)
        # The loss of one GPU of a process with several is applied by the process itself.
        losses = [one for one in faults if one.kind == WORKER_LOSS and "." not in one.worker]
        others = (one.run() for one in self._autoscalers)
        await until_first_ends(self._watch(), self._lose_all(losses), *others)
        assert self._died is not None
        return self._died

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                died = await self._cluster.unexpected_exit()
                if not self._restart:
                    self._died = died
                    return
                tasks.create_task(self._start_again(died), name=f"restart {died.name}")

    async def _start_again(self, died: ServiceProcess) -> None:
        delay = self._next_delay(died.name)
        self._say(f"{died.name} ended with {describe_exit(died.exit_code)}; it starts again in {delay:g} s")
        await asyncio.sleep(delay)
        if not died.exit_expected:  # the autoscaler may have removed it meanwhile
            await self._start(died.name)

    def _next_delay(self, name: str) -> float:
        ran_seconds = time.monotonic() - self._started_at.get(name, -SOUND_SECONDS)
        if ran_seconds >= SOUND_SECONDS:
            self._delays.pop(name, None)
        delay = self._delays.get(name, FIRST_DELAY_SECONDS)
        self._delays[name] = min(2 * delay, LAST_DELAY_SECONDS)
        return delay

    async def _start(self, name: str) -> None:
        self._started_at[name] = time.monotonic()
        try:
            await self._cluster.restart(name, wait=False)
        except LorreryError as error:
            self._say(str(error))
            self._cluster.processes[name].kill()  # if it still runs, so that its end is noticed
        else:
            self._say(f"{name} runs again, pid {self._cluster.processes[name].pid}")

    async def _lose_all(self, losses: Iterable[Fault]) -> None:
        """Apply every fault at its time; never returns."""
        async with asyncio.TaskGroup() as tasks:
            start = time.monotonic()
            for fault in losses:
                tasks.create_task(self._lose(fault, start), name=fault.text)
            await asyncio.Event().wait()

    async def _lose(self, fault: Fault, start: float) -> None:
        await self._reach(fault.at_ps, start)
        process = self._cluster.processes.get(fault.worker)
        if process is None or process.exit_code is not None:
            self._say(f"fault {fault.text}: {fault.worker} is {'not there' if process is None else 'down already'}")
            return
        self._say(f"fault {fault.text}: {fault.worker} is killed")
        self._cluster.kill(fault.worker)
        scaled = next((one for one in self._autoscalers if one.has(fault.worker)), None)
        if scaled is not None:
            await scaled.replace(fault.worker)
        elif fault.until_ps < NEVER:
            await self._reach(fault.until_ps, start)
            self._say(f"fault {fault.text}: over")
            await self._start(fault.worker)

    async def _reach(self, at_ps: int, start: float) -> None:
        wall_seconds = at_ps / PS_PER_SECOND * self._cluster.settings.time_scale
        await asyncio.sleep(start + wall_seconds - time.monotonic())
