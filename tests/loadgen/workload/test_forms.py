"""Each form of file that is recognised, by an excerpt that was made up here in its documented format."""

import io
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lorrery
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.source import BuiltWorkload, build_workload
from lorrery.loadgen.workload.request import TraceError
from lorrery.loadgen.workload.traces import Trace
from lorrery.service.errors import FormatError, SettingsError

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,100,7\r\n2023-11-16 18:17:04.0799601,30,4"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,100,7\n2024-05-10 00:00:00.109930+00:00,30,4\n"
)
BURST_GPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,100,7,107,Conversation log\n9,GPT-4,50,0,50,API log\n45,GPT-4,30,4,34,API log\n"
)
BURST_GPT_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5.0,a-1,2.5,ChatGPT,100,7,107,Conversation log\n45.0,,1.0,GPT-4,30,4,34,API log\n"
)
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,100,7\n1.25,30.0,4.0\n"
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,2,0,0.5,1,100,7\n1,2,0,2.5e0,1,30,4\n"
)
SERVING_SIM_TABLE = "input_toks\toutput_toks\tarrival_time_ns\n100\t7\t0\n30\t4\t250000000\n"
SERVING_SIM = (
    '{"input_toks": 100, "output_toks": 7, "arrival_time_ns": 4059740}\n'
    '{"input_toks": 30, "output_toks": 4, "arrival_time_ns": 1004059740.0}\n'
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 100, "output_length": 7, "hash_ids": [4]}\n'
    '{"timestamp": 2500, "input_length": 30, "output_length": 4, "hash_ids": [5]}\n'
)
QWEN = (
    '{"chat_id": 8, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 100, "output_length": 7, "type": "text",'
    ' "turn": 1, "hash_ids": [1, 2, 3, 4, 5, 6, 7]}\n'
    '{"chat_id": 9, "parent_chat_id": 8, "timestamp": 63.6, "input_length": 30, "output_length": 4, "type": "text",'
    ' "turn": 2, "hash_ids": [1, 9]}\n'
)

RECORDED = {
    "azure 2023": (AZURE_2023, "Azure's LLM inference trace", 0.1000001),
    "azure 2024": (AZURE_2024, "Azure's LLM inference trace", 0.1),
    "burstgpt": (
        BURST_GPT,
        "BurstGPT's trace; left out: 1 with 0 output tokens, which failed when recorded",
        40,
    ),
    "burstgpt 2": (BURST_GPT_2, "BurstGPT's trace", 40.0),
    "vidur": (VIDUR, "Vidur's trace", 1.25),
    "splitwise": (SPLITWISE, "splitwise-sim's trace", 2.0),
    "serving sim, table": (SERVING_SIM_TABLE, "LLMServingSim's table", 0.25),
    "serving sim": (SERVING_SIM, "LLMServingSim's requests", 1.0),
    "mooncake": (MOONCAKE, "rows of Mooncake's format; prompts in blocks of 512 tokens", 2.5),
    "qwen": (QWEN, "Qwen-Bailian's trace; prompts in blocks of 16 tokens", 2.5),
}


def built(path: Path, **options: Any) -> BuiltWorkload:
    return build_workload(LoadOptions(workload=options.pop("workload", "trace"), trace=path, **options), ["a", "b"])


def written(folder: Path, text: str) -> Path:
    path = folder / "some.file"
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_recognised_by_their_header_or_keys(name: str, tmp_path: Path) -> None:
    text, what, second = RECORDED[name]
    made = built(written(tmp_path, text))
    assert made.notes[0] == f"some.file: {what}"
    assert [(one.at_seconds, one.prompt_tokens, one.output_tokens) for one in made.requests] == [
        (0.0, 100, 7),
        (pytest.approx(second, abs=1e-9), 30, 4),
    ]
    assert len(built(tmp_path / "some.file", num_requests=1).requests) == 1
    if text.startswith("{"):
        listed = "[\n" + ",\n".join(text.splitlines()) + "\n]\n"
        assert list(built(written(tmp_path, listed)).requests) == list(made.requests)


