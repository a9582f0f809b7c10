"""The sequences on a worker's device, and what each of them holds there: memory, and blocks of the prefix cache.

All joins, advances and departures go through here, so that memory and cache never disagree on which sequences run.
`core.replica` and `core.planner` decide when they happen.
"""

from lorrery.scheduler.core.facts import Event, Finished, FirstToken, ended
from lorrery.scheduler.core.memory.base import Memory
from lorrery.scheduler.core.memory.on_demand import OnDemandMemory
from lorrery.scheduler.core.plan import Plan, Ran
from lorrery.scheduler.core.prefix_cache.base import PrefixCache
from lorrery.scheduler.core.running import Running
from lorrery.scheduler.core.sequence import Sequence
from lorrery.vocabulary.endings import FinishReason


class Batch:
    """See the module.

    Args:
        memory: decides what fits.
        prefix_cache: KV blocks that are already computed; None: no cache.

    Attributes:
        running: the running sequences.
        leaves: sequences that left the batch since the list was last taken.
        anew: sequences that stepped aside: with the next plan they leave the device and join it anew.
        aborted: by handle; cancelled under strict S-LoRA: they leave after one more step.
        ended: by handle; with async scheduling: sequences whose end the next decision does not know yet.
    """

    def __init__(self, memory: Memory, prefix_cache: PrefixCache | None) -> None:
        self.running = Running()
        self.memory = memory
        self.prefix_cache = prefix_cache
        self.leaves: list[Sequence] = []
        self.anew: list[Sequence] = []
        self.aborted: dict[int, Sequence] = {}
        self.ended: dict[int, Sequence] = {}
        self._held: dict[int, FinishReason] = {}  # of sequences that have ended, until all have (static batching)
        self._silent: set[int] = set()  # of those that end with a step that gives them no token

    def output_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence has produced in this batch, committed steps included."""
        running = self.running
        if sequence.handle in running.prefilling:
            return 0
        if sequence.handle in running.held:
            return sequence.held_output_tokens
        return sequence.output_tokens_at(running.decode_step)

    def shrink_cache(self, num_steps: int) -> None:
        """Evict unused cache blocks beyond the tokens left free after a decode step that follows `num_steps` others."""
        if self.prefix_cache is not None:
            self.prefix_cache.shrink(self.memory.spare_tokens(self.running, num_steps))

    # --- going ------------------------------------------------------------------------------------------------------

    def remove(self, sequence: Sequence, ahead: int = 0) -> int:
        """Remove a sequence and free its memory; return the tokens that it has produced in this batch.

        Args:
            sequence: to remove.
            ahead: tokens of its output that a prefix cache knows beyond those that are computed; may be negative.
        """
        running = self.running
        # The common case, a decoding sequence, avoids a further call.
        if running.prefilling or running.held:
            output_tokens = self.output_tokens(sequence)
        else:
            output_tokens = running.decode_step - sequence.base_step
        if self.anew:
            self.anew = [one for one in self.anew if one is not sequence]
        running.leave(sequence)
        self.memory.left(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.release(sequence, output_tokens + ahead if output_tokens else 0)
        return output_tokens

    def step_aside(self, sequence: Sequence) -> None:
        """Turn a decoding sequence's output into input of which the last token is not computed yet.

        It stays in the batch, in its place, with all that it holds.
        """
        running, memory = self.running, self.memory
        assert isinstance(memory, OnDemandMemory)
        memory.stop_growing(sequence, running)
        running.resume_prefill(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.resume(sequence)
        self.anew.append(sequence)

    def cancel(self, sequence: Sequence, ahead: int = 0) -> None:
        """Remove a sequence that does not end by itself; `ahead` as in `remove`."""
        self.remove(sequence, ahead)
        self.ended.pop(sequence.handle, None)
        self.aborted.pop(sequence.handle, None)
        self._held.pop(sequence.handle, None)
        self._silent.discard(sequence.handle)

    def finish(self, handle: int, reason: FinishReason, at_ps: int, events: list[Event], *, ahead: int = 0) -> None:
        """Remove a sequence that has ended; see `remove`."""
        sequence = self.running.get(handle)
        assert sequence is not None, f"the device ended sequence {handle}, which does not run"
        events.append(self._ended(sequence, reason, self.remove(sequence, ahead), at_ps))

    def _ended(self, sequence: Sequence, reason: FinishReason, output_tokens: int, at_ps: int) -> Finished:
        """Make the event of a finish after `output_tokens` in this batch; a silent last step counts, but gave none."""
        output_tokens += sequence.produced_tokens
        if self._silent and sequence.handle in self._silent:
            self._silent.discard(sequence.handle)
            output_tokens -= 1
        return ended(sequence, reason, output_tokens, at_ps)

    def end_late(self, handle: int, reason: FinishReason, at_ps: int, events: list[Event]) -> None:
        """Report the end of a sequence that stays until `drop_ended`; it grows no more if its length has ended it."""
        running = self.running
        sequence = running.get(handle)
        assert sequence is not None, f"the device ended sequence {handle}, which does not run"
        output_tokens = self.output_tokens(sequence)
        events.append(self._ended(sequence, reason, output_tokens, at_ps))
        self.ended[handle] = sequence
        if output_tokens >= sequence.budget_tokens:
            self.stand_still(sequence)

    def stand_still(self, sequence: Sequence) -> None:
        """Let an ended sequence keep its blocks without taking part any more."""
        assert isinstance(self.memory, OnDemandMemory)
        self.memory.stop_growing(sequence, self.running)
        if self.prefix_cache is not None:
            self.prefix_cache.stand_still(sequence)
        self.running.stand_still(sequence)

    def drop_ended(self) -> None:
        """Remove the sequences that have ended late."""
        for sequence in self.ended.values():
            self.remove(sequence)
        self.ended.clear()

    def in_order(self, ended: dict[int, FinishReason]) -> dict[int, FinishReason]:
        """Return those of the ended sequences that still run, in order of admission."""
        running = [one for handle in ended if (one := self.running.get(handle)) is not None]
        if len(running) > 1:
            running.sort(key=_entered)
        return {sequence.handle: ended[sequence.handle] for sequence in running}

    def lose(self, at_ps: int) -> tuple[list[Sequence], list[Finished]]:
        """Empty the batch of a lost worker: return unfinished sequences, ready to requeue, and ends that were held."""
        unfinished: list[Sequence] = []
        ended: list[Finished] = []
        running = self.running
        self.drop_ended()
        for sequence in (*running.prefilling.values(), *running, *running.held.values()):
            output_tokens = self.remove(sequence)
            reason = self._held.pop(sequence.handle, None)
            if reason is not None:
                ended.append(self._ended(sequence, reason, output_tokens, at_ps))
            else:
                sequence.requeue(output_tokens, at_ps)
                unfinished.append(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.lose()
        self.leaves.clear()
        self.aborted.clear()
        return unfinished, ended

    # --- what the device did ----------------------------------------------------------------------------------------

    def were_silent(self, handles: frozenset[int]) -> None:
        """Note which sequences end with a step that gave them no token."""
        self._silent.update(handles)

    def advance_prefills(self, plan: Plan, ran: Ran, ended: dict[int, FinishReason], events: list[Event]) -> None:
        """Count computed prompt tokens; a sequence with its first token decodes from now on, or has ended."""
        for chunk in plan.prefills:
            sequence = chunk.sequence
            if sequence.handle not in self.running.prefilling:  # cancelled while its step ran
                continue
            sequence.computed_tokens += chunk.new_tokens
            if self.prefix_cache is not None:
                self.prefix_cache.commit(sequence)
            if chunk.samples:
                self._sampled(sequence, ended.get(sequence.handle), ran.end_ps, events, hold=plan.hold)

    def _sampled(
        self, sequence: Sequence, reason: FinishReason | None, at_ps: int, events: list[Event], *, hold: bool
    ) -> None:
        self.note_first_token(sequence, at_ps, events)
        if reason is None or hold:
            self.running.join(sequence)
            self.memory.joined(sequence)
            if reason is not None:
                self._hold(sequence, reason)
        else:
            self.running.leave(sequence)
            self.memory.left(sequence)
            if self.prefix_cache is not None:
                self.prefix_cache.release(sequence, 1)
            events.append(self._ended(sequence, reason, 1, at_ps))

    def note_first_token(self, sequence: Sequence, at_ps: int, events: list[Event]) -> None:
        """Note that a sequence has got a token, which may be its first."""
        if sequence.first_token_ps is None and not sequence.produced_tokens:
            sequence.first_token_ps = at_ps
            events.append(FirstToken(sequence, at_ps))

    def advance_chunks(self, plan: Plan, num_steps: int) -> None:
        """Count what steps computed of the one long prompt; call it before they count as decode steps.

        A prefix cache gets them one by one, as each step frees blocks for its decodes and publishes its own; but all at
        once as soon as that has the same effect.
        """
        chunk = plan.prefills[0]
        sequence, cache = chunk.sequence, self.prefix_cache
        if isinstance(self.memory, OnDemandMemory):
            self._advance_scheduled(self.memory, plan, num_steps)
            return
        if cache is None:
            sequence.computed_tokens += num_steps * chunk.new_tokens
            return
        num_done = 0
        while num_done < num_steps:
            num = num_steps - num_done if cache.shows_alone(sequence) else 1
            num_done += num
            self.shrink_cache(num_done - 1 if plan.decode else 0)
            sequence.computed_tokens += num * chunk.new_tokens
            cache.commit(sequence)

    def _advance_scheduled(self, memory: OnDemandMemory, plan: Plan, num_steps: int) -> None:
        """Do so where each chunk takes its blocks when it is scheduled, as the plan has done for its first."""
        chunk = plan.prefills[0]
        sequence, cache = chunk.sequence, self.prefix_cache
        if sequence.handle not in self.running.prefilling:  # cancelled while its steps ran
            return
        num_done = 0
        while num_done < num_steps:
            num = num_steps - num_done if cache is None or cache.shows_alone(sequence) else 1
            end = sequence.computed_tokens + num * chunk.new_tokens
            memory.cover(self.running, sequence, end)
            num_done += num
            if cache is not None:
                cache.schedule(sequence, end)
                self.shrink_cache(num_done - 1 if plan.decode else 0)
            sequence.computed_tokens = end

    def hold(self, ended: dict[int, FinishReason]) -> dict[int, FinishReason]:
        """Note ended sequences; return all held ones once no other is left, so that the batch ends together."""
        for handle, reason in ended.items():
            sequence = self.running.get(handle)
            assert sequence is not None
            self._hold(sequence, reason)
        return self.all_held()

    def _hold(self, sequence: Sequence, reason: FinishReason) -> None:
        self.running.hold(sequence)
        self._held[sequence.handle] = reason

    def all_held(self) -> dict[int, FinishReason]:
        """Return the ended sequences that are held, if no other is left."""
        if not self._held or len(self._held) < self.running.num:
            return {}
        self.leaves += self.running.held.values()
        ended, self._held = self._held, {}
        return ended


def _entered(sequence: Sequence) -> int:
    return sequence.entered
