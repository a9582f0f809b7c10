"""Builds the parts of a replay from the settings in a journal, and derives placements again.

A scheduler's view of its workers depends on which messages have arrived, so the figures that a live placement read are
inputs, as noted in the journal. Its choice is derived: it follows from them, from the placement's earlier choices, and
from its seed.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from lorrery.scheduler.core.placements.base import Candidate
from lorrery.scheduler.core.placements.candidate import Figures
from lorrery.scheduler.core.placements.table import Placement
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.core.sequence import Adapter, Sequence, Withdrawal
from lorrery.scheduler.messages import WorkerHello
from lorrery.scheduler.replicas import ReplicaFactory
from lorrery.scheduler.subscribers.history import AdapterTally
from lorrery.scheduler.subscribers.record import Record
from lorrery.service.errors import FormatError, SettingsError
from lorrery.service.faults.rules import LoadRules, RuleBook
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.replay.journal import Journal
from lorrery.vocabulary.endings import CancelCause
from lorrery.worker.build import answers_of, device_of, spells_of
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.gpu import MockGpu
from lorrery.worker.device.output import GREEDY, Sampler, Sampling
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.steptime import Pace, Spells


@dataclass(slots=True)
class Replayed:
    """Counts of what a replay compared, and its differences.

    Attributes:
        tally: figures of adapters, without the stays on workers that had not left.
        differences: (line of the journal, description); empty if the runs are equal.
        num_placed: times that a request went to a worker.
        num_derived: placements derived from the recorded figures, and placement errors derived from them.
        num_late: inputs that took effect late, at boundaries from the journal.
        num_gaps: gaps between steps of a worker, taken from the journal.
    """

    tally: AdapterTally = field(default_factory=AdapterTally)
    num_requests: int = 0
    num_workers: int = 0
    num_lost: int = 0
    num_cancels: int = 0
    num_placed: int = 0
    num_derived: int = 0
    num_plans: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_late: int = 0
    num_gaps: int = 0
    differences: list[tuple[int, str]] = field(default_factory=list)


class DifferenceError(Exception):
    """The simulation differs from the journal.

    Args:
        line: of the journal.
        whats: descriptions of the differences.
    """

    def __init__(self, line: int, *whats: str) -> None:
        super().__init__(line, *whats)
        self.line = line
        self.whats = whats


def compare(line: int, what: str, simulated: Record, live: Record) -> None:
    """Compare simulated values with those of a line of the journal.

    Raises:
        DifferenceError: they differ.
    """
    keys = [key for key in {**simulated, **live} if simulated.get(key) != live.get(key)]
    if keys:
        raise DifferenceError(
            line, *(f"{what}: {key} is {simulated.get(key)} simulated, {live.get(key)} live" for key in keys)
        )


_ENGINES_BEFORE_7 = {"present-day": "present-day-2025", "present-day-unified": "present-day-unified-2025"}


@dataclass(frozen=True, slots=True)
class ReplayParts:
    """Parts of a replay, made from the journal's settings as the live cluster's are from its own.

    Attributes:
        make_replica: builds a worker's replica from its hello and the time when the first worker attached; called in
            order of attaching.
        make_gpu: builds a worker's device from its hello.
        faults: of the scheduler.
        planned: builds the rule book of the settings' faults, given when the first worker attached.
        spells: of a worker, given its faults and name.
        make_adapter: by name, rank and version.
        adapters: those in the settings.
        placement: the scheduler's, in its initial state.
        answers: the workers' answers.
        has_phases: whether the journal has the phases of requests' time.
    """

    make_replica: Callable[[Record, int], Replica]
    make_gpu: Callable[[Record], MockGpu]
    faults: RuleBook
    planned: Callable[[int], RuleBook]
    spells: Callable[[RuleBook, str], Spells]
    make_adapter: Callable[[str, int, int], Adapter]
    adapters: dict[str, Adapter]
    placement: Placement
    answers: Answers
    has_phases: bool


def parts_of(journal: Journal, path: Path) -> ReplayParts:
    """Build a replay's parts from the journal's settings.

    Raises:
        FormatError: settings that this version does not know.
        SettingsError: settings that cannot be met here.
    """
    content = content_of(journal)
    settings = settings_of(content, path)
    factory = ReplicaFactory(settings)
    adapters = {name: factory.adapter(name, rank) for name, rank in settings.adapters.expand()}
    faults = RuleBook()
    answers = answers_of(settings)

    def make_replica(hello: Record, faults_from_ps: int) -> Replica:
        faults.plan(settings.planned_faults(), faults_from_ps)
        rules = LoadRules(faults, hello["worker_id"])
        return factory.replica(factory.replica_settings(WorkerHello(**hello)), rules)

    def planned(from_ps: int) -> RuleBook:
        book = RuleBook()
        book.plan(settings.planned_faults(), from_ps)
        return book

    def make_gpu(hello: Record) -> MockGpu:
        own = settings_of(content | {"worker": content["worker"] | announced(hello)}, path)
        device = device_of(own)
        if device.pool_tokens != hello["max_total_token_num"]:
            raise SettingsError(
                f"{path}: worker {hello['worker_id']} announced {hello['max_total_token_num']} KV tokens, and has"
                f" {device.pool_tokens} by the journal's settings: it ran with another catalogue or version"
            )
        return MockGpu(device.step_time, answers.table)

    return ReplayParts(
        make_replica=make_replica,
        make_gpu=make_gpu,
        faults=faults,
        planned=planned,
        spells=lambda book, name: spells_of(book.sets, name),
        make_adapter=factory.adapter,
        adapters=adapters,
        placement=factory.placement(),
        answers=answers,
        has_phases=journal.has_phases,
    )


def content_of(journal: Journal) -> dict[str, Any]:
    """Return a journal's settings, as this version has to have them for the decisions of the journal's version."""
    content = journal.settings if journal.has_versions else _as_before_version_3(journal.settings)
    return content if journal.has_modern_kernels else _as_before_version_7(content)


def announced(hello: Record) -> Record:
    """Return the settings of `[worker]` that a worker announced."""
    return hello.get("device") or {
        "gpu": hello["gpu"],
        "tensor_parallel": hello["tensor_parallel"],
        "step_time": hello["step_time_model"],
    }


def _as_before_version_3(content: dict[str, Any]) -> dict[str, Any]:
    """Add the fixed behaviour of clusters before version 3: no look-ahead, no overtaking, no bound unless set."""
    adapters = content["adapters"]
    unbounded = {"max_loras": 10**9} if adapters["max_loras"] is None else {}
    return content | {"adapters": adapters | {"look_ahead": 0, "max_overtakes": 0} | unbounded}


def _as_before_version_7(content: dict[str, Any]) -> dict[str, Any]:
    """Replace present-day engines by their versions before 7, with the kernels of that time."""
    worker = content["worker"]
    return content | {"worker": worker | {"engine": _ENGINES_BEFORE_7.get(worker["engine"], worker["engine"])}}


def settings_of(content: dict[str, Any], path: Path) -> Settings:
    """Return a journal's settings, or settings made from them.

    Raises:
        FormatError: settings that this version does not know.
    """
    try:
        return Settings.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise FormatError(f"{path}: the journal's settings: {key}: {first['msg']}") from None


@dataclass(slots=True, eq=False)
class ReplayedRequest:
    """One request.

    Attributes:
        sequence: for the core.
        sampling: parameters for the device.
        token_ids: its output so far, including tokens from before a resumption; shared with the sequence.
    """

    sequence: Sequence
    sampling: Sampling
    token_ids: "array[int]"

    @classmethod
    def read(cls, line: Record, adapter: Adapter | None) -> "ReplayedRequest":
        """Read a line of type `request`.

        Args:
            line: its content.
            adapter: of the request.
        """
        said = line["sampling"]
        sampling = Sampling(
            seed=said["seed"],
            max_new_tokens=said["max_new_tokens"],
            ignore_eos=said.get("ignore_eos", False),
            true_output_tokens=said.get("true_output_tokens"),
            stop_sequences=tuple(tuple(stop) for stop in said.get("stop_sequences", ()) if stop),
            min_new_tokens=said.get("min_new_tokens", 0),
            sampler=Sampler.of(**said["sampler"]) if "sampler" in said else GREEDY,
            output_token_ids=tuple(said.get("output_token_ids", ())),
        )
        token_ids = array("I", line.get("produced_token_ids", ()))
        sequence = Sequence(
            handle=line["handle"],
            prompt_tokens=line["prompt_tokens"],
            max_new_tokens=sampling.max_new_tokens,
            arrived_ps=line["at_ps"],
            adapter=adapter,
            tenant_id=line.get("tenant_id", ""),
            prompt_token_ids=line.get("prompt_token_ids", ()),
            output_token_ids=token_ids,
            produced_tokens=len(token_ids),
        )
        sequence.ignore_eos = sampling.ignore_eos
        sequence.priority = line.get("priority", 0)
        sequence.skips_prefix_cache = line.get("skips_prefix_cache", False)
        sequence.cache_salt = line.get("cache_salt", "")
        if "weight" in line:
            sequence.weight = Fraction(line["weight"])
        return cls(sequence, sampling, token_ids)

    def cancelled(self, line: Record) -> None:
        """Read a line of type `cancel`; before format 10 it has no cause."""
        if "cause" in line:
            cause = CancelCause.named(line["cause"])
            self.sequence.withdrawal = Withdrawal(cause, line["at_ps"], line.get("kept_tokens"))

    def device(self, answers: Answers) -> DeviceSequence:
        """Return the device's view of it as it joins a batch, with its earlier output."""
        sequence, adapter = self.sequence, self.sequence.adapter
        name, key, rank = ("", "", 0) if adapter is None else (adapter.adapter_id, adapter.key, adapter.rank)
        prompt = np.array(sequence.prompt_token_ids, np.uint32)
        produced = np.array(self.token_ids, np.uint32)
        return answers.sequence(
            sequence.handle, sequence.prompt_tokens, prompt, produced, self.sampling, name, key, rank
        )


