"""Configurations that a fuzzer spoilt: exit code 2 and a message naming what was spoilt, or a plan; never a traceback.

Case n is always the same: `pytest tests/unit/test_fuzz_config.py -k "case and 17"` runs it alone.
"""

import json
import math
import random
import shutil
import typing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

import megatron_bridge as bridge
import train_grpo
from config import Config
from support.base.read_config import SECTIONS, merge, nest
from tests.conftest import REPO

CASES, QUICK = 300, 60  # of them in `make test`

KINDS = {name: declared.annotation for name, declared in Config.model_fields.items() if name not in SECTIONS}
for section, model in SECTIONS.items():
    KINDS |= {f"{section}.{name}": declared.annotation for name, declared in model.model_fields.items()}
# Wrong for most keys.
WRONG = [
    "many", "", "nan", "${", "\x00", [1, 2], [], {"a": 1}, {}, None, math.nan, math.inf, -math.inf, -1, 0, -0.5, 1.5,
    10**30, 1e300, True,
]  # fmt: skip
# Values that are legal, or not, one by one, and do not go together.
TOGETHER = {
    "resume": ["auto", "last"], "data.prompt_key": ["question", "prompt.text", ".", ""], "data.answer_key": ["a.b.c"],
    "reward.default": ["exat", "", {}, {"exact": "much"}, {"exat": 1}, {"custom": 1}, "model", 3, {1: 1}],
    "reward.by_source.math": [[], {"exact": math.nan}, {"exact": None}, {"model": 1, "exact": 1}, "remote"],
    "reward.options": [{"exact": {"a": 1}}, {"exat": {}}, {"length": {"limit": "long"}}, {"math": []}],
}  # fmt: skip
for key, kind in KINDS.items():
    if typing.get_origin(kind) is typing.Literal:
        TOGETHER[key] = list(typing.get_args(kind))
    elif key.partition(".")[0] in ("parallel", "rollout", "data", "train", "algo", "eval"):
        numbers = {int: [1, 2, 3, 8, 10**12], float: [0, 0.1, 1.5], bool: [False, True]}
        TOGETHER |= {key: numbers[kind]} if kind in numbers else {}


def is_illegal(key: str, value: typing.Any) -> bool:
    """Whether the value is none for a section or a key of numbers, whatever its own range."""
    if key in SECTIONS:
        return value not in ({}, None)
    kinds = {KINDS[key], *typing.get_args(KINDS[key])}
    if not {int, float} & kinds or typing.get_origin(KINDS[key]) is dict:
        return False
    return type(value) not in (int, float, *kinds) or value != value  # NaN


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
        if rng.random() < 0.4:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
            self.overrides.append(f"{key}={text}")
        else:
            self.tree = merge(self.tree, nest(key, value))


def wrong_value(rng: random.Random, d: Draft) -> None:
    key, value = rng.choice([key for key in (*KINDS, *SECTIONS) if key not in d.spoilt]), rng.choice(WRONG)
    d.illegal |= is_illegal(key, value)
    d.put(rng, key, value)


def unknown_key(rng: random.Random, d: Draft) -> None:
    key = rng.choice([key for key in KINDS if KINDS[key] is not dict])
    place = rng.randrange(len(key))
    misspelt = rng.choice([key[:place] + "x" + key[place:], key[:-1], f"{key}.more", f"trainer.{key}", key.upper()])
    d.illegal |= misspelt not in KINDS
    d.spoilt += [key, f"'{misspelt.partition('.')[0]}'"]  # train.lr.more: train.lr is no dict; TRAIN.lr: no section
    d.put(rng, misspelt, rng.choice([1, "auto", None, {"a": 1}]))


def odd_file(rng: random.Random, d: Draft) -> None:
    """The text of the file: no mapping, not YAML, no text."""
    d.spoilt += ["config.yaml", "seed"]
    d.illegal = True
    d.text = rng.choice([
        "", "# nothing\n", "- seed\n- 1\n", "3\n", "seed: [1\n", "seed: 1\n  train: 2\n", "seed: *b\n", "? [1]\n: 3\n",
        "seed: !!python/object:os.system x\n", b"\xff\xfe\x00seed", "seed: 1\n---\nseed: 2\n", "{" * 200,
        "base: config.yaml\n", "base: nowhere.yaml\n", "base: [1]\n", "base: .\n", "seed: 1\nseed: 2\n",
    ])  # fmt: skip


def odd_override(rng: random.Random, d: Draft) -> None:
    override = rng.choice([
        "train", "=3", "", "train.=3", ".lr=3", "train..lr=3", "train.lr", "train[lr]=x", "train.lr.x=3", "train.lr=[",
        "train.lr=a: b", "data.train=[a", "train.lr=1 2", "a b=3", "train.lr=*x", "seed=!!int x", "train.lr=1e", "1=1",
        "lr=1", "-x", "-train.lr=3", "train.steps=0x", "train.steps=१x", "train.lr=\n", "train.lr=\x00",
    ])  # fmt: skip
    d.spoilt += [override, override.partition("=")[0] or "override"]
    d.spoilt += ["train.lr"] if "train.lr" in override else []
    d.illegal = True
    d.overrides.append(override)


def odd_together(rng: random.Random, d: Draft) -> None:
    d.world_size = rng.choice([1, 2, 3, 4, 8])
    for key in rng.sample(sorted(TOGETHER), rng.randint(2, 5)):
        d.put(rng, key, rng.choice(TOGETHER[key]))


def odd_path(rng: random.Random, d: Draft) -> None:
    """A missing file, a folder for a file, a file for a folder, an empty file, one without text in it."""
    (d.folder / "empty").mkdir(exist_ok=True)
    (d.folder / "empty.jsonl").write_text("")
    (d.folder / "bytes.jsonl").write_bytes(bytes(range(256)))
    (d.folder / "broken.py").write_text("def f(:")
    (d.folder / "exits.py").write_text("raise SystemExit(0)\n")
    key = rng.choice(["model.path", "data.train", "data.eval", "reward.custom", "output_dir", "resume"])
    name = rng.choice(["nowhere.jsonl", "empty", "empty.jsonl", "bytes.jsonl", "broken.py:f", "exits.py:f", "a" * 300])
    d.put(rng, key, f"{d.folder}/{name}")
    d.illegal |= key == "reward.custom"


def odd_passed_on(rng: random.Random, d: Draft) -> None:
    """Options that Megatron-core, vLLM or the chat template are to judge."""
    names = [f"megatron.{name}" for name in rng.sample(sorted(bridge.megatron_fields()), 6)]
    names += [f"rollout.vllm.{name}" for name in ("max_num_seqs", "dtype", "model", "max_model_len", "max_num_seq")]
    names += ["data.template_kwargs.tokenize"]
    d.put(rng, rng.choice(names), rng.choice(WRONG))
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
    wrong_value, wrong_value, wrong_value, unknown_key, odd_file, odd_override, odd_together, odd_together, odd_path,
    odd_passed_on, odd_model,
]  # fmt: skip


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
    for mutation in rng.sample(MUTATIONS, rng.choice([1, 1, 2, 3])):
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
