"""The form of an input that prefix caches compare: its tokens, or the ids that a trace gives to runs of them.

A trace such as Mooncake's only gives an id for each 512 tokens, which says what other prompts have the same tokens.
Comparing ids is enough then, without making 512 tokens of each. Otherwise the tokens themselves are compared, so there
is no hash that could collide. Both are one `bytes`, which machines compare fastest; two inputs agree in as many leading
tokens as their leading units of equal kind do.
"""

from array import array
from collections.abc import Sequence as Tokens

from lorrery.scheduler.core.sequence import Content, Sequence
from lorrery.vocabulary import u32

_TOKEN_BYTES = array("I").itemsize


def of_tokens(token_ids: Tokens[int]) -> Content:
    """Return the content of an input whose tokens are known."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        data = token_ids.tobytes()
    else:
        data = array("I", token_ids).tobytes()
    return Content(data, 1, _TOKEN_BYTES, len(data) // _TOKEN_BYTES)


def of_u32(data: bytes) -> Content:
    """Return the content of an input whose tokens are on the wire as `vocabulary.u32` packs them; usually no copy."""
    data = u32.native(data)
    return Content(data, 1, _TOKEN_BYTES, len(data) // _TOKEN_BYTES)


def of_runs(run_ids: Tokens[int], run_tokens: int, num_tokens: int) -> Content:
    """Return the content of an input of `num_tokens`, given an id for each run of `run_tokens`, the last cut short.

    Equal ids mean equal tokens after equal ones, different ids mean tokens that differ from the first on.
    """
    ids = run_ids if isinstance(run_ids, array) and run_ids.typecode == "Q" else array("Q", run_ids)
    assert len(ids) == -(-num_tokens // run_tokens), "a run without an id"
    return Content(ids.tobytes(), run_tokens, ids.itemsize, num_tokens)


def content_of(sequence: Sequence) -> Content:
    """Return the content of a sequence's input, as far as it is known; it is cached there."""
    content = sequence.content
    if content is None:
        content = sequence.content = of_tokens(sequence.prompt_token_ids)
    if sequence.produced_tokens:
        num_known = content.num_tokens - len(sequence.prompt_token_ids)  # of the output
        num_produced = min(sequence.produced_tokens, len(sequence.output_token_ids))
        if num_known < num_produced:
            content = sequence.content = with_output(content, sequence, num_known, num_produced)
    return content


def with_output(content: Content, sequence: Sequence, first: int, end: int) -> Content:
    """Return a content extended by a sequence's output tokens from `first` to `end`, as far as they are known."""
    if content.unit_tokens != 1 or len(sequence.prompt_token_ids) < sequence.prompt_tokens:
        return content
    output = of_tokens(sequence.output_token_ids[first:end])
    return Content(content.data + output.data, 1, _TOKEN_BYTES, content.num_tokens + output.num_tokens)
