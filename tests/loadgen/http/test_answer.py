import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorrery.loadgen.http.answer import Answer, error_text, tokens_of_events
from lorrery.loadgen.http.routes import Chat, Completions, Slora
from lorrery.loadgen.reception import Reception


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(0, 80))
def test_events_together_bring_what_the_usage_says(lengths, num_tokens):
    tokens = tokens_of_events(lengths, num_tokens)
    assert len(tokens) == len(lengths)
    assert sum(tokens) == (num_tokens if lengths else 0)
    assert min(tokens, default=0) >= 0


@given(st.lists(st.integers(1, 20), min_size=2, max_size=40), st.integers(2, 80))
def test_the_first_and_the_last_event_with_text_keep_a_token(lengths, num_tokens):
    tokens = tokens_of_events(lengths, num_tokens)
    assert tokens[0] >= 1
    assert tokens[-1] >= 1


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "tokens"),
    [
        ([5, 5, 5], 3, [1, 1, 1]),
        ([5, 5, 0], 2, [1, 1, 0]),  # the last only ended the stream
        ([5, 5, 0], 3, [1, 1, 1]),  # the last was an end-of-sequence token
        ([5, 0, 5, 0], 3, [1, 1, 1, 0]),
        ([4, 12, 4], 5, [1, 2, 2]),
        ([0, 0], 4, [2, 2]),
        ([3, 3, 3, 3, 3], 2, [1, 0, 0, 0, 1]),
        ([3, 3, 0], None, [1, 1, 0]),
        ([], 3, []),
    ],
)
def test_how_tokens_are_shared_out(lengths, num_tokens, tokens):
    assert tokens_of_events(lengths, num_tokens) == tokens


def received(route, *events, done=True, asked=None, keep=False):
    reception = Reception(keeps_output=keep)
    answer = Answer(route.read, reception, lambda _: None)
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        answer.feed(f"data: {data}\n\n".encode())
    if done:
        answer.feed(b"data: [DONE]\n\n")
    answer.end(asked)
    return reception


def completion(text, reason=None, **more):
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}], **more}


def chat(reason=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def usage(prompt, completion_tokens, cached=None):
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "prompt_tokens_details": details}
    return {"choices": [], "usage": counts}


def test_a_completion_as_vllm_streams_it():
    events = [completion(" a", usage=None), completion(" b", usage=None), completion("", "length", usage=None)]
    got = received(Completions(), *events, usage(7, 3, cached=4), keep=True)
    assert got.status == "OK"
    assert got.message_tokens == [1, 1, 1]
    assert "".join(got.text) == " a b"
    finish = got.finish
    assert (finish.reason, finish.completion_tokens, finish.prompt_tokens, finish.cached_tokens) == ("length", 3, 7, 4)


def test_a_completions_chunk_without_text_is_no_token():
    """As LiteLLM's proxy ends a stream."""
    ends = {"choices": [{"finish_reason": "length", "index": 0}]}, {**usage(7, 4), "choices": [{"index": 0}]}
    got = received(Completions(), completion(" a a"), completion(" b b"), *ends, keep=True)
    assert (got.status, got.message_tokens, "".join(got.text)) == ("OK", [2, 2], " a a b b")
    assert (got.finish.reason, got.finish.prompt_tokens, got.finish.completion_tokens) == ("length", 7, 4)


def test_a_role_alone_is_no_token_and_a_role_with_text_is_one():
    got = received(Chat(), chat(role="assistant", content=""), chat(content="a"), chat(content="b", reason="stop"))
    assert got.message_tokens == [1, 1]
    assert got.finish.completion_tokens is None
    got = received(Chat(), chat(role="assistant", content="a"), chat(reason="stop", content=""), usage(1, 1))
    assert got.message_tokens == [1]


def test_reasoning_and_tool_calls_are_tokens():
    call = [{"index": 0, "function": {"arguments": "{}"}}]
    got = received(Chat(), chat(reasoning_content="hm"), chat(tool_calls=call), chat(reason="stop"), usage(1, 3))
    assert got.message_tokens == [1, 1, 1]


def test_slora_says_nothing_of_usage_so_the_asked_length_counts():
    def event(text, finished):
        return {"token": {"id": 5, "text": text, "logprob": None}, "generated_text": None, "finished": finished}

    got = received(Slora(), event(" a", False), event(" b b", True), done=False, asked=3)
    assert (got.status, got.message_tokens, got.finish.completion_tokens) == ("OK", [1, 2], None)
    assert received(Slora(), event(" a", False), event("", -1), done=False).status == "ABORTED"


@pytest.mark.parametrize(
    ("events", "done", "status", "detail"),
    [
        ([completion(" a"), {"error": {"message": "boom", "code": 500}}], True, "STREAM_ERROR", "boom"),
        ([{"object": "error", "message": "boom"}], True, "STREAM_ERROR", "boom"),
        ([completion(" a"), "no JSON"], True, "BAD_RESPONSE", "no JSON"),
        ([chat(content="a")], True, "BAD_RESPONSE", "delta"),
        (["[1]"], True, "BAD_RESPONSE", "[1]"),
        ([completion(" a"), usage(-5, 1)], True, "BAD_RESPONSE", "-5"),
        ([completion(" a"), usage(5, "x")], True, "BAD_RESPONSE", "prompt_tokens"),
        ([completion(" a"), usage(5, None)], True, "BAD_RESPONSE", "completion_tokens"),
        ([completion(" a")], False, "NO_FINISH", ""),
        ([], True, "OK", ""),
    ],
)
def test_what_goes_wrong_in_a_stream_is_told_apart(events, done, status, detail):
    got = received(Completions(), *events, done=done)
    assert got.status == status
    assert detail in got.detail


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"object": "error", "message": "no"}, "no"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": "no"}, "no"),
        ("plain", "plain"),
    ],
)
def test_the_message_of_an_error_is_found(body, text):
    assert error_text(body) == text
