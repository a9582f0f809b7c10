"""Builds a simulation's parts: workers from settings of replica and device, requests from a workload.

Prefix caches compare ids of a prompt's parts in place of its words. A workload says which parts of prompts are equal:
the blocks of a trace by their hash ids; the part that a group shares; an earlier turn and its answer, which the next
turn repeats. All other words are drawn for one request alone. So an id for each part says as much as its words do, and
nobody has to draw them: that took three quarters of a run's time.

Words that are drawn for different requests may be equal by chance, which a comparison of words would find. Where they
are compared in pieces of at least four (`ids_suffice`, `has_ids`), that happens once in 10^13 comparisons.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from lorrery.loadgen.workload.prompts import output_seed, prompt_token_ids
from lorrery.loadgen.workload.request import WorkloadRequest
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.prefix_cache.base import of_runs, of_tokens
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Content
from lorrery.scheduler.core.sequence import Sequence as CoreSequence
from lorrery.simulator.lazy_prompt import Answer, LazyPrompt, PromptParts
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import SimulatedWorker
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import picoseconds
from lorrery.worker.device.output import Ending, LengthModel, Sampling, ending, sequence_seed, tokens_between
from lorrery.worker.device.steptime import Pace, StepTimeModel

LEAST_WORDS: Final = 4
_ALONE: Final = 1 << 63  # ids of traces are counted from 0, or hashes, none of which is this and a small number

Said = tuple[WorkloadRequest, "array[int]"]
"""An earlier turn of a session, and its output as `output_ids` or as token ids."""


def ids_suffice(prefix_cache: str, block_size: int) -> bool:
    """Return whether matching by ids gives exactly the prefix hits that matching by tokens would.

    Prompts with different ids differ in their tokens wherever a block holds at least four drawn words of the part in
    which they diverge.
    """
    return prefix_cache in ("blocks", "radix") and block_size % LEAST_WORDS == 0


def has_ids(request: WorkloadRequest) -> bool:
    """Return whether ids stand for a request's words: not for given texts, nor if a part ends within four."""
    turn = request.turn
    if turn is None or turn.alone:
        return request.block_tokens % LEAST_WORDS == 0
    return not turn.token_ids and turn.shared_tokens % LEAST_WORDS == 0


