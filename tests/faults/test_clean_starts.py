"""A hundred healthy runs, three steps each: none may be stopped by a check.

`pytest tests/faults/test_clean_starts.py --all-starts` runs all; else some stand for them.
"""

import itertools
from pathlib import Path

import make_tiny
import pytest

from support.base.read_config import load_config
from support.preflight import configuration
from tests.conftest import REPO
from tests.oracle.layouts import FULL, OVERLAP

COMMON = [
    "train.steps=3", "train.warmup_steps=0", "train.save_every=0", "rollout.prompts_per_step=8", "rollout.group_size=8",
    "algo.kl_coef=0.05", "train.max_tokens_per_micro_batch=256", "train.logprob_max_tokens_per_micro_batch=384",
]  # fmt: skip
TP2, PP2, CP2, EP2 = (f"parallel.{name}=2" for name in ("tp", "pp", "cp", "ep"))
LAYOUTS = {  # name → (ranks, overrides)
    "one": (1, []),
    "dp2": (2, []),
    "tp2": (2, [TP2]),
    "pp2": (2, [PP2]),
    "cp2": (2, [CP2]),
    "tp2-pp2": (4, [TP2, PP2]),
    "pp2-vpp2": (2, [PP2, "parallel.vpp=2"]),
    "tp2-cp2": (4, [TP2, CP2]),
}
EXPERT_LAYOUTS = {name: LAYOUTS[name] for name in ("dp2", "tp2", "cp2")} | {
    "ep2": (2, [EP2]),
    "ep2-tp2": (4, [EP2, TP2]),
    "pp2-ep2": (4, [PP2, EP2]),
}
WAYS = {  # of training: name → overrides; {folder} has models
    "plain": [],
    "lora": ["lora.rank=4", "train.lr=0.005"],
    "teacher": ["algo.teacher={folder}/qwen3", "algo.teacher_coef=0.3"],
    "turns": ["data.train='123'"],  # of configs/tiny_turns.yaml
}
MORE = {  # of a dense model on two replicas
    "two-updates": ["train.updates_per_step=2", "train.epochs_per_step=2"],
    "no-kl": ["algo.kl_coef=0"],
    "kl-in-reward": ["algo.kl_in=reward", "algo.kl=k1"],
    "gspo": ["algo.loss=gspo", "algo.loss_norm=seq_mean_token_mean"],
    "filtered": ["algo.max_rounds=2"],
    "overlap": OVERLAP,
    "offload": ["train.offload=optimizer", "algo.reference_on=host"],
    "recompute": FULL,
}
OTHERS = ("llama", "mistral", "qwen3", "qwen2_moe", "mixtral")
DTYPES = ("fp32", "bf16")


RUNS = {  # name → (ranks, overrides)
    f"qwen2 {dtype} {layout} {way}": (nproc, [*keys, *options])
    for (layout, (nproc, keys)), dtype, (way, options) in itertools.product(LAYOUTS.items(), DTYPES, WAYS.items())
}
RUNS |= {
    f"qwen3_moe {dtype} {layout} {way}": (nproc, [*keys, f"algo.replay_routes={str(way == 'routes').lower()}"])
    for (layout, (nproc, keys)), dtype, way in itertools.product(EXPERT_LAYOUTS.items(), DTYPES, ("plain", "routes"))
}
RUNS |= {f"{family} {dtype} dp2 plain": (2, []) for family, dtype in itertools.product(OTHERS, DTYPES)}
RUNS |= {
    f"qwen2 {dtype} dp2 {more}": (2, options)
    for (more, options), dtype in itertools.product(MORE.items(), DTYPES)
    if (more, dtype) != ("offload", "fp32")
}
STARTS = {
    name: (nproc, [f"model.path={{folder}}/{name.split()[0]}", f"model.dtype={name.split()[1]}", *keys])
    for name, (nproc, keys) in RUNS.items()
}
EVERY = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a tiny model of each family."""
    folder = tmp_path_factory.mktemp("starts")
    tokenizer = make_tiny.char_tokenizer("0123456789>+-=<.")  # with <eos> and <pad> an even number, for tp
    for family in ("qwen2", "qwen3_moe", *OTHERS):
        make_tiny.save_model(folder / family, tokenizer, family, hidden=64, layers=4)
    return folder


def config_of(name: str) -> str:
    return "tiny_turns" if name.endswith("turns") else "tiny"


def test_there_are_a_hundred_and_each_is_legal():
    assert len(STARTS) >= 100
    for name, (nproc, keys) in STARTS.items():
        options = [key.replace("{folder}", "build") for key in (*COMMON, *keys)]
        configuration.check_config(load_config(str(REPO / f"configs/{config_of(name)}.yaml"), options), nproc)


@pytest.mark.slow
def test_a_healthy_run_trains_three_steps(models, train_forked, start):
    nproc, keys = STARTS[start]
    options = [option.replace("{folder}", str(models)) for option in (*COMMON, *keys)]
    run = train_forked(nproc, *options, config=config_of(start), code=0)
    assert len(run.metrics) == 3
