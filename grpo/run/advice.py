"""Rules that find, in its metrics, why a run cannot learn or wastes its machine, and name the keys to change."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

KEPT = ("reward/mean", "reward/std", "busy_frac", "mem/train_peak_gb", "moe/load", "grad_norm")  # metrics of past steps


class Advice:
    """The rules of a run, checked after every step, and what they compare a step with."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.past = defaultdict(list)  # metric of KEPT → its finite values so far, the last of the present step
        self.steps = Counter()  # source → steps with a sample of it
        self.best = {}  # source → its highest reward
        self.worst = {}  # source → its lowest mean reward of a step
        self.has_signal = False  # whether a step had an advantage other than 0
        self.has_ended = False  # whether an answer ended by itself
        self.streaks = {}  # rule that holds → for how many steps in a row
        self.idle_steps = 0  # in a row, in which nothing could be learnt although the run is not at its best

    def add(self, step) -> dict[str, str]:
        """{rule: what is wrong, what to turn} after a step with these metrics.

        If the run has to end, it has every rule that holds, whatever its number of steps.
        """
        self.note(step)
        self.idle_steps = self.idle_steps + 1 if is_idle(step, self) else 0
        holding = dict(problems(step, self))
        self.streaks = {rule: self.streaks.get(rule, 0) + 1 for rule in holding}

        found = {}
        for rule, text in holding.items():
            steps, turn = RULES[rule]
            if self.streaks[rule] >= steps or self.has_to_end():
                found[rule] = f"{text}: try {turn}"
        return found

    def note(self, step):
        """Add a step to what the next ones are compared with."""
        for name in KEPT:
            value = step.get(name)
            if value is not None and math.isfinite(value):
                self.past[name].append(value)
        for source in sources(step):
            self.steps[source] += 1
            self.best[source] = max(self.best.get(source, -math.inf), step[f"reward/{source}/max"])
            self.worst[source] = min(self.worst.get(source, math.inf), step[f"reward/{source}/mean"])
        self.has_signal |= step["advantage/nonzero_frac"] > 0
        self.has_ended |= step["tokens/truncated_frac"] < 1

    def has_to_end(self) -> bool:
        """Whether the run has learnt nothing for train.patience steps in a row."""
        return 0 < self.cfg.train.patience <= self.idle_steps

    def has_converged(self) -> bool:
        """Whether the run has learnt, and the step's rewards are in the upper fifth of what its steps have reached."""
        rewards = self.past["reward/mean"]
        low, high = min(rewards), max(rewards)
        return self.has_signal and rewards[-1] >= low + 0.8 * (high - low)


def sources(step) -> list[str]:
    """The sources of a step's samples."""
    names = [name for name in step if name.startswith("reward/") and name.endswith("/max")]
    return [name.removeprefix("reward/").removesuffix("/max") for name in names]


def is_same(a: float, b: float) -> bool:
    """Whether a mean of rewards equals a reward within rounding."""
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


# ---------------------------------------------------------------- a step that learns nothing


def is_idle(step, advice) -> bool:
    """Whether the step learns nothing and the run is not done: no weight changes, or only a KL acts at its minimum."""
    # A learning rate of 0 that the user has set asks for this.
    if advice.cfg.train.lr == 0 or is_at_best(step, advice) or advice.has_converged():
        return False
    if step["lr"] == 0:
        return True
    if step["update/applied"] == 0 and not step.get("update/overflow"):  # fp16: a lower loss scale comes next
        return True
    entropy_coef = step.get("schedule/entropy_coef", advice.cfg.algo.entropy_coef)
    is_taught = advice.cfg.algo.teacher_kl != "sampled"  # its divergence is in the loss, whatever the advantages
    return advice.cfg.algo.kl_coef > 0 and entropy_coef == 0 and not is_taught and not advice.has_signal


def is_at_best(step, advice) -> bool:
    """Whether every answer has the best reward of its source, reached by learning or one that passes."""
    for source in sources(step):
        best = advice.best[source]
        if not is_same(step[f"reward/{source}/mean"], best):
            return False
        if not advice.has_signal and best < advice.cfg.eval.pass_reward - 1e-9:  # but for rounding
            return False
    return True


def why_idle(step, patience: int) -> str:
    """Why a step has learnt nothing, and what follows."""
    why = "no answer is better than others to its prompt, and nothing else is trained"
    if step["lr"] == 0:
        why = "the learning rate is 0"
    elif step["advantage/nonzero_frac"] > 0:
        why = "its gradient is 0 or not finite, although answers differ in their rewards"
    end = "the run goes on, since train.patience=0"
    if patience:
        end = f"after {patience} such steps in a row (train.patience) the run saves and ends"
    return f"no update learns: {why}; {end}"


# ---------------------------------------------------------------- the rules