class NotReadError(Exception):
    """A placement reads a figure that it did not read live."""


class RecordedCandidate(Candidate):
    """A worker's figures as recorded in a journal."""

    def __init__(self, name: str, figures: Figures) -> None:
        super().__init__(name)
        self._figures = figures

    @property
    def num_waiting(self) -> int:
        """See `Candidate`."""
        return self._figure("num_waiting")

    @property
    def num_running(self) -> int:
        """See `Candidate`."""
        return self._figure("num_running")

    @property
    def load(self) -> int:
        """See `Candidate`."""
        return self._figure("load")

    @property
    def kv_tokens(self) -> int:
        """See `Candidate`."""
        return self._figure("kv_tokens")

    def has_adapter(self, adapter: Adapter) -> bool:
        """See `Candidate`."""
        return bool(self._figure(f"has_adapter {adapter.key}"))

    def cached_tokens(self, sequence: Sequence) -> int:
        """See `Candidate`."""
        del sequence
        return self._figure("cached_tokens")

    @property
    def is_blocked(self) -> bool:
        """See `Candidate`."""
        return bool(self._figure("is_blocked"))

    def load_ps(self, adapter: Adapter) -> int:
        """See `Candidate`."""
        del adapter
        return self._figure("load_ps")

    @property
    def pace(self) -> Pace:
        """See `Candidate`."""
        return Pace(*(self._figure(name) for name in Pace._fields))

    @property
    def slowdown(self) -> int:
        """See `Candidate`."""
        return self._figure("slowdown")

    @property
    def usual_slowdown(self) -> int:
        """See `Candidate`."""
        return self._figure("usual_slowdown")

    @property
    def prompt_share(self) -> int:
        """See `Candidate`."""
        return self._figure("prompt_share")

    @property
    def waiting_tokens(self) -> int:
        """See `Candidate`."""
        return self._figure("waiting_tokens")

    @property
    def output_ratio(self) -> int:
        """See `Candidate`."""
        return self._figure("output_ratio")

    def _figure(self, name: str) -> int:
        if name not in self._figures:
            raise NotReadError(f"reads {name} of {self.name} simulated, did not live")
        return self._figures[name]


def derive(placement: Placement, sequence: Sequence, figures: Mapping[str, Figures]) -> str:
    """Return the name of the worker that the placement chooses.

    Args:
        placement: in its state after the previous choice.
        sequence: to be placed.
        figures: of each candidate, by name in order of attaching.

    Raises:
        NotReadError: it reads a figure that it did not read live.
        Exception: whatever the placement raises.
    """
    candidates: list[Candidate] = [RecordedCandidate(name, read) for name, read in figures.items()]
    return candidates[candidates.index(placement.place(sequence, candidates).candidate)].name
