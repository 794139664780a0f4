"""Serve the page on 127.0.0.1 while a run goes on. The page polls every 3 seconds for new data."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tools.report.page import build_page, build_report
from tools.report.read import Run


def make_server(runs: list[Run], title: str, port: int) -> ThreadingHTTPServer:
    """Return a server on 127.0.0.1, not yet serving; port 0 takes any free port.

    It serves /, /data.json and /block/RUN/FILE for the names of existing sample files; no request names a path.
    """
    lock = threading.Lock()  # a Run caches what it has read, and requests run concurrently
    state = {"version": 0, "content": b""}

    def newest() -> tuple[str, bytes]:
        with lock:
            if any([run.has_changed() for run in runs]):  # a list, so that every run is updated
                state["content"] = gzip.compress(json.dumps(build_report(runs)).encode(), 1)
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
            if host not in ("127.0.0.1", "localhost"):  # DNS rebinding: another site's name resolves to this address
                self.send_error(403)
            elif self.path == "/":
                self.answer("text/html; charset=utf-8", gzip.compress(build_page(title, live=True).encode()))
            elif self.path == "/data.json":
                version, content = newest()
                self.answer("application/json", content, version)
            else:
                content = block(self.path)
                if content is None:
                    self.send_error(404)
                else:
                    self.answer("application/json", content)

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
            """Print nothing for a request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
