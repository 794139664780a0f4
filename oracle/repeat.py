"""A run, once more: how each of its steps is repeated. What is compared is in answers.py, updates.py and exports.py.

Rows are answers as rollouts/ has them; `state` is what repeats the run.
"""

import math

from oracle import again, algorithm
from oracle.answers import judge_answers, judge_evaluation, judge_groups, judge_odds, judge_order, judge_rewards
from oracle.exports import judge_checkpoint, judge_exports
from oracle.nuclei import find
from oracle.reference import follow_reference
from oracle.report import Report
from oracle.run import Recorded
from oracle.state import OF_UPDATE, State
from oracle.trainer import scored
from oracle.updates import gradient, judge_advantages, judge_first_update, judge_log_probs


def repeat(run: Recorded, with_vllm=False):
    """Repeat the steps of a run and compare all that it recorded, `with_vllm` some of its answers with vLLM's too."""
    report = Report(run)
    state = State(run, report)
    asked = again.ask(state) if with_vllm else None
    judge_evaluation(state, run.rollouts(0, "eval"))
    for step in run.steps:
        report.step = step
        repeat_step(state, step)
    if asked:
        again.judge_again(state, asked)
    return report


def repeat_step(state, step):
    """Compare all that a step recorded, in the order in which a step makes it, and make its updates."""
    run = state.run
    cfg = state.cfg
    rows = run.rollouts(step)
    state.metrics = run.metrics.get(step)
    state.values = algorithm.scheduled(cfg, step)

    # The answers: the order of prompts, how each answer was sampled and how it ended, and its reward.
    prompts = judge_order(state, rows)
    sampling = cfg.rollout.model_copy(update={"temperature": state.values["temperature"]})
    judge_answers(state, rows, step, sampling, cfg.rollout.max_new_tokens)
    judge_rewards(state, rows, prompts, cfg.algo.overlong_buffer)

    # The groups that are trained.
    groups = algorithm.trained_groups(rows, cfg)
    if state.metrics:
        judge_groups(state, rows, groups)
        judge_schedule(state)

    # Their updates.
    repeat_updates(state, *([row for row in rows if (row["group"] in groups) == chosen] for chosen in (True, False)))
    if state.metrics:
        state.updates += state.metrics["update/applied"]

    # What the step leaves.
    judge_exports(state, step)
    judge_checkpoint(state, step)
    judge_evaluation(state, run.rollouts(step, "eval"))


def judge_schedule(state):
    """The learning rate and the keys that have a schedule. Where they part, the values of the step become the run's."""
    names = {"lr": "lr"}
    for name, course in state.cfg.schedule:
        if course is not None:
            names[f"schedule/{name}"] = name
    for metric, name in names.items():
        found = state.metrics.get(metric, math.nan)
        if not state.report.check("lr", metric, found, state.values[name]):
            state.values[name] = found


def repeat_updates(state, rows, replaced):
    """The advantages of a step and its updates. After it our weights are the run's, or state.unknown says why not.

    `rows` are trained, those of the groups that were `replaced` are not.
    """
    metrics = state.metrics
    trainer = state.trainer
    answers = [scored(row, state.cfg) for row in rows]
    if not state.unknown:
        state.nuclei = find(state, answers, state.cfg.rollout, state.values["temperature"])
        trainer.prepare(answers, state.values)
        follow_reference(state, answers)
    answers = judge_advantages(state, answers)
    if state.unknown:
        return state.report.note("sampling", f"against no probabilities: {state.unknown}")

    # The first update. Almost all that a run reports is computed with the weights before it.
    updates = algorithm.updates_of([a.row for a in answers], state.cfg, state.report.step)
    first = gradient(state, answers, updates[0], state.own)
    if first is None:
        return state.lose("the loss cannot be computed", OF_UPDATE)
    if metrics and judge_log_probs(state, answers, updates):
        first = judge_first_update(state, answers, updates[0], first)
    if state.unknown:
        return
    judge_odds(state, answers, replaced)
    if metrics and metrics["update/applied"] not in (0, len(updates)):
        return state.lose("some updates of a step were skipped, it is not recorded which", ("weights",))

    # All updates.
    clipped = tokens = 0
    for number, chosen in enumerate(updates):
        sums = gradient(state, answers, chosen, state.own) if number else first
        clipped += sums["clipped"]
        tokens += sums["tokens"]
        if state.has_moments and (not metrics or metrics["update/applied"]):
            trainer.step(sums["grad_norm"], state.values["lr"])
    if not state.has_moments:
        return state.lose("the moments of AdamW are not known", ("weights",))
    if metrics:
        state.report.check("loss", "ratio/clip_frac", metrics["ratio/clip_frac"], clipped / tokens)
