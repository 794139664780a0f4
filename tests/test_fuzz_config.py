"""Configurations that a fuzzer spoilt: exit code 2 and a message naming what was spoilt, or a plan; never a traceback.

Case n is always the same: `pytest tests/test_fuzz_config.py -k "case and 17"` runs it alone.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pydantic
import pytest
import yaml

import megatron_bridge as bridge
import train_grpo
from config import Config
from support.base.read_config import SECTIONS
from support.engine.vllm_process import engine_options
from tests.conftest import REPO

CASES, QUICK = 300, 60  # of them in `make test`
LIMIT_S = 10  # a case takes 0.1 s


def leaves(model: type[pydantic.BaseModel] = Config, prefix: str = "") -> dict[str, typing.Any]:
    """Dotted name → declared type, of every key that is no section."""
    found = {}
    for name, declared in model.model_fields.items():
        kind = declared.annotation
        section = isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)
        found |= leaves(kind, f"{prefix}{name}.") if section else {prefix + name: kind}
    return found


KEYS = leaves()
# Wrong for most keys; "???" and "${...}" mean something to OmegaConf, which other trainers use.
WRONG = [
    "many", "", "nan", "???", "${nowhere}", "${", "\x00", [1, 2], [], {"a": 1}, {}, None, math.nan, math.inf, -math.inf,
    -1, 0, -0.5, 1.5, 10**30, 1e300, True,
]  # fmt: skip


def is_illegal(key: str, value: typing.Any) -> bool:
    """Whether the key cannot have the value, whatever its own range."""
    kind = KEYS[key]
    if isinstance(value, str) and (value.startswith("${") or value == "???"):
        return True
    if value is None:
        return kind is not typing.Any and type(None) not in typing.get_args(kind)
    number = {int, float} & {kind, *typing.get_args(kind)} and typing.get_origin(kind) is not dict
    whole = kind is int and isinstance(value, float) and not value.is_integer()
    if not number or isinstance(value, (str, list, dict, bool)) or whole:
        return bool(number)
    no_bound = (
        "rollout.max_logp_gap", "rollout.max_mismatch_kl", "algo.clip_high", "algo.correction_high", "algo.dual_clip",
    )  # fmt: skip
    return not abs(value) < 1e12 and not (value == math.inf and key in no_bound)


@dataclass
class Draft:
    """A configuration on its way to ruin."""

    folder: Path
    tree: dict  # of the YAML file
    world_size: int = 4
    overrides: list[str] = field(default_factory=list)
    spoilt: list[str] = field(default_factory=list)  # keys and files; a message must name one of them
    illegal: bool = False  # a plan would be a lie
    finish: Callable[[str], str | bytes] = str  # of the YAML text

    def put(self, rng: random.Random, key: str, value: typing.Any) -> None:
        """Set a dotted key, in the file or by an override."""
        self.spoilt.append(key)
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
        *sections, name = key.split(".")
        node = None if rng.random() < 0.4 else self.tree
        for section in sections:
            node = node.setdefault(section, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[name] = value
        else:
            self.overrides.append(f"{key}={text}")


def wrong_value(rng: random.Random, d: Draft) -> None:
    key = rng.choice([key for key in KEYS if key not in d.spoilt])
    value = rng.choice(WRONG)
    d.illegal |= is_illegal(key, value)
    d.put(rng, key, value)


def wrong_section(rng: random.Random, d: Draft) -> None:
    section, value = rng.choice([*SECTIONS]), rng.choice(["many", 3, [1], True, "${nowhere}"])
    d.illegal = True
    d.spoilt.append(section)
    if rng.random() < 0.5:
        d.tree[section] = value
    else:
        d.overrides.append(f"{section}={value}")


def unknown_key(rng: random.Random, d: Draft) -> None:
    key = rng.choice([key for key in KEYS if KEYS[key] is not dict])
    place = rng.randrange(len(key))
    misspelt = rng.choice([
        key[:place] + "x" + key[place:], key[:-1], f"{key}.more", key.rpartition(".")[2] + "_", f"trainer.{key}",
        key.replace("_", "-") + "-", key.upper(),
    ])  # fmt: skip
    d.illegal = misspelt not in KEYS
    d.spoilt += [
        key,
        f"'{misspelt.partition('.')[0]}'",
    ]  # train.lr.more: train.lr is no dict; TRAIN.lr: no such section
    d.put(rng, misspelt, rng.choice([1, "auto", None, {"a": 1}]))


def odd_file(rng: random.Random, d: Draft) -> None:
    """The text of the file: no mapping, not YAML, no text."""
    d.spoilt += ["config.yaml", "seed"]
    texts = [
        "", "# nothing\n", "null\n", "- seed\n- 1\n", "seed\n", "3\n", "seed: [1\n", "seed: 1\n  train: 2\n",
        "\tseed: 1\n", "seed: &a *b\n", "seed: !!python/object:os.system x\n", "? [1, 2]\n: 3\n",
        b"\xff\xfe\x00seed", b"\x00" * 9, "seed: 1\n---\nseed: 2\n",
        "{" * 200, "base: config.yaml\n", "base: nowhere.yaml\n", "base: 3\n",
        "base: [1]\n", "base: .\n", "base: {a: 1}\n", "base: ''\n",
    ]  # fmt: skip
    if rng.random() < 0.3:
        d.illegal, d.finish = True, lambda text: text + "seed: 1\nseed: 2\n"
        d.tree["seed"] = 3
    else:
        d.illegal, chosen = True, rng.choice(texts)
        d.finish = lambda text: chosen


def odd_override(rng: random.Random, d: Draft) -> None:
    override = rng.choice([
        "train", "=3", "=", "", "train.=3", ".lr=3", "train..lr=3", "train.lr", "train[lr]=x", "train.lr.x=3",
        "train.lr=[", "train.lr={", "train.lr='", "train.lr=a: b", "data.train=[a", "megatron={a: b: c}",
        "train.lr=1 2", "a b=3", "train.lr=*x", "[]=1", "train[0]=1", "model.path=*", "reward.options=&",
        "seed=!!int x", "rollout.vllm=[1",
        "train.lr=1e", "train.lr=,", "1=1", "null=1", "lr=1", "--train.lr=1", "-x", "-train.lr=3", "train.steps=1_0_",
        "train.steps=0x", "train.steps=1e2", "train.steps=१x", "train.lr=\n", "train.lr=\x00",
    ])  # fmt: skip
    d.spoilt += [override, override.partition("=")[0] or "override", "train.lr" if "train.lr" in override else override]
    d.illegal |= override != "train.steps=1e2"
    d.overrides.append(override)


def odd_layout(rng: random.Random, d: Draft) -> None:
    """Sizes that do not divide the world, the model or each other."""
    d.world_size = rng.choice([1, 2, 3, 4, 6, 8, 16])
    for key in rng.sample(["parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep", "parallel.etp",
                           "rollout.tp"], rng.randint(1, 4)):  # fmt: skip
        d.put(rng, key, rng.choice([1, 2, 2, 3, 4, 8]))
    if rng.random() < 0.3:
        d.put(rng, "parallel.sp", rng.choice([False, True]))


def odd_batch(rng: random.Random, d: Draft) -> None:
    keys = {
        "rollout.prompts_per_step": [1, 3, 16, 10**12], "rollout.group_size": [1, 2, 7, 10**12],
        "rollout.max_new_tokens": [1, 4, 2041, 10**9], "data.max_prompt_tokens": [1, 8, 2045, 10**9],
        "train.updates_per_step": [2, 3, 17], "train.epochs_per_step": [2, 10**12],
        "train.max_tokens_per_micro_batch": [1, 11, 12, 10**12],
        "train.logprob_max_tokens_per_micro_batch": [1, 11, 12, 10**12],
        "algo.overlong_buffer": [1, 5, 10**9], "eval.max_new_tokens": [1, 3000], "eval.samples": [1, 4],
    }  # fmt: skip
    for key in rng.sample(sorted(keys), rng.randint(1, 3)):
        d.put(rng, key, rng.choice(keys[key]))


def odd_choices(rng: random.Random, d: Draft) -> None:
    """Settings that are legal one by one."""
    keys = {
        "model.dtype": ["bf16", "fp32"], "algo.advantage": ["rloo", "reinforce_pp", "gae"],
        "algo.loss": ["gspo", "reinforce", "ppo"], "algo.loss_norm": ["seq_mean_token_mean", "mean"],
        "algo.kl": ["k1", "k3+", "k4"], "algo.kl_in": ["loss", "reward", "both"], "algo.old_logp": ["rollout", "vllm"],
        "algo.correction": ["tis", "icepop", "seq_mask", "is"], "algo.correction_level": ["sequence", "answer"],
        "algo.dual_clip": [0.5, 1, 3], "algo.kl_coef": [0, 0.1], "algo.correction_low": [3, 0.1],
        "algo.correction_high": [2, 0.01], "algo.max_rounds": [1, 4], "rollout.top_p": [0, 0.5, 2],
        "rollout.top_k": [0, -2, 5], "rollout.max_logp_gap": [0, math.inf], "rollout.max_mismatch_kl": [0, 1e-3],
        "eval.temperature": [0, 1],
        "eval.samples": [1, 4], "eval.top_p": [0, 2],
        "eval.top_k": [-3, 5], "train.eval_every": [1], "rollout.gpu_memory_utilization": [0, 0.5, 2],
        "train.adam_beta2": [1, 1.5], "resume": ["auto", "last"],
    }  # fmt: skip
    for key in rng.sample(sorted(keys), rng.randint(2, 5)):
        d.put(rng, key, rng.choice(keys[key]))


def odd_path(rng: random.Random, d: Draft) -> None:
    """A missing file, a folder for a file, a file for a folder, an empty file, one without text in it."""
    (d.folder / "empty").mkdir(exist_ok=True)
    (d.folder / "empty.jsonl").write_text("")
    (d.folder / "bytes.jsonl").write_bytes(bytes(range(256)))
    (d.folder / "broken.py").write_text("def f(:")
    (d.folder / "names.py").write_text("f = 3\n")
    (d.folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (d.folder / "loop.jsonl").unlink(missing_ok=True)
    (d.folder / "loop.jsonl").symlink_to("loop.jsonl")
    key = rng.choice(["model.path", "data.train", "data.eval", "reward.custom", "output_dir", "resume"])
    name = rng.choice([
        "nowhere", "nowhere.jsonl", "empty", "empty.jsonl", "bytes.jsonl", "loop.jsonl", "broken.py:f", "names.py:f",
        "exits.py:f", "broken.py", "names.py:", ":f", "*.jsonl", "config.yaml", "a" * 300,
    ])  # fmt: skip
    d.put(rng, key, f"{d.folder}/{name}")
    d.illegal |= key == "reward.custom"


def odd_rows(rng: random.Random, d: Draft) -> None:
    rows = [{"prompt": "1>", "answer": "1"} for _ in range(3)]
    odd = rng.choice([
        {}, {"prompt": "1>"}, {"answer": "1"}, {"prompt": None, "answer": "1"}, {"prompt": "1>", "answer": None},
        {"prompt": "", "answer": "1"}, {"prompt": 3, "answer": "1"}, {"prompt": [], "answer": "1"},
        {"prompt": "1>", "answer": ["1"]}, {"prompt": "1>", "answer": {"a": 1}}, {"prompt": {"a": 1}, "answer": "1"},
        {"prompt": [{"role": "user"}], "answer": "1"}, {"prompt": "9" * 99, "answer": "1"}, [], 3, None, "text",
        {"prompt": "1>", "answer": "1", "prompt ": 2}, {"prompt": "日本", "answer": "1"},
        {"prompt": "\ud800", "answer": "1"},
    ])  # fmt: skip
    if rng.random() < 0.3:
        rows = [odd]
    else:
        rows.insert(rng.randrange(4), odd)
    kind = rng.choice(["jsonl", "jsonl", "json", "csv"])
    path = d.folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        columns = [*odd] if isinstance(odd, dict) else ["prompt"]
        lines = [",".join(map(str, row.values() if isinstance(row, dict) else [row])) for row in rows]
        path.write_bytes("\n".join([",".join(columns), *lines]).encode(errors="surrogatepass"))
    d.put(rng, rng.choice(["data.train", "data.train", "data.eval"]), str(path))
    d.spoilt.append(str(path))
    d.spoilt += ["data.max_prompt_tokens"] if odd == {"prompt": "9" * 99, "answer": "1"} else []


def odd_columns(rng: random.Random, d: Draft) -> None:
    for key in rng.sample(["data.prompt_key", "data.answer_key", "data.source_key"], rng.randint(1, 2)):
        d.put(rng, key, rng.choice(["question", "prompt", "answer", "prompt.text", ".", "", "a.b.c", "source", ".."]))


def odd_reward(rng: random.Random, d: Draft) -> None:
    spec = rng.choice([
        "exat", "", {}, [], {"exact": "much"}, {"exact": math.nan}, {"exat": 1}, {"exact": None}, {"custom": 1},
        "model", "length", {"model": 1, "exact": 1}, {"exact": True}, 3, None, "remote", {"length": 1}, {1: 1},
    ])  # fmt: skip
    d.put(rng, rng.choice(["reward.default", "reward.by_source.math"]), spec)
    if rng.random() < 0.4:
        d.put(rng, "reward.options", rng.choice([
            {"exact": {"a": 1}}, {"exat": {}}, {"exact": 3}, {"length": {"limit": "long"}}, {"length": None},
            {"model": {"path": "nowhere", "batch_size": 0}}, {"model": {}}, {"math": []}, {"custom": {"text": 1}},
        ]))  # fmt: skip


def odd_passed_on(rng: random.Random, d: Draft) -> None:
    """Options that Megatron-core, vLLM or the chat template are to judge."""
    section = rng.choice(["megatron", "megatron", "rollout.vllm", "data.template_kwargs"])
    names = {
        "megatron": sorted(bridge.megatron_fields()),
        "data.template_kwargs": ["enable_thinking", "tokenize", "messages", "tools"],
        "rollout.vllm": ["max_num_seqs", "dtype", "model", "enforce_eager", "max_model_len", "seed",
                         "max_num_seq", "tensor"],
    }[section]  # fmt: skip
    d.put(rng, f"{section}.{rng.choice(names)}", rng.choice(WRONG))
    if section == "data.template_kwargs":
        d.put(rng, "data.chat_template", rng.choice([True, False]))


def odd_model(rng: random.Random, d: Draft) -> None:
    """A model folder that was tampered with."""
    folder = d.folder / "model"
    shutil.copytree(d.tree["model"]["path"], folder, dirs_exist_ok=True)
    harm = rng.choice(["value", "value", "value", "drop", "text", "tokenizer", "template"])
    config = json.loads((folder / "config.json").read_text())
    if harm in ("value", "drop"):
        key = rng.choice(sorted(config))
        value = rng.choice([0, -1, None, "many", [], 7, 10**9])
        changed = {**config, key: value} if harm == "value" else {k: v for k, v in config.items() if k != key}
        (folder / "config.json").write_text(json.dumps(changed))
    elif harm == "text":
        (folder / "config.json").write_text(rng.choice(["", "{", "[]", "3", "null"]))
    elif harm == "tokenizer":
        for file in folder.glob("tokenizer*"):
            file.write_text(rng.choice(["", "{", "{}", "[]"])) if rng.random() < 0.7 else file.unlink()
    else:
        (folder / "chat_template.jinja").write_text(
            rng.choice(["{{ x.y.z }}", "{% for", "{{ raise_exception(1) }}", ""])
        )
        d.put(rng, "data.chat_template", True)
    d.put(rng, "model.path", str(folder))


MUTATIONS = [
    wrong_value, wrong_value, wrong_value, wrong_section, unknown_key, odd_file, odd_override, odd_layout, odd_batch,
    odd_choices, odd_path, odd_rows, odd_columns, odd_reward, odd_passed_on, odd_model,
]  # fmt: skip


def mutations(rng: random.Random) -> list[Callable]:
    return rng.sample(MUTATIONS, rng.choice([1, 1, 2, 3]))


def spoil(number: int, folder: Path, tiny: Path) -> Draft:
    """Case `number`: configs/tiny.yaml with one to three mutations."""
    rng = random.Random(number)
    tree = yaml.safe_load((REPO / "configs/tiny.yaml").read_text())
    tree["reward"]["custom"] = f"{REPO}/{tree['reward']['custom']}"
    tree["model"]["path"], tree["data"]["train"] = str(tiny / "model"), str(tiny / "train.jsonl")
    draft = Draft(folder, tree)
    for mutation in mutations(rng):
        mutation(rng, draft)
    return draft


def command_line(draft: Draft) -> list[str]:
    """Write the file; the arguments of train_grpo.py."""
    path = draft.folder / "config.yaml"
    text = draft.finish(yaml.safe_dump(draft.tree, sort_keys=False))
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return ["--config", str(path), "--dry-run", "--world-size", str(draft.world_size), *draft.overrides]


def verdict(draft: Draft, code: int, text: str) -> str | None:
    """What is wrong with the program's answer to a draft; None if nothing."""
    if "Traceback" in text:
        return "a traceback"
    if code not in (0, 2):
        return f"exit code {code}"
    if code == 0 and draft.illegal:
        return "an illegal configuration was accepted"
    if code == 2 and not any(name in text for name in draft.spoilt):
        return "the message names nothing that was spoilt"
    return None


