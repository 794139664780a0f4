"""The updates of a step: what was trained in each, by which values, and what came of it.

`state` is what repeats the run (state.py), `answers` are Answer (trainer.py), `line` is what the run recorded of an
update, and `chosen` are the numbers of its answers. Where the run parts from ours, its own records are taken from there
on, so that what follows is judged.
"""

import math

import torch

from config import UserError
from grpo.parts.base import user_code
from grpo.parts.base.read_config import override
from oracle import algorithm, formulas
from oracle.state import OF_UPDATE, ROUNDS_OTHERWISE
from oracle.trainer import known_loss, known_weights

# Beginning of a key → the item that its value in a step is of; the first that fits.
ITEM_OF = {
    "train.lr": "lr", "train.updates_per_step": "updates", "train.epochs_per_step": "updates", "train.": "weights",
    "rollout.group_size": "groups", "rollout.prompts_per_step": "groups", "rollout.": "sampling", "data.": "order",
    "algo.max_rounds": "groups", "algo.overlong": "rewards", "reward.": "rewards", "algo.advantage": "advantages",
    "algo.teacher": "teacher", "algo.loss_norm": "token-weights", "": "loss",
}  # fmt: skip
# Entry of a line → the metric of the first update that it is, the item that it is of, and what a sum is divided by.
OUTCOMES = {
    "policy": ("loss/policy", "loss", "trained"), "loss": ("loss/total", "loss", "trained"),
    "entropy": ("entropy", "entropy", "tokens"), "k3": ("kl/ref", "reference", "tokens"),
    "grad_norm": ("grad_norm", "gradient", "updates"), "clipped": ("ratio/clip_frac", "loss", "tokens"),
    "ref_kl": ("kl/full", "reference", "tokens"), "teacher_kl": ("kl/teacher", "teacher", "tokens"),
    "teacher_entropy": ("entropy/teacher", "teacher", "tokens"),
}  # fmt: skip

# ---------------------------------------------------------------- the values of a step


def judge_values(state, line):
    """Set the step's configuration: config.yaml with the schedules or, where they part, with the run's values."""
    report = state.report
    cfg = state.run.cfg
    ours = algorithm.scheduled(cfg, report.step)
    theirs = {key: value_of(cfg, key) for key in ours} | line.get("values", {})
    for key, value in state.metrics.items():
        if key == "lr" or key.startswith("schedule/"):
            name = next(dotted for dotted in ours if dotted.endswith(f".{key.removeprefix('schedule/')}"))
            report.check(item_of(name), f"value of {name}", value, ours[name])
            if not line:
                theirs[name] = value

    for key, value in theirs.items():
        own = ours.get(key, value_of(cfg, key))
        if isinstance(own, int | float) and isinstance(value, int | float):
            report.check(item_of(key), f"value of {key}", value, own)
        else:
            report.say(item_of(key), "" if value == own else f"{key} is {value!r}, not {own!r}")
    try:
        state.cfg = override(cfg, theirs)
    except UserError as error:
        report.say("loss", f"a value of the step is not legal: {' '.join(str(error).split())}")
    if state.trainer:
        state.trainer.cfg = state.cfg


def item_of(key):
    """The item that a key's value in a step belongs to."""
    return next(item for beginning, item in ITEM_OF.items() if key.startswith(beginning))


def value_of(cfg, key):
    """The value of a dotted key."""
    for name in key.split("."):
        cfg = getattr(cfg, name, None)  # None: a key of another commit
    return cfg


# ---------------------------------------------------------------- what was trained


