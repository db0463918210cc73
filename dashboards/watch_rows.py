"""What a resident sidecar says of itself: spans taken in, refused and kept."""

from __future__ import annotations

from panels import SIDECAR, Panel, Query, Row, total

RECEIVER = Row(
    title="Receiver of spans (sidelight watch)",
    panels=(
        Panel(
            kind="lines",
            title="Spans and exports / s",
            unit="ops",
            queries=(
                Query(expr=total("sidelight_receiver_spans_total", SIDECAR), legend="spans"),
                Query(expr=total("sidelight_receiver_exports_total", SIDECAR), legend="exports"),
                Query(expr=total("sidelight_window_repeated_spans_total", SIDECAR), legend="spans that came again"),
            ),
            description="Nothing here while traffic goes on: the engine's or the gateway's exporter is off, or sends "
            "elsewhere.",
        ),
        Panel(
            kind="lines",
            title="Refused, dropped, evicted / s",
            unit="ops",
            queries=(
                Query(expr=total("sidelight_receiver_refused_total", SIDECAR, by="kind"), legend="{{kind}}"),
                Query(expr=total("sidelight_receiver_forward_dropped_total", SIDECAR), legend="not passed on"),
                Query(expr=total("sidelight_receiver_forwarded_total", SIDECAR), legend="passed on"),
                Query(expr=total("sidelight_window_evicted_spans_total", SIDECAR), legend="evicted"),
            ),
            description="Anything but passed on is a loss, counted here and said once in the log. Turned away means "
            "that senders were asked to come again, off_clock that a machine's clock is over 10 minutes off: set it by "
            "NTP, its spans are used by nobody.",
        ),
        Panel(
            kind="lines",
            title="Kept for requests that go on",
            unit="short",
            queries=(Query(expr=f"max by (what) (sidelight_window_size{{{SIDECAR}}})", legend="{{what}}"),),
            description="Bounded. At its ceiling, spans are evicted before their request is whole: the traffic is more "
            "than one sidecar should take.",
        ),
        Panel(
            kind="lines",
            title="Restarts, defects, CPU",
            unit="short",
            queries=(
                Query(
                    expr=f"sum (increase(sidelight_receiver_restarts_total{{{SIDECAR}}}[$__rate_interval]))",
                    legend="receiver restarts",
                ),
                Query(
                    expr=f"sum (increase(sidelight_watch_errors_total{{{SIDECAR}}}[$__rate_interval]))",
                    legend="defects",
                ),
                Query(expr=total("sidelight_watch_cpu_seconds_total", SIDECAR), legend="cores used"),
            ),
            description="A restart loses what had come and was not logged yet: senders that retry send it again. A "
            "defect is ours: its trace is in the log.",
        ),
    ),
)
