"""Chat templates, as models bring them."""

import pytest

from lorrery.chassis.errors import InvalidRequest, SettingsError
from lorrery.tokenizer.chat import ChatTemplate

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


def rendered(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, "here").render(MESSAGES, variables)


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


def test_a_template_that_is_none() -> None:
    with pytest.raises(SettingsError, match="here: the chat template cannot be read"):
        ChatTemplate("{% if %}", {}, "here")
