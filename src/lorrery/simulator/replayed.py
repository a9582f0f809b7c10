"""A request of a journal, as the core and the device see it."""

from array import array
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from lorrery.scheduler.core.sequence import Adapter, Sequence, Withdrawal
from lorrery.scheduler.subscribers.record import Record
from lorrery.vocabulary.cancel_cause import CancelCause
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.output import Sampling
from lorrery.worker.device.rows import DeviceSequence
from lorrery.worker.device.sampler import GREEDY, Sampler


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
