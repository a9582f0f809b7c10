"""Which adapters a batch uses, kept while sequences come and go, as the sums that a step-time model needs."""

from collections.abc import Iterable

from worker.device.batch import NO_LORA, LoraWork
from worker.device.rows import DeviceSequence


class DecodingAdapters:
    """The adapters of the decoding sequences.

    Sequences of one adapter id have one rank: the scheduler refuses to register another.
    """

    def __init__(self) -> None:
        self._users: dict[str, tuple[int, int]] = {}  # adapter -> (rank, sequences)
        self._work: LoraWork | None = NO_LORA

    def add(self, sequence: DeviceSequence) -> None:
        """Count a sequence that begins to decode."""
        if sequence.adapter_id:
            _, users = self._users.get(sequence.adapter_id, (0, 0))
            self._users[sequence.adapter_id] = sequence.adapter_rank, users + 1
            self._work = None

    def remove(self, sequence: DeviceSequence) -> None:
        """Forget a sequence that was counted."""
        if sequence.adapter_id:
            rank, users = self._users[sequence.adapter_id]
            if users == 1:
                del self._users[sequence.adapter_id]
            else:
                self._users[sequence.adapter_id] = rank, users - 1
            self._work = None

    @property
    def work(self) -> LoraWork:
        """What the adapters have to do in a step of decodes alone."""
        if self._work is None:
            self._work = LoraWork.of(self._users.values())
        return self._work

    def work_with(self, prefills: Iterable[tuple[DeviceSequence, int]], *, decode: bool) -> LoraWork:
        """Return what they have to do in a step that also computes prompt chunks.

        Args:
            prefills: sequence and its tokens of each chunk.
            decode: whether the decoding sequences take part.
        """
        users = dict(self._users) if decode else {}
        for sequence, new_tokens in prefills:
            if sequence.adapter_id:
                _, tokens = users.get(sequence.adapter_id, (0, 0))
                users[sequence.adapter_id] = sequence.adapter_rank, tokens + new_tokens
        return LoraWork.of(users.values()) if users else NO_LORA
