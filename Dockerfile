# `make image` builds it, with docker, podman or buildah: docs/install.md.
#
# What the image runs by default, `kvroute serve`, listens on loopback, as it does everywhere. Flags
# open it: docker run -p 127.0.0.1:50051:50051 kvroute/kvroute serve --grpc-listen '[::]:50051'
# --grpc-any-address true, for callers of this machine; for others see docs/security.md. The image
# sets no KVROUTE_* variable: it would outrank the configuration file that someone mounts.

# Debian's or a derivative, with Python 3.11 or newer, venv and ca-certificates.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_CACHE_DIR=/var/cache/pip
WORKDIR /src

# The compiler is for our own kernels; it stays in this stage. Debian's Python has its headers apart.
RUN apt-get update \
    && headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
        $(test -e "$headers" || echo python3-dev)
# The final stage has no use for pip, so its environment has none; that of this stage fills it.
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/kvroute
ENV PATH=/opt/build/bin:${PATH}
# Dependencies first: a layer that changes only with their list, which has hashes. Among them are
# nats-server, for a router without nats.url and for the chart's NATS servers, and all that a
# configuration can switch on: accounts' tokens, spans, the router's own tokenizer. The secrets are
# this machine's settings of pip and its certificates, where it has any: no layer holds them.
COPY .ci/requirements/ /tmp/requirements/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=cache,target=/var/cache/pip \
    pip --python /opt/kvroute/bin/python install --require-hashes --prefer-binary --requirement /tmp/requirements/image.txt \
    && pip install --require-hashes --prefer-binary --requirement /tmp/requirements/build.txt
# Debug information and numpy's own tests are a fifth of it. Libraries in *.libs were moved there by
# tools that leave sections which strip may damage.
RUN find /opt/kvroute -name '*.so' -not -path '*.libs/*' -exec strip --strip-debug {} + \
    && find /opt/kvroute/lib/python3*/site-packages/numpy -type d -name tests -prune -exec rm -r {} +

COPY . .
RUN KVROUTE_COMPILED=1 CFLAGS=-g0 pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheels . \
    && pip --python /opt/kvroute/bin/python install --no-deps /tmp/wheels/*.whl \
    && /opt/kvroute/bin/kvroute --help > /dev/null


FROM ${BASE}
# Bytecode is compiled in the build stage; the root filesystem may be read-only.
ENV PATH=/opt/kvroute/bin:${PATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
COPY --from=build /opt/kvroute /opt/kvroute
# A number, so that Kubernetes can tell that it is not root. It owns no file of the image.
USER 65532:65532
WORKDIR /tmp
EXPOSE 50051 9464
# Safe as PID 1 without an init: kvroute installs handlers for SIGTERM and SIGINT, which PID 1 would
# otherwise ignore, and waits for the only child it has, the embedded NATS server.
ENTRYPOINT ["kvroute"]
CMD ["serve"]
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="kvroute" \
      org.opencontainers.image.description="A KV-cache-aware router for vLLM and SGLang fleets" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
