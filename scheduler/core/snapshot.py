"""What a scheduler has at a moment, for those who watch: a pure function of its core's state.

It costs a look at every request that is open, and nothing while nobody asks. Adapters and tenants are numbers in tables
of names that the caller keeps, so that a name travels once.
"""

from dataclasses import dataclass

from lorrery.scheduler.core.adapters import Residency
from lorrery.scheduler.core.cluster import ClusterCore
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence

BASE_MODEL = -1
"""Stands for an adapter where the base model is asked for."""
MAX_NAMES = 10_000
"""Names that a table has; clients may name any tenant where there are no API keys."""
OTHERS = "(others)"
"""Stands for all names that came later."""
ON_GPU, IN_USE, LOADING = 0, 1, 2
"""States of an adapter on a worker."""


class Names:
    """A table of names, numbered in order of appearance."""

    __slots__ = ("_new", "_number")

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._new: list[str] = []

    def number(self, name: str) -> int:
        """Return a name's number; it gets one if it has none."""
        number = self._number.get(name)
        return self._add(name) if number is None else number

    def _add(self, name: str) -> int:
        if len(self._number) >= MAX_NAMES:
            name = OTHERS
        number = self._number.get(name)
        if number is None:
            number = self._number[name] = len(self._number)
            self._new.append(name)
        return number

    def take_new(self) -> list[str]:
        """Return, once, the names that have come since the last call."""
        new, self._new = self._new, []
        return new


class Tables:
    """The names of a watcher."""

    __slots__ = ("adapters", "tenants")

    def __init__(self) -> None:
        self.adapters = Names()
        self.tenants = Names()

    def adapter(self, adapter_id: str | None) -> int:
        """Return an adapter's number; None: the base model."""
        return BASE_MODEL if adapter_id is None else self.adapters.number(adapter_id)


@dataclass(slots=True)
class Use:
    """Requests of an adapter or a tenant: in batches, waiting, how long the one that came first has waited, and output.

    Attributes:
        output_tokens: of all of them so far.
    """

    num_running: int = 0
    num_waiting: int = 0
    oldest_ps: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class ResidentAdapter:
    """An adapter on a GPU, or on its way there; `left_ps` is how long its load still takes."""

    adapter: int
    state: int
    rank: int
    left_ps: int


@dataclass(slots=True)
class WorkerSnapshot:
    """One worker.

    Attributes:
        handles: of the sequences in its batch; the next four lists have a value for each.
        num_waiting: those that wait for its batch; `oldest_ps` is how long the one that came first has waited.
        num_host: adapters in host memory.
    """

    name: str
    draining: bool
    handles: list[int]
    adapters: list[int]
    tenants: list[int]
    prompt_tokens: list[int]
    output_tokens: list[int]
    num_waiting: int
    oldest_ps: int
    kv_tokens: int
    pool_tokens: int
    residents: list[ResidentAdapter]
    num_host: int


@dataclass(slots=True)
class ClusterSnapshot:
    """One scheduler; `num_unplaced` requests wait for a worker, `num_held` for a place among their key's."""

    at_ps: int
    workers: list[WorkerSnapshot]
    num_unplaced: int
    num_held: int
    tenants: dict[int, Use]
    adapters: dict[int, Use]


def snapshot(core: ClusterCore, tables: Tables, at_ps: int) -> ClusterSnapshot:
    """Return the state of now, as far as steps are committed.

    Args:
        core: of the scheduler.
        tables: of the watcher; they get the names that are new.
        at_ps: now.
    """
    uses = _Uses(tables, at_ps)
    workers = [_worker(member, uses, at_ps) for member in core.members.values()]
    for sequence in core.unplaced():
        uses.waits(sequence)
    adapters, tenants = uses.by_name()
    return ClusterSnapshot(at_ps, workers, core.num_unplaced, core.num_held, tenants, adapters)


