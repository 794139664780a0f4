"""Write a configuration of this trainer from one of verl, TRL, ROLL or NeMo-RL.

    python -m tools.translate THEIR.yaml [--world-size 8] > configs/mine.yaml
    python -m tools.translate --page        write the tables of docs/from-other-trainers.md

Their keys are those of support/base/from_other_trainers.yaml. What has no counterpart here, and what a person has to
choose, stands in comments below the configuration. Exit code 2, with the reason, for a file that is no configuration of
theirs, and for a result that a dry run would refuse. See docs/from-other-trainers.md.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from config import UserError
from support.base.from_other_trainers import Row, Table, read_defaults, read_tables
from support.base.processes import REPO
from support.base.read_config import Loader, check_placeholders, dotted_items, validate

PAGE = REPO / "docs/from-other-trainers.md"
TRAINERS = ("verl", "TRL", "ROLL", "NeMo-RL")
KNOWN_SHARE = 0.3  # of a file's keys that its trainer must have
Values = dict[str, Any]  # {dotted key of ours: value}


@dataclass
class Theirs:
    """A configuration of another trainer."""

    trainer: str
    tree: dict
    flat: dict[str, Any]  # {dotted key: value}
    defaults: dict[str, Any]  # of keys that it does not set
    world_size: int
    lost: list[str] = field(default_factory=list)  # lines on what has no counterpart

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key, which may be a section; its default there, else `default`, where it is not set."""
        node = self.tree
        for name in key.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if node is None:
            node = self.defaults.get(key)
        return default if node is None else node

    def lose(self, key: str, value: Any, note: str = "") -> None:
        """Note a key that has no counterpart."""
        line = f"{key}: {json.dumps(value, ensure_ascii=False, default=str)}"
        self.lost.append(f"{line}  ({note})" if note else line)


# ---------------------------------------------------------------- reading


def read_theirs(path: Path, world_size: int | None) -> Theirs:
    """Read a configuration and say whose it is. Raises UserError."""
    tree = read_tree(path)
    flat = dict(dotted_items(tree))
    for key, value in flat.items():
        set_value(tree, key, resolve(value, key, flat))
    flat = dict(dotted_items(tree))
    tables = read_tables()
    known = {trainer: sum(find_row(key, tables[trainer]) is not None for key in flat) for trainer in TRAINERS}
    trainer = max(TRAINERS, key=known.get)
    if known[trainer] < max(3, KNOWN_SHARE * len(flat)):
        raise UserError(
            f"{path}: no configuration of {', '.join(TRAINERS)}: of its {len(flat)} keys {trainer} has most, "
            f"{known[trainer]}"
        )
    theirs = Theirs(trainer, tree, flat, read_defaults()[trainer], world_size or 1)
    theirs.world_size = world_size or count_gpus(theirs)
    return theirs


