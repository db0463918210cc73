"""One definition of the configuration: what it accepts, and how it says what is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from codes import raises
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.recorded.errors import ConfigurationError
from sidelight.sidecar.options.checks import DEFAULT_DURATION_S, check_doctor, check_run
from sidelight.sidecar.options.config import as_recorded, load_yaml
from sidelight.sidecar.options.fields import listen_address, seconds
from sidelight.sidecar.options.load import DEFAULT_RATE_PER_S, DoctorOptions, RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, check_scrape

URL = "http://127.0.0.1:8000"
NAMES = sorted({field.name for field in dataclasses.fields(RunOptions)} - {"config"})


def written(directory: Path, text: str) -> Path:
    """Return a configuration file with this text."""
    path = directory / "sidelight.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(options: RunOptions) -> str:
    """Return what is said of options that cannot be used."""
    with pytest.raises(ConfigurationError) as caught:
        check_run(options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", NAMES)
def test_keys_may_be_written_with_dashes_and_underscores(tmp_path: Path, name: str):
    """`scrape-interval` and `scrape_interval` are the same key, and so for every option of `run`."""
    for key in (name, name.replace("_", "-")):
        assert {name: 1} == load_yaml(written(tmp_path, f"{key}: 1\n"), RunOptions)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("forward_keep: 1h\n", ": there is no 'forward_keep' any more; exports wait in memory only"),
        ("save-requests: r\n", ": there is no 'save-requests' any more; each run keeps its requests"),
        ("rat: 1\n", ": unknown key 'rat'; did you mean 'rate'?"),
        ("sede: 1\n", ": unknown key 'sede'; did you mean 'seed'?"),
        ("scrape-intervall: 1\n", ": unknown key 'scrape-intervall'; did you mean 'scrape_interval'?"),
        ("api-key-: 1\n", ": unknown key 'api-key-'; did you mean 'api_key'?"),
        ("config: other.yaml\n", ": unknown key 'config'; did you mean '"),  # an option of the command line only
        ("url: http://h\nrate: [1, 2\nseed: 3\n", ", line 3, column 5: not YAML: "),
        ("url: http://h\n\trate: 2\n", ", line 2, column 1: not YAML: "),
        ("rate: 'open\n", ", line 2, column 1: not YAML: "),
        ("rate: " + "[" * 1000, ": not YAML: nested too deeply"),
        ("rate: 2024-13-45\n", ": not YAML: month must be in 1..12"),
        ("rate: !!timestamp 1\n", ": not YAML: "),
        ("- url\n", ": must be a mapping of options, but is a list"),
        ("42\n", ": must be a mapping of options, but is a int"),
        ("http//h\n", ": must be a mapping of options, but is a str"),
        (b"\xff\xfe\x00", ": not YAML: 'utf-8'"),
        (None, ": No such file or directory; give the path of a YAML file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | bytes | None, said: str):
    """It says which file, where in it or which key, and what was probably meant or stands there instead."""
    path = tmp_path / "sidelight.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError) as caught:
        load_yaml(path, RunOptions)
    assert str(caught.value).startswith(f"--config {path}{said}")
    assert "\n" not in str(caught.value)


@given(key=st.text(alphabet=st.characters(codec="utf-8", categories=("L", "N")), min_size=1))
def test_any_unknown_key_is_named_with_an_option_that_exists(tmp_path_factory: pytest.TempPathFactory, key: str):
    """Whatever stands there, the suggestion is a real option."""
    if key in NAMES or key == "config":
        return
    path = written(tmp_path_factory.getbasetemp(), yaml.safe_dump({key: 1}, allow_unicode=True))
    with raises("option.unknown") as caught:
        load_yaml(path, RunOptions)
    message = str(caught.value)
    assert f"'{key}'" in message
    assert message.rpartition("did you mean '")[2].rstrip("'?") in NAMES


def test_an_option_of_run_only_is_a_typo_for_scrape(tmp_path: Path):
    """Each command knows its own keys."""
    path = written(tmp_path, "rate: 3\n")
    assert {"rate": 3} == load_yaml(path, RunOptions)
    with pytest.raises(ConfigurationError, match="unknown key 'rate'"):
        load_yaml(path, ScrapeOptions)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_configures_nothing(tmp_path: Path, text: str):
    """It is not an error to have said nothing."""
    assert {} == load_yaml(written(tmp_path, text), RunOptions)


@pytest.mark.parametrize("name", ["rate", "duration", "request_timeout", "scrape_interval", "scrape_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_what_must_be_positive_is(name: str, value: float):
    """Zero, negative and no number at all are refused by the option's name and value."""
    message = refusal(dataclasses.replace(RunOptions(url=(URL,)), **{name: value}))
    assert f"--{name.replace('_', '-')} {value:g}: must be greater than 0" == message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"concurrency": 0}, "--concurrency 0: must be at least 1"),
        ({"requests": 0}, "--requests 0: must be at least 1"),
        ({"warmup": -1}, "--warmup -1: must be at least 0"),
        ({"drain_timeout": -0.5}, "--drain-timeout -0.5: must be at least 0"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
        ({"rate": 1e7}, "--rate 10000000: must be at most 1000000"),
        ({"drain_timeout": float("inf")}, "--drain-timeout inf: must be at most 10000000"),
        ({"slice_duration": 1e-10}, "--slice-duration 1e-10: must be at least 0.01"),
        ({"scrape_interval": 1e-3}, "--scrape-interval 0.001: must be at least 0.01"),
        ({"concurrency": 10**9}, "--concurrency 1000000000: must be at most 100000"),
        ({"rate": 1e6, "duration": 1e6}, "--rate 1000000 --duration 1000000: more than 10,000,000 requests; lower one"),
    ],
)
def test_what_no_machine_can_do_is_refused_before_the_run(options: dict[str, float], said: str):
    """An absurd value is an error of its option, not a traceback after the measurement."""
    assert said == refusal(dataclasses.replace(RunOptions(url=(URL,)), **options))


