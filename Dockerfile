# syntax=docker/dockerfile:1

# docker build -t kvroute/kvroute:0.1.0 --build-arg VERSION=0.1.0 --build-arg REVISION=$(git rev-parse HEAD) .
#
# What the image runs by default, `kvroute serve`, listens on loopback, as it does everywhere. Flags
# open it: docker run -p 127.0.0.1:50051:50051 kvroute/kvroute serve --grpc-listen '[::]:50051'
# --grpc-any-address true, for callers of this machine; for others see docs/security.md. The image
# sets no KVROUTE_* variable: it would outrank the configuration file that someone mounts.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The final stage has no use for pip, so the environment has none; the image's own pip fills it.
RUN python -m venv --without-pip /opt/kvroute
WORKDIR /src

# The compiler is for our own kernel (indexer/native); it stays in this stage.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_CACHE_DIR=/var/cache/pip
# Dependencies first: a layer that changes only with their list, which has hashes. Among them are the
# embedded NATS server's binary, for a router without nats.url, and the reader of accounts' tokens.
COPY .ci/requirements/ /tmp/requirements/
RUN --mount=type=cache,target=/var/cache/pip \
    pip --python /opt/kvroute/bin/python install --require-hashes --prefer-binary --requirement /tmp/requirements/image.txt \
    && pip install --require-hashes --prefer-binary --requirement /tmp/requirements/build.txt

COPY . .
RUN --mount=type=cache,target=/var/cache/pip \
    pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheels . \
    && pip --python /opt/kvroute/bin/python install --no-deps /tmp/wheels/*.whl \
    && /opt/kvroute/bin/kvroute --help > /dev/null


FROM python:${PYTHON}-slim
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvroute" \
      org.opencontainers.image.description="A KV-cache-aware router for vLLM and SGLang fleets" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
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
