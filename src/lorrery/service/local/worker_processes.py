"""The worker processes of a cluster on one machine: their names, their `[[workers]]` groups, their own settings.

A process has one worker with its own name, or with several GPUs one worker per GPU: `worker-0.0`, `worker-0.1`.
"""

from collections.abc import Callable

from lorrery.service.local import addresses, kv_event_ports
from lorrery.service.names import gpu_names
from lorrery.service.settings.cluster import Settings


class WorkerProcesses:
    """See the module.

    Args:
        settings: of the cluster.
        count: initial number of processes.

    Attributes:
        workers: name of each process -> names of its workers.

    Raises:
        SettingsError: their ports collide.
    """

    def __init__(self, settings: Settings, count: int) -> None:
        self._settings = settings
        self.workers = settings.workers_of_processes(count)
        self._groups = settings.groups_of_processes(count)
        kv_event_ports.check_ports(settings, sum(map(len, self.workers.values())))

    @property
    def kinds(self) -> list[tuple[Settings, int]]:
        """The settings of each kind of worker, and the number of workers of that kind."""
        return self._settings.kinds(len(self._groups))

    def free_name(self, group: int | None, is_free: Callable[[str], bool]) -> str:
        """Return the first free name of a group; if there is none, a new name, which then belongs to the group.

        Args:
            group: index in `[[workers]]`; None: there are no groups.
            is_free: returns whether a name is free.
        """
        known = zip(self.workers, self._groups, strict=True)
        name = next((one for one, its_group in known if its_group == group and is_free(one)), None)
        if name is None:
            name = f"worker-{len(self.workers)}"
            kind = self._settings if group is None else self._settings.for_group(group)
            self.workers[name] = gpu_names(name, kind.worker.gpus)
            self._groups.append(group)
        return name

    def overrides(self, name: str, scheduler: str) -> list[str]:
        """Return the overrides of a process relative to the cluster's settings; `scheduler`: address that it dials."""
        names = list(self.workers)
        index = names.index(name)
        overrides = [f"worker.name={name}", f"worker.scheduler={scheduler}"]
        if (group := self._groups[index]) is not None:
            overrides.append(f"worker.group={group}")
        before = sum(len(self.workers[name]) for name in names[:index])
        own_ports = addresses.counted_up(self._settings, index)
        return overrides + own_ports + kv_event_ports.own_endpoints(self._settings, before)