def read_tree(path: Path, depth: int = 0) -> dict:
    """The mapping of a YAML file, merged over the file that NeMo-RL's `defaults` names. Raises UserError."""
    try:
        tree = yaml.load(path.read_bytes(), Loader)
    except Exception as error:  # PyYAML fails in any way where a value does not have the form of its tag
        raise UserError(f"{path}: cannot read it: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise UserError(f"{path}: no configuration: legal are keys with values")
    base = tree.get("defaults")
    if isinstance(base, str) and (path.parent / base).is_file() and depth < 10:
        del tree["defaults"]
        return merge(read_tree(path.parent / base, depth + 1), tree)
    return tree


def merge(below: dict, above: dict) -> dict:
    """The tree `below`, changed by `above`."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = merge(below[key], value) if both else value
    return merged


def resolve(value: Any, key: str, flat: dict[str, Any], depth: int = 0) -> Any:
    """The value with OmegaConf's references to other keys replaced.

    These are ${a.b}, ${.b}, ${oc.select:a.b,default} and ${mul:a,b}; others, such as ${oc.env:NAME}, stay.
    """
    if not isinstance(value, str) or depth == 20:
        return value
    for found in re.finditer(r"\$\{([^${}]*)\}", value):
        inside = found[1].strip()
        function, _, arguments = inside.rpartition(":")
        names = [name.strip() for name in arguments.split(",")]
        name = names[0]
        if name.startswith("."):
            name = key.rpartition(".")[0] + name
        if function == "mul" and all(re.fullmatch(r"\d+", each) for each in names):
            replaced = int(names[0]) * int(names[1])
        elif function in ("", "oc.select") and name in flat:
            replaced = resolve(flat[name], name, flat, depth + 1)
        elif function == "oc.select" and len(names) > 1:
            replaced = yaml.load(names[1], Loader)
        else:
            continue
        if found[0] == value:
            return replaced
        return resolve(value.replace(found[0], str(replaced)), key, flat, depth + 1)
    return value


def set_value(tree: dict, key: str, value: Any) -> None:
    """Set a dotted key of a tree in place."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def count_gpus(theirs: Theirs) -> int:
    """The number of GPUs that a configuration names; 1 where it names none."""
    counts = {
        "verl": ("trainer.n_gpus_per_node", "trainer.nnodes"),
        "TRL": ("num_processes", ""),
        "ROLL": ("num_gpus_per_node", ""),
        "NeMo-RL": ("cluster.gpus_per_node", "cluster.num_nodes"),
    }
    each, machines = counts[theirs.trainer]
    ranks = mapped_ranks(theirs) if theirs.trainer == "ROLL" else None
    return ranks or int(theirs.get(each, 1)) * int(theirs.get(machines, 1) if machines else 1)


def mapped_ranks(theirs: Theirs) -> int | None:
    """The length of ROLL's actor_train.device_mapping, such as list(range(0,16)); None without one."""
    found = re.fullmatch(r"list\(range\((\d+),\s*(\d+)\)\)", str(theirs.get("actor_train.device_mapping")))
    return int(found[2]) - int(found[1]) if found else None


def find_row(key: str, table: Table) -> str | None:
    """The key of a table that is a dotted key, or the innermost section of it; None where there is none."""
    names = key.split(".")
    for end in range(len(names), 0, -1):
        if ".".join(names[:end]) in table:
            return ".".join(names[:end])
    return None


# ---------------------------------------------------------------- translating


def translate(theirs: Theirs) -> Values:
    """Our values of a configuration. What has none is noted in theirs.lost."""
    table = read_tables()[theirs.trainer]
    given: dict[str, list[str]] = {}  # key of the table → keys of the file that it answers
    for key in dict.fromkeys([*theirs.flat, *theirs.defaults]):
        given.setdefault(find_row(key, table) or key, []).append(key)
    ours: Values = dict.fromkeys(NEEDED, "???") | CONSTANTS[theirs.trainer]
    later = {}
    order = {key: number for number, key in enumerate(table)}
    for key, leaves in sorted(given.items(), key=lambda pair: order.get(pair[0], len(order))):
        row = table.get(key)
        if row is not None and isinstance(row.by, str) and row.by != "lost":
            later[key] = row  # functions see the values that need none
        else:
            copy_value(theirs, key, leaves, row, ours)
    for key, row in later.items():
        value = theirs.get(key)
        if value is None or value == "":
            continue
        found = FUNCTIONS[row.by](theirs, key, value, row.ours, ours)
        if found is None:
            theirs.lose(key, value, row.note)
        else:
            ours |= found
    complete(theirs, ours)
    return ours


def complete(theirs: Theirs, ours: Values) -> None:
    """Take out references that nothing resolves, and set what the values ask for here. Changes `ours`."""
    for key, value in list(ours.items()):
        if "${" in str(value):
            theirs.lose(f"{key} of ours", ours.pop(key), "write the value itself")
            if key in NEEDED:
                ours[key] = "???"
    if ours.get("rollout.top_p", 1) != 1 or ours.get("rollout.top_k", -1) != -1:
        ours["rollout.max_logp_gap"] = "inf"  # the trainer's log-probs are of the whole distribution
    longest = ours.get("data.max_prompt_tokens", 1024) + ours.get("rollout.max_new_tokens", 1024)
    for key, cap in (("train.max_tokens_per_micro_batch", 16384), ("train.logprob_max_tokens_per_micro_batch", 32768)):
        if ours.get(key, cap) < longest + MARGIN:
            ours[key] = longest + MARGIN
    theirs.lost += NOTES[theirs.trainer]


def copy_value(theirs: Theirs, key: str, leaves: list[str], row: Row | None, ours: Values) -> None:
    """Set our key of a row whose value is the same or has a name, or note what is lost."""
    value = theirs.get(key)
    if row is None or not row.ours or row.by == "lost":
        for leaf in leaves:
            if theirs.flat.get(leaf) not in (None, {}, []):
                theirs.lose(leaf, theirs.flat[leaf], row.note if row else "no key here")
    elif value is None:
        return
    elif isinstance(row.by, dict) and (isinstance(value, (dict, list)) or value not in row.by):
        theirs.lose(key, value, row.note)
    else:
        ours[row.ours] = row.by[value] if isinstance(row.by, dict) else value


# What a file of theirs does not say: the columns of their data, and their rewards.
CONSTANTS = {
    "verl": {"data.answer_key": "reward_model.ground_truth", "reward.default": "math"},
    "TRL": {"data.answer_key": "solution", "reward.default": "math"},
    "ROLL": {"data.answer_key": "ground_truth", "data.source_key": "tag", "reward.default": "math"},
    "NeMo-RL": {"data.answer_key": "expected_answer", "data.prompt_key": "problem", "reward.default": "math"},
}
NOTES = {
    "verl": ["their reward is chosen by data_source: math for every row here; reward.by_source, docs/rewards.md"],
    "TRL": ["the columns of the data: data.prompt_key, data.answer_key; docs/data.md"],
    "ROLL": ["top_p below 1 and top_k bend the ratio: use 1 and -1, and leave out rollout.max_logp_gap"],
    "NeMo-RL": ["the columns of the data: data.prompt_key, data.answer_key; docs/data.md"],
}
NEEDED = ("model.path", "data.train")
OF_A_MACHINE = ("log.tensorboard", "log.wandb", "resume", "reward.custom", "data.custom")  # packages, files, folders
MARGIN = 128  # tokens by which a row of the longest sample may be rounded up
RECOMPUTE = {
    "megatron.recompute_granularity": "full",
    "megatron.recompute_method": "uniform",
    "megatron.recompute_num_layers": 1,
}
# ---------------------------------------------------------------- functions of several trainers

ENDLESS = 10**6  # steps that are no bound beside the epochs


def clips(theirs, key, value, ours, values):
    return {name: value for name in ("algo.clip_low", "algo.clip_high") if name not in values}


def betas(theirs, key, value, ours, values):
    return {"train.adam_beta1": value[0], "train.adam_beta2": value[1]}


def underscores(theirs, key, value, ours, values):
    name = str(value).replace("-", "_")
    legal = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
    return {ours: name} if name in legal else None


def tokens(theirs, key, value, ours, values):
    """So many samples of the longest kind."""
    longest = values.get("data.max_prompt_tokens", 1024) + values.get("rollout.max_new_tokens", 1024)
    return {ours: max(int(value) * longest, values.get(ours, 0))}


def times_cp(theirs, key, value, ours, values):
    return {ours: max(int(value) * values.get("parallel.cp", 1), values.get(ours, 0))}


def warmup(theirs, key, value, ours, values):
    return {ours: max(int(value), values.get(ours, 0))}


def warmup_share(theirs, key, value, ours, values):
    if value == 0:
        return {}
    return {ours: round(value * values["train.steps"])} if "train.steps" in values else None


def schedule(theirs, key, value, ours, values):
    """A course of the learning rate; of TRL it ends at 0."""
    end = theirs.get("actor_rollout_ref.actor.optim.min_lr", theirs.get("policy.megatron_cfg.optimizer.min_lr", 0.0))
    if value in ("linear", "cosine"):
        return {ours: {"shape": value, "to": float(end)}}
    return {} if str(value).startswith("constant") else None


def epochs(theirs, key, value, ours, values):
    """Passes over the data, unless a number of steps is given, which then holds there too."""
    steps = ("trainer.total_training_steps", "max_steps", "grpo.max_num_steps")
    given = [theirs.get(name) for name in steps]
    return {} if any(isinstance(count, int) and 0 < count < ENDLESS for count in given) else {ours: value}


def top_k(theirs, key, value, ours, values):
    """All is 0 or null in other trainers."""
    return {ours: value if value > 0 else -1}


def off_below_zero(theirs, key, value, ours, values):
    return {ours: max(int(value), 0)}


def in_updates(theirs, key, value, ours, values):
    """Steps, of a number that counts updates there."""
    updates = values.get("train.updates_per_step", 1) * values.get("train.epochs_per_step", 1)
    return {ours: max(1, round(value / updates))} if value > 0 else {}


def evaluation_in_updates(theirs, key, value, ours, values):
    return in_updates(theirs, key, value, ours, values) if "data.eval" in values else None


def evaluation(theirs, key, value, ours, values):
    """Steps between evaluations, where there are data for them."""
    if value <= 0:
        return {}
    return {ours: int(value)} if "data.eval" in values else None


def loggers(theirs, key, value, ours, values):
    names = value if isinstance(value, list) else [value]
    if set(names) - {"console", "none", "stdout", "tensorboard", "wandb"}:
        theirs.lose(key, value, "log.tensorboard and log.wandb alone; metrics.jsonl always")
    return {f"log.{name}": True for name in names if name in ("tensorboard", "wandb")}


def recompute(theirs, key, value, ours, values):
    return RECOMPUTE if value is True else {}


def no_recompute(theirs, key, value, ours, values):
    return {} if value is True else RECOMPUTE


def granularity(theirs, key, value, ours, values):
    return RECOMPUTE if value == "full" else {ours: value}


def fields(theirs, key, value, ours, values):
    """Each field of a section under its own name; what is refused here is taken out again by drop_refused."""
    table = read_tables()[theirs.trainer]
    further = {name: each for name, each in value.items() if f"{key}.{name}" not in table}
    return {f"{ours}.{name}": each for name, each in further.items() if each is not None}


LORA = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "linear_qkv": "qkv", "o_proj": "proj", "linear_proj": "proj",
    "gate_proj": "fc1", "up_proj": "fc1", "linear_fc1": "fc1", "down_proj": "fc2", "linear_fc2": "fc2",
}  # fmt: skip


