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
# The compiler is for the core. Without one it is interpreted: slower, with equal results; the end of the build says so.
RUN if [ -z "$WHEEL" ]; then \
    pip install --only-binary=:all: --require-hashes -r /tmp/build.txt \
    && { command -v cc || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; } \
      || echo 'no C compiler can be had here'; }; \
  else \
    command -v strip || { apt-get update && apt-get install --yes --no-install-recommends binutils; } || echo 'nothing strips symbols here'; \
  fi
COPY . /src
WORKDIR /src
RUN if [ -z "$WHEEL" ]; then \
    pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . && WHEEL=/tmp/wheel/*.whl; \
  fi && pip --python /opt/venv/bin/python install --no-deps $WHEEL && /opt/venv/bin/lorrery --version \
  && { /opt/venv/bin/lorrery --version | grep -q 'compiled core' \
    || echo 'WARNING: the core of this image is interpreted: there is no C compiler and apt installed none, or WHEEL has no compiled core'; }
# What nothing here imports goes: the tokenizers' way to a hub, libraries' own tests, what one compiles against them,
# colours for other languages than Python; and with `strip`, which comes with the compiler, what only a debugger reads.
RUN pip --python /opt/venv/bin/python uninstall --yes --quiet \
    huggingface-hub hf-xet httpx2 httpcore2 truststore fsspec filelock pyyaml tqdm \
  && cd /opt/venv/lib/python3*/site-packages \
  && find . -depth -type d \( -name tests -o -name include -o -path ./numpy/f2py \) -exec rm -rf {} + \
  && find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.a' \) -delete \
  && find pygments/lexers -name '*.py' ! -name __init__.py ! -name _mapping.py ! -name python.py -delete \
  && if command -v strip; then find . -name '*.so*' -exec strip --strip-unneeded {} +; fi \
  && /opt/venv/bin/python -c 'import lorrery.router.service, lorrery.scheduler.service, lorrery.worker.service, lorrery.loadgen.session, lorrery.view.app, lorrery.simulator'
# Readable by any user, whatever the umask of the checkout. The files of an image never change, so that no start need compare the times of the compiled ones.
RUN chmod -R a+rX /opt/venv /src/deploy && /opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib

# Python's image without what installs packages, and without documentation.
FROM ${PYTHON_IMAGE} AS root
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/idlelib \
    /usr/local/lib/python3*/lib2to3 /usr/local/lib/python3*/pydoc_data /usr/local/lib/python3*/tkinter /usr/local/lib/python3*/turtledemo \
    /usr/bin/apt* /usr/lib/apt /usr/lib/*/libapt* /var/lib/apt /var/cache /usr/bin/dpkg* /usr/lib/dpkg /usr/share/dpkg \
    /usr/bin/perl* /usr/lib/*/perl-base /usr/share/perl* /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale \
    /usr/lib/*/gconv /usr/share/zoneinfo/right /usr/share/zoneinfo/posix \
    /tmp/* /root/.cache
# A volume mounted here is its user's (docker-compose.secured.yml).
RUN mkdir -m 700 /credentials && chown 10001:10001 /credentials
COPY --from=build /opt/venv /opt/venv
COPY --from=build /src/deploy/healthcheck.py /opt/healthcheck.py

# One layer, since a file that a later layer removes still takes its place.
FROM scratch
COPY --from=root / /
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Numbers, not names: no useradd is needed, and Kubernetes' runAsNonRoot can check them.
USER 10001:10001
STOPSIGNAL SIGTERM
# Exec form: python itself is process 1 and gets the signal.
ENTRYPOINT ["python", "-m"]
CMD ["lorrery.router", "--help"]
