from pathlib import Path

import pytest

from lorrery.service.errors import SettingsError
from lorrery.service.settings.cluster import Settings, load, origins
from lorrery.service.settings.reading import override_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORRERY_CONFIG", raising=False)


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_defaults_are_a_valid_cluster():
    assert load().scheduler.policy == "req_queue"


def test_shipped_cluster_admits_long_prompts_and_lists_32_adapters():
    settings = load(ROOT / "deploy" / "cluster.toml")
    assert settings.scheduler.max_req_input_len >= 8192
    adapters = dict(settings.adapters.expand())
    assert len(adapters) == 32
    assert set(adapters.values()) == {8, 16, 32, 64}


def test_shipped_cluster_has_the_adapter_that_s_loras_published_request_names():
    registry = load(ROOT / "deploy" / "cluster.toml").adapters.registry
    assert [entry.rank for entry in registry if entry.id == "tloen/alpaca-lora-7b-1" and entry.count is None] == [16]


def test_precedence_is_file_then_environment_then_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = file(tmp_path, "[scheduler]\nmax_num_seqs = 1\nrunning_max_req_size = 1\nmax_waiting_requests = 1\n")
    monkeypatch.setenv("LORRERY_SCHEDULER__MAX_NUM_SEQS", "2")
    monkeypatch.setenv("LORRERY_SCHEDULER__RUNNING_MAX_REQ_SIZE", "2")
    settings = load(path, ["scheduler.max_num_seqs=3"])
    assert settings.scheduler.max_num_seqs == 3
    assert settings.scheduler.running_max_req_size == 2
    assert settings.scheduler.max_waiting_requests == 1
    assert settings.scheduler.max_req_input_len == 2048


def test_file_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORRERY_CONFIG", str(file(tmp_path, "time_scale = 3.0")))
    assert load().time_scale == 3.0


def test_the_environment_counts_in_any_case(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("lorrery_log__level", "debug")
    assert load().log.level == "debug"
    assert origins()["log", "level"] == "environment lorrery_log__level"
    monkeypatch.setenv("Lorrery_Logg", "x")
    with pytest.raises(SettingsError, match="environment variable Lorrery_Logg names no setting"):
        load()
    monkeypatch.delenv("Lorrery_Logg")
    monkeypatch.setenv("lorrery_router__schedulers", "a:1")
    with pytest.raises(SettingsError, match="environment variable lorrery_router__schedulers: a JSON list"):
        load()


def test_environment_takes_lists_as_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORRERY_ROUTER__SCHEDULERS", '["a:1", "b:2"]')
    assert load().router.schedulers == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("worker.gpu=H100-SXM", "H100-SXM"),
        ('worker.gpu="H100-SXM"', "H100-SXM"),
    ],
)
def test_command_line_takes_toml_or_bare_strings(override: str, expected: str):
    assert load(overrides=[override]).worker.gpu == expected


