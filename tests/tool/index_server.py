"""A package index on this machine, as PEP 503 describes one, that can be told to misbehave."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Index:
    """What the server offers, how it fails, and what was asked of it.

    `cuts` are the bytes after which the connection is dropped, one for each of the next downloads; `hashes`
    replaces what the page says of a file; `wait` is how long a download takes.
    """

    files: dict[str, bytes]
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    status: int = 200
    wait: float = 0.0
    port: int = 0
    downloads: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple/"

    def page(self, project: str) -> bytes | None:
        prefix = project.replace("-", "_")
        names = [name for name in self.files if name.startswith(f"{prefix}-")]
        anchors = [
            f'<a href="/files/{name}#sha256={self.hashes.get(name, hashlib.sha256(self.files[name]).hexdigest())}">'
            f"{name}</a>"
            for name in names
        ]
        text = "\n".join(anchors).replace("#sha256=none", "")
        return f"<!DOCTYPE html><html><body>{text}</body></html>".encode() if names else None


@contextmanager
def serve(index: Index) -> Iterator[Index]:
    """Serve `index` on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if index.status != 200:
                self.send_error(index.status)
            elif self.path.startswith("/simple/"):
                page = index.page(self.path.split("/")[2])
                self.answer(200 if page else 404, page or b"", "text/html")
            else:
                self.download(unquote(self.path.removeprefix("/files/")))

        def download(self, name: str) -> None:
            asked = self.headers.get("Range", "")
            index.downloads.append((name, asked))
            data, status = index.files[name], 200
            if asked and index.ranges:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= len(data):
                    self.answer(416, b"", "text/plain")
                    return
                data, status = data[start:], 206
            time.sleep(index.wait)
            self.answer(status, data, "application/octet-stream", index.cuts.pop(0) if index.cuts else None)

        def answer(self, status: int, data: bytes, kind: str, cut: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:cut])
            self.close_connection = cut is not None

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # a client that goes away is what some tests are about

    server = Server(("127.0.0.1", 0), Handler)
    index.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
