# Two stages: the first has what building needs, the second only what running needs.
# A release names its base image by digest (SECURITY.md): --build-arg PYTHON_IMAGE=python:3.11-slim@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE} AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# Without pip of its own: what runs needs none, nor what builds.
RUN python -m venv --without-pip /opt/sidelight && python -m venv --without-pip /opt/build
WORKDIR /src

# Dependencies first: they change less often than the sources, so this layer is mostly reused.
# Wheels alone: what has to be built runs code of its own where it is installed.
COPY requirements.lock requirements-build.lock ./
RUN pip --python /opt/sidelight/bin/python install --no-compile --only-binary :all: --require-hashes -r requirements.lock \
    && pip --python /opt/build/bin/python install --only-binary :all: --require-hashes -r requirements-build.lock

COPY pyproject.toml README.md LICENSE ./
COPY correlator ./correlator
COPY exporter ./exporter
COPY loadgen ./loadgen
COPY methodology ./methodology
COPY recorded ./recorded
COPY rundir ./rundir
COPY scraper ./scraper
COPY sidecar ./sidecar
COPY sidelight ./sidelight
COPY simulator ./simulator
COPY twin ./twin
COPY release/healthcheck.py release/identity.toml release/manual.py release/metadata.py ./release/
# Packages' tests, 56 MB, are left out. What is compiled bears a hash of its source instead of a moment, so that two builds are the same.
RUN pip --python /opt/build/bin/python wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && pip --python /opt/sidelight/bin/python install --no-compile --no-deps /dist/*.whl \
    && cp release/healthcheck.py /opt/sidelight/bin/ \
    && find /opt/sidelight/lib -type d -name tests -prune -exec rm -rf {} + \
    && /opt/sidelight/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/sidelight/lib


FROM ${PYTHON_IMAGE}

LABEL org.opencontainers.image.title="sidelight" \
      org.opencontainers.image.licenses="Apache-2.0"

# Nothing here installs anything: an installer would only help who has got in.
RUN find / -xdev -regextype posix-extended -regex \
      '.*/(site|dist)-packages/(pip|setuptools|wheel|pkg_resources|_distutils_hack|distutils-precedence)([-.].*)?|.*/lib/python3[^/]*/ensurepip|.*/bin/(pip|wheel)[0-9.]*' \
      -prune -exec rm -rf {} + \
    && ! python -c "import pip" 2> /dev/null
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

# Asks the command that runs, at the address where it listens; one that serves nothing is well as long as it runs.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "/opt/sidelight/bin/healthcheck.py"]

ENTRYPOINT ["sidelight"]
CMD ["--help"]