def test_an_unknown_workload_lists_the_names_and_the_nearest():
    """All of them, so that one can be chosen without a second try."""
    message = refusal(RunOptions(url=(URL,), workload="synthetic-unifrom"))
    assert "did you mean 'synthetic-uniform'" in message
    assert all(name in message for name in workloads.NAMES)


@pytest.mark.parametrize(
    "url", ["127.0.0.1", "ftp://h", "http://", "http://h:port", "http://h:99999", "http://[", "http://a..b"]
)
def test_a_url_must_be_http_with_a_host(url: str):
    """For the target and for every metrics page alike."""
    assert f"--url {url}: must be an http:// or https:// URL" in refusal(RunOptions(url=(url,)))
    assert f"--metrics {url}: must be" in refusal(RunOptions(url=(URL,), metrics=(f"{URL}/metrics", url)))


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("team", "must be NAME=VALUE"),
        ("9=x", "must be NAME=VALUE"),
        ("run_id=x", "run_id is a label of the page itself"),
        ("team=\udcff", "the value must be printable text"),
    ],
)
def test_a_tag_is_a_label_that_can_be_sent(tag: str, said: str):
    assert said in refusal(RunOptions(url=(URL,), tag=(tag,)))


def test_a_tag_has_one_value():
    """Two values of one name are refused: the first of them was dropped unseen."""
    assert "--tag a=2: a is given more than once" in refusal(RunOptions(url=(URL,), tag=("b=1", "a=2", "a=1")))


def test_a_declaration_is_recorded_as_it_was_read(tmp_path: Path):
    """In a configuration file as a mapping, or the path of a file of its own; what a variant is may be called off."""
    config = load_yaml(
        written(tmp_path, "sut:\n  model_version: 2026-01-02\n  variants: {off: {model: m}}\n"), RunOptions
    )
    (tmp_path / "sut.yaml").write_text("model-version: '2026-01-02'\nvariants: {off: {model: m}}\n")
    for sut in (config["sut"], str(tmp_path / "sut.yaml")):
        checked = check_run(RunOptions(url=(URL,), sut=sut))
        assert {"model_version": "2026-01-02", "variants": {"off": {"model": "m"}}} == json.loads(checked.sut or "")


def test_a_declaration_that_cannot_be_used_is_one_line():
    """It names the option, the field and the value."""
    said = refusal(RunOptions(url=(URL,), sut='{"boundry": "model engine"}'))
    assert said.startswith("--sut boundry: unknown field (did you mean 'boundary'?)")


