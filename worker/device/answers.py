"""Turns a request into a sequence whose tokens and end are determined."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lorrery.vocabulary.outputs import context_of
from lorrery.worker.device.logits import SampledWords
from lorrery.worker.device.output import (
    EOS_TOKEN_ID,
    FIRST_WORD_ID,
    NUM_WORDS,
    LengthModel,
    Sampling,
    TokenIds,
    ending,
    sequence_seed,
)
from lorrery.worker.device.rows import DeviceSequence

Mode = Literal["random", "echo", "logits"]


class Words:
    """The mock model's tokens in the terms of another vocabulary.

    Args:
        word_ids: ids of that vocabulary, each once; if there are fewer than words, several words share one.
        eos_id: its end-of-sequence id.

    Attributes:
        table: shape (3 + NUM_WORDS,), the other vocabulary's id of each of our tokens.
        num_distinct: number of distinct word ids in it.
    """

    def __init__(self, word_ids: TokenIds, eos_id: int) -> None:
        self.num_distinct = min(len(word_ids), NUM_WORDS)
        self.table: TokenIds = np.full(FIRST_WORD_ID + NUM_WORDS, eos_id, np.uint32)
        self.table[FIRST_WORD_ID:] = np.resize(word_ids[:NUM_WORDS], NUM_WORDS)
        distinct = self.table[FIRST_WORD_ID : FIRST_WORD_ID + self.num_distinct]
        self._order = np.argsort(distinct, kind="stable")
        self._sorted = distinct[self._order]

    def ours(self, token_ids: TokenIds) -> TokenIds:
        """Convert tokens of the other vocabulary to ours; one that is none of our words becomes end-of-sequence."""
        places = np.minimum(np.searchsorted(self._sorted, token_ids), self.num_distinct - 1)
        words = (self._order[places] + FIRST_WORD_ID).astype(np.uint32)
        ours: TokenIds = np.where(self._sorted[places] == token_ids, words, np.uint32(EOS_TOKEN_ID))
        return ours


@dataclass(frozen=True, slots=True)
class Answers:
    """See the module.

    Attributes:
        model: the base model's name.
        length_model: draws where EOS falls.
        mode: content of an output that the request does not give: uniformly drawn words, the prompt, or words drawn
            from synthetic logits.
        words: vocabulary of the output; None: the mock model's own.
    """

    model: str
    length_model: LengthModel
    mode: Mode = "random"
    words: Words | None = None

    @property
    def needs_prompts(self) -> bool:
        """Whether an answer depends on the prompt's tokens."""
        return self.mode != "random"

    @property
    def table(self) -> TokenIds | None:
        """Value of `spelling` for `MockGpu`."""
        return None if self.words is None or self.mode == "echo" else self.words.table

    def sequence(
        self,
        handle: int,
        prompt_tokens: int,
        prompt_token_ids: TokenIds,
        produced: TokenIds,
        sampling: Sampling,
        adapter_id: str = "",
        adapter_key: str = "",
        adapter_rank: int = 0,
    ) -> DeviceSequence:
        """Return a sequence as it joins a batch.

        Args:
            handle: its name.
            prompt_tokens: length of the prompt proper.
            prompt_token_ids: shape (prompt_tokens,), or empty where `needs_prompts` is false.
            produced: output tokens made before a resumption, in the vocabulary of the output.
            sampling: the request's.
            adapter_id: of its adapter; empty: the base model.
            adapter_key: name and version of the adapter.
            adapter_rank: of the adapter.

        Raises:
            ValueError: an impossible sequence.
        """
        if self.needs_prompts and len(prompt_token_ids) != prompt_tokens:
            raise ValueError(f"sequence {handle}: {len(prompt_token_ids)} prompt token ids of {prompt_tokens}")
        seed = sequence_seed(self.model, adapter_id, sampling.seed)
        given = prompt_token_ids if self.mode == "echo" else None
        if sampling.output_token_ids:
            given = np.array(sampling.output_token_ids, np.uint32)
        sampled = None
        if self.mode == "logits" and given is None:
            context = context_of(adapter_id, prompt_token_ids.tobytes())
            ours = produced if self.words is None else self.words.ours(produced)
            num_words = NUM_WORDS if self.words is None else self.words.num_distinct
            sampled = SampledWords(context, seed, sampling.sampler, ours, num_words)
        end = ending(seed, sampling, prompt_tokens, produced, self.length_model, given, sampled, self.table)
        return DeviceSequence(
            handle, prompt_tokens, len(produced), seed, end, given, adapter_key, adapter_rank, sampled
        )
