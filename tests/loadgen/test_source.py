import gzip
import json
import math
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from lorrery.loadgen.option_texts import expand_adapters, parse_range
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.source import build_workload, registry_advice
from lorrery.service.errors import FormatError, SettingsError
from lorrery.service.files.reading import open_text
from lorrery.service.settings.cluster import changed
from lorrery.tokenizer.file import open_tokenizer

TRACES = pathlib.Path(__file__).parents[2] / "deploy" / "traces"
AZURE = TRACES / "azure_llm_2023_conv_excerpt.csv.gz"
KNOWN = ["a", "b", "c"]


def build(**options):
    return build_workload(LoadOptions(target="there:1", **options), KNOWN)


def adapters_of(built):
    return {request.adapter_id for request in built.requests}


def test_families_and_lists_are_spelt_out():
    assert expand_adapters("chat, lora-{0..2},x{08..10}y") == [
        "chat",
        "lora-0",
        "lora-1",
        "lora-2",
        "x8y",
        "x9y",
        "x10y",
    ]


@pytest.mark.parametrize("text", ["", "a,,b", "a,a", "a-{0..2},a-1", "a-{2..0}"])
def test_impossible_lists_are_refused(text):
    with pytest.raises(SettingsError, match="adapters"):
        expand_adapters(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("fam{0..99999999999999999999}", "100,000,000,000,000,000,000"),
        ("fam{1..600000},x{1..600000}", "1,200,000"),
        (f"fam{{0..{'9' * 5000}}}", "5000 digits"),
    ],
)
def test_more_adapters_than_a_cluster_can_have_are_refused_before_they_are_spelt_out(text, count):
    with pytest.raises(SettingsError, match=f"{count}.*at most 1,000,000") as caught:
        expand_adapters(text)
    assert len(str(caught.value)) < 300


def test_ranges_are_two_numbers_or_one():
    assert parse_range("3:9") == (3, 9)
    assert parse_range("64") == (64, 64)


@pytest.mark.parametrize("workload", ["poisson", "constant", "slora"])
def test_a_synthetic_workload_has_about_rate_times_duration_requests(workload):
    built = build(workload=workload, rate=20.0, duration=30.0)
    assert len(built.requests) == pytest.approx(600, rel=0.15)
    assert build(workload=workload, rate=20.0, duration=30.0) == built
    assert len(build(workload=workload, num_requests=17).requests) == 17


@pytest.mark.parametrize("workload", ["poisson", "constant"])
def test_speed_up_fills_the_same_duration_with_more(workload):
    built = build(workload=workload, rate=20.0, duration=30.0, speed_up=3.0)
    assert len(built.requests) == pytest.approx(1800, rel=0.15)
    assert 28 < built.requests[-1].at_seconds < 30


def test_bursty_arrivals_fill_the_whole_duration():
    built = build(workload="poisson", rate=5.0, cv=4.0, duration=200.0)
    assert built.requests[-1].at_seconds > 150


@pytest.mark.parametrize(
    ("workload", "name"),
    [("azure", AZURE.name), ("mooncake", "mooncake_conversation_excerpt.jsonl")],
)
def test_a_trace_may_be_compressed_and_come_through_a_pipe(tmp_path, workload, name):
    plain_file, zipped = tmp_path / "plain", tmp_path / "trace"
    with open_text(TRACES / name) as file:
        plain_file.write_bytes(file.read().encode())
    zipped.write_bytes(gzip.compress(plain_file.read_bytes()))
    plain = build(workload=workload, trace=plain_file)
    assert build(workload=workload, trace=zipped).requests == plain.requests
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_bytes, zipped.read_bytes())
        assert build(workload=workload, trace=pipe).requests == plain.requests
        written.result()


@pytest.mark.parametrize("workload", ["azure", "sharegpt"])
def test_a_compressed_trace_that_is_cut_or_damaged_is_told_so(tmp_path, workload):
    whole = gzip.compress(gzip.decompress(AZURE.read_bytes())[:7_000])
    for number, content in enumerate((whole[:-100], whole[:100] + b"xxxxxxxx" + whole[108:], b"\x1f\x8b")):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"\d.gz: cut or damaged gzip \(.*\); get it again"):
            build(workload=workload, trace=path)