def test_the_target_must_be_named():
    """A run needs a URL, a scrape a URL or a page."""
    assert refusal(RunOptions()).startswith("--url is missing")
    with raises("option.missing"):
        check_scrape(ScrapeOptions())
    assert ScrapeOptions(metrics=(URL,)) == check_scrape(ScrapeOptions(metrics=(URL,)))


def test_defaults_depend_on_each_other():
    """An open loop has a rate, a closed loop none; without a number of requests, a duration ends the load."""
    assert (DEFAULT_RATE_PER_S, DEFAULT_DURATION_S) == _load(RunOptions(url=(URL,)))
    assert (DEFAULT_RATE_PER_S, None) == _load(RunOptions(url=(URL,), requests=5))
    assert (None, DEFAULT_DURATION_S) == _load(RunOptions(url=(URL,), concurrency=3))
    assert (2.0, 7.0) == _load(RunOptions(url=(URL,), rate=2.0, requests=5, duration=7.0))


def _load(options: RunOptions) -> tuple[float | None, float | None]:
    checked = check_run(options)
    return checked.rate, checked.duration


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9464", ("::1", 9464)),
        ("localhost:1", ("localhost", 1)),
        ("off", None),
    ],
)
def test_an_address_to_listen_on(listen: str, address: tuple[str, int] | None):
    """HOST:PORT, with brackets around an IPv6 address; 'off' serves nothing."""
    assert address == listen_address(listen)


@pytest.mark.parametrize("listen", ["9464", ":9464", "host:", "host:http", "host:65536", "host:-1", ""])
def test_no_address_to_listen_on(listen: str):
    """Anything else is refused."""
    with raises("option.value"):
        listen_address(listen)


