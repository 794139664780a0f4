"""Conversations: answers that an environment replies to, a tool or a game, until it or the token budget ends them.

A turn is sampled as any answer is, from the ids of prompt and response so far: what vLLM sampled is never decoded and
tokenised again. All living conversations of an engine take their turns together. docs/turns.md is for users.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jinja2
import numpy as np
import torch.distributed as dist

from config import Config, DataConfig, EvalConfig, RolloutConfig
from rollout import Completion, Engine
from support import user_code
from support.grading import TURNS, GradingPool, Ledger, Outcome

FAILED = f"{TURNS} failed: "  # what the error of a lost sample begins with
MARK = "⟦answer⟧"  # in the place of the model's answer, to find what the chat template writes after it


def converse(
    engine: Engine,
    pool: GradingPool,
    tokenizer,
    cfg: Config,
    rows: list[dict],
    prompts: list[list[int]],
    seeds: list[int],
    n: int,
    sampling: RolloutConfig | EvalConfig,
    max_tokens: int,
) -> Iterator[tuple[int, list[Completion]]]:
    """Like Engine.generate, but whole conversations: yield (prompt's number, its `n`) as the last of them ends.

    `pool` calls the function of rollout.turns; `rows`: of the data, one a prompt. `max_tokens` is for all tokens of a
    response, the environment's too. A conversation depends on prompt, seed, its number of the `n`, and what the
    environment says. Its `told` has the texts by model, environment, model, ... as "turns", and the "state" that the
    function left.
    """
    rollout = cfg.rollout
    is_first = dist.get_rank() % rollout.tp == 0
    talks = [[Completion([], [], False, told={"turns": [], "state": {}}) for _ in range(n)] for _ in prompts]
    asked = [[(p, i) for i in range(n)] for p in range(len(prompts))]  # the conversations that a request samples for
    answers = engine.generate(prompts, seeds, n, sampling, max_tokens)
    waiting = set(range(len(prompts)))  # prompts with living conversations
    for turn in range(1, rollout.max_turns + 1):
        spoken, calls = [], Ledger()
        for number, completions in answers:
            texts = tokenizer.batch_decode([c.ids for c in completions], skip_special_tokens=True)
            for (p, i), answer, text in zip(asked[number], completions, texts, strict=True):
                talk = talks[p][i]
                append(talk, answer.ids, answer.logps, text)
                talk.routes = answer.routes  # of all tokens up to here
                talk.finished = answer.finished
                if answer.finished:
                    spoken.append((p, i))
                    if is_first:  # while the engine works on the other answers
                        pool.submit_turn(calls, rollout.turns, text, rows[p], talk.told["state"])
        outcomes = of_first_rank(pool.wait(calls), rollout.tp)
        living = [
            (p, i)
            for (p, i), outcome in zip(spoken, outcomes, strict=True)
            if reply(talks[p][i], outcome, turn < rollout.max_turns, max_tokens, tokenizer, cfg.data)
        ]
        for p in sorted(waiting - {p for p, _ in living}):
            waiting.remove(p)
            yield p, talks[p]
        if not living:
            return
        asked = [[place] for place in living]
        answers = engine.generate(
            [prompts[p] + talks[p][i].ids for p, i in living],
            [turn_seed(seeds[p], i, turn) for p, i in living],
            1,
            sampling,
            [max_tokens - len(talks[p][i].ids) for p, i in living],
        )


def append(talk: Completion, ids: list[int], logps: list[float], text: str) -> None:
    """Add a turn to a conversation."""
    talk.ids, talk.logps = talk.ids + ids, talk.logps + logps
    talk.turns.append(len(ids))
    talk.told["turns"].append(text)


def reply(talk: Completion, outcome: Outcome, goes_on: bool, max_tokens: int, tokenizer, data: DataConfig) -> bool:
    """Take up what the environment said to the last answer; returns whether the model is to answer again.

    A reply that leaves no room for one more token is dropped, and the conversation counts as cut off: a response ends
    with what the model sampled.
    """
    if outcome.status != "ok":
        talk.lost = replace(outcome, error=outcome.error and FAILED + outcome.error)
        return False
    text, talk.told["state"] = outcome.parts["reply"], outcome.parts["state"]
    if text is None or not goes_on:
        return False
    ids = reply_ids(text, talk.ids[-1], tokenizer, data)
    talk.finished = len(talk.ids) + len(ids) < max_tokens
    if talk.finished:
        append(talk, ids, [0.0] * len(ids), text)
    return talk.finished


def reply_ids(text: str, last: int, tokenizer, data) -> list[int]:
    """The token ids of an environment's text, after the model's end token `last`.

    Verbatim, or with data.chat_template as the user's next message: all that the template writes between the model's
    end token and its next answer. An end token that is not the template's stays, and the template's follows it.
    """
    if data.chat_template:
        messages = [("user", "?"), ("assistant", MARK), ("user", text)]
        chat = [{"role": role, "content": content} for role, content in messages]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **data.template_kwargs)
        _, found, text = whole.partition(MARK)
        if not found:
            raise ValueError(f"{TURNS}: the chat template leaves an assistant's message out, so no reply can follow it")
        text = text.removeprefix(tokenizer.decode([last]))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def turn_seed(seed: int, answer: int, turn: int) -> int:
    """Seed of what follows on the given turn of a prompt's answer; the prompt's own is that of all first turns."""
    return int(np.random.SeedSequence([seed, answer, turn]).generate_state(1)[0])


def of_first_rank(value: Any, tp: int) -> Any:
    """What the first of the `tp` ranks of an engine has, on each of them: only there functions are called."""
    if tp == 1:
        return value
    from vllm.distributed import get_tp_group

    values, group = [value], get_tp_group()
    dist.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
    return values[0]


def check(cfg: Config, tokenizer, row: dict) -> None:
    """See that there is such a function, that the tokenizer can write its replies, and that its results have a place in
    a row of the data. Raises ValueError."""
    if cfg.rollout.turns is None:
        return
    place = f"{TURNS}={cfg.rollout.turns}"
    function = user_code.load_function(TURNS, cfg.rollout.turns)
    if inspect.isclass(function):
        raise ValueError(f"{place}: a class; give a function, whose state is its third argument")
    try:
        inspect.signature(function).bind("text", {}, {})
    except TypeError as error:
        raise ValueError(f"{place}: {error}; it is called with (text, row, state)") from None
    taken = row.keys() & {"turns", "state"}
    if taken:
        raise ValueError(f"{place}: the data have a column {min(taken)!r}, where the reward would find what was said")
    try:
        reply_ids("1", 0, tokenizer, cfg.data)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"{place}: the chat template refuses a user's second message: {error}") from None
