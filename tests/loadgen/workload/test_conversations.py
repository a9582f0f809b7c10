import io
import json

import numpy as np
import pytest

from lorrery.loadgen.workload.request import TraceError
from lorrery.loadgen.workload.traces import Trace


def texts_of(text):
    found = Trace(io.StringIO(text)).conversations()
    return [found.texts(row) for row in range(len(found))]


def entry(*values):
    roles = ("human", "gpt")
    return {"id": "x", "conversations": [{"from": roles[n % 2], "value": text} for n, text in enumerate(values)]}


def words(number):
    return " ".join(["w"] * number)


def encode(text):
    return list(range(len(text.split())))


def played(entries, max_turns=1, seed=0):
    found = Trace(io.StringIO(json.dumps(entries))).conversations()
    return list(found.played(encode, max_turns, np.random.default_rng(seed)))


def test_a_list_and_lines_read_alike():
    entries = [entry("a", "b"), entry("c", "d", "e")]
    assert texts_of(json.dumps(entries)) == [["a", "b"], ["c", "d", "e"]]
    assert texts_of("\ufeff" + "\n".join(map(json.dumps, entries)) + "\n\n") == [["a", "b"], ["c", "d", "e"]]


def test_half_a_surrogate_pair_is_replaced():
    text = json.dumps([entry("\ud83d\ude00 \ud800", "b")])
    assert "\\ud800" in text
    assert texts_of(text) == [["\U0001f600 \ufffd", "b"]]


def test_conversations_of_one_message_are_left_out():
    assert texts_of(json.dumps([entry("a"), entry(), entry("a", "b")])) == [["a", "b"]]


@pytest.mark.parametrize(
    ("question", "answer", "is_kept"),
    [(4, 4, True), (3, 4, False), (4, 3, False), (1024, 1024, True), (1025, 4, False), (1024, 1025, False)],
)
def test_lengths_are_those_of_vllms_benchmark(question, answer, is_kept):
    found = played([entry(words(question), words(answer))])
    assert [(len(ids), output) for pairs in found for _, ids, output in pairs] == [(question, answer)] * is_kept


def test_turns_go_on_until_one_breaks_a_rule():
    conversation = entry(words(5), words(6), words(7), words(8), words(2), words(9), words(10))
    assert [len(pairs) for pairs in played([conversation], max_turns=9)] == [2]
    assert [len(pairs) for pairs in played([conversation], max_turns=1)] == [1]


def test_the_order_is_the_seeds():
    entries = [entry(words(4 + number), words(5)) for number in range(50)]

    def order(seed):
        return [len(pairs[0][1]) for pairs in played(entries, seed=seed)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == list(range(4, 54))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "not JSON"),
        ('{"conversations": [', "line 1: not JSON"),
        ('[{"conversations": []} 1]', "after entry 1 a comma is missing"),
        (" []\n", "no conversation"),
        ('{"conversations": []}\n{"a": 1}', "line 2: expected an object with a list `conversations`"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1: each message"),
    ],
)
def test_what_is_not_of_the_format_is_refused(text, why):
    with pytest.raises(TraceError, match=why):
        texts_of(text)