def test_a_trace_is_cut_by_duration_after_its_speed_up():
    built = build(workload="azure", trace=AZURE, speed_up=2.0, duration=10.0)
    whole = build(workload="azure", trace=AZURE)
    assert [request.at_seconds for request in built.requests] == [
        request.at_seconds / 2 for request in whole.requests if request.at_seconds < 20
    ]
    assert len(build(workload="azure", trace=AZURE, num_requests=12).requests) == 12


def test_jitter_spreads_mooncakes_bursts():
    trace = TRACES / "mooncake_conversation_excerpt.jsonl"
    plain = build(workload="mooncake", trace=trace)
    spread = build(workload="mooncake", trace=trace, jitter=3.0)
    assert len({request.at_seconds for request in plain.requests}) < 40
    assert len({request.at_seconds for request in spread.requests}) == 200
    assert any("times step by 3 s" in note and "(--jitter 3 spreads them)" in note for note in plain.notes)
    assert any("spread over 3 s" in note for note in spread.notes)


def test_adapters_come_from_the_list_the_cluster_or_nowhere():
    assert adapters_of(build(num_requests=50)) == {None}
    assert adapters_of(build(num_requests=50, adapters="all")) == {"a", "b", "c"}
    assert adapters_of(build(num_requests=50, num_adapters=2)) == {"a", "b"}
    assert adapters_of(build(num_requests=50, num_adapters=0, adapters="all")) == {None}
    assert adapters_of(build(num_requests=50, adapters="x-{0..3}", num_adapters=2)) == {"x-0", "x-1"}
    assert adapters_of(build(workload="slora", num_requests=50, num_adapters=2)) == {"a", "b"}
    named = build(workload="slora", num_requests=50, num_adapters=3, adapter_dirs="r8,r16")
    assert adapters_of(named) == {"r8-0", "r16-0", "r8-1"}


def test_assigned_adapters_are_labelled_synthetic():
    built = build(workload="azure", trace=AZURE, adapters="all", adapter_exponent=1.2)
    assert any("adapters are synthetic: Zipf with exponent 1.2" in note for note in built.notes)
    assert "CC-BY 4.0" in built.attribution


@pytest.mark.parametrize("workload", ["poisson", "slora"])
def test_a_workload_without_adapters_says_base_model_only(workload):
    assert any(note.startswith("base model only") for note in build(workload=workload).notes)
    assert not any("base model" in note for note in build(workload=workload, num_adapters=2).notes)


@pytest.mark.parametrize("workload", ["poisson", "slora"])
def test_all_adapters_of_a_server_that_lists_none_is_an_error_with_a_cure(workload):
    with pytest.raises(SettingsError, match=r"--adapters all: none are listed.*--adapters sql,chat"):
        build_workload(LoadOptions(target="there:1", workload=workload, adapters="all"), [])


def test_a_workload_for_a_named_model_says_its_name():
    notes = build(workload="poisson", protocol="openai", model="sql").notes
    assert any(note.startswith("model sql only; --adapters all") for note in notes)
    assert not any("base model" in note for note in notes)


def test_more_adapters_than_there_are_is_an_error():
    with pytest.raises(
        SettingsError, match=r"lists only 3; .*: --set 'adapters.registry=\[\{id=\"lora\", .*count=4\}\]'"
    ):
        build(num_adapters=4)
    with pytest.raises(SettingsError, match="--adapters names only 1"):
        build(num_adapters=4, adapters="x")


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        (["a-0", "a-1"], '{id="a", rank=16, count=2}'),
        (["b", "x/y-1-0", "x/y-1-2"], '{id="b", rank=16}, {id="x/y-1-0", rank=16}, {id="x/y-1-2", rank=16}'),
        (
            ["a-00", "a-1", "-0", "-1"],
            '{id="a-00", rank=16}, {id="a-1", rank=16}, {id="-0", rank=16}, {id="-1", rank=16}',
        ),
    ],
)
def test_a_registry_is_advised_that_has_the_names(names, entries):
    _, _, override = registry_advice(names).partition("--set ")
    assert override == f"'adapters.registry=[{entries}]'"
    settings = changed({}, [override.strip("'")])
    assert [name for name, _ in settings.adapters.expand()] == names