def content_by_ids(request: WorkloadRequest, said: Sequence[Said]) -> Content:
    """Return what caches compare of a prompt; `said`: the earlier turns, with their outputs by `output_ids`."""
    turn = request.turn
    if turn is None or turn.alone:
        run_ids = request.hash_ids
        if run_ids is None:
            run_ids = array("Q", [_ALONE | request.index]) * -(-request.prompt_tokens // request.block_tokens)
        return of_runs(run_ids, request.block_tokens, request.prompt_tokens)
    ids = array("I", [_shared_id(turn.shared_group)]) * turn.shared_tokens
    for earlier, output in said:
        ids += _own_ids(earlier)
        ids += output
    ids += _own_ids(request)
    return of_tokens(ids)


def output_ids(request: WorkloadRequest, num_tokens: int) -> "array[int]":
    """Return the ids of a turn's output, of that many tokens."""
    return array("I", [3 * request.index + 2]) * num_tokens


def _own_ids(request: WorkloadRequest) -> "array[int]":
    assert request.turn is not None
    return array("I", [3 * request.index + 1]) * request.turn.own_tokens


def _shared_id(group: int) -> int:
    return 3 * group


_NO_TOKENS = np.empty(0, np.uint32)
_LENGTH: Final = FinishReason.LENGTH
_EOS: Final = FinishReason.EOS


def build_workers(
    count: int,
    settings: ReplicaSettings,
    step_time: StepTimeModel,
    make_replica: Callable[[ReplicaSettings], Replica] = build_replica,
    *,
    shard: int = 0,
    pace: Pace | None = None,
) -> list[SimulatedWorker]:
    """Make identical workers.

    Args:
        count: number of workers.
        settings: of each replica.
        step_time: of each GPU.
        make_replica: builds a replica, with caches and adapter loads.
        shard: index of their scheduler.
        pace: the step times they announce to a predictive placement.
    """
    return [
        SimulatedWorker(f"worker-{n}", lambda: make_replica(settings), step_time, shard, pace=pace)
        for n in range(count)
    ]


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Turns a workload's requests into simulated requests.

    Attributes:
        model: base model's name; part of the seed of lengths drawn from a length model.
        adapters: by id, every adapter that the workload names.
        natural_length: draws output lengths, at most the workload's; None: exactly the workload's.
        seed: of prompts and outputs.
        with_prompts: make the prompts' token ids, for prefix caches.
        by_ids: prefix caches compare ids of a prompt's parts where they can (`prompt_ids`); its tokens are made only
            when read.
        ignore_eos: requests ask for exactly their true length; otherwise the model ends there by itself.
        max_new_tokens: without `ignore_eos`, the limit that requests name, unless the true length is above it.
    """

    model: str
    adapters: Mapping[str, Adapter]
    natural_length: LengthModel | None = None
    seed: int = 0
    with_prompts: bool = False
    by_ids: bool = False
    ignore_eos: bool = True
    max_new_tokens: int | None = None
    _ends: dict[int, Ending] = field(default_factory=dict, repr=False, compare=False)
    """By number of output tokens; shared by all requests that end alike, and never mutated."""

    def build(self, request: WorkloadRequest, at_ps: int, said: Sequence[Said] = ()) -> SimulatedRequest:
        """Build a request that arrives at this time; `said`: earlier turns of its session with their outputs."""
        most, end = self._most_tokens(request), self._end(request)
        adapter = None if request.adapter_id is None else self.adapters[request.adapter_id]
        built = SimulatedRequest(request.index, request.prompt_tokens, most, at_ps, end, adapter, request.tenant_id, ())
        built.sequence.ignore_eos = self.ignore_eos and self.natural_length is None
        built.sequence.priority = request.priority
        built.sequence.cache_salt = request.cache_salt
        if self.with_prompts:
            self.add_prompt(built.sequence, request, said)
        return built

    def said(self, request: SimulatedRequest) -> "array[int]":
        """Return the output of a turn that has ended, as its prompt is compared; empty without prompts."""
        output = request.sequence.output_token_ids
        return output[: request.output_tokens] if isinstance(output, array) else array("I")

    def add_prompt(self, sequence: CoreSequence, request: WorkloadRequest, said: Sequence[Said]) -> None:
        """Give a sequence its request's prompt; `said`: earlier turns of its session with their outputs."""
        by_ids = self.by_ids and has_ids(request)
        if by_ids:
            sequence.content = content = content_by_ids(request, said)
            answers = [self._answer(earlier, len(ids)) for earlier, ids in said]
            sequence.prompt_token_ids = LazyPrompt(
                content.num_tokens, self.model, self.seed, PromptParts(request), answers
            )
        else:
            spoken = [(earlier, np.array(output, np.uint32)) for earlier, output in said]
            sequence.prompt_token_ids = array("I", prompt_token_ids(request, self.seed, spoken).tobytes())
        if request.turn is not None and not request.turn.alone:
            # The next turn's prompt contains it, and finds it in the cache.
            output = output_ids(request, sequence.max_new_tokens) if by_ids else self._output(request)
            sequence.output_token_ids = output

    def _answer(self, request: WorkloadRequest, num_tokens: int) -> Answer:
        end = self._end(request)
        return Answer(request, num_tokens, ended=end.reason is _EOS and num_tokens == end.output_tokens)

    def _output(self, request: WorkloadRequest) -> "array[int]":
        tokens = tokens_between(self._output_seed(request), 0, self._most_tokens(request), self._end(request))
        return array("I", tokens.tobytes())

    def _most_tokens(self, request: WorkloadRequest) -> int:
        tokens = request.output_tokens
        return tokens if self.ignore_eos or self.max_new_tokens is None else max(self.max_new_tokens, tokens)

    def _end(self, request: WorkloadRequest) -> Ending:
        if self.natural_length is not None:
            return self._drawn_end(request, self.natural_length)
        tokens = request.output_tokens
        known = self._ends.get(tokens)
        if known is None:
            known = self._ends[tokens] = Ending(tokens, _LENGTH if self.ignore_eos else _EOS)
        return known

    def _output_seed(self, request: WorkloadRequest) -> int:
        return sequence_seed(self.model, request.adapter_id or "", output_seed(request, self.seed))

    def _drawn_end(self, request: WorkloadRequest, length_model: LengthModel) -> Ending:
        drawn = self._output_seed(request)
        sampling = Sampling(drawn, request.output_tokens)
        return ending(drawn, sampling, request.prompt_tokens, _NO_TOKENS, length_model)


def build_requests(
    workload: Iterable[WorkloadRequest],
    model: str,
    adapters: Mapping[str, Adapter],
    *,
    natural_length: LengthModel | None = None,
    seed: int = 0,
    with_prompts: bool = False,
    by_ids: bool = False,
    ignore_eos: bool = True,
    max_new_tokens: int | None = None,
) -> Iterator[tuple[int, SimulatedRequest]]:
    """Turn a time-ordered workload without later turns into arrivals: (time in picoseconds, request).

    The arguments are those of `RequestBuilder`.
    """
    builder = RequestBuilder(model, adapters, natural_length, seed, with_prompts, by_ids, ignore_eos, max_new_tokens)
    for request in workload:
        at_ps = picoseconds(request.at_seconds)
        yield at_ps, builder.build(request, at_ps)
