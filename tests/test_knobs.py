"""No dead knobs: every key of the configuration is used, and a budget reaches the phase it names and no other."""

import ast
import json

import pytest

from config import RewardConfig
from support.base.read_config import KEYS, SECTIONS
from support.step.grading import GradingPool
from tests.conftest import REPO
from tests.processes import Torchrun

# What only looks at the configuration: a key that nothing else reads is dead.
LOOKS = ("support/check/checks.py",)
# Names that may be a section ("": the configuration itself) though no annotation says so.
SECTION_OF = {"cfg": {"", "data"}, "sampling": {"rollout", "eval"}}


def keys_read(source: str) -> set[str]:
    """The keys that a program reads: `cfg.train.lr`, or `t.lr` after `t = cfg.train` or in `def f(t: TrainConfig)`."""
    nodes = list(ast.walk(ast.parse(source)))
    known = {**{section: {section} for section in SECTIONS}, **SECTION_OF}  # name of a variable or attribute

    def sections_of(node: ast.expr) -> set[str]:
        return known.get(getattr(node, "attr", getattr(node, "id", "")), set())

    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            kinds = ast.unparse(node.annotation)
            found = {section for section, kind in SECTIONS.items() if kind.__name__ in kinds}
            known[node.arg] = known.get(node.arg, set()) | found
    for node in nodes:
        if isinstance(node, ast.Assign):
            names, values = ([*ast.iter_child_nodes(n)][:-1] if isinstance(n, ast.Tuple) else [n]
                             for n in (node.targets[0], node.value))  # fmt: skip
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name):
                    known[name.id] = known.get(name.id, set()) | (sections_of(value) - {""})
    read = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            read |= {f"{section}.{node.attr}".lstrip(".") for section in sections_of(node.value)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":  # by a name that stands elsewhere
            names = {part.value for part in nodes if isinstance(part, ast.Constant)}
            read |= {f"{section}.{name}" for section in sections_of(node.args[0]) for name in names}
    return read


def test_every_key_is_read():
    program = [*sorted(REPO.glob("*.py")), *sorted(REPO.glob("support/**/*.py"))]
    read = {f"reward.{key}" for key in RewardConfig.model_fields}  # handed over as a whole, see the next test
    for path in program:
        if str(path.relative_to(REPO)) not in LOOKS:
            read |= keys_read(path.read_text())
    unread = set(KEYS) - read - SECTIONS.keys()
    assert not unread


def test_what_counts_as_read():
    program = """
def f(cfg, sampling, x: TrainConfig, y: "RolloutConfig"):
    t, n = run.cfg.algo, 3
    t.loss, x.lr, y.tp, cfg.model.path, sampling.top_p, run.cfg.seed, other.kl_coef, cfg.megatron, n.steps
    getattr(cfg.data, "split")
"""
    read = keys_read(program) & {*KEYS}
    assert read == {
        "algo", "algo.loss", "data", "data.split", "eval.top_p", "megatron", "model", "model.path", "rollout.tp",
        "rollout.top_p", "seed", "train.lr",
    }  # fmt: skip


@pytest.mark.parametrize(
    "key, value",
    [
        ("default", "gsm8k"), ("by_source", {"a": "exact"}), ("custom", "file.py:f"), ("timeout_s", 3.0),
        ("functions", {"a": "math"}), ("workers", 2), ("options", {"math": {}}), ("memory_gb", 1.0),
    ],
)  # fmt: skip
def test_reward_keys_reach_the_grading_processes(key, value):
    def built(cfg: RewardConfig) -> dict:
        pool = GradingPool(cfg)
        state = pool.workers[0].settings | {"default": pool.default.spec, "workers": len(pool.workers)}
        state["timeout_s"] = pool.timeout_s
        state["by_source"] = {source: kind.spec for source, kind in pool.by_source.items()}
        pool.close()
        return state

    assert built(RewardConfig(**{key: value})) == {**built(RewardConfig()), key: value}


@pytest.mark.slow
def test_the_budget_of_vllm_reaches_vllm_alone(tiny, tmp_path):
    """The answers are the same, and neither phase of the trainer notices."""

    def found(*overrides: str) -> dict:
        worker = Torchrun(
            tmp_path / "printed.txt", "tests/knobs_worker.py", str(tmp_path / "found.json"), "--config",
            "configs/tiny.yaml", f"output_dir={tmp_path / 'out'}", f"model.path={tiny / 'model'}",
            f"data.train={tiny / 'train.jsonl'}", "rollout.prompts_per_step=4", "algo.kl_coef=0.1", "train.steps=2",
            "train.updates_per_step=2", *overrides, nproc=1,
        )  # fmt: skip
        try:
            assert worker.end() == 0, worker.text
        finally:
            worker.kill()
        return json.loads((tmp_path / "found.json").read_text())

    all_at_once, fewer = found(), found("rollout.vllm.max_num_seqs=3")
    assert fewer["max_num_seqs"] == 3 != all_at_once["max_num_seqs"]
    assert fewer["response_ids"] == all_at_once["response_ids"] and fewer["packed"] == all_at_once["packed"] != []
