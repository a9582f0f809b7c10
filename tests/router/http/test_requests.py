"""Bodies: fields that are wrong a million times cost no more than those that are wrong once; what may be null."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from lorrery.router.edges.anthropic.requests import MessagesRequest
from lorrery.router.edges.responses.requests import ResponsesRequest
from lorrery.router.edges.slora import SloraParameters, SloraRequest
from lorrery.router.http.generating import GeneratingRequest, check_vocabulary
from lorrery.router.http.openai_requests import ChatBatchRequest, ChatRequest, CompletionRequest, turns
from lorrery.router.http.vllm import DetokenizeRequest, TokenizeRequest
from lorrery.service.errors import InvalidRequest

MANY: list[Any] = [None] * 1000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": MANY}),
        (CompletionRequest, {"prompt": [MANY, MANY]}),
        (CompletionRequest, {"prompt": [[5, None]] * 1000}),
        (CompletionRequest, {"prompt": "x", "stop": MANY, "stop_token_ids": MANY}),
        (ChatRequest, {"messages": MANY}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": MANY, "bad_words": MANY}),
        (ChatBatchRequest, {"messages": [MANY] * 1000}),
        (MessagesRequest, {"max_tokens": 1, "messages": MANY}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": MANY}]}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "system": MANY}),
        (SloraRequest, {"inputs": "x", "parameters": {"stop_sequences": MANY}}),
        (DetokenizeRequest, {"tokens": MANY}),
        (TokenizeRequest, {"messages": MANY}),
    ],
)
def test_the_first_wrong_element_ends_the_reading_of_a_list(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 30  # each alternative of a union has its own


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"input": MANY}, 9),  # one for each kind of item, and one for text
        ({"input": [{"role": "user", "content": MANY}]}, 32),
        ({"input": "x", "tools": MANY}, 4),
        ({"input": "x", "include": MANY}, 1),
    ],
)
def test_the_first_wrong_item_of_a_response_ends_the_reading_too(body: dict[str, Any], most: int) -> None:
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate(body)
    assert caught.value.error_count() <= most


GIVEN = {
    "max_tokens": 3,
    "n": 2,
    "top_k": 1,
    "seed": 1,
    "temperature": 0.5,
    "top_p": 1.0,
    "stream": True,
    "min_tokens": 1,
}
GIVEN_LAXLY = [
    {"max_tokens": "3", "n": "2", "top_k": "1", "seed": "1", "temperature": "0.5", "top_p": "1", "stream": "true"},
    {"max_tokens": 3.0, "n": 2.0, "top_k": True, "seed": 1.0, "temperature": ".5", "top_p": 1, "stream": 1},
]


@pytest.mark.parametrize("laxly", GIVEN_LAXLY)
@pytest.mark.parametrize(
    ("kind", "prompt"),
    [(CompletionRequest, {"prompt": "x"}), (ChatRequest, {"messages": [{"role": "user", "content": "x"}]})],
)
def test_numbers_and_booleans_are_read_as_vllm_reads_them(
    kind: type[BaseModel], prompt: dict[str, Any], laxly: dict[str, Any]
) -> None:
    read = kind.model_validate({**prompt, **laxly, "min_tokens": "1"})
    assert read == kind.model_validate({**prompt, **GIVEN})


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        (CompletionRequest, {"prompt": "x"}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
@pytest.mark.parametrize(
    ("given", "read"), [({}, 0), ({"priority": 2**40}, 2**31 - 1), ({"priority": -5}, -5), ({"priority": "3"}, 3)]
)
def test_a_priority_is_in_the_message_and_0_if_none_is_given(
    kind: type[GeneratingRequest | ResponsesRequest], prompt: dict[str, Any], given: dict[str, Any], read: int
) -> None:
    asked = kind.model_validate({**prompt, **given})
    request = asked.chat() if isinstance(asked, ResponsesRequest) else asked
    request.check()
    (message,) = request.messages(["x"], "r", "t")
    assert message.priority == read


@pytest.mark.parametrize("priority", [None, 2**63, -(2**63) - 1, 1.5, "x"])
def test_a_priority_is_a_whole_number_of_64_bits(priority: object) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "x", "priority": priority})


@pytest.mark.parametrize("prompt", [3, True, {}, [1.5], [["5", "x"]], [{}], [None], [[5], 5], [-1]])
def test_a_prompt_is_not_read_from_other_kinds(prompt: object) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": prompt})


@pytest.mark.parametrize(
    ("prompt", "read"),
    [([3.0, True], [[3, 1]]), (["3", 4], [[3, 4]]), ([["5"]], [[5]]), (["3"], ["3"]), ("3", ["3"]), ([""], [""])],
)
def test_numbers_of_tokens_are_read_as_vllm_reads_them(prompt: object, read: list[object]) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompts == read


def test_what_stands_in_lists_that_may_have_anything_is_read_one_by_one() -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": MANY}]})
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.content\[0\] is of type 'None'"):
        _ = chat.turns


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": -(10**4000)},
        {"n": 10**4000},
        {"min_tokens": -(10**4000)},
        {"prompt_logprobs": -(10**4000)},
        {"logprobs": 10**4000},
        {"top_k": -(10**4000)},
        {"logit_bias": {"x" * 10**6: 1}},
        {"top_logprobs": "x" * 10**6},
        {"tool_choice": ["x" * 10**6], "tools": [{}]},
        {"cache_salt": "x" * 10**6},
    ],
)
def test_no_message_is_as_long_as_what_it_is_about(given: dict[str, Any]) -> None:
    def check() -> None:
        if {"top_logprobs", "tool_choice"} & {*given}:
            ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **given})
        request = CompletionRequest.model_validate({"prompt": "x", **given})
        request.check()
        check_vocabulary(request, [], 100)

    with pytest.raises(InvalidRequest) as caught:
        check()
    assert len(str(caught.value)) < 300


PARTS = [
    {"type": "text", "text": "a"},
    {"type": "input_text", "text": "b"},
    {"type": "output_text", "text": "c"},
    {"type": "refusal", "refusal": "d"},
    {"type": "thinking", "thinking": "e", "signature": "x"},
]


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_every_kind_of_text_in_a_message_is_read(role: str) -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": role, "content": [*PARTS, "f", ""]}]})
    tokenize = TokenizeRequest.model_validate({"messages": [{"role": role, "content": PARTS}]})
    assert chat.turns == [{"role": role, "content": ["a", "b", "c", "d", "e", "f", ""]}]
    assert turns(tokenize.messages or ()) == [{"role": role, "content": ["a", "b", "c", "d", "e"]}]


@pytest.mark.parametrize("part", [{"type": "refusal", "text": "no"}, {"type": "thinking", "thinking": None}])
def test_a_part_without_its_text_is_refused(part: dict[str, Any]) -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": "assistant", "content": [part]}]})
    with pytest.raises(
        InvalidRequest, match=rf"^messages\[0\]\.content\[0\]\.{part['type']} is missing, or no text; give one$"
    ):
        _ = chat.turns


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}])
def test_sloras_parameters_may_be_null_as_other_fields_may(given: dict[str, Any]) -> None:
    assert SloraRequest.model_validate({"inputs": "x", **given}).parameters == SloraParameters()
