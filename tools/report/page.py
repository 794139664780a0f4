"""Build the HTML page: the template with style, script and, for a standalone page, the data."""

import base64
import gzip
import hashlib
import html
import json
from pathlib import Path

from support.base.memory import PHASES
from tools.report.panels import SECTIONS
from tools.report.read import BYTES_A_TOKEN, Run

HERE = Path(__file__).resolve().parent


def build_report(runs: list[Run]) -> dict:
    """Return all data of the page except the samples."""
    return {"sections": SECTIONS, "phases": PHASES, "runs": [run.page_data() for run in runs]}


def build_page(title: str, data: str = "", live: bool = False) -> str:
    """Return the HTML. `data`: HTML elements that hold the data; a `live` page requests it from its server.

    The content security policy allows only this script and style, by their digests, so text of a model cannot run or
    reach the network.
    """
    style = (HERE / "page.css").read_text()
    script = "\n".join((HERE / f"{name}.js").read_text() for name in ("charts", "viewer", "page"))
    rules = [f"{kind}-src '{integrity(text)}'" for kind, text in (("script", script), ("style", style))]
    connect = "'self'" if live else "'none'"
    values = {
        "live": " data-live" if live else "",
        "policy": "; ".join(["default-src 'none'", *rules, f"connect-src {connect}"]),
        "title": html.escape(title),
        "style": style,
        "data": data,
        "script": script,
    }
    text = (HERE / "page.html").read_text()
    for name, value in values.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def integrity(text: str) -> str:
    """Return the digest of a script or style for a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def element(name: str, content: bytes) -> str:
    """Return compressed JSON as a script element of a type that the browser does not run."""
    return f'<script type="text/plain" id="{name}">{base64.b64encode(content).decode()}</script>\n'


def build_standalone_page(title: str, runs: list[Run], megabytes: float) -> str:
    """Return the page with all data; per step as many groups of samples as fit into about so many MB in all."""
    estimate = sum(run.response_tokens() for run in runs) * BYTES_A_TOKEN / 1e6
    share = min(1.0, megabytes / max(estimate, 1e-9))
    found = json.dumps(build_report(runs), ensure_ascii=False, separators=(",", ":")).encode()
    parts = [element("report", gzip.compress(found, 6, mtime=0))]
    for number, run in enumerate(runs):
        parts += [element(f"block/{number}/{name}", run.block(name, share)) for name in run.sample_files()]
    return build_page(title, "".join(parts))
