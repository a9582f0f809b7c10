"""The Helm chart: what it renders is what Kubernetes takes, what the services read, and where they listen."""

import ipaddress
import json
import shutil
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import kubernetes
from tests.deploy.chart import (
    CASES,
    CHART,
    KEDA,
    NAMESPACE,
    PROGRAM,
    RELEASE,
    SERVICES,
    Document,
    Labels,
    Pod,
    groups,
    helm,
    kind,
    pods,
    pods_of,
    rendered,
    selects,
    services,
    template,
)
from tests.deploy.files import DASHBOARDS, DEPLOY, RULES

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="helm has no wheel for this platform")

each_case = pytest.mark.parametrize("case", CASES)
GRPC_PORTS = {"router": 50051, "scheduler": 50052, "worker": 50053}


@each_case
def test_helm_finds_no_fault(case: str) -> None:
    result = helm("lint", "--strict", CHART, "--values", CASES[case])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stdout


@each_case
@pytest.mark.parametrize("version", kubernetes.VERSIONS)
def test_kubernetes_takes_every_document(case: str, version: str) -> None:
    found = {
        f"{one['kind']} {one['metadata']['name']}": faults
        for one in rendered(case)
        if (faults := kubernetes.faults(one, version))
    }
    assert found == {}


def test_a_misspelt_field_is_found() -> None:
    (service, *_) = kind(rendered("minimal"), "Service")
    wrong = {**service, "spec": {**service["spec"], "selectr": {}}}
    assert "selectr" in "".join(kubernetes.faults(wrong, kubernetes.VERSIONS[0]))
    (monitor,) = kind(rendered("everything"), "ServiceMonitor")
    wrong = {**monitor, "spec": {**monitor["spec"], "joblabel": "x"}}
    assert "joblabel" in "".join(kubernetes.faults(wrong, kubernetes.VERSIONS[0]))


@each_case
def test_names_are_unique_and_fit(case: str) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in rendered(case)]
    assert len(set(names)) == len(names)
    assert max(len(name) for _, name in names) <= 52, "a Job's pods, and a StatefulSet's, append to it"


@each_case
def test_every_service_reads_its_settings_and_listens_at_its_ports(case: str) -> None:
    for pod, settings in services(case):
        own = getattr(settings, pod.component)
        listening = {"grpc": own.listen, "metrics": own.metrics}
        if pod.component == "router":
            listening |= {"http": own.http}
            listening |= {name.removesuffix("_grpc"): port.listen for name, port in own.engine_ports().items()}
        assert {name: int(address.rpartition(":")[2]) for name, address in listening.items()} == pod.ports
        for address in listening.values():
            assert ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_unspecified
        assert pod.ports["grpc"] == GRPC_PORTS[pod.component]
        assert pod.container["args"] == [f"lorrery.{pod.component}"]


@each_case
def test_routers_and_workers_dial_schedulers_that_there_are(case: str) -> None:
    (owner,) = kind(rendered(case), "StatefulSet")
    (governing,) = (
        one for one in kind(rendered(case), "Service") if one["metadata"]["name"] == owner["spec"]["serviceName"]
    )
    assert governing["spec"]["clusterIP"] == "None"
    assert selects(governing["spec"]["selector"], owner["spec"]["template"]["metadata"]["labels"])
    port = GRPC_PORTS["scheduler"]
    assert {one["port"] for one in governing["spec"]["ports"] if one["name"] == "grpc"} == {port}
    by_name = f"dns:///{governing['metadata']['name']}.{NAMESPACE}.svc.cluster.local:{port}"
    for pod, settings in services(case):
        if pod.component == "router":
            assert settings.router.schedulers == (by_name,)
        elif pod.component == "worker":
            assert settings.worker.scheduler == by_name


def test_the_groups_of_workers_are_those_of_the_settings() -> None:
    kinds: dict[str, int] = {}
    for pod, settings in services("fleet"):
        assert sum(group.count for group in settings.workers) == 5
        if pod.component == "worker":
            worker = settings.worker
            described = f"{worker.gpu} {worker.tensor_parallel} {worker.weight_dtype} {worker.kv_dtype}"
            kinds[described] = kinds.get(described, 0) + pod.owner["spec"]["replicas"]
            assert worker.name == pod.name
    assert kinds == {"H100-SXM 1 fp8 bfloat16": 3, "L40S 2 fp8 fp8": 2}


