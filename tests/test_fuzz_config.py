"""Configurations that a fuzzer spoilt: exit code 2 and a message naming what was spoilt, or a plan; never a traceback.

Case n is always the same: `pytest tests/test_fuzz_config.py -k "case and 17"` runs it alone.
"""

import json
import math
import random
import shutil
import typing
from dataclasses import dataclass, field
from pathlib import Path

import pydantic
import pytest
import yaml

import megatron_bridge as bridge
import train_grpo
from config import Config
from support.base.read_config import SECTIONS
from tests.conftest import REPO

CASES, QUICK = 300, 60  # of them in `make test`


def leaves(model: type[pydantic.BaseModel] = Config, prefix: str = "") -> dict[str, typing.Any]:
    """Dotted name → declared type, of every key that is no section."""
    found = {}
    for name, declared in model.model_fields.items():
        kind = declared.annotation
        section = isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
        found |= leaves(kind, f"{prefix}{name}.") if section else {prefix + name: kind}
    return found


KEYS = leaves()
# Wrong for most keys.
WRONG = [
    "many", "", "nan", "${", "\x00", [1, 2], [], {"a": 1}, {}, None, math.nan, math.inf, -math.inf, -1, 0, -0.5, 1.5,
    10**30, 1e300, True,
]  # fmt: skip
NO_BOUND = {f"algo.{key}" for key in ("clip_high", "correction_high", "dual_clip")}
NO_BOUND |= {"rollout.max_logp_gap", "rollout.max_mismatch_kl"}


