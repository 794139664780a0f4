"""The second trainer repeats short real runs in which every legal pair of a capability, a layout and a precision is."""

import itertools
import random

import pytest

from oracle.repeat import repeat
from oracle.run import read_run
from tests.conftest import tiny_model
from tests.museum.settings import SETTINGS

COMMON = (
    "train.steps=3", "train.lr=0.003", "train.warmup_steps=2", "train.save_every=0", "train.export_every=1",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "algo.entropy_coef=0.02",
    "train.max_tokens_per_micro_batch=64", "train.logprob_max_tokens_per_micro_batch=48",
)  # fmt: skip

# Factor → {value: overrides}. {teacher} is replaced by its path.
FACTORS = {
    "layout": {
        "DP2": [],
        "TP2": ["parallel.tp=2"],
        "PP2": ["parallel.pp=2"],
        "PP2·VPP2": ["parallel.pp=2", "parallel.vpp=2"],
        "CP2": ["parallel.cp=2"],
        "EP2": ["parallel.ep=2"],
        "TP2·ETP2": ["parallel.tp=2", "parallel.etp=2"],
    },
    "dtype": {"fp32": [], "bf16": ["model.dtype=bf16"]},
    "rollout.tp": {"1": [], "2": ["rollout.tp=2"]},
    "algorithm": {
        "grpo": ["train.weight_decay=0.1"],
        "gspo": [
            "algo.loss=gspo", "algo.advantage=grpo_loo", "algo.loss_norm=seq_mean_token_mean", "algo.kl=k1",
            "algo.correction=tis", "algo.correction_level=sequence", "algo.clip_low=0.02", "algo.clip_high=0.03",
            "rollout.group_size=8",  # of 3 others, a standard deviation may be near 0, which magnifies rounding
        ],
        "cispo": [
            "algo.loss=cispo", "algo.advantage=reinforce_pp", "algo.loss_norm=seq_mean_token_sum_norm", "algo.kl=k2",
            "algo.correction=icepop", "train.clip_grad=0.1",
        ],
        "reinforce": [
            "algo.loss=reinforce", "algo.advantage=rloo", "algo.loss_norm=seq_mean_token_sum", "algo.kl=k3+",
            "algo.correction=seq_mask", "algo.correction_low=0.5", "algo.correction_high=2.0",
        ],
        "old by vLLM": ["algo.old_logp=rollout", "algo.advantage=dr_grpo", "algo.dual_clip=1.1"],
    },
    "kl": {"none": [], "loss": ["algo.kl_coef=0.5"], "reward": ["algo.kl_coef=0.5", "algo.kl_in=reward"]},
    "turns": {"off": [], "on": SETTINGS["turns"]},
    "lora": {"off": [], "on": ["lora.rank=4", "train.lr=0.01"]},
    "teacher": {
        "none": [],
        "other": ["algo.teacher={teacher}", "algo.teacher_coef=0.3"],
        "self": ["algo.teacher=self", "data.hint_key=answer", "algo.teacher_coef=0.3"],
    },
    "routes": {"off": [], "on": ["algo.replay_routes=true"]},
    "mask_truncated": {"off": [], "on": ["algo.mask_truncated=true", "algo.overlong_buffer=2"]},
    "stop": {"off": [], "on": [f"rollout.stop={[f'{digit}1' for digit in range(10)]}", "rollout.stop_token_ids=[12]"]},
    "dynamic sampling": {"off": [], "on": ["algo.max_rounds=2"]},
    "schedules": {
        "off": [],
        "on": [
            "schedule.lr={shape: cosine, to: 0.001}", "schedule.temperature={to: 0.7}",
            "schedule.entropy_coef={to: 0.0, shape: constant}",
        ],
    },
    "updates": {"1": [], "2 × 2": ["train.updates_per_step=2", "train.epochs_per_step=2"]},
}  # fmt: skip
MACHINE = {"layout", "dtype", "rollout.tp"}  # factors that are no capabilities
EXPERTS = ("EP2", "TP2·ETP2")  # layouts of models with experts
ILLEGAL = (  # pairs of values that may not stand in one run
    # It holds two kernels against each other: of equal weights the KL is rounding noise, which a group of equal rewards
    # divides by its own standard deviation.
    {("algorithm", "old by vLLM"), ("kl", "reward")},
    # vLLM's routes are our routers' only in fp32 and before an update.
    {("routes", "on"), ("dtype", "bf16")},
    {("routes", "on"), ("updates", "2 × 2")},
)


def pairs_of(run):
    """The pairs ((factor, value), (factor, value)) that a run {factor: value} shows. In bf16, where the bounds are
    wide, pairs of two capabilities do not count.
    """
    pairs = {pair for pair in itertools.combinations(run.items(), 2) if is_wanted(*pair)}
    if run.get("dtype") == "bf16":
        pairs = {pair for pair in pairs if {factor for factor, _ in pair} & MACHINE}
    return pairs


def is_wanted(one, other):
    """Whether a pair has to be in some run. Losses on layouts are left to tests/oracle/test_layouts.py."""
    return {one, other} not in ILLEGAL and {one[0], other[0]} != {"layout", "algorithm"}


def cover():
    """Runs that hold every pair, greedily: of ten runs around an open pair, the one that closes most."""
    draw = random.Random(5)
    chosen = itertools.combinations([[(factor, value) for value in found] for factor, found in FACTORS.items()], 2)
    left = {pair for one, other in chosen for pair in itertools.product(one, other) if is_wanted(*pair)}
    runs = []
    while left:
        best = max([grow(draw, left) for _ in range(10)], key=lambda run: len(pairs_of(run) & left))
        runs.append(best)
        left -= pairs_of(best)
    return runs


def grow(draw, left):
    """A legal run that begins with an open pair; each further factor takes the value that closes most pairs."""
    run = dict(draw.choice(sorted(left)))
    others = [factor for factor in FACTORS if factor not in run]
    draw.shuffle(others)
    for factor in others:
        scores = []
        for value in FACTORS[factor]:
            tried = {name: value if name == factor else run.get(name) for name in FACTORS if name in {*run, factor}}
            if all({(factor, value), other} not in ILLEGAL for other in run.items()):
                scores.append((len(pairs_of(tried) & left), draw.random(), value))
        run[factor] = max(scores)[2]
    return {factor: run[factor] for factor in FACTORS}


RUNS = cover()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with models."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny_model(folder / "qwen2", layers=4, ffn=2)
    tiny_model(folder / "qwen3_moe", "qwen3_moe", tied=False, layers=4)
    tiny_model(folder / "teacher", "qwen3", tied=False, layers=4, seed=5)
    tiny_model(folder / "teacher_moe", "mixtral", tied=False, seed=5)
    return folder


def overrides_of(run, models):
    """The overrides of a run."""
    family = "qwen3_moe" if (run["layout"] in EXPERTS or run["routes"] == "on") else "qwen2"
    teacher = "teacher_moe" if run["layout"] in EXPERTS else "teacher"  # a dense one is refused there
    chosen = [f"model.path={models}/{family}"]
    for factor, value in run.items():
        chosen += [text.replace("{teacher}", f"{models}/{teacher}") for text in FACTORS[factor][value]]
    if run["dtype"] != "fp32":
        chosen.append("rollout.max_logp_gap=inf")
        # These drop tokens at their bounds, where rounding decides which.
        if "algo.correction=icepop" in chosen:
            chosen.append("algo.correction=tis")
        if "algo.dual_clip=1.1" in chosen:
            chosen.append("algo.dual_clip=3.0")
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{i:02d}" for i in range(len(RUNS))])
def test_a_run_is_what_the_second_trainer_makes_of_it(number, train_forked, models):
    training = train_forked(2, *COMMON, *overrides_of(RUNS[number], models), code=0)
    comparison = repeat(read_run(training.out))
    assert not comparison.parted(), f"{RUNS[number]}\n{comparison.table()}"
