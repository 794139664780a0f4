"""The runs of test_pairs.py: every legal pair of a capability, a layout and a precision is in one of them."""

import itertools
import random

# Factor → {value: overrides}. {turns}, {teacher}, ... are replaced by paths of the test.
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
    "turns": {"off": [], "on": []},
    "token rewards": {"off": [], "on": []},
    "lora": {"off": [], "on": ["lora.rank=4", "train.lr=0.01"]},
    "teacher": {
        "none": [],
        "other": ["algo.teacher={teacher}", "algo.teacher_coef=0.3"],
        "self": ["algo.teacher=self", "data.hint_key=answer", "algo.teacher_coef=0.3"],
    },
    "lag": {"off": [], "on": ["rollout.lag=1"]},
    "routes": {"off": [], "on": ["algo.replay_routes=true"]},
    "mask_truncated": {"off": [], "on": ["algo.mask_truncated=true", "algo.overlong_buffer=2"]},
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

Run = dict[str, str]  # factor → value
Pair = tuple[tuple[str, str], tuple[str, str]]


def is_legal(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two values may stand in one run.

    With the old log-probs of vLLM, the KL in the reward holds two kernels against each other: of equal weights it is
    rounding noise, which a group of equal rewards divides by its own standard deviation.
    """
    return {one, other} != {("algorithm", "old by vLLM"), ("kl", "reward")}


def pairs_of(run: Run) -> set[Pair]:
    """The pairs that a run shows. In bf16, where the bounds are wide, those of two capabilities do not count."""
    pairs = {pair for pair in itertools.combinations(run.items(), 2) if is_asked(*pair)}
    if run.get("dtype") == "bf16":
        pairs = {pair for pair in pairs if {factor for factor, _ in pair} & MACHINE}
    return pairs


def is_asked(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether a pair has to be in some run. Losses on layouts are left to tests/test_layouts.py."""
    return is_legal(one, other) and {one[0], other[0]} != {"layout", "algorithm"}


def all_pairs() -> set[Pair]:
    """Every pair that has to be in some run."""
    values = [[(factor, value) for value in found] for factor, found in FACTORS.items()]
    chosen = itertools.combinations(values, 2)
    return {pair for one, other in chosen for pair in itertools.product(one, other) if is_asked(*pair)}


def cover(seed: int = 5, trials: int = 10) -> list[Run]:
    """Runs that hold every pair, greedily: of `trials` runs around an open pair, the one that closes most."""
    draw = random.Random(seed)
    left = all_pairs()
    runs = []
    while left:
        candidates = [grow(draw, left) for _ in range(trials)]
        best = max(candidates, key=lambda run: len(pairs_of(run) & left))
        runs.append(best)
        left -= pairs_of(best)
    return runs


def grow(draw: random.Random, left: set[Pair]) -> Run:
    """A legal run that begins with an open pair; each further factor takes the value that closes most pairs."""
    run = dict(draw.choice(sorted(left)))
    others = [factor for factor in FACTORS if factor not in run]
    draw.shuffle(others)
    for factor in others:
        scores = []
        for value in FACTORS[factor]:
            tried = {name: value if name == factor else run.get(name) for name in FACTORS if name in {*run, factor}}
            if all(is_legal((factor, value), other) for other in run.items()):
                scores.append((len(pairs_of(tried) & left), draw.random(), value))
        run[factor] = max(scores)[2]
    return {factor: run[factor] for factor in FACTORS}
