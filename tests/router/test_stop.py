"""Stop strings."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from lorrery.router.open_request import Output, StopMatcher, stop_automaton, stop_token_sequences
from lorrery.router.request import Finish, Request, Usage
from lorrery.router.sampling import SamplingParams
from lorrery.tokenizer.file import BuiltinTokenizer
from lorrery.vocabulary.endings import FinishReason

TOKENIZER = BuiltinTokenizer()
ABC, ABLE, ABOUT = 3, 4, 5
few_letters = st.text("ab", max_size=40)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def matcher_of(stops: list[str], *, include: bool = False) -> StopMatcher:
    return StopMatcher(stop_automaton(stops), max(map(len, stops)), include=include)


def naive(text: str, stops: list[str], least: int = 0) -> tuple[str, bool]:
    """Character by character: the first end behind `least` where a stop string is complete; the longest one there."""
    for end in range(least + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(few_letters, stop_strings, st.lists(st.integers(0, 6)))
@example("aab", ["aab", "ab"], [1, 1, 1])
@example("abba", ["abba", "bb"], [4])  # the one that begins first ends last
def test_equals_a_naive_matcher_however_the_text_is_split(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = matcher_of(stops)
    got, at = "", 0
    for size in [*sizes, len(text)]:
        piece = text[at : at + size]
        at += size
        got += matcher.push(piece)
        # As much is held back as a stop string may begin with.
        if not matcher.matched:
            seen = text[: min(at, len(text))]
            assert got == seen[: max(0, len(seen) - max(map(len, stops)) + 1)]
    got += matcher.flush()
    assert (got, matcher.matched) == naive(text, stops)


@given(few_letters, stop_strings, st.integers(0, 40))
def test_a_stop_string_counts_where_it_ends_late_enough(text: str, stops: list[str], least: int) -> None:
    matcher = matcher_of(stops)
    got = "".join(matcher.push(char, counts=at >= least) for at, char in enumerate(text)) + matcher.flush()
    assert (got, matcher.matched) == naive(text, stops, least)


def test_a_stop_string_may_stay_in_the_text() -> None:
    matcher = matcher_of(["ab", "b"], include=True)
    assert (matcher.push("xxa"), matcher.push("bcc"), matcher.flush()) == ("xxa", "b", "")
    assert matcher.found == "ab"


def test_stop_strings_become_token_sequences_without_bos() -> None:
    assert stop_token_sequences(["", " abc able", " about"], TOKENIZER) == ((ABC, ABLE), (ABOUT,))
    assert stop_token_sequences([" about", " abc", " about"], TOKENIZER) == ((ABOUT,), (ABC,))


def request(*stops: str) -> Request:
    return Request("r", "", "", b"\1\0\0\0" * 7, SamplingParams(stop_sequences=stops), (), 1)


def test_without_stop_strings_nothing_is_held_back() -> None:
    output = Output(request(), TOKENIZER)
    assert output.push([ABC], None) == ([ABC], " abc", None)
    finish = Finish(FinishReason.LENGTH, Usage(7, 2))
    assert output.push([ABLE], finish) == ([ABLE], " able", finish)
    assert output.num_tokens == 2


def test_text_is_held_as_long_as_a_stop_string_may_begin_in_it() -> None:
    output = Output(request("c abx"), TOKENIZER)
    assert output.push([ABC], None) == ([ABC], "", None)
    assert output.push([ABLE], None) == ([ABLE], " abc ", None)
    finish = Finish(FinishReason.LENGTH, Usage(7, 2))
    assert output.push([], finish) == ([], "able", finish)


def test_a_stop_string_across_tokens_ends_the_sequence_with_tokens_counted_here() -> None:
    output = Output(request("c ab"), TOKENIZER)
    assert output.push([ABLE, ABC], None) == ([ABLE, ABC], " able ", None)
    assert not output.stopped
    assert output.push([ABOUT, ABLE], None) == ([ABOUT], "ab", None)
    assert output.stopped
    upstream = Finish(FinishReason.ABORTED, Usage(7, 5, 2, 0.5, "w", 1))
    assert output.stop_finish(upstream) == Finish(FinishReason.STOP, Usage(7, 3, 2, 0.5, "w", 1), "c ab")
    assert output.stop_finish(None) == Finish(FinishReason.STOP, Usage(7, 3), "c ab")


def test_a_stop_that_the_worker_matched_keeps_its_usage() -> None:
    output = Output(request(" able"), TOKENIZER)
    finish = Finish(FinishReason.STOP, Usage(7, 2, cached_tokens=5, worker_id="w"))
    assert output.push([ABC, ABLE], finish) == ([ABC, ABLE], " abc", replace(finish, stop_sequence=" able"))


def test_tokens_behind_the_stop_string_are_not_counted() -> None:
    output = Output(request("abl"), TOKENIZER)
    finish = Finish(FinishReason.LENGTH, Usage(7, 3, cached_tokens=5, worker_id="w"))
    expected = Finish(FinishReason.STOP, Usage(7, 2, cached_tokens=5, worker_id="w"), "abl")
    assert output.push([ABC, ABLE, ABOUT], finish) == ([ABC, ABLE], " abc ", expected)


def test_half_a_character_at_the_end_is_left_out() -> None:
    half = TOKENIZER.encode_stop("é")[0]
    finish = Finish(FinishReason.LENGTH, Usage(7, 2))
    assert Output(request(), TOKENIZER).push([ABC, half], finish)[1] == " abc"
    assert Output(request("cx"), TOKENIZER).push([ABC, half], finish)[1] == " abc"


def test_a_stop_string_that_names_the_end_of_a_sequence_is_not_that_token() -> None:
    end = TOKENIZER.eos_id
    assert all(end not in sequence for sequence in stop_token_sequences(["</s>", "a</s>"], TOKENIZER))
