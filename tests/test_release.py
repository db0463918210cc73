"""What a release is made with: licences, names and addresses, and the question whether a container is well."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from certificates import Authority
from documents import options

REPOSITORY = Path(__file__).parents[1]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "release" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.append(str(REPOSITORY / "release"))  # scripts there import each other
build, healthcheck, identity, sbom = map(_script, ("build", "healthcheck", "identity", "sbom"))
manual, metadata = map(_script, ("manual", "metadata"))

SERVER = """
import http.server, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2]) if self.path == "/healthz" else 500)
        self.end_headers()
    def log_message(self, *_): pass
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = Server((sys.argv[1], 0), Handler)
print("up", flush=True)
server.serve_forever()
"""


@contextmanager
def up(code: str, *arguments: str) -> Iterator[int]:
    """The process of a Python program that says when it is up."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            yield server.pid
        finally:
            server.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="containers run on Linux")
@pytest.mark.parametrize(
    ("host", "status", "code"),
    [("127.0.0.1", 200, 0), ("0.0.0.0", 200, 0), ("::1", 200, 0), ("127.0.0.1", 404, 0), ("127.0.0.1", 503, 1)],
)
def test_a_container_is_as_well_as_what_it_serves(host: str, status: int, code: int):
    """Wherever it listens; a server that does not know the question, a simulated engine, is well."""
    with up(SERVER, host, str(status)) as pid:
        assert code == healthcheck.main([str(pid)])
    assert 0 == healthcheck.main([str(pid)])


@pytest.mark.skipif(sys.platform != "linux", reason="containers run on Linux")
def test_a_page_over_tls_is_asked_too(authority: Authority):
    """Whatever its certificate says, and where it lets no client in without one."""
    for verify in ("CERT_NONE", "CERT_REQUIRED"):
        code = SERVER.replace("import http.server", "import http.server, ssl").replace(
            'print("up"',
            "c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); c.load_cert_chain(*sys.argv[3:5])\n"
            f"c.load_verify_locations(sys.argv[3]); c.verify_mode = ssl.{verify}\n"
            'server.socket = c.wrap_socket(server.socket, server_side=True)\nprint("up"',
        )
        pair = [authority.path("solo.pem"), authority.path("solo.key")]
        with up(code, "127.0.0.1", "200", *map(str, pair)) as pid:
            assert 0 == healthcheck.main([str(pid)])


@pytest.mark.skipif(sys.platform != "linux", reason="containers run on Linux")
def test_a_container_that_hangs_is_not_well(monkeypatch: pytest.MonkeyPatch):
    """It listens, and answers nothing in time."""
    monkeypatch.setattr(healthcheck, "TIMEOUT_S", 0.1)
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print('up', flush=True); time.sleep(600)"
    with up(code) as pid:
        assert 1 == healthcheck.main([str(pid)])


