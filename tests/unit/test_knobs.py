"""No dead knobs: what trains reads every key of the configuration, and documents name keys and metrics that exist."""

import re

from support.base.read_config import KEYS, SECTIONS
from tests.conftest import REPO, legal_keys

# only looks at the keys: one that nothing else reads is dead
LOOKS = REPO / "support/preflight/configuration.py"


def test_every_key_is_read():
    """As an attribute, or by a name that is handed to getattr."""
    text = "\n".join(path.read_text() for path in {*REPO.glob("*.py"), *REPO.glob("support/**/*.py")} - {LOOKS})
    read = {*re.findall(r"\.(\w+)", text), *re.findall(r'"(\w+)"', text)}
    assert not [key for key in KEYS if key.rpartition(".")[2] not in read]


# ---------------------------------------------------------------- documents

QUOTED = {
    name.partition("=")[0]
    for name in re.findall(r"`([a-z_]+[./][\w./]+(?:=[^`]*)?)`", (REPO / "docs/troubleshooting.md").read_text())
}


def test_every_key_of_the_page_exists():
    named = {name for name in QUOTED if name.partition(".")[0] in {*SECTIONS, "megatron"} and "/" not in name}
    assert len(named) >= 40 and named <= legal_keys()
    files = {name for name in QUOTED - named if name.endswith((".py", ".jsonl", ".yaml"))}
    assert QUOTED - named - files <= set(re.findall(r"`([a-z_]+/\w+)`", (REPO / "docs/metrics.md").read_text()))
