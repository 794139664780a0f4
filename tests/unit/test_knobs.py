"""No dead knobs: what trains reads every key of the configuration, and documents name keys and metrics that exist."""

import re

import megatron_bridge as bridge
from support.base.read_config import KEYS, SECTIONS
from support.engine.vllm_process import engine_options
from tests.conftest import REPO

LOOKS = REPO / "support/check/checks.py"  # only looks at the configuration: a key that nothing else reads is dead


def test_every_key_is_read():
    """As an attribute, or by a name that is handed to getattr."""
    text = "\n".join(path.read_text() for path in {*REPO.glob("*.py"), *REPO.glob("support/**/*.py")} - {LOOKS})
    read = {*re.findall(r"\.(\w+)", text), *re.findall(r'"(\w+)"', text)}
    assert not [key for key in KEYS if key.rpartition(".")[2] not in read]


# ---------------------------------------------------------------- documents

LAYOUTS = (REPO / "docs/configs.md").read_text().partition("## A layout to begin with")[2]
QUOTED = {
    name.partition("=")[0]
    for name in re.findall(r"`([a-z_]+[./][\w./]+(?:=[^`]*)?)`", (REPO / "docs/troubleshooting.md").read_text())
}


def legal_keys() -> set[str]:
    legal = {*KEYS, *(f"megatron.{key}" for key in bridge.megatron_fields())} - SECTIONS.keys()
    return legal | {f"rollout.vllm.{key}" for key in engine_options()}


def test_every_key_of_the_page_exists():
    named = {name for name in QUOTED if name.partition(".")[0] in {*SECTIONS, "megatron"} and "/" not in name}
    assert len(named) >= 40 and named <= legal_keys()
    files = {name for name in QUOTED - named if name.endswith((".py", ".jsonl", ".yaml"))}
    assert QUOTED - named - files <= set(re.findall(r"`([a-z_]+/\w+)`", (REPO / "docs/metrics.md").read_text()))


def test_the_layouts_are_the_arithmetic():
    rows = re.findall(
        r"^\| Q[^|]*?(?:, ([\d.]+) of it experts)? \| ([\d.]+) \| (\d+) "
        r"\| tp (\d+) × pp (\d+)(?:, ep (\d+) × etp (\d+))? \| ([\d.]+) \| ([\d.]+) \|$",
        LAYOUTS,
        flags=re.MULTILINE,
    )
    assert len(rows) == LAYOUTS.count("\n| Qwen")
    for experts, weights, gpus, tp, pp, ep, etp, state, share in rows:
        dense = float(weights) - float(experts or 0)
        own = dense / (int(tp) * int(pp)) + float(experts or 0) / (int(ep or 1) * int(etp or 1) * int(pp))
        held = own * 6 + float(weights) / int(gpus) * 12
        assert abs(held - float(state)) < 0.06 + 0.003 * held, (weights, gpus)  # of the stage that has most
        most = (80 - 8 - (held - 4 * own)) / 80  # without gradients; less what an export of a large tensor takes
        assert -0.006 < most - float(share) < 0.11, (weights, gpus)
        assert int(gpus) % (int(tp) * int(pp)) == 0 == int(gpus) % (int(ep or 1) * int(pp))
