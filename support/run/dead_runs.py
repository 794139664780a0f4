"""Runs that cannot learn: what is told as soon as the evidence is enough, and for how long nothing could be learnt.

A rule says what is wrong with a step, or None. RULES states in how many steps in a row it has to be wrong. What to turn
then is in support/base/remedies.yaml, under `dead` and the rule's name, and in docs/tuning.md.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median, variance

from config import Config
from support.base.remedies import DEAD, try_one_of

RECENT = 100  # steps whose metrics the rules can compare with
SPIKE = 20.0  # times its median
SPIKE_STEPS = 5
STILL = 10  # rewards stand still if the mean of so many steps is not above that of as many before, but for chance


@dataclass
class Past:
    """What the steps of a run have shown, the present one included."""

    recent: deque[dict] = field(default_factory=lambda: deque(maxlen=RECENT))  # metrics of each step
    steps: Counter = field(default_factory=Counter)  # {source: steps with a sample of it}
    best: dict[str, float] = field(default_factory=dict)  # {source: its highest reward}
    worst: dict[str, float] = field(default_factory=dict)  # {source: its lowest mean reward of a step}
    low: float = math.inf  # the lowest reward/mean
    high: float = -math.inf
    has_signal: bool = False  # whether a step had an advantage other than 0
    has_ended: bool = False  # whether an answer ended by itself

    def add(self, step: dict) -> None:
        """Take up the metrics of the next step."""
        self.recent.append(step)
        for source in sources(step):
            self.steps[source] += 1
            self.best[source] = max(self.best.get(source, -math.inf), step[f"reward/{source}/max"])
            self.worst[source] = min(self.worst.get(source, math.inf), step[f"reward/{source}/mean"])
        self.low = min(self.low, step["reward/mean"])
        self.high = max(self.high, step["reward/mean"])
        self.has_signal |= step["advantage/nonzero_frac"] > 0
        self.has_ended |= step["tokens/truncated_frac"] < 1

    def constant_sources(self) -> dict[str, float]:
        """{source: reward} of the sources whose answers all had the same reward, in five steps or more."""
        seen = [source for source, count in self.steps.items() if count >= 5]
        return {source: self.best[source] for source in seen if is_same(self.best[source], self.worst[source])}

    def stands_still(self) -> bool:
        """Whether rewards have not risen, by two standard errors, in the last 2 · STILL steps; False before those."""
        rewards = [step["reward/mean"] for step in self.recent][-2 * STILL :]
        if len(rewards) < 2 * STILL:
            return False
        before, now = rewards[:STILL], rewards[STILL:]
        error = math.sqrt((variance(before) + variance(now)) / STILL)
        return fmean(now) <= fmean(before) + 2 * error


class Diagnosis:
    """The rules of a run, asked after every step."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.past = Past()
        self.streaks = Counter()  # {rule: steps in a row for which it holds}
        self.idle_steps = 0  # in a row, in which nothing could be learnt although the run is not at its best

    def add(self, step: dict) -> dict[str, str]:
        """{rule: what is wrong, what to turn} after a step with these metrics; none for metrics of older versions.

        Where the run has to end, every rule that holds is among them, for however few steps it does.
        """
        if "advantage/nonzero_frac" not in step:
            return {}
        self.past.add(step)
        if is_idle(step, self.past, self.cfg):
            self.idle_steps += 1
        else:
            self.idle_steps = 0
        found = {}
        for rule, steps in RULES.items():
            name = rule.__name__
            text = rule(step, self.past, self.cfg)
            if text is None:
                self.streaks[name] = 0
                continue
            self.streaks[name] += 1
            if self.streaks[name] >= steps or self.has_to_end():
                found[name] = f"{text}: {try_one_of(DEAD[name].turn)}"
        return found

    def has_to_end(self) -> bool:
        """Whether the run has learnt nothing for train.patience steps in a row."""
        patience = self.cfg.train.patience
        return patience > 0 and self.idle_steps >= patience


# ---------------------------------------------------------------- what the rules ask


def sources(step: dict) -> list[str]:
    """The data sources with samples in a step."""
    names = [name for name in step if name.startswith("reward/") and name.endswith("/max")]
    return [name.removeprefix("reward/").removesuffix("/max") for name in names]