def judge_chosen(state, answers, line, planned):
    """The answers of an update and the weights of their tokens. Returns numbers and weights, the run's where recorded.

    `planned` are our numbers, in order.
    """
    report = state.report
    cfg = state.cfg
    if "weights" not in line:
        if "token-weights" in state.own:
            state.lose(f"no formula for algo.loss_norm={cfg.algo.loss_norm}", OF_UPDATE)
            return planned, []
        return planned, known_weights([answers[n] for n in planned], cfg)

    judge_applied(state, line)
    if "loss_scale" in line:
        judge_scale(state, line)
    update = f"update {line['update']}"
    chosen = [n for n, weight in enumerate(line["weights"]) if weight is not None]
    problem = ""
    if chosen != planned:
        other, missing = len({*chosen} - {*planned}), len({*planned} - {*chosen})
        problem = f"{update} has {len(chosen)} answers: {missing} of our {len(planned)} are missing, {other} are others"
    report.say("updates", problem)

    # Which tokens have a weight.
    taken = [answers[n] for n in chosen]
    whole = [spread(line["weights"][n], a) for n, a in zip(chosen, taken, strict=True)]
    weights = [weight[a.sampled] for weight, a in zip(whole, taken, strict=True)]
    for a, every, weight in zip(taken, whole, weights, strict=True):
        count = int((weight > 0).sum())
        wanted = len(a.sampled) if a.is_trained else 0
        problem = f"{update}: of an answer of group {a.row['group']} {count} of {len(a.sampled)} tokens are trained"
        report.say("updates", problem if count != wanted else "")
        if every.count_nonzero() > count:
            report.say("updates", f"{update}: tokens of an environment, or weights below 0, are trained")
    counts = [int((weight > 0).sum()) for weight in weights]
    report.check("updates", "number of trained tokens", line["trained"], sum(counts))
    report.check("updates", "number of tokens", line["tokens"], sum(len(a.sampled) for a in taken))

    # How large the weights are.
    if "token-weights" not in state.own:
        sizes = formulas.answer_weights(counts, cfg.algo.loss_norm, cfg.norm_length).tolist()
        for size, weight in zip(sizes, weights, strict=True):
            found = weight[weight > 0]
            report.check("token-weights", "token: weight", found, torch.full_like(found, size))
    return chosen, weights


def spread(value, a):
    """A number, or the numbers of the tokens, of an answer as a tensor [tokens of the response]; null is NaN."""
    if isinstance(value, list):
        return torch.tensor([float("nan") if one is None else one for one in value])
    found = torch.zeros(len(a.row["response_ids"]))
    found[a.sampled] = float(value)
    return found


def judge_number(state, planned):
    """How many updates there were, and how many were applied."""
    report = state.report
    applied, skipped = (state.metrics[f"update/{name}"] for name in ("applied", "skipped"))
    report.check("updates", "number of applied and skipped updates", applied + skipped, len(planned))
    if state.lines is not None:
        report.check("updates", "number of updates", len(state.lines), len(planned))
        report.check("updates", "number of applied updates", applied, sum(line["applied"] for line in state.lines))


def judge_applied(state, line):
    """Whether the optimizer stepped exactly where there was a gradient."""
    norm = line["grad_norm"]
    problem = ""
    if line["applied"] != (norm is not None and norm > 0):
        problem = f"update {line['update']} was {'' if line['applied'] else 'not '}applied, its grad_norm is {norm}"
    state.report.say("updates", problem)


# ---------------------------------------------------------------- log-probs


def measure_log_probs(state, answers):
    """How far the trainer's shadow is from it, token by token, in what it says before the first update of a step."""
    if state.trainer.shadow is None:
        return
    measure = state.report.measure

    def apart(values):
        """At each token of the answers that have it."""
        pairs = [(values(a), values(a.shadow)) for a in answers if a.shadow]
        return torch.cat([(one - other).double().abs() for one, other in pairs if one is not None] or [torch.zeros(1)])

    gap = apart(lambda a: a.before)
    state.rounding = state.rounding or gap.max().item()
    measure("token: rollout_logp", 2 * gap.max())  # of two engines
    measure("logp_gap/max", 2 * gap.max())
    measure("logp_gap/mean", gap.mean())
    measure("kl/ref", apart(lambda a: None if a.ref is None else formulas.kl(a.before, a.ref, "k3")).mean())
    measure("kl/teacher", apart(lambda a: None if a.teacher is None else a.old - a.teacher).mean())