@pytest.mark.skipif(sys.platform != "linux", reason="containers run on Linux")
def test_a_command_that_serves_nothing_is_well():
    """As report and scrape do."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as busy:
        assert 0 == healthcheck.main([str(busy.pid)])
        busy.communicate(b"\n")


def _package(**fields: str | list[str]) -> Message:
    package = Message()
    for name, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            package[name.replace("_", "-")] = value
    return package


@pytest.mark.parametrize(
    ("package", "licence"),
    [
        (_package(License_Expression="MIT OR Apache-2.0", License="GPL"), "MIT OR Apache-2.0"),
        (_package(License="Apache 2.0"), "Apache-2.0"),
        (_package(License="MIT License\n\nCopyright (c) 2022 OpenAI"), "MIT"),
        (_package(License="\n"), "NOASSERTION"),
        (_package(Classifier=["Topic :: Text", "License :: OSI Approved :: MIT License"]), "MIT"),
        (_package(License="Our own terms"), "Our own terms"),
    ],
)
def test_a_licence_is_read_from_what_a_package_states(package: Message, licence: str):
    """By its expression, else the first line of its licence, else its classifiers."""
    stated = {"Apache 2.0": "Apache-2.0", "MIT License": "MIT"}
    assert licence == sbom.licence_of(package, stated)


def test_a_licence_is_allowed_for_all_or_for_one_package():
    """Every part of an expression; what is not known is not allowed."""
    policy = {"allowed": ["MIT", "Apache-2.0"], "packages": {"certifi": {"allowed": ["MPL-2.0"], "why": "data"}}}
    assert [] == sbom.not_allowed("x", "(MIT OR Apache-2.0) AND MIT", policy)
    assert [] == sbom.not_allowed("certifi", "MPL-2.0", policy)
    assert ["MPL-2.0"] == sbom.not_allowed("x", "MIT AND MPL-2.0", policy)
    assert ["Our", "own", "terms"] == sbom.not_allowed("x", "Our own terms", policy)
    assert ["NOASSERTION"] == sbom.not_allowed("x", "NOASSERTION", policy)


def test_what_is_locked_must_be_what_is_here():
    """Else the licences of other versions would be stated."""
    policy = {"allowed": [], "packages": {}, "stated": {}}
    (line,) = sbom.problems({"pytest": "0.1"}, policy)
    assert line.startswith("pytest is locked at 0.1, and here it is ")
    (line,) = sbom.problems({"no-such-package-here": "1"}, policy)
    assert "not installed" in line


def test_each_component_of_the_bill_states_a_licence():
    """NOASSERTION where its package states none: an empty list says that none was looked for."""
    bill = json.loads((sbom.ROOT / "release" / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert [] == [component["name"] for component in bill["components"] if not component["licenses"]]


def test_files_that_name_the_publisher_agree():
    """With release/identity.toml, and with the version of pyproject.toml: `make docs` writes them."""
    assert 0 == identity.main(["--check"])


def test_a_release_names_its_publisher_and_version():
    """A commit tagged v* with a placeholder or of another version is refused; without a tag it may be built."""
    named = {"repository": "https://forge.test/us/sidelight", "version": "1.2.3"}
    unnamed = named | {"image": f"forge.test/{identity.PLACEHOLDER}/sidelight"}
    assert [] == build.refusals(["v1.2.3"], named)
    assert [] == build.refusals([], unnamed)
    assert ["image"] == [line.split()[0] for line in build.refusals(["v1.2.3", "other"], unnamed)]
    assert 1 == len(build.refusals(["v1.2.4"], named))


def test_no_placeholder_is_left_once_the_publisher_is_filled_in():
    """Neither in a file that is written, nor in one that is not."""
    values = {name: value.replace(identity.PLACEHOLDER, "us") for name, value in identity.identity().items()}
    places = {name for name, _, _ in identity.PLACES}
    assert [] == [name for name in places if identity.PLACEHOLDER in identity.filled_in(name, values)]
    command = ["git", "grep", "-lE", rf"{identity.PLACEHOLDER}(/sidelight|\.github)"]
    named = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.split()
    assert places | {"release/identity.toml"} >= set(named)


def test_a_place_for_a_value_must_be_there():
    """Each occurrence is written; a file that has none was changed without its row."""
    assert identity.updated("url: a\nx\nurl: aa", r"^url: (\S+)$", "b") == "url: b\nx\nurl: b"
    with pytest.raises(LookupError):
        identity.updated("link: a", r"^url: (\S+)$", "b")


def test_the_readme_leads_somewhere_on_a_package_index():
    """Its links and pictures have addresses, of files of the tag that the repository holds."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    published = metadata.absolute(readme, "https://forge.test/us/sidelight", "v1")
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", published)
    assert links
    for link in (inline or picture for inline, picture in links):
        kind, _, path = link.removeprefix("https://forge.test/us/sidelight/").partition("/v1/")
        assert kind == ("raw" if path.endswith(".svg") else "blob"), link
        assert (REPOSITORY / path.partition("#")[0]).exists(), link


def test_the_manual_page_has_every_command():
    """In roff: its lines of requests are those of a manual page, and nothing of Markdown is left."""
    page = manual.manual((REPOSITORY / manual.REFERENCE).read_text(encoding="utf-8"), "1.2.3")
    assert {"TH", "SH", "SS", "TP", "PP", "IP", "nf", "fi"} == set(re.findall(r"^\.(\w*)", page, re.MULTILINE))
    assert {f"sidelight {name}" for name in options() if name} <= set(re.findall(r"^\.SH (.+)$", page, re.MULTILINE))
    prose = re.sub(r"^\.nf\n.*?^\.fi\n", "", page, flags=re.MULTILINE | re.DOTALL)  # without what was code
    assert not re.search(r"`|\]\(|^#|^- ", prose, re.MULTILINE)


WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in REPOSITORY.glob(".github/workflows/*.yml")}


def test_workflows_run_what_is_there_and_trust_no_name():
    """Each target of make exists; each action is named by its commit, since a tag of it may move."""
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job.get("steps", ())]
    named = {target for step in steps for target in re.findall(r"\bmake ([a-z]+)", step.get("run", ""))}
    assert {"lint", "test", "release", "site"} <= named <= targets
    assert [] == [step["uses"] for step in steps if "uses" in step and not re.search(r"@[0-9a-f]{40}$", step["uses"])]


def test_each_python_that_is_promised_is_tested():
    """The classifiers' versions are the workflow's."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python ::" in name]
    assert promised == WORKFLOWS["test.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
