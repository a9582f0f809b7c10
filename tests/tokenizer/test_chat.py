"""Chat templates, as models bring them."""

import tracemalloc

import pytest

from lorrery.service.errors import InvalidRequest, SettingsError
from lorrery.tokenizer.base import TextTooLongError
from lorrery.tokenizer.chat import PLAIN_TEMPLATE, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def rendered(source: str, most_characters: int = 10_000, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, "here").render(MESSAGES, most_characters, variables)


def test_a_models_own_template() -> None:
    begun = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert rendered(CHATML, add_generation_prompt=False) == begun
    assert rendered(CHATML, add_generation_prompt=True) == begun + "<|im_start|>assistant\n"


def test_what_templates_may_use() -> None:
    assert (
        rendered("{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}")
        == '{"role": "user", "content": "hi"}'
    )
    assert rendered("{{ word }}{{ bos_token }}{{ tools is none }}", word="é<") == "é<<s>True"
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.more }}", "has no attribute 'missing'"),
        ("{{ messages[5].role }}", "no element 5"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange"),
    ],
)
def test_what_a_template_refuses_is_the_clients_fault(source: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        rendered(source)
    assert caught.value.facts["field"] == "messages"


@pytest.mark.parametrize("variables", [{}, {"most characters": 10**9}])
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10_000) %}{{ tools | tojson }}{% endfor %}",
        "{{ tools | tojson(indent=4) }}",
        "{% set text = tools | tojson(indent=4) %}{{ text[:10] }}",
        "{% macro write() %}{{ tools | tojson(indent=4) }}{% endmacro %}{{ write() }}",
    ],
)
def test_rendering_stops_at_the_longest_text_that_could_be_a_prompt(source: str, variables: dict[str, object]) -> None:
    deep: object = 1
    for _ in range(60):
        deep = [deep]
    tracemalloc.start()
    with pytest.raises(TextTooLongError):
        rendered(source, 10_000, tools=[deep] * 1000, **variables)  # indented, it has seven million characters
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000


def test_a_text_of_the_greatest_length_is_rendered() -> None:
    for source in ("{{ tools | tojson(indent=2) }}", "{% for one in tools %}{{ one }}{{ one }}{% endfor %}!"):
        text = rendered(source, tools=["x", {"y": 1}])
        assert rendered(source, len(text), tools=["x", {"y": 1}]) == text
        with pytest.raises(TextTooLongError):
            rendered(source, len(text) - 1, tools=["x", {"y": 1}])
    assert rendered("{{ tools | tojson(indent=2) }}", tools=["é", {}]) == '[\n  "é",\n  {}\n]'


def turns_of(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


PLAIN = ChatTemplate(PLAIN_TEMPLATE, {"bos_token": "<s>"}, "here")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ((("developer", "be brief"), ("user", "hi")), "<s>system: be brief\nuser: hi\n"),
        ((("user", "hi"), ("developer", "be brief")), "<s>system: be brief\nuser: hi\n"),
        ((("system", "a"), ("user", "hi"), ("developer", "b")), "<s>system: a\n\nb\nuser: hi\n"),
        ((("user", "hi"), ("system", "a")), "<s>user: hi\nsystem: a\n"),
    ],
)
def test_developers_speak_for_the_system_where_a_template_does_not_know_them(
    messages: tuple[tuple[str, str], ...], text: str
) -> None:
    assert PLAIN.render(turns_of(*messages), 1000, {}) == text


def test_a_template_that_knows_developers_gets_them() -> None:
    knows = ChatTemplate("{% for m in messages %}{{ m.role if m.role == 'developer' }}.{% endfor %}", {}, "here")
    assert knows.render(turns_of(("user", "hi"), ("developer", "x")), 1000, {}) == ".developer."


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PLAIN_TEMPLATE, "<s>user: ab\n"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}", "ab"),
        (
            (
                "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
                "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
            ),
            "ab",
        ),
    ],
)
def test_parts_are_lines_unless_the_template_goes_through_them(source: str, text: str) -> None:
    messages = [{"role": "user", "content": ["a", "", "b"]}]
    assert ChatTemplate(source, {"bos_token": "<s>"}, "here").render(messages, 1000, {}) == text


@pytest.mark.parametrize("content", ["yes", "yes ", "", " ", "no\n", "\U000f4a7c and"])
def test_a_message_that_is_continued_ends_the_text(content: str) -> None:
    messages = turns_of(("user", "hi"), ("assistant", content))
    assert PLAIN.render(messages, 1000, {}, to_be_continued=True) == f"<s>user: hi\nassistant: {content}"
    stripped = ChatTemplate("{% for m in messages %}[{{ m.content.strip() }}]{% endfor %}", {}, "here")
    assert stripped.render(messages, 1000, {}, to_be_continued=True) == f"[hi][{content.strip()}"
    assert messages[1]["content"] == content


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[1].content | upper }}", "x"])
def test_a_template_that_does_not_show_the_message_cannot_continue_it(source: str) -> None:
    with pytest.raises(InvalidRequest, match="does not show the whole content"):
        ChatTemplate(source, {}, "here").render(
            turns_of(("user", "hi"), ("assistant", "yes")), 1000, {}, to_be_continued=True
        )


def test_a_template_that_is_none() -> None:
    with pytest.raises(SettingsError, match="here: the chat template cannot be read"):
        ChatTemplate("{% if %}", {}, "here")
