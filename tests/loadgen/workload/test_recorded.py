import io
import pathlib
from array import array

import numpy as np
import pytest

from lorrery.loadgen.workload.recorded import spread
from lorrery.loadgen.workload.request import TraceError
from lorrery.loadgen.workload.traces import read_requests
from lorrery.service.files.reading import open_text

TRACES = pathlib.Path(__file__).parents[3] / "deploy" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def read(lines, limit=None):
    return read_requests(io.StringIO("\n".join(line.removesuffix("\n") for line in lines)), limit)


def read_lines(name):
    with open_text(TRACES / name) as file:
        return file.readlines()


def test_azure_reads_crlf_seven_digits_and_a_last_line_without_end():
    lines = [HEADER, "2023-11-16 18:15:46.6805900,374,44\r\n", "2023-11-16 18:15:50.9951690,396,109"]
    workload = read(lines)
    assert [request.at_seconds for request in workload] == [0.0, 4.314579]
    assert [(request.prompt_tokens, request.output_tokens) for request in workload] == [(374, 44), (396, 109)]


def test_azure_keeps_a_tenth_of_a_microsecond_and_takes_other_stamps():
    lines = [
        HEADER,
        "2024-05-12 23:59:59.9999999+00:00,1,1\n",
        "2024-05-13 00:00:00,2,2\n",
        "\n",
        "2024-05-13 00:00:01.5Z,3,0\n",
    ]
    workload = read(lines)
    assert [request.at_seconds for request in workload] == [0.0, 1e-7, 1.5000001]
    assert workload[-1].output_tokens == 1


def test_azure_takes_iso_stamps_and_offsets():
    rows = ["2023-11-16T18:15:46+02:00,1,2", "2023-11-16T16:15:48Z,1,2", "2023-11-16 16:15:49.5,1,2"]
    assert [request.at_seconds for request in read([HEADER, *rows])] == [0.0, 2.0, 3.5]


def test_azure_sorts_by_time_and_stops_at_the_limit():
    lines = [HEADER, "2023-11-16 00:00:02,2,2\n", "2023-11-16 00:00:01,1,1\n", "not read"]
    workload = read(lines, limit=2)
    assert [(request.index, request.at_seconds, request.prompt_tokens) for request in workload] == [
        (0, 0.0, 1),
        (1, 1.0, 2),
    ]


def test_rows_of_one_time_keep_their_order_in_a_file_that_is_not_in_order():
    # More than sixteen: fewer are sorted by insertion, which keeps the order of equals by itself.
    seconds = [row % 3 for row in range(60)]
    azure = [HEADER, *(f"2023-11-16 00:00:0{at},{row + 1},1\n" for row, at in enumerate(seconds))]
    mooncake = [
        f'{{"timestamp": {1000 * at}, "input_length": {row + 1}, "output_length": 1, "hash_ids": []}}'
        for row, at in enumerate(seconds)
    ]
    for lines in (azure, mooncake):
        assert [(one.at_seconds, one.prompt_tokens) for one in read(lines)] == [
            (at, row + 1) for at in range(3) for row in range(at, 60, 3)
        ]


def test_azure_takes_quotes_and_columns_in_any_order():
    lines = [
        '"ContextTokens","user","GeneratedTokens","TIMESTAMP"',
        '"7","a","3","2023-11-16 00:00:02"',
        "8,,4,2023-11-16T00:00:01",
    ]
    assert [(one.prompt_tokens, one.output_tokens) for one in read(lines)] == [(8, 4), (7, 3)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        (["a,b,c\n"], "line 1: no known form of trace; it begins with 'a,b,c'.* lorrery.Requests"),
        ([HEADER, "2023-11-16 18:15:46,1\n"], "line 2: expected TIMESTAMP"),
        ([HEADER, "2023-11-16 18:15:46,1,-2\n"], "line 2: expected a number of tokens; GeneratedTokens is '-2'"),
        ([HEADER, "16.11.2023 18:15,1,2\n"], "line 2: expected TIMESTAMP as 2024-05-10 .*, found '16.11.2023 18:15'"),
        ([HEADER, "2023-11-16 18:15:46,1,1.5\n"], "line 2: .*; GeneratedTokens is '1.5'"),
        ([HEADER, "2023-13-16 18:15:46,1,2\n"], "line 2: month"),
        ([HEADER, "2023-11-16 18:15:46,2147483648,2\n"], "line 2: a prompt or an answer has at most 2147483647 tokens"),
        (
            [HEADER, f"2023-11-16 18:15:46,1,{'9' * 5000}\n"],
            "line 2: expected a number of tokens; GeneratedTokens is '999",
        ),
    ],
)
def test_azure_names_the_line_that_does_not_parse(lines, message):
    with pytest.raises(TraceError, match=message):
        read(lines)


