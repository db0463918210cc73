"""The documentation is true where a machine can tell: links, options, messages, examples."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from documents import REPOSITORY, commands, messages, mkdocs_hooks, options, sentences
from processes import QUIET, engine, sidelight

from sidelight.loadgen.plan.workloads import custom
from sidelight.recorded.client_spans import FIRST_TOKEN_ATTRIBUTES

PAGES = sorted(
    path
    for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("benchmarks/*.md")]
    if path.is_file()
)
EXAMPLES = REPOSITORY / "examples"


def text(path: str | Path) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """Return a page without its blocks and pieces of code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text(path), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as repositories' web pages make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text(path), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [path.relative_to(REPOSITORY).as_posix() for path in PAGES])
def test_every_link_leads_somewhere(page: str):
    """Every relative link of a page is to a file that is there, and to a heading that it has."""
    path = REPOSITORY / page
    links = re.findall(r"\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"", prose(path))
    broken = []
    for link in (inline or other for inline, other in links):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert [] == broken


@pytest.mark.parametrize("page", [path.relative_to(REPOSITORY).as_posix() for path in PAGES])
def test_every_command_has_the_options_it_is_shown_with(page: str):
    """Every `sidelight COMMAND --option` in a block of code exists."""
    known = options()
    for command, arguments in commands(text(page)):
        assert command in known, command
        assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", arguments)) <= known[command], arguments


def test_pages_that_the_code_names_are_there():
    """Messages, help and comments refer to no page that has moved."""
    modules = [path for package in ("*/*.py", "*/*/*.py", "*/*/*/*.py") for path in REPOSITORY.glob(package)]
    named = {page for path in modules for page in re.findall(r"\bdocs/[\w/-]+\.md", text(path))}
    assert len(named) > 5
    assert set() == {page for page in named if not (REPOSITORY / page).is_file()}


def test_the_index_names_every_page():
    """docs/README.md links each page of docs/, and the folder of decisions."""
    linked = set(re.findall(r"\]\(([^)#\s]+)", text("docs/README.md")))
    docs = REPOSITORY / "docs"
    pages = {path.relative_to(docs).as_posix() for path in PAGES if path.is_relative_to(docs)}
    assert {page for page in pages if not page.startswith("decisions/")} - {"README.md"} <= linked
    assert "decisions/" in linked


def test_the_site_has_every_page_and_no_link_that_leaves_it():
    """In the order of the index; links out of docs/ are into the repository. `make site` checks the rest."""
    docs, address = REPOSITORY / "docs", mkdocs_hooks.IDENTITY["repository"]
    listed = [page for _, part in mkdocs_hooks.sections() for page in mkdocs_hooks.pages(part)]
    assert sorted([*listed, "README.md"]) == sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    for name in listed:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        shown = mkdocs_hooks.on_page_markdown(text(f"docs/{name}"), page)
        for link in re.findall(r"\]\(([^)\s#]+)", re.sub(r"```.*?```", "", shown, flags=re.DOTALL)):
            if link.startswith(address):
                assert (REPOSITORY / link.removeprefix(address).split("/", 3)[3]).exists(), link
            elif not re.match(r"[a-z]+:", link):
                assert (docs / name).parent.joinpath(link).resolve().is_relative_to(docs), link


def test_the_readme_is_short_and_shows_a_picture():
    """At most 120 lines, with a picture that loads nothing from elsewhere."""
    readme = text("README.md")
    assert readme.count("\n") <= 120
    (picture,) = re.findall(r"(\S+\.svg)", readme.replace('"', " ").replace("(", " ").replace(")", " "))
    assert not re.findall(r"(?:src|href|url)\s*[=(:]\s*['\"]?https?:", text(picture))


def test_every_code_of_an_error_is_explained_once():
    """Each code that an error can have stands once on the page, and no other."""
    named = re.findall(r"(?:^\*\*|(?<!\[))`([a-z]+\.[a-z0-9-]+)`", text("docs/troubleshooting.md"), re.MULTILINE)
    codes = [name for name in named if not name.endswith((".parquet", ".json", ".log", ".stderr"))]
    assert sorted(sentences()) == sorted(codes)


def test_sentences_of_errors_change_on_purpose():
    """Each error's sentences are those in tests/golden/errors.yaml; `python tests/golden/record.py` writes them."""
    assert yaml.safe_load(text("tests/golden/errors.yaml")) == sentences()


def test_troubleshooting_has_every_warning():
    """The fixed words of every warning stand on the page."""
    page = " ".join(text("docs/troubleshooting.md").split()).lower()
    assert len(messages()) > 60
    assert [] == [where for where, phrase in messages().items() if " ".join(phrase.split()).lower() not in page]


def test_the_example_workload_is_read():
    """examples/workload.yaml describes two classes."""
    assert ["question", "document"] == [kind.name for kind in custom.read(EXAMPLES / "workload.yaml").classes]


def test_the_example_gateway_states_its_first_chunk():
    """examples/gateway.py compiles, and the attribute that it sets is the one that is read."""
    source = text("examples/gateway.py")
    ast.parse(source)
    assert f'set_attribute("{FIRST_TOKEN_ATTRIBUTES[0]}"' in source
    assert FIRST_TOKEN_ATTRIBUTES[0] in text("docs/how-to/gateway-spans.md")


def test_the_example_job_and_services_have_valid_commands():
    """What the job for a hosted runner and the compose files start has options that exist."""
    known = options()
    job = yaml.safe_load(text("examples/ci.yaml"))["jobs"]["ttft"]
    lines = [step["run"] for step in job["steps"] if "sidelight run" in step.get("run", "")]
    assert lines
    assert set(re.findall(r"--[a-z-]+", " ".join(lines))) <= known["run"]
    (shown, *_) = re.findall(r"```yaml\n(.+?)```", text("docs/how-to/gate-in-ci.md"), re.DOTALL)
    assert [step for step in yaml.safe_load(shown) if step not in job["steps"]] == []
    watched = yaml.safe_load(text("examples/compose-watch.yaml"))["services"]
    composed = yaml.safe_load(text("dashboards/compose.yaml"))["services"]
    for service in (watched["sidelight"], composed["sidelight"], composed["watch"]):
        command, *arguments = service["command"]
        assert {word for word in arguments if word.startswith("--")} <= known[command]


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The example configuration and prompts make a run, and the example notebook prints its slowest requests."""
    path = tmp_path / "run"
    with engine() as (url, _):
        given = ("--config", EXAMPLES / "run.yaml", "--prompts", EXAMPLES / "prompts.jsonl", "--url", url)
        load = ("--rate", "40", "--requests", "3", "--warmup", "0")
        done = sidelight("run", *given, *load, *QUIET, "--out", path, path=path)
    assert done.code in {0, 1}, done.err  # 1: a busy machine misses the example's objective
    assert 4 == done.summary["client"]["requests"]["ok"]
    monkeypatch.setattr(sys, "argv", ["notebook.py", str(path)])
    runpy.run_path(str(EXAMPLES / "notebook.py"))
    assert 4 == capsys.readouterr().out.count("trace_id")
