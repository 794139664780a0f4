"""The answers of a step against the data, the sampling and the rewards of the configuration.

Rows are answers as rollouts/ has them; `state` is what repeats the run (state.py).
"""

from collections import Counter
from itertools import accumulate

import torch

from oracle import formulas
from oracle.algorithm import rounds_of, seed_of
from oracle.metrics import judge_evaluated
from oracle.nuclei import fill_nuclei
from oracle.sampling import Bets
from oracle.trainer import answer_of

# ---------------------------------------------------------------- order


def judge_order(state, rows):
    """The prompt of each group against the order of the data. Returns {group: its Prompt of the data, or None}."""
    groups = {row["group"]: row for row in rows}
    state.taken += len(groups)
    if not any(len(each) for each in state.sets):
        state.report.note("order", state.late or "there are no data")
        return {}

    prompts = {}
    for group, row in sorted(groups.items()):
        chosen, number = next(state.stream)
        prompt = state.sets[chosen][number]
        problem = ""
        if prompt.ids != row["prompt_ids"]:
            prompt = state.by_prompt.get(tuple(row["prompt_ids"]))
            problem = (
                f"group {group} has the prompt {state.tokenizer.decode(row['prompt_ids'])[-40:]!r}, not number {number}"
            )
        elif prompt.source != row["source"]:
            problem = f"group {group} has the source {row['source']!r}, its row {prompt.source!r}"
        if problem and state.late:
            state.sets = []
            state.report.note("order", state.late)
            return {}

        prompts[group] = prompt
        state.report.say("order", problem)
        if prompt and prompt.asked != row.get("asked"):
            state.report.say("teacher", f"the prompt of group {group} with its hint is not that of its row")
    return prompts


# ---------------------------------------------------------------- seeds, sampling, answers


def judge_answers(state, rows, step, sampling, limit):
    """The seed of each answer's group, its requests to vLLM, how it ended, and the text that was graded.

    `sampling` has the keys of the section rollout or eval, and `limit` is the most tokens of an answer.
    """
    report = state.report
    numbers = Counter()
    for row in rows:
        group = row["group"]
        seed = seed_of(state.cfg.seed, step, row["group"])
        report.say("seeds", f"{row['seed']} of group {group}, not {seed}" if row["seed"] != seed else "")
        judge_requests(state, row, numbers[group], sampling, limit)
        numbers[group] += 1
        if state.tokenizer is None:
            report.note("answers", "there is no tokenizer")
        else:
            problem = answer_problem(state, row, sampling, limit)
            report.say("answers", problem and f"an answer of group {group}: {problem}")


def judge_requests(state, row, number, sampling, limit):
    """What SamplingParams said for each turn of an answer, the `number`-th of its group."""
    if not row.get("sampling"):
        return state.report.note("sampling", "not recorded")
    wanted = requests_of(state, row, number, sampling, limit)
    wrong = []
    if len(row["sampling"]) != len(wanted):
        wrong.append(f"{len(row['sampling'])} requests")
    for given, settings in zip(row["sampling"], wanted, strict=False):
        if not state.cfg.rollout.turns:  # there is one request for the whole group
            settings |= {"seed": row["seed"]}
        given = given | {"stop_token_ids": {*given["stop_token_ids"], *state.ends}}
        for name, right in settings.items():
            if given.get(name) != right:
                wrong.append(f"{name}={given.get(name)}, not {right}")
    state.report.say("sampling", wrong and f"group {row['group']}, answer {number}: {'; '.join(wrong)}")


def requests_of(state, row, number, sampling, limit):
    """The settings of vLLM for each turn of an answer, the `number`-th of its group, with the seed of this answer."""
    settings = {"temperature": sampling.temperature, "stop": sampling.stop}
    if sampling.temperature:  # else vLLM takes the likeliest token, whatever top_p and top_k say
        settings |= {"temperature": max(sampling.temperature, 0.01), "top_p": sampling.top_p, "top_k": sampling.top_k}
    if state.ends:  # of which vLLM adds some
        settings["stop_token_ids"] = {*sampling.stop_token_ids, *state.ends}

    found = []
    for turn, start in enumerate([0, *accumulate(row["turns"])][:-1:2]):
        seed = seed_of(row["seed"], number, turn) if turn else row["seed"] + number
        found.append(settings | {"max_tokens": limit - start, "seed": seed})
    return found