def test_an_azure_trace_without_a_row_is_refused():
    with pytest.raises(TraceError, match="there is no row after the header"):
        read(["TIMESTAMP,ContextTokens,GeneratedTokens\n"])


def test_the_committed_azure_excerpt_fits_the_demo_cluster():
    lines = read_lines("azure_llm_2023_conv_excerpt.csv.gz")
    assert lines[0] == HEADER
    workload = read(lines)
    assert len(workload) == 2000
    assert workload[0].at_seconds == 0
    assert 420 < workload[-1].at_seconds < 430
    assert max(request.prompt_tokens for request in workload) <= 8192


def test_traces_may_begin_with_a_byte_order_mark_and_lengths_of_0_count_as_1():
    header, row = "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,0,0"
    line = '\ufeff{"timestamp": 0, "input_length": 0, "output_length": 0}'
    for request in (*read([header, row]), *read([line])):
        assert (request.prompt_tokens, request.output_tokens) == (1, 1)


def test_mooncake_reads_milliseconds_and_block_ids():
    lines = [
        '{"timestamp": 3000, "input_length": 513, "output_length": 7, "hash_ids": [0, 5]}\n',
        "\n",
        '{"timestamp": 6000, "input_length": 512, "output_length": 1}',
    ]
    first, second = read(lines)
    assert (first.at_seconds, first.prompt_tokens, first.output_tokens, first.hash_ids) == (
        0.0,
        513,
        7,
        array("Q", [0, 5]),
    )
    assert (second.at_seconds, second.hash_ids) == (3.0, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "entry 1: no known form of trace; it begins with '1'"),
        ('{"a": 1}', "line 1: no known form of trace; .*input_length.*lorrery.Requests"),
        ('{"timestamp": 0, "input_length": 3}', "line 1: no field 'output_length'"),
        ('{"timestamp": 0, "input_length": "3", "output_length": 1}', "line 1: input_length is '3'"),
        ('{"timestamp": 0, "input_length": 3, "output_length": -1}', "line 1: output_length is -1"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1e300}', "output_length is 1e.300; at most 2147483647"),
        (
            '{"timestamp": 0, "input_length": 1000.5, "output_length": 1}',
            "input_length is 1000.5; .* whole number",
        ),
        ('{"timestamp": 0, "input_length": 3, "output_length": 0.5}', "line 1: output_length is 0.5; .* whole number"),
        ('{"timestamp": NaN, "input_length": 3, "output_length": 1}', "line 1: timestamp is nan"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "fit blocks of 513 to",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "priority": 2147483648}', "priority is 2147483648"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "priority": true}', "priority is True"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [18446744073709551616]}', "from 0 to 2"),
    ],
)
def test_mooncake_names_the_line_that_does_not_parse(line, message):
    with pytest.raises(TraceError, match=message):
        read([line])


def test_mooncakes_rows_may_have_a_priority():
    line = '{{"timestamp": 0, "input_length": 1, "output_length": 1{}}}'
    rows = read([line.format(', "priority": -3'), line.format("")])
    assert [row.priority for row in rows] == [-3, 0]


def test_mooncake_takes_whole_numbers_in_any_spelling_and_stamps_between_milliseconds():
    (request,) = read(['{"timestamp": 0.5, "input_length": 1e3, "output_length": 5.0}'])
    assert (request.prompt_tokens, request.output_tokens) == (1_000, 5)


def test_a_mooncake_trace_without_a_row_is_refused():
    with pytest.raises(TraceError, match="no row"):
        read(["\n"])


def test_spread_moves_requests_apart_within_their_window_and_keeps_their_order():
    workload = read(read_lines("mooncake_conversation_excerpt.jsonl"))
    placed = spread(workload, np.random.default_rng(1), 3.0)
    assert len(placed) == len(workload) == 200
    times = [request.at_seconds for request in placed]
    assert times == sorted(times)
    assert len(set(times)) == 200
    by_hash = {tuple(request.hash_ids or ()): request.at_seconds for request in placed}
    assert len(by_hash) == 200
    assert all(0 <= by_hash[tuple(request.hash_ids or ())] - request.at_seconds < 3.0 for request in workload)
    for stamp in {request.at_seconds for request in workload}:
        same = [by_hash[tuple(request.hash_ids or ())] for request in workload if request.at_seconds == stamp]
        assert same == sorted(same)