def test_a_registry_too_long_to_copy_is_not_spelt_out():
    assert registry_advice([f"a{number}" for number in range(99)]) == "list them in adapters.registry"


def test_files_that_are_missing_binary_or_broken_are_told_apart(tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        build(workload="azure", trace=tmp_path / "x")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not a text file"):
        build(workload="azure", trace=binary)
    other = tmp_path / "other.csv"
    other.write_text("when,what\n1,2\n")
    with pytest.raises(FormatError, match=r"other.csv: line 1: no known form of trace; .*lorrery\.Requests"):
        build(workload="mooncake", trace=other)


@pytest.mark.parametrize("workload", ["azure", "mooncake", "sharegpt"])
def test_a_trace_without_requests_is_named(workload, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(FormatError, match=r"empty\.jsonl: "):
        build(workload=workload, trace=empty)


def test_a_trace_of_which_no_request_is_left_is_named(tmp_path):
    trace = tmp_path / "short.json"
    trace.write_text('[{"conversations": [{"value": "a"}, {"value": "b"}]}]')
    with pytest.raises(SettingsError, match=r"none of \S*short\.json is left; vLLM's length rules"):
        build(workload="sharegpt", trace=trace)
    trace.write_text('{"timestamp": 0, "input_length": 3, "output_length": 1}')
    with pytest.raises(SettingsError, match=r"none of \S*short\.json is left; check --num-requests and --duration"):
        build(workload="mooncake", trace=trace, duration=0.0)


def test_an_empty_workload_is_an_error():
    with pytest.raises(SettingsError, match="no requests"):
        build(duration=0.0)
    for given, message in (
        ({"input_range": (0, 3)}, "--input-range is 0:3; it must begin at 1 or more"),
        ({"output_range": (9, 3)}, "--output-range is 9:3, which is empty; HIGH must be LOW or more"),
        ({"workload": "chat", "turns": (3, 1)}, "--turns is 3:1, which is empty"),
        ({"workload": "slora", "input_range": (9, 9)}, "--input-range is 9:9, which is empty; slora draws below HIGH"),
    ):
        with pytest.raises(SettingsError, match=message):
            build(**given)
    with pytest.raises(SettingsError, match="the most that one run plays"):
        build(num_requests=10**8)


@pytest.mark.parametrize(("workload", "count"), [("azure", 2000), ("mooncake", 200)])
def test_a_trace_workload_without_a_trace_plays_the_shipped_excerpt_and_says_so(workload, count):
    built = build(workload=workload)
    assert len(built.requests) == count
    assert any("ships with Lorrery" in note for note in built.notes)
    assert not any("ships with Lorrery" in note for note in build(workload="azure", trace=AZURE).notes)


def test_an_adapter_serves_a_session_to_its_end():
    made = build(workload="chat", num_requests=200, adapters="all", turns=(3, 3))
    by_session = {}
    for request in made.requests:
        by_session.setdefault(request.turn.session, set()).add(request.adapter_id)
    assert {len(adapters) for adapters in by_session.values()} == {1}
    assert len(set.union(*by_session.values())) > 1


def test_what_is_added_leaves_times_and_lengths_as_they_are():
    plain = build(num_requests=50, adapters="all").requests
    shared = build(num_requests=50, adapters="all", shared_prefix=(64, 2)).requests
    drifting = build(num_requests=50, adapters="all", drift="shift,every=5").requests
    for one, other, third in zip(plain, shared, drifting, strict=True):
        assert one.at_seconds == other.at_seconds == third.at_seconds
        assert one.prompt_tokens + 64 == other.prompt_tokens
        assert one.output_tokens == other.output_tokens == third.output_tokens
        assert one.adapter_id == other.adapter_id
    assert [one.adapter_id for one in plain] != [one.adapter_id for one in drifting]


def test_a_duration_cuts_sessions_by_their_begin():
    made = build(workload="chat", duration=30.0, rate=3.0)
    assert made.requests[-1].at_seconds < 30
    begins = {request.turn.session for request in made.requests}
    assert 60 < len(begins) < 130


def test_bursts_are_enough_for_their_duration():
    made = build(duration=100.0, rate=5.0, bursts="factor=10,for=5")
    assert made.requests[-1].at_seconds > 80
    assert "MMPP" in made.notes[0]


def test_sharegpt_is_read_with_a_tokenizer(tmp_path):
    path = tmp_path / "sharegpt.json"
    texts = [
        "What is the time and the place?",
        "It is late in the day and far away.",
        "Why is it so?",
        "No one knows it.",
    ]
    talk = [{"from": "human" if n % 2 == 0 else "gpt", "value": text} for n, text in enumerate(texts)]
    path.write_text(json.dumps([{"id": str(n), "conversations": talk[: 2 + 2 * (n % 2)]} for n in range(20)]))
    made = build(workload="sharegpt", trace=path, turns=(1, 4), adapters="all")
    assert len(made.requests) == 30
    encode = open_tokenizer(None).encode_stop
    for request in made.requests:
        assert list(request.turn.token_ids) == encode(request.turn.text)
        assert request.turn.text == texts[2 * request.turn.number]
        assert request.output_tokens == len(encode(texts[2 * request.turn.number + 1]))
    assert len(build(workload="sharegpt", trace=path).requests) == 20
    assert made.notes[0] == "sharegpt.json: ShareGPT's conversations"
    assert "vLLM's rules" in made.notes[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workload": "sharegpt"}, "needs --trace"),
        ({"turns": (1, 2)}, "--turns goes with"),
        ({"workload": "azure", "shared_prefix": (1, 1)}, "--shared-prefix goes with"),
        ({"shared_prefix": (2**31 - 1, 1)}, "2147483647 and prompts of up to 512 tokens after it; at most 2147483647"),
        ({"shared_prefix": (8, 2**31)}, "--shared-prefix has 2147483648 groups; at most 2147483647"),
        ({"workload": "constant", "bursts": "factor=2,for=1"}, "--bursts goes with"),
        ({"bursts": "factor=2,for=1", "cv": 2.0}, "not both"),
        ({"drift": "shift,every=1", "concurrency": 2}, "closed loop"),
        ({"workload": "slora", "drift": "shift,every=1"}, "--drift does not go"),
        ({"protocol": "openai", "prompt_ids": True, "workload": "chat"}, "come as text"),
        ({"model": "m"}, "--model goes with"),
        ({"think": -1.0}, "--think"),
        ({"think": 1e308}, r"--think is 1e\+308; .* at most 4,611,686 s"),
    ],
)
def test_options_that_do_not_go_together_say_so(options, why):
    with pytest.raises(SettingsError, match=why):
        build(**options)


def test_closed_loop_of_an_engines_benchmark():
    options = {"concurrency": 8, "input_tokens": 1000, "output_tokens": 100, "length_ratio": 0.8}
    requests = build(**options).requests
    assert len(requests) == 80
    assert {low <= n <= high for r in requests for n, low, high in ((r.prompt_tokens, 800, 1000),)} == {True}
    assert min(r.output_tokens for r in requests) >= 80
    assert max(r.output_tokens for r in requests) <= 100
    assert len(build(**options, requests_per_client=3).requests) == 24
    assert len(build(**options, num_requests=5).requests) == 5
    assert LoadOptions(**options, duration=9.0).most_requests is None


@pytest.mark.parametrize("asked", [{"num_requests": 2400}, {"requests_per_client": 300}])
def test_a_closed_loop_repeats_a_trace_that_has_fewer_requests_than_asked_for(asked):
    once, built = build(workload="azure"), build(workload="azure", concurrency=8, **asked)
    assert len(once.requests) == 2000
    assert [request.index for request in built.requests] == list(range(2400))
    lengths = [request.prompt_tokens for request in built.requests]
    assert lengths[2000:] == lengths[:400]
    assert "2,000 requests, which are repeated for 2,400" in built.notes


def test_a_trace_that_has_fewer_requests_than_asked_for_says_so():
    built = build(workload="azure", num_requests=2400)
    assert len(built.requests) == 2000
    assert "2,000 requests, not 2,400: there are no more" in built.notes


def test_lengths_are_fixed_without_a_ratio():
    requests = build(concurrency=2, input_tokens=1000, output_tokens=100).requests
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(1000, 100)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_tokens": 5, "input_range": (3, 4)}, "--input 5 and --input-range 3:4 both say how long it is"),
        ({"output_tokens": 5, "workload": "azure"}, "--output 5 goes with --workload poisson, constant, chat only"),
        ({"input_tokens": 0}, "--input is 0; it must be 1 or more"),
        ({"length_ratio": 0.5}, "--length-ratio 0.5 needs --input or --output"),
        ({"length_ratio": 1.5, "input_tokens": 5}, "--length-ratio is 1.5; it must be above 0 and at most 1"),
        ({"length_ratio": float("nan"), "input_tokens": 5}, "--length-ratio is nan"),
        ({"requests_per_client": 5}, "--requests-per-client 5 needs clients: add -c N"),
        ({"requests_per_client": 5, "concurrency": 2, "num_requests": 7}, "--requests-per-client 5 and -n 7 both say"),
    ],
)
def test_lengths_and_numbers_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        build(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"duration": math.inf}, "--duration is inf; it must be 0 or more and at most 4,611,686"),
        ({"duration": 1e300, "concurrency": 2}, "--duration is 1e\\+300; it must be .* at most 4,611,686"),
        ({"duration": 4e6, "rate": 1e9}, "4,000,000,.* requests asked for; 10,000,000 is the most .* look at -n"),
        ({"duration": 4e6, "rate": 1e9, "workload": "slora"}, "4,000,000,.* requests asked for; 10,000,000 is"),
        ({"rate": 1e300}, "--rate is 1e\\+300; it must be above 0 and at most 1e\\+09"),
        ({"speed_up": math.nan}, "--speed-up is nan; it must be above 0 and at most 1e\\+09"),
        ({"workload": "mooncake", "jitter": math.inf}, "--jitter is inf; it must be 0 or more and at most 4,611,686"),
        ({"workload": "chat", "turns": (1, 10**9)}, "--turns goes to 1000000000; a session has 10,000 at most"),
        (
            {"bursts": "factor=2,for=1e-300"},
            "bursts of 1e-300 s come .* times in 5 requests at 2/s; at most 10,000,000",
        ),
        ({"bursts": "factor=2,for=1", "rate": 1e-9}, "come 5e\\+08 times in 5 requests at 1e-09/s; at most 10,000,000"),
        ({"bursts": "factor=1e300,for=1"}, "factor is 1e\\+300 \\(1 to 1,000,000\\)"),
        ({"bursts": "factor=2,for=inf"}, "for is inf; it must be finite"),
        ({"bursts": "factor=2,for=1,share=1e-300"}, "share 1e-300 \\(1e-06 to less than 1\\)"),
        ({"drift": "shift,every=3,by=1e40"}, "by is 1e\\+40; expected a whole number from -1,000,000 to 1,000,000"),
        ({"drift": "shift,every=3,by=-inf"}, "by is -inf; it must be finite"),
        ({"drift": "shift,every=1e-300"}, "every is 1e-300 \\(0.001 or more\\)"),
        ({"drift": "diurnal,period=1e-300"}, "period is 1e-300 \\(0.001 or more\\)"),
        (
            {"drift": "flash,at=1,for=1,adapter=99", "num_adapters": 2},
            "--drift flash,.*: the flash crowd.s adapter is 99; ",
        ),
        ({"drift": "flash,at=1,for=1,adapter=nan"}, "adapter is nan; it must be finite"),
        ({"drift": "flash,at=1,for=1,adapter=1e300"}, "adapter is 1e\\+300; expected a whole number"),
    ],
)
def test_numbers_that_no_run_can_have_are_refused_with_their_limit(options, message):
    number = {} if "duration" in options else {"num_requests": 5}
    with pytest.raises(SettingsError, match=message) as caught:
        build(adapters="all", **number, **options)
    assert len(str(caught.value)) < 300
