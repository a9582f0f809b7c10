"""The sequences in the batch of one worker, with the aggregates that decisions need.

Every decoding sequence gets one token per decode step, so one counter (`decode_step`) stands for all lengths: a step
costs O(1) whatever the batch size. The arrays that admission rules read are rebuilt only when a sequence comes or goes.
`AdapterUse` has the adapters that the sequences use.
"""

from collections.abc import Collection, Iterable, Iterator, KeysView
from typing import TYPE_CHECKING, Final, TypeAlias

from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.vocabulary.machine_ints import bisect_left, insort

if TYPE_CHECKING:
    from mypy_extensions import i64


class AdapterUse:
    """Which adapters the sequences of a batch use, and the unused ones on the GPU in order of last use.

    The batch reports use (`pin`, `unpin`), the residency what is on the GPU (`came`, `went`) and what is required there
    (`asked_for`). So the next adapter to evict is known at any time without a scan. An adapter is used until its last
    sequence leaves, in host memory too, as in vLLM, whose caches count the adapters of every step as used.

    Invariants: `_asked` has each adapter on the GPU with the number of its last use; `_unused` has those numbers of the
    unpinned ones, ascending, and `_unused_keys` their keys. Cost: O(log n), and a move of a few words.

    Attributes:
        pins: number of sequences by adapter key, of adapters with at least one.
        slots: pool slots that these adapters take.
        names: adapter id by key, where the two differ.
        host: adapters cached in host memory, least recently used first; belongs to the residency.
    """

    __slots__ = ("_asked", "_num_askings", "_unused", "_unused_keys", "host", "names", "pins", "slots")

    def __init__(self) -> None:
        self.pins: dict[str, int] = {}
        self.slots = 0
        self.names: dict[str, str] = {}
        self.host: dict[str, Adapter] = {}
        self._num_askings = 0
        self._asked: dict[str, int] = {}
        self._unused: list[i64] = []
        self._unused_keys: list[str] = []

    # --- the batch --------------------------------------------------------------------------------------------------

    def pin(self, adapter: Adapter) -> None:
        """Count a sequence that enters with an adapter."""
        key = adapter.key
        pins = self.pins.get(key, 0)
        self.pins[key] = pins + 1
        if not pins:
            self.slots += adapter.slots
            if adapter.version:
                self.names[key] = adapter.adapter_id
            asking = self._asked.get(key)
            if asking is not None:
                self._take_out(asking)

    def unpin(self, adapter: Adapter) -> None:
        """Uncount a sequence that leaves."""
        key = adapter.key
        pins = self.pins[key] - 1
        if pins:
            self.pins[key] = pins
            return
        del self.pins[key]
        self.slots -= adapter.slots
        if adapter.version:
            del self.names[key]
        if key in self._asked:
            self.came(key)
        host = self.host
        if key in host:
            host[key] = host.pop(key)

    # --- the GPU ----------------------------------------------------------------------------------------------------

    def came(self, key: str) -> None:
        """Record that an adapter is now on the GPU."""
        self._num_askings += 1
        self._asked[key] = self._num_askings
        if key not in self.pins:
            self._unused.append(self._num_askings)
            self._unused_keys.append(key)

    def asked_for(self, key: str) -> None:
        """Record that an adapter on the GPU is required once more."""
        if key not in self.pins:
            self._take_out(self._asked[key])
        self.came(key)

    def went(self, key: str) -> None:
        """Record that an adapter has left the GPU."""
        asking = self._asked.pop(key)
        if key not in self.pins:
            self._take_out(asking)

    def _take_out(self, asking: int) -> None:
        place = bisect_left(self._unused, asking)
        del self._unused[place], self._unused_keys[place]

    def unused(self, stay: Collection[str]) -> list[str]:
        """Return the unpinned adapters on the GPU, least recently required first, without those in `stay`."""
        return [key for key in self._unused_keys if key not in stay]

    def first_unused(self, stay: dict[str, Adapter]) -> str | None:
        """Return the first of `unused(stay)`; None: there is none."""
        for key in self._unused_keys:
            if key not in stay:
                return key
        return None


TOLERANCE: Final = 1.2
Joined: TypeAlias = tuple[int, int]
"""When a sequence joined the queue, in picoseconds, and a count that orders those of one time."""


