# Two images from one file:
#
#   docker build -t cormorant .                               heads and workers: PyTorch, EnvPool, Ray
#   docker build -t cormorant-operator --target operator .    the operator: neither of them
#
# Both run as any user, with a read-only root and without capabilities; what is written goes to /tmp, which pods mount.
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu takes PyTorch from there: without CUDA the image has a
# third of its size, and its workers cannot use a GPU.
#
# Layers, from rarely to often changed: base, dependencies (pyproject.toml, constraints.txt), this project.

# -- base: what both images stand on ---------------------------------------------------------------------------------

FROM python:3.11-slim-bookworm AS base
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
COPY constraints.txt /build/
# The project lies beside its dependencies, in a layer of its own; the .pth file says where.
RUN python -m venv /opt/uv \
 && /opt/uv/bin/python -m pip install --quiet --disable-pip-version-check --constraint /build/constraints.txt uv \
 && python -m venv /opt/venv \
 && echo /opt/cormorant > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cormorant.pth"
# A cache that is mounted lies on another file system, and a hard link to it would be a copy with a warning.
ENV VIRTUAL_ENV=/opt/venv \
    UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1
COPY pyproject.toml /build/
WORKDIR /build

# -- dependencies: one environment an image ---------------------------------------------------------------------------

FROM tools AS operator-dependencies
RUN /opt/uv/bin/uv pip install --quiet --constraint constraints.txt --requirement pyproject.toml --extra operator

FROM tools AS dependencies
# Empty: the package index's own build, which has CUDA.
ARG TORCH_INDEX=""
# Without its dependencies: those come from the package index, at the versions of constraints.txt.
RUN if [ -n "$TORCH_INDEX" ]; then \
      /opt/uv/bin/uv pip install --quiet --no-deps --default-index "$TORCH_INDEX" "$(grep '^torch==' constraints.txt | cut -d ' ' -f 1)"; \
    fi
RUN /opt/uv/bin/uv pip install --quiet --constraint constraints.txt --requirement pyproject.toml \
      --extra worker --extra gpu --extra ray --extra api --extra cli --extra client

# -- project: pure Python, the same in both images -------------------------------------------------------------------

FROM tools AS project
COPY README.md LICENSE ./
COPY api api
COPY worker worker
COPY operator operator
# Scripts in bin/ begin with the interpreter that they are installed with.
RUN /opt/uv/bin/uv build --quiet --wheel --out-dir /dist . \
 && /opt/uv/bin/uv pip install --quiet --python /opt/venv/bin/python --no-deps --target /opt/cormorant /dist/*.whl

# -- operator --------------------------------------------------------------------------------------------------------

FROM base AS operator
COPY --from=operator-dependencies /opt/venv /opt/venv
COPY --from=project /opt/cormorant /opt/cormorant
ARG VERSION=0.2.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="cormorant-operator" \
      org.opencontainers.image.description="Makes and keeps the pods of CollectorJobs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE"
USER 65532:65532
CMD ["python", "-m", "cormorant_operator"]

# -- cormorant: heads and workers; the default, because it is the last -------------------------------------------------

FROM base AS cormorant
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=project /opt/cormorant /opt/cormorant
# What the container runtime mounts of the driver, in pods that have a device.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG VERSION=0.2.0
ARG REVISION=""
ARG SOURCE=""
LABEL org.opencontainers.image.title="cormorant" \
      org.opencontainers.image.description="Heads and workers of CollectorJobs, with PyTorch, EnvPool and Ray" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE"
USER 65532:65532
CMD ["cormorant", "--help"]
