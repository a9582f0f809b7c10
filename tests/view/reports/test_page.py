import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lorrery
from lorrery.cli.report import app
from lorrery.loadgen.report_files import CSV_COLUMNS, PRIORITY
from lorrery.service.errors import FormatError, SettingsError
from lorrery.simulator.subscribers.step_files import COLUMNS as STEP_COLUMNS
from lorrery.view.reports.read import read_folders
from lorrery.view.reports.report import report
from lorrery.view.reports.tables import differing
from lorrery.vocabulary.adapters import FIGURES
from tests.view.reports.runs import failed, poisson, row, write

EMPTY_ELEMENTS = {"meta", "br", "line", "path", "rect", "circle"}


class Checked(HTMLParser):
    """Notes text, and tags that are not closed as they were opened."""

    def __init__(self, page):
        super().__init__()
        self.open, self.wrong, self.tags, self.words = [], [], [], []
        self.feed(page)
        self.wrong += self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in EMPTY_ELEMENTS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag in EMPTY_ELEMENTS or (tag == "path" and tag not in self.open):
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, text):
        self.words.append(text)


def page(*folders, file=None):
    text = report(*folders, file=file).read_text(encoding="utf-8")
    checked = Checked(text)
    assert checked.wrong == []
    assert "Traceback" not in text
    assert not re.search(r"(?:src|href)=\"(?!#)", text), "nothing is fetched"
    assert "nan" not in " ".join(checked.words).split()
    return text, checked


def test_a_run_is_a_page_in_its_folder(tmp_path):
    text, checked = page(write(tmp_path / "run", [*poisson(400), failed(400, 30)]))
    for expected in (
        "Llama-3-8B",
        "2 x H100-SXM",
        "fcfs",
        "the queue is full",
        "lora-3",
        "adapter load",
    ):
        assert expected in text
    assert sum(one.get("class") == "chart" for _, one in checked.tags) >= 10
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8") == text
    assert page(tmp_path / "run" / "summary.json")[0] == text  # the same each time, and of a file the folder


def test_two_that_write_a_page_at_once_do_not_write_the_same_file(tmp_path, monkeypatch):
    folder = write(tmp_path / "run", poisson(20, 50))
    renamed: list[str] = []
    replace = Path.replace

    def rename(path: Path, target: Path) -> Path:
        renamed.append(path.name)
        if len(renamed) == 1:
            report(folder)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", rename)
    page(folder)
    assert len(set(renamed)) == 2
    assert [path.name for path in folder.iterdir() if "report" in path.name] == ["report.html"]


def test_a_page_for_a_link_or_a_pipe_goes_to_what_is_behind_it(tmp_path):
    folder = write(tmp_path / "run", poisson(20, 50))
    target, link, pipe = (tmp_path / name for name in ("target.html", "link.html", "pipe"))
    target.touch()
    link.symlink_to(target)
    os.mkfifo(pipe)
    assert report(folder, file=link) == link
    assert link.is_symlink()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.read_bytes)
        report(folder, file=pipe)
        assert written.result(60) == target.read_bytes() == report(folder).read_bytes()
    assert pipe.is_fifo()