def is_illegal(key: str, value: typing.Any) -> bool:
    """Whether the key cannot have the value, whatever its own range."""
    kind = KEYS[key]
    if value is None:
        return kind is not typing.Any and type(None) not in typing.get_args(kind)
    if typing.get_origin(kind) is dict or not {int, float} & {kind, *typing.get_args(kind)}:
        return False
    if isinstance(value, (str, list, dict, bool)) or (kind is int and value != value // 1):
        return True
    return not abs(value) < 1e12 and not (value == math.inf and key in NO_BOUND)


@dataclass
class Draft:
    """A configuration on its way to ruin."""

    folder: Path
    model: Path  # a whole one
    tree: dict  # of the YAML file
    world_size: int = 4
    overrides: list[str] = field(default_factory=list)
    spoilt: list[str] = field(default_factory=list)  # keys and files; a message must name one of them
    illegal: bool = False  # a plan would be a lie
    text: str | bytes | None = None  # in place of the tree

    def put(self, rng: random.Random, key: str, value: typing.Any) -> None:
        """Set a dotted key, in the file or by an override."""
        self.spoilt.append(key)
        *sections, name = key.split(".")
        node = None if rng.random() < 0.4 else self.tree
        for section in sections:
            node = node.setdefault(section, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[name] = value
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
            self.overrides.append(f"{key}={text}")


def wrong_value(rng: random.Random, d: Draft) -> None:
    key, value = rng.choice([key for key in KEYS if key not in d.spoilt]), rng.choice(WRONG)
    d.illegal |= is_illegal(key, value)
    d.put(rng, key, value)


def wrong_section(rng: random.Random, d: Draft) -> None:
    d.illegal = True
    d.put(rng, rng.choice([*SECTIONS]), rng.choice(["many", 3, [1], True]))


def unknown_key(rng: random.Random, d: Draft) -> None:
    key = rng.choice([key for key in KEYS if KEYS[key] is not dict])
    place = rng.randrange(len(key))
    misspelt = rng.choice([
        key[:place] + "x" + key[place:], key[:-1], f"{key}.more", f"trainer.{key}", key.replace("_", "-") + "-",
        key.upper(),
    ])  # fmt: skip
    d.illegal |= misspelt not in KEYS
    d.spoilt += [key, f"'{misspelt.partition('.')[0]}'"]  # train.lr.more: train.lr is no dict; TRAIN.lr: no section
    d.put(rng, misspelt, rng.choice([1, "auto", None, {"a": 1}]))


def odd_file(rng: random.Random, d: Draft) -> None:
    """The text of the file: no mapping, not YAML, no text."""
    d.spoilt += ["config.yaml", "seed"]
    d.illegal = True
    d.text = rng.choice([
        "", "# nothing\n", "- seed\n- 1\n", "3\n", "seed: [1\n", "seed: 1\n  train: 2\n", "\tseed: 1\n", "seed: *b\n",
        "seed: !!python/object:os.system x\n", "? [1]\n: 3\n", b"\xff\xfe\x00seed", "seed: 1\n---\nseed: 2\n",
        "{" * 200, "base: config.yaml\n", "base: nowhere.yaml\n", "base: [1]\n", "base: .\n", "seed: 1\nseed: 2\n",
    ])  # fmt: skip


def odd_override(rng: random.Random, d: Draft) -> None:
    override = rng.choice([
        "train", "=3", "", "train.=3", ".lr=3", "train..lr=3", "train.lr", "train[lr]=x", "train.lr.x=3", "train.lr=[",
        "train.lr='", "train.lr=a: b", "data.train=[a", "megatron={a: b: c}", "train.lr=1 2", "a b=3", "train.lr=*x",
        "train[0]=1", "seed=!!int x", "train.lr=1e", "1=1", "lr=1", "-x", "-train.lr=3", "train.steps=0x",
        "train.steps=१x", "train.lr=\n", "train.lr=\x00",
    ])  # fmt: skip
    d.spoilt += [override, override.partition("=")[0] or "override"]
    d.spoilt += ["train.lr"] if "train.lr" in override else []
    d.illegal = True
    d.overrides.append(override)


# Values that are legal, or not, one by one, and do not go together.
ODD = {
    "parallel.tp": [1, 2, 3], "parallel.pp": [1, 2, 4], "parallel.vpp": [1, 2], "parallel.cp": [1, 2, 8],
    "parallel.ep": [1, 2], "parallel.etp": [1, 4], "rollout.tp": [1, 2, 3], "parallel.sp": [False, True],
    "rollout.prompts_per_step": [1, 3, 10**12], "rollout.group_size": [1, 2, 10**12],
    "rollout.max_new_tokens": [1, 2041, 10**9], "data.max_prompt_tokens": [1, 8, 2045, 10**9],
    "train.updates_per_step": [2, 3, 17], "train.epochs_per_step": [2, 10**12],
    "train.max_tokens_per_micro_batch": [1, 11, 12, 10**12], "algo.overlong_buffer": [1, 5, 10**9],
    "model.dtype": ["bf16", "fp32"], "algo.advantage": ["rloo", "reinforce_pp", "gae"], "algo.loss": ["gspo", "ppo"],
    "algo.loss_norm": ["seq_mean_token_mean", "mean"], "algo.kl": ["k1", "k4"], "algo.kl_in": ["reward", "both"],
    "algo.old_logp": ["rollout", "vllm"], "algo.correction": ["tis", "icepop", "is"], "algo.dual_clip": [0.5, 3],
    "algo.correction_level": ["sequence", "answer"], "algo.kl_coef": [0, 0.1], "algo.correction_low": [3, 0.1],
    "rollout.top_p": [0, 0.5, 2], "rollout.top_k": [0, -2, 5], "rollout.max_logp_gap": [0, math.inf],
    "eval.temperature": [0, 1], "eval.samples": [1, 4], "train.eval_every": [1], "train.adam_beta2": [1, 1.5],
    "resume": ["auto", "last"], "data.prompt_key": ["question", "prompt.text", ".", ""],
    "data.answer_key": ["prompt", "a.b.c"], "data.source_key": ["source", ".."],
    "reward.default": ["exat", "", {}, {"exact": "much"}, {"exat": 1}, {"custom": 1}, "model", 3, {1: 1}],
    "reward.by_source.math": [[], {"exact": math.nan}, {"exact": None}, {"model": 1, "exact": 1}, "remote"],
    "reward.options": [{"exact": {"a": 1}}, {"exat": {}}, {"length": {"limit": "long"}}, {"model": {}}, {"math": []}],
}  # fmt: skip


def odd_together(rng: random.Random, d: Draft) -> None:
    d.world_size = rng.choice([1, 2, 3, 4, 8])
    for key in rng.sample(sorted(ODD), rng.randint(2, 5)):
        d.put(rng, key, rng.choice(ODD[key]))


def odd_path(rng: random.Random, d: Draft) -> None:
    """A missing file, a folder for a file, a file for a folder, an empty file, one without text in it."""
    (d.folder / "empty").mkdir(exist_ok=True)
    (d.folder / "empty.jsonl").write_text("")
    (d.folder / "bytes.jsonl").write_bytes(bytes(range(256)))
    (d.folder / "broken.py").write_text("def f(:")
    (d.folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    key = rng.choice(["model.path", "data.train", "data.eval", "reward.custom", "output_dir", "resume"])
    name = rng.choice([
        "nowhere.jsonl", "empty", "empty.jsonl", "bytes.jsonl", "broken.py:f", "exits.py:f", "broken.py", ":f",
        "config.yaml", "a" * 300,
    ])  # fmt: skip
    d.put(rng, key, f"{d.folder}/{name}")
    d.illegal |= key == "reward.custom"


def odd_rows(rng: random.Random, d: Draft) -> None:
    rows = [{"prompt": "1>", "answer": "1"} for _ in range(3)]
    rows.insert(rng.randrange(4), rng.choice([
        {}, {"prompt": "1>"}, {"prompt": None, "answer": "1"}, {"prompt": "", "answer": "1"}, [], 3, None, "text",
        {"prompt": [], "answer": "1"}, {"prompt": "1>", "answer": {"a": 1}}, {"prompt": "日本", "answer": "1"},
        {"prompt": [{"role": "user"}], "answer": "1"}, {"prompt": "\ud800", "answer": "1"},
    ]))  # fmt: skip
    path = d.folder / rng.choice(["rows.jsonl", "rows.json"])
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))
    d.put(rng, rng.choice(["data.train", "data.eval"]), str(path))
    d.spoilt.append(str(path))


def odd_passed_on(rng: random.Random, d: Draft) -> None:
    """Options that Megatron-core, vLLM or the chat template are to judge."""
    names = {
        "megatron": sorted(bridge.megatron_fields()), "data.template_kwargs": ["enable_thinking", "tokenize"],
        "rollout.vllm": ["max_num_seqs", "dtype", "model", "enforce_eager", "max_model_len", "max_num_seq"],
    }  # fmt: skip
    section = rng.choice([*names])
    d.put(rng, f"{section}.{rng.choice(names[section])}", rng.choice(WRONG))
    if section == "data.template_kwargs":
        d.put(rng, "data.chat_template", rng.choice([True, False]))


def odd_model(rng: random.Random, d: Draft) -> None:
    """A model folder that was tampered with."""
    folder = d.folder / "model"
    shutil.copytree(d.model, folder, dirs_exist_ok=True)
    file = folder / rng.choice(["config.json", "config.json", "tokenizer.json", "chat_template.jinja"])
    config = json.loads((folder / "config.json").read_text())
    config[rng.choice(sorted(config))] = rng.choice([0, -1, None, "many", [], 7, 10**9])
    file.write_text(rng.choice(["", "{", "[]", "{{ x.y.z }}"]))
    if file.name == "config.json" and rng.random() < 0.7:
        file.write_text(json.dumps(config))
    d.put(rng, "data.chat_template", file.suffix == ".jinja")
    d.put(rng, "model.path", str(folder))


MUTATIONS = [
    wrong_value, wrong_value, wrong_value, wrong_section, unknown_key, odd_file, odd_override, odd_together,
    odd_together, odd_path, odd_rows, odd_passed_on, odd_model,
]  # fmt: skip


def mutations(rng: random.Random) -> list[typing.Callable]:
    return rng.sample(MUTATIONS, rng.choice([1, 1, 2, 3]))


def test_the_quick_cases_have_every_mutation():
    assert {mutation for number in range(QUICK) for mutation in mutations(random.Random(number))} == {*MUTATIONS}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] if n >= QUICK else []) for n in range(CASES)]
)
def test_case(number, tiny, tmp_path, capfd, offline):
    """configs/tiny.yaml with one to three mutations."""
    rng = random.Random(number)
    tree = yaml.safe_load((REPO / "configs/tiny.yaml").read_text())
    tree["reward"]["custom"] = f"{REPO}/{tree['reward']['custom']}"
    tree["model"]["path"], tree["data"]["train"] = str(tiny / "model"), str(tiny / "train.jsonl")
    draft = Draft(tmp_path, tiny / "model", tree)
    for mutation in mutations(rng):
        mutation(rng, draft)
    path = tmp_path / "config.yaml"
    text = yaml.safe_dump(draft.tree, sort_keys=False) if draft.text is None else draft.text
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    try:
        arguments = ["--config", str(path), "--dry-run", "--world-size", str(draft.world_size), *draft.overrides]
        code = train_grpo.main(arguments)
    except SystemExit as end:  # argparse
        code = end.code
    streams = capfd.readouterr()
    text = streams.err if code else streams.out
    case = f"{draft.spoilt} {draft.overrides}\n{text}"
    assert "Traceback" not in text and code in (0, 2), case
    assert not (code == 0 and draft.illegal), f"an illegal configuration was accepted: {case}"
    assert code == 0 or any(name in text for name in draft.spoilt), f"nothing that was spoilt is named: {case}"
