"""Loads from the nodes of a Ray cluster: the same load as one machine's, and clear words where there is none."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from codes import raises
from processes import (
    ANSWER,
    QUIET,
    Ended,
    Script,
    Server,
    alive,
    ended,
    engine,
    interrupt,
    refused,
    scripted,
    sidelight,
    start,
    until,
)
from waiting import BOUND_S

from sidelight.correlator.opening import open_run
from sidelight.loadgen.records import read_plan
from sidelight.recorded.directory import RAW
from sidelight.sidecar.options.checks import check_run
from sidelight.sidecar.options.load import RunOptions

PACKAGES = ("correlator", "exporter", "loadgen", "methodology", "recorded", "rundir", "scraper", "sidecar", "simulator")
REPOSITORY = Path(__file__).parents[1]
START_S = 4 * BOUND_S  # of a cluster, on a busy machine
LOAD = ("--rate", "25", "--requests", "50", "--warmup", "3", "--output-tokens", "4")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


def test_ray_is_imported_in_one_module():
    """A run without --ray needs none of it."""
    importing = [
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(name.name.partition(".")[0] == "ray" for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ray")
    ]
    assert {"sidecar/run/processes/nodes.py"} == set(importing)


def test_a_run_here_imports_nothing_of_other_machines():
    """Neither what reaches them nor what compares clocks with theirs."""
    code = (
        "import sys; from sidelight.sidecar.run import load, session; "
        "from sidelight.sidecar.run.preparation import prepare; print(*sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    remote = {f"sidelight.sidecar.run.processes.{name}" for name in ("nodes", "remote", "agent", "clocks")}
    assert set() == {"ray", *remote} & set(printed.split())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nodes": 2}, "--nodes needs --ray ADDRESS"),
        ({"node_label": ("disk=fast",)}, "--node-label needs --ray ADDRESS"),
        ({"ray": "auto", "workers": 0}, "--ray auto and --workers 0 exclude each other"),
    ],
    ids=["nodes", "label", "workers"],
)
def test_options_of_many_machines_need_a_cluster(given: dict[str, Any], says: str):
    with raises("option.contradictory", says=says):
        check_run(RunOptions(url=("http://127.0.0.1:1",), **given))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a cluster of Ray on this machine: a head that runs nothing, and two nodes."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  where it is installed

    with TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)  # short: sockets have their paths there
        started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        started.folder = Path(folder)
        try:
            for _ in range(2):
                started.add_node(num_cpus=4)
            yield started
        finally:
            started.shutdown()


def from_nodes(url: str, path: Path, cluster: Any, *options: str) -> Ended:
    arguments = ("run", "--url", url, "--out", path, "--ray", cluster.address, *QUIET, *options)
    return sidelight(*arguments, path=path, bound_s=START_S, fresh=True)


@needs_ray
@pytest.mark.parametrize("workers", [1, 2], ids=["2 workers", "4 workers"])
def test_a_load_from_two_nodes_is_that_of_one_machine(cluster: Any, tmp_path: Path, workers: int):
    """Each request once, with the same body, due at the same nanosecond; the report needs no Ray."""
    with engine() as (url, _):
        here = sidelight("run", "--url", url, "--out", tmp_path / "here", *QUIET, *LOAD, path=tmp_path / "here")
        there = from_nodes(url, tmp_path / "there", cluster, *LOAD, "--workers", str(workers))
    assert (0, 0) == (here.code, there.code), there.err
    plans = [list(read_plan(run.path / RAW / "plan-measure.log")) for run in (here, there)]
    assert plans[0] == plans[1]
    due = [due_ns(run.path) for run in (here, there)]
    assert due[0] == due[1]
    assert len(plans[0]) == len(due[0])
    table = open_run(there.path).requests
    assert set(range(2 * workers)) == set(table.worker.tolist())
    assert "complete" == there.summary["status"]
    assert {os.getpriority(os.PRIO_PROCESS, 0)} == {node["niceness"] for node in there.manifest["nodes"]}
    assert all(0 < row["clock_error_ms"] < BOUND_S * 1e3 for row in there.requests())
    assert [] == there.summary["integrity"]["disagreements"]
    code = "import sys; sys.modules['ray'] = None; from sidelight.sidecar.__main__ import main; main()"
    again = subprocess.run([sys.executable, "-c", code, "report", there.path], capture_output=True, check=False)
    assert 0 == again.returncode, again.stderr.decode()


@contextmanager
def slow_for_odd_prompts() -> Iterator[tuple[str, list[float]]]:
    """Serve prompts that are numbers, odd ones ten times as late; yield the URL, and for how many ms each was held."""
    script, held_ms = Script(), list[float]()

    class Handler(scripted(script)):  # type: ignore[misc]
        def do_POST(self) -> None:  # noqa: N802  as http.server calls it
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            begun_s, prompt = time.monotonic(), body["messages"][-1]["content"] if "messages" in body else ""
            if prompt.isdecimal():
                script.over.wait(1.0 if int(prompt) % 2 else 0.1)
                held_ms.append(1e3 * (time.monotonic() - begun_s))
            self.say(200, "text/event-stream", ANSWER)

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", held_ms
        script.over.set()
        server.shutdown()
        thread.join()


@needs_ray
def test_percentiles_are_of_all_nodes_and_a_slow_one_is_named(cluster: Any, tmp_path: Path):
    """The p99 is that of the server's own times; the mean of the nodes' p99 is about half of it."""
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(f'{{"prompt": "{number}", "max_tokens": 1}}\n' for number in range(60)))
    with slow_for_odd_prompts() as (url, held_ms):
        run = from_nodes(url, path, cluster, "--prompts", str(prompts), "--rate", "20", "--warmup", "0", "--nodes", "2")
    assert 0 == run.code, run.err
    client = run.summary["client"]
    truth_ms, (fast, slow) = np.quantile(held_ms, 0.99), client["by_node"]
    assert (60, 30, 30) == (len(held_ms), fast["ok"], slow["ok"])
    assert truth_ms <= client["ttft_ms"]["p99"] < 1.4 * truth_ms
    assert (fast["ttft_ms"]["p99"] + slow["ttft_ms"]["p99"]) / 2 < 0.8 * truth_ms
    assert any(warning.startswith(f"node {slow['node']} is ") for warning in run.summary["warnings"])
    assert {0} == {node["late_orders"] for node in client["by_node"] if node["order_ms"] < 0}
    assert f" {slow['node']} " in (path / "report.txt").read_text().partition("Nodes, ms")[2]


def due_ns(path: Path) -> dict[int, int]:
    """Return when each measured request was due, from the start of the phase."""
    run = open_run(path)
    (start_ns,) = (phase.start_ns for phase in run.phases if phase.name == "measure")
    measured = np.flatnonzero(run.requests.phase == "measure")
    return {int(run.requests.index[row]): int(run.requests.scheduled_ns[row]) - start_ns for row in measured.tolist()}


@needs_ray
@pytest.mark.parametrize("what", ["worker", "agent", "node"])
def test_a_lost_share_of_a_load_is_counted(cluster: Any, tmp_path: Path, what: str):
    """In four numbers that sum to it, in the verdict; the others go on, and it ends with 3."""
    path = tmp_path / "run"
    load = ("--rate", "40", "--requests", "400", "--warmup", "0", "--output-tokens", "4", "--nodes", "2")
    with (
        engine() as (url, _),
        start("run", "--url", url, "--out", path, "--ray", cluster.address, *QUIET, *load) as process,
    ):
        until(lambda: all(is_sending(path, number) for number in range(2)), "a load", deadline_s=START_S)
        for process_id in next(agents_with_workers())[what]:
            os.kill(process_id, signal.SIGKILL)
        run = ended(process, path, bound_s=START_S)
    if what == "node":
        cluster.remove_node(next(each for each in cluster.worker_nodes if each.dead_processes()))
        cluster.add_node(num_cpus=4)
    assert (3, "complete") == (run.code, run.summary["status"]), run.err
    assert run.err.endswith("[load.incomplete]\n")
    integrity = run.summary["integrity"]
    (lost,) = integrity["lost_shares"]
    assert 200 == lost["planned"] == lost["recorded"] + lost["in_part"] + lost["due"] + lost["unsent"]
    assert lost["recorded"] > 0 < lost["due"] + lost["unsent"]
    assert integrity["state"] in {"torn", "unverified"}
    table = open_run(path).requests
    assert 200 == (table.worker != lost["worker"]).sum()
    assert ("untrusted", "data") == tuple(run.summary["verdict"][name] for name in ("state", "cause"))
    assert "not compliant" == run.summary["methodology"]["tests"]["ttft"]["verdict"]


@needs_ray
def test_a_run_that_is_interrupted_leaves_nothing_on_its_nodes(cluster: Any, tmp_path: Path):
    """Neither a process nor a file; what was recorded is whole, and here."""
    path, before = tmp_path / "run", folders_of_agents(cluster)
    load = ("--rate", "40", "--duration", "60", "--warmup", "0", "--output-tokens", "4", "--nodes", "2")
    with (
        engine() as (url, _),
        start("run", "--url", url, "--out", path, "--ray", cluster.address, *QUIET, *load) as process,
    ):
        until(lambda: all(is_sending(path, number) for number in range(2)), "a load", deadline_s=START_S)
        assert 2 == len(folders_of_agents(cluster) - before)
        workers = [each["worker"] for each in agents_with_workers()]
        interrupt(process, path)
        run = ended(process, path, bound_s=START_S)
    assert (130, "whole") == (run.code, run.summary["integrity"]["state"]), run.err
    assert (before, []) == (folders_of_agents(cluster), [worker for (worker,) in workers if alive(worker)])


@needs_ray
def test_a_run_that_is_refused_leaves_no_files_on_its_nodes(cluster: Any, tmp_path: Path):
    """As where the target is not reached from here."""
    before = folders_of_agents(cluster)
    refused(from_nodes("http://127.0.0.1:9", tmp_path / "run", cluster), 3)
    assert before == folders_of_agents(cluster)


def folders_of_agents(cluster: Any) -> set[Path]:
    return set(cluster.folder.glob("sidelight-agent-*"))


def is_sending(path: Path, worker: int) -> bool:
    log = path / RAW / f"requests-{worker}.log"
    return log.exists() and log.stat().st_size > 4096


def agents_with_workers() -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield each load worker on a node, its agent, and both with the process of Ray that started that."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"sidelight.loadgen.worker" in (process / "cmdline").read_bytes():
                worker = int(process.name)
                agent = parent(worker)
                if b"ray::Agent" in Path(f"/proc/{agent}/cmdline").read_bytes():
                    yield {"worker": (worker,), "agent": (agent,), "node": (parent(agent), agent, worker)}


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@needs_ray
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nodes", "9"), "2 of its 3 nodes have 1 processor, and 9 are needed"),
        (("--workers", "9"), "0 of its 3 nodes have 9 processors, and 1 are needed"),
        (("--node-label", "disk=fast"), "processor and the labels disk=fast"),
    ],
    ids=["nodes", "processors", "label"],
)
def test_a_cluster_without_room_is_named(cluster: Any, tmp_path: Path, options: tuple[str, ...], says: str):
    """In one line, before anything is recorded."""
    run = from_nodes("http://127.0.0.1:1", tmp_path / "run", cluster, *options)
    assert re.search(f"{re.escape(says)}.*\\[ray.nodes\\]$", refused(run, 2))


def test_more_logs_than_come_home_are_refused(tmp_path: Path):
    """Before a cluster is looked for."""
    path = tmp_path / "run"
    load = ("--rate", "100..6000", "--output-tokens", "100")
    run = sidelight("run", "--url", "http://127.0.0.1:1", "--out", path, "--ray", "auto", *QUIET, *load, path=path)
    assert refused(run, 2).endswith("[ray.logs]\n")


@needs_ray
def test_an_address_without_a_cluster_is_named(tmp_path: Path):
    """In one line, at once."""
    path = tmp_path / "run"
    run = sidelight("run", "--url", "http://127.0.0.1:1", "--out", path, "--ray", "127.0.0.1:9", *QUIET, path=path)
    assert "--ray 127.0.0.1:9: Connection refused; " in refused(run, 3)


@pytest.mark.parametrize("absent", ["ray", "opentelemetry.metrics"])
def test_a_missing_package_is_named_before_ray_is_asked_for_anything(absent: str, tmp_path: Path):
    """Without opentelemetry-api Ray's own processes would die, and say why in their logs alone."""
    code = f"import sys; sys.modules['{absent}'] = None; from sidelight.sidecar.__main__ import main; main()"
    arguments = ("run", "--url", "http://127.0.0.1:1", "--out", tmp_path / "run", "--ray", "auto", *QUIET)
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False, text=True)
    assert 2 == run.returncode
    assert re.fullmatch(rf"sidelight: --ray auto: .*{absent}.*pip install 'sidelight\[ray\]'.*\n", run.stderr), (
        run.stderr
    )