def answer_problem(state, row, sampling, limit):
    """What is wrong with the length, the end or the text of an answer; empty if nothing is."""
    length = len(row["response_ids"])
    finished = row["finished"]
    turns = turns_of(row)[::2]
    *before, last = [has_ended(state, ids, sampling) for ids in turns]
    if length > limit or (not last and length < limit):
        return f"it has {length} tokens, the limit is {limit}, finished is {finished}"
    # With turns the limit may also leave no room for what the environment replies.
    may_be_cut = state.cfg.rollout.turns and row.get("ended", "limit") == "limit"
    if finished != last and (finished or not may_be_cut):
        return f"finished is {finished}, but the last token {row['response_ids'][-1]} says otherwise"
    ends = {*state.ends, *sampling.stop_token_ids}
    if inside := [token for ids in turns for token in ids[:-1] if token in ends]:
        return f"the end token {inside[0]} is inside of a turn"
    if problem := end_problem(state, row, len(turns), last):
        return problem
    text = state.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
    if text != row["text"]:
        return f"graded text is {row['text'][:40]!r}, the tokens say {text[:40]!r}"
    return "" if all(before) else "a turn before the last did not end"


def end_problem(state, row, count, is_ended):
    """Whether a conversation of `count` turns of the model ended as it says; empty if so, or if it says nothing."""
    if not state.cfg.rollout.turns:
        return ""
    if "ended" not in row:
        return state.report.note("answers", "not recorded: why a conversation ended")
    possible = {
        "done": is_ended, "max_turns": is_ended and count == state.cfg.rollout.max_turns,
        "limit": not row["finished"], row["graded"]: row["graded"] != "ok",
    }  # fmt: skip
    return "" if possible.get(row["ended"]) else f"it ended by {row['ended']!r} after {count} turns"


def has_ended(state, ids, sampling):
    """Whether the last token is an end token or a stop token, or completes a stop text."""
    if ids[-1] in {*state.ends, *sampling.stop_token_ids}:
        return True
    if not sampling.stop:
        return False
    before = state.tokenizer.decode(ids[:-1])
    whole = state.tokenizer.decode(ids)
    return any(text in whole and text not in before for text in sampling.stop)


def turns_of(row):
    """The tokens of each turn, of model, environment, model, ..."""
    ends = accumulate(row["turns"])
    return [row["response_ids"][end - length : end] for end, length in zip(ends, row["turns"], strict=True)]


def judge_odds(state, answers, bets):
    """Whether answers look drawn from our probabilities; in a step those of replaced groups too."""
    others = [a for a in answers if a.seen is None]
    fill_nuclei(state, others)
    state.trainer.score(others, "before")
    bets.add(answers, state.ends)
    state.report.say("sampling", bets.won(), sum(len(a.sampled) for a in answers))


# ---------------------------------------------------------------- rewards and groups


def judge_rewards(state, rows, prompts, sampling, buffer):
    """The sum of each reward's parts, the penalty on length over the last `buffer` tokens, and the parts themselves,
    graded anew. `prompts` are {group: Prompt}; `sampling` has the keys of the section rollout or eval.
    """
    check = state.report.check
    for row in rows:
        parts = dict(row["reward_parts"])
        prompt = prompts.get(row["group"])
        check("rewards", "reward", row["reward"], sum(parts.values()))
        if buffer:
            limit = state.cfg.rollout.max_new_tokens
            wanted = formulas.length_penalty(len(row["response_ids"]), limit, state.cfg.algo)
            check("rewards", "overlong", parts.pop("overlong", None), wanted)

        # What is left are the parts that the user's functions give.
        if row["graded"] != "ok":
            check("rewards", "reward of one that was not graded", sum(parts.values()), 0)
        elif prompt is None:
            state.report.note("rewards", "of some answers: there is no row of the data with their prompt")
        else:
            judge_parts(state, row, prompt, parts, sampling)


def judge_parts(state, row, prompt, parts, sampling):
    """The parts of an answer's reward, graded anew."""
    report = state.report
    turns = turns_of(row)
    texts = [state.tokenizer.decode(ids, skip_special_tokens=True) for ids in turns]
    is_ended = has_ended(state, turns[-1], sampling)
    found, reply = state.grader.parts(row, prompt, texts, is_ended)
    given = f"{row['reward']:g} for {row['text'][:40]!r}"
    if state.late and found != parts:
        return report.note("rewards", f"some: {state.late}")

    if isinstance(found, str):  # no reward, but what went wrong
        if state.grader.has_returned:
            report.say("rewards", f"the run gave {given}, here: {found}")
        else:
            report.note("rewards", f"graded anew: {found}")
    elif found.keys() != parts.keys():
        report.say("rewards", f"the run gave {given}, with the parts {parts}, here: {found}")
    else:
        report.check("rewards", f"reward, {given}", [parts[name] for name in found], [*found.values()])
        problem = is_ended and "ended" in row and reply_problem(state, row, reply)
        report.say("answers", problem and f"a conversation of group {row['group']}: {problem}")


def reply_problem(state, row, reply):
    """Whether the environment's last reply, None for the end, contradicts why a conversation ended; empty if not."""
    if (reply is None) != (row["ended"] == "done"):
        return f"it ended by {row['ended']!r}, but the environment replies {reply!r}"
    if row["ended"] != "limit" or state.cfg.data.chat_template:  # a template adds tokens to the reply
        return ""
    length = len(row["response_ids"]) + len(state.tokenizer(reply, add_special_tokens=False)["input_ids"])
    limit = row["sampling"][0]["max_tokens"]
    return f"with the reply it has {length} tokens, so it need not end at {limit}" if length < limit else ""


def judge_groups(state, rows, trained):
    """The size of groups, how many were sampled and how many are trained."""
    check = state.report.check
    metrics = state.metrics
    sizes = Counter(row["group"] for row in rows)
    check("groups", "groups/size", [*sizes.values()], [state.cfg.rollout.group_size] * len(sizes))
    check("groups", "groups/sampled", metrics["groups/sampled"], len(sizes))
    check("groups", "groups/prompts_per_step", len(sizes), sum(rounds_of(rows, state.cfg)))
    check("groups", "groups/trained", metrics["groups/trained"], len(trained))


# ---------------------------------------------------------------- evaluation


def judge_evaluation(state, rows):
    """The answers of the evaluation after a step, if there was one."""
    if not rows:
        return
    options = state.cfg.eval
    report = state.report
    judge_answers(state, rows, 0, options, options.max_new_tokens or state.cfg.rollout.max_new_tokens)
    counts = Counter(row["group"] for row in rows)
    report.check("groups", "groups/eval.samples", [*counts.values()], [options.samples] * len(counts))

    prompts = dict(enumerate(state.eval_prompts))
    groups = {row["group"]: row["prompt_ids"] for row in rows}
    if not prompts:
        report.note("order", "of an evaluation: there are no data")
    elif groups != {group: prompt.ids for group, prompt in prompts.items()}:
        if state.late:
            return report.note("order", f"of an evaluation: {state.late}")
        report.say("order", "the prompts of an evaluation are not those of data.eval")
    judge_rewards(state, rows, prompts, options, buffer=0)
    judge_evaluated(state, rows)

    if state.doubt:
        report.note("log-probs", f"of an evaluation after an update with another {state.doubt}")
    elif options.temperature and not state.unknown:
        answers = [answer_of(row, state.cfg, options) for row in rows]
        judge_odds(state, answers, Bets())  # evaluations have the same random numbers, which are no neighbours
        theirs = torch.cat([a.rollout for a in answers])
        report.check("log-probs", "token: rollout_logp", theirs, torch.cat([a.before for a in answers]))