def judge_log_probs(state, answers, updates, sampled):
    """vLLM's log-probs, and its gap to the trainer. False where our weights are not the run's.

    The first `sampled` answers are of this step, and others of other weights.
    """
    cfg = state.cfg
    report = state.report
    metrics = state.metrics

    # The answers whose gap the run reports.
    count = cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1
    numbers = sorted({n for chosen in updates[:count] for n in chosen})
    gap = torch.cat([answers[n].before - answers[n].rollout for n in numbers]).double().abs()
    gaps = {"logp_gap/mean": gap.mean(), "logp_gap/max": gap.max()}
    if cfg.algo.replay_routes and cfg.model.dtype != "fp32":  # the run follows routes that rounding turned
        gaps = {name: min(value, torch.tensor(metrics[name])) for name, value in gaps.items()}

    # The weights before this step are those that the steps before it made.
    ours, theirs = (
        torch.cat([getattr(answers[n], name) for n in numbers if n < sampled] or [torch.zeros(0)])
        for name in ("before", "rollout")
    )
    other = [f"rollout.vllm.{name}" for name in cfg.rollout.vllm if name in ROUNDS_OTHERWISE]
    is_apart = other or report.compare("token: rollout_logp", theirs, ours).parts
    problems = [text for name in gaps if (text := report.compare(name, metrics[name], gaps[name]).parts)]
    if not state.doubt and state.updates and is_apart and problems:
        report.say("weights", f"log-probs are not those of our weights after the step before: {problems[0]}")
        state.part(("log-probs", *OF_UPDATE))
        return False
    if state.doubt and (is_apart or problems):
        state.part(("log-probs", *OF_UPDATE))
        return False

    if other:
        report.note("log-probs", f"vLLM's not judged: {', '.join(other)} may change them")
    else:
        report.check("log-probs", "token: rollout_logp", theirs, ours)
    for name, value in gaps.items():
        if cfg.model.match_engine:  # the run's two passes were one arithmetic; ours is a third
            report.check("log-probs", f"equal bits: {name}", metrics[name], 0.0)
        else:
            report.check("log-probs", name, metrics[name], value)
            report.say("log-probs", f"{name} is exactly 0, without equal bits" if metrics[name] == 0 else "", 0)
    if state.nuclei:
        problem, theirs, ours = state.nuclei
        report.say("sampling", problem)
        if theirs:
            report.check("sampling", "nucleus: mean size", sum(theirs) / len(theirs), sum(ours) / len(ours))
    if answers[numbers[0]].teacher is not None:
        trained = sorted({n for chosen in updates for n in chosen})
        apart = [a.old - a.teacher for n in trained if (a := answers[n]).is_trained]
        apart = torch.cat(apart or [torch.zeros(1)])
        report.check("teacher", "kl/teacher", metrics["kl/teacher"], apart.double().mean())
    return True


# ---------------------------------------------------------------- advantages


def judge_advantages(state, answers, trained, whole):
    """Set the advantages, ours or where they part the run's, of the answers with the numbers `trained`, of all updates.

    Of a group that a fork trains in part they may be those of the `whole` step.
    """
    algo = state.cfg.algo
    report = state.report
    in_reward = algo.kl_in == "reward" and algo.kl_coef
    theirs = [answers[n].row["advantage"] for n in trained]
    found = None
    if algo.advantage not in algorithm.ADVANTAGES:
        report.note("advantages", f"no formula for algo.advantage={algo.advantage}")
    elif in_reward and (state.unknown or state.doubt or algo.kl not in formulas.KLS):
        report.note("advantages", f"they hold the KL, {state.unknown or state.doubt or 'which is yours'}")
    else:
        for among in (trained, whole):
            values = algorithm.advantages_of([answers[n] for n in among], algo, in_reward)
            values = dict(zip(among, values.tolist(), strict=True))
            found = [values.get(n, math.nan) for n in trained]
            if not report.compare("advantage", theirs, found).parts:
                break
        if not report.check("advantages", f"advantage by {algo.advantage}", theirs, found):
            found = None

    for n, advantage in zip(trained, theirs if found is None else found, strict=True):
        answers[n].advantages = torch.full((len(answers[n].sampled),), float(advantage))


def judge_token_advantages(state, answers, chosen, line):
    """Set the advantages of the tokens of an update. They are those of their answers, less a teacher's term."""
    for n in chosen:
        a = answers[n]
        a.token_advantages = a.advantages
        name, ours = "token: answer's advantage", torch.full((len(a.sampled),), float(a.row["advantage"]))
        if a.teacher is not None:
            a.token_advantages = a.advantages - state.cfg.algo.teacher_coef * (a.old - a.teacher)
            name, ours = "token: advantage", a.token_advantages
        if "weights" in line:
            value = line.get("advantages", {n: None})[n]
            theirs = spread(a.row["advantage"] if value is None else value, a)[a.sampled]
            state.report.check("advantages", name, theirs, ours)
            a.token_advantages = theirs  # also where they agree: the rounding of a teacher's router is not the loss's


# ---------------------------------------------------------------- loss and gradient


def gradient(state, taken, line, own):
    """Compute the gradient of an update by formulas or, if `own` has the loss, by the checkout's grpo_loss.

    Returns the sums of what the update reports. None if grpo_loss raised.
    """
    cfg = state.cfg
    trained = line.get("trained") or sum(int((a.weights > 0).sum()) for a in taken)
    if "loss" not in own:
        return measured(state, state.trainer.gradient(taken, trained, known_loss(cfg.algo)))
    try:
        from oracle import fork

        return measured(state, state.trainer.gradient(taken, trained, fork.own_loss(cfg.algo)))
    except Exception as error:  # a name or a field that only train_step knows
        line = user_code.last_line(error)[:160]
        state.report.note("loss", f"the checkout's grpo_loss cannot be called: {line}")