class TookTooLong(BaseException):
    """No library's `except Exception` may catch it."""


@pytest.fixture(scope="module")
def vllm_imported():
    """What a first look at vLLM's options takes is no case's time."""
    engine_options()


@pytest.fixture
def time_limit(vllm_imported):
    def stop(*_):
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_the_quick_cases_have_every_mutation():
    assert {mutation for number in range(QUICK) for mutation in mutations(random.Random(number))} == {*MUTATIONS}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] if n >= QUICK else []) for n in range(CASES)]
)
def test_case(number, tiny, tmp_path, capfd, offline, time_limit):
    draft = spoil(number, tmp_path, tiny)
    arguments = command_line(draft)
    capfd.readouterr()
    try:
        code = train_grpo.main(arguments)
    except SystemExit as end:  # argparse
        code = end.code
    streams = capfd.readouterr()
    text = streams.err if code else streams.out
    wrong = verdict(draft, code, text)
    assert wrong is None, f"{wrong}: {draft.spoilt} {draft.overrides}\n{text}"


@pytest.mark.slow
def test_as_a_program(tiny, tmp_path):
    """A few cases as a user starts them."""
    for number in (3, 36, 121, 204):
        draft = spoil(number, tmp_path, tiny)
        done = subprocess.run(
            [sys.executable, "train_grpo.py", *command_line(draft)], cwd=REPO, capture_output=True, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=120,
        )  # fmt: skip
        assert verdict(draft, done.returncode, done.stdout + done.stderr) is None, (number, done.stdout + done.stderr)
