"""A prompt whose tokens are made on first access.

Where caches compare ids, nothing in a simulation reads tokens; a plug-in policy may. What they are made from does not
lead to the workload's request, which knows how long its output will be.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from lorrery.loadgen.workload.prompts import output_seed, prompt_token_ids
from lorrery.loadgen.workload.request import Turn, WorkloadRequest
from lorrery.vocabulary.endings import FinishReason
from lorrery.worker.device.output import Ending, TokenIds, sequence_seed, tokens_between


class PromptParts:
    """The parts of a prompt: of a request, all that does not concern its output."""

    __slots__ = ("block_tokens", "hash_ids", "index", "prompt_tokens", "turn")

    def __init__(self, request: WorkloadRequest) -> None:
        self.index = request.index
        self.prompt_tokens = request.prompt_tokens
        self.hash_ids: Sequence[int] | None = request.hash_ids
        self.block_tokens = request.block_tokens
        self.turn: Turn | None = request.turn


class Answer:
    """An earlier turn of a session with its output, which was `num_tokens` long and ended with EOS or did not."""

    __slots__ = ("adapter_id", "ended", "num_tokens", "prompt")

    def __init__(self, request: WorkloadRequest, num_tokens: int, *, ended: bool) -> None:
        self.prompt = PromptParts(request)
        self.adapter_id = request.adapter_id
        self.num_tokens = num_tokens
        self.ended = ended

    def token_ids(self, model: str, seed: int) -> TokenIds:
        """Make the output of the mock model."""
        own_seed = sequence_seed(model, self.adapter_id or "", output_seed(self.prompt, seed))
        end = Ending(self.num_tokens, FinishReason.EOS if self.ended else FinishReason.LENGTH)
        return tokens_between(own_seed, 0, self.num_tokens, end)


class LazyPrompt(Sequence[int]):
    """The token ids of a prompt, made on first access.

    Args:
        num_tokens: its length.
        model: name of the base model; part of the outputs' seed.
        seed: of prompts and outputs.
        prompt: what it consists of.
        answers: the earlier turns of its session.
    """

    __slots__ = ("_answers", "_model", "_num_tokens", "_prompt", "_seed", "_token_ids")

    def __init__(
        self, num_tokens: int, model: str, seed: int, prompt: PromptParts, answers: Sequence[Answer] = ()
    ) -> None:
        self._num_tokens = num_tokens
        self._model = model
        self._seed = seed
        self._prompt = prompt
        self._answers = answers
        self._token_ids: array[int] | None = None

    def _made(self) -> "array[int]":
        if self._token_ids is None:
            said = [(one.prompt, one.token_ids(self._model, self._seed)) for one in self._answers]
            self._token_ids = array("I", prompt_token_ids(self._prompt, self._seed, said).tobytes())
        return self._token_ids

    def __len__(self) -> int:
        """Return the number of tokens, without making them."""
        return self._num_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "array[int]": ...
    def __getitem__(self, index: int | slice) -> "int | array[int]":
        """Return one token id or a slice."""
        return self._made()[index]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the token ids."""
        return iter(self._made())
