"""What the Helm chart says of autoscaling: by series that workers show, and under names that Kubernetes keeps."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from lorrery.scheduler.core.autoscaling import METRICS
from lorrery.service.settings.cluster import changed
from lorrery.service.telemetry.engine_series import vllm_series
from tests.deploy.chart import (
    CHART,
    KEDA,
    PROGRAM,
    RELEASE,
    groups,
    helm,
    kind,
    rendered,
    services,
    template,
)
from tests.deploy.files import DEPLOY, ROOT

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="helm has no wheel for this platform")


def pod_name(deployment: str) -> str:
    """Return the name of one of its pods, as Kubernetes makes it: from at most 58 characters of its ReplicaSet's."""
    return f"{deployment}-6d4cf56db6-"[:58] + "x7k2p"


def check_scaling_series(expression: str) -> None:
    """Workers show what an autoscaler asks for, and its rule is one that the simulator has too."""
    asked = re.findall(r"vllm:(\w+)", expression)
    assert asked
    for name in asked:
        series = name.removesuffix("_bucket")
        assert series in vllm_series(1)
        assert any(metric.startswith(series) for metric in METRICS)


def test_each_group_is_scaled_by_series_that_its_workers_show() -> None:
    documents = rendered("autoscaling")
    owners = {one["metadata"]["name"]: one for one in kind(documents, "Deployment")}
    scaled = kind(documents, "ScaledObject")
    assert [one["spec"]["scaleTargetRef"]["name"] for one in scaled] == [
        name for name in sorted(owners) if "-worker-" in name
    ]
    for one in scaled:
        name = one["spec"]["scaleTargetRef"]["name"]
        assert "replicas" not in owners[name]["spec"], "two would set the number"
        for trigger in one["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            check_scaling_series(query)
            (pattern,) = re.findall(r'pod=~"([^"]+)"', query)
            assert [other for other in owners if re.fullmatch(pattern, pod_name(other))] == [name]


def test_the_metrics_that_a_pod_autoscaler_asks_for_are_made_of_series_that_there_are() -> None:
    rules = yaml.safe_load((DEPLOY / "helm" / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    for rule in rules:
        (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
        check_scaling_series(series)
    made = {rule["name"]["as"] for rule in rules}
    (scaler,) = kind(rendered("everything"), "HorizontalPodAutoscaler")
    assert {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} == made


def test_what_waits_is_counted_by_gpu_and_not_by_pod() -> None:
    waiting, per_worker = "vllm_num_requests_waiting", 4
    thresholds = {
        one["metadata"]["name"]: {
            trigger["name"]: trigger["metadata"]["threshold"] for trigger in one["spec"]["triggers"]
        }
        for one in kind(rendered("autoscaling"), "ScaledObject")
    }
    assert thresholds == {
        f"{RELEASE}-lorrery-worker-{group}": {"waiting": str(per_worker * gpus), "time-to-first-token": "1.5"}
        for group, gpus in (("h100", 8), ("l40s", 2))
    }
    (scaler,) = kind(rendered("everything"), "HorizontalPodAutoscaler")
    targets = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"]
        for metric in scaler["spec"]["metrics"]
    }
    assert targets[waiting] == str(per_worker * 2)
    gpus = {
        settings.workers[settings.worker.group or 0].gpus
        for pod, settings in services("everything")
        if pod.component == "worker"
    }
    assert gpus == {2}


@pytest.mark.parametrize("group", ["ab", "abc"])
def test_names_of_pods_that_kubernetes_would_cut_are_refused_where_keda_asks_by_them(group: str) -> None:
    release = "the-inference-of-our-european-customers-2"
    result = helm("template", release, CHART, "--set", f"{KEDA}.minReplicas=1,{groups(group)}")
    name = f"{release[:36]}-worker-{group}"
    fits = len(name) <= 46
    assert pod_name(name).startswith(f"{name}-6d4cf56db6-") == fits
    assert (result.returncode == 0) == fits
    assert fits or f"the Deployment {name} has a name of 47 characters" in result.stderr


@pytest.mark.parametrize(("monitored", "warned"), [("true", False), ("false", True)])
def test_a_note_says_that_nothing_reads_the_metrics_that_workers_are_scaled_by(
    tmp_path: Path, monitored: str, warned: bool
) -> None:
    chart = shutil.copytree(CHART, tmp_path / "lorrery")
    # `helm template` leaves notes out, so a document has them.
    text = 'note: {{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}\n'
    (chart / "templates" / "note.yaml").write_text(text, encoding="utf-8")
    values = f"worker.autoscaling.by=hpa,monitoring.serviceMonitor.enabled={monitored}"
    result = helm("template", RELEASE, chart, "--show-only", "templates/note.yaml", "--set", values)
    assert result.returncode == 0, result.stderr
    assert ("set monitoring.serviceMonitor.enabled" in yaml.safe_load(result.stdout)["note"]) == warned


def test_the_settings_of_the_page_on_autoscaling_are_the_charts() -> None:
    page = (ROOT / "docs" / "capacity.md").read_text(encoding="utf-8").partition("### The chart's settings")[2]
    own = changed(tomllib.loads(page.partition("```toml")[2].partition("```")[0])).autoscaler
    (scaler,) = kind(template("--set", "worker.autoscaling.by=hpa"), "HorizontalPodAutoscaler")
    spec = scaler["spec"]
    assert (own.enabled, own.min_replicas, own.max_replicas) == (True, spec["minReplicas"], spec["maxReplicas"])
    rule = own.rule()
    assert {f"vllm_{name}": target for name, target in rule.targets.items()} == {
        one["pods"]["metric"]["name"]: float(one["pods"]["target"]["averageValue"]) for one in spec["metrics"]
    }
    for direction, key in ((rule.scale_up, "scaleUp"), (rule.scale_down, "scaleDown")):
        behavior = spec["behavior"][key]
        assert direction.stabilization_seconds == behavior.get("stabilizationWindowSeconds", 0)
        values = {one["type"]: one["value"] for one in behavior["policies"]}
        assert (direction.max_pods, direction.max_percent) == (values.get("Pods", 0), values.get("Percent", 0))
        assert {direction.period_seconds} == {one["periodSeconds"] for one in behavior["policies"]}
    (monitor, *_) = kind(template("--set", "monitoring.serviceMonitor.enabled=true"), "ServiceMonitor")
    assert {f"{own.scrape_interval_seconds:g}s"} == {one["interval"] for one in monitor["spec"]["endpoints"]}
    # The chart leaves these to the controller, or has them in its query: [2m].
    assert (own.sync_period_seconds, own.tolerance, own.window_seconds) == (15, 0.1, 120)
