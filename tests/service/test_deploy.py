"""deploy/nginx.conf with Debian's nginx: TLS, tokens, and a cache whose hits reach no server."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
import trustme

from apportion.service.client import Client
from apportion.service.http.serve import Server
from apportion.service.problems import ServiceError
from tests.service.requests import RANKS, TOKEN, Request, client_of

ROOT = Path(__file__).parents[2]
REQUEST = Request(3)


@pytest.fixture(scope="module")
def front(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Runs nginx in front of the server; yields its URL and the PEM file of its certificate authority."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx")
    folder = tmp_path_factory.mktemp("nginx")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(folder / "apportion.key")
    certificate.cert_chain_pems[0].write_to_path(folder / "apportion.crt")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (ROOT / "deploy/nginx.conf").read_text()
    (folder / "tenants").write_text(f"# tenants\nvision: another-token-of-20\ntext: {TOKEN}\n")
    (command,) = re.findall(r"#   (sed .* tenants >.*) && nginx", text)
    subprocess.run(command.replace("/etc/nginx/", ""), shell=True, cwd=folder, check=True)
    text = text.replace("/etc/nginx/", f"{folder}/")
    text = text.replace("/var/cache/nginx/", f"{folder}/").replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("127.0.0.1:8321", server.url.removeprefix("http://"))
    names = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"
    temporary = "".join(f"{name}_temp_path {folder}/{name};" for name in names)
    (folder / "nginx.conf").write_text(
        f"{'user root;' if os.geteuid() == 0 else ''} daemon off; pid {folder}/pid; "
        f"error_log {folder}/log; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{text} }}"
    )
    with subprocess.Popen([nginx, "-p", folder, "-c", folder / "nginx.conf"]) as process:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"https://127.0.0.1:{port}", folder / "ca.pem"
        process.terminate()


def test_clients_go_through_nginx(front: tuple[str, Path]) -> None:
    url, ca = front
    with closing(Client(url, TOKEN, ca=ca)) as client:
        client.submit(REQUEST.key, REQUEST.data)
        assert [client.fetch(REQUEST.key, rank, 60.0).encode() for rank in range(RANKS)] == REQUEST.slices()
        stream = client.stream([REQUEST.key] * 2, 1, 60.0)
        assert [each.encode() for each in stream] == [REQUEST.slices()[1]] * 2
    with (
        closing(Client(url, "another-token-of-16", ca=ca)) as stranger,
        pytest.raises(ServiceError, match="401"),
    ):
        stranger.fetch(REQUEST.key, 0, 0.0)


def test_cache_hits_do_not_reach_the_server(front: tuple[str, Path], server: Server) -> None:
    url, ca = front

    def deliveries() -> float:
        with client_of(server.url) as direct:
            found = re.findall(r"^apportion_deliveries_total (.*)", direct.get("/metrics").text, re.MULTILINE)
        return float(found[0])

    trusted = ssl.create_default_context(cafile=ca)
    headers = {"authorization": f"Bearer {TOKEN}", "accept-encoding": "identity"}
    with httpx.Client(base_url=url, verify=trusted, headers=headers) as client:
        REQUEST.put(client)
        path = f"/v1/plans/{REQUEST.hex}/ranks/2"
        bodies, before = [client.get(f"{path}?wait_s=10").content], deliveries()
        bodies += [client.get(f"{path}?wait_s={number}").content for number in range(50)]
        assert set(bodies) == {REQUEST.slices()[2]}
        assert deliveries() == before
        assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401


def test_page_and_documents_need_no_token(front: tuple[str, Path]) -> None:
    url, ca = front
    with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=ca)) as client:
        paths = "/", "/docs", "/openapi.json", "/readyz", "/metrics"
        assert [client.get(path).status_code for path in paths] == [200, 200, 200, 200, 401]