def test_a_whole_settings_file_is_taken_and_values_win_over_it() -> None:
    documents = template("--set-file", f"config={DEPLOY / 'mixed.toml'}", "--set", "settings.scheduler.policy=vtc_fair")
    (config,) = kind(documents, "ConfigMap")
    written = tomllib.loads(config["data"]["cluster.toml"])
    given = tomllib.loads((DEPLOY / "mixed.toml").read_text(encoding="utf-8"))
    assert written["adapters"] == given["adapters"]
    assert written["scheduler"]["policy"] == "vtc_fair"
    assert written["scheduler"]["placement"] == given["scheduler"]["placement"]
    assert [(group["gpu"], group["count"]) for group in written["workers"]] == [("H100-SXM", 1), ("L40S", 2)]
    replicas = {
        pod.environment["LORRERY_WORKER__GROUP"]: pod.owner for pod in pods_of(documents) if pod.component == "worker"
    }
    assert {group: owner["spec"]["replicas"] for group, owner in replicas.items()} == {"0": 1, "1": 2}


def test_settings_of_every_shape_survive() -> None:
    (config,) = kind(rendered("fleet"), "ConfigMap")
    written = tomllib.loads(config["data"]["cluster.toml"])
    given = yaml.safe_load(CASES["fleet"].read_text(encoding="utf-8"))["settings"]

    def holds(inner: Any, outer: Any) -> bool:
        return all(holds(inner[key], outer[key]) for key in inner) if isinstance(inner, dict) else inner == outer

    assert holds(given, written)
    assert isinstance(written["scheduler"]["max_req_input_len"], int)


@each_case
def test_a_stop_leaves_time_for_the_whole_drain(case: str) -> None:
    for pod, settings in services(case):
        hook = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        needed = getattr(settings, pod.component).drain_seconds + float(hook[1])
        assert needed + 5 <= pod.spec["terminationGracePeriodSeconds"] <= needed + 15


@each_case
def test_probes_ask_the_port_of_grpc_in_a_way_that_the_server_answers(case: str) -> None:
    for pod, settings in services(case):
        assert len(pod.probes) == 3
        for probe in pod.probes.values():
            if settings.server_tls.cert is None:
                assert probe["grpc"]["port"] == pod.ports["grpc"]
            else:  # the kubelet speaks no TLS
                *program, cert, _, key, address = probe["exec"]["command"][:9]
                assert program == ["python", "-I", "-S", "/opt/healthcheck.py", "--cert"]
                assert (cert, key) == (str(settings.server_tls.cert), str(settings.server_tls.key))
                assert address == f"127.0.0.1:{pod.ports['grpc']}"


@each_case
def test_files_that_settings_name_are_mounted(case: str) -> None:
    for pod, settings in services(case):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = {
            mount["mountPath"]: volumes[mount["name"]]
            for mount in pod.container["volumeMounts"]
            if mount["name"] != "state"
        }
        paths = [
            getattr(side, name) for side in (settings.server_tls, settings.client_tls) for name in ("cert", "key", "ca")
        ]
        for path in [*paths, settings.router.keys, settings.cluster_token]:
            if path is not None:
                secret = mounts[str(path.parent)]["secret"]
                assert path.name in {item["key"] for item in secret.get("items", [])} | {"tls.crt", "tls.key", "ca.crt"}
    for pod in pods(case):
        for mount in pod.container["volumeMounts"]:
            assert mount.get("readOnly") or mount["mountPath"] in ("/tmp", "/var/lib/lorrery")


def test_with_credentials_every_service_asks_for_them() -> None:
    for case, demanded in (("secure", False), ("everything", True)):
        secrets = set()
        for pod, settings in services(case):
            assert settings.cluster_token is not None
            assert settings.server_tls.cert is not None
            assert (settings.router.keys is not None) == (pod.component == "router")
            assert (settings.server_tls.ca is not None) == (pod.component != "router" or demanded)
            assert settings.client_tls.ca is not None
            secrets |= {one["secret"]["secretName"] for one in pod.spec["volumes"] if one["name"] == "tls"}
        assert len(secrets) == len(SERVICES), "each service shows a certificate of its own role"