@pytest.mark.parametrize("name", RECORDED)
def test_a_run_from_python_takes_any_of_them(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, RECORDED[name][0])
    result = lorrery.simulate(None, {"trace": str(path)}, workers=1)
    assert result.columns.prompt_tokens.tolist() == [100, 30]
    assert result.columns.completed.all()


@pytest.mark.parametrize(
    ("text", "expected", "tokens"),
    [
        ([[10, 1], [16, 1], [17, 2]], 16, None),
        ([[64, 1], [65, 2], [500, 8]], 64, None),
        ([[700, 2], [1025, 3]], 512, None),  # 1,024 would fit as well
        ([[48, 1], [49, 2], [100, 3]], 48, 48),
    ],
)
def test_blocks_have_the_size_that_all_rows_fit(text: list[list[int]], expected: int, tokens: int | None) -> None:
    rows = [
        {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": list(range(count))}
        for length, count in text
    ]
    lines = "\n".join(map(json.dumps, rows))
    for request in Trace(io.StringIO(lines)).requests(block_tokens=tokens):
        assert request.block_tokens == expected


@pytest.mark.parametrize(
    ("lengths", "tokens", "message"),
    [
        ([(48, 1), (49, 2)], None, "hash_ids fit blocks of 48 tokens; say which: --block-tokens N"),
        ([(16, 1), (17, 1), (20, 4)], None, "line 3: 4 hash_ids for 20 tokens; no size of blocks fits this row and"),
        ([(16, 1), (17, 1)], 16, "line 2: 1 hash_ids for 17 tokens; with --block-tokens 16 expected 2"),
        ([(16, 0)], 16, "--block-tokens 16: no row has hash_ids"),
    ],
)
def test_blocks_that_do_not_fit_say_what_to_do(
    lengths: list[tuple[int, int]], tokens: int | None, message: str
) -> None:
    rows = [
        {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": list(range(count))}
        for length, count in lengths
    ]
    with pytest.raises(TraceError, match=message):
        Trace(io.StringIO("\n".join(map(json.dumps, rows)))).requests(block_tokens=tokens)


def test_hashes_have_64_bits_and_all_of_a_prefix_is_found() -> None:
    big = 2**64 - 1
    rows = [
        {"timestamp": 0, "input_length": 64, "output_length": 4, "hash_ids": [big, big - 1, 2**63, 7]},
        {"timestamp": 60_000, "input_length": 80, "output_length": 4, "hash_ids": [big, big - 1, 2**63, 7, 1]},
    ]
    cluster = {"engine": "vllm", "model": "Llama-3.1-8B", "worker": {"gpu": "H100-SXM"}}
    made = Trace(io.StringIO("\n".join(map(json.dumps, rows)))).requests()
    assert made[0].hash_ids == array("Q", [big, big - 1, 2**63, 7])
    requests = lorrery.Requests(
        [0, 60],
        [64, 80],
        [4, 4],
        hash_ids=[row["hash_ids"] for row in rows],
        block_tokens=16,  # type: ignore[misc]
    )
    assert lorrery.simulate(cluster, requests, workers=1).columns.cached_tokens.tolist() == [0, 64]


SESSIONS = """\
{"session_id": "s", "timestamp": 1000, "input_length": 20, "output_length": 4, "hash_ids": [1, 2]}
{"timestamp": 1500, "input_length": 9, "output_length": 4}
{"session_id": "s", "delay": 2000, "input_length": 40, "output_length": 4, "hash_ids": [1, 2, 3]}
{"session_id": "t", "input_length": 7, "output_length": 3}
{"session_id": "t", "input_length": 8, "output_length": 3}
"""


def test_a_row_with_a_delay_follows_the_answer_of_its_session_before(tmp_path: Path) -> None:
    made = built(written(tmp_path, SESSIONS), block_tokens=16)
    assert made.notes[0].endswith("sent after the answer to the one before of their session: 2")
    found = [
        (one.at_seconds, one.prompt_tokens, one.turn and (one.turn.number, one.turn.think_seconds))
        for one in made.requests
    ]
    assert found == [
        (0.0, 7, (0, 0.0)),
        (0.0, 8, (1, 0.0)),
        (1.0, 20, (0, 0.0)),
        (1.0, 40, (1, 2.0)),
        (1.5, 9, None),
    ]
    fast = built(tmp_path / "some.file", block_tokens=16, speed_up=4.0).requests
    assert [one.turn and one.turn.think_seconds for one in fast] == [0.0, 0.0, 0.0, 0.5, None]
    chosen = built(tmp_path / "some.file", block_tokens=16, adapters="all").requests
    assert chosen[2].adapter_id == chosen[3].adapter_id
    columns = lorrery.simulate(
        {"engine": "vllm", "model": "Llama-3.1-8B", "worker": {"gpu": "H100-SXM"}},
        {"trace": tmp_path / "some.file", "block_tokens": 16},
        workers=1,
    ).columns
    sent = dict(zip(columns.prompt_tokens.tolist(), columns.arrival_seconds.tolist(), strict=True))
    ended = dict(zip(columns.prompt_tokens.tolist(), columns.end_seconds.tolist(), strict=True))
    assert sent[40] == pytest.approx(ended[20] + 2.0)
    assert sent[8] == pytest.approx(ended[7])
    assert columns.cached_tokens[columns.prompt_tokens == 40].tolist() == [16]  # of the first: 16 of 20 are a block


def test_requests_from_python_can_say_the_same() -> None:
    requests = lorrery.Requests(
        [1.0, 1.5, 0.0],
        [20, 9, 40],
        [4, 4, 4],
        hash_ids=[[1, 2], None, [1, 2, 3]],
        block_tokens=16,
        session_id=["s", None, "s"],
        think_seconds=[0, 0, 2.0],
    )
    rows = requests.rows()
    assert [(row.index, row.at_seconds) for row in rows] == [(0, 1.0), (2, 1.0), (1, 1.5)]
    columns = lorrery.simulate(None, requests, workers=1).columns
    assert columns.arrival_seconds[2] == pytest.approx(columns.end_seconds[0] + 2.0)


def test_sessions_of_serving_sim_follow_their_tools(tmp_path: Path) -> None:
    calls = [
        {"input_toks": 17, "output_toks": 4, "tool_duration_ns": 500_000_000, "input_tok_ids": list(range(17))},
        {"input_toks": 33, "output_toks": 4, "tool_duration_ns": 0, "input_tok_ids": list(range(33))},
    ]
    path = written(tmp_path, json.dumps({"session_id": "x", "arrival_time_ns": 7, "sub_requests": calls}))
    made = built(path)
    assert "LLMServingSim's sessions; prompts in blocks of 16 tokens; sent after the answer" in made.notes[0]
    first, second = made.requests
    assert (second.turn.number, second.turn.think_seconds) == (1, 0.5)
    assert first.hash_ids[0] == second.hash_ids[0]  # of sixteen equal tokens
    assert first.hash_ids[1] != second.hash_ids[1]
    assert len(set(second.hash_ids)) == 3
    assert len(built(path, num_requests=1).requests) == 1


LMSYS = {
    "conversation_id": "c",
    "model": "vicuna-13b",
    "conversation": [
        {"role": "user", "content": "What is the time?"},
        {"role": "assistant", "content": "It is late."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "No one knows."},
    ],
    "turn": 2,
}
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "clock"}}]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "And now?"},
    ]
}


