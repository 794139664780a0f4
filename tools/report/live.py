"""The same page on this machine's own address while a run goes on: it asks every 3 seconds whether there is more."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tools.report.page import page, report
from tools.report.read import Run


def server(runs: list[Run], title: str, port: int) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 alone, not yet serving; port 0: any that is free.

    It answers /, /data.json and /block/RUN/FILE with names that it knows; none of them is the path of a file.
    """
    lock = threading.Lock()  # a Run remembers what it has read, and requests come side by side
    state = {"version": 0, "content": b""}

    def newest() -> tuple[str, bytes]:
        with lock:
            if any([run.changed() for run in runs]):  # all are asked
                state["content"] = gzip.compress(json.dumps(report(runs)).encode(), 1)
                state["version"] += 1
            return f'"{state["version"]}"', state["content"]

    def block(path: str) -> bytes | None:
        blocks = {f"/block/{i}/{name}": (run, name) for i, run in enumerate(runs) for name in run.sample_files()}
        if path not in blocks:
            return None
        run, name = blocks[path]
        with lock:
            return run.block(name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):  # a page elsewhere that has its name point here
                self.send_error(403)
            elif self.path == "/":
                self.answer("text/html; charset=utf-8", gzip.compress(page(title, live=True).encode()))
            elif self.path == "/data.json":
                version, content = newest()
                self.answer("application/json", content, version)
            elif (content := block(self.path)) is not None:
                self.answer("application/json", content)
            else:
                self.send_error(404)

        def answer(self, kind: str, compressed: bytes, version: str = "") -> None:
            known = version and self.headers.get("If-None-Match") == version
            self.send_response(304 if known else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Cache-Control", "no-cache")
            if version:
                self.send_header("ETag", version)
            self.send_header("Content-Length", str(0 if known else len(compressed)))
            self.end_headers()
            if not known:
                self.wfile.write(compressed)

        def log_message(self, *_):
            """Requests are not worth a line each."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
