"""The manifests are what Kubernetes and Prometheus' operator accept, fit together, and cannot harm the engine.

`kubectl kustomize` is not in continuous integration: the few lines of kustomize that the folders use are read here.
"""

from __future__ import annotations

import copy
import json
import lzma
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import snapshots
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sidelight.exporter.prometheus.page import LivePage
from sidelight.sidecar.options.watch import WatchOptions, check_watch, pages_of

REPOSITORY = Path(__file__).parents[2]
DASHBOARDS = REPOSITORY / "dashboards"
ROOT = DASHBOARDS / "kubernetes"
SCHEMAS = json.loads(lzma.decompress((REPOSITORY / "tests/data/kubernetes_schemas.json.xz").read_bytes()))
VERSIONS = sorted(SCHEMAS["kubernetes"], key=lambda version: int(version[2:]))
KUSTOMIZATIONS = [*ROOT.rglob("kustomization.yaml"), DASHBOARDS / "grafana" / "kustomization.yaml"]


def documents(path: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / path).read_text(encoding="utf-8")))


def merged(base: Any, patch: Any) -> Any:
    """Return what a strategic merge makes of an object and a patch whose lists have no item in common."""
    if isinstance(base, dict):
        return {key: merged(base[key], patch[key]) if key in base and key in patch else {**patch, **base}[key]
                for key in {**base, **patch}}  # fmt: skip
    return [*patch, *base] if isinstance(base, list) else base


ENGINE, SERVICE = documents("engine.yaml")
(PATCH,) = documents("sidecar/watch.yaml")
WATCHED = merged(ENGINE, PATCH)
(JOB,), (CLAIM,), (READER,) = (documents(f"job/{name}.yaml") for name in ("job", "volume", "reader"))
(LOAD,), (PEERS,) = documents("load/job.yaml"), documents("load/service.yaml")
(INGRESS, COLLECTORS), (NAMES, SHARDS) = documents("fleet/collectors.yaml"), documents("fleet/shards.yaml")
(SUMS,) = documents("fleet/rules.yaml")
(ROUTED,) = documents("fleet/collector-config.yaml")
(MONITOR,) = documents("monitoring/podmonitor.yaml")
(RULE,) = documents("monitoring/prometheusrule.yaml")
OBJECTS = {
    "engine": WATCHED, "service": SERVICE, "job": JOB, "volume": CLAIM, "reader": READER,
    "ingress": INGRESS, "collectors": COLLECTORS, "names": NAMES, "shards": SHARDS,
    "load": LOAD, "peers": PEERS,
}  # fmt: skip
TEMPLATES = {name: OBJECTS[name]["spec"]["template"] for name in ("engine", "job", "load", "collectors", "shards")}
PODS = {**TEMPLATES, "reader": READER}
(SIDECAR,) = PATCH["spec"]["template"]["spec"]["initContainers"]
(RUN,) = JOB["spec"]["template"]["spec"]["containers"]
(SHARD,) = SHARDS["spec"]["template"]["spec"]["containers"]
(COLLECTOR,) = COLLECTORS["spec"]["template"]["spec"]["containers"]


