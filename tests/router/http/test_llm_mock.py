"""How llm-mock's streams are spelt."""

import json

from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.edges.slora import LlmMockShape
from lorrery.router.http.answer import Collected
from lorrery.v1 import router_pb2

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(prompt=TEXTS, n=st.integers(1, 4), said=st.lists(st.tuples(st.integers(0, 3), TEXTS), max_size=8))
def test_every_event_has_all_texts_so_far_as_json_spells_them(prompt: str, n: int, said: list[tuple[int, str]]) -> None:
    shape, whole = LlmMockShape(prompt, n), LlmMockShape(prompt, n)
    texts = [prompt] * n
    choices = [Collected() for _ in texts]
    for index, text in ((index % n, text) for index, text in said):
        texts[index] += text
        choices[index].text.write(text)
        event = shape.event(index, router_pb2.GenerateResponse(text=text), None)
        assert event == json.dumps({"text": texts}).encode() + b"\0"
    assert "".join(whole.whole(choices)) == json.dumps({"text": texts})
