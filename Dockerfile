# The image of every Ray node, for both targets:
#   docker build --target cpu  -t rdt-e2e:0.1.0-cpu  .
#   docker build --target cuda -t rdt-e2e:0.1.0-cuda .
# All Python packages come from requirements/<target>.lock through scripts/setup.sh, and pip's own
# settings (index, CA bundle, wheel folders) are those of the build: mount or copy them in as usual.
# No feature here needs BuildKit beyond cache mounts; buildah builds it as well.

# Any Debian 12 or Ubuntu 24.04. The CUDA libraries come as wheels, the driver from the host's NVIDIA
# container toolkit; a base with nvcc is only needed for kernels that are compiled at run time.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive
# bash and wget are what KubeRay's start command and probes call; the rest runs or examines a node:
# RDMA user space without kernel drivers, and the tools to test a fabric from inside.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      bash ca-certificates procps tini wget \
      libnuma1 numactl python3 python3-venv \
      ibverbs-providers ibverbs-utils infiniband-diags iproute2 libibverbs1 librdmacm1 pciutils \
      perftest rdma-core \
 && rm -rf /var/lib/apt/lists/*

# Group 0 and group-writable, so that any uid with group 0 (and root without capabilities) works. The
# file is for login shells, which reset PATH to the system's.
# hadolint ignore=SC2016
RUN useradd --create-home --home-dir /home/ray --uid 1000 --gid 0 --shell /bin/bash ray \
 && mkdir -p /models /runs /etc/rdt-e2e \
 && chown ray:0 /models /runs && chmod 0775 /home/ray /models /runs \
 && echo 'export PATH=/opt/rdt-e2e/.venv/bin:$PATH' >/etc/profile.d/rdt-e2e.sh
# HF_MODULES_CACHE: a checkpoint's own Python is copied there, and /models may be read-only.
# UCX_MODULES: beside ibverbs-providers, every process with NIXL's wheels crashes at its exit without
# it, since their EFA module loads a second libibverbs. On AWS set it to `all`.
ENV PATH=/opt/rdt-e2e/.venv/bin:$PATH \
    HOME=/home/ray \
    HF_HOME=/models/huggingface \
    HF_MODULES_CACHE=/home/ray/.cache/huggingface/modules \
    RDT_E2E_PATHS__CACHE_DIR=/opt/rdt-e2e/models \
    RDT_E2E_PATHS__RUNS_DIR=/runs \
    UCX_MODULES=^efa
WORKDIR /home/ray
STOPSIGNAL SIGTERM
# KubeRay replaces both, and ignores the health check in favour of its probes.
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/rdt-e2e/containers/node.sh"]
CMD ["help"]
HEALTHCHECK --interval=15s --timeout=10s --start-period=90s --retries=4 \
  CMD ["/opt/rdt-e2e/containers/node.sh", "health"]
LABEL org.opencontainers.image.title="rdt-e2e" \
      org.opencontainers.image.description="Weight sync from a sharded trainer into a vLLM fleet over Ray Direct Transport and NIXL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"

# A target's packages in a layer of their own, and this project's files on top: a change of the source
# then costs seconds, not minutes. Compiled ahead: KubeRay's wait container has 0.2 CPU and 256 MiB for
# `ray health-check`, and the user of the image cannot write bytecode. Templates in some packages are
# no valid Python; what matters is checked by the doctor at the end.
FROM base AS packages
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# uv's cache is outside of the image; links into it would dangle.
ENV UV_LINK_MODE=copy PIP_NO_CACHE_DIR=1
WORKDIR /opt/rdt-e2e
COPY scripts/setup.sh scripts/setup.sh
COPY requirements requirements

FROM packages AS cuda
# Triton compiles its launchers at run time, with the system's C compiler and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
 && rm -rf /var/lib/apt/lists/*
# CUDA release of the NIXL build; it must be torch's, which the lock file decides.
ARG CUDA_MAJOR=13
# hadolint ignore=DL4006
RUN --mount=type=cache,target=/var/cache/uv UV_CACHE_DIR=/var/cache/uv scripts/setup.sh cuda packages-only \
 && found=$(.venv/bin/pip list --format=freeze | grep -o '^nixl-cu[0-9]*') \
 && if [ "$found" != "nixl-cu$CUDA_MAJOR" ]; then \
      echo "the image must hold nixl-cu$CUDA_MAJOR alone, the lock file gives: $found" >&2; exit 1; fi \
 && { .venv/bin/python -m compileall -q -q -j 0 --invalidation-mode unchecked-hash .venv/lib || true; }
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . .
RUN --mount=type=cache,target=/var/cache/rdt-e2e containers/install.sh cuda
WORKDIR /home/ray
USER 1000
# A build has no GPU; what it can answer must pass.
RUN rdt-e2e doctor --image

# Last, so that it is the target of a build that names none.
FROM packages AS cpu
RUN --mount=type=cache,target=/var/cache/uv UV_CACHE_DIR=/var/cache/uv scripts/setup.sh cpu packages-only \
 && { .venv/bin/python -m compileall -q -q -j 0 --invalidation-mode unchecked-hash .venv/lib || true; }
COPY . .
RUN --mount=type=cache,target=/var/cache/rdt-e2e containers/install.sh cpu
WORKDIR /home/ray
USER 1000
RUN rdt-e2e doctor --image