def measured(state, sums):
    """The sums of an update, after a look at how far those of the trainer's shadow are from them."""
    if state.trainer.shadow:
        others = state.trainer.shadow.sums
        for name, (metric, _, over) in OUTCOMES.items():
            state.report.measure(metric, abs(sums[name] - others[name]) / max(sums[over], 1))
    return sums


def judge_outcome(state, taken, line, sums):
    """What an update reports, with our `sums`. Where it parts by the loss, the checkout's takes the formula's place.

    Returns the sums to go on with. Where our gradient is not the run's, state.doubt has the item.
    """
    report = state.report
    if state.rounding and abs(line.get("clipped", 0.0) * sums["tokens"] - sums["clipped"]) > 0.5:
        for a in taken:  # rounding turned the clip of a token: the shadow shows how far that may move what follows
            a.shadow.shift = 2 * state.rounding  # both log-probs of a ratio are rounded
        sums = gradient(state, taken, line, state.own)
    problems = misfits(state, line, sums)
    of_loss = {"loss", "policy", "grad_norm"}
    if of_loss & problems.keys() and "loss" not in state.own:
        others = gradient(state, taken, line, state.own | {"loss"})
        if others and not of_loss & misfits(state, line, others).keys():
            report.say("loss", f"differs from {state.cfg.algo.loss}: {next(iter(problems.values()))}")
            state.own.add("loss")
            sums = others
            problems = misfits(state, line, sums)
        else:
            sums = gradient(state, taken, line, state.own)

    # A number alone may part, or the gradient; then the weights after the update may. It is the weights before it where
    # the policy was another there.
    is_moved = "grad_norm" in problems and line["applied"]  # else no gradient reached the weights
    hidden = ()
    of_policy = problems.keys() - {"grad_norm", "clipped"}
    if of_policy and (state.doubt or (report.items["weights"].parts and line["update"] > 1)):
        state.part(OF_UPDATE)
        return sums
    if is_moved and {"entropy", "k3"} & problems.keys() and (state.updates or line["update"] > 1):
        report.say("weights", f"not ours before update {line['update']}: {next(iter(problems.values()))}")
        state.part(OF_UPDATE)
        return sums
    if is_moved and {"loss", "policy"} & problems.keys():
        state.doubt = "loss"
        hidden = ("grad_norm", "clipped")
    elif is_moved:
        state.doubt = "gradient"

    for name, pair in outcomes(state, line, sums).items():
        if name not in hidden:
            metric, item, _ = OUTCOMES[name]
            report.check(item, metric, *pair)
    return sums


def misfits(state, line, sums):
    """{entry of a line that parts from ours: how}."""
    found = {}
    for name, pair in outcomes(state, line, sums).items():
        metric, *_ = OUTCOMES[name]
        text = state.report.compare(metric, *pair).parts
        found |= {name: f"{metric}: {text}"} if text else {}
    return found


def outcomes(state, line, sums):
    """{entry of a line: (the run's value, ours)} of what both have."""
    names = [name for name in OUTCOMES if name in line and name in sums]
    if is_overflow(state, line):
        names.remove("grad_norm")
    return {name: (line[name], sums[name] / max(sums[OUTCOMES[name][2]], 1)) for name in names}


def judge_scale(state, line):
    """Whether the loss scale of fp16 is that of the update before, half of it after an overflow, or twice."""
    scale, options = line["loss_scale"], state.cfg.megatron
    if state.scale and scale:
        before, overflowed = state.scale
        legal = {before, 2 * before}
        if overflowed and "loss_scale" not in options:  # which is a constant one
            half = max(before / 2, options.get("min_loss_scale", 1.0))
            legal = {half, before} if "hysteresis" in options else {half}
        problem = f"update {line['update']} has the loss scale {scale:g} after {before:g}{', an overflow' * overflowed}"
        state.report.say("gradient", problem if scale not in legal else "")
    state.scale = scale, is_overflow(state, line)
    if state.scale[1]:
        state.report.say("gradient")


def is_overflow(state, line):
    """Whether its gradient is beyond fp16, as a loss scale may make and ours has none."""
    return state.cfg.model.dtype == "fp16" and line["grad_norm"] is None and line["loss"] is not None


def of_metrics(metrics, number):
    """A line for each of a number of updates, with what the metrics say of them in a run of an earlier version."""
    lines = [{"update": n + 1, "applied": metrics["update/applied"] == number} for n in range(number)]
    lines[0] |= {name: metrics[metric] for name, (metric, *_) in OUTCOMES.items() if name != "clipped"}
    return lines
