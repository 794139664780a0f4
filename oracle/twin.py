"""Twins of a run in half precision: two steps of its configuration, data and code on a small random model, in fp32.

Rounding in bf16 hides what is wrong by less than a tenth. In fp32 it hides almost nothing, and a small model of the
same family has the same code. A run in fp16 also has a twin in fp16, whose gradients are scaled as its own.
"""

import atexit
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
import yaml

from grpo.parts.base.hf_folder import local_folder
from grpo.parts.base.processes import host_free_bytes
from oracle.repeat import repeat
from oracle.report import Report
from oracle.run import Recorded, read_run

DTYPES = {"bf16": ["fp32"], "fp16": ["fp32", "fp16"], "fp32": []}  # of a run → of its twins
SECONDS = 600  # that a twin may take
MOST_RANKS = 8
A_RANK = 4 * 2**30  # bytes that a rank of a twin may need, with its vLLM
STOP = "m"  # in every tenth token of large vocabularies, so that some answers are finished and others truncated
UNEVEN = (  # fields of Megatron-core that say which stage has which of the run's layers
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
FAULTS = ("step ", "vLLM did not take up the weight push", "copies of the trainer's weights differ")  # guards begin so
OF_FP16 = ("hysteresis", "initial_loss_scale", "loss_scale", "loss_scale_window", "min_loss_scale")
# The run's own rewards are graded anew as they are. To a random model they would give 0, and no gradient.
REWARD = """
import zlib

def reward(text, answer, row):
    return {"hash": zlib.crc32(text.encode()) % 100 / 100, "length": len(text) % 7 / 7}
"""


@dataclass
class Twin:
    """What became of a twin: its report, or why there is none."""

    name: str
    report: Report | None = None
    fault: str = ""  # that ended its run in a step: what its guard found
    missing: str = ""  # why it cannot be judged here

    def verdict(self, mine=()):
        """(exit code, a line), as of a report."""
        if self.missing:
            return 3, f"not judged: {self.missing}"
        if self.fault:
            return 1, f"PARTS: its run ended in {self.fault}"
        return self.report.verdict(mine)


def begin_twins(run: Recorded, start: Callable | None) -> Iterator[Callable[[], Twin]]:
    """Begin each twin of a run, when it is asked for, by `start(config.yaml, ranks, file for what is printed)`, which
    returns a function that waits for the exit code. Yields functions that wait for a twin and repeat it.
    """
    for dtype in DTYPES[run.cfg.model.dtype]:
        yield begin_twin(run, dtype, start)


def begin_twin(run, dtype, start):
    """Begin the twin of a run in this dtype; a function that returns it."""
    name = f"twin in {dtype}"
    if start is None:
        return partial(Twin, name, missing="by --no-twin")
    ranks = ranks_of(run.cfg)
    if ranks > MOST_RANKS:
        return partial(Twin, name, missing=f"its layout needs {ranks} ranks")

    folder = tempfile.TemporaryDirectory(prefix="twin_")
    path = Path(folder.name)
    try:
        write_twin(run, dtype, path)
    except Exception as error:  # of transformers, for a model that is missing or strange
        return partial(Twin, name, missing=" ".join(str(error).split())[:160])
    return partial(end_twin, name, folder, start(path / "config.yaml", ranks, path / "printed.txt"))


def end_twin(name, folder, wait):
    """The Twin that trains in a temporary folder, once it has ended."""
    with folder as path:
        if wait() == 0:
            return Twin(name, repeat(read_run(Path(path, "out"))))
        said = last_error(Path(path, "printed.txt").read_text(errors="replace"))
    return Twin(name, fault=said) if said.startswith(FAULTS) else Twin(name, missing=said)


def has_room(run):
    """Whether all twins may train beside the repetition: on CPUs, in half of the memory that is free."""
    needed = A_RANK * ranks_of(run.cfg) * len(DTYPES[run.cfg.model.dtype])
    return not torch.cuda.is_available() and needed < host_free_bytes() / 2


def torchrun(config, ranks, printed):
    """Train with the checkout's train_grpo.py; returns a function that waits for the exit code."""
    script = Path(__file__).resolve().parent.parent / "train_grpo.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    command += [f"--nproc_per_node={ranks}", str(script), "--config", str(config)]
    env = {"OMP_NUM_THREADS": "1"} | os.environ
    with printed.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    atexit.register(stop, process)
    return partial(exit_code, process, printed)


def exit_code(process, printed):
    """Wait for the exit code of a torchrun; 1 after too long."""
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        with printed.open("a") as out:
            out.write(f"error: it took more than {SECONDS} s\n")
        stop(process)
        return 1


def stop(process):
    """Kill a torchrun and its ranks, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def last_error(text):
    """What ended a run, in a line: the script's own words, an exception, or what was printed last."""
    own, exception = r"^error: (?!.*another rank is gone)(.*)", r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception)\b.*)"
    for pattern in (own, exception, "(.+)"):
        if found := re.findall(pattern, text, re.MULTILINE):
            return found[-1][:200]
    return "it printed nothing"


# ---------------------------------------------------------------- the configuration