class _Uses:
    """Counts requests by adapter and tenant together, which is half the work of counting them by each."""

    __slots__ = ("_pairs", "at_ps", "tables")

    def __init__(self, tables: Tables, at_ps: int) -> None:
        self.tables = tables
        self.at_ps = at_ps
        self._pairs: dict[tuple[int, int], Use] = {}

    def of(self, adapter: int, tenant: int) -> Use:
        """Return what a tenant has of an adapter."""
        pair = adapter, tenant
        use = self._pairs.get(pair)
        if use is None:
            use = self._pairs[pair] = Use()
        return use

    def waits(self, sequence: Sequence) -> int:
        """Count a sequence that waits; return for how long it has."""
        waited_ps = max(0, self.at_ps - sequence.arrived_ps)
        adapter, tables = sequence.adapter, self.tables
        use = self.of(
            tables.adapter(None if adapter is None else adapter.adapter_id), tables.tenants.number(sequence.tenant_id)
        )
        use.num_waiting += 1
        use.output_tokens += sequence.produced_tokens
        use.oldest_ps = max(use.oldest_ps, waited_ps)
        return waited_ps

    def by_name(self) -> tuple[dict[int, Use], dict[int, Use]]:
        """Return what each adapter has, and each tenant."""
        adapters: dict[int, Use] = {}
        tenants: dict[int, Use] = {}
        for (adapter, tenant), use in self._pairs.items():
            for uses, number in ((adapters, adapter), (tenants, tenant)):
                total = uses.get(number)
                if total is None:
                    total = uses[number] = Use()
                total.num_running += use.num_running
                total.num_waiting += use.num_waiting
                total.oldest_ps = max(total.oldest_ps, use.oldest_ps)
                total.output_tokens += use.output_tokens
        return adapters, tenants


def _worker(member: Member, uses: _Uses, at_ps: int) -> WorkerSnapshot:
    replica = member.replica
    running = replica.running
    prefilling, held, step = running.prefilling, running.held, running.decode_step
    adapter_number, tenant_number = uses.tables.adapters.number, uses.tables.tenants.number
    handles: list[int] = []
    adapters: list[int] = []
    tenants: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    num_waiting = oldest_ps = 0
    for handle, sequence in member.sequences.items():
        if sequence.admitted_ps is None:
            num_waiting += 1
            oldest_ps = max(oldest_ps, uses.waits(sequence))
            continue
        adapter = BASE_MODEL if sequence.adapter is None else adapter_number(sequence.adapter.adapter_id)
        tenant = tenant_number(sequence.tenant_id)
        output_tokens = sequence.produced_tokens
        if prefilling and handle in prefilling:
            pass
        elif held and handle in held:
            output_tokens += sequence.held_output_tokens
        else:
            output_tokens += step - sequence.base_step
        use = uses.of(adapter, tenant)
        use.num_running += 1
        use.output_tokens += output_tokens
        handles.append(handle)
        adapters.append(adapter)
        tenants.append(tenant)
        prompts.append(sequence.prompt_tokens)
        outputs.append(output_tokens)
    return WorkerSnapshot(
        member.name,
        member.draining,
        handles,
        adapters,
        tenants,
        prompts,
        outputs,
        num_waiting,
        oldest_ps,
        replica.kv_tokens,
        member.pool_tokens,
        _residents(replica.adapters, running, uses.tables, at_ps),
        len(replica.adapters.host),
    )


def _residents(residency: Residency, running: Running, tables: Tables, at_ps: int) -> list[ResidentAdapter]:
    residents = [
        ResidentAdapter(tables.adapter(adapter.adapter_id), IN_USE if running.uses(key) else ON_GPU, adapter.rank, 0)
        for key, adapter in residency.gpu.items()
    ]
    for load in residency.loading.values():
        adapter = load.adapter
        left_ps = max(0, load.ready_ps - at_ps)
        residents.append(ResidentAdapter(tables.adapter(adapter.adapter_id), LOADING, adapter.rank, left_ps))
    return residents
