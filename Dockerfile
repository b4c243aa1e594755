# refusion-eval with Ray, for one machine and for scripts/kuberay.yaml, whose pods need wget for their probes.
#   docker build -t refusion-eval .                              for CPUs
#   docker build -t refusion-eval --build-arg DEVICE=cuda .      for NVIDIA GPUs
#   docker run --rm -v "$PWD/runs:/runs" refusion-eval run --tasks gsm8k --limit 20 --run-dir /runs/first
# /runs has to be writable for the user 1000. Docker's default profile forbids namespaces, so programs are checked in a
# lower tier of the sandbox; `docker run --rm refusion-eval doctor` names it, and says what a stronger one would need.
FROM python:3.11-slim-bookworm

ARG DEVICE=cpu
# For a GPU, Triton compiles its launchers at run time, which takes a C compiler.
# hadolint ignore=DL3008
RUN case "$DEVICE" in cpu | cuda) ;; *) echo "DEVICE is '$DEVICE', it must be cpu or cuda" >&2; exit 1 ;; esac \
    && apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && if [ "$DEVICE" = cuda ]; then apt-get install -y --no-install-recommends gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
# The layer of torch, by far the largest, stays the same until its version changes.
COPY constraints.txt .
RUN index=https://pypi.org/simple \
    && if [ "$DEVICE" = cpu ]; then index=https://download.pytorch.org/whl/cpu; fi \
    && pip install --no-cache-dir --index-url "$index" "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[ray]" "ray[default]"

RUN useradd --uid 1000 --create-home refusion && install -d -o refusion -g refusion /runs
USER 1000:1000
WORKDIR /home/refusion
# Seldom, because a check takes seconds of a processor on which a run may be measuring its speed.
HEALTHCHECK --interval=1h --timeout=2m --start-period=2m CMD ["refusion-eval", "doctor"]
ENTRYPOINT ["refusion-eval"]
CMD ["--help"]
