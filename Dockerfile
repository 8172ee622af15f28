# The planning service. compose.yaml runs it beside Redis; docs/service.md says how.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=/data/numba \
    APPORTION_SERVE_STORE=/data/plans
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY apportion apportion
RUN pip install ".[numba,service,redis]"

# Loops of these recipes are compiled now, for CPUs with AVX2 or arm64; others when they are first planned, into /data.
ARG RECIPES=fcp
WORKDIR /
RUN rm -r /src \
 && apportion warmup --recipes "$RECIPES" \
      --into "$(python -c 'import apportion; print(apportion.__path__[0])')/_compiled" \
 && rm -rf /data/numba \
 && useradd --uid 10001 --create-home apportion \
 && install --directory --owner apportion /data

USER apportion
VOLUME /data
EXPOSE 8321
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8321/healthz', timeout=4)"]
# Clients send the token of APPORTION_TOKEN (docker run --env APPORTION_TOKEN, or --token-file).
ENTRYPOINT ["apportion", "serve", "--host", "0.0.0.0", "--port", "8321"]
# Options follow, or come from the environment: APPORTION_TOKEN, APPORTION_SERVE_STORE_GB, ...
CMD []
