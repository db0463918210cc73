"""Commands that need not import everything anew: a process that has imported it forks them, and they their workers.

Two thirds of the CPU time of a short run, or of its report, are imports. What is forked has descriptors, environment,
directory, signals and end of its own, but neither an interpreter nor a seed of hashes: tests of these start fresh ones,
whose workers are fresh as well.
"""

from __future__ import annotations

import atexit
import contextvars
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

# What is imported into all processes of a command that is hurt (`faults.injected`), forked or not.
INJECTED = str(Path(__file__).parent / "faults" / "injected")
# What an interpreter or an import reads: with another value of these a process has to be a fresh one.
_READ_EARLY = ("PYTHON", "LD_", "OPENBLAS", "OMP_", "ARROW", "SSL_", "GRPC", "RAY")
_WORKERS = ("sidelight.loadgen.worker", "sidelight.scraper.worker", "sidelight.scraper.worker.spans")
_IMPORTED = (
    *_WORKERS,
    "scipy.special",
    "sidelight.exporter.html.page",
    "sidelight.methodology.compliance.runs",
    "sidelight.scraper.worker.process",
    "sidelight.sidecar.cli.app",
    "sidelight.sidecar.live.final",
    "sidelight.sidecar.live.view",
    "sidelight.sidecar.report.derive",
    "sidelight.sidecar.report.printing",
    "sidelight.sidecar.run.load",
    "sidelight.sidecar.run.session",
    "sidelight.sidecar.watch.service",
    "sidelight.simulator.router",
    "sidelight.simulator.server",
)
# What a process reads once: the tokenizer, and the engines' catalogue.
_READ = (
    ("sidelight.loadgen.plan.tokenizers.reference", "reference"),
    ("sidelight.scraper.engines.catalogue", "engine_names"),
)
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_NUMBER_BYTES = 8
_BLOCK_BYTES = 2**16
_ONE_AT_A_TIME = threading.Lock()


class Forked(subprocess.Popen[str]):
    """A command `python -m MODULE ...` that is forked; all else is as in `subprocess.Popen`."""

    _end: socket.socket

    def _execute_child(self, *arguments: Any) -> None:
        execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        given = inspect.signature(execute).bind(self, *arguments).arguments
        (_, _, *command), environment = given["args"], dict(given["env"] or os.environ)
        message = {"command": command, "environment": environment, "directory": str(Path.cwd())}
        self._end, theirs = socket.socketpair()
        with theirs, Path(os.devnull).open("rb+") as nothing, _ONE_AT_A_TIME:
            streams = [given[name] if given[name] >= 0 else nothing.fileno() for name in _STREAMS]
            text = json.dumps(message).encode() + b"\n"
            sent = socket.send_fds(_forker(), [text], [*streams, theirs.fileno()])
            _forker().sendall(text[sent:])
            self.pid = int.from_bytes(_forker().recv(_NUMBER_BYTES, socket.MSG_WAITALL), "big")
        assert self.pid, "what forks has ended"
        self._close_pipe_fds(*(given[name] for name in _PIPES))  # type: ignore[attr-defined]
        self._child_created = True

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self._take_code()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take_code()
        return self.returncode

    def _take_code(self) -> None:
        with self._end as end:
            self.returncode = int.from_bytes(end.recv(_NUMBER_BYTES, socket.MSG_WAITALL), "big", signed=True)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment may be forked."""
    return _early(environment) == _early(os.environ)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in _unhurt(environment).items() if name.startswith(_READ_EARLY)}


def _unhurt(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if value != INJECTED}


@cache
def _forker() -> socket.socket:
    """Start what forks, once in this process, and return the connection to it; it ends when that is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        forker = subprocess.Popen(
            [sys.executable, "-P", __file__],
            # Python asks once whether its streams can seek, and the pipes of commands cannot.
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # As the command line has it, and unhurt.
            env={name: value for name, value in os.environ.items() if value != INJECTED}
            | {"OPENBLAS_NUM_THREADS": "1"},
        )
    atexit.register(forker.wait)
    atexit.register(ours.close)
    return ours


def _serve(connection: socket.socket) -> None:
    """Fork a process for each message; say its number to the sender, and through a socket of its own how it ended."""
    for module in _IMPORTED:
        importlib.import_module(module)
    for module, function in _READ:
        getattr(importlib.import_module(module), function)()
    gc.freeze()  # pages that a collection writes to would be copied
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    ends: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, _BLOCK_BYTES)
            _say_ends(ends)
        if connection in ready:
            text, descriptors, _, _ = socket.recv_fds(connection, _BLOCK_BYTES, len(_STREAMS) + 1)
            while text and not text.endswith(b"\n"):
                text += connection.recv(_BLOCK_BYTES)
            if not text:
                return
            *streams, end = descriptors
            if (pid := os.fork()) == 0:
                for held in (connection, *ends.values()):
                    held.detach()  # its number may soon be another's
                _run(json.loads(text), streams)
            ends[pid] = socket.socket(fileno=end)
            for stream in streams:
                os.close(stream)
            connection.sendall(pid.to_bytes(_NUMBER_BYTES, "big"))


def _say_ends(ends: dict[int, socket.socket]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with ends.pop(pid) as end:
            end.sendall(os.waitstatus_to_exitcode(status).to_bytes(_NUMBER_BYTES, "big", signed=True))


def _run(message: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Run a command in this process, as `python -m` does."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, max(map(int, os.listdir("/dev/fd"))) + 1)  # noqa: PTH208  numbers, not paths
    os.chdir(message["directory"])
    os.environ.clear()
    os.environ.update(message["environment"])
    module, *arguments = message["command"]
    sys.path.insert(0, message["directory"])
    sys.argv, sys.orig_argv = [module, *arguments], [sys.executable, "-m", module, *arguments]
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    code: object = None
    try:
        if os.environ.get("PYTHONPATH") == INJECTED:
            sys.path.insert(0, INJECTED)
            runpy.run_path(f"{INJECTED}/sitecustomize.py")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
        code = 1
    # What an interpreter does at its end but for freeing all that was imported, which would be copied.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _execute_child(process: subprocess.Popen[Any], *arguments: Any) -> None:
    """Fork a worker from the command that starts it, whose child it is; start anything else as ever."""
    given = inspect.signature(_EXECUTE).bind(process, *arguments).arguments
    command, environment = list(given["args"]), given["env"] or os.environ
    is_worker = command[:-1] == [sys.executable, "-P", "-m"] and command[-1] in _WORKERS
    is_sound = os.write is _WRITE  # a worker of a command that is to fail does not fail
    if not (is_worker and is_sound and can_fork(environment)):
        _EXECUTE(process, *arguments)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    process.pid = os.fork()
    if process.pid == 0:
        streams = [given[name] if given[name] >= 0 else number for number, name in enumerate(_STREAMS)]
        _run_worker(command[-1], environment, streams)
    process._child_created = True  # type: ignore[attr-defined]
    process._close_pipe_fds(*(given[name] for name in _PIPES))  # type: ignore[attr-defined]


def _run_worker(module: str, environment: Mapping[str, str], streams: Sequence[int]) -> NoReturn:
    """Run a worker in this process, a fork of the command that starts it."""
    os.setsid()
    atexit._clear()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name_of(module), encoding="ascii")
    sys.modules.pop(module)  # runpy warns of a module that was imported
    message = {"command": [module], "environment": dict(environment), "directory": str(Path.cwd())}
    contextvars.Context().run(_run, message, streams)
    os._exit(1)


def name_of(module: str) -> str:
    """Return the name that the system has for a worker that was forked: the last fifteen characters of its module."""
    return module[-15:]


_WRITE = os.write
_EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]

if __name__ == "__main__":
    _serve(socket.socket(fileno=os.dup(0)))