def test_command_line_takes_lists_and_later_values_win():
    settings = load(overrides=["router.schedulers=['a:1']", "router.schedulers=['b:2', 'c:3']"])
    assert settings.router.schedulers == ("b:2", "c:3")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            "[scheduler]\nmax_num_seq = 1",
            "scheduler.max_num_seq: no such setting; did you mean scheduler.max_num_seqs?",
        ),
        ("[schedular]\n", "schedular: no such setting; did you mean scheduler?"),
        ("policy = 'fcfs'", "policy: no such setting; did you mean scheduler.policy?"),
        ("qqq = 1", "qqq: no such setting (file"),
        ("[scheduler]\nmax_num_seqs = 0", "scheduler.max_num_seqs: "),
        ("[scheduler]\nmax_num_seqs = 'many'", "scheduler.max_num_seqs: "),
        (
            "[scheduler]\nmax_req_input_len = 9000",
            "max_req_input_len (9000) must be less than max_req_total_len (3072)",
        ),
        ("[router]\nlisten = 'nowhere'", "router.listen: "),
        ("[server_tls]\ncert = 'a'", "cert and key go together"),
        ("format = 2", "format 2 is not known"),
        ("[adapters]\nregistry = [{id = 'a', rank = 65}]", "adapter 'a' has rank 65; max_lora_rank is 64"),
        ("[adapters]\nregistry = [{id = 'a', rank = 8, count = 2}, {id = 'a-1', rank = 8}]", "'a-1' is listed twice"),
        (
            "[adapters]\nregistry = [{id = 'a b', rank = 8}]",
            "registry.0.id: is 'a b', with ' ' at character 2",
        ),
        ("[adapters]\nregistry = [{id = '', rank = 8}]", "adapters.registry.0.id: is empty"),
        (
            "model = 'a-1'\n[adapters]\nregistry = [{id = 'a', rank = 8, count = 2}]",
            "adapters.registry: adapter 'a-1' has the base model's name",
        ),
        ('[worker]\nname = "a\\tb"', "worker.name: is 'a\\tb', with '\\t' at character 2"),
        ("not toml", "cluster.toml"),
        ("[server_tls]\ncert = 'a'", "server_tls: cert and key go together; key is not set"),
        ("[router]\nlisten = 'nowhere'", "HOST:PORT expected, with a port of at most 65535, got 'nowhere'"),
        (
            "[router]\nlisten = 'here:65536'",
            "router.listen: HOST:PORT expected, with a port of at most 65535, got 'her",
        ),
        ("[router]\nschedulers = ['a:1', 'b']", "router.schedulers.1: HOST:PORT expected"),
        ("[router]\nschedulers = []", "router.schedulers: "),
        ("time_scale = inf", "time_scale: Input should be a finite number, got inf"),
        ("time_scale = nan", "time_scale: Input should be a finite number, got nan"),
        ("[scheduler]\nmax_num_seqs = 0", "got 0 (file "),
        (
            "[scheduler]\nmax_total_token_num = 3000",
            "max_total_token_num (3000) must be at least max_req_total_len (3072)",
        ),
        (
            "[scheduler]\nplacement_weights = {queue = 0, load = 0, adapter = 0, prefix = 0}",
            "scheduler.placement_weights: queue, load, adapter and prefix are all 0; give at least one",
        ),
        (
            "[scheduler]\nplacement_weights = {queue = 1e308}",
            "placement_weights.queue: Input should be less than or equal to 1000000, got 1e+308",
        ),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, text: str, key: str):
    with pytest.raises(SettingsError) as caught:
        load(file(tmp_path, text))
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("time_scale", "1e-300", "greater than or equal to 0.000001"),
        ("time_scale", "1e300", "less than or equal to 1000000"),
        ("scheduler.first_token_slo_seconds", "1e300", "less than or equal to 1000000"),
        ("scheduler.worker_timeout_seconds", "1e300", "less than or equal to 1000000"),
        ("scheduler.worker_wait_seconds", "1e300", "less than or equal to 1000000"),
        ("router.http_idle_seconds", "1e300", "less than or equal to 1000000"),
        ("adapters.host_gb_per_second", "1e-300", "greater than or equal to 0.000001"),
        ("worker.heartbeat_seconds", "1e300", "less than or equal to 1000000"),
        ("worker.lora.launch_us", "1e300", "less than or equal to 1000000"),
    ],
)
def test_what_no_clock_can_hold_is_refused(key: str, value: str, limit: str):
    with pytest.raises(SettingsError) as caught:
        load(overrides=[f"{key}={value}"])
    assert f"{key}: Input should be {limit}, got {float(value):g}" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "scheduler.max_num_seqs=true",
            "scheduler.max_num_seqs: expected a whole number at least 1 and at most 2,147,483,647, got true, a boolean",
        ),
        ("time_scale=false", "time_scale: expected a number at least 1e-06 and at most 1,000,000, got false"),
        ("scheduler.fair_weights=[1, true]", "scheduler.fair_weights: expected a number at least 1e-06"),
        ("scheduler.fair_weights={a = true}", "scheduler.fair_weights: expected a number at least 1e-06"),
        ("autoscaler.metrics={num_requests_running = true}", "autoscaler.metrics: expected a number at least"),
        ("adapters.registry=[{id = 'a', rank = true}]", "adapters.registry.0.rank: expected a whole number at least 1"),
        ("workers=[{count = true}]", "workers.0.count: expected a whole number at least 1"),
        ("workers=[{tensor_parallel = true}]", "workers.0.tensor_parallel: expected a whole number at least 1"),
        ("scheduler.max_num_seqs=2.5", "scheduler.max_num_seqs: Input should be a valid integer"),
        ("scheduler.max_num_seqs=[3]", "scheduler.max_num_seqs: Input should be a valid integer"),
        ("scheduler.max_num_seqs=1979-05-27", "scheduler.max_num_seqs: Input should be a valid integer"),
    ],
)
def test_what_is_no_number_is_refused_where_one_is_expected(tmp_path: Path, override: str, message: str):
    key, _, value = override.partition("=")
    *sections, name = key.split(".")
    with pytest.raises(SettingsError) as caught:
        load(overrides=[override])
    assert message in str(caught.value)
    text = f"[{sections[0]}]\n{name} = {value}" if sections else f"{name} = {value}"
    with pytest.raises(SettingsError) as caught:
        load(file(tmp_path, text))
    assert message in str(caught.value)


