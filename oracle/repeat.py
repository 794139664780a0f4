"""A run, once more: how each of its steps is repeated. What is compared is in answers.py, updates.py and exports.py.

Rows are answers as rollouts/ has them, lines what it has of updates; `state` is what repeats the run.
"""

from collections.abc import Callable

from oracle import again, algorithm, updates
from oracle.answers import judge_answers, judge_evaluation, judge_groups, judge_odds, judge_order, judge_rewards
from oracle.exports import judge_checkpoint, judge_exports
from oracle.metrics import judge_metrics
from oracle.nuclei import fill_nuclei
from oracle.reference import follow_reference
from oracle.report import Report
from oracle.run import Recorded
from oracle.state import OF_UPDATE, State
from oracle.trainer import answer_of


def repeat(run: Recorded, engine: Callable | None = None):
    """Repeat the steps of a run and compare all that it recorded, and some of its answers with what an `engine` such as
    again.own_process answers to the same requests.
    """
    report = Report(run)
    state = State(run, report)
    asked = again.ask(state, engine) if engine else None
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
    rows = run.rollouts(step)
    state.metrics = run.metrics[step]
    state.lines = run.updates(step)
    updates.judge_values(state, state.lines[0] if state.lines else {})
    cfg = state.cfg

    # The answers: the order of prompts, how each answer was sampled and how it ended, and its reward.
    prompts = judge_order(state, rows)
    judge_answers(state, rows, step, cfg.rollout, cfg.rollout.max_new_tokens)
    judge_rewards(state, rows, prompts, cfg.rollout, cfg.algo.overlong_buffer)

    # The groups that are trained, and their updates.
    groups = algorithm.trained_groups(rows, cfg)
    judge_groups(state, rows, groups)
    repeat_updates(state, rows, groups)
    state.updates += state.metrics["update/applied"]

    # What the step leaves.
    judge_metrics(state, rows, groups)
    judge_exports(state, step, rows)
    judge_checkpoint(state, step)
    judge_evaluation(state, run.rollouts(step, "eval"))


def repeat_updates(state, rows, groups):
    """The advantages of a step and its updates. After it our weights are the run's, or state.unknown says why not."""
    planned = algorithm.updates_of(rows, groups, state.cfg, state.report.step)
    updates.judge_number(state, planned)
    lines = state.lines
    if lines is None:
        lines = updates.of_metrics(state.metrics, len(planned))
        for item in ("updates", "token-weights"):
            state.report.note(item, "of steps that an earlier version made, which did not record them")

    # Answers that were trained and not sampled in this step are numbered after those of it.
    answers = [answer_of(row, state.cfg) for row in rows]
    chosen, weights = [], []
    for number, line in enumerate(lines):
        gap = [None] * (len(answers) - len(rows))
        answers += [answer_of(row, state.cfg) for row in line.get("others", [])]
        for name in {"weights", "advantages"} & line.keys():
            line[name][len(rows) : len(rows)] = gap
        ours = planned[number] if number < len(planned) else []
        numbers, found = updates.judge_chosen(state, answers, line, ours)
        chosen.append(numbers)
        weights.append(found)

    # What they need besides.
    trained = sorted({n for numbers in chosen for n in numbers})
    whole = sorted({n for numbers in planned for n in numbers})
    if not state.unknown:
        used = [answers[n] for n in sorted({*trained, *whole})]
        state.nuclei = fill_nuclei(state, used)
        state.trainer.prepare(used, len(lines) > 1)
        follow_reference(state, used, [answers[n] for n in chosen[0]] if chosen else [])
    updates.judge_advantages(state, answers, trained, whole)

    if state.unknown:
        state.has_moments = False
        return state.report.note("sampling", f"against no probabilities: {state.unknown}")

    for number, line in enumerate(lines):
        if state.unknown and not state.has_moments:
            return None
        repeat_update(state, answers, chosen, weights[number], line, len(rows))


def repeat_update(state, answers, chosen, weights, line, sampled):
    """One update of a step, of which the first `sampled` answers are. If it is not ours, state.unknown says why."""
    number = line["update"] - 1
    taken = [answers[n] for n in chosen[number]]
    for a, weight in zip(taken, weights, strict=True):
        a.weights = weight
    updates.judge_token_advantages(state, answers, chosen[number], line)
    sums = updates.gradient(state, taken, line, state.own)
    if sums is None:
        return state.lose("the loss cannot be computed", OF_UPDATE)
    if number == 0:
        updates.measure_log_probs(state, answers)
        if updates.judge_log_probs(state, answers, chosen, sampled):
            judge_odds(state, answers[:sampled], state.bets)

    if "grad_norm" in line and not state.unknown:
        sums = updates.judge_outcome(state, taken, line, sums)
    if state.metrics["update/applied"] and not line["applied"] and state.lines is None:
        state.lose("some updates of a step were skipped, it is not recorded which", ("weights",))
    elif not state.has_moments:
        state.lose("the moments of AdamW are not known", ("weights",))
    elif line["applied"]:
        is_ours = not (state.unknown or state.doubt)
        norm = sums["grad_norm"] if is_ours else line.get("grad_norm") or sums["grad_norm"]
        state.trainer.step(norm, state.cfg.train.lr)