def is_same(a: float, b: float) -> bool:
    """Whether a mean of rewards equals a reward, but for rounding."""
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def number(step: dict, name: str) -> float:
    """A metric; NaN, of which every comparison is False, where it is off or missing."""
    value = step.get(name)
    return math.nan if value is None else value


def is_at_best(step: dict, past: Past, cfg: Config) -> bool:
    """Whether every answer has the best reward of its source: one reached by learning, or one that passes."""
    here = sources(step)
    if not all(is_same(step[f"reward/{source}/mean"], past.best[source]) for source in here):
        return False
    return past.has_signal or all(past.best[source] >= cfg.eval.pass_reward for source in here)


def has_converged(step: dict, past: Past) -> bool:
    """Whether the run has learnt, and the step's rewards are in the upper fifth of what its steps have reached."""
    return past.has_signal and step["reward/mean"] >= past.low + 0.8 * (past.high - past.low)


def is_idle(step: dict, past: Past, cfg: Config) -> bool:
    """Whether the step changed no weight, or only as a KL does that began at its minimum, and the run is not done.

    A learning rate of 0 that the user has set asks for this.
    """
    if cfg.train.lr == 0 or is_at_best(step, past, cfg) or has_converged(step, past):
        return False
    entropy_coef = step.get("schedule/entropy_coef", cfg.algo.entropy_coef)
    only_kl = cfg.algo.kl_coef > 0 and entropy_coef == 0 and not past.has_signal
    return step["lr"] == 0 or step["update/applied"] == 0 or only_kl


# ---------------------------------------------------------------- the rules


def nothing_learnt(step: dict, past: Past, cfg: Config) -> str | None:
    """The one reason for which a run stops, after train.patience steps."""
    if not is_idle(step, past, cfg):
        return None
    end = "the run goes on, since train.patience=0"
    if cfg.train.patience:
        end = f"after {cfg.train.patience} such steps in a row (train.patience) the run saves and ends"
    why = "no answer is better than others to its prompt, and nothing else is trained"
    if step["lr"] == 0:
        why = "the learning rate is 0"
    elif step["advantage/nonzero_frac"] > 0:
        why = "its gradient is 0 or not finite, although answers differ in their rewards"
    return f"no update learns: {why}; {end}"


def never_matched(step: dict, past: Past, cfg: Config) -> str | None:
    """No answer of a source was ever right: the wrong column, the wrong reward, or far too hard."""
    silent = [source for source, reward in past.constant_sources().items() if reward == 0]
    if not silent or cfg.algo.advantage == "none":
        return None
    return f"every reward of the source {' and '.join(silent)} was 0 so far, as if no answer ever matched"


def constant_rewards(step: dict, past: Past, cfg: Config) -> str | None:
    """A reward function that says the same of every answer."""
    constant = {source: reward for source, reward in past.constant_sources().items() if reward != 0}
    if not constant or cfg.algo.advantage == "none":
        return None
    values = " and ".join(f"{reward:g} in the source {source}" for source, reward in constant.items())
    return f"every reward was the same so far: {values}"


def collapsed_rewards(step: dict, past: Past, cfg: Config) -> str | None:
    """Answers of different rewards, in most steps, have become answers of one reward that is not the best."""
    if step["reward/std"] > 1e-9 or has_converged(step, past) or cfg.algo.advantage == "none":
        return None
    spread = [earlier["reward/std"] for earlier in list(past.recent)[:-5]]
    if not past.has_signal or not spread or median(spread) <= 1e-9:
        return None
    return f"every reward is {step['reward/mean']:g} now, and was up to {max(past.best.values()):g} before"


def at_best(step: dict, past: Past, cfg: Config) -> str | None:
    """Nothing is left to learn: said, never a reason to stop."""
    if not past.has_signal or not is_at_best(step, past, cfg):
        return None
    return f"every answer has the best reward so far, {step['reward/mean']:g}: the run has learnt what its data ask for"


def no_mixed_group(step: dict, past: Past, cfg: Config) -> str | None:
    """Rewards differ from prompt to prompt, but not within a group."""
    if step["groups/zero_std_frac"] < 1 or step["reward/std"] < 1e-9 or step["advantage/nonzero_frac"] > 0:
        return None
    return "no group has answers of unequal rewards, so no reward has an effect"