@each_case
def test_every_pod_is_locked_down(case: str) -> None:
    for pod in pods(case):
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False, "LORRERY_ROUTER_PORT is no setting"
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        resources = pod.container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert case == "fleet" or "memory" in resources["limits"]
        assert "hostNetwork" not in pod.spec


@each_case
def test_services_and_budgets_select_pods_and_name_their_ports(case: str) -> None:
    everyone = list(pods(case))
    for service in kind(rendered(case), "Service"):
        behind = [pod for pod in everyone if selects(service["spec"]["selector"], pod.labels)]
        assert len({pod.component for pod in behind}) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert any(pod.ports.get(port["targetPort"]) == port["port"] for pod in behind), port
    for budget in kind(rendered(case), "PodDisruptionBudget"):
        assert any(selects(budget["spec"]["selector"]["matchLabels"], pod.labels) for pod in everyone)
    for owner in rendered(case):
        if "selector" in owner.get("spec", {}) and "template" in owner["spec"]:
            mine = [pod for pod in everyone if selects(owner["spec"]["selector"]["matchLabels"], pod.labels)]
            assert [pod.owner for pod in mine] == [owner], "pods of two owners would be taken for each other's"


# --- who may reach whom ---

STRANGER: Labels = {"app": "stranger"}


def may_call(
    documents: tuple[Document, ...], target: Pod, port: int, labels: Labels, namespace: str = NAMESPACE
) -> bool:
    """Say as Kubernetes does whether a pod may open a connection to another."""
    policies = [
        one["spec"]
        for one in kind(documents, "NetworkPolicy")
        if selects(one["spec"]["podSelector"]["matchLabels"], target.labels)
    ]
    names = {"kubernetes.io/metadata.name": namespace}

    def matches(peer: Document) -> bool:
        if "ipBlock" in peer:
            return False
        if "namespaceSelector" in peer:
            here = selects(peer["namespaceSelector"].get("matchLabels", {}), names)
        else:
            here = namespace == NAMESPACE
        return here and selects(peer.get("podSelector", {}).get("matchLabels", {}), labels)

    return not policies or any(
        ("from" not in rule or any(map(matches, rule["from"])))
        and any(allowed["port"] == port for allowed in rule["ports"])
        for policy in policies
        for rule in policy["ingress"]
    )


@each_case
def test_only_the_clusters_own_reach_schedulers_and_nobody_workers(case: str) -> None:
    documents = rendered(case)
    by_component = {pod.component: pod for pod in pods(case)}
    for target in by_component.values():
        reached = {
            caller.component
            for caller in by_component.values()
            for port in target.ports.values()
            if port != 9100 and may_call(documents, target, port, caller.labels)
        }
        if target.component == "scheduler":
            assert reached == {"router", "worker"}
        elif target.component != "router":
            assert reached == set()
        else:
            assert {"loadgen", "web"} & by_component.keys() <= reached
        for port in target.ports.values():
            from_outside = may_call(documents, target, port, STRANGER, "elsewhere")
            assert from_outside == (
                target.component == "router" and port != 9100 and case not in ("secure", "everything")
            )
            assert may_call(documents, target, port, STRANGER, "monitoring") or port != 9100
    if case == "secure":
        assert may_call(documents, by_component["router"], 8000, STRANGER, "apps")
        assert not may_call(documents, by_component["scheduler"], 50052, STRANGER, "apps")


# --- what is watched ---


def test_dashboards_and_rules_are_those_of_the_tree() -> None:
    documents = rendered("everything")
    shown = {name: text for one in kind(documents, "ConfigMap") for name, text in one["data"].items()}
    for path in DASHBOARDS:
        assert shown[path.name] == path.read_text(encoding="utf-8")
    (rules,) = kind(documents, "PrometheusRule")
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    assert sorted(rules["spec"]["groups"], key=json.dumps) == sorted(groups, key=json.dumps)


def test_every_process_is_scraped_once_under_the_job_that_dashboards_ask_for() -> None:
    documents = rendered("everything")
    (monitor,) = kind(documents, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    label = monitor["spec"]["jobLabel"]
    jobs: dict[str, list[str]] = {}
    for service in kind(documents, "Service"):
        watched = selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        if watched and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}:
            for pod in pods("everything"):
                if selects(service["spec"]["selector"], pod.labels) and pod.owner["kind"] != "Pod":
                    jobs.setdefault(pod.owner["metadata"]["name"], []).append(service["metadata"]["labels"][label])
    assert sorted(job for found in jobs.values() for job in found) == ["loadgen", "router", "scheduler", "worker"]


