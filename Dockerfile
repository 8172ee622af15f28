# The planning service. compose.yaml runs it beside Redis; docs/how-to/service.md says how.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 \
    APPORTION_SERVE_STORE=/data/plans
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY apportion apportion
COPY core core
# The core is compiled here, by the compiler of a Python package: the image has none.
RUN pip install ziglang \
 && for tool in c++ ar ranlib; do \
      printf '#!/bin/sh\nexec python -I -m ziglang %s "$@"\n' $tool > /usr/local/bin/zig-$tool \
   && chmod +x /usr/local/bin/zig-$tool; done \
 && CXX=zig-c++ CMAKE_ARGS="-DCMAKE_AR=/usr/local/bin/zig-ar -DCMAKE_RANLIB=/usr/local/bin/zig-ranlib" \
      pip install ".[service,redis]" \
 && pip uninstall --yes ziglang && rm /usr/local/bin/zig-*

WORKDIR /
RUN rm -r /src \
 && useradd --uid 10001 --create-home apportion \
 && install --directory --owner apportion /data

USER apportion
VOLUME /data
EXPOSE 8321
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8321/healthz', timeout=4)"]
# Clients send the token of APPORTION_TOKEN (docker run --env APPORTION_TOKEN, or --token-file).
ENTRYPOINT ["apportion", "serve", "--host", "0.0.0.0", "--port", "8321"]
# Options follow, or come from the environment: APPORTION_TOKEN, APPORTION_SERVE_STORE_GB, ...
CMD []