def lora_targets(theirs, key, value, ours, values):
    names = re.split(r"[,\s]+", value) if isinstance(value, str) else list(value)
    if "all-linear" in names or "all" in names:
        return {}
    if not set(names) <= LORA.keys():
        return None
    return {ours: list(dict.fromkeys(LORA[name] for name in names))}


def offload(theirs, key, value, ours, values):
    if not value:
        return {}
    kind = "optimizer" if key.endswith("optimizer_offload") or values.get(ours) == "optimizer" else "grads"
    return {ours: kind}


def tis_bounds(kind: str, level: str, low: float | None, high: float | None) -> Values:
    """Our correction; the bounds of None are those of CORRECTION_BOUNDS."""
    found = {"algo.correction": kind}
    if level == "sequence":
        found["algo.correction_level"] = level
    if low is not None:
        found["algo.correction_low"] = low
    if high is not None:
        found["algo.correction_high"] = high
    return found


# ---------------------------------------------------------------- verl


def updates_of_prompts(theirs, key, value, ours, values):
    prompts = theirs.get("data.train_batch_size")
    if value > prompts or prompts % value:
        return None if key in theirs.flat else {}
    return {ours: prompts // value}


def verl_kl(theirs, key, value, ours, values):
    actor = "actor_rollout_ref.actor"
    if theirs.get(f"{actor}.use_kl_loss") is True:
        return {"algo.kl_in": "loss", "algo.kl_coef": theirs.get(f"{actor}.kl_loss_coef", 0.001)}
    if theirs.get("algorithm.use_kl_in_reward") is True:
        return {"algo.kl_in": "reward", "algo.kl_coef": theirs.get("algorithm.kl_ctrl.kl_coef", 0.001)}
    return {"algo.kl_coef": 0.0}


def verl_advantage(theirs, key, value, ours, values):
    kind = theirs.get("algorithm.adv_estimator", "gae")
    grpo = "grpo" if theirs.get("algorithm.norm_adv_by_std_in_grpo", True) else "dr_grpo"
    names = {"grpo": grpo, "grpo_vectorized": grpo, "rloo": "rloo", "rloo_vectorized": "rloo", "gdpo": "gdpo"}
    names["reinforce_plus_plus_baseline"] = "reinforce_pp"
    return {ours: names[kind]} if kind in names else None


def verl_rounds(theirs, key, value, ours, values):
    if not theirs.get("algorithm.filter_groups.enable"):
        return {}
    most = theirs.get("algorithm.filter_groups.max_num_gen_batches", 0)
    return {ours: most if most > 0 else 10}


def verl_correction(theirs, key, value, ours, values):
    level = theirs.get("algorithm.rollout_correction.rollout_is")
    if level not in ("token", "sequence"):
        return {}
    if theirs.get("algorithm.rollout_correction.bypass_mode"):  # vLLM's log-probs are then the old ones
        return None
    return tis_bounds("tis", level, None, theirs.get("algorithm.rollout_correction.rollout_is_threshold", 2.0))


def verl_reward(theirs, key, value, ours, values):
    path = theirs.get("custom_reward_function.path")
    if not path:
        return {}
    name = theirs.get("custom_reward_function.name", "compute_score")
    return {"reward.default": "custom", "reward.custom": f"{path}:{name}"}


def overlong(theirs, key, value, ours, values):
    enabled = theirs.get(key.rpartition(".")[0] + ".enable", True)
    return {ours: int(value)} if enabled else {}


def greedy(theirs, key, value, ours, values):
    """do_sample=false is greedy; its temperature does not count then."""
    return {} if value else {ours: 0.0, "eval.samples": 1}


# ---------------------------------------------------------------- TRL


def trl_updates(theirs: Theirs) -> tuple[int, int]:
    """(steps_per_generation, gradient_accumulation_steps)."""
    accumulation = theirs.get("gradient_accumulation_steps", 1)
    return theirs.get("steps_per_generation", accumulation), accumulation


def trl_batch(theirs, key, value, ours, values):
    """Prompts of a step, and updates on them."""
    steps, accumulation = trl_updates(theirs)
    rows = theirs.get("per_device_train_batch_size") * theirs.world_size
    answers = theirs.get("generation_batch_size", rows * steps)
    size = theirs.get("num_generations")
    updates, rest = divmod(answers, rows * accumulation)
    if answers % size or rest or updates == 0 or (answers // size) % updates:
        return None
    return {"rollout.prompts_per_step": answers // size, "train.updates_per_step": updates}


def trl_clips(theirs, key, value, ours, values):
    low = theirs.get("epsilon", 0.2)
    high = theirs.get("epsilon_high", low)
    if theirs.get("loss_type") == "cispo":  # the bound of the weight itself, without a lower one
        return {"algo.clip_low": 1.0, "algo.clip_high": high - 1} if high >= 1 else None
    return {"algo.clip_low": low, "algo.clip_high": high}


def trl_loss(theirs, key, value, ours, values):
    kind = theirs.get("loss_type")
    norms = {"dapo": "token_mean", "bnpo": "token_mean", "cispo": "token_mean", "grpo": "seq_mean_token_mean"}
    norms["dr_grpo"] = "seq_mean_token_sum_norm"
    if kind not in norms:
        return None
    found = {"algo.loss_norm": norms[kind]}
    if kind == "cispo":
        return found | {"algo.loss": "cispo"}
    sequence = theirs.get("importance_sampling_level") == "sequence"
    return found | {"algo.loss": "gspo" if sequence else "ppo_clip"}


def trl_advantage(theirs, key, value, ours, values):
    if theirs.get("multi_objective_aggregation") == "normalize_then_sum":
        return {ours: "gdpo"}
    names = {"group": "grpo", "True": "grpo", "batch": "grpo_batch", "none": "dr_grpo", "False": "dr_grpo"}
    return {ours: names[str(theirs.get("scale_rewards", "group"))]}


TRL_REWARDS = {"accuracy_reward": "math", "think_format_reward": "format"}


def trl_rewards(theirs, key, value, ours, values):
    names = theirs.get("reward_funcs", [])
    names = [name.rpartition(".")[2] for name in ([names] if isinstance(names, str) else names)]
    weights = theirs.get("reward_weights", [1.0] * len(names))
    if not names or not set(names) <= TRL_REWARDS.keys() or len(weights) != len(names):
        return None
    return {"reward.default": {TRL_REWARDS[name]: w for name, w in zip(names, weights, strict=True)}}


def trl_correction(theirs, key, value, ours, values):
    if not theirs.get("vllm_importance_sampling_correction"):
        return {"algo.correction": "none"}
    level, kind = theirs.get("vllm_importance_sampling_mode", "sequence_mask").split("_")
    low = theirs.get("vllm_importance_sampling_clip_min", 0.0)
    high = theirs.get("vllm_importance_sampling_clip_max", theirs.get("vllm_importance_sampling_cap", 3.0))
    if "vllm_importance_sampling_clip_max" in theirs.flat and theirs.get("vllm_importance_sampling_clip_max") is None:
        high = "inf"
    return tis_bounds({"mask": "icepop", "truncate": "tis"}[kind], level, low, high)


# ---------------------------------------------------------------- ROLL


def roll_advantage(theirs, key, value, ours, values):
    """By the normalizations of the rewards; adv_estimator=grpo sets both to the group."""
    mean, std = theirs.get("norm_mean_type"), theirs.get("norm_std_type")
    if theirs.get("adv_estimator") == "grpo":
        mean, std = "group", "group"
    if theirs.get("whiten_advantages") and mean == "group" and std is None:
        return {ours: "reinforce_pp"}
    names = {("group", "group"): "grpo", ("group", None): "dr_grpo", ("group", "batch"): "grpo_batch"}
    if (mean, std) not in names or theirs.get("whiten_advantages"):
        return None
    return {ours: names[mean, std]}


def roll_dual_clip(theirs, key, value, ours, values):
    return {ours: 1 + 2 * theirs.get("pg_clip", 0.2)} if value else {}


def roll_kl(theirs, key, value, ours, values):
    if theirs.get("use_kl_loss"):
        return {"algo.kl_in": "loss", "algo.kl_coef": theirs.get("kl_loss_coef", 0.0)}
    if theirs.get("add_token_level_kl"):
        return {"algo.kl_in": "reward", "algo.kl_coef": theirs.get("init_kl_coef", 0.2)}
    return {}


def roll_updates(theirs, key, value, ours, values):
    parallel = [values.get(f"parallel.{name}", 1) for name in ("tp", "pp", "cp")]
    replicas = max(theirs.world_size // math.prod(parallel), 1)  # a layout that does not divide is refused later
    each = theirs.get("actor_train.training_args.per_device_train_batch_size", 1) * value * replicas
    prompts = values.get("rollout.prompts_per_step", 64)
    updates, rest = divmod(prompts * values.get("rollout.group_size", 8), each)
    if rest or updates == 0 or prompts % updates:
        return None
    return {"train.updates_per_step": updates}


ROLL_REWARDS = {"MathRuleRewardWorker": "math", "CodeSandboxRewardWorker": "code"}


def roll_rewards(theirs, key, value, ours, values):
    """The reward of each tag; workers that have no reward here are lost."""
    found = {}
    for name, worker in value.items():
        kind = ROLL_REWARDS.get(str(worker.get("worker_cls")).rpartition(".")[2])
        if kind is None:
            theirs.lose(f"{key}.{name}", worker.get("worker_cls"), "write it as a function: reward.functions")
        else:
            found |= dict.fromkeys(worker.get("tag_included", [name]), kind)
    return {ours: found} if found else {}


# ---------------------------------------------------------------- NeMo-RL


def nemo_lengths(theirs, key, value, ours, values):
    """The longest prompt and answer together there; the half each where the file does not divide it."""
    total = theirs.get("policy.max_total_sequence_length")
    answer = theirs.get("policy.generation.max_new_tokens", total)
    prompt = theirs.get("data.max_input_seq_length", total)
    if prompt + answer > total:
        prompt = total - answer if answer < total else total // 2
        answer = total - prompt
    return {"data.max_prompt_tokens": prompt, "rollout.max_new_tokens": answer}


def nemo_updates(theirs, key, value, ours, values):
    prompts = theirs.get("grpo.num_prompts_per_step")
    updates, rest = divmod(prompts * theirs.get("grpo.num_generations_per_prompt"), value)
    return None if rest or updates == 0 or prompts % updates else {ours: updates}


def nemo_value(theirs: Theirs, key: str, value: Any, ours: str, values: Values) -> Values | None:
    """A value of megatron_cfg or dtensor_cfg, of which only the enabled one is asked for."""
    if key.endswith("lr_warmup_iters"):
        return in_updates(theirs, key, value, ours, values)
    if key.endswith("activation_checkpointing"):
        return RECOMPUTE if value else {}
    if key.endswith("betas"):
        return {"train.adam_beta1": value[0], "train.adam_beta2": value[1]}
    if key.endswith("lr_decay_style"):
        return schedule(theirs, key, value, ours, values)
    if ours.startswith("lora."):
        enabled = theirs.get(key.rpartition(".")[0] + ".enabled")
        return {ours: value} if enabled else {}
    return {ours: value}


def nemo_megatron(theirs, key, value, ours, values):
    return nemo_value(theirs, key, value, ours, values) if theirs.get("policy.megatron_cfg.enabled") else {}


def nemo_dtensor(theirs, key, value, ours, values):
    return {} if theirs.get("policy.megatron_cfg.enabled") else nemo_value(theirs, key, value, ours, values)


def nemo_scheduler(theirs, key, value, ours, values):
    """torch's schedulers: a LinearLR of total_iters, then constant, is a warm-up."""
    if theirs.get("policy.megatron_cfg.enabled"):
        return {}
    entries = [entry for entry in value if isinstance(entry, dict) and "name" in entry]
    kinds = [entry["name"].rpartition(".")[2] for entry in entries]
    if kinds and set(kinds) <= {"LinearLR", "ConstantLR"} and kinds[0] == "LinearLR":
        return in_updates(theirs, key, entries[0]["kwargs"]["total_iters"], ours, values)
    return None


def nemo_steps(theirs, key, value, ours, values):
    return {ours: int(value)} if value < ENDLESS else {}


def nemo_rounds(theirs, key, value, ours, values):
    if not theirs.get("grpo.use_dynamic_sampling"):
        return {}
    return {ours: theirs.get("grpo.dynamic_sampling_max_gen_batches", 10)}


def nemo_advantage(theirs, key, value, ours, values):
    kind = theirs.get("grpo.adv_estimator.name", "grpo")
    if kind == "gdpo":
        return {ours: "gdpo"}
    if kind == "reinforce_plus_plus":
        return {ours: "reinforce_pp"} if theirs.get("grpo.adv_estimator.minus_baseline", True) else None
    names = {(True, True): "grpo_loo", (False, True): "rloo", (True, False): "grpo", (False, False): "dr_grpo"}
    scaled = bool(theirs.get("grpo.normalize_rewards", True))
    return {ours: names[scaled, bool(theirs.get("grpo.use_leave_one_out_baseline", True))]}


def nemo_overlong(theirs, key, value, ours, values):
    return {ours: value} if theirs.get("grpo.reward_shaping.enabled") else {}


def nemo_kl(theirs, key, value, ours, values):
    return {ours: value}


def nemo_loss(theirs, key, value, ours, values):
    for name, loss in (
        ("use_cispo", "cispo"),
        ("disable_ppo_ratio", "reinforce"),
        ("sequence_level_importance_ratios", "gspo"),
    ):
        if theirs.get(f"loss_fn.{name}"):
            return {ours: loss}
    return {}


def nemo_correction(theirs, key, value, ours, values):
    if not theirs.get("loss_fn.use_importance_sampling_correction"):
        return {}
    kind = theirs.get("loss_fn.truncated_importance_sampling_type")
    low = theirs.get("loss_fn.truncated_importance_sampling_ratio_min")
    high = theirs.get("loss_fn.truncated_importance_sampling_ratio", "inf")
    level = "sequence" if theirs.get("loss_fn.sequence_level_importance_ratios") else "token"
    return tis_bounds({"seq-mask-tis": "seq_mask", None: "tis"}.get(kind, kind), level, low, high)


def nemo_checkpoints(theirs, key, value, ours, values):
    return {ours: theirs.get("checkpointing.save_period", 10) if theirs.get("checkpointing.enabled", True) else 0}


def nemo_env(theirs, key, value, ours, values):
    return {ours: "math"}


# ---------------------------------------------------------------- the functions by name

Function = Callable[[Theirs, str, Any, str, Values], Values | None]
# {name in the tables: function of (theirs, their key, its value, our key, our values so far)}, None of it: lost
FUNCTIONS: dict[str, Function] = {
    body.__name__: body
    for body in (
        clips, betas, underscores, tokens, times_cp, warmup, warmup_share, schedule, epochs, top_k, off_below_zero,
        in_updates, evaluation_in_updates, evaluation, loggers, recompute, no_recompute, granularity, fields,
        lora_targets, offload, updates_of_prompts, verl_kl, verl_advantage, verl_rounds, verl_correction,
        verl_reward, overlong, greedy, trl_batch, trl_clips, trl_loss, trl_advantage, trl_rewards, trl_correction,
        roll_advantage, roll_dual_clip, roll_kl, roll_updates, roll_rewards, nemo_lengths, nemo_updates,
        nemo_megatron, nemo_dtensor, nemo_scheduler, nemo_steps, nemo_rounds, nemo_advantage, nemo_overlong, nemo_kl,
        nemo_loss, nemo_correction, nemo_checkpoints, nemo_env,
    )
}  # fmt: skip


# ---------------------------------------------------------------- writing


def drop_refused(theirs: Theirs, ours: Values) -> dict:
    """The tree of our values, without those that a check refuses by their name; they are noted in theirs.lost.

    Raises UserError for a refusal that is of no single key, such as a layout that does not divide the GPUs.
    """
    while True:
        tree = {}
        for key, value in ours.items():
            set_value(tree, key, value)
        try:
            check(ours | dict.fromkeys(NEEDED, "any"), theirs.world_size)
            return tree
        except UserError as error:
            found = re.search(r"\b(?:megatron|rollout\.vllm)\.\w+", str(error))
            start = re.match(r"[\w.]+(?==)", str(error))
            key = found[0] if found else start and start[0]
            if key not in ours or not (found or "must" in str(error)):
                raise
            theirs.lose(f"{key} of ours", ours.pop(key), str(error).split(". Fields that may be set")[0])


def check(ours: Values, world_size: int) -> None:
    """What a dry run checks of a configuration alone, on any machine. Raises UserError."""
    import train_grpo  # only here: the tables need neither torch nor Megatron-core
    from support.check import checks
    from support.run.inputs import with_steps

    tree = {}
    for key, value in ours.items():
        if key not in OF_A_MACHINE:
            set_value(tree, key, value)
    if ours.get("reward.default") == "custom":
        set_value(tree, "reward.default", "math")
    check_placeholders(tree)
    cfg = validate(tree, "the result")
    checks.check_config(cfg, world_size)
    train_grpo.rehearse(with_steps(cfg, cfg.rollout.prompts_per_step))


def write(theirs: Theirs, tree: dict, source: str) -> str:
    """The text of our configuration."""
    head = f"# Translated from {source}, a configuration of {theirs.trainer}.\n"
    head += f"#   torchrun --nproc_per_node={theirs.world_size} train_grpo.py --config THIS [--dry-run]\n"
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    if not theirs.lost:
        return head + body
    lost = "".join(f"#   {line}\n" for line in theirs.lost)
    return f"{head}{body}\n# Without a counterpart here, or for you to choose:\n{lost}"


def page_tables() -> str:
    """The tables of docs/from-other-trainers.md."""
    parts = []
    for trainer, table in read_tables().items():
        rows = [f"\n## {trainer}\n\n| {trainer} | here | |\n|---|---|---|"]
        for theirs, row in table.items():
            ours = f"`{row.ours}`" if row.ours else "–"
            note = f"{row.note} " if row.note else ""
            rows.append(f"| `{theirs}` | {ours} | {note}|")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


def write_page() -> None:
    """Write the tables below the text of the page."""
    text = PAGE.read_text().partition("\n## verl\n")[0]
    PAGE.write_text(text + page_tables())


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path)
    parser.add_argument("--world-size", type=int, help="number of GPUs; default: what the file names")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args(argv)
    if args.page:
        write_page()
        return 0
    if args.path is None:
        parser.error("name a configuration of verl, TRL, ROLL or NeMo-RL")
    try:
        theirs = read_theirs(args.path, args.world_size)
        print(write(theirs, drop_refused(theirs, translate(theirs)), args.path.name), end="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
