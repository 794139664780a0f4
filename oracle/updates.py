"""The updates of a step: log-probs, advantages, and the first update against the run's metrics.

`state` is what repeats the run (state.py), `answers` are Scored (trainer.py), and `chosen` are the numbers of the
answers of an update.
"""

import torch

from grpo.parts.base import user_code
from oracle import algorithm, formulas
from oracle.state import OF_UPDATE, ROUNDS_OTHERWISE
from oracle.trainer import known_loss, known_weights, losses_of

# ---------------------------------------------------------------- log-probs


def judge_log_probs(state, answers, updates):
    """vLLM's log-probs, and its gap to the trainer. False where our weights are not the run's."""
    cfg = state.cfg
    report = state.report
    metrics = state.metrics

    # The answers whose gap the run reports.
    count = cfg.train.updates_per_step if cfg.algo.old_logp == "trainer" else 1
    numbers = sorted({n for chosen in updates[:count] for n in chosen})
    ours = torch.cat([answers[n].before for n in numbers]).double()
    theirs = torch.cat([answers[n].rollout for n in numbers]).double()
    gap = (ours - theirs).abs()
    gaps = {"logp_gap/mean": gap.mean(), "logp_gap/max": gap.max()}

    # The weights before this step are those that the steps before it made.
    other = [f"rollout.vllm.{name}" for name in cfg.rollout.vllm if name in ROUNDS_OTHERWISE]
    is_apart = other or report.compare("token: rollout_logp", theirs, ours).parts
    problems = [text for name in gaps if (text := report.compare(name, metrics[name], gaps[name]).parts)]
    if state.updates and is_apart and problems:
        report.say("weights", f"log-probs are not those of our weights after the step before: {problems[0]}")
        state.lose("the weights are not ours", ("log-probs", *OF_UPDATE))
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
    if state.nuclei:
        problem, theirs, ours = state.nuclei
        report.say("sampling", problem)
        if theirs:
            report.check("sampling", "nucleus: mean size", sum(theirs) / len(theirs), sum(ours) / len(ours))
    if answers[0].teacher is not None:
        apart = torch.cat([a.old - a.teacher for a in answers if a.is_trained] or [torch.zeros(1)])
        report.check("teacher", "kl/teacher", metrics["kl/teacher"], apart.double().mean())
    return True


# ---------------------------------------------------------------- advantages


def judge_advantages(state, answers):
    """Set the advantages, ours or where they part the run's. Returns the answers, without those that have none."""
    algo = state.cfg.algo
    report = state.report
    in_reward = algo.kl_in == "reward" and state.values["kl_coef"]
    found = None
    if algo.advantage not in algorithm.ADVANTAGES:
        report.note("advantages", f"no formula for algo.advantage={algo.advantage}")
    elif in_reward and (state.unknown or algo.kl not in formulas.KLS):
        report.note("advantages", f"they hold the KL, {state.unknown or 'which is yours'}")
    else:
        found = algorithm.advantages_of(answers, algo, in_reward)
        if report.compare("advantage", recorded(answers), found).parts:
            answers, found = without_left_out(state, answers, found, in_reward)
        if not report.check("advantages", f"advantage by {algo.advantage}", recorded(answers), found):
            found = None

    for a, advantage in zip(answers, recorded(answers) if found is None else found, strict=True):
        a.advantages = torch.full((len(a.sampled),), float(advantage))
        if a.teacher is not None:
            a.advantages = a.advantages - algo.teacher_coef * (a.old - a.teacher)
    return answers


def recorded(answers):
    """The advantages that the run has."""
    return [a.row["advantage"] for a in answers]


def without_left_out(state, answers, found, in_reward):
    """The answers and advantages where a fork trains a part of each group, and others have the advantage 0."""
    credited = {a.row["group"] for a in answers if a.row["advantage"]}
    kept = [a for a in answers if a.row["advantage"] or a.row["group"] not in credited]
    nonzero = [a for a in kept if a.row["advantage"]]
    ours = algorithm.advantages_of(nonzero, state.cfg.algo, in_reward)
    if len(kept) == len(answers) or state.report.compare("advantage", recorded(nonzero), ours).parts:
        return answers, found
    state.report.say("updates", f"{len(answers) - len(kept)} of {len(answers)} answers have no advantage: left out")
    return kept, recorded(kept)