class Running:
    """The batch: sequences in prefill, in order of admission, and decoding ones, in order of joining.

    Attributes:
        prefilling: by handle; their memory is reserved, but they have no token yet.
        held: by handle; they have ended, but keep what they hold until all have (static batching).
        num: number of sequences, those in prefill and held ones included.
        decode_step: counts the decode steps of this batch; each gives every decoding sequence a token.
        adapter_use: the adapters in use.
        version: changes whenever a sequence enters, joins or leaves.
        reserved_tokens: tokens at the end of all sequences if none left earlier; no peak is higher.
    """

    def __init__(self) -> None:
        self.prefilling: dict[int, Sequence] = {}
        self.decode_step = 0
        self._decoding: dict[int, Sequence] = {}
        self.held: dict[int, Sequence] = {}
        self._kv_tokens = 0
        self._finish_steps: list[i64] = []  # finish step of each decoding sequence's budget; ascending
        self._first_finish_step = 0  # the first of those, read at every boundary; 0: none decodes
        self.adapter_use = AdapterUse()
        self._by_tenant: dict[str | None, int] = {}
        self._by_tenant_version = -1
        self.reserved_tokens = 0
        self.version = 0
        self.num = 0
        self._num_entered = 0
        self._without_adapter: set[int] = set()  # of those held

    def __len__(self) -> int:
        return self.num

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens still to compute of sequences in prefill."""
        return sum([sequence.input_tokens - sequence.computed_tokens for sequence in self.prefilling.values()])

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the decoding sequences."""
        return iter(self._decoding.values())

    @property
    def num_decoding(self) -> int:
        """Sequences past their prompt."""
        return len(self._decoding)

    def decoding_by_adapter(self) -> dict[str | None, int]:
        """Return how many sequences decode with each adapter, by adapter id; None: with the base model."""
        numbers: dict[str | None, int] = dict(self.adapter_use.pins.items())
        for key, name in self.adapter_use.names.items():
            numbers[name] = numbers.get(name, 0) + numbers.pop(key)
        for sequence in (*self.prefilling.values(), *self.held.values()):
            if sequence.adapter is not None and sequence.handle not in self._without_adapter:
                numbers[sequence.adapter.adapter_id] -= 1
        with_base = len(self._decoding) - sum(numbers.values())
        if with_base:
            numbers[None] = with_base
        return numbers

    def decoding_by_tenant(self) -> dict[str | None, int]:
        """Return how many sequences decode for each tenant; read-only. Rebuilt in linear time after a change."""
        if self._by_tenant_version != self.version:
            numbers: dict[str | None, int] = {}
            for sequence in self._decoding.values():
                numbers[sequence.tenant_id] = numbers.get(sequence.tenant_id, 0) + 1
            self._by_tenant, self._by_tenant_version = numbers, self.version
        return self._by_tenant

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache, or reserved there: inputs, in full also during prefill, and outputs.

        The newest token of a sequence enters the cache with its next step, and the last one never does.
        """
        return self._kv_tokens + (self.decode_step - 1) * len(self._decoding)

    @property
    def first(self) -> Sequence | None:
        """The sequence that has been in the batch for longest."""
        for sequences in (self._decoding, self.prefilling, self.held):
            for sequence in sequences.values():
                return sequence
        return None

    def get(self, handle: int) -> Sequence | None:
        """Return the sequence of that handle."""
        return self._decoding.get(handle) or self.prefilling.get(handle) or self.held.get(handle)

    def is_prefilling(self, sequence: Sequence) -> bool:
        """Return whether a sequence is in prefill."""
        return sequence.handle in self.prefilling

    # --- adapters ---------------------------------------------------------------------------------------------------

    @property
    def adapter_keys(self) -> KeysView[str]:
        """Distinct adapters of the sequences; a view."""
        return self.adapter_use.pins.keys()

    @property
    def adapter_ids(self) -> tuple[str, ...]:
        """Ids of those adapters; versions of one name count as one."""
        names = self.adapter_use.names
        return tuple(dict.fromkeys([names.get(key, key) for key in self.adapter_use.pins]))

    @property
    def adapter_pins(self) -> int:
        """Sequences that use an adapter."""
        return sum(tuple(self.adapter_use.pins.values()))

    @property
    def adapter_slots(self) -> int:
        """Pool slots of the distinct adapters."""
        return self.adapter_use.slots

    def uses(self, adapter_key: str) -> bool:
        """Return whether a sequence has this adapter."""
        return adapter_key in self.adapter_use.pins

    def adapter_slots_with(self, adapter: Adapter | None) -> int:
        """Return `adapter_slots` as it would be if a sequence with this adapter ran too."""
        use = self.adapter_use
        return use.slots if adapter is None or adapter.key in use.pins else use.slots + adapter.slots

    # --- coming and going -------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """Add a sequence; its prefill begins."""
        self._num_entered += 1
        sequence.entered = self._num_entered
        self.prefilling[sequence.handle] = sequence
        self._enter(sequence)

    def join(self, sequence: Sequence) -> None:
        """Move a sequence that has got its first token from prefill to decoding."""
        if sequence.handle in self.prefilling:
            del self.prefilling[sequence.handle]
        else:
            self._enter(sequence)
        sequence.base_step = base_step = self.decode_step - 1
        self._kv_tokens -= base_step
        self._decoding[sequence.handle] = sequence
        insort(self._finish_steps, base_step + sequence.budget_tokens)
        self._first_finish_step = self._finish_steps[0]
        self.version += 1

    def _enter(self, sequence: Sequence) -> None:
        self._kv_tokens += sequence.input_tokens
        self.reserved_tokens += sequence.prompt_tokens + sequence.max_new_tokens - 1
        if sequence.adapter is not None:
            self.adapter_use.pin(sequence.adapter)
        self.num += 1
        self.version += 1

    def resume_prefill(self, sequence: Sequence) -> None:
        """Move a decoding sequence back to prefill, with its output as input that is computed but for one token."""
        output_tokens = sequence.output_tokens_at(self.decode_step)
        del self._decoding[sequence.handle]
        self._kv_tokens += sequence.base_step + output_tokens
        self._forget_finish(sequence)
        sequence.produced_tokens += output_tokens
        sequence.input_tokens += output_tokens
        sequence.budget_tokens -= output_tokens
        sequence.computed_tokens = sequence.input_tokens - 1
        self.prefilling[sequence.handle] = sequence
        self.version += 1

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence and all it holds."""
        if sequence.handle in self._decoding:
            del self._decoding[sequence.handle]
            self._kv_tokens += sequence.base_step
            self._forget_finish(sequence)
        elif sequence.handle in self.held:
            del self.held[sequence.handle]
            self._kv_tokens -= sequence.held_output_tokens - 1
        else:
            del self.prefilling[sequence.handle]
        self._kv_tokens -= sequence.input_tokens
        self.reserved_tokens -= sequence.prompt_tokens + sequence.max_new_tokens - 1
        if sequence.adapter is not None:
            if sequence.handle in self._without_adapter:
                self._without_adapter.discard(sequence.handle)
            else:
                self.adapter_use.unpin(sequence.adapter)
        self.num -= 1
        self.version += 1

    def _forget_finish(self, sequence: Sequence) -> None:
        steps = self._finish_steps
        del steps[bisect_left(steps, sequence.base_step + sequence.budget_tokens)]
        self._first_finish_step = steps[0] if steps else 0

    def put_first(self, sequences: Iterable[Sequence]) -> None:
        """Put decoding sequences, in this order, before all others. Cost: O(batch)."""
        first = {one.handle: one for one in sequences if one.handle in self._decoding}
        if first:
            self._decoding = first | self._decoding
            self.version += 1

    def hold(self, sequence: Sequence) -> None:
        """Let a decoding sequence that has ended keep its memory without growing further."""
        del self._decoding[sequence.handle]
        self._forget_finish(sequence)
        sequence.held_output_tokens = sequence.output_tokens_at(self.decode_step)
        self._kv_tokens += sequence.base_step + sequence.held_output_tokens - 1
        self.held[sequence.handle] = sequence
        self.version += 1

    def stand_still(self, sequence: Sequence) -> None:
        """Hold a decoding sequence that has ended, and give up its adapter: it takes no part in a step any more."""
        self.hold(sequence)
        if sequence.adapter is not None:
            self.adapter_use.unpin(sequence.adapter)
            self._without_adapter.add(sequence.handle)

    def steps_to_length(self) -> int:
        """Return the decode steps until the first sequence has used up its budget; 1 if none decodes."""
        return max(1, self._first_finish_step - self.decode_step)

    def steps_to_last_length(self) -> int:
        """Return the decode steps until the last sequence has used up its budget; 1 if none decodes."""
        return max(1, self._finish_steps[-1] - self.decode_step) if self._finish_steps else 1
