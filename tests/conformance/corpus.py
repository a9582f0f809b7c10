"""Requests that show how an engine's HTTP server answers: every route, parameter and class of values.

A request's name says what it is; answers are recorded and compared under it. Requests stand in the order in which they
are sent, one after the other: some find what earlier ones have loaded or cached. Outputs that must agree are forced by
a choice; all others may differ in their text.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

MODEL, ADAPTER = "tiny", "l0"


def _values(*given: Any) -> tuple[Any, ...]:
    return given


FORCED = {"choice": ["red green"]}
HELLO = [{"role": "user", "content": "hello world"}]
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": WEATHER}
LONG = "word " * 2000

COMPLETION = {"model": MODEL, "prompt": "hello world", "max_tokens": 4, "temperature": 0}
SHORT = {"structured_outputs": FORCED}
"""Ends an output early whose length is not bounded otherwise."""
CHAT = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "temperature": 0}
RESPONSE = {"model": MODEL, "input": "hello world", "max_output_tokens": 4, "temperature": 0}
MESSAGE = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "temperature": 0}
SHORT_MESSAGE = {"output_config": {"format": {"type": "json_schema", "schema": {"const": "red green"}}}}
TOKENIZE = {"model": MODEL, "prompt": "hello world"}
TOKENIZE_CHAT = {"model": MODEL, "messages": HELLO}
DETOKENIZE = {"model": MODEL, "tokens": [1, 300, 301]}

_BIG = 10**20
_WRONG_INTEGERS: tuple[Any, ...] = (None, "3", "x", 1.0, 1.5, True, [], {})
_INTEGERS: tuple[Any, ...] = (0, 1, -1, 5, 2**31, 2**63, _BIG, *_WRONG_INTEGERS)
_NUMBERS: tuple[Any, ...] = (0, 1, 0.5, -1, 1.1, 2, 2.1, 1e308, None, "0.5", "x", True, [], {})
_SWITCHES: tuple[Any, ...] = (True, False, None, 1, 2, "true", "x", [], {})
_TEXTS: tuple[Any, ...] = ("", "a", None, 5, True, [], {}, ["a"])
_TOKENS: tuple[Any, ...] = ([], [5], [5400], [5463], [5504], [-1], [2**40], None, 5, "5", ["5"], ["x"], [1.5], [None])
_OBJECTS: tuple[Any, ...] = ({}, {"a": 1}, None, "x", 5, [], [{}])


class Case(NamedTuple):
    """A request.

    Attributes:
        name: unlike any other's.
        path: with its query.
        body: JSON; None: none is sent; bytes: as they are.
        method: of HTTP.
        headers: beside the content type, which is that of JSON unless given.
    """

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


def cases(server: str) -> list[Case]:
    """Return the requests for a server: `plain`, with `tools`, or with a `key`."""
    seen = Counter[str]()
    found: list[Case] = []
    for case in {"plain": _plain, "tools": _tools, "key": _key}[server]():
        seen[case.name] += 1
        found.append(case if seen[case.name] == 1 else case._replace(name=f"{case.name} ({seen[case.name]})"))
    return found


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 70 else f"{text[:50]}...{len(text)}"


def _vary(path: str, base: dict[str, Any], fields: Mapping[str, Iterable[Any]], title: str = "") -> Iterator[Case]:
    """Yield a request for each value of each field, all else being as in the base; a tuple (`with`) adds others."""
    for field, values in fields.items():
        for value in values:
            given, more = value if isinstance(value, With) else (value, {})
            name = f"{title or path} {field}={_shown(given)}" + (f" {_shown(more)}" if more else "")
            yield Case(name, path, {**base, **more, field: given})


class With(NamedTuple):
    """A value that is sent beside others."""

    value: Any
    more: dict[str, Any]


def _without(path: str, base: dict[str, Any], names: Iterable[str]) -> Iterator[Case]:
    for name in names:
        yield Case(f"{path} without {name}", path, {key: value for key, value in base.items() if key != name})


_SAMPLING: dict[str, Iterable[Any]] = {
    "frequency_penalty": (0, 2, -2, 2.1, -2.1, None, "x", True),
    "presence_penalty": (0, 2, -2, 2.1, -2.1, None, "x", []),
    "repetition_penalty": (1, 0, -1, 2, 100, None, "x"),
    "temperature": (*_NUMBERS, -0.1, 1e-9),
    "top_p": (*_NUMBERS, 1e-9),
    "top_k": (*_INTEGERS, -2, 2**31 - 1),
    "min_p": (0, 0.5, 1, 1.1, -0.1, None, "x"),
    "seed": (*_INTEGERS, -(2**63), 2**63 - 1, -(2**63) - 1),
    "stop": (*("", "zz", [], ["zz"], [""], ["a", "b", "c", "d"], ["a", "b", "c", "d", "e"], None, 5, [5], [None], {}),),
    "stop_token_ids": _TOKENS,
    "ignore_eos": _SWITCHES,
    "include_stop_str_in_output": (True, None, "x"),
    "min_tokens": (0, 1, 4, 5, -1, None, "x", 1.5),
    "logit_bias": (
        *({}, {"5": 1}, {"5": 100}, {"5": 101}, {"5": -101}, {"5463": 1}, {"5504": 1}, {"-1": 1}),
        *({"x": 1}, {"5": "x"}, {"5": None}, None, [], "x"),
    ),
    "skip_special_tokens": (True, False, None, "x"),
    "spaces_between_special_tokens": (True, False, None),
    "length_penalty": (1, 0, -1, None, "x"),
    "use_beam_search": (False, None, "x"),
    "truncate_prompt_tokens": (-1, 0, 1, 2, 1000, 1024, 1025, 2**63, -2, None, "2", 1.5),
    "truncation_side": ("left", "right", "x", None, With("right", {"truncate_prompt_tokens": 2})),
    "allowed_token_ids": (*_TOKENS, list(range(5, 40))),
    "bad_words": ([], ["red"], [""], None, "x", [5]),
    "prompt_logprobs": (0, 1, 3, 20, 21, -1, -2, None, "x", True, With(1, {"stream": True}), With(0, {"stream": True})),
    "logprob_token_ids": (None, [], [5], "x"),
    "priority": (0, 1, -1, 2**31, 2**63, None, "x", "1"),
    "request_id": ("a", "", None, 5, "ä"),
    "session_id": ("a", None, 5),
    "return_tokens_as_token_ids": (True, False, None, "x"),
    "return_token_ids": _SWITCHES,
    "cache_salt": ("a", "", None, 5, "x" * 128, "x" * 129, "a/b", "a@b"),
    "kv_transfer_params": (*_OBJECTS, {"do_remote_prefill": True}),
    "ec_transfer_params": ({}, None, "x"),
    "vllm_xargs": ({}, {"a": 1}, {"a": {}}, None, "x", {"a": 2**70}),
    "repetition_detection": (None, {}, {"max_pattern_size": 3, "min_count": 2}, "x"),
    "thinking_token_budget": (None, -1, 0, 5, -2, "x", 1.5),
    "stream_interval": (1, 5, 0, None, "x"),
    "n": (*_INTEGERS, 2, 3, With(2, {"temperature": 1}), With(3, {"temperature": 1, "seed": 7}), 16385),
    "best_of": (0, 1, 2, None, "x", With(3, {"n": 2, "temperature": 1})),
    "user": ("a", "", None, 5),
    "stream": (False, None, "x", 0, 2),
    "stream_options": (
        *({}, None, "x", {"include_usage": True}, {"include_usage": "x"}),
        *(
            With(options, {"stream": True})
            for options in _values(
                *({}, None, "x", {"include_usage": True}, {"include_usage": False}, {"include_usage": None}),
                *({"include_usage": True, "continuous_usage_stats": True}, {"continuous_usage_stats": True}),
                *({"include_usage": "x"}, {"a": 1}, []),
            )
        ),
    ),
    "response_format": (
        *(None, {"type": "text"}, {"type": "x"}, {}, "x", {"type": "json_object"}, {"type": "json_schema"}),
        *({"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"name": "a"}}),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["red green"]}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}},
        {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7]}, "strict": True}},
        {"type": "structural_tag", "structures": [], "triggers": []},
        {"type": "structural_tag"},
    ),
    "structured_outputs": (
        *(None, {}, "x", FORCED, {"choice": []}, {"choice": "x"}, {"choice": [5]}, {"choice": None}),
        *({"regex": "red"}, {"regex": "("}, {"regex": 5}, {"json": {"enum": ["red"]}}, {"json": "{"}, {"json": "{}"}),
        *({"json": {"type": "x"}}, {"json_object": True}, {"json_object": False}, {"grammar": 'root ::= "red"'}),
        *({"grammar": "x"}, {"regex": "red", "choice": ["red"]}, {"regex": "red", "json_object": True}, {"a": 1}),
        *({"structural_tag": "{}"}, {"json": '{"enum": ["red"]}'}, {"regex": ""}, {"choice": [""]}),
    ),
    "watermarking": (None, False, True, "x"),
    "routed_experts_prompt_start": (0, -1),
    "return_token_offsets": (True, "x"),
    "mm_payload": ("tensors", "none", "x"),
    "suffix": ("", "x", None, 5),
    "functions": ([], [{"name": "a"}], None),
    "guided_choice": (["red"], None),
    "guided_json": ({"enum": ["red"]},),
    "unknown_field": (1, None, {}),
    "model": ("tiny", "l0", "l1", "", None, "absent", 5, "Tiny", "l0 "),
}

_COMPLETION_FIELDS: dict[str, Iterable[Any]] = {
    **_SAMPLING,
    "prompt": (
        *("", "a", " ", [], [""], ["a"], ["a", "b"], ["a", ""], [1, 5, 9], [5], [[5], [6, 7]], [[]], [[5], []]),
        *([5463], [5504], [-1], [2**40], ["a", 5], [5, "a"], [1.5], [None], [[None]], None, 5, {}, True, [True]),
        *("<s>hello</s>", "a\u0000b", "héllo ☃ 😀", "\ud800", LONG, [5] * 1023, [5] * 1024, [5] * 1025, ["a"] * 1025),
    ),
    "max_tokens": tuple(With(most, SHORT) for most in (*_INTEGERS, 16, 1020, 1021, 1022, 1023, 1024, 1025)),
    "echo": (
        *_SWITCHES,
        *(With(True, {"max_tokens": 0}), With(True, {"max_tokens": 0, "logprobs": 0}), With(True, {"logprobs": 1})),
        *(With(True, {"prompt": [1, 5, 9]}), With(True, {"return_token_ids": True})),
        *(With(True, {"stream": True}), With(True, {"stream": True, "max_tokens": 0})),
        With(True, {"prompt_logprobs": 1}),
    ),
    "logprobs": (*_INTEGERS, 20, 21, -2, With(2, {"return_tokens_as_token_ids": True}), With(1, {"stream": True})),
    "prompt_embeds": (None, "", "x", []),
    "add_special_tokens": (True, False, None, "x", With(False, {"prompt": "", "echo": True})),
}

_CHAT_FIELDS: dict[str, Iterable[Any]] = {
    **_SAMPLING,
    "messages": (
        *([], None, "x", {}, [None], ["x"], [{}], [[]], 5),
        *(
            [{"role": role, "content": "a"}]
            for role in ("system", "developer", "assistant", "tool", "function", "x", "")
        ),
        *([{"role": role, "content": "a"}] for role in (None, 5)),
        *([{"role": "user", "content": content}] for content in _values("", None, [], 5, {}, ["a"], [5], [{}], True)),
        *(
            [{"role": "user", "content": [part]}]
            for part in (
                *({"type": "text", "text": "a"}, {"type": "text"}, {"type": "text", "text": None}, {"text": "a"}),
                *({"type": "text", "text": 5}, {"type": "x", "text": "a"}, {"type": "input_text", "text": "a"}),
                *({"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "a"}, {"type": None}),
                *({"type": "thinking", "thinking": "a"}, {"type": "image_url", "image_url": {"url": "x"}}),
                *({"type": "image_url"}, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
                *({"type": "file", "file": {}}, {"type": "video_url", "video_url": {"url": "x"}}),
                {"type": "tool_reference", "name": "a"},
            )
        ),
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": "a", "name": "bob"}],
        [{"role": "user", "content": "a", "name": 5}],
        [{"role": "user", "content": "a", "other": 5}],
        [{"role": "system", "content": "be"}, *HELLO],
        [{"role": "developer", "content": "be"}, *HELLO],
        [*HELLO, {"role": "system", "content": "late"}],
        [*HELLO, {"role": "assistant", "content": "hm"}],
        [*HELLO, {"role": "assistant", "content": "hm", "reasoning_content": "why"}],
        [*HELLO, {"role": "assistant", "content": "hm", "reasoning": "why"}],
        *(
            [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]
            for calls in _values(
                *([], None, "x", [5], [{}]),
                [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
                [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {}}}],
                [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "x"}}],
                [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": ""}}],
                [{"id": "1", "type": "function", "function": {"name": "weather"}}],
                [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}],
                [{"id": "1", "type": "x", "function": {"name": "weather", "arguments": "{}"}}],
                [{"id": "1", "type": "function"}],
            )
        ),
        [*HELLO, {"role": "tool", "content": "sun", "tool_call_id": "1"}],
        [*HELLO, {"role": "tool", "content": [{"type": "text", "text": "sun"}], "tool_call_id": "1"}],
        [{"role": "user", "content": "<s>a</s>"}],
        [{"role": "user", "content": LONG}],
    ),
    "max_tokens": tuple(With(most, SHORT) for most in (*_INTEGERS, 16, 1010, 1013, 1014, 1015, 1023, 1024, 1025)),
    "max_completion_tokens": (
        *(With(most, SHORT) for most in (*_INTEGERS, 1023, 1024, 1025)),
        *(With(2, {"max_tokens": 3}), With(None, {"max_tokens": 3})),
    ),
    "logprobs": _SWITCHES,
    "top_logprobs": (
        *_INTEGERS,
        *(With(count, {"logprobs": True}) for count in (0, 1, 3, 20, 21, -1, -2, None)),
        *(With(2, {"logprobs": True, "stream": True}), With(2, {"logprobs": True, "return_tokens_as_token_ids": True})),
    ),
    "echo": (True, False, None, With(True, {"messages": [*HELLO, {"role": "assistant", "content": "hm"}]})),
    "add_generation_prompt": (*(True, False, None, "x", With(False, {"stream": True})),),
    "continue_final_message": (
        *(True, False, None, "x", With(True, {"add_generation_prompt": False})),
        With(True, {"add_generation_prompt": True}),
        With(True, {"add_generation_prompt": False, "messages": [*HELLO, {"role": "assistant", "content": "hm"}]}),
        With(True, {"add_generation_prompt": False, "messages": [*HELLO, {"role": "assistant", "content": ""}]}),
    ),
    "add_special_tokens": (True, False, None, "x"),
    "documents": (None, [], [{"title": "a", "text": "b"}], [{"a": 5}], "x"),
    "chat_template": (None, "", "x", 5),
    "chat_template_kwargs": (None, {}, {"a": 1}, {"add_generation_prompt": False}, {"chat_template": "x"}, "x", []),
    "media_io_kwargs": (None, {}, {"image": {}}, "x"),
    "mm_processor_kwargs": (None, {}, {"a": 1}, "x"),
    "include_reasoning": (True, False, None, "x"),
    "reasoning_effort": ("low", "none", "max", "x", None, 5),
    "return_prompt_text": (True, False, None),
    "parallel_tool_calls": (True, False, None, "x"),
    "modalities": (["text"], ["audio"], None),
    "audio": (None, {"voice": "x"}),
    "prediction": (None, {"type": "content", "content": "x"}),
    "service_tier": ("auto", "x", None),
    "store": (True, False, None),
    "metadata": ({}, {"a": "b"}, None),
    "function_call": ("auto", "none", None),
    "tools": (None, [], "x", [{}], [TOOL], [{"type": "x"}], [5], {}),
    "tool_choice": (
        *("none", "auto", "required", "x", None, 5, {}, {"type": "function", "function": {"name": "weather"}}),
        *(
            With(choice, {"tools": [TOOL]})
            for choice in (
                *("none", "auto", "required", "x", None, {}, {"type": "function", "function": {"name": "weather"}}),
                *({"type": "function", "function": {"name": "absent"}}, {"type": "function"}),
                *({"type": "function", "function": {}}, {"type": "x", "function": {"name": "weather"}}),
                {"type": "function", "function": {"name": ""}},
            )
        ),
    ),
}

_TOOL_FIELDS: dict[str, Iterable[Any]] = {
    "tools": (
        *([TOOL], [TOOL, TOOL], [{"type": "function", "function": {"name": "weather"}}]),
        *([{"type": "function", "function": {}}], [{"function": {"name": "weather", "parameters": WEATHER}}]),
        *([{"type": "x", "function": {"name": "weather"}}], [{"type": "function", "function": {"name": 5}}]),
        *([{"type": "function", "function": {"name": "weather", "parameters": "x"}}], None, []),
        [{"type": "function", "function": {"name": "weather", "parameters": {"type": "x"}}}],
    ),
    "tool_choice": tuple(
        With(choice, {"tools": [TOOL], "max_tokens": 60, **more})
        for choice in ("none", "required", "x", {"type": "function", "function": {"name": "weather"}})
        for more in ({}, {"stream": True}, {"parallel_tool_calls": False}, {"response_format": {"type": "json_object"}})
    ),
    "max_tokens": (
        With(3, {"tools": [TOOL], "tool_choice": "required"}),
        With(3, {"tools": [TOOL], "tool_choice": "required", "stream": True}),
        With(3, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        With(
            3, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "stream": True}
        ),
    ),
    "structured_outputs": (
        With(FORCED, {"tools": [TOOL]}),
        With(FORCED, {"tools": [TOOL], "tool_choice": "required"}),
        With(FORCED, {"tools": [TOOL], "tool_choice": "none"}),
    ),
}

_RESPONSE_FIELDS: dict[str, Iterable[Any]] = {
    "input": (
        *("", "a", [], None, 5, {}, [5], ["a"], [{}], LONG),
        *([{"role": role, "content": "a"}] for role in ("user", "assistant", "system", "developer", "tool", "x", None)),
        *(
            [{"role": "user", "content": content}]
            for content in _values("", None, [], 5, [{"type": "input_text", "text": "a"}])
        ),
        *(
            [{"role": "user", "content": [part]}]
            for part in (
                *({"type": "text", "text": "a"}, {"type": "output_text", "text": "a"}, {"type": "x", "text": "a"}),
                *({"type": "input_text"}, {"type": "input_image", "image_url": "x"}, {"type": "input_file"}),
            )
        ),
        [{"type": "message", "role": "user", "content": "a"}],
        [{"type": "message", "content": "a"}],
        [{"type": "x", "role": "user", "content": "a"}],
        [*HELLO, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm"}]}],
        [
            *HELLO,
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "sun"},
        ],
        [*HELLO, {"type": "function_call", "call_id": "1"}],
        [*HELLO, {"type": "function_call_output", "output": "sun"}],
        [*HELLO, {"type": "reasoning", "id": "r", "summary": []}],
        [*HELLO, {"type": "item_reference", "id": "r"}],
    ),
    "max_output_tokens": tuple(With(most, SHORT) for most in (*_INTEGERS, 1010, 1014, 1015, 1024, 1025)),
    "instructions": ("be", "", None, 5, []),
    "background": _SWITCHES,
    "include": ([], None, ["x"], ["message.output_text.logprobs"], ["reasoning.encrypted_content"], "x"),
    "max_tool_calls": (1, None, "x"),
    "metadata": ({}, {"a": "b"}, {"a": 5}, None, "x"),
    "parallel_tool_calls": (True, False, None, "x"),
    "previous_response_id": ("resp_absent", "x", "", None, 5),
    "prompt": (None, {"id": "a"}, "x"),
    "reasoning": (None, {}, {"effort": "low"}, {"effort": "x"}, "x"),
    "service_tier": ("auto", "flex", "x", None),
    "store": _SWITCHES,
    "stream": (False, None, "x"),
    "temperature": (0, 0.5, 2, 2.1, -1, None, "x"),
    "text": (
        *(None, {}, {"format": {"type": "text"}}, {"format": {"type": "x"}}, {"format": {"type": "json_object"}}, "x"),
        *({"format": None}, {"verbosity": "low"}, {"verbosity": "x"}, {"format": {"type": "json_schema"}}),
        {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["red green"]}}},
    ),
    "top_logprobs": (0, 1, 3, 20, 21, -1, None, "x", With(2, {"include": ["message.output_text.logprobs"]})),
    "top_p": (0, 0.5, 1, 1.1, None, "x"),
    "top_k": (0, 1, -1, -2, None, "x"),
    "truncation": ("auto", "disabled", "x", None),
    "user": ("a", None, 5),
    "priority": (0, 1, None, "x"),
    "request_id": ("resp_a", "a", None, 5),
    "cache_salt": ("a", "", None, "a/b"),
    "prompt_cache_key": ("a", None, 5),
    "seed": (0, 2**63 - 1, 2**63, None, "x"),
    "stop": ("zz", [], None, ["a", "b", "c", "d", "e"], ""),
    "stop_token_ids": ([5], [5504], None, "x"),
    "ignore_eos": (True, None),
    "presence_penalty": (2, 2.1, None),
    "frequency_penalty": (2, 2.1, None),
    "repetition_penalty": (1, 0, None),
    "structured_outputs": (FORCED, {}, {"regex": "("}, None, {"regex": "red", "choice": ["red"]}),
    "skip_special_tokens": (True, False, None),
    "include_stop_str_in_output": (True, None),
    "logit_bias": ({"5": 1}, {"x": 1}, None),
    "enable_response_messages": (True, False),
    "chat_template_kwargs": ({}, None, "x"),
    "vllm_xargs": ({}, {"a": {}}),
    "kv_transfer_params": ({}, None, "x"),
    "conversation": (None, "conv_a"),
    "unknown_field": (1,),
    "n": (1, 2),
    "model": ("l0", "", None, "absent", 5),
    "tools": (
        *([], None, "x", [{}], [FLAT_TOOL], [{"type": "function"}], [{"type": "x"}], [{"type": "web_search"}], [TOOL]),
    ),
    "tool_choice": (
        *("none", "auto", "required", "x", None, 5, {"type": "function", "name": "weather"}),
        *(
            With(choice, {"tools": [FLAT_TOOL]})
            for choice in (
                *("none", "auto", "required", {"type": "function", "name": "weather"}),
                {"type": "function", "name": "absent"},
            )
        ),
    ),
}

_MESSAGE_FIELDS: dict[str, Iterable[Any]] = {
    "model": ("l0", "", None, "absent", 5),
    "max_tokens": tuple(With(most, SHORT_MESSAGE) for most in (*_INTEGERS, 1010, 1014, 1015, 1024, 1025)),
    "messages": (
        *([], None, "x", [5], [{}], [None], {}),
        *([{"role": role, "content": "a"}] for role in ("user", "assistant", "system", "developer", "tool", "x", None)),
        *([{"role": "user", "content": content}] for content in _values("", None, [], 5, ["a"], [{}])),
        *(
            [{"role": "user", "content": [block]}]
            for block in (
                *({"type": "text", "text": "a"}, {"type": "text"}, {"type": "text", "text": 5}, {"type": "x"}),
                *({"text": "a"}, {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}),
                *({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},),
                *({"type": "thinking", "thinking": "a", "signature": "b"}, {"type": "redacted_thinking", "data": "a"}),
                *({"type": "tool_result", "tool_use_id": "1", "content": "sun"}, {"type": "tool_result"}),
                *({"type": "document", "source": {}}, {"type": "tool_reference", "tool_name": "a"}),
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "a"}]},
                {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": None},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {}},
                {"type": "server_tool_use", "id": "1", "name": "weather", "input": {}},
            )
        ),
        [*HELLO, {"role": "assistant", "content": "hm"}],
        [*HELLO, {"role": "system", "content": "late"}, *HELLO],
        [
            *HELLO,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "x"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sun"}]},
        ],
        [
            *HELLO,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}]},
        ],
        [{"role": "user", "content": LONG}],
    ),
    "system": ("be", "", None, 5, [], [{"type": "text", "text": "be"}], [{"type": "image"}], ["x"]),
    "stop_sequences": (["zz"], [], None, "x", ["a", "b", "c", "d", "e"], [""], [5]),
    "stream": (False, None, "x"),
    "temperature": (0, 0.5, 1, 1.5, 2, 2.1, -1, None, "x"),
    "top_k": (0, 1, -1, -2, None, "x"),
    "top_p": (0, 0.5, 1, 1.1, None),
    "metadata": ({"user_id": "a"}, {}, None, "x"),
    "thinking": (
        *(None, {"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled"}, {"type": "x"}),
        *({"type": "enabled", "budget_tokens": 1024}, {"type": "enabled", "budget_tokens": 1}, "x"),
    ),
    "output_config": (
        *(None, {}, {"effort": "low"}, {"effort": "x"}, {"format": {"type": "json_schema"}}, {"format": {"type": "x"}}),
        {"format": {"type": "json_schema", "schema": {"enum": ["red green"]}}},
    ),
    "cache_salt": ("a", "", None),
    "chat_template_kwargs": ({}, None, "x"),
    "kv_transfer_params": ({}, None, "x"),
    "vllm_xargs": ({}, {"a": {}}),
    "service_tier": ("auto", "x"),
    "container": (None, "x"),
    "mcp_servers": ([], [{}]),
    "context_management": (None, {}),
    "unknown_field": (1,),
    "seed": (1,),
    "tools": (
        *([], None, "x", [{}], [ANTHROPIC_TOOL], [{"name": "weather"}], [{"name": "weather", "input_schema": {}}]),
        *([{"type": "web_search_20250305", "name": "web_search"}], [{**ANTHROPIC_TOOL, "type": "custom"}]),
    ),
    "tool_choice": (
        *(None, {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "x"}, {"type": "tool"}, "auto"),
        *(
            With(choice, {"tools": [ANTHROPIC_TOOL]})
            for choice in (
                *({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "weather"}),
                {"type": "tool", "name": "absent"},
            )
        ),
    ),
}

_TOKENIZE_FIELDS: dict[str, Iterable[Any]] = {
    "prompt": (*_TEXTS, "<s>a</s>", "héllo ☃ 😀", "\ud800", LONG),
    "add_special_tokens": (True, False, None, "x", "true", 1),
    "return_token_strs": (True, False, None, "x"),
    "model": ("l0", "", None, "absent", 5),
    "messages": (HELLO, [], None, "x"),
    "unknown_field": (1,),
}
_TOKENIZE_CHAT_FIELDS: dict[str, Iterable[Any]] = {
    "messages": (
        *([], None, "x", [{}], [{"role": "developer", "content": "a"}], [{"role": "user", "content": "<s>a</s>"}]),
        [*HELLO, {"role": "assistant", "content": "hm"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "x", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ),
    "add_generation_prompt": (True, False, None, "x"),
    "continue_final_message": (True, False, None, With(True, {"add_generation_prompt": False})),
    "add_special_tokens": (True, False, None, "x"),
    "return_token_strs": (True, False, None),
    "chat_template": (None, "x"),
    "chat_template_kwargs": (None, {}, {"a": 1}, "x"),
    "tools": (None, [], [TOOL], "x"),
}
_DETOKENIZE_FIELDS: dict[str, Iterable[Any]] = {
    "tokens": (
        *([], [5], [1, 2], [0], [5462], [5463], [5503], [5504], [2**31], [2**63], [-1], None, "x", ["5"], ["x"], [1.5]),
        *([None], [[5]], [239, 190], list(range(3, 200))),
    ),
    "model": ("l0", "", None, "absent", 5),
    "unknown_field": (1,),
}

_FORCED_OUTPUTS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": "green"},
    {"stop": ["green", "red"], "include_stop_str_in_output": True},
    {"stop": " "},
    {"stop": "zz"},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"logprobs": 0},
    {"return_token_ids": True},
    {"min_tokens": 2, "stop": "red"},
    {"structured_outputs": {"choice": ["naïve café 😀 ☃"]}},
    {"structured_outputs": {"choice": ["naïve café 😀 ☃"]}, "logprobs": 0},
    {"structured_outputs": {"choice": ["naïve café 😀 ☃"]}, "return_token_ids": True},
    {"structured_outputs": {"choice": ["naïve café 😀 ☃"]}, "stop": "é"},
    {"structured_outputs": {"regex": "a{6}"}},
    {"structured_outputs": {"json": {"const": {"a": [1, 2]}}}},
    {"model": ADAPTER},
    {"ignore_eos": True},
    {"n": 2, "temperature": 1, "seed": 3},
)

_PREFIXES = ("sun moon star " * 60, "sun moon star " * 60, "sun moon star " * 50 + "end", "sun moon star " * 60)


def _plain() -> Iterator[Case]:
    yield from _routes()
    yield from _cached()
    for stream in (False, True):
        for options in _FORCED_OUTPUTS:
            more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            for path, base, forced in (
                ("/v1/completions", COMPLETION, options),
                ("/v1/chat/completions", CHAT, options if "logprobs" not in options else {**options, "logprobs": True}),
            ):
                body = {**base, "max_tokens": 30, "structured_outputs": FORCED, **forced, **more}
                yield Case(f"forced {path} {_shown(options)}{' stream' if stream else ''}", path, body)
        more = {"stream": True} if stream else {}
        for options in _values(
            {},
            {"max_output_tokens": 1},
            {"max_output_tokens": 2},
            {"stop": "green"},
            {"instructions": "be"},
        ):
            body = {**RESPONSE, "max_output_tokens": 30, "structured_outputs": FORCED, **options, **more}
            yield Case(f"forced /v1/responses {_shown(options)}{' stream' if stream else ''}", "/v1/responses", body)
        for options in _values(
            {}, {"max_tokens": 1}, {"max_tokens": 2}, {"stop_sequences": ["green"]}, {"system": "be"}
        ):
            body = {**MESSAGE, "max_tokens": 30, **SHORT_MESSAGE, **options, **more}
            yield Case(f"forced /v1/messages {_shown(options)}{' stream' if stream else ''}", "/v1/messages", body)
    yield from _vary("/v1/completions", COMPLETION, _COMPLETION_FIELDS)
    yield from _without("/v1/completions", COMPLETION, COMPLETION)
    yield from _vary("/v1/chat/completions", CHAT, _CHAT_FIELDS)
    yield from _without("/v1/chat/completions", {**CHAT, **SHORT}, CHAT)
    yield from _vary("/v1/responses", RESPONSE, _RESPONSE_FIELDS)
    yield from _without("/v1/responses", {**RESPONSE, **SHORT}, RESPONSE)
    yield from _vary("/v1/messages", MESSAGE, _MESSAGE_FIELDS)
    yield from _without("/v1/messages", MESSAGE, MESSAGE)
    yield from _vary("/tokenize", TOKENIZE, _TOKENIZE_FIELDS)
    yield from _without("/tokenize", TOKENIZE, TOKENIZE)
    yield from _vary("/tokenize", TOKENIZE_CHAT, _TOKENIZE_CHAT_FIELDS, "/tokenize chat")
    yield from _vary("/detokenize", DETOKENIZE, _DETOKENIZE_FIELDS)
    yield from _without("/detokenize", DETOKENIZE, DETOKENIZE)
    counted = {key: value for key, value in MESSAGE.items() if key not in ("max_tokens", "temperature")}
    fields = {name: _MESSAGE_FIELDS[name] for name in ("model", "system", "tools", "tool_choice", "thinking")}
    fields["messages"] = ([], [{"role": "user", "content": LONG}], [*HELLO, {"role": "assistant", "content": "hm"}])
    yield from _vary("/v1/messages/count_tokens", counted, fields)
    yield from _without("/v1/messages/count_tokens", counted, counted)
    yield from _batches()
    yield from _bodies()
    yield from _adapters()


def _cached() -> Iterator[Case]:
    """Prompts of which earlier ones leave blocks in the prefix cache."""
    for number, prompt in enumerate(_PREFIXES):
        for model in (MODEL, ADAPTER):
            body = {**COMPLETION, "model": model, "prompt": prompt, "structured_outputs": FORCED, "max_tokens": 9}
            yield Case(f"cached completion {number} {model}", "/v1/completions", body)
    for number, prompt in enumerate(_PREFIXES[:2]):
        messages = [{"role": "user", "content": prompt}]
        yield Case(f"cached chat {number}", "/v1/chat/completions", {**CHAT, "messages": messages})
        yield Case(f"cached response {number}", "/v1/responses", {**RESPONSE, "input": prompt})
        yield Case(f"cached message {number}", "/v1/messages", {**MESSAGE, "messages": messages})
    several = {**COMPLETION, "prompt": [_PREFIXES[0], "other " * 80]}
    yield Case("cached completion of two prompts", "/v1/completions", several)
    for name, salt in (("first", "a"), ("another", "b"), ("again", "a"), ("none", None)):
        body = {**COMPLETION, "prompt": _PREFIXES[0], "cache_salt": salt}
        yield Case(f"cached completion salt {name}", "/v1/completions", body)
    for name, more in (
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("echo", {"echo": True}),
        ("echo and logprobs", {"echo": True, "logprobs": 1}),
        ("stream", {"stream": True, "stream_options": {"include_usage": True}}),
    ):
        yield Case(f"cached completion {name}", "/v1/completions", {**COMPLETION, "prompt": _PREFIXES[0], **more})


def _routes() -> Iterator[Case]:
    paths = (
        *("/", "/health", "/ping", "/version", "/load", "/v1/models", "/v1/models/tiny", "/v1/models/absent", "/v1"),
        *("/openapi.json", "/docs", "/redoc", "/tokenizer_info", "/kv_event_sources", "/server_info"),
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *(
            "/v1/responses/resp_absent",
            "/v1/responses/x",
            "/v1/responses/resp_absent/cancel",
            "/tokenize",
            "/detokenize",
        ),
        *("/v1/embeddings", "/v1/audio/transcriptions", "/v1/rerank", "/invocations", "/generate", "/absent"),
        *("/v1/load_lora_adapter", "/adapters/absent", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
        *("/v1/completions/", "/v1/models/", "//v1/models", "/v1/MODELS", "/is_sleeping", "/sleep", "/wake_up"),
        *("/reset_prefix_cache", "/pause", "/inference/v1/generate", "/pooling", "/classify", "/score"),
    )
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        for path in paths if method in ("GET", "POST", "HEAD") else paths[:19]:
            if path not in ("/openapi.json", "/docs", "/redoc", "/generate") or method != "GET":
                yield Case(f"{method} {path}", path, None, method)
    yield Case("cancel of a response that is not there", "/v1/responses/resp_absent/cancel", {})
    yield Case("a query is ignored", "/v1/completions?stream=true", COMPLETION)
    yield Case("x-request-id", "/v1/completions", COMPLETION, headers=(("x-request-id", "abc"),))
    yield Case(
        "x-request-id beside request_id",
        "/v1/chat/completions",
        {**CHAT, "request_id": "d"},
        "POST",
        (("x-request-id", "abc"),),
    )
    for value in ("1", "x", "-1"):
        yield Case(f"x-vllm-priority {value}", "/v1/completions", COMPLETION, "POST", (("x-vllm-priority", value),))
    yield Case("invocations of a completion", "/invocations", COMPLETION)
    yield Case("invocations of a chat", "/invocations", CHAT)
    yield Case("invocations of neither", "/invocations", {"model": MODEL})
    yield Case("invocations of an adapter", "/invocations", {**CHAT, "model": ADAPTER})
    yield Case("invocations of an unknown model", "/invocations", {**CHAT, "model": "absent"})
    yield Case("invocations as a stream", "/invocations", {**COMPLETION, "stream": True})


def _batches() -> Iterator[Case]:
    path = "/v1/chat/completions/batch"
    base = {
        **CHAT,
        "messages": [HELLO, [{"role": "user", "content": "hello"}]],
        "structured_outputs": FORCED,
        "max_tokens": 9,
    }
    fields: dict[str, Iterable[Any]] = {
        "messages": ([HELLO], [HELLO, HELLO], [], [[]], HELLO, None, "x", [HELLO, []], [[{"role": "user"}]]),
        "stream": (True, False),
        "n": (1, 2, None, 0),
        "tools": ([TOOL], [], None),
        "use_beam_search": (True, False),
        "model": ("l0", "absent", None),
        "logprobs": (True, False),
        "top_logprobs": (With(2, {"logprobs": True}), 2),
        "max_tokens": (0, 1, 2000, None),
        "return_token_ids": (True,),
        "response_format": ({"type": "json_object"}, {"type": "x"}),
        "seed": (5,),
        "temperature": (2.1,),
        "cache_salt": ("a", "a/b"),
        "stop": ("green",),
    }
    yield from _vary(path, base, fields)
    yield from _without(path, base, base)


def _bodies() -> Iterator[Case]:
    whole = json.dumps(COMPLETION).encode()
    path = "/v1/completions"
    plain = {
        "empty": b"",
        "no JSON": b"{",
        "cut": whole[:-1],
        "trailing comma": whole[:-1] + b",}",
        "trailing text": whole + b"x",
        "two": whole + whole,
        "null": b"null",
        "list": b"[]",
        "text": b'"x"',
        "number": b"5",
        "byte-order mark": b"\xef\xbb\xbf" + whole,
        "UTF-16": whole.decode().encode("utf-16"),
        "UTF-16 without mark": whole.decode().encode("utf-16-le"),
        "UTF-32": whole.decode().encode("utf-32"),
        "Latin-1": whole.replace(b"hello", b"h\xe9llo"),
        "NaN": whole[:-1] + b', "top_p": NaN}',
        "Infinity": whole[:-1] + b', "top_p": Infinity}',
        "NaN in an unknown field": whole[:-1] + b', "other": NaN}',
        "a name twice": whole[:-1] + b', "max_tokens": 5}',
        "a name twice, the second wrong": whole[:-1] + b', "max_tokens": "x"}',
        "a comment": b"/* */" + whole,
        "single quotes": whole.replace(b'"', b"'"),
        "a control character": whole.replace(b"hello", b"he\nllo"),
        "a lone surrogate": whole.replace(b"hello", b"he\\ud800llo"),
        "a number of 5,000 digits": whole[:-1] + b', "seed": ' + b"1" * 5000 + b"}",
        "blanks": b" \n" + whole + b" \n",
        "a list nested 50 deep": whole[:-1] + b', "other": ' + b"[" * 50 + b"]" * 50 + b"}",
    }
    for name, body in plain.items():
        yield Case(f"body {name}", path, body)
        if name in ("empty", "no JSON", "null", "list", "byte-order mark"):
            for other in (
                "/v1/chat/completions",
                "/v1/responses",
                "/v1/messages",
                "/tokenize",
                "/v1/load_lora_adapter",
                "/invocations",
            ):
                yield Case(f"body {name} {other}", other, body)
    for kind in (
        *(
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
            "application/json; charset=utf-8",
        ),
        *("APPLICATION/JSON", "application/vnd.api+json", "text/json", "json", "application/jsonx"),
    ):
        for other, base in (
            (path, COMPLETION),
            ("/v1/chat/completions", CHAT),
            ("/v1/messages", MESSAGE),
            ("/tokenize", TOKENIZE),
        ):
            yield Case(f"content type {kind!r} {other}", other, base, "POST", (("content-type", kind),))


def _adapters() -> Iterator[Case]:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    yield from _vary(load, {"lora_path": "/nowhere/a"}, {"lora_name": ("x", "", None, 5, MODEL, ADAPTER)})
    yield from _vary(load, {"lora_name": "x"}, {"lora_path": ("/nowhere/a", "", None, 5)})
    yield from _without(load, {"lora_name": "x", "lora_path": "/nowhere/a"}, ("lora_name", "lora_path"))
    yield from _vary(unload, {}, {"lora_name": ("x", "", None, 5, MODEL), "lora_int_id": (1, "x")})
    yield Case("unload without anything", unload, {})
    yield Case("unload by name and number", unload, {"lora_name": "absent", "lora_int_id": 5})
    yield from _vary("/adapters", {"src": "/nowhere/a"}, {"name": ("x", "", None, MODEL, ADAPTER)})
    yield from _vary("/adapters", {"name": "x"}, {"src": ("/nowhere/a", "", None)})
    yield Case("removal of an unknown adapter", "/adapters/absent", None, "DELETE")
    yield Case("removal of the base model", "/adapters/tiny", None, "DELETE")
    yield Case("unload l1", unload, {"lora_name": "l1"})
    yield Case("completion of an unloaded adapter", "/v1/completions", {**COMPLETION, "model": "l1"})
    yield Case("unload l1 again", unload, {"lora_name": "l1"})
    yield Case("models after an unload", "/v1/models", None, "GET")


def _tools() -> Iterator[Case]:
    yield from _vary("/v1/chat/completions", CHAT, _TOOL_FIELDS)
    named = {"type": "function", "name": "weather"}
    for choice in ("required", named, "none"):
        for stream in (False, True):
            body = {**RESPONSE, "tools": [FLAT_TOOL], "tool_choice": choice, "max_output_tokens": 60, "stream": stream}
            yield Case(f"/v1/responses tool_choice={_shown(choice)} stream={stream}", "/v1/responses", body)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}, {"type": "none"}):
        for stream in (False, True):
            body = {**MESSAGE, "tools": [ANTHROPIC_TOOL], "tool_choice": choice, "max_tokens": 60, "stream": stream}
            yield Case(f"/v1/messages tool_choice={_shown(choice)} stream={stream}", "/v1/messages", body)


def _key() -> Iterator[Case]:
    good, bad = (("authorization", "Bearer secret"),), (("authorization", "Bearer other"),)
    for name, headers in {
        "none": (),
        "good": good,
        "bad": bad,
        "no scheme": (("authorization", "secret"),),
        "small scheme": (("authorization", "bearer secret"),),
        "other scheme": (("authorization", "Basic secret"),),
        "x-api-key": (("x-api-key", "secret"),),
    }.items():
        for path, base in (("/v1/completions", COMPLETION), ("/v1/messages", MESSAGE), ("/tokenize", TOKENIZE)):
            yield Case(f"key {name} {path}", path, base, "POST", headers)
        for path in ("/v1/models", "/health", "/version", "/load", "/ping", "/absent", "/v1/absent"):
            yield Case(f"key {name} {path}", path, None, "GET", headers)
    yield Case("key none, wrong body", "/v1/completions", {})
    yield Case("key none, OPTIONS", "/v1/completions", None, "OPTIONS")
