"""What a resident sidecar says of itself: spans taken in, refused and kept."""

from __future__ import annotations

from panels import SIDECAR, Row, increase, lines, total

RECEIVER = Row(
    "Receiver of spans (sidelight watch)",
    (
        lines(
            "Spans and exports / s",
            {
                "spans": total("sidelight_receiver_spans_total", SIDECAR),
                "exports": total("sidelight_receiver_exports_total", SIDECAR),
                "spans that came again": total("sidelight_window_repeated_spans_total", SIDECAR),
                "health probes": total("sidelight_health_probes_total", SIDECAR),
                "exports of {{signal}}": total("sidelight_receiver_other_exports_total", SIDECAR, by="signal"),
            },
            "Nothing here while traffic goes on: the engine's or the gateway's exporter is off, or sends elsewhere.",
            unit="ops",
        ),
        lines(
            "Refused, dropped, evicted / s",
            {
                "{{kind}}": total("sidelight_receiver_refused_total", SIDECAR, by="kind"),
                "not passed on": total("sidelight_receiver_forward_dropped_total", SIDECAR),
                "{{signal}} not passed on": total("sidelight_receiver_other_dropped_total", SIDECAR, by="signal"),
                "passed on": total("sidelight_receiver_forwarded_total", SIDECAR),
                "evicted": total("sidelight_window_evicted_spans_total", SIDECAR),
            },
            "Anything but passed on is a loss, counted here and said once in the log. Turned away means that senders "
            "were asked to come again, off_clock that a machine's clock is over 10 minutes off: set it by NTP, its "
            "spans are used by nobody. Logs and metrics are not read here: not passed on is no loss where nothing is "
            "forwarded.",
            unit="ops",
        ),
        lines(
            "Requests / s whose client and engine are in two traces",
            {
                "{{service}} {{how}}": total("sidelight_broken_traces_total", SIDECAR, by="service, how"),
                "in one trace": total("sidelight_whole_traces_total", SIDECAR),
            },
            "By the service at which traces break: it begins a new trace (new_trace), or is the last in the client's "
            "(not_passed_on; without a name, no gateway's span says where).",
            unit="reqps",
        ),
        lines(
            "Waiting for the next collector",
            {
                "bytes": f'max (sidelight_receiver_forward_queue{{what="bytes",{SIDECAR}}})',
                "at most": f'max (sidelight_receiver_forward_queue{{what="limit_bytes",{SIDECAR}}})',
            },
            "At most so many bytes wait: beyond it exports are not passed on. It fills while the collector that "
            "--otlp-forward names is away or slow.",
            unit="bytes",
        ),
        lines(
            "Kept for requests that go on",
            {"{{what}}": f"max by (what) (sidelight_window_size{{{SIDECAR}}})"},
            "Bounded. At its ceiling, spans are evicted before their request is whole: the traffic is more than one "
            "sidecar should take.",
            unit="short",
        ),
        lines(
            "Restarts, defects, CPU",
            {
                "receiver restarts": increase("sidelight_receiver_restarts_total", SIDECAR),
                "defects": increase("sidelight_watch_errors_total", SIDECAR),
                "records not shown live": increase("sidelight_live_errors_total", SIDECAR),
                "cores used": total("sidelight_watch_cpu_seconds_total", SIDECAR),
            },
            "A restart loses what had come and was not logged yet: senders that retry send it again. A defect is "
            "ours: its trace is in the log. Records that a run's live page passes over are in its report all the same.",
            unit="short",
        ),
    ),
)