@pytest.mark.parametrize(
    ("lines", "title", "texts"),
    [
        ([LMSYS] * 2, "LMSYS' conversations", ["What is the time?", "Why?"]),
        ([MESSAGES] * 2, "OpenAI's lists of messages", ["Be brief.\nWhat is", "12:00"]),
        ([MESSAGES["messages"]] * 2, "lists of messages", ["Be brief.\nWhat is", "12:00"]),
    ],
)
def test_conversations_are_recognised_by_their_keys(
    lines: list[Any], title: str, texts: list[str], tmp_path: Path
) -> None:
    made = built(written(tmp_path, "\n".join(map(json.dumps, lines)) + "\n"), turns=(1, 9), rate=5.0)
    assert made.notes[0].startswith(f"some.file: {title}")
    assert ("parts of messages that are no text" in made.notes[0]) == ("time" not in texts[0])
    assert [one.turn.text for one in made.requests] == texts * 2
    assert all(one.output_tokens > 1 for one in made.requests)
    assert list(built(tmp_path / "some.file", workload="sharegpt", turns=(1, 9), rate=5.0).requests) == made.requests


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (VIDUR, {"rate": 5.0}, "some.file is Vidur's trace: --rate 5 goes with .*; --workload is trace; its requests"),
        (VIDUR, {"workload": "sharegpt"}, "--workload sharegpt: .*: Vidur's trace, with recorded times; leave out --w"),
        (VIDUR, {"turns": (1, 2)}, "some.file is Vidur's trace: --turns goes with --workload chat and sharegpt only"),
        (json.dumps(LMSYS), {"jitter": 2.0}, "is LMSYS' conversations: --jitter goes with --workload azure, mooncake"),
        (json.dumps(LMSYS), {"workload": "azure"}, "--workload azure: .*: LMSYS' conversations, with no times; leave"),
        (VIDUR, {"turns": (1, 2), "jitter": 1.0}, "--turns goes with --workload chat and sharegpt only"),
        (VIDUR, {"workload": "poisson"}, "--trace does not go with --workload poisson; --workload trace plays a file"),
    ],
)
def test_options_are_held_against_what_the_file_is(
    text: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        built(written(tmp_path, text), **options)


@pytest.mark.parametrize(
    "text",
    [
        "num_prefill_tokens,num_decode_tokens\n1,2\n",
        "PAR1\n",
        '{"prompt": "a", "completion": "b"}\n',
        '["a", "b"]\n',
        '"text"\n',
    ],
)
def test_any_other_file_is_pointed_to_requests(text: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no known form of trace; it begins with .* lorrery\.Requests"):
        built(written(tmp_path, text))
    (tmp_path / "binary").write_bytes(b"PAR1\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"not a text file; .* lorrery\.Requests"):
        built(tmp_path / "binary")


def test_bursts_are_told_by_the_files_own_times(tmp_path: Path) -> None:
    def notes(stamps: list[float]) -> str:
        rows = [json.dumps({"timestamp": at, "input_length": 9, "output_length": 2}) for at in stamps]
        return " ".join(built(written(tmp_path, "\n".join(rows))).notes)

    assert "9 of 9 requests share their time with others, and times step by 3 s" in notes([0, 3000, 6000] * 3)
    assert "(--jitter 1 spreads them)" in notes([0, 1000, 2000] * 3)
    assert "--jitter" not in notes([175.0 * number for number in range(9)])
    assert "--jitter" not in notes([0] * 9)


def test_what_does_not_fit_in_memory_goes_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    rows = [
        {"timestamp": int(at), "input_length": 16 * 50, "output_length": 2, "hash_ids": rng.integers(2**62, size=50)}
        for at in rng.integers(10_000, size=200)
    ]
    lines = [json.dumps(row | {"hash_ids": row["hash_ids"].tolist()}) for row in rows]  # type: ignore[attr-defined]
    path = written(tmp_path, "\n".join(lines))
    whole = list(built(path).requests)
    monkeypatch.setattr("lorrery.loadgen.source.MEMORY_BYTES", 1_000)
    monkeypatch.setattr("lorrery.loadgen.workload.traces._READ", 64)
    assert list(built(path).requests) == whole
    assert list(built(written(tmp_path, "[" + ", ".join(lines) + "]")).requests) == whole
    talks = [json.dumps(LMSYS), json.dumps({"conversation": LMSYS["conversation"][:2]})] * 20
    played = built(written(tmp_path, "\n".join(talks)), turns=(1, 9)).requests
    monkeypatch.undo()
    assert built(tmp_path / "some.file", turns=(1, 9)).requests == played
    assert len(played) == 60
