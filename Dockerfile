# Three images from one file:
#
#   docker build -t cormorant-cpu --target cpu .              heads and workers: PyTorch without CUDA, EnvPool, Ray
#   docker build -t cormorant .                               the same with CUDA, for groups with `device: gpu`
#   docker build -t cormorant-operator --target operator .    the operator: none of them
#
# All run as any user, with a read-only root and without capabilities; what is written goes to /tmp, which pods mount.
# A release pins the base image: --build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:...
#
# Layers, from rarely to often changed: base, dependencies (pyproject.toml, images/constraints.txt), this project.

# -- base: what all images stand on ----------------------------------------------------------------------------------

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM $PYTHON_IMAGE AS base
# The official image comes without the standard library's bytecode, and a read-only root never gets any.
RUN python -m compileall -q -j 0 -x '/(test|tests|idlelib|lib2to3|site-packages|dist-packages)/' \
      "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
 && groupadd --gid 65532 cormorant \
 && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin cormorant
ENV PATH=/opt/venv/bin:/opt/cormorant/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /

# -- tools: stays behind ---------------------------------------------------------------------------------------------

FROM base AS tools
COPY images/constraints.txt /build/images/
# The project lies beside its dependencies, in a layer of its own; the .pth file says where.
RUN python -m venv /opt/uv \
 && grep '^uv==' /build/images/constraints.txt > /build/uv.txt \
 && /opt/uv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement /build/uv.txt \
 && python -m venv --without-pip /opt/venv \
 && echo /opt/cormorant > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cormorant.pth"
# A cache that is mounted lies on another file system, and a hard link to it would be a copy with a warning.
ENV VIRTUAL_ENV=/opt/venv \
    UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1
COPY pyproject.toml /build/
WORKDIR /build

# -- dependencies: one environment an image; every wheel has the digest that images/constraints.txt names ---------------

FROM tools AS operator-dependencies
RUN /opt/uv/bin/uv pip install --quiet --constraint images/constraints.txt --requirement pyproject.toml --extra operator

FROM tools AS cpu-dependencies
RUN apt-get update -qq && apt-get install -qq --yes --no-install-recommends binutils gcc libc6-dev > /dev/null
COPY images/excludes-cpu.txt images/without_cuda.py images/slim images/
# One step, because a layer keeps what a later one removes. Bytecode comes last: of large
# packages, that of the modules which an import leaves behind.
RUN site="$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && UV_COMPILE_BYTECODE=0 /opt/uv/bin/uv pip install --quiet --constraint images/constraints.txt \
      --excludes images/excludes-cpu.txt --requirement pyproject.toml \
      --extra worker --extra s3 --extra ray --extra api --extra otel --extra cli --extra client \
 && python images/without_cuda.py "$site" \
 && images/slim "$site" \
 && /opt/venv/bin/python -m compileall -q -j 0 -x '/(torch|sympy|networkx|matplotlib)/' "$site" \
 && /opt/venv/bin/python -c 'import envpool, fastapi, gymnasium, pyarrow.dataset, pyarrow.parquet, ray, s3fs, safetensors.torch; \
      import aiohttp, cel, fontTools.misc.bezierTools, kiwisolver, xxhash; \
      import torch, torch.distributed, torch.export, tensordict.nn; torch.ones(2, requires_grad=True).sum().backward()'

# -- project: pure Python, the same in all images -------------------------------------------------------------------

FROM tools AS project
COPY README.md LICENSE ./
COPY api api
COPY worker worker
COPY operator operator
# Scripts in bin/ begin with the interpreter that they are installed with.
RUN /opt/uv/bin/uv build --quiet --wheel --out-dir /dist . \
 && /opt/uv/bin/uv pip install --quiet --python /opt/venv/bin/python --no-deps --target /opt/cormorant /dist/*.whl

# -- runtime: what the three images have in common; one layer, so that what some base images bring for people is gone ----

FROM base AS runtime-files
RUN rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf /var/log/* /usr/share/man /usr/share/locale \
 && find /usr/share/doc -type f ! -name copyright -delete

FROM scratch AS runtime
COPY --from=runtime-files / /
ENV PATH=/opt/venv/bin:/opt/cormorant/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1
ARG VERSION=0.2.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE"
USER 65532:65532

# -- operator --------------------------------------------------------------------------------------------------------

FROM runtime AS operator
COPY --from=operator-dependencies /opt/venv /opt/venv
COPY --from=project /opt/cormorant /opt/cormorant
LABEL org.opencontainers.image.title="cormorant-operator" \
      org.opencontainers.image.description="Makes and keeps the pods of CollectorJobs"
CMD ["python", "-m", "cormorant_operator"]

# -- cpu: heads, and workers of groups without a device ----------------------------------------------------------------

FROM runtime AS cpu
COPY --from=cpu-dependencies /opt/venv /opt/venv
COPY --from=project /opt/cormorant /opt/cormorant
LABEL org.opencontainers.image.title="cormorant-cpu" \
      org.opencontainers.image.description="Heads and workers of CollectorJobs, with EnvPool, Ray and PyTorch without CUDA"
CMD ["cormorant", "--help"]

# -- cuda: workers of groups with `device: gpu`; the default, because it is the last -----------------------------------

# No other stage installs its 6 GB, and each large part is a layer: they are built once, and pulled at the same time.
FROM runtime AS cuda
USER root
COPY --from=tools /opt/venv /opt/venv
ARG VIRTUAL_ENV=/opt/venv
ARG UV_LINK_MODE=copy
ARG UV_COMPILE_BYTECODE=1
# Certificates of the base image, to which a proxy of yours may have added its own.
ARG UV_SYSTEM_CERTS=1
ARG UV=/mnt/opt/uv/bin/uv
ARG PINS=/mnt/build/images/constraints.txt
# CUDA's libraries for mathematics, for networks, PyTorch, Triton, and the rest.
RUN --mount=type=bind,from=tools,target=/mnt --mount=type=cache,target=/root/.cache/uv \
    grep -E '^nvidia-[a-z-]+==' $PINS | $UV pip install --quiet --no-deps --require-hashes --requirement -
RUN --mount=type=bind,from=tools,target=/mnt --mount=type=cache,target=/root/.cache/uv \
    grep -E '^nvidia-[a-z-]+-cu[0-9]+==' $PINS | $UV pip install --quiet --no-deps --require-hashes --requirement -
RUN --mount=type=bind,from=tools,target=/mnt --mount=type=cache,target=/root/.cache/uv \
    grep '^torch==' $PINS | $UV pip install --quiet --no-deps --require-hashes --requirement -
RUN --mount=type=bind,from=tools,target=/mnt --mount=type=cache,target=/root/.cache/uv \
    grep '^triton==' $PINS | $UV pip install --quiet --no-deps --require-hashes --requirement - \
 && find /opt/venv -path '*/triton/*' -name '*.a' -delete
RUN --mount=type=bind,from=tools,target=/mnt --mount=type=cache,target=/root/.cache/uv \
    $UV pip install --quiet --constraint $PINS --requirement /mnt/build/pyproject.toml \
      --extra worker --extra s3 --extra gpu --extra ray --extra api --extra otel --extra cli --extra client
COPY --from=project /opt/cormorant /opt/cormorant
USER 65532:65532
# What the container runtime mounts of the driver, in pods that have a device.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="cormorant" \
      org.opencontainers.image.description="Heads and workers of CollectorJobs, with PyTorch, EnvPool and Ray"
CMD ["cormorant", "--help"]
