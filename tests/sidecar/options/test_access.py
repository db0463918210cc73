"""The options of access to metrics pages: what they become, what is refused, and what is never shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from certificates import Authority
from codes import raises

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import Access, Guard, basic
from sidelight.sidecar.options.access import AccessOptions, check_access, guard_of, metrics_access
from sidelight.sidecar.options.checks import check_doctor, check_run, headers_of
from sidelight.sidecar.options.config import as_recorded, command_as_recorded, load_yaml
from sidelight.sidecar.options.load import DoctorOptions, RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions, check_scrape, check_watch

URL = "http://127.0.0.1:8000"


def test_nothing_said_is_nothing_sent():
    """Without options there is neither a header nor a file."""
    assert Access() == metrics_access(AccessOptions())


def test_each_option_arrives():
    """Headers are taken apart at their first colon; credentials become an Authorization."""
    token = AccessOptions(metrics_token="t", metrics_header=("X-Scope-OrgID: a:b ", "X-Empty:"))
    assert {"X-Scope-OrgID": "a:b", "X-Empty": "", "Authorization": "Bearer t"} == dict(metrics_access(token).headers)
    user = AccessOptions(metrics_user="ann:p:w", metrics_insecure=True, metrics_cert=Path("c"), metrics_key=Path("k"))
    access = metrics_access(user)
    assert {"Authorization": basic("ann:p:w")} == dict(access.headers)
    assert (True, "c", "k") == (access.insecure, access.cert, access.key)


def test_the_api_key_goes_only_to_the_host_that_it_was_given_for():
    """And only where nothing else was said of credentials."""
    headers = {"127.0.0.1:8000": {"Authorization": "Bearer sk"}}
    assert headers == metrics_access(AccessOptions(), urls=(f"{URL}/v1",), api_key="sk").host_headers
    assert {} == metrics_access(AccessOptions(metrics_token="t"), urls=(URL,), api_key="sk").host_headers
    assert (
        {}
        == metrics_access(AccessOptions(metrics_header=("authorization: x",)), urls=(URL,), api_key="sk").host_headers
    )
    assert {} == metrics_access(AccessOptions(), urls=(URL,), api_key=None).host_headers


def test_a_url_with_a_user_is_a_metrics_url_only():
    """The user of a page is asked for there and masked in what is recorded; the target's key is an option."""
    page = "http://ann:hush@127.0.0.1:9400/metrics"
    options = check_run(RunOptions(url=(URL,), metrics=(page,)))
    assert (page,) == options.metrics
    assert ["http://***@127.0.0.1:9400/metrics"] == as_recorded(options)["metrics"]
    with raises("url.password"):
        check_run(RunOptions(url=("http://ann:hush@127.0.0.1:8000",)))


def test_what_is_recorded_has_no_secret():
    """Of a header its name, of a token and a user only that there was one."""
    options = RunOptions(
        url=(URL,), metrics_user="ann:hush", metrics_token="hush", metrics_header=("X-Key: hush", "hush")
    )
    recorded = as_recorded(options)
    assert ("***", "***", ["X-Key: ***", "***"]) == (
        recorded["metrics_user"],
        recorded["metrics_token"],
        recorded["metrics_header"],
    )
    assert "hush" not in json.dumps(recorded)


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (["--metrics-token", "hush", "--seed", "1"], ["--metrics-token", "***", "--seed", "1"]),
        (["--metrics-token=hush"], ["--metrics-token=***"]),
        (["--api_key", "hush", "--url", "http://h"], ["--api_key", "***", "--url", "http://h"]),
        (["--metrics_user=a:hush=x"], ["--metrics_user=***"]),
        (["--metrics-header", "X: hush"], ["--metrics-header", "***"]),
        (["--metrics", "http://a:hush@h/m?x=1"], ["--metrics", "http://***@h/m?x=1"]),
        (["--metrics=http://a:hush@h/m?x=1"], ["--metrics=http://***@h/m?x=1"]),
        (["--metrics", "http://h/m?x=1"], ["--metrics", "http://h/m?x=1"]),
        (["--cert", "/srv/ann/client.pem", "--quiet"], ["--cert", "***", "--quiet"]),
        (["--extra-body", '{"api_key": "hush"}'], ["--extra-body", '{"api_key": "***"}']),
        (['--extra_body={"top_k": 1}'], ['--extra_body={"top_k": 1}']),
        (["--listen-tls", "/srv/c.pem", "/srv/k.pem", "--quiet"], ["--listen-tls", "***", "***", "--quiet"]),
        (["--prompts", "--api-key"], ["--prompts", "--api-key"]),
    ],
)
def test_the_command_is_recorded_without_secrets(given: list[str], recorded: list[str]):
    """As it was typed otherwise."""
    assert ["run", *recorded] == command_as_recorded(["run", *given], RunOptions)


def test_both_names_of_the_timeout(tmp_path: Path):
    """`metrics-timeout` and `scrape-timeout` are one option."""
    for key in ("metrics-timeout", "metrics_timeout", "scrape-timeout"):
        (tmp_path / "c.yaml").write_text(f"{key}: 2\n", encoding="utf-8")
        assert {"scrape_timeout": 2} == load_yaml(tmp_path / "c.yaml", RunOptions)


def test_options_without_fault_pass():
    """What is complete is not complained of."""
    check_access(AccessOptions(metrics_user="ann:p w", metrics_header=("X: 1", "Y: ä")))
    check_access(AccessOptions(metrics_token="t", metrics_insecure=True))


