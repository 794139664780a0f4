"""Control a headless Chromium over a pipe: screenshots and tests of a page, without a further package.

Source: the Chrome DevTools protocol, with --remote-debugging-pipe: JSON messages that end in a zero byte. The
browser reads them from file descriptor 3 and writes to 4.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return the path of the program, None if it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One tab of a new browser with an empty profile, its `errors` and warnings, and the URLs of its `requests`."""

    def __init__(self, width: int = 1280, height: int = 900):
        self.profile = tempfile.TemporaryDirectory()
        to_browser, self.write_end = os.pipe()
        read_end, from_browser = os.pipe()

        def connect_pipes() -> None:
            first, second = os.dup(to_browser), os.dup(from_browser)  # copies first: one of them may be 3 or 4
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [find_chromium(), *FLAGS, f"--user-data-dir={self.profile.name}", "about:blank"],
            close_fds=False, preexec_fn=connect_pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self.replies = os.fdopen(read_end, "rb")
        self.number = 0  # of the last command
        self.rest = b""  # bytes read after the last message
        self.session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.write_end)  # the browser ends when its pipe closes
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()
        self.profile.cleanup()

    def send(self, method: str, **parameters) -> dict:
        """Send a command and return the result. Raises RuntimeError if the command fails or the browser has ended."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        while True:
            reply = self.receive()
            if reply.get("id") == self.number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']['message']}")
                return reply["result"]
            self.note(reply)

    def receive(self) -> dict:
        """Return the next message. Raises RuntimeError if the browser has ended."""
        while b"\0" not in self.rest:
            more = self.replies.read1(1 << 20)
            if not more:
                raise RuntimeError(f"the browser ended (exit code {self.process.wait()})")
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def note(self, event: dict) -> None:
        """Record errors of the page and its network requests."""
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme: light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str, timeout_s: float = 60.0) -> float:
        """Load a page after about:blank. Returns the seconds until the page has set data-ready."""
        self.send("Page.navigate", url="about:blank")
        began = time.perf_counter()
        self.send("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready", timeout_s)
        return time.perf_counter() - began

    def ask(self, script: str):
        """Evaluate a script and return the value of its last expression. Awaits promises."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description"))
        return result["result"].get("value")

    def wait(self, script: str, timeout_s: float = 20.0) -> None:
        """Wait until a script's value is true. Raises TimeoutError."""
        end = time.monotonic() + timeout_s
        while not self.ask(script):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {timeout_s:g} s: {script}; errors of the page: {self.errors}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Send the events of a key press."""
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
        down = {}
        if key == "Enter":
            down["text"] = "\r"
        elif len(key) == 1:
            down["text"] = key
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **down)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the visible part of the page."""
        time.sleep(0.3)  # figures are drawn when they come into view
        Path(path).write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))
