"""Which adapters a worker's GPU holds, and when the next load ends.

Three tiers. Every registered adapter is on disk; a worker's host memory caches those it has read (`max_cpu_loras`, the
least recently used goes first), its GPU those it serves (`max_loras` of them, or `max_slots` of its memory). A load
takes what the device model says for the tier it comes from. At most `max_concurrent_loads` run at once; a further one
begins when one of these ends.

A load takes a GPU place from its beginning. If none is free, the least recently used adapter that no sequence pins is
evicted; if all are pinned, the load waits for a sequence to leave.

Look-ahead (`load_ahead`) begins loads for the first waiting sequences while loads and places are free. It evicts no
adapter that they need too, and never delays a load that a sequence requires now.

* background (default): a sequence whose adapter is not on the GPU waits in the queue while the batch goes on; the end
  of the load is a timed event, and the batch ends its segment at the boundary after it.
* blocking (S-LoRA): the sequence enters at once, and its prefill step waits for the rest of the load.

A load that a fault makes slow or lets fail runs *aside*, into host memory: it takes no place on the GPU and none of
the `max_concurrent_loads`, and in both modes its sequence waits in the queue, so it delays nobody else. One that fails
starts over; after `max_load_attempts` the adapter is given up, and the sequences that wait for it are dropped.

`keep_unused = False` is S-LoRA's way: an adapter leaves the GPU as soon as no running sequence uses it.

A load on request (`load`), for no sequence, runs aside too, and evicts an unused adapter only once the weights are
read. If every place is in use then, the adapter stays in host memory, and the first sequence that has it loads it from
there.

An adapter that new requests cannot name any more (`retire`) leaves GPU and host once no sequence of the worker has it.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from typing import Final

from lorrery.scheduler.core.adapters.loads import (
    DEFAULT,
    WELL,
    AdapterLog,
    AdapterOptions,
    Ahead,
    Load,
    LoadFault,
    LoadFaults,
    LoadTime,
    Tier,
)
from lorrery.scheduler.core.running import AdapterUse
from lorrery.scheduler.core.sequence import Adapter, LoadEnd, Sequence

_NOBODY: frozenset[str] = frozenset()
_MOST_KNOWN: Final = 4096
"""Load times cached per tier, and adapters remembered as retired."""


class Residency:
    """The adapters of one worker.

    Args:
        options: the rules.
        load_ps: how long a load takes.
        load_faults: which loads fail or are slow; called once for each load, as it begins.

    Attributes:
        use: which adapters the batch uses, and which are unused; see `serve`.
        host: adapters cached in host memory, least recently used first, but for those in use.
    """

    def __init__(
        self,
        options: AdapterOptions = DEFAULT,
        load_ps: LoadTime = lambda adapter, tier: 0,
        load_faults: LoadFaults = lambda adapter, attempt, at_ps: WELL,
    ) -> None:
        self.options = options
        self._most_slots: int | None = None if options.max_loras is not None else options.max_slots
        self.use = AdapterUse()
        self.host: dict[str, Adapter] = {}
        self.use.host = self.host
        self.gpu: dict[str, Adapter] = {}
        """Usable adapters."""
        self.loading: dict[str, Load] = {}
        """Loads that are running, each with a place on the GPU."""
        self.aside: dict[str, Load] = {}
        """Loads that are running into host memory."""
        self.staged: dict[str, Adapter] = {}
        """Adapters that such a load has brought, until they get a place on the GPU or `settle`."""
        self.requested: dict[str, Adapter] = {}
        """Adapters to load on request, until `settle` finds their load over."""
        self._answers: list[tuple[str, bool]] = []
        self.next_event_ps: int | None = None
        """When the first load ends."""
        self._next_to_come: str | None = None
        self.given_up: dict[str, Adapter] = {}
        """Adapters whose load was given up, until `take_given_up`."""
        self.retiring: dict[str, None] = {}
        """Retired adapters on the GPU or the host, by key."""
        self._retired: dict[str, None] = {}
        self.evicted: list[str] = []
        """Keys of evicted adapters, until `take_evicted`."""
        self.log: AdapterLog | None = None
        """Receives the events of this class; None: not recorded."""
        self._tell: Callable[[str, bool], None] | None = None
        self.version = 0
        """Changes whenever a load is requested, an adapter arrives, or one leaves."""
        self._num_gone = 0  # evictions and failed loads
        self.num_loads = 0
        self.num_failed_loads = 0
        self._load_ps = load_ps
        self._known_host_ps: dict[str, int] = {}
        self._known_disk_ps: dict[str, int] = {}
        self._load_faults = load_faults
        self._waiting: dict[str, Adapter] = {}
        self._attempts: dict[str, int] = {}
        self._read: set[str] = set()  # in host memory, and without a place since: no fault concerns their next load
        self._awaited: dict[str, LoadEnd] = {}
        self._taken_slots = 0  # of adapters on the GPU, loading, and waiting for their load

    def serve(self, use: AdapterUse) -> None:
        """Set the batch whose adapter use counts; only while the GPU has no adapters."""
        assert not self.gpu
        self.use = use
        use.host = self.host

    # --- asking -----------------------------------------------------------------------------------------------------

    def require(self, adapter: Adapter, at_ps: int, admitted: Many[Sequence] = ()) -> bool:
        """Require an adapter for a sequence that would enter now; return whether it may.

        In the background mode this begins the load if the adapter is not there and a place can be had. Repeating the
        call changes nothing.

        Args:
            adapter: to require.
            at_ps: now.
            admitted: sequences about to join the batch; their adapters are not evicted.
        """
        name = adapter.key
        if name in self.gpu:
            self.gpu[name] = self.gpu.pop(name)
            self.use.asked_for(name)
            if name in self.host:
                self.host[name] = self.host.pop(name)
            return True
        if not self.has_asked_for(adapter):
            if not self._make_place(adapter, at_ps, admitted):
                return False
            if name not in self.staged:
                self._begin(adapter, at_ps)
                self.advance(at_ps)  # a load that takes no time
            if name in self.staged and self._make_place(adapter, at_ps, admitted):
                self._activate(adapter, at_ps)
        return name in self.gpu or (self.options.blocking and name not in self.aside and self.has_asked_for(adapter))

    def prefetch(self, adapter: Adapter, at_ps: int) -> None:
        """Begin to load an adapter that will be needed, if a place can be had without evicting one in use."""
        if not self.has_asked_for(adapter) and self._make_place(adapter, at_ps):
            self._begin(adapter, at_ps)

    def load(self, adapter: Adapter, at_ps: int) -> None:
        """Load an adapter on request, unless it is on the GPU or on its way; see `take_answers`."""
        self.requested[adapter.key] = adapter
        if not self.has_asked_for(adapter) and adapter.key not in self.staged:
            fault = self._load_faults(adapter, self._attempts.get(adapter.key, 0), at_ps)
            self._start(self.aside, adapter, fault, at_ps)
            self.advance(at_ps)  # a load that takes no time

    def load_ahead(self, ahead: Ahead, at_ps: int) -> bool:
        """Begin to load adapters that will be needed next, as far as loads and places are free.

        Args:
            ahead: the adapters, in order; its prefix count is updated.
            at_ps: now.

        Returns:
            Whether one of them lacks a place.
        """
        if not self.has_free_load:
            return False
        gpu, loading, adapters = self.gpu, self.loading, ahead.adapters
        gone, num = self._num_gone, len(adapters)
        place = ahead.num_there if ahead.as_of == gone else 0
        wants_place = False
        while place < num:
            adapter = adapters[place]
            if adapter.key not in gpu and adapter.key not in loading and adapter.key not in self.aside:
                if not self._has_place(adapter):
                    before = self._num_gone
                    if not self._put_out_for(adapter, at_ps, ahead.by_key):
                        wants_place = True
                        break
                    gone += self._num_gone - before  # an eviction of an adapter that is not in `ahead`
                self._begin(adapter, at_ps)
                self.advance(at_ps)  # a load that takes no time
                if not self.has_free_load:
                    break
            place += 1
        ahead.num_there, ahead.as_of = place, gone
        return wants_place

    @property
    def has_free_load(self) -> bool:
        """Whether a load requested now would begin at once."""
        return not self._waiting and len(self.loading) < self.options.max_concurrent_loads

    def load_ps(self, adapter: Adapter) -> int:
        """Return how long a load takes alone: 0 for an adapter on the GPU, half for one that is loading."""
        key = adapter.key
        if key in self.gpu:
            return 0
        from_host = key in self.host
        known_ps = self._known_host_ps if from_host else self._known_disk_ps
        load_ps = known_ps.get(key, -1)  # a placement calls this for every worker and request
        if load_ps < 0:
            load_ps = self._load_ps(adapter, Tier.HOST if from_host else Tier.DISK)
            if len(known_ps) == _MOST_KNOWN:
                known_ps.clear()
            known_ps[key] = load_ps
        return load_ps // 2 if key in self.loading or key in self.aside else load_ps

    def tell(self, note: Callable[[str, bool], None] | None) -> None:
        """Report each adapter by key, and whether it is on the GPU, now and whenever that changes; None: no more."""
        self._tell = note
        if note is not None:
            for name in self.gpu:
                note(name, True)

    def has_asked_for(self, adapter: Adapter) -> bool:
        """Return whether an adapter is on the GPU, loading, or waiting for its load."""
        key = adapter.key
        return key in self.gpu or key in self.loading or key in self._waiting or key in self.aside

    def holds(self, adapter_key: str) -> bool:
        """Return whether an adapter is on the GPU or the host, or on its way there."""
        there = adapter_key in self.gpu or adapter_key in self.host
        return there or adapter_key in self.loading or adapter_key in self._waiting or adapter_key in self.aside

    @property
    def awaited(self) -> Collection[str]:
        """Keys of adapters that a sequence has waited for and that have not arrived since; a view."""
        return self._awaited.keys()

    def load_end(self, adapter: Adapter) -> LoadEnd:
        """Return the end of the next load of an adapter that is not on the GPU, whether or not it has begun."""
        key = adapter.key
        load_end = self._awaited.get(key)
        if load_end is None:
            load_end = self._awaited[key] = LoadEnd()
        return load_end

    def wait_ps(self, adapters: Collection[Adapter], at_ps: int) -> int:
        """Return how long a step that begins now waits for these adapters (blocking), and finish their loads."""
        now_ps = at_ps
        for adapter in adapters:
            while adapter.key not in self.gpu:
                next_ps = self.next_event_ps
                assert next_ps is not None, f"adapter {adapter.adapter_id} was not asked for"
                now_ps = max(now_ps, next_ps)
                self.advance(now_ps)
        return now_ps - at_ps

    def has_place(self, adapter: Adapter, pinned: Collection[str]) -> bool:
        """Return whether `require` would find the adapter, its load or a place with these in use. Changes nothing."""
        options = self.options
        if self.has_asked_for(adapter):
            return True
        stay = {*pinned, *self.loading, *self._waiting}
        if options.max_loras is not None:
            return len(stay) < options.max_loras
        if options.max_slots is None or not stay:
            return True
        go = sum([resident.slots for key, resident in self.gpu.items() if key not in stay])
        return self._taken_slots - go + adapter.slots <= options.max_slots

    def _has_place(self, adapter: Adapter) -> bool:
        options = self.options
        if options.max_loras is not None:
            return len(self.gpu) + len(self.loading) + len(self._waiting) < options.max_loras
        if options.max_slots is None or not self._taken_slots:
            return True
        return self._taken_slots + adapter.slots <= options.max_slots

    def _make_place(self, adapter: Adapter, at_ps: int, admitted: Many[Sequence] = ()) -> bool:
        if self._has_place(adapter):
            return True
        return self._put_out_for(adapter, at_ps, {s.adapter.key: s.adapter for s in admitted if s.adapter is not None})

    def _put_out_for(self, adapter: Adapter, at_ps: int, stay: dict[str, Adapter]) -> bool:
        """Evict as many adapters as needed, least recently used first; none if that would not be enough.

        Adapters in use and those in `stay` are not evicted.
        """
        if self._most_slots is None:
            first = self.use.first_unused(stay)
            if first is None:
                return False
            self._evict(first, at_ps)
            return True
        unused, go = self.use.unused(stay), 0
        missing = self._taken_slots + adapter.slots - self._most_slots
        while missing > 0 and go < len(unused):
            missing -= self.gpu[unused[go]].slots
            go += 1
        all_go = go == len(self.gpu) and not self.loading and not self._waiting
        if not go or (missing > 0 and not all_go):
            return False
        for name in unused[:go]:
            self._evict(name, at_ps)
        return True

    def _evict(self, name: str, at_ps: int) -> None:
        adapter = self.gpu.pop(name)
        self._num_gone += 1
        self.use.went(name)
        if self._tell is not None:
            self._tell(name, False)
        self.version += 1
        self._taken_slots -= adapter.slots
        self.evicted.append(name)
        if self.log is not None:
            self.log.evicted(adapter, "gpu", at_ps)

    def _begin(self, adapter: Adapter, at_ps: int) -> None:
        """Load an adapter for which there is a place; aside, if a fault concerns the load."""
        was_read = adapter.key in self._read
        fault = WELL if was_read else self._load_faults(adapter, self._attempts.get(adapter.key, 0), at_ps)
        self._read.discard(adapter.key)
        if fault == WELL:
            self._take_place(adapter, at_ps)
        else:
            self._start(self.aside, adapter, fault, at_ps)

    def _take_place(self, adapter: Adapter, at_ps: int) -> None:
        """Take a place for an adapter, and queue its load."""
        self.version += 1
        self._taken_slots += adapter.slots
        self._waiting[adapter.key] = adapter
        self._begin_waiting(at_ps)

    def _begin_waiting(self, at_ps: int) -> None:
        while self._waiting and len(self.loading) < self.options.max_concurrent_loads:
            self._start(self.loading, self._waiting.pop(next(iter(self._waiting))), WELL, at_ps)

    def _start(self, loads: dict[str, Load], adapter: Adapter, fault: LoadFault, at_ps: int) -> None:
        tier = Tier.HOST if adapter.key in self.host else Tier.DISK
        load_ps = self._load_ps(adapter, tier) * fault.factor.numerator // fault.factor.denominator
        self.version += 1
        self.num_loads += 1
        loads[adapter.key] = Load(adapter, tier, at_ps, at_ps + load_ps, fault.fails)
        self._note_next_event()
        if self.log is not None:
            self.log.load_began(adapter, tier.value, at_ps)

    def _note_next_event(self) -> None:
        """Update which load ends next; ties go to the first by name."""
        first: str | None = None
        first_ps = 0
        for loads in (self.loading, self.aside):
            for name, load in loads.items():
                ready_ps = load.ready_ps
                if first is None or ready_ps < first_ps or (ready_ps == first_ps and name < first):
                    first, first_ps = name, ready_ps
        self._next_to_come = first
        self.next_event_ps = None if first is None else first_ps

    # --- time -------------------------------------------------------------------------------------------------------

    def advance(self, at_ps: int) -> None:
        """Apply the loads that have ended by now, in order of their ends."""
        while self.next_event_ps is not None and self.next_event_ps <= at_ps:
            self._end_load()

    def _end_load(self) -> None:
        name = self._next_to_come
        assert name is not None
        aside = self.aside.pop(name, None)
        load = self.loading.pop(name) if aside is None else aside
        self._note_next_event()
        self.version += 1
        if self.log is not None:
            took_ps = load.ready_ps - load.began_ps
            self.log.load_ended(
                load.adapter, load.tier.value, load.ready_ps, took_ps, failed=load.fails, in_place=aside is None
            )
        if load.fails:
            self._failed(load.adapter, load.ready_ps)
            return
        self._attempts.pop(name, None)
        self._cache_on_host(load.adapter, load.ready_ps)
        if name in self._retired:
            self.retiring[name] = None
        if aside is not None:
            self._num_gone += 1
            self.staged[name] = load.adapter
            return
        self._taken_slots -= load.adapter.slots
        self._arrive(load.adapter, load.ready_ps)
        self._begin_waiting(load.ready_ps)

    def _arrive(self, adapter: Adapter, at_ps: int) -> None:
        """Put an adapter on the GPU, where there is a place for it."""
        name = adapter.key
        self.version += 1
        self.staged.pop(name, None)
        self._taken_slots += adapter.slots
        self.gpu[name] = adapter
        self.use.came(name)
        if self._tell is not None:
            self._tell(name, True)
        if self._awaited and (awaited := self._awaited.pop(name, None)) is not None:
            awaited.at_ps = at_ps

    def _activate(self, adapter: Adapter, at_ps: int) -> None:
        self._arrive(adapter, at_ps)
        if self.log is not None:
            self.log.activated(adapter, at_ps)

    def settle(self, at_ps: int) -> None:
        """Give the adapters that loads have brought into host memory their places, as far as these can be had.

        Then answer requests for loads that are over.
        """
        for adapter in list(self.staged.values()):
            if self._make_place(adapter, at_ps):
                self._activate(adapter, at_ps)
        self._read |= self.staged.keys()
        self.staged.clear()
        for name in [name for name in self.requested if self._is_over(name)]:
            del self.requested[name]
            self._answers.append((name, name not in self.given_up))

    def _is_over(self, name: str) -> bool:
        return name not in self.aside and name not in self.loading and name not in self._waiting

    @property
    def has_news(self) -> bool:
        """Whether the next decision has something to `settle` or sequences to drop."""
        return bool(self.given_up or self.staged) or any(map(self._is_over, self.requested))

    def _failed(self, adapter: Adapter, at_ps: int) -> None:
        name = adapter.key
        self.num_failed_loads += 1
        self._num_gone += 1
        attempt = self._attempts[name] = self._attempts.get(name, 0) + 1
        if attempt < self.options.max_load_attempts:
            self._start(self.aside, adapter, self._load_faults(adapter, attempt, at_ps), at_ps)
        else:
            del self._attempts[name]
            self.given_up[name] = adapter

    def _cache_on_host(self, adapter: Adapter, at_ps: int) -> None:
        name = adapter.key
        self.host.pop(name, None)
        self.host[name] = adapter
        most = self.options.max_cpu_loras
        if most is not None and len(self.host) > most:
            oldest = self.host.pop(self._oldest_on_host())
            if self.log is not None:
                self.log.evicted(oldest, "host", at_ps)

    def _oldest_on_host(self) -> str:
        """Return the least recently used adapter of the host; those in use count as used now."""
        for _ in range(len(self.host)):
            name = next(iter(self.host))
            if name not in self.use.pins:
                return name
            self.host[name] = self.host.pop(name)
        return next(iter(self.host))

    # --- out of use -------------------------------------------------------------------------------------------------

    def retire(self, adapter_key: str) -> None:
        """Note that an adapter is out of use: it is `retiring` from now on, or from its arrival."""
        self._retired[adapter_key] = None
        if len(self._retired) > _MOST_KNOWN:
            del self._retired[next(iter(self._retired))]
        if adapter_key in self.gpu or adapter_key in self.host:
            self.retiring[adapter_key] = None

    def is_retired(self, adapter_key: str) -> bool:
        """Return whether an adapter is known to be out of use."""
        return adapter_key in self._retired

    def put_out(self, adapter_key: str, at_ps: int) -> None:
        """Remove a retiring adapter that no sequence has from GPU and host."""
        del self.retiring[adapter_key]
        self._read.discard(adapter_key)
        if adapter_key in self.gpu:
            self._evict(adapter_key, at_ps)
        adapter = self.host.pop(adapter_key, None)
        if adapter is not None:
            self.version += 1
            if self.log is not None:
                self.log.evicted(adapter, "host", at_ps)

    # --- what changed -----------------------------------------------------------------------------------------------

    def keep_only(self, adapter_keys: Collection[str], at_ps: int) -> None:
        """Evict every adapter on the GPU but these (S-LoRA's offload)."""
        for name in [name for name in self.gpu if name not in adapter_keys]:
            self._evict(name, at_ps)

    def take_evicted(self) -> tuple[str, ...]:
        """Return, once, the adapters that were evicted and have not come back."""
        if not self.evicted:
            return ()
        evicted, self.evicted = self.evicted, []
        return tuple(dict.fromkeys(name for name in evicted if name not in self.gpu))

    def take_given_up(self) -> frozenset[str]:
        """Return, once, the adapters whose load was given up."""
        if not self.given_up:
            return _NOBODY
        given_up, self.given_up = self.given_up, {}
        return frozenset(given_up)

    def take_answers(self) -> list[tuple[str, bool]]:
        """Return, once, the adapters by key whose load on request is over, each with whether it has succeeded."""
        answers = self._answers
        if answers:
            self._answers = []
        return answers

    def clear(self, at_ps: int) -> None:
        """Forget all adapters that the worker held; loads that have ended by now count as ended."""
        self._awaited.clear()
        self.advance(at_ps)
        if self.log is not None:
            self.log.lost(at_ps)
        self.version += 1
        self._num_gone += 1
        for name in self.gpu:
            self.use.went(name)
            if self._tell is not None:
                self._tell(name, False)
        self.gpu.clear()
        self.host.clear()
        self.loading.clear()
        self.aside.clear()
        self.staged.clear()
        self._read.clear()
        self.requested.clear()
        self._answers.clear()
        self._note_next_event()
        self._waiting.clear()
        self._attempts.clear()
        self._taken_slots = 0
        self.given_up.clear()
        self.retiring.clear()
        self.evicted.clear()
