"""A prompt whose tokens are made on first access.

Where caches compare hash ids, nothing in a simulation reads tokens; a plug-in policy may.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from lorrery.loadgen.workload.prompts import prompt_token_ids
from lorrery.loadgen.workload.request import WorkloadRequest


class UnreadPrompt(Sequence[int]):
    """The token ids of a prompt, made on first access."""

    def __init__(self, request: WorkloadRequest, seed: int) -> None:
        self._request = request
        self._seed = seed
        self._token_ids: array[int] | None = None

    def _made(self) -> "array[int]":
        if self._token_ids is None:
            self._token_ids = array("I", prompt_token_ids(self._request, self._seed).tobytes())
        return self._token_ids

    def __len__(self) -> int:
        """Return the number of tokens, without making them."""
        return self._request.prompt_tokens

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