OPEN = "other machines reach this address; add --listen-tls CERT KEY and --listen-token or --listen-client-ca, or"


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]", "10.0.0.7", "sidecar.example", "192.168.1.1"])
def test_an_address_of_the_network_is_not_served_to_anybody_unasked(address: str):
    """Whichever port it is for, in every command; --listen-open says that it is wanted."""
    pages, spans = f"--listen {address}:9464: {OPEN}", f"--otlp-listen {address}:4317: {OPEN}"
    for check, options, named in (
        (check_watch, WatchOptions(listen=f"{address}:9464"), pages),
        (check_watch, WatchOptions(otlp_listen=f"{address}:4317"), spans),
        (check_run, RunOptions(url=(URL,), listen=f"{address}:9464"), pages),
        (check_run, RunOptions(url=(URL,), otlp_listen=f"{address}:4317"), spans),
        (check_scrape, ScrapeOptions(otlp_listen=f"{address}:4317"), spans),
        (check_doctor, DoctorOptions(url=(URL,), otlp_listen=f"{address}:4317"), spans),
    ):
        with raises("listen.open") as refused:
            check(options)  # type: ignore[operator]
        assert str(refused.value).startswith(named)
        check(dataclasses.replace(options, listen_open=True))  # type: ignore[operator, type-var]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "[::1]", "localhost", "a.localhost"])
def test_this_machine_is_served_as_it_was(address: str):
    """Addresses of the loopback need nothing more."""
    check_watch(WatchOptions(listen=f"{address}:9464", otlp_listen=f"{address}:4317"))
    check_run(RunOptions(url=(URL,), listen="off"))


def test_what_guards_an_address_of_the_network(authority: Authority):
    """TLS with a token, or with an authority of the clients; each alone is not enough, and what cannot be is named."""
    tls = (Path(authority.path("server.pem")), Path(authority.path("server.key")))
    ca, other = Path(authority.path("ca.pem")), Path(authority.path("client.key"))
    whole = {"listen": "0.0.0.0:9464", "otlp_listen": "0.0.0.0:4317", "listen_tls": tls}
    for more in ({"listen_token": "hush"}, {"listen_client_ca": ca}):
        check_watch(WatchOptions(**whole, **more))  # type: ignore[arg-type]
    expected = Guard(cert=str(tls[0]), key=str(tls[1]), token="hush")
    assert expected == guard_of(WatchOptions(**whole, listen_token="hush"))  # type: ignore[arg-type]
    assert "hush" not in repr(expected)
    for options, said in (
        (whole, f"--listen 0.0.0.0:9464: {OPEN}"),
        ({"listen": "0.0.0.0:9464", "listen_token": "hush"}, f"--listen 0.0.0.0:9464: {OPEN}"),
        ({"listen_client_ca": ca}, f"--listen-client-ca {ca}: needs --listen-tls CERT KEY"),
        ({"listen_token": "hush hush"}, "--listen-token: must not be empty or contain spaces"),
        ({"listen_token": ""}, "--listen-token: must not be empty or contain spaces"),
        (
            {"listen_tls": (tls[0], other)},
            f"--listen-tls {other}: is not the key of this certificate; give the path of",
        ),
        ({"listen_tls": (Path("none"), tls[1])}, "--listen-tls none: No such file or directory; give the path of a"),
        ({"listen_tls": tls, "listen_client_ca": tls[1]}, f"--listen-client-ca {tls[1]}: holds no certificate in PEM"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            check_watch(WatchOptions(**options))  # type: ignore[arg-type]
        assert str(refused.value).startswith(said), refused.value


def test_a_file_names_certificate_and_key_in_a_list(tmp_path: Path):
    """As other lists; the token is masked in what is recorded, and where certificates lie."""
    file = tmp_path / "watch.yaml"
    file.write_text("listen-tls: [c.pem, k.pem]\nlisten-token: hush\n")
    assert {"listen_tls": ["c.pem", "k.pem"], "listen_token": "hush"} == load_yaml(file, WatchOptions)
    recorded = as_recorded(WatchOptions(listen_tls=(Path("c.pem"), Path("k.pem")), listen_token="hush"))
    assert (["***", "***"], "***") == (recorded["listen_tls"], recorded["listen_token"])


def test_headers_of_a_file_are_those_of_the_command_line(tmp_path: Path):
    """A header a line, empty lines between them. No error shows what stands there."""
    path = tmp_path / "headers"
    path.write_text("X-Key: hush\n\nX-Other: b\n", encoding="utf-8")
    expected = {"X-Team": "blue", "X-Key": "hush", "X-Other": "b"}
    assert expected == headers_of(RunOptions(header=("X-Team: blue", f"@{path}")))
    assert ["X-Team: ***", "***"] == as_recorded(RunOptions(header=("X-Team: blue", f"@{path}")))["header"]
    with raises("file.unreadable"):
        headers_of(RunOptions(header=(f"@{tmp_path}",)))
    path.write_text("hush\n", encoding="utf-8")
    with raises("option.value", says="4 characters"):
        headers_of(RunOptions(header=(f"@{path}",)))


def test_a_certificate_is_recorded_without_its_place():
    """A path says who the user is, and where the key lies."""
    recorded = as_recorded(RunOptions(ca=Path("/srv/ann/ca.pem"), metrics_key=Path("/srv/ann/k"), otlp_ca=Path("a")))
    assert ["***", "***", "***", None] == [recorded[name] for name in ("ca", "metrics_key", "otlp_ca", "cert")]