# --- values ---


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("router.replicas=two", "router.replicas: Invalid type. Expected: integer, given: string"),
        ("router.replica=2", "router: Additional property replica is not allowed"),
        ("settings.scheduler.max_num_seq=5", "settings.scheduler: Additional property max_num_seq is not allowed"),
        ("settings.worker.startup_seconds=-1", "startup_seconds: Must be greater than or equal to 0"),
        ("settings.router.listen=0.0.0.0:1", "settings.router: Additional property listen is not allowed"),
        ("router.extraPorts[0].name=grpc,router.extraPorts[0].port=50061", "a router has grpc at 50051 already"),
        ("router.extraPorts[0].name=vllm,router.extraPorts[0].port=9100", "a router has metrics at 9100 already"),
        ("router.disruptionBudget.maxUnavailable=-1", "maxUnavailable: Must be greater than or equal to 0"),
        ("router.disruptionBudget.maxUnavailable=101%", "maxUnavailable: Does not match pattern"),
        ("scheduler.persistence.size=1K", "size: Does not match pattern"),
        ("monitoring.serviceMonitor.interval=30x", "interval: Does not match pattern"),
        ("workers[0].name=H100_1", "workers.0.name: Does not match pattern"),
        ("scheduler.replicas=3", "scheduler.replicas is 3, and there are 2 workers in all"),
        (f"{KEDA}.minReplicas=1,scheduler.replicas=2", "the least that worker.autoscaling.minReplicas allows"),
        ("fullnameOverride=My_Name", "fullnameOverride: Does not match pattern"),
        ("image.repository=UPPER CASE", "image.repository: Does not match pattern"),
        ("image.tag=a b", "image.tag: Does not match pattern"),
        (r"router.podLabels.app\.kubernetes\.io/component=foo", "app.kubernetes.io/component is set by the chart"),
        ("worker.podLabels.lorrery/group=x", "worker.podLabels: lorrery/group is set by the chart"),
        ("web.enabled=true,web.podAnnotations.checksum/settings=x", "checksum/settings is set by the chart"),
        ("extraEnv[0].value=1", "extraEnv.0: name is required"),
        ("tls.enabled=true", "the name of a Secret with tls.crt"),
        ("config=x = ", "config: no TOML"),
        ('config=tracing.headers.key = "s3cret"', "tracing.headers (key) would be in a ConfigMap"),
        ("settings.tracing.headers.key=s3cret", "settings.tracing: Additional property headers is not allowed"),
        (f"{groups('a', 'b')},workers[2].name=a,workers[2].replicas=1", "two groups have the name a;"),
        (f"{KEDA}.minReplicas=9", "minReplicas is 9, and maxReplicas 8"),
        (f"{KEDA}.waitingPerWorker=0,worker.autoscaling.timeToFirstTokenSeconds=0", "are both 0"),
    ],
)
def test_a_mistake_is_refused_and_named(value: str, message: str) -> None:
    result = helm("template", CHART, "--set", value)
    assert result.returncode != 0
    assert message in result.stderr
    assert "s3cret" not in result.stderr


@pytest.mark.parametrize(
    "value",
    [
        "monitoring.serviceMonitor.interval=1m30s",
        "monitoring.serviceMonitor.interval=500ms",
        "scheduler.persistence.size=1.5Gi",
        "scheduler.disruptionBudget.maxUnavailable=0",
        "worker.disruptionBudget.maxUnavailable=100%",
        "image.repository=Registry.example.org:5000/group/lorrery__2.x-y",
        "fullnameOverride=a1-b",
    ],
)
def test_what_kubernetes_takes_is_taken(value: str) -> None:
    template("--set", value)


def test_names_that_look_like_numbers_stay_text() -> None:
    options = ("fullnameOverride=x", "scheduler.persistence.enabled=true", "loadgen.enabled=true")
    names = (
        *("image.pullSecrets[0]=42", "serviceAccount.name=true", "router.priorityClassName=1"),
        *("scheduler.persistence.storageClass=1e3", "scheduler.persistence.size=1"),
        *("auth.keysSecret=7", "loadgen.apiKeySecret=8"),
    )
    result = helm("template", "123", CHART, "--set", ",".join(options), "--set-string", ",".join(names))
    assert result.returncode == 0, result.stderr
    documents = [one for one in yaml.safe_load_all(result.stdout) if one]
    faults = [fault for one in documents for fault in kubernetes.faults(one, kubernetes.VERSIONS[-1])]
    assert faults == []
    assert {pod.labels["app.kubernetes.io/instance"] for pod in pods_of(documents)} == {"123"}