def problems(thing: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [error.message for error in validator.iter_errors(thing)]


def strict_schema(version: str, kind: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{kind}", **SCHEMAS["kubernetes"][version]}


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod["spec"].get("initContainers", ())
    yield from pod["spec"]["containers"]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_the_objects(version: str) -> None:
    """From the first version with native sidecars on; a misspelt field is found."""
    for thing in OBJECTS.values():
        assert problems(thing, strict_schema(version, thing["kind"])) == []
    misspelt = copy.deepcopy(WATCHED)
    sidecar = misspelt["spec"]["template"]["spec"]["initContainers"][0]
    sidecar["restartPolcy"] = sidecar.pop("restartPolicy")
    assert "restartPolcy" in "".join(problems(misspelt, strict_schema(version, "Deployment")))


@pytest.mark.parametrize("thing", [MONITOR, RULE, SUMS], ids=["PodMonitor", "PrometheusRule", "fleet"])
def test_the_operator_accepts_its_objects(thing: dict[str, Any]) -> None:
    """By its custom resource definitions; a misspelt field is found."""
    schema = SCHEMAS["operator"][thing["kind"]]
    assert problems(thing, schema) == []
    assert problems({**thing, "spec": {**thing["spec"], "gruops": []}}, schema) != []


def test_the_versions_begin_where_native_sidecars_do() -> None:
    """1.29 is the first that has them without a feature gate."""
    assert VERSIONS == [f"1.{minor}" for minor in range(29, 38)]


def test_the_alerts_are_those_of_prometheus() -> None:
    """One source: the object holds the groups of rules.yml, no more and no less."""
    rules = yaml.safe_load((DASHBOARDS / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    assert RULE["spec"] == rules


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_reads_nothing_outside_its_folder(path: Path) -> None:
    """Kustomize refuses files from elsewhere, and takes folders that are kustomizations themselves."""
    kustomization = yaml.safe_load(path.read_text(encoding="utf-8"))
    generated = [name for config_map in kustomization.get("configMapGenerator", ()) for name in config_map["files"]]
    patches = [patch["path"] for patch in kustomization.get("patches", ())]
    for name in (*kustomization.get("resources", ()), *kustomization.get("components", ()), *generated, *patches):
        source = path.parent / name
        assert (source / "kustomization.yaml").is_file() or (source.is_file() and "/" not in name), name


def test_every_dashboard_is_a_labelled_configmap() -> None:
    """Each fits into a ConfigMap (1 MiB), whose name does not change with it."""
    kustomization = yaml.safe_load((DASHBOARDS / "grafana" / "kustomization.yaml").read_text(encoding="utf-8"))
    options = {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}}
    assert kustomization["generatorOptions"] == options
    files = [config_map["files"] for config_map in kustomization["configMapGenerator"]]
    boards = sorted((DASHBOARDS / "grafana").glob("*.json"))
    assert sorted(files) == [[board.name] for board in boards]
    assert all(board.stat().st_size < 2**20 for board in boards)


def test_the_image_is_this_version() -> None:
    """In every container: one line of `images` in a kustomization then says where it is."""
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    images = {
        container["image"] for pod in PODS.values() for container in containers(pod) if container is not COLLECTOR
    }
    assert images == {f"sidelight:{version}"}


@pytest.mark.parametrize("name", PODS)
def test_no_container_has_a_privilege(name: str) -> None:
    """Each satisfies the restricted Pod security standard, and can write to its volumes only."""
    pod = PODS[name]
    assert pod["spec"]["automountServiceAccountToken"] is False
    for container in containers(pod):
        security = {**pod["spec"]["securityContext"], **container["securityContext"]}
        assert {"runAsNonRoot": True, "runAsUser": 10001, "readOnlyRootFilesystem": True}.items() <= security.items()
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["resources"].keys() == {"requests", "limits"}


def test_the_watch_cannot_harm_the_engine() -> None:
    """It neither delays its start nor decides on its readiness, and reaches it only through their common loopback."""
    assert SIDECAR["restartPolicy"] == "Always"
    assert SIDECAR.keys().isdisjoint({"startupProbe", "readinessProbe"})
    assert SIDECAR["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "sidelight"}
    assert SIDECAR["args"][:2] == ["watch", "http://127.0.0.1:8000/metrics"]
    assert PATCH["spec"]["template"]["spec"].keys() == {"initContainers", "volumes"}
    assert PATCH["spec"]["template"]["spec"]["volumes"] == [{"name": "sidelight", "emptyDir": {}}]


def test_the_job_has_one_verdict_and_keeps_the_run() -> None:
    """No second attempt, and time to end by itself before Kubernetes ends it; the results are on the volume."""
    spec = JOB["spec"]
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert "--deadline=30m" in RUN["args"]
    assert spec["activeDeadlineSeconds"] > 30 * 60
    volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
    (place,) = [mount for mount in RUN["volumeMounts"] if mount["mountPath"] == "/data"]
    assert volumes[place["name"]]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert spec["template"]["spec"]["securityContext"]["fsGroup"] == 10001
    port = SERVICE["spec"]["ports"][0]["port"]
    assert RUN["args"][1] == f"http://{SERVICE['metadata']['name']}:{port}"


def test_the_pods_of_a_load_find_their_head() -> None:
    """By the name that the Service gives the first; as many send as there are others, at a niceness of 0."""
    spec, name = LOAD["spec"], PEERS["metadata"]["name"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    (port,) = (each["port"] for each in PEERS["spec"]["ports"])
    assert ("None", spec["template"]["metadata"]["labels"]) == (PEERS["spec"]["clusterIP"], PEERS["spec"]["selector"])
    assert f"{LOAD['metadata']['name']}-0.{name}:{port}" == variables["HEAD"]
    assert (name, "Indexed") == (spec["template"]["spec"]["subdomain"], spec["completionMode"])
    assert spec["completions"] - 1 == spec["parallelism"] - 1 == int(variables["NODES"])
    assert "0" == variables["RAY_worker_niceness"]


def test_what_prometheus_scrapes_is_served() -> None:
    """The monitor's label is on both Pods, its port on both containers, where --listen serves the page."""
    (expression,), (endpoint,) = MONITOR["spec"]["selector"]["matchExpressions"], MONITOR["spec"]["podMetricsEndpoints"]
    watched = (PATCH["spec"]["template"], SIDECAR), (TEMPLATES["job"], RUN), (TEMPLATES["shards"], SHARD)
    for pod, container in watched:
        assert expression["key"] in pod["metadata"]["labels"]
        (port,) = (port for port in container["ports"] if port["name"] == endpoint["port"])
        assert f"--listen=0.0.0.0:{port['containerPort']}" in container["args"]


def test_no_label_of_the_page_is_renamed() -> None:
    """Prometheus renames a label of the page that the operator sets as well, so that one is dropped."""
    page = LivePage()
    page.update(snapshots.snapshot(3))
    families = text_string_to_metric_families(page.render().decode())
    exposed = {label for family in families for sample in family.samples for label in sample.labels}
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    dropped = {rule["regex"] for rule in endpoint["relabelings"] if rule.get("action") == "labeldrop"}
    assert exposed & {"namespace", "container", "pod", "job", "instance", "endpoint"} == dropped


def test_every_trace_reaches_one_shard() -> None:
    """The Collectors route by trace to as many shards as there are, each by the name that its Pod keeps."""
    exporter = ROUTED["exporters"]["load_balancing"]
    assert "traceID" == exporter["routing_key"]
    assert ["load_balancing"] == ROUTED["service"]["pipelines"]["traces"]["exporters"]
    name, number = SHARDS["metadata"]["name"], SHARDS["spec"]["replicas"]
    assert (SHARDS["spec"]["serviceName"], "None") == (NAMES["metadata"]["name"], NAMES["spec"]["clusterIP"])
    hosts = exporter["resolver"]["static"]["hostnames"]
    assert [f"{name}-{shard}.{NAMES['metadata']['name']}:4317" for shard in range(number)] == hosts
    assert f"--shard=$(POD_INDEX)/{number}" in SHARD["args"]
    (index,) = SHARD["env"]
    assert ("POD_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']") == (
        index["name"], index["valueFrom"]["fieldRef"]["fieldPath"]
    )  # fmt: skip


def test_what_a_shard_cannot_take_goes_to_its_shard_of_then() -> None:
    """The queue is in front of the route; that of each shard would stay with one that has gone."""
    exporter = ROUTED["exporters"]["load_balancing"]
    assert {"sending_queue", "retry_on_failure"} <= exporter.keys()
    inner = exporter["protocol"]["otlp"]
    assert [False, False] == [inner[name]["enabled"] for name in ("sending_queue", "retry_on_failure")]


def test_the_shards_of_the_fleet_are_a_watch_as_it_is_started(tmp_path: Path) -> None:
    """The options are those of the command, and its targets a file that it reads."""
    targets = tmp_path / "targets.json"
    targets.write_text((ROOT / "fleet" / "targets.json").read_text())
    given = [
        argument.replace("$(POD_INDEX)", "0").replace("/etc/sidelight", str(tmp_path)) for argument in SHARD["args"]
    ]
    options = {name: value or True for name, _, value in (argument[2:].partition("=") for argument in given[1:])}
    fields = {
        name.replace("-", "_"): Path(value) if name == "metrics-from" else value for name, value in options.items()
    }
    pages = [set(pages_of(check_watch(WatchOptions(**{**fields, "shard": f"{shard}/4"})))) for shard in range(4)]
    assert {"http://engine-0.engine:8000/metrics", "http://engine-1.engine:8000/metrics"} == set.union(*pages)
    assert 2 == sum(map(len, pages))
