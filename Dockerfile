# One image for every service; the command chooses which: `docker run IMAGE lorrery.router --help`.
# Nothing here needs BuildKit, and there is no `# syntax=` line: that line would pull an image.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The environment gets no pip of its own: made at once, smaller, and nothing can be installed into it later.
RUN python -m venv --without-pip /opt/venv
# The pins come first, so that a change of our code does not install them again.
COPY requirements/run.txt requirements/build.txt /tmp/
RUN pip --python /opt/venv/bin/python install --only-binary=:all: --require-hashes -r /tmp/run.txt
# A wheel of dist/ (make wheel) that fits this Python, in place of one built here: --build-arg WHEEL=dist/NAME.whl
ARG WHEEL=
# The compiler is for the core. Without one it is interpreted: slower, with equal results.
RUN if [ -z "$WHEEL" ]; then \
    pip install --only-binary=:all: --require-hashes -r /tmp/build.txt \
    && { command -v cc || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; } \
      || echo 'no C compiler can be had here'; }; \
  fi
COPY . /src
WORKDIR /src
RUN if [ -z "$WHEEL" ]; then \
    pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . && WHEEL=/tmp/wheel/*.whl; \
  fi && pip --python /opt/venv/bin/python install --no-deps $WHEEL && /opt/venv/bin/lorrery --version
# Readable by any user, whatever the umask of the checkout. The files of an image never change, so that no start need compare the times of the compiled ones.
RUN chmod -R a+rX /opt/venv /src/deploy && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/venv /opt/venv
COPY --from=build /src/deploy/healthcheck.py /opt/healthcheck.py
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Numbers, not names: no useradd is needed, and Kubernetes' runAsNonRoot can check them.
USER 10001:10001
STOPSIGNAL SIGTERM
# Exec form: python itself is process 1 and gets the signal.
ENTRYPOINT ["python", "-m"]
CMD ["lorrery.router", "--help"]