def test_numbers_become_text_in_the_environment_and_in_arguments() -> None:
    values = {"extraEnv": [{"name": "A", "value": 1000000}, {"name": "B", "value": 0.5}, {"name": "C", "value": True}]}
    values["loadgen"] = {"enabled": True, "args": ["--num-requests", 1000000]}  # type: ignore[assignment]
    documents = template("--set-json", ",".join(f"{key}={json.dumps(value)}" for key, value in values.items()))
    for pod in pods_of(documents):
        assert [pod.environment[name] for name in "ABC"] == ["1000000", "0.5", "true"]
    (job,) = (pod for pod in pods_of(documents) if pod.owner["kind"] == "Job")
    assert job.container["args"][-2:] == ["--num-requests", "1000000"]


def test_a_release_whose_name_no_service_can_have_is_refused() -> None:
    result = helm("template", "123", CHART)
    assert result.returncode != 0
    assert "123-lorrery-router would be a Service's name" in result.stderr


def notes(folder: Path, *options: str) -> str:
    """Return what `helm install` prints at its end; it prints that only where it reaches a cluster."""
    chart = shutil.copytree(CHART, folder / "chart")
    (chart / "files" / "notes.txt").write_bytes((chart / "templates" / "NOTES.txt").read_bytes())
    text = '{kind: Notes, text: {{ tpl (.Files.Get "files/notes.txt") . | toJson }}}'
    (chart / "templates" / "notes.yaml").write_text(text)
    result = helm("template", RELEASE, chart, "--namespace", NAMESPACE, *options)
    assert result.returncode == 0, result.stderr
    (found,) = kind([one for one in yaml.safe_load_all(result.stdout) if one], "Notes")
    return " ".join(found["text"].split())


def test_the_notes_say_what_lacks_a_key(tmp_path: Path) -> None:
    keys = ("--set", "auth.keysSecret=k,web.enabled=true")
    both = notes(tmp_path / "none", *keys)
    assert "loadgen.apiKeySecret is not set" in both
    assert "web.apiKeySecret, an operator's, is not set" in both
    assert "is not set" not in notes(tmp_path / "all", *keys, "--set", "loadgen.apiKeySecret=a,web.apiKeySecret=b")
    assert "is not set" not in notes(tmp_path / "open")


def test_the_same_values_render_the_same() -> None:
    assert tuple(template("--values", CASES["everything"])) == rendered("everything")


def test_settings_roll_the_pods_and_a_number_of_workers_does_not() -> None:
    before = {
        pod.owner["metadata"]["name"]: pod.owner["spec"]["template"]
        for pod in pods("minimal")
        if pod.component in SERVICES
    }

    def changed(*values: str) -> set[str]:
        options = [word for value in values for word in ("--set", value)]
        after = {
            pod.owner["metadata"]["name"]: pod.owner["spec"]["template"]
            for pod in pods_of(template(*options))
            if pod.component in SERVICES
        }
        return {name for name in before if before[name] != after[name]}

    assert changed("settings.scheduler.max_num_seqs=7") == set(before)
    assert changed("worker.replicas=5", "router.replicas=3") == set()


def test_other_load_is_another_job() -> None:
    (first,) = kind(rendered("secure"), "Job")
    (second,) = kind(template("--values", CASES["secure"], "--set", "loadgen.args={--rate,4}"), "Job")
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_a_package_holds_the_tree_s_files_themselves(tmp_path: Path) -> None:
    result = helm("package", CHART, "--destination", tmp_path)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("lorrery-*.tgz")
    with tarfile.open(path) as package:
        held = {member.name: member for member in package.getmembers()}
        assert all(member.isfile() for member in held.values())
        assert not any("/ci/" in name for name in held)
        for source in (*DASHBOARDS, *RULES, DEPLOY / "cluster.toml"):
            (name,) = (name for name in held if Path(name).name == source.name and "/files/" in name)
            file = package.extractfile(held[name])
            assert file is not None
            assert file.read() == source.read_bytes()
