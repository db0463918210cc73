"""The metrics pages of a run or a scrape: where they are, and what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sidelight.recorded.errors import TargetUnreachable
from sidelight.rundir.access import Access, Tls, masked
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.catalogue import catalogue, metrics_paths
from sidelight.scraper.targets.fetch import FetchLimits, discover
from sidelight.scraper.targets.scrape import clock_of
from sidelight.sidecar.options.access import metrics_access
from sidelight.sidecar.options.checks import extra_of, headers_of
from sidelight.sidecar.options.load import ContactOptions
from sidelight.sidecar.options.watch import ScrapeOptions
from sidelight.sidecar.run.preparation.target import Contact


def contact_of(options: ContactOptions) -> Contact:
    paths = {name: str(path) for name in ("ca", "cert", "key") if (path := getattr(options, name)) is not None}
    authorization = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return Contact(
        endpoint=options.endpoint,
        headers={**authorization, **headers_of(options)},
        extra=extra_of(options),
        tls=Tls(**paths, insecure=options.insecure),
    )


def pages_access(options: ContactOptions) -> Access:
    """Return the access to metrics pages. It uses the API's TLS at the API's own hosts, unless their own was given."""
    access = metrics_access(options, urls=options.url, api_key=options.api_key)
    hosts = {urlsplit(url).netloc for url in options.url}
    if access.ca or access.cert or access.insecure or any(urlsplit(url).netloc not in hosts for url in options.metrics):
        return access
    tls = contact_of(options).tls
    return msgspec.structs.replace(access, ca=tls.ca, cert=tls.cert, key=tls.key, insecure=tls.insecure)


def pages_of(urls: Sequence[str], contact: Contact) -> tuple[str, ...]:
    """Return the addresses that may have metrics pages. They are beside the API, but for gRPC: its port speaks no
    HTTP/1.
    """
    return tuple(urls) if contact.endpoint != "grpc" else ()


def with_pages(named: Sequence[str], usual: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of metrics: the pages that were named, else the usual ones. A `/perf_metrics` does not count
    as a named page: it is read beside the usual ones.
    """
    return (*(() if any(not clock_of(url) for url in named) else usual), *named)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedScrape:
    """Facts that a scrape without load needs before its start; as in Prepared."""

    targets: tuple[str, ...]
    about: Mapping[str, Any]
    notes: tuple[str, ...]


async def prepare_scrape(options: ScrapeOptions) -> PreparedScrape:
    """Find the pages of a scrape. Raises TargetUnreachable when there is none at all, and no spans are received."""
    configured = with_pages(options.metrics, (options.url,) if options.url else ())
    metrics = await found_pages(configured, metrics_access(options), options.scrape_timeout)
    targets, notes = scraped_pages(metrics)
    if not targets and options.otlp_listen is None:
        reasons = "; ".join(page.reason for _, page in metrics if isinstance(page, Missing))
        raise TargetUnreachable("metrics.none", f"no metrics page found: {reasons}")
    return PreparedScrape(targets=targets, about=about_metrics(metrics), notes=notes)


async def found_pages(configured: tuple[str, ...], access: Access, timeout_s: float) -> list[tuple[str, str | Missing]]:
    """Return for each address the URL of its metrics page, or why there is none."""
    limits, paths = FetchLimits(timeout_s=timeout_s), metrics_paths()
    pages = await asyncio.gather(*(discover(url, paths, access=access, limits=limits) for url in configured))
    return list(zip(configured, pages, strict=True))


def about_metrics(metrics: list[tuple[str, str | Missing]]) -> dict[str, Any]:
    """Return the manifest's fields on metrics pages."""
    pages = [(configured, page) for configured, page in metrics if not clock_of(configured)]
    timings = [masked(configured) for configured, _ in metrics if clock_of(configured)]
    reasons = [page.reason for _, page in pages if isinstance(page, Missing)]
    return {
        "metrics_targets": [
            {
                "configured": masked(configured),
                **({"reason": page.reason} if isinstance(page, Missing) else {"url": masked(page)}),
            }
            for configured, page in pages
        ],
        **({"timing_targets": timings} if timings else {}),
        **({"server_missing": "; ".join(reasons)} if len(reasons) == len(pages) else {}),
    }


def scraped_pages(metrics: list[tuple[str, str | Missing]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the URLs to scrape, and notes on those that are left out.

    Beside one that answers, a page that was named and did not is asked all the same: an engine that is starting will
    show it, and scrapes that fail are counted. What speaks something else is left alone.
    """
    answers = any(isinstance(page, str) and not clock_of(page) for _, page in metrics)
    targets, notes = [], []
    for configured, page in metrics:
        if isinstance(page, str):
            targets.append(page)
        elif answers and "metrics" in urlsplit(configured).path and "speaks something else" not in page.reason:
            targets.append(configured)
        else:
            cures = filter(None, (switch_of_page(page.reason), cure_of_page(page.reason)))
            notes.append(f"no server metrics: {page.reason}; {'; '.join(cures)}")
    return tuple(targets), tuple(notes)


def switch_of_page(reason: str, engine: str | None = None) -> str:
    """Return the switch of a missing metrics page, by reason and known engine, or ""."""
    # Only these two answer so.
    engine = engine or ("trtllm" if "JSON" in reason else "llamacpp" if "HTTP 501" in reason else None)
    if engine is not None:
        known = catalogue(engine)
        return f"{known.title}: {known.enable}"
    return "docs/reference/engines.md says how each engine is made to show its metrics" if "HTTP 404" in reason else ""


def cure_of_page(reason: str) -> str:
    """Return the cure for a missing metrics page, by the reason why it is missing."""
    if "HTTP 401" in reason or "HTTP 403" in reason:
        return (
            "set SIDELIGHT_METRICS_TOKEN or SIDELIGHT_METRICS_USER to credentials that it accepts (SIDELIGHT_API_KEY "
            "goes to pages on the host of --url)"
        )
    return "if the page is elsewhere, give its address with --metrics URL"
