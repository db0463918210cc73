# Two stages: the first has what building needs, the second only what running needs.
FROM python:3.11-slim AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# Without pip of its own: what runs needs none.
RUN python -m venv --without-pip /opt/sidelight
WORKDIR /src

# Dependencies first: they change less often than the sources, so this layer is mostly reused.
COPY requirements.lock ./
RUN pip --python /opt/sidelight/bin/python install --require-hashes -r requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY correlator ./correlator
COPY exporter ./exporter
COPY loadgen ./loadgen
COPY methodology ./methodology
COPY rundir ./rundir
COPY scraper ./scraper
COPY sidecar ./sidecar
COPY sidelight ./sidelight
COPY simulator ./simulator
RUN pip wheel --no-deps --wheel-dir /dist . \
    && pip --python /opt/sidelight/bin/python install --no-deps /dist/*.whl


FROM python:3.11-slim

LABEL org.opencontainers.image.title="sidelight" \
      org.opencontainers.image.licenses="Apache-2.0"

RUN useradd --create-home --uid 10001 sidelight \
    && install --directory --owner=sidelight --group=sidelight /data

COPY --from=build /opt/sidelight /opt/sidelight

ENV PATH=/opt/sidelight/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# A number: Kubernetes cannot tell of a name that it is not root's (runAsNonRoot).
USER 10001:10001
# Run directories are written under ./runs, so mount a volume here to keep them. Nothing else is written but to /tmp.
WORKDIR /data
EXPOSE 9464

# Holds for commands that serve the live page on its default port (run with --listen 0.0.0.0:9464 --listen-open).
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]

ENTRYPOINT ["sidelight"]
CMD ["--help"]
