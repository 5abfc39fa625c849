"""A real S3 server on loopback, and a proxy before it that fails in chosen ways."""

from __future__ import annotations

import http.client
import http.server
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What becomes of a request: its number among those of its method -> a kind of failure, or None.
Failures = Callable[[str, int], str | None]


@contextmanager
def s3_server() -> Iterator[int]:
    """Start moto's server in a process of its own; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the S3 server did not start"
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to the server, but for those that `failures` names.

    Args:
        port: of the server.
        failures: `503` answers so, `drop` ends the connection in the middle of the body, `slow`
            pauses there.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.target = port
        self.failures: Failures = lambda method, number: None
        self.seen: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news."""

    def kind_of(self, method: str) -> str | None:
        """What becomes of the next request of a method."""
        with self.lock:
            number = self.seen[method]
            self.seen[method] += 1
            kind = self.failures(method, number)
            if kind is not None:
                self.failed[kind] += 1
            return kind


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.server.kind_of(self.command)
        if kind == "503":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        payload = answer.read()
        upstream.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(payload))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(payload) // 2
        self.wfile.write(payload[:half])
        if kind == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if kind == "slow":
            self.wfile.flush()
            time.sleep(0.2)
        self.wfile.write(payload[half:])

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815  # the base's names

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    """Run a proxy before a server."""
    server = Proxy(port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