def test_what_is_recorded_is_json_with_secrets_masked():
    """Every option stands there under its name; of a secret only that there was one."""
    options = RunOptions(url=(URL,), api_key="hush", metrics=(URL,), out=Path("here"))
    recorded = as_recorded(options)
    assert [field.name for field in dataclasses.fields(RunOptions)] == list(recorded)
    assert ("***", [URL], "here") == (recorded["api_key"], recorded["metrics"], recorded["out"])
    assert "hush" not in json.dumps(recorded)
    assert None is as_recorded(RunOptions(url=(URL,)))["api_key"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics_ca": Path("none.pem")}, "--metrics-ca none.pem: No such file or directory; give the path of a PEM"),
        ({"metrics_ca": Path(__file__)}, f"--metrics-ca {__file__}: holds no certificate in PEM format; give"),
        ({"metrics_key": Path("k.pem")}, "--metrics-key k.pem: needs --metrics-cert"),
        ({"metrics_cert": Path("c.pem")}, "--metrics-cert c.pem: No such file or directory; give"),
        (
            {"metrics_header": ("hush",)},
            "--metrics-header (4 characters without a colon): must be 'Name: value' in one line",
        ),
        ({"metrics_header": ("A: 1", ": hush")}, "--metrics-header '': must be 'Name: value'"),
        ({"metrics_header": ("X Y: hush",)}, "--metrics-header 'X Y': must be 'Name: value'"),
        ({"metrics_header": ("X: hush\nY: hush",)}, "--metrics-header 'X': must be 'Name: value'"),
        ({"metrics_header": ("X: hush", "x: hush")}, "--metrics-header x: given twice; give it once"),
        ({"metrics_token": "hush hush"}, "--metrics-token: must not contain spaces or line breaks"),
        ({"metrics_token": "hush\n"}, "--metrics-token: must not contain spaces or line breaks"),
        ({"metrics_user": "hush"}, "--metrics-user: must be USER:PASSWORD in one line"),
        ({"metrics_user": "hush:\n"}, "--metrics-user: must be USER:PASSWORD in one line"),
        (
            {"metrics_user": "ann:hush", "metrics_token": "hush"},
            "--metrics-token (or SIDELIGHT_METRICS_TOKEN) and --metrics-user (or SIDELIGHT_METRICS_USER) exclude each",
        ),
        (
            {"metrics_token": "hush", "metrics_header": ("authorization: hush",)},
            "--metrics-token (or SIDELIGHT_METRICS_TOKEN) and --metrics-header Authorization exclude each other",
        ),
        (
            {"metrics_insecure": True, "metrics_ca": Path("ca.pem")},
            "--metrics-insecure and --metrics-ca ca.pem exclude each other",
        ),
        ({"scrape_timeout": 0.0}, "--scrape-timeout 0: must be greater than 0"),
        ({"formats": ("json", "xml")}, "--formats xml: no such format; choose from json, csv, jsonl, parquet, text"),
        ({"formats": ("JSON",)}, "--formats JSON: no such format; choose from json, csv, jsonl, parquet, text"),
        ({"formats": ("",)}, "--formats : no such format; choose from"),
        ({"metrics": ("http://ann:hush@",)}, "--metrics http://***@: must be an http:// or https:// URL"),
        ({"metrics": ("ann:hush@h/metrics",)}, "--metrics ***@h/metrics: must be an http:// or https:// URL"),
        ({"otlp_listen": "4317"}, "--otlp-listen 4317: must be HOST:PORT, e.g. 127.0.0.1:4317"),
        ({"otlp_listen": ":4317"}, "--otlp-listen :4317: must be HOST:PORT"),
        (
            {"otlp_listen": "h:65535"},
            "--otlp-listen h:65535: must be HOST:PORT, e.g. 127.0.0.1:4317, PORT below",
        ),
        (
            {"otlp_forward": "http://c:4317"},
            "--otlp-forward: there are no spans to forward; add --otlp-listen",
        ),
        (
            {"otlp_listen": "127.0.0.1:4317", "otlp_forward": "c:4317"},
            "--otlp-forward: c:4317 is not a grpc(s) or http(s) URL",
        ),
        (
            {"otlp_listen": "127.0.0.1:4317", "otlp_forward": "grpc://c"},
            "--otlp-forward: grpc://c names no port; e.g. grpc://",
        ),
        ({"otlp_header": ("hush",)}, "--otlp-header (4 characters without a colon): must be 'Name: value' in one line"),
        ({"otlp_ca": Path("/nowhere")}, "--otlp-ca /nowhere: No such file or directory"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anybody_is_asked(options: dict[str, object], said: str):
    """One line with the option and the cure, for `run` and `scrape` alike; no secret stands in it."""
    for checked in (
        lambda: check_run(dataclasses.replace(RunOptions(url=(URL,)), **options)),
        lambda: check_scrape(dataclasses.replace(ScrapeOptions(url=URL), **options)),
    ):
        with pytest.raises(ConfigurationError) as caught:
            checked()
        message = str(caught.value)
        assert message.startswith(said)
        assert "hush" not in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("chat", URL, URL),
        ("chat", f"{URL}/v1", f"{URL}/v1"),
        ("chat", f"{URL}/v1/chat/completions", URL),
        ("chat", f"{URL}/team/v1/chat/completions/", f"{URL}/team"),
        ("chat", f"{URL}/v1/models", URL),
        ("completions", f"{URL}/v1/completions", URL),
        ("responses", f"{URL}/v1/responses", URL),
        ("messages", f"{URL}/v1/messages", URL),
        ("ollama", f"{URL}/api/chat", URL),
        ("exo", f"{URL}/bench/chat/completions", URL),
    ],
)
def test_the_address_of_an_endpoint_is_understood(endpoint: str, url: str, expected: str):
    """As other tools and the API's own documentation give it."""
    assert (expected,) == check_run(RunOptions(url=(url,), endpoint=endpoint)).url
    assert (expected,) == check_doctor(DoctorOptions(url=(url,), endpoint=endpoint)).url


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("/v1/completions", "is the address of --endpoint completions, but --endpoint is chat; give"),
        ("/openai/chat/completions", "give the base URL, to which /v1/chat/completions is added; this"),
        ("/v1/chat/completions?api-version=1", "give the base URL, without what follows its path ('?' or '#')"),
    ],
)  # fmt: skip
def test_the_address_of_another_endpoint_is_named(url: str, problem: str):
    """With the option, or the URL, to give instead."""
    assert f"--url {URL}{url}: {problem}" in refusal(RunOptions(url=(URL + url,)))