def ranks_of(cfg):
    """The least ranks that the layout allows, twice as many where the machine has them: then there are replicas."""
    p = cfg.parallel
    least = math.lcm(p.tp * p.pp * p.cp, p.etp * p.ep * p.pp, cfg.rollout.tp)
    places = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    return 2 * least if 2 * least <= places else least


def write_twin(run, dtype, folder):
    """Write the model, the reward and config.yaml of a twin into a folder, in which it writes to out/."""
    cfg = run.cfg
    tree = cfg.model_dump()
    tree |= {"output_dir": str(folder / "out"), "resume": "none", "log": {}, "profile": {}}
    left_out = (*UNEVEN, *(() if dtype == "fp16" else OF_FP16))
    tree["megatron"] = {name: value for name, value in cfg.megatron.items() if name not in left_out}

    write_model(local_folder(cfg.model.path), cfg, folder / "model", seed=0)
    fp32_head = cfg.model.fp32_head and dtype != "fp32"
    tree["model"] |= {"path": str(folder / "model"), "dtype": dtype, "fp32_head": fp32_head}
    if cfg.algo.teacher not in (None, "self"):
        write_model(local_folder(cfg.algo.teacher), cfg, folder / "teacher", seed=1)
        tree["algo"]["teacher"] = str(folder / "teacher")

    # Few groups and short answers, some of which end.
    prompts = sorted(len(row["prompt_ids"]) for row in run.rollouts(run.steps[0]))
    longest = cfg.data.max_prompt_tokens if cfg.data.hint_key else prompts[len(prompts) // 2]
    answer = min(cfg.rollout.max_new_tokens, 64 if cfg.rollout.turns else 16)
    updates = cfg.train.updates_per_step
    tree["data"] |= {"eval": None, "max_prompt_tokens": longest}
    tree["rollout"] |= {
        "prompts_per_step": updates * math.ceil(4 / updates), "group_size": min(cfg.rollout.group_size, 4),
        "max_new_tokens": answer, "stop": [*cfg.rollout.stop, STOP],
    }  # fmt: skip
    tree["algo"]["overlong_buffer"] = min(cfg.algo.overlong_buffer, answer)
    (folder / "reward.py").write_text(REWARD)
    tree["reward"] = {"custom": f"{folder}/reward.py:reward", "default": "custom"}

    # Two steps with updates that fp32 shows, in several micro-batches of several answers.
    multiple = 2 * cfg.parallel.tp * cfg.parallel.cp
    tokens = math.ceil(2 * (longest + answer) / multiple) * multiple
    tree["train"] |= {
        "steps": 2, "epochs": None, "lr": 1e-3, "warmup_steps": min(cfg.train.warmup_steps, 2),
        "max_tokens_per_micro_batch": tokens, "logprob_max_tokens_per_micro_batch": 2 * tokens, "eval_every": 0,
        "save_every": 0, "export_every": 1, "offload": None if cfg.train.offload == "optimizer" else cfg.train.offload,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))


# ---------------------------------------------------------------- the model


def write_model(source, cfg, folder, seed):
    """Write a random model of the family of the one in `source`, with its tokenizer, into a folder."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*", "*.pt*", "config.json"))
    config = small_config(transformers.AutoConfig.from_pretrained(source).get_text_config(), cfg)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # initially linear attention forgets at once, and its states do nothing
            torch.nn.init.uniform_(weight, -4, -2)
    model.save_pretrained(folder)


def small_config(config, cfg):
    """A config.json with fewer and narrower layers, which the layout of the run still divides."""
    p = cfg.parallel
    split = math.lcm(p.tp, cfg.rollout.tp)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    is_square = width * heads == config.hidden_size

    # Heads stay as wide as they are: rotary embeddings depend on it.
    small = {"num_key_value_heads": kv_heads if kv_heads < split else min(kv_heads, max(split, 2))}
    small["num_attention_heads"] = math.lcm(small["num_key_value_heads"], split) * (2 if heads > kv_heads else 1)
    small["hidden_size"] = width * small["num_attention_heads"] if is_square else 128
    if keys := getattr(config, "linear_num_key_heads", 0):
        small["linear_num_key_heads"] = min(keys, 2 * split * p.cp)
        small["linear_num_value_heads"] = config.linear_num_value_heads // keys * small["linear_num_key_heads"]

    # Feed-forward blocks and experts.
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, name, None):
            small[name] = 64 * math.lcm(split, p.etp)
    for name in ("num_experts", "num_local_experts"):
        if getattr(config, name, None):
            small[name] = min(getattr(config, name), 4 * p.ep)
            small["num_experts_per_tok"] = min(config.num_experts_per_tok, 2)

    # A layer of each kind, and of each stage.
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"]))
    stages = p.pp * p.vpp
    layers = stages * math.ceil(max(2, len(kinds)) / stages)
    small |= {"num_hidden_layers": layers, "initializer_range": 0.06}
    if len(kinds) > 1:
        small |= {"layer_types": (kinds * layers)[:layers], "full_attention_interval": len(kinds)}
    elif getattr(config, "layer_types", None):
        small["layer_types"] = kinds * layers
    return type(config).from_dict(json.loads(config.to_json_string(use_diff=False)) | small)
