"""How streams of llm-mock and of S-LoRA are spelt."""

import json

from hypothesis import given
from hypothesis import strategies as st

from lorrery.router.edges.slora import LlmMockShape, SloraShape
from lorrery.router.http.answer import Collected
from lorrery.router.logprobs import OutputLogprobs, Words
from lorrery.tokenizer.base import EOS_ID
from lorrery.tokenizer.file import BuiltinTokenizer
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


def test_an_event_of_slora_has_the_log_probability_of_its_last_token_at_that_tokens_place() -> None:
    tokenizer = BuiltinTokenizer()
    words = tokenizer.word_ids
    logprobs = OutputLogprobs(Words(words), 5, EOS_ID, context=7)  # each position has a distribution of its own
    shape = SloraShape(tokenizer, return_details=True)
    pieces = [[words[1]], [words[2], words[3]], [words[4], words[5], words[1]]]
    events = [shape.event(0, router_pb2.GenerateResponse(token_ids=piece), logprobs) for piece in pieces]
    tokens = [json.loads(event.removeprefix(b"data:"))["token"] for event in events]
    last = [(0, words[1]), (2, words[3]), (5, words[1])]
    assert [(token["id"], token["logprob"]) for token in tokens] == [
        (token_id, logprobs.at(position, token_id, 0).logprob) for position, token_id in last
    ]
    assert tokens[0]["logprob"] != tokens[2]["logprob"]
