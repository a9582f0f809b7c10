"""Figures of a worker's replica that are sent to it, so that it can show them under other engines' metric names.

They go with each plan, and with the answer to a heartbeat if something has changed. A few numbers are recorded per
request, nothing per step; running and waiting counts are read when sent. The names of running and waiting adapters go
with a plan at most every `NAMES_EVERY_PS`: a hundred names cost as much as everything else in a plan.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from lorrery.scheduler.core.cluster_facts import GaveBack, Joined, Placed
from lorrery.scheduler.core.facts import (
    ADAPTER_FACTS,
    AdapterEvent,
    Admitted,
    Cancelled,
    Dropped,
    Failed,
    Finished,
    FirstToken,
    Handler,
    LoadEnded,
    Preempted,
    Recalled,
)
from lorrery.scheduler.core.member import Member
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.scheduler.wire_workers import EngineCounts
from lorrery.service.telemetry.output_groups import OutputGroup, OutputGroups
from lorrery.vocabulary.endings import MEANINGS, FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

NAMES_EVERY_PS = PS_PER_SECOND // 10
SETTLED_PS = PS_PER_SECOND // 2
"""How long tokens of a running request wait until they count. Its router may find a stop string in them, or that its
client has left; like vLLM's front end, which does the same in its own process, we do not count what comes after."""


Happening = Admitted | Cancelled | Dropped | Failed | Finished | FirstToken | Preempted | Recalled


class EngineTallies:
    """The tallies of all workers.

    Args:
        make: makes the tally of a worker.
    """

    def __init__(self, make: Callable[[Member], "EngineTally"]) -> None:
        self._make = make
        self._tallies: dict[Member, EngineTally] = {}

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {
            Joined: self._joined,
            Placed: self._placed,
            GaveBack: self._gave_back,
            **dict.fromkeys(get_args(Happening), self._happened),
            **dict.fromkeys(ADAPTER_FACTS, self._adapter_changed),
        }

    def of(self, member: Member) -> "EngineTally | None":
        """Return a worker's tally; None: it is not attached."""
        return self._tallies.get(member)

    def _joined(self, fact: Joined, at_ps: int, member: Member | None) -> None:
        self._tallies[fact.member] = self._make(fact.member)

    def _placed(self, fact: Placed, at_ps: int, member: Member | None) -> None:
        self._tallies[fact.member].placed(fact.sequence)

    def _gave_back(self, fact: GaveBack, at_ps: int, member: Member | None) -> None:
        if fact.lost:
            del self._tallies[fact.member]
        else:
            self._tallies[fact.member].gave_back(fact.sequences)

    def _happened(self, fact: Happening, at_ps: int, member: Member | None) -> None:
        if member in self._tallies:
            self._tallies[member].happened(fact)

    def _adapter_changed(self, fact: AdapterEvent, at_ps: int, member: Member | None) -> None:
        if member in self._tallies:
            self._tallies[member].adapter_changed(fact)