# ---------------------------------------------------------------- loss and gradient


def gradient(state, answers, chosen, own):
    """Compute the gradient of an update by formulas or, for items in `own`, by the checkout's functions.

    Returns the sums of what the update reports. None if the checkout's functions raised.
    """
    cfg = state.cfg
    taken = [answers[n] for n in chosen]
    try:
        if own:
            from oracle import fork
        weights = fork.own_weights(answers, chosen, cfg) if "token-weights" in own else known_weights(taken, cfg)
        loss = fork.own_loss(cfg, state.report.step) if "loss" in own else known_loss(cfg, state.values)
        return state.trainer.gradient(taken, weights, loss, state.values["temperature"])
    except Exception as error:
        if not own:
            raise
        # A name or a field that only train_step knows.
        line = user_code.last_line(error)[:160]
        state.report.note("updates", f"the checkout's functions cannot be called: {line}")


def judge_first_update(state, answers, chosen, sums):
    """The first update of a step, with the `sums` of what it reports. Where these part from the run, others take their
    place. Returns the sums to go on with.
    """
    report = state.report
    metrics = state.metrics
    taken = [answers[n] for n in chosen]
    if metrics["loss/total"] is None or metrics["grad_norm"] is None:
        report.note("loss", "in a step it was NaN or infinite")
        return sums

    # What the policy says before the update, whatever the loss makes of it.
    before = torch.cat([a.before for a in taken])
    means = {"entropy": torch.cat([a.entropy for a in taken]).mean()}
    if taken[0].ref is not None:
        means["kl/ref"] = formulas.kl(before, torch.cat([a.ref for a in taken]), "k3").mean()

    if problems := misfits(state, losses_of(sums)):
        sums = fitting_sums(state, answers, chosen, problems[0])
        if sums is None:
            gap = (before - torch.cat([a.rollout for a in taken])).abs().mean()
            # With equal bits the run has no gap to compare ours with: a fifth of what rounding may make.
            least = report.bounds["logp_gap/"][0] / 5 if state.cfg.model.match_engine else 1e-6
            blame(state, problems, misfits(state, means), gap > 3 * metrics["logp_gap/mean"] + least)
            sums = gradient(state, answers, chosen, state.own)

    if not state.unknown:
        items = {"entropy": "entropy", "grad_norm": "gradient", "kl/ref": "reference"}
        for name, value in (means | losses_of(sums)).items():
            report.check(items.get(name, "loss"), name, metrics[name], value)
        for item in {"token-weights", "updates"} - state.own:  # which this update would show
            report.say(item)
    return sums


def misfits(state, found: dict[str, float]):
    """The quantities that part from the run's metrics, in words."""
    compared = [(name, state.report.compare(name, state.metrics[name], value).parts) for name, value in found.items()]
    return [f"{name}: {text}" for name, text in compared if text]


def fitting_sums(state, answers, chosen, problem):
    """The sums of an update with which the run agrees if the checkout's own functions take the place of formulas, as
    they do from then on. None if it agrees with none.
    """
    for more in ({"token-weights"}, {"loss"}, {"token-weights", "loss"}):
        own = state.own | more
        if own == state.own:
            continue
        sums = gradient(state, answers, chosen, own)
        if sums is None or misfits(state, losses_of(sums)):
            continue
        names = {"token-weights": state.cfg.algo.loss_norm, "loss": state.cfg.algo.loss}
        for item in sorted(own - state.own):
            state.report.say(item, f"differs from {names[item]}: {problem}")
        state.own = own
        return sums
    return None


def blame(state, problems, others, is_off):
    """Name the item where neither formulas nor the checkout's functions give the update of the run.

    `others` says whether entropy or KL part too, `is_off` whether our weights are farther from vLLM's than the run's.
    """
    if not problems[-1].startswith("grad_norm"):  # a number alone
        return
    item = "gradient" if len(problems) == 1 and not others else "updates"
    if state.updates and is_off:
        item = "weights"
    state.report.say(item, f"{problems[0]}, and no function of the checkout gives it")
    state.lose(f"{item} part", [name for name in OF_UPDATE if name != item])