def no_end_token(step: dict, past: Past, cfg: Config) -> str | None:
    """No answer has ever ended by itself."""
    if past.has_ended:
        return None
    return "no answer ended by itself so far: each was cut off, the end token was never sampled"


def all_cut_off(step: dict, past: Past, cfg: Config) -> str | None:
    """Answers have ended by themselves before; now all are cut off, and rewards do not rise."""
    if step["tokens/truncated_frac"] < 1 or not past.has_ended:
        return None
    if not past.stands_still() or has_converged(step, past):
        return None
    return f"every answer is cut off, at {step['tokens/response_max']:.0f} tokens at most, and rewards stand still"


def all_empty(step: dict, past: Past, cfg: Config) -> str | None:
    """Every answer is the end token alone."""
    if step["tokens/response_max"] > 1 or step["tokens/truncated_frac"] > 0:
        return None
    return "every answer is empty: its first token is the end token"


def spiking_kl(step: dict, past: Past, cfg: Config) -> str | None:
    """The policy has suddenly left the reference."""
    usual = usual_value(past, "kl/ref")
    if usual is None or not number(step, "kl/ref") > max(SPIKE * usual, 0.1):
        return None
    return f"kl/ref is {step['kl/ref']:.2g}, more than {SPIKE:.0f} times its median of {usual:.2g}"


def spiking_gradient(step: dict, past: Past, cfg: Config) -> str | None:
    """Gradients have suddenly grown."""
    usual = usual_value(past, "grad_norm")
    if usual is None or not number(step, "grad_norm") > SPIKE * usual:
        return None
    return f"grad_norm is {step['grad_norm']:.2g}, more than {SPIKE:.0f} times its median of {usual:.2g}"


def usual_value(past: Past, name: str) -> float | None:
    """Median of a metric over recent steps that learnt from rewards, the last ones left out; None if there are few."""
    earlier = list(past.recent)[:-SPIKE_STEPS]
    values = [number(step, name) for step in earlier if step["advantage/nonzero_frac"] > 0]
    found = [value for value in values if value > 0]
    return median(found) if len(found) >= 20 else None


def entropy_ceiling(step: dict, past: Past, cfg: Config) -> str | None:
    """The policy samples any token of the vocabulary."""
    if not number(step, "entropy_frac") > 0.98 or not past.stands_still():
        return None
    return f"the entropy is {step['entropy_frac']:.0%} of its maximum and rewards stand still: answers are noise"


def entropy_floor(step: dict, past: Past, cfg: Config) -> str | None:
    """The policy samples one answer to each prompt, and not the best one."""
    if not number(step, "entropy") < 0.01 or not past.stands_still() or has_converged(step, past):
        return None
    return f"the entropy is {step['entropy']:.1g} and rewards stand still: the answers to a prompt are the same"


def zero_lr(step: dict, past: Past, cfg: Config) -> str | None:
    """A schedule has ended at 0 before the run does; its last step alone may have a learning rate of 0."""
    if step["lr"] > 0 or cfg.train.lr == 0:
        return None
    return f"the learning rate is 0, and train.lr is {cfg.train.lr:g}"


def unchanged_push(step: dict, past: Past, cfg: Config) -> str | None:
    """Updates too small for the weights' precision."""
    if number(step, "sync/changed") != 0 or step["update/applied"] == 0 or step["lr"] == 0:
        return None
    return f"updates with the learning rate {step['lr']:g} have changed no weight that vLLM samples with"


def all_masked(step: dict, past: Past, cfg: Config) -> str | None:
    """The importance correction leaves no token."""
    if number(step, "mismatch/cut_frac") != 1 or cfg.algo.correction not in ("icepop", "seq_mask"):
        return None
    return f"algo.correction={cfg.algo.correction} masks every token: all weights are outside its bounds"


# Rule → for how many steps in a row it has to hold. never_matched and constant_rewards count five steps themselves.
RULES: dict[Callable[[dict, Past, Config], str | None], int] = {
    never_matched: 1, constant_rewards: 1, collapsed_rewards: 5, at_best: 10, no_mixed_group: 5, no_end_token: 5,
    all_cut_off: 10, all_empty: 3, spiking_kl: SPIKE_STEPS, spiking_gradient: SPIKE_STEPS, entropy_ceiling: 10,
    entropy_floor: 10, zero_lr: 2, unchanged_push: 3, all_masked: 3, nothing_learnt: 5,
}  # fmt: skip