def test_a_boolean_in_the_environment_is_no_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORRERY_SCHEDULER__MAX_NUM_SEQS", "true")
    with pytest.raises(SettingsError, match=r"max_num_seqs: Input should be a valid integer"):
        load()
    monkeypatch.delenv("LORRERY_SCHEDULER__MAX_NUM_SEQS")
    monkeypatch.setenv("LORRERY_SCHEDULER", '{"max_num_seqs": true}')
    with pytest.raises(SettingsError, match="expected a whole number at least 1 and at most 2,147,483,647, got true"):
        load()


def test_a_whole_number_may_be_written_as_a_float_or_as_text(monkeypatch: pytest.MonkeyPatch):
    assert load(overrides=["scheduler.max_num_seqs=64.0"]).scheduler.max_num_seqs == 64
    assert load(overrides=["scheduler.max_num_seqs='64'"]).scheduler.max_num_seqs == 64
    monkeypatch.setenv("LORRERY_SCHEDULER__MAX_NUM_SEQS", "64")
    assert load().scheduler.max_num_seqs == 64


def test_booleans_stay_what_they_are_where_they_are_expected():
    settings = load(overrides=["worker.expert_parallel=true", "scheduler.strict=true"])
    assert settings.worker.expert_parallel is True
    assert settings.scheduler.strict is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheduler.max_num_seqs=2147483648", "Input should be less than or equal to 2147483647, got 2147483648"),
        ("adapters.look_ahead=9223372036854775808", "Input should be less than or equal to 2147483647, got 9223372"),
        ("worker.kv_events.hwm=2147483648", "Input should be less than or equal to 2147483647, got 2147483648"),
        ("router.seed=18446744073709551616", "Input should be less than or equal to 18446744073709551615, got"),
        ("scheduler.block_size=65537", "Input should be less than or equal to 65536, got 65537"),
        ("scheduler.placement_max_load=1e308", "expected at most 1,000,000, or inf for no limit, got 1e+308"),
        ("router.max_shard_load=1e7", "expected at most 1,000,000, or inf for no limit, got 1e+07"),
        ("scheduler.fair_weights=[1e-308]", "Input should be greater than or equal to 0.000001, got 1e-308"),
        ("scheduler.fair_weights=[1e308]", "Input should be less than or equal to 1000000, got 1e+308"),
        ("scheduler.watermark=1", "scheduler.watermark: Input should be less than 1, got 1"),
        ("scheduler.watermark=nan", "scheduler.watermark: Input should be less than 1, got nan"),
        ("router.resolve_seconds=1e-308", "Input should be greater than or equal to 0.001, got 1e-308"),
    ],
)
def test_what_no_process_can_count_or_do_is_refused(override: str, message: str):
    with pytest.raises(SettingsError) as caught:
        load(overrides=[override])
    assert str(caught.value).startswith(override.partition("=")[0])
    assert message in str(caught.value)