def test_several_runs_have_differences_and_what_was_asked_differently(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = write(tmp_path / "a", poisson(1200))
    other = write(tmp_path / "b", poisson(1200, ttft=0.2), summary={"settings": {"scheduler": {"policy": "vtc_fair"}}})
    third = write(tmp_path / "c" / "b", poisson(1200, seed=9))
    text, _ = page(first, other, third)
    assert Path("report.html").exists()
    for expected in (
        "higher, worse",
        "within noise",
        "scheduler.policy",
        "vtc_fair",
        "c/b",
        "compared in pairs",
        "independent runs",
    ):
        assert expected in text


def test_faults_are_among_what_was_asked_differently(tmp_path):
    fault = "slow_worker,at=0,worker=worker-0,factor=1.08"
    folders = [
        write(tmp_path / name, poisson(50), summary={"simulation": {"events": events}})
        for name, events in (("a", []), ("b", [fault]))
    ]
    runs, _, _ = read_folders(folders)
    assert differing(runs) == [("faults", ["", fault])]


def test_hostile_names_are_text(tmp_path):
    name = "</script><script>alert(1)</script>\"'&\u202e\x07" + "x" * 500
    rows = [row(i, i, adapter_id=name, tenant_id="<b>", worker_id="<i>") for i in range(30)]
    rows.append(failed(30, 30, detail="<img src=x onerror=alert(1)> " * 50, status="<u>"))
    folder = write(
        tmp_path / "<h1>&",
        rows,
        summary={"warnings": ["<script>"], "options": {"<k>": "<v>"}, "cluster": {"model": "\ud800<m>"}},
    )
    text, checked = page(folder)
    assert sum(tag == "script" for tag, _ in checked.tags) == 1
    assert not {"img", "u", "i", "k", "m"} & {tag for tag, _ in checked.tags}
    assert "\u202e" not in text
    assert len(text) < 200_000


ROWS = {
    "empty": [],
    "one": [row(0, 0.5)],
    "two": [row(0, 0.5), row(1, 0.6, ttft=0.3)],
    "all failed": [failed(i, i * 0.1) for i in range(40)],
    "all at once": [row(i, 0, ttft=0.0, decode=0.0, tokens=1, queue=0) for i in range(40)],
    "interrupted": [failed(i, i, status="INTERRUPTED", detail="") for i in range(3)],
    "NaN": [
        row(i, i, queue_seconds="nan", first_token_seconds="nan", prompt_tokens="", decode_seconds="inf")
        for i in range(30)
    ],
    "negative": [row(i, i, ttft=-1.0) for i in range(30)],
    "one adapter each": [row(i, i, adapter_id=f"a{i}", tenant_id=f"t{i}") for i in range(3000)],
    "zero prompts": [row(i, i, prompt_tokens=0) for i in range(30)],
}


@pytest.mark.parametrize("name", ROWS)
def test_odd_runs_have_a_page_alone_and_beside_others(tmp_path, name):
    odd = write(tmp_path / "odd", ROWS[name])
    text, _ = page(odd)
    assert len(text) < 250_000
    assert ("other: 2,950 more" in text) == (name == "one adapter each")
    page(odd, write(tmp_path / "usual", poisson(120)), file=tmp_path / "both.html")


def test_older_files_have_fewer_columns_and_the_first_kind(tmp_path):
    columns = [
        name
        for name in CSV_COLUMNS
        if name not in ("queue_seconds", "tenant_id", "worker_id", "detail", "cached_tokens")
    ]
    summary = {"kind": "lorrery load report", "settings": None, "simulation": {"num_steps": 1}}
    text, _ = page(write(tmp_path / "old", poisson(200), columns=columns, summary=summary))
    assert "simulated" in text
    assert "until the first token" in text


def test_what_is_missing_is_said(tmp_path):
    folder = write(
        tmp_path / "run",
        poisson(200),
        summary={"summary": {"num_requests": 300}, "interrupted": True, "warnings": ["interrupted: 3 open requests"]},
    )
    text, _ = page(folder)
    assert "has 200 requests, summary.json speaks of 300" in text
    assert "interrupted: 3 open requests" in text
    (folder / "summary.json").unlink()
    requests = (folder / "requests.csv").read_text()
    (folder / "requests.csv").write_text(requests[: len(requests) - 50])
    text, _ = page(folder)
    assert "summary.json is missing" in text
    assert "in the middle of line 201" in text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither summary.json nor sweep.csv; give a folder"),
        ({"summary.json": "{"}, "not a JSON file, or half of one"),
        ({"summary.json": "[]"}, "not a summary"),
        ({"summary.json": '{"kind": "lorrery load", "format_version": 9}'}, "format_version 9 is not known"),
        (
            {"summary.json": '{"kind": "lorrery load", "format_version": 1}'},
            "requests.csv is not there.*run again with --out",
        ),
        ({"requests.csv": ""}, "the file is empty"),
        ({"requests.csv": "a,b\n1,2\n"}, "no column status"),
        ({"sweep.csv": "a,b\n1,2\n"}, "not the table of a sweep"),
        ({"sweep.csv": "rate,status,error\n"}, "no point in it"),
        ({"points/x.json": "{"}, "no finished point"),
        ({"in/summary.json": "{}"}, "its folders are runs: lorrery report .*in"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_a_cure(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(FormatError, match=message):
        report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_the_command_says_where_the_page_is_and_what_is_wrong(tmp_path):
    folder = write(tmp_path / "run", poisson(120))
    done = CliRunner().invoke(app, [str(folder), "-o", str(tmp_path / "deep" / "page.html")])
    assert done.exit_code == 0
    assert "deep/page.html" in done.output.replace("\n", "")
    with pytest.raises(SettingsError, match="given twice"):
        report(folder, folder / "summary.json")
    with pytest.raises(SettingsError, match="is a folder"):
        report(folder, file=tmp_path)
    with pytest.raises(SettingsError, match="8 are the most"):
        report(*(write(tmp_path / str(number), []) for number in range(9)))
    with pytest.raises(FormatError, match="no such folder"):
        report(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="File name too long"):
        report(tmp_path / ("n" * 300))
    with pytest.raises(SettingsError, match="File name too long"):
        report(folder, file=tmp_path / ("n" * 300))


def sweep_folder(folder, rows, context=None):
    folder.mkdir()
    figures = "output_tokens_per_second,ttft_ms_p50,ttft_ms_p99,tpot_ms_p50,tpot_ms_p99,e2e_ms_p99"
    header = f"worker.gpu,rate,seed,status,error,num_requests,num_failed,{figures}"
    (folder / "sweep.csv").write_text("\n".join([header, *rows]) + "\n")
    (folder / "points").mkdir()
    point = {
        "kind": "lorrery sweep point",
        "format_version": 1,
        "point": {"rate": 1},
        "figures": {"ttft_ms_p50": 3},
        "determined_by": context or {},
    }
    (folder / "points" / "a.json").write_text(json.dumps(point))
    return folder


def test_a_sweep_is_plots_over_what_was_swept_and_a_table(tmp_path):
    rows = [
        f"{gpu},{rate},{seed},ok,,100,{rate},{rate * 100 + seed},{rate}.5,{rate * 9},10,12,900"
        for gpu in ("H100-SXM", "A10G") for rate in (1, 2, 4, 64) for seed in (1, 2)
    ]  # fmt: skip
    rows.append("B200,1,1,failed,<does not fit>,,,,,,,,")
    folder = sweep_folder(tmp_path / "sweep", rows, {"settings": {"model": "Llama-3-8B", "worker": {"gpu": "x"}}})
    text, _ = page(folder)
    for expected in (
        "Llama-3-8B",
        "gpu = A10G",
        "rate, requests/s",
        "of 17 points failed",
        "&lt;does not fit&gt;",
        'class="spread',
        "Failed requests",
    ):
        assert expected in text, expected
    run = write(tmp_path / "run", poisson(120))
    both, _ = page(folder, run, file=tmp_path / "both.html")
    assert "Sweep <bdi>sweep" in both


def test_a_sweep_without_its_table_has_its_points(tmp_path):
    folder = sweep_folder(tmp_path / "sweep", [])
    (folder / "sweep.csv").unlink()
    text, _ = page(folder)
    assert "sweep.csv is missing, so only finished points are shown" in text


def test_python_has_the_same(tmp_path):
    folder = write(tmp_path / "run", poisson(120))
    assert lorrery.report(folder, file=tmp_path / "x.html") == tmp_path / "x.html"


def test_every_column_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "load.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+)`", text))
    assert {*CSV_COLUMNS, PRIORITY, *STEP_COLUMNS} <= named


def scaled(folder: Path, *groups: str) -> Path:
    """Write a run whose workers came and went; a line of ours for each group every ten seconds."""
    write(folder, poisson(60))
    lines = ["seconds,ready,desired,metric:num_requests_waiting,metric:time_to_first_token_seconds_p90,group"]
    for at, ready, desired, waiting in ((0, 1, 1, ""), (10, 1, 2, 9), (20, 2, 2, 3), (30, 2, 1, 0)):
        lines += [f"{at},{ready},{desired},{waiting},,{group}" for group in groups]
    (folder / "scaling.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_workers_that_come_and_go_are_drawn_group_by_group(tmp_path):
    def charts(checked):
        titles = [word.strip() for word in checked.words]
        return [title for title in titles if title.startswith(("Worker processes", "What the rule saw"))]

    _, checked = page(scaled(tmp_path / "one", ""))
    assert charts(checked) == ["Worker processes", "What the rule saw"]  # the other metric never had a value
    _, checked = page(scaled(tmp_path / "two", "A10G", "L4"))
    assert charts(checked) == [
        f"{title}, {group}" for group in ("A10G", "L4") for title in ("Worker processes", "What the rule saw")
    ]
    _, checked = page(tmp_path / "one", tmp_path / "two", file=tmp_path / "both.html")
    assert charts(checked) == ["Worker processes", "What the rule saw"]
    (tmp_path / "one" / "scaling.csv").write_text("seconds,ready\n1,two\n", encoding="utf-8")
    text, _ = page(tmp_path / "one")
    assert "scaling.csv cannot be read" in text


def test_a_comparison_of_runs_with_faults_says_that_one_fault_is_no_sample(tmp_path):
    usual, faulty = (
        write(tmp_path / "usual", poisson(1500)),
        write(tmp_path / "faulty", poisson(1500, ttft=0.12), summary={"simulation": {"events": ["worker_loss,at=30"]}}),
    )
    text, _ = page(usual, faulty, file=tmp_path / "both.html")
    assert "faulty had faults. Each came once" in text
    alike, _ = page(usual, write(tmp_path / "alike", poisson(1500)), file=tmp_path / "alike.html")
    assert "had faults" not in alike


def test_a_page_of_short_runs_says_how_long_would_be_enough_and_counts_what_took_longer(tmp_path):
    runs = [write(tmp_path / name, poisson(100, ttft=ttft)) for name, ttft in (("a", 0.1), ("b", 0.2))]
    text, _ = page(*runs, file=tmp_path / "both.html")
    assert re.search(r"There is no interval: [ab] sends for .* it takes 12, of which .* Run for [\d.]+ s or more", text)
    assert "Of 100 requests that both completed, 100 took longer in b and 0 took less" in text


def test_loads_of_adapters_are_a_table_of_the_most_loaded_and_all_others(tmp_path: Path):
    figures = dict.fromkeys(FIGURES, 0) | {"num_loads": 2, "disk_load_seconds": 0.5, "resident_seconds": 4.0}
    adapters = [figures | {"adapter_id": f"lora-{number}", "num_loads": number + 1} for number in range(60)]
    text, _ = page(write(tmp_path / "run", poisson(20), summary={"adapter_loads": {"adapters": adapters}}))
    table = text[text.index("Loads of adapters") :]
    names = re.findall(r"<td[^>]*>(?:<bdi>)?(lora-\d+|other)", table)
    assert names == [*(f"lora-{number}" for number in range(59, 9, -1)), "other"]
    assert re.findall(r"<td[^>]*>(?:<bdi>)?([\d,.]+)", table[table.rindex("other<") - 20 :])[:7] == [
        *("55", "0", "0", "0", "0", "5,000", "40"),
    ]


@pytest.mark.parametrize("given", [None, 7, [7, {"adapter_id": 3, "num_loads": "x"}], {"adapters": [{}]}])
def test_a_summary_whose_loads_of_adapters_are_none_makes_a_page(tmp_path: Path, given: object):
    page(write(tmp_path / "run", poisson(20), summary={"adapter_loads": {"adapters": given}}))