class EngineTally:
    """Changes of one worker's replica since the last report.

    Args:
        replica: of the worker.
        pool_tokens: size of its KV pool.
        block_size: tokens in a block of the pool.
        max_loras: places for adapters on the GPU.
        groups: requests for several outputs, of all workers.
        group_of: returns the group of a request that has not ended, by its handle.
    """

    def __init__(
        self,
        replica: Replica,
        pool_tokens: int,
        block_size: int,
        max_loras: int,
        groups: OutputGroups,
        group_of: Callable[[int], OutputGroup | None],
    ) -> None:
        self._groups, self._group_of = groups, group_of
        self._tokens: dict[int, _Tokens] = {}  # by handle, of requests that have been in the batch
        self._generated = 0  # tokens to report; below 0: too many have been
        self._settled_ps = -SETTLED_PS
        self._replica = replica
        self._pool_tokens = pool_tokens
        self._next = EngineCounts()
        config = self._next.config
        config.pool_tokens, config.block_size, config.max_loras = pool_tokens, block_size, max_loras
        config.prefix_caching = replica.prefix_cache is not None
        self._first_tokens: list[FirstToken] = []
        self._ended: list[Finished] = []
        self._waiting: dict[str, int] = {}  # by adapter key
        self._waiting_ids: dict[str, str] = {}  # ids of these adapters
        self._running_version = -1
        self._running: tuple[str, ...] = ()
        self._told: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self._names_at_ps = -NAMES_EVERY_PS
        self._present: tuple[int, int, int, float] | None = None
        self._places: dict[str, dict[str, tuple[bool, bool]]] = {}  # by adapter id, then by the key of each version
        self._changed: dict[str, Adapter] = {}  # by key
        self._happened = True

    # --- what happens -----------------------------------------------------------------------------------------------

    def placed(self, sequence: Sequence) -> None:
        """Count a sequence that waits here from now on."""
        self._wait(sequence, 1)

    def gave_back(self, sequences: Iterable[Sequence]) -> None:
        """Uncount sequences that waited here."""
        for sequence in sequences:
            self._wait(sequence, -1)
            self._keeps(sequence, sequence.produced_tokens)

    def happened(self, fact: Happening) -> None:
        """Record a fact of a decision or a step."""
        told, sequence = self._next, fact.sequence
        self._happened = True
        if isinstance(fact, Admitted):
            self._wait(sequence, -1)
            self._tokens.setdefault(sequence.handle, _Tokens(sequence))
            if fact.queried_tokens:
                told.prefix_queries += fact.queried_tokens
                told.prefix_hits += sequence.cached_tokens
        elif isinstance(fact, FirstToken):
            self._first_tokens.append(fact)
        elif isinstance(fact, Finished):
            self._keeps(sequence, fact.output_tokens)
            if fact.reason is FinishReason.ABORTED:
                told.num_aborted += 1
            else:
                self._finished(fact)
        elif isinstance(fact, Preempted):
            self._wait(sequence, 1)
            told.num_preemptions += 1
        elif isinstance(fact, Recalled):
            self._wait(sequence, -1)
            self._keeps(sequence, sequence.produced_tokens)
        else:
            self._ended_otherwise(fact)

    def _ended_otherwise(self, fact: Cancelled | Dropped | Failed) -> None:
        sequence, told = fact.sequence, self._next
        if sequence.admitted_ps is None:
            self._wait(sequence, -1)
        withdrawal = sequence.withdrawal
        self._keeps(sequence, None if withdrawal is None else withdrawal.kept_tokens)
        if not isinstance(fact, Cancelled):
            told.num_failed += 1
        elif withdrawal is None or MEANINGS[withdrawal.cause].outcome:
            told.num_aborted += 1

    def _finished(self, event: Finished) -> None:
        self._ended.append(event)
        whole = self._groups.finished(self._group_of(event.sequence.handle), event.output_tokens)
        if whole is not None:
            self._next.request_outputs.append(whole.num_outputs)
            self._next.request_longest_tokens.append(whole.longest_tokens)

    def _keeps(self, sequence: Sequence, output_tokens: int | None) -> None:
        """Count the output of a request that leaves; None: what it had when that was last looked at."""
        tokens = self._tokens.pop(sequence.handle, None)
        if tokens is not None:
            self._generated += (tokens.seen if output_tokens is None else output_tokens) - tokens.counted

    def _settle(self) -> None:
        """Count the output that running requests had at the last call."""
        replica = self._replica
        for tokens in self._tokens.values():
            self._generated += tokens.seen - tokens.counted
            sequence, tokens.counted = tokens.sequence, tokens.seen
            tokens.seen = sequence.produced_tokens
            if sequence.admitted_ps is not None:
                tokens.seen += replica.output_tokens(sequence)

    def _wait(self, sequence: Sequence, by: int) -> None:
        adapter = sequence.adapter
        if adapter is not None:
            key = adapter.key
            number = self._waiting.get(key, 0) + by
            if number > 0:
                self._waiting[key] = number
                self._waiting_ids[key] = adapter.adapter_id
            else:
                self._waiting.pop(key, None)
                self._waiting_ids.pop(key, None)

    def adapter_changed(self, fact: AdapterEvent) -> None:
        """Record a fact of the worker's adapters."""
        if isinstance(fact, LoadEnded) and not fact.failed:
            took = self._next.host_load_ps if fact.tier == "host" else self._next.disk_load_ps
            took.append(fact.took_ps)
        self._changed[fact.adapter.key] = fact.adapter
        self._happened = True

    # --- telling ----------------------------------------------------------------------------------------------------

    def take(self, now_ps: int, *, only_changes: bool = False) -> EngineCounts | None:
        """Return, once, the figures to send; with `only_changes`, names included, or None if nothing has changed."""
        replica = self._replica
        waiting, awaited = self._waiting, replica.adapters.awaited
        num_deferred = sum([waiting.get(key, 0) for key in awaited]) if awaited else 0
        present = replica.num_running, replica.num_waiting, num_deferred, self._kv_usage()
        if self._tokens and now_ps - self._settled_ps >= SETTLED_PS:
            self._settled_ps = now_ps
            self._settle()
        if only_changes and not self._happened and self._generated <= 0 and present == self._present:
            return None
        told, self._next = self._next, EngineCounts()
        self._present, self._happened = present, False
        told.num_running, told.num_waiting, told.num_deferred, told.kv_usage = present
        if self._generated > 0:
            told.generated_tokens, self._generated = self._generated, 0
        if self._first_tokens:
            self._tell_first_tokens(told)
        if self._ended:
            self._tell_ended(told)
        if only_changes or now_ps - self._names_at_ps >= NAMES_EVERY_PS:
            self._names_at_ps = now_ps
            self._tell_names(told)
        else:
            self._happened = True  # the next heartbeat sends the names, if no plan does before
        if self._changed:
            self._tell_places(told)
        return told

    def _kv_usage(self) -> float:
        replica = self._replica
        use = replica.memory.block_use(replica.running)
        if use is not None:
            return use.used / max(1, use.used + use.cached + use.free)
        return replica.kv_tokens / max(1, self._pool_tokens)

    def _tell_first_tokens(self, told: EngineCounts) -> None:
        events, self._first_tokens = self._first_tokens, []
        told.first_token_ps.extend([max(0, event.at_ps - event.sequence.arrived_ps) for event in events])
        told.first_prompt_tokens.extend([event.sequence.prompt_tokens for event in events])
        told.first_cached_tokens.extend([event.sequence.first_cached_tokens for event in events])

    def _tell_ended(self, told: EngineCounts) -> None:
        events, self._ended = self._ended, []
        sequences = [event.sequence for event in events]
        told.ended_reasons.extend([event.reason for event in events])
        told.ended_prompt_tokens.extend([sequence.prompt_tokens for sequence in sequences])
        told.ended_cached_tokens.extend([sequence.first_cached_tokens for sequence in sequences])
        told.ended_output_tokens.extend([event.output_tokens for event in events])
        told.ended_max_tokens.extend([sequence.max_new_tokens for sequence in sequences])
        told.ended_requeues.extend([sequence.num_requeues for sequence in sequences])
        queue_ps, prefill_ps, decode_ps = zip(*[_times(event) for event in events], strict=True)
        told.ended_queue_ps.extend(queue_ps)
        told.ended_prefill_ps.extend(prefill_ps)
        told.ended_decode_ps.extend(decode_ps)

    def _tell_names(self, told: EngineCounts) -> None:
        running = self._replica.running
        if running.version != self._running_version:
            self._running_version = running.version
            self._running = running.adapter_ids
        names = self._running, tuple(dict.fromkeys(self._waiting_ids.values()))
        if names != self._told:
            self._told = names
            told.adapters.running.extend(names[0])
            told.adapters.waiting.extend(names[1])
            told.adapters.SetInParent()

    def _tell_places(self, told: EngineCounts) -> None:
        residency, changed = self._replica.adapters, self._changed
        self._changed = {}
        for key, adapter in changed.items():
            places = self._places.setdefault(adapter.adapter_id, {})
            places[key] = key in residency.gpu, key in residency.host
            if not any(places[key]):
                del places[key]
        for name in dict.fromkeys([adapter.adapter_id for adapter in changed.values()]):
            held = self._places[name].values()
            told.places.add(adapter_id=name, gpu=any(gpu for gpu, _ in held), host=any(host for _, host in held))
            if not held:
                del self._places[name]


class _Tokens:
    """Output of a request in the batch.

    Attributes:
        sequence: the request.
        counted: tokens of it that were counted, here or by the worker that had it before.
        seen: tokens that it had when running requests were last looked at.
    """

    __slots__ = ("counted", "seen", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.counted = self.seen = sequence.produced_tokens


def _times(event: Finished) -> tuple[int, int, int]:
    """Return how long a request that has ended was queued, in prefill and in decode, in picoseconds."""
    sequence = event.sequence
    admitted_ps, first_token_ps = sequence.first_admitted_ps, sequence.first_token_ps
    if admitted_ps is None:  # its router had cut the output that it brought from another scheduler
        admitted_ps = max(sequence.arrived_ps, event.at_ps)
    if first_token_ps is None:  # it brought tokens from another scheduler
        first_token_ps = admitted_ps
    first_token_ps = max(first_token_ps, admitted_ps)  # workers' clocks may differ
    return max(0, admitted_ps - sequence.arrived_ps), first_token_ps - admitted_ps, max(0, event.at_ps - first_token_ps)