def test_inf_is_no_limit_of_a_load():
    settings = load(overrides=["scheduler.placement_max_load=inf", "router.max_shard_load=inf"])
    assert settings.scheduler.placement_max_load == settings.router.max_shard_load == float("inf")


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize("name", ["LORRERY_SCHEDULAR__POLICY", "LORRERY_MODELL"])
def test_unknown_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "x")
    with pytest.raises(SettingsError, match=name):
        load()


def test_unknown_key_of_an_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LORRERY_SCHEDULER__POLICI", "x")
    with pytest.raises(SettingsError, match=r"scheduler\.polici"):
        load()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LORRERY_ROUTER__SCHEDULERS", "127.0.0.1:5", """a JSON list such as '["HOST:PORT"]'"""),
        ("LORRERY_SCHEDULER", "foo", "a JSON object, or one setting of it as LORRERY_SCHEDULER__SETTING"),
        ("LORRERY_ADAPTERS__REGISTRY", "lora", "a JSON list such as '[...]'"),
        ("LORRERY_WORKER__OUTPUT", "echo", "a JSON object, or one setting of it as LORRERY_WORKER__OUTPUT__SETTING"),
    ],
)
def test_malformed_environment_variable_is_named_with_its_value_and_form(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
):
    monkeypatch.setenv("LORRERY_TIME_SCALE", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load()
    assert str(caught.value) == f"environment variable {name}: {expected} expected, got {value!r}"


def test_the_source_of_what_cannot_be_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = file(tmp_path, "[scheduler]\nmax_req_total_len = 5000")
    with pytest.raises(SettingsError, match=r"max_req_total_len \(5000\) \(--set\)$"):
        load(path, ["scheduler.max_req_input_len=5000"])
    monkeypatch.setenv("LORRERY_WORKER__HEARTBEAT_SECONDS", "0")
    with pytest.raises(SettingsError, match=r"got '0' \(environment\)$"):
        load(path)
    with pytest.raises(SettingsError, match=r"got -1 \(--set\)$"):
        load(path, ["worker.heartbeat_seconds=-1"])
    assert load(path, ["worker.heartbeat_seconds=1"]).worker.heartbeat_seconds == 1
    monkeypatch.delenv("LORRERY_WORKER__HEARTBEAT_SECONDS")
    with pytest.raises(SettingsError, match=r"\(file .*cluster\.toml\)$"):
        load(file(tmp_path, "[worker]\nheartbeat_seconds = -1"), ["scheduler.max_num_seqs=3", "worker.scheduler=a:1"])


def test_empty_certificate_paths_mean_plain_text():
    tls = load(overrides=["server_tls.cert=", "server_tls.key="]).server_tls
    assert tls.cert is tls.key is None


def test_unknown_key_on_the_command_line_is_named():
    with pytest.raises(SettingsError, match=r"worker\.gpu_s"):
        load(overrides=["worker.gpu_s=2"])


def test_settings_do_not_change():
    settings: Settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.time_scale = 2.0  # type: ignore[misc]


@pytest.mark.parametrize("value", ["9" * 5_000, "[" * 50_000, "1979", "a", "[a]"], ids=lambda value: value[:4])
def test_a_string_for_an_override_arrives_as_it_is(value: str):
    settings: Settings = load(overrides=[override_of("model", value)])
    assert settings.model == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=" + "[" * 50_000, "--set 'model': it is nested too deeply"),
        ("time_scale=" + "9" * 5_000, "--set 'time_scale': it has a number of too many digits"),
        (".".join("a" * 50_000) + "=1", "no such setting: it has 50000 parts; at most 32"),
        ("workers=[{count = 99_999}, {count = 2}]", "the groups have 100001 workers; at most 100000 are allowed"),
        ("adapters.registry=[{id = 'a', rank = 8, count = 10_000_000}]", "less than or equal to 1000000, got 10000000"),
    ],
    ids=["levels", "digits", "parts", "workers", "adapters"],
)
def test_an_override_that_no_memory_holds_is_refused_at_once(override: str, message: str):
    with pytest.raises(SettingsError) as caught:
        load(overrides=[override])
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
