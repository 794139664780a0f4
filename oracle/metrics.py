"""The metrics that follow from rollouts/, computed anew: docs/metrics.md. Rows are answers as rollouts/ has them."""

import math
from collections import defaultdict
from statistics import fmean, pstdev

import numpy as np

from oracle.algorithm import rounds_of
from oracle.updates import OUTCOMES


def judge_metrics(state, rows, trained):
    """The metrics of a step, of its `rows`, of which it trains the `trained` groups."""
    cfg = state.cfg
    line = state.metrics
    own = of_samples(rows, cfg) | of_training([row for row in rows if row["group"] in trained], cfg)
    updates = state.run.updates(state.report.step)
    own |= of_updates(updates, cfg)

    # Masks and selections of a fork part as `updates`. Then the tokens are those that its updates have trained.
    share = "advantage/nonzero_frac"
    if updates and share in own and state.report.compare(f"metric: {share}", line[share], own[share]).parts:
        own[share] = credited_share(rows, updates)
    own["groups/rounds"] = len(rounds_of(rows, cfg))
    if state.sets and (size := sum(map(len, state.sets))):
        own["epoch"] = state.taken / size

    # What follows from other metrics.
    if seconds := line.get("time/step"):
        own["speed/samples_per_s"] = len(rows) / seconds
        own["speed/response_tokens_per_s"] = sum(length_of(row) for row in rows) / seconds
        own["time/other_frac"] = line["time/other"] / seconds
    if state.trainer and line.get("entropy") is not None:
        own["entropy_frac"] = line["entropy"] / math.log(state.trainer.model.config.vocab_size)
    compare(state.report, line, own, "reward/")


def judge_evaluated(state, rows):
    """The metrics of the evaluation after a step, or before the first."""
    line = state.run.metrics.get(state.report.step)
    if line is None:
        return state.report.note("metrics", "there is no line of an evaluation")
    compare(state.report, line, of_evaluation(rows, state.cfg.eval), "eval/")


def compare(report, line, own, whole):
    """Compare the metrics of a line with our `own`, which has all whose names begin with `whole`; None is NaN."""
    for name, value in own.items():
        if name not in line:
            report.note("metrics", f"{name}, which the run does not have")
        else:
            report.check("metrics", f"metric: {name}", line[name], math.nan if value is None else value)
    for name in line:
        if name.startswith(whole) and name not in own:
            report.say("metrics", f"{name}: nothing in rollouts/ has this")


# ---------------------------------------------------------------- of answers


def length_of(row):
    """Tokens that the model sampled."""
    return sum(row["turns"][::2])


def by(rows, key):
    """{value of a key: its rows}."""
    found = defaultdict(list)
    for row in rows:
        found[row[key]].append(row)
    return found


def of_samples(rows, cfg):
    """Rewards, groups and lengths of all answers of a step."""
    rewards = [row["reward"] for row in rows]
    lengths = [length_of(row) for row in rows]
    of_groups = [{row["reward"] for row in group} for group in by(rows, "group").values()]
    own = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "groups/zero_std_frac": fmean(len(values) == 1 for values in of_groups),
        "tokens/prompt_mean": fmean(len(row["prompt_ids"]) for row in rows),
        "tokens/response_mean": fmean(lengths),
        "tokens/response_max": max(lengths),
        "tokens/truncated_frac": fmean(not row["finished"] for row in rows),
        "tokens/environment_mean": fmean(sum(row["turns"][1::2]) for row in rows) if cfg.rollout.turns else None,
        "turns/mean": fmean(len(row["turns"][::2]) for row in rows) if cfg.rollout.turns else None,
    }

    for source, of_source in by(rows, "source").items():
        own[f"reward/{source}/mean"] = fmean(row["reward"] for row in of_source)
        own[f"reward/{source}/max"] = max(row["reward"] for row in of_source)
        own |= failures(of_source, f"reward/{source}")
    return own


def failures(rows, begin):
    """The shares of answers that were not graded."""
    return {f"{begin}/{kind}_frac": fmean(row["graded"] == kind for row in rows) for kind in ("timeout", "error")}


def of_training(rows, cfg):
    """The share of trained tokens that have an advantage; with a teacher almost all have, by its log-probs."""
    if cfg.algo.teacher:
        return {}
    tokens = [(length_of(row), row["advantage"]) for row in rows if row["finished"] or not cfg.algo.mask_truncated]
    credited = sum(length for length, advantage in tokens if advantage)
    return {"advantage/nonzero_frac": credited / max(sum(length for length, _ in tokens), 1)}


def credited_share(rows, updates):
    """The share of the tokens with a weight, in any of the `updates` of a step, that have an advantage."""
    tokens = {}  # (number of an answer, place of a token) → its advantage
    for update in updates:
        answers = rows + update.get("others", [])
        advantages = update.get("advantages") or [None] * len(answers)
        for n, (row, weight, advantage) in enumerate(zip(answers, update["weights"], advantages, strict=True)):
            advantage = row["advantage"] if advantage is None else advantage
            is_models = np.repeat(np.arange(len(row["turns"])) % 2 == 0, row["turns"])
            weights = is_models * np.asarray(0 if weight is None else weight)
            credit = is_models * np.asarray(advantage)
            tokens |= {(n, place): credit[place] for place in np.flatnonzero(weights).tolist()}
    return fmean(value != 0 for value in tokens.values()) if tokens else 0.0


def of_updates(updates, cfg):
    """What metrics.jsonl says of the updates in rollouts/updates_*.jsonl; {} where there are none."""
    if not updates:
        return {}
    first = updates[0]
    own = {metric: first[name] for name, (metric, *_) in OUTCOMES.items() if name in first}

    # Means over the tokens of several updates.
    compared = updates[: cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1]
    for metric, name, of in (("ratio/clip_frac", "clipped", updates), ("mismatch/cut_frac", "outside", compared)):
        values = [update.get(name) for update in of]
        if None not in values:
            weighed = sum(value * update["tokens"] for value, update in zip(values, of, strict=True))
            own[metric] = weighed / max(sum(update["tokens"] for update in of), 1)
    return own


def of_evaluation(rows, options):
    """The metrics of an evaluation, by source: mean, pass@k, lengths, failures, and parts where there are several."""
    n = options.samples
    own = {}
    for source, of_source in by(rows, "source").items():
        begin = f"eval/{source}"
        own[f"{begin}/avg@{n}"] = fmean(row["reward"] for row in of_source)
        own[f"{begin}/response_mean"] = fmean(map(length_of, of_source))
        own[f"{begin}/truncated_frac"] = fmean(not row["finished"] for row in of_source)
        own |= failures(of_source, begin)

        # 1e-9: parts of .7, .2 and .1 add up to a little less than 1.
        groups = by(of_source, "group").values()
        failed = [sum(row["reward"] < options.pass_reward - 1e-9 for row in group) for group in groups]
        for k in {n, *(2**power for power in range(n.bit_length()))}:
            own[f"{begin}/pass@{k}"] = 1 - fmean(math.comb(count, k) / math.comb(n, k) for count in failed)

        names = {name for row in of_source for name in row["reward_parts"]}
        for name in names if len(names) > 1 else ():
            own[f"{begin}/part/{name}"] = fmean(row["reward_parts"].get(name, 0) > 0 for row in of_source)
    return own
