"""Requests for several outputs of one prompt (`n` in OpenAI's API), counted as one where vLLM counts them as one.

Each output is a request of its own to router, scheduler and worker, as in vLLM each is one to the engine core. vLLM
counts every output in its series, except in two of request parameters, `request_params_n` and
`request_max_num_generation_tokens`: once for all, when the last output finishes.
"""

from typing import NamedTuple

from lorrery.service.names import Recent

MAX_GROUPS = 10_000
"""Unfinished ones that are remembered: of a request that was cancelled or refused, no output may come any more."""


class OutputGroup(NamedTuple):
    """The request that an output belongs to.

    Attributes:
        group_id: the same for all its outputs, and for no other's.
        num_outputs: how many they are.
    """

    group_id: str
    num_outputs: int


class Finished(NamedTuple):
    """A request whose outputs have all finished.

    Attributes:
        num_outputs: how many they were.
        longest_tokens: tokens of the longest of them.
    """

    num_outputs: int
    longest_tokens: int


class OutputGroups:
    """The requests of which some outputs have finished."""

    def __init__(self) -> None:
        self._lengths: Recent[str, list[int]] = Recent(MAX_GROUPS)

    def finished(self, group: OutputGroup | None, output_tokens: int) -> Finished | None:
        """Count an output that has finished; return its request if that was the last one. No group: it is alone."""
        if group is None or group.num_outputs < 2:
            return Finished(1, output_tokens)
        lengths = self._lengths.pop(group.group_id) or []
        lengths.append(output_tokens)
        if len(lengths) >= group.num_outputs:
            return Finished(group.num_outputs, max(lengths))
        self._lengths.put(group.group_id, lengths)
        return None
