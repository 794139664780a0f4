"""What the metrics of a run ask for: rules of thumb, each with the keys to try. No rule changes anything.

A rule compares the last WINDOW steps with the first ones of this start, and says what it sees; what to turn then is in
support/base/remedies.yaml under the rule's name, and in docs/tuning.md.
"""

from statistics import fmean

from support.base.remedies import METRICS, try_one_of

WINDOW = 20  # steps between two looks, and what a look averages over


def hints(history: list[dict]) -> dict[str, str]:
    """{rule: hint} for a run with these metrics, a dict a step; none before there are two windows of them."""
    if len(history) < 2 * WINDOW:
        return {}
    first, last = history[:WINDOW], history[-WINDOW:]
    found = {rule.__name__: rule(first, last) for rule in RULES}
    return {name: f"{text}: {try_one_of(METRICS[name].turn)}" for name, text in found.items() if text is not None}


def mean(steps: list[dict], name: str) -> float:
    """Mean of a metric over steps, those left out in which it was off; 0 if it was off in all."""
    values = [step[name] for step in steps if step[name] is not None]
    return fmean(values) if values else 0.0


def mean_of(steps: list[dict], name: str) -> float | None:
    """The same of a metric that may be missing; None if it was off in all."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return fmean(values) if values else None


def entropy_collapse(first: list[dict], last: list[dict]) -> str | None:
    """The policy samples one answer to each prompt before the rewards have stopped rising."""
    was, now = mean(first, "entropy"), mean(last, "entropy")
    zero = mean(last, "groups/zero_std_frac")
    best = max(step["reward/mean"] for step in first + last)
    if now > 0.2 * was or zero < 0.3 or mean(last, "reward/mean") > 0.9 * best > 0:
        return None
    return f"entropy fell from {was:.2f} to {now:.2f} and {zero:.0%} of the groups have no advantage"


def length_explosion(first: list[dict], last: list[dict]) -> str | None:
    """Answers grow until they are cut off."""
    was, now = mean(first, "tokens/response_mean"), mean(last, "tokens/response_mean")
    cut = mean(last, "tokens/truncated_frac")
    if now < 1.5 * was or cut < 0.2:
        return None
    return f"answers grew from {was:.0f} to {now:.0f} tokens and {cut:.0%} are cut off"


def equal_groups(first: list[dict], last: list[dict]) -> str | None:
    """Most groups have equal rewards."""
    zero = mean(last, "groups/zero_std_frac")
    if zero < 0.5 or mean(last, "reward/mean") > 0.95:
        return None
    return f"{zero:.0%} of the groups have equal rewards and no advantage"


def clipped_ratios(first: list[dict], last: list[dict]) -> str | None:
    """The clip binds for much of the batch."""
    share = mean(last, "ratio/clip_frac")
    if share < 0.2:
        return None
    return f"the clip binds at {share:.0%} of the tokens"


def growing_gap(first: list[dict], last: list[dict]) -> str | None:
    """Trainer and vLLM drift apart."""
    was, now = mean(first, "logp_gap/mean"), mean(last, "logp_gap/mean")
    if now < max(3 * was, 1e-3):
        return None
    return f"the gap between trainer and vLLM grew from {was:.1e} to {now:.1e}"


def long_tail(first: list[dict], last: list[dict]) -> str | None:
    """A few long answers keep all others waiting."""
    ratio = mean(last, "tokens/response_max") / max(mean(last, "tokens/response_mean"), 1.0)
    share = mean(last, "time/rollout") / max(mean(last, "time/step"), 1e-9)
    if ratio < 6 or share < 0.5:
        return None
    return f"the longest answer has {ratio:.0f} times the mean length and sampling takes {share:.0%} of a step"


def idle_stages(first: list[dict], last: list[dict]) -> str | None:
    """Pipeline stages wait for each other."""
    bubble = mean(last, "pipeline/bubble")
    if bubble < 0.2:
        return None
    return f"pipeline stages idle {bubble:.0%} of an update"


def idle_gpu(first: list[dict], last: list[dict]) -> str | None:
    """The GPU waits for the host, for messages or for few long answers."""
    busy = mean_of(last, "gpu/busy")
    if busy is None or busy > 0.4:
        return None
    return f"rank 0's GPU runs a kernel in {busy:.0%} of the time"


def uneven_experts(first: list[dict], last: list[dict]) -> str | None:
    """Some experts get most tokens, and their ranks keep the others waiting."""
    load = mean_of(last, "moe/load")
    if load is None or load < 4:
        return None
    return f"the busiest expert of a layer has {load:.1f} times the mean load"


def frequent_evaluation(first: list[dict], last: list[dict]) -> str | None:
    """Evaluations take much of the time."""
    share = last[-1].get("time/eval_frac") or 0.0
    if share < 0.2:
        return None
    return f"evaluations take {share:.0%} of the time"


RULES = (
    entropy_collapse, length_explosion, equal_groups, clipped_ratios, growing_gap, long_tail, idle_stages, idle_gpu,
    uneven_experts, frequent_evaluation,
)  # fmt: skip
