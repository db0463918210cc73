"""What brings the dashboard up fits together: compose, provisioning, Prometheus' configuration, alerts, the image."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
DASHBOARDS = REPOSITORY / "dashboards"
PROMTOOL = shutil.which("promtool")
SHELL_DEFAULT = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")


def read(path: str) -> Any:
    return yaml.safe_load((DASHBOARDS / path).read_text(encoding="utf-8"))


COMPOSE = read("compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")


def mounts(service: str) -> dict[str, str]:
    """Return where a service sees which source (a path or a volume's name)."""
    parts = [volume.split(":") for volume in SERVICES[service].get("volumes", ())]
    return {part[1]: part[0] for part in parts}


def promtool(*arguments: str) -> str:
    """Run promtool and return what it wrote; the test skips by name where it is absent."""
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_profile_brings_up_a_whole() -> None:
    """An engine (real or simulated), the sidecar (a run or a watch), Prometheus, Tempo and Grafana."""
    always = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert always == {"prometheus", "tempo", "grafana"}
    profiles = {
        profile: {name for name, service in SERVICES.items() if profile in service.get("profiles", ())}
        for profile in ("vllm", "simulator", "watch", "watch-simulator")
    }
    assert profiles == {
        "vllm": {"vllm", "sidelight"},
        "simulator": {"simulator", "sidelight"},
        "watch": {"vllm", "watch"},
        "watch-simulator": {"simulator", "watch"},
    }
    assert SERVICES["watch"]["networks"]["default"]["aliases"] == ["sidelight"]
    assert "COMPOSE_PROFILES=vllm" in (DASHBOARDS / ".env").read_text().splitlines()


def test_either_engine_answers_to_the_same_name() -> None:
    """The sidecar and Prometheus need not know which engine it is."""
    assert {SERVICES[name]["networks"]["default"]["aliases"][0] for name in ("vllm", "simulator")} == {"engine"}
    assert SERVICES["simulator"]["command"][:5] == ["simulate", "--host", "0.0.0.0", "--port", "8000"]
    assert set(SERVICES["sidelight"]["depends_on"]) == {"vllm", "simulator", "prometheus", "tempo"}
    assert all(not SERVICES["sidelight"]["depends_on"][name]["required"] for name in ("vllm", "simulator"))


def test_the_sidecar_serves_what_prometheus_scrapes() -> None:
    """The address in the run's command, the scrape target and the image's health check agree on the port."""
    command = SERVICES["sidelight"]["command"]
    assert command[:3] == ["run", "--url", "http://engine:8000"]
    assert command[command.index("--listen") + 1] == "0.0.0.0:9464"
    jobs = {job["job_name"]: job for job in read("prometheus/prometheus.yml")["scrape_configs"]}
    assert jobs["sidelight"]["static_configs"] == [{"targets": ["sidelight:9464"]}]
    assert jobs["engine"]["static_configs"] == [{"targets": ["engine:8000"]}]


def test_spans_go_from_the_engine_through_the_sidecar_to_tempo() -> None:
    """The engine traces, the sidecar listens and passes on, Tempo takes it, and an exemplar leads there."""
    for name, option in (("vllm", "--otlp-traces-endpoint"), ("simulator", "--otlp-endpoint")):
        command = SERVICES[name]["command"]
        assert command[command.index(option) + 1] == "http://sidelight:4317"
    for name in ("sidelight", "watch"):
        command = SERVICES[name]["command"]
        assert command[command.index("--otlp-listen") + 1] == "0.0.0.0:4317"
        assert command[command.index("--otlp-forward") + 1] == "http://tempo:4317"
    protocols = read("tempo/tempo.yaml")["distributor"]["receivers"]["otlp"]["protocols"]
    assert protocols["grpc"]["endpoint"] == "0.0.0.0:4317"  # by default Tempo listens on loopback alone
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]
    prometheus, tempo = read("provisioning/datasources/prometheus.yaml")["datasources"]
    (destination,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert (destination["name"], destination["datasourceUid"]) == ("trace_id", tempo["uid"])
    assert tempo["url"] == f"http://tempo:{read('tempo/tempo.yaml')['server']['http_listen_port']}"


def test_every_command_is_text() -> None:
    """Compose refuses numbers in a command, and would take a bare yes for a truth value."""
    for name, service in SERVICES.items():
        assert all(isinstance(word, str) for word in service.get("command", ())), name


def test_mounted_files_are_in_the_repository() -> None:
    """Every bind mount has a source here, and every named volume is declared."""
    for name in SERVICES:
        for source in mounts(name).values():
            if source.startswith("."):
                assert (DASHBOARDS / source).is_dir(), source
            else:
                assert source in COMPOSE["volumes"], source


def test_every_default_stands_in_the_env_file() -> None:
    """What compose falls back to and what .env says is the same, so neither surprises."""
    text = (DASHBOARDS / "compose.yaml").read_text(encoding="utf-8")
    stated = dict(line.split("=", 1) for line in (DASHBOARDS / ".env").read_text().splitlines() if "=" in line[:30])
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]+)\}", text):
        assert stated[name] == default


