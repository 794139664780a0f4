"""The page: the template with its style, script and, where it has to stand alone, the data in it."""

import base64
import gzip
import hashlib
import html
import json
from pathlib import Path

from support.memory import PHASES
from tools.report.panels import SECTIONS
from tools.report.read import BYTES_A_TOKEN, Run

HERE = Path(__file__).resolve().parent


def report(runs: list[Run]) -> dict:
    """All that the page shows but the samples."""
    return {"sections": SECTIONS, "phases": PHASES, "runs": [run.page_data() for run in runs]}


def page(title: str, data: str = "", live: bool = False) -> str:
    """The HTML; `data`: elements that hold the data, without which the page asks the server it came from.

    Its own script and style are named by their digests, so nothing that a model wrote can run, or reach the network.
    """
    style = (HERE / "page.css").read_text()
    script = "\n".join((HERE / f"{name}.js").read_text() for name in ("charts", "viewer", "page"))
    rules = [f"{kind}-src '{integrity(text)}'" for kind, text in (("script", script), ("style", style))]
    policy = "; ".join(["default-src 'none'", *rules, "connect-src 'self'" if live else "connect-src 'none'"])
    text = (HERE / "page.html").read_text()
    values = {"live": " data-live" * live, "policy": policy, "title": html.escape(title), "style": style}
    for name, value in (values | {"data": data, "script": script}).items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def integrity(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def element(name: str, content: bytes) -> str:
    """Compressed JSON as an element that is no script to the browser."""
    return f'<script type="text/plain" id="{name}">{base64.b64encode(content).decode()}</script>\n'


def standing_alone(title: str, runs: list[Run], megabytes: float) -> str:
    """The page with everything in it; of the samples as many groups a step as fit into about so many MB."""
    estimate = sum(run.response_tokens() for run in runs) * BYTES_A_TOKEN / 1e6
    share = min(1.0, megabytes / max(estimate, 1e-9))
    found = json.dumps(report(runs), ensure_ascii=False, separators=(",", ":")).encode()
    parts = [element("report", gzip.compress(found, 6, mtime=0))]
    for number, run in enumerate(runs):
        parts += [element(f"block/{number}/{name}", run.block(name, share)) for name in run.sample_files()]
    return page(title, "".join(parts))