def problems(step, advice) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong) of each rule that holds for a step."""
    if advice.cfg.algo.advantage != "none":
        yield from problems_of_rewards(step, advice)
    if step["groups/zero_std_frac"] >= 1 and step["reward/std"] >= 1e-9 and step["advantage/nonzero_frac"] <= 0:
        yield "no_mixed_group", "no group has answers of unequal rewards, so no reward has an effect"
    yield from problems_of_answers(step, advice)

    # A correction whose bounds are narrower than what separates trainer and vLLM masks nearly every answer.
    correction, cut = advice.cfg.algo.correction, step.get("mismatch/cut_frac", 0.0)
    if correction in ("icepop", "seq_mask") and cut > 0.5:
        yield "masked_tokens", f"algo.correction={correction} leaves out {cut:.0%} of the tokens"

    # Updates too small for the weights' precision.
    if step.get("sync/changed") == 0 and step["update/applied"] != 0 and step["lr"] != 0:
        yield "unchanged_push", f"updates of learning rate {step['lr']:g} have changed no weight that vLLM samples with"
    if advice.idle_steps > 0:
        yield "nothing_learnt", why_idle(step, advice.cfg.train.patience)
    else:
        yield from problems_of_machine(advice)


def problems_of_rewards(step, advice):
    # All answers of a source have one reward: the wrong column, the wrong reward, or far too hard.
    same = {}
    for source, steps in advice.steps.items():
        if steps >= 5 and is_same(advice.best[source], advice.worst[source]):
            same[source] = advice.best[source]
    if same:
        values = " and ".join(f"{reward:g} in the source {source}" for source, reward in same.items())
        yield "one_reward", f"every reward was the same so far: {values}"

    # Answers of different rewards, in most steps, have become answers of one reward that is not the best.
    differed = advice.has_signal and median(advice.past["reward/std"][-100:-5] or [0.0]) > 1e-9
    if differed and step["reward/std"] <= 1e-9 and not advice.has_converged():
        before = max(advice.best.values())
        yield "collapsed_rewards", f"every reward is {step['reward/mean']:g} now, and was up to {before:g} before"


def problems_of_answers(step, advice):
    if not advice.has_ended:
        yield "no_end_token", "no answer ended by itself so far: no end token was sampled, nor a rollout.stop"
    if step["tokens/response_max"] <= 1 and step["tokens/truncated_frac"] <= 0:
        stops = advice.cfg.rollout.model_dump(include={"stop", "stop_token_ids"})
        yield "all_empty", f"every answer is empty: its first token ends it, an end token or one of rollout's {stops}"


def problems_of_machine(advice):
    """GPUs that wait, memory that swings, uneven experts, gradients that explode. A metric may be off."""
    past = advice.past
    busy = past["busy_frac"]
    if busy and busy[-1] < 0.5:
        yield "idle_gpus", f"ranks compute in {busy[-1]:.0%} of a step; idle/* and time/* say what they wait for"

    # Up and down by a fifth: neither a trend nor one larger step.
    peaks = past["mem/train_peak_gb"][-10:] or [0.0]
    low, high = min(peaks), max(peaks)
    moved = sum(abs(b - a) for a, b in pairwise(peaks))
    if high - low > max(0.2 * high, 1.0) and moved >= 3 * (high - low):
        yield "memory_swings", f"the memory of training swings between {low:.1f} and {high:.1f} GiB within ten steps"

    # By far more than at the start, or whatever the start was.
    load = past["moe/load"]
    if load and load[-1] >= min(2 * median(load[:10]), 5):
        yield "uneven_experts", f"the busiest expert of a layer gets {load[-1]:.1f} times the mean number of tokens"

    norms = past["grad_norm"][-100:] or [0.0]
    usual = median(norms)
    if norms[-1] >= 10 * usual > 0 and norms[-1] > (advice.cfg.train.clip_grad or 1.0):
        yield "exploding_gradients", f"the norm of the gradient is {norms[-1]:.3g}, more than 10 times its median"


LOWER = "a lower train.lr, from an earlier checkpoint"
ROUNDS = "algo.max_rounds=4 (dynamic sampling)"
EASIER = "data that the model sometimes gets right"
LONGER = "a larger rollout.max_new_tokens"
BIGGER = "a larger rollout.prompts_per_step"
FULL = "megatron.recompute_granularity=full"
RULES = {  # rule → for how many steps in a row it has to hold, what to turn; one_reward counts five steps itself
    "one_reward": (1, f"data.answer_key, reward.default or reward.by_source, {LONGER} or {EASIER}"),
    "collapsed_rewards": (5, f"{LOWER}, algo.kl_coef=0.001 or a small algo.entropy_coef"),
    "no_mixed_group": (5, f"a larger rollout.group_size, a higher rollout.temperature or {ROUNDS}"),
    "no_end_token": (5, f"{LONGER}, data.chat_template, rollout.stop_token_ids or rollout.stop"),
    "all_empty": (3, f"data.chat_template, reward.default, if it prefers an empty answer, rollout.stop or {LOWER}"),
    "masked_tokens": (3, "bounds further from 1, algo.correction_low and correction_high, or algo.correction=tis"),
    "unchanged_push": (3, "a higher train.lr or model.dtype=fp32"),
    "idle_gpus": (10, f"more reward.workers, {BIGGER}, a larger train.save_every or a smaller rollout.max_new_tokens"),
    "memory_swings": (1, f"a lower train.max_tokens_per_micro_batch, so that rows are full, {FULL} or {BIGGER}"),
    "uneven_experts": (10, "megatron.moe_aux_loss_coeff=0.001, a smaller parallel.ep or a lower train.lr"),
    "exploding_gradients": (3, f"{LOWER}, a lower train.clip_grad, algo.dual_clip=3 or algo.kl_coef=0.001"),
    "nothing_learnt": (5, f"{EASIER}, {ROUNDS}, a larger rollout.group_size or train.patience=0, which never ends it"),
}