def test_ports_are_published_on_loopback_once() -> None:
    """Nothing is open to the network by default, and no two services want one port."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert sorted({port.split(":")[1] for port in ports}) == ["3000", "4317", "4318", "8000", "9090", "9464"]


@pytest.mark.parametrize("file", ["dashboards/compose.yaml", "examples/compose-watch.yaml"])
def test_our_services_may_do_next_to_nothing(file: str) -> None:
    """Whatever runs our image writes to its volume and to /tmp alone, and can gain no right."""
    services = yaml.safe_load((REPOSITORY / file).read_text(encoding="utf-8"))["services"]
    ours = {name: service for name, service in services.items() if "build" in service}
    assert ours
    for name, service in ours.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["tmpfs"] == ["/tmp"], name


def test_images_have_a_tag_and_no_registry_host() -> None:
    """A pinned tag, from wherever the user's container engine takes its images."""
    for service in SERVICES.values():
        image = SHELL_DEFAULT.sub(r"\1", service["image"])
        if "build" in service:
            assert (DASHBOARDS / service["build"]["context"] / "Dockerfile").is_file()
            continue
        assert re.fullmatch(r"[a-z-]+/[a-z-]+:v?\d+\.\d+\.\d+", image), image


def test_grafana_finds_data_source_and_dashboard() -> None:
    """The provisioned paths are where the compose file mounts the files."""
    inside = mounts("grafana")
    assert inside["/etc/grafana/provisioning"] == "./provisioning"
    (provider,) = read("provisioning/dashboards/sidelight.yaml")["providers"]
    folder = DASHBOARDS / inside[provider["options"]["path"]]
    assert len(list(folder.glob("*.json"))) == 3
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (folder / home.name).is_file()
    source, _ = read("provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)


def test_grafana_knows_the_scrape_interval() -> None:
    """$__rate_interval is made from it: were it smaller than the real one, every rate would be empty."""
    source, _ = read("provisioning/datasources/prometheus.yaml")["datasources"]
    interval = read("prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval


def test_prometheus_accepts_its_configuration() -> None:
    """promtool finds the configuration, and the rules that it names, valid."""
    assert "SUCCESS" in promtool("check", "config", "dashboards/prometheus/prometheus.yml")


def test_alerts_fire_on_their_trouble_only() -> None:
    """Each rule fires on made-up series of its trouble, and none in a healthy run."""
    assert "SUCCESS" in promtool("test", "rules", "tests/dashboards/rules_test.yml")


def test_the_sums_of_the_fleet_are_over_shards(tmp_path: Path) -> None:
    """By promtool: two shards of one fleet, beside a watch that is alone."""
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(read("kubernetes/fleet/rules.yaml")["spec"]))
    series = [
        ("sidelight_requests_total", 'shard="0/2", source="trace"', 10),
        ("sidelight_requests_total", 'shard="1/2", source="trace"', 20),
        ("sidelight_requests_total", 'source="trace"', 70),
        *(("sidelight_ttft_part_seconds_sum", f'shard="{shard}/2", part="{part}", source="trace"', total)
          for shard, part, total in ((0, "queue", 1), (1, "queue", 5), (0, "prefill", 3), (1, "prefill", 3))),
        *(("sidelight_ttft_part_seconds_count", f'shard="{shard}/2", part="{part}", source="trace"', count)
          for part in ("queue", "prefill") for shard, count in ((0, 10), (1, 20))),
    ]  # fmt: skip
    wanted = {
        'fleet:sidelight_requests:rate5m{job="f", source="trace"}': 0.5,
        'fleet:sidelight_ttft_part_mean_seconds:rate5m{job="f", part="queue"}': 0.2,
        'fleet:sidelight_ttft_part_mean_seconds:rate5m{job="f", part="prefill"}': 0.2,
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": f'{name}{{job="f", {labels}}}', "values": f"0+{step}x10"}
                         for name, labels, step in series],
        "promql_expr_test": [{"expr": series, "eval_time": "10m",
                              "exp_samples": [{"labels": series, "value": value}]} for series, value in wanted.items()],
    }  # fmt: skip
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "test.yml"))


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    """No rule without a firing test, a severity, a summary and a conclusion."""
    rules = [rule for group in read("prometheus/rules.yml")["groups"] for rule in group["rules"]]
    healthy, troubled = yaml.safe_load((Path(__file__).parent / "rules_test.yml").read_text())["tests"]
    names = {rule["alert"] for rule in rules}
    assert {check["alertname"] for check in healthy["alert_rule_test"]} == names
    assert {check["alertname"] for check in troubled["alert_rule_test"] if check["exp_alerts"]} == names
    for rule in rules:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_image_is_built_in_two_stages_from_hashes() -> None:
    """Wheels alone, by the lock files, verified, those that build ours too; build tools and installers stay behind."""
    assert re.findall(r"^FROM (\S+)( AS \w+)?$", DOCKERFILE, re.MULTILINE) == [
        ("${PYTHON_IMAGE}", " AS build"),
        ("${PYTHON_IMAGE}", ""),
    ]
    assert "venv --without-pip /opt/sidelight" in DOCKERFILE
    installs = re.findall(r"pip (?:--python \S+ )?(?:install|wheel)\b.*", DOCKERFILE)
    assert len(installs) == 4
    for line in installs:
        assert "--only-binary :all: --require-hashes" in line or "--no-deps" in line, line
    assert "wheel --no-deps --no-build-isolation" in DOCKERFILE
    assert '! python -c "import pip"' in DOCKERFILE.rpartition("\nFROM ")[2]


def test_the_image_runs_unprivileged_and_is_checked() -> None:
    """It starts as a plain user, by number as runAsNonRoot wants it, and its health check asks the live page."""
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "--uid 10001 sidelight" in final
    assert "\nUSER 10001:10001\n" in final
    assert final.index("USER 10001") < final.index('ENTRYPOINT ["sidelight"]')
    assert re.search(r'HEALTHCHECK .*\\\n +CMD \["python", "/opt/sidelight/bin/healthcheck.py"\]', final)
    assert "EXPOSE 9464" in final


def test_the_image_names_no_host() -> None:
    """No registry, index or proxy is written into the build."""
    assert not re.findall(r"https?://([^/:'\"\s]+)", DOCKERFILE)
    assert "--index-url" not in DOCKERFILE


def test_the_build_sees_what_it_copies_and_no_more() -> None:
    """The allow-list of .dockerignore, the COPY lines and the wheel's packages are one set."""
    allowed = {
        line[1:].rstrip("/") for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()
    }
    assert copied == allowed
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied
