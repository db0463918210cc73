"""llama.cpp's own server from a wheel; runs in its environment: `llamacpp_server.py MODEL PORT NAME CONTEXT SLOTS`."""

from __future__ import annotations

import sys
import threading

import xllamacpp


def main(model: str, port: str, name: str, context: str, slots: str) -> None:
    """Serve until the process is ended, with a page of metrics, on one thread: more of them spin on shared cores."""
    settings = xllamacpp.CommonParams()
    settings.model.path = model
    settings.model_alias = {name}
    settings.hostnames, settings.port = ["127.0.0.1"], int(port)
    settings.n_parallel, settings.n_ctx = int(slots), int(slots) * int(context)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.endpoint_metrics = True
    server = xllamacpp.Server(settings)
    print("listening on", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