@pytest.mark.parametrize("path", ["/v1", "/chat/completions"])
def test_a_key_in_a_url_is_not_shown(path: str):
    """Whatever else is wrong with the URL."""
    assert f"--url {URL}{path}?api_key=***: " in refusal(RunOptions(url=(f"{URL}{path}?api_key=hush",)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 30.0), ("0.5", 0.5), ("1e3", 1000.0), ("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0),
        ("2d", 172_800.0), ("1h30m", 5400.0), ("1m30s500ms", 90.5), ("-1", -1.0),
    ],
)  # fmt: skip
def test_a_time_is_seconds_or_has_units(text: str, value: float):
    """As in Prometheus' durations; bounds are checked apart from that."""
    assert value == pytest.approx(seconds(text))


@pytest.mark.parametrize("text", ["", "s", "30 s", "30x", "5 minutes", "1h-30m", "h1", "30S", "1h30"])
def test_no_time(text: str):
    """Anything else says what can be written."""
    with pytest.raises(ValueError, match="must be seconds, or a number with ms, s, m, h or d, like 30s"):
        seconds(text)


def test_a_configuration_file_has_times_lists_and_mappings(tmp_path: Path):
    """Mappings reach their options as JSON; times are converted where an option is."""
    text = "duration: 5m\nworkload: {input: 512, output: {fixed: 3}}\nurl: [http://a, http://b]\ninput_tokens: 64\n"
    assert {
        "duration": "5m",
        "workload": '{"input": 512, "output": {"fixed": 3}}',
        "url": ["http://a", "http://b"],
        "input_tokens": 64,
    } == load_yaml(written(tmp_path, text), RunOptions)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"input_tokens": "0"},
            "--input-tokens 0: tokens: 0 must be at least 1; write a number of",
        ),
        ({"output_tokens": "uniform:9-2"}, "--output-tokens uniform:9-2: uniform.min: 9 is above max 2"),
        (
            {"input_tokens": "64", "workload": "trace", "trace": Path("t"), "arrival": "replay"},
            "--input-tokens and --w",
        ),
        (
            {"input_tokens": "64", "workload": "conversation", "dataset": Path("d")},
            "--input-tokens and --dataset d",
        ),
        ({"output_tokens": "64", "replay_requests": Path("r")}, "--output-tokens and --replay-requests exclude"),
        ({"input_tokens": "64", "prompts": Path("p")}, "--prompts and --input-tokens exclude each other"),
        ({"output_tokens": "normal:9,1", "prompts": Path("p")}, "--output-tokens normal:9,1: must be a number where"),
        ({"workload": '{"input": 5}'}, '--workload {"input": 5}: output: is missing; add it'),
        ({"workload": "{"}, "--workload {: line 1, column 2: not YAML: "),
    ],
)
def test_lengths_and_limits_that_cannot_be_used(options: dict[str, object], said: str):
    """Both options are named where two contradict each other."""
    assert refusal(dataclasses.replace(RunOptions(url=(URL,)), **options)).startswith(said)


def test_all_requests_at_once_are_a_closed_loop():
    """As wide as the cap, else as the run is long."""
    for limits, width in (({"requests": 7}, 7), ({"requests": 7, "concurrency": 3}, 3)):
        options = check_run(dataclasses.replace(RunOptions(url=(URL,)), rate=float("inf"), **limits))
        assert (None, width, True, None) == (options.rate, options.concurrency, options.closed_loop, options.cap)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"trace_url": "javascript:{trace_id}"},
            "--trace-url javascript:{trace_id}: must be an http:// or https:// URL",
        ),
        (
            {"trace_url": "https://tempo"},
            "--trace-url https://tempo: must be an http:// or https:// URL with {trace_id}",
        ),
        (
            {"prometheus_write": "h:9090"},
            "--prometheus-write h:9090: must be an http:// or https:// URL, e.g. http://127.0.0.1:9090/api/v1/write",
        ),
        ({"prometheus_header": ("hush",)}, "--prometheus-header (4 characters without a colon): must be 'Name: value'"),
    ],
)
def test_where_results_go_is_checked_before_the_run(options: dict[str, object], said: str):
    """One line with the option and the cure."""
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        check_run(dataclasses.replace(RunOptions(url=(URL,)), **options))
