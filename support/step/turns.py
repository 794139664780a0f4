"""Multi-turn rollouts: an environment, such as a tool or a game, replies to the model's answers.

A conversation ends when the environment ends it, or the token budget. Each turn is sampled from the ids of prompt and
response so far, so what vLLM sampled is never decoded and tokenised again. All active conversations of an engine take
their turns in one batch. docs/turns.md is for users.
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
from support.base import user_code
from support.step.grading import TURNS, GradingPool, Outcome

FAILED = f"{TURNS} failed: "  # how the error of a sample begins whose environment failed
MARK = "⟦answer⟧"  # stands for the model's answer, to find what the chat template writes after it


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
    """Engine.generate for whole conversations: yields (number of the prompt, its `n`) once all `n` have ended.

    `pool` calls the function of rollout.turns; `rows` has the data row of each prompt. `max_tokens` bounds a response
    with the environment's tokens. A conversation is a function of prompt, seed, its number among the `n`, and the
    environment's replies. Its `columns` are "turns", the texts of model, environment, model, ..., and "state", as the
    function left it.
    """
    rollout = cfg.rollout
    is_first = dist.get_rank() % rollout.tp == 0
    conversations = [[Completion([], [], False, columns={"turns": [], "state": {}}) for _ in range(n)] for _ in prompts]
    requests = [[(p, i) for i in range(n)] for p in range(len(prompts))]  # (prompt, number) that each one samples for
    answers = engine.generate(prompts, seeds, n, sampling, max_tokens)
    unfinished = set(range(len(prompts)))  # prompts with active conversations
    for turn in range(1, rollout.max_turns + 1):
        answered = []  # conversations whose last answer the environment gets
        calls = []
        for number, completions in answers:
            texts = tokenizer.batch_decode([c.ids for c in completions], skip_special_tokens=True)
            for (p, i), answer, text in zip(requests[number], completions, texts, strict=True):
                conversation = conversations[p][i]
                append_turn(conversation, answer.ids, answer.logps, text)
                conversation.routes = answer.routes  # of all tokens up to here
                conversation.finished = answer.finished
                if answer.finished:
                    answered.append((p, i))
                    if is_first:  # while the engine samples the other answers
                        state = conversation.columns["state"]
                        calls.append(pool.submit_turn(rollout.turns, text, rows[p], state))
        outcomes = broadcast_in_engine([call.result() for call in calls], rollout.tp)
        active = [
            (p, i)
            for (p, i), outcome in zip(answered, outcomes, strict=True)
            if apply_reply(conversations[p][i], outcome, turn < rollout.max_turns, max_tokens, tokenizer, cfg.data)
        ]
        for p in sorted(unfinished - {p for p, _ in active}):
            unfinished.remove(p)
            yield p, conversations[p]
        if not active:
            return
        requests = [[place] for place in active]
        answers = engine.generate(
            [prompts[p] + conversations[p][i].ids for p, i in active],
            [turn_seed(seeds[p], i, turn) for p, i in active],
            1,
            sampling,
            [max_tokens - len(conversations[p][i].ids) for p, i in active],
        )


def append_turn(conversation: Completion, ids: list[int], logps: list[float], text: str) -> None:
    """Add a turn to a conversation."""
    conversation.ids = conversation.ids + ids
    conversation.logps = conversation.logps + logps
    conversation.turns.append(len(ids))
    conversation.columns["turns"].append(text)


def apply_reply(
    conversation: Completion, outcome: Outcome, may_continue: bool, max_tokens: int, tokenizer, data: DataConfig
) -> bool:
    """Add the environment's reply to the last answer; returns whether the model answers again.

    A reply that leaves no room for one more token is dropped, since a response ends with a token of the model, and the
    conversation counts as truncated.
    """
    if outcome.status != "ok":
        error = FAILED + outcome.error if outcome.error else ""
        conversation.failure = replace(outcome, error=error, graded=None)  # it is of the last turn, not of the answer
        return False
    text = outcome.parts["reply"]
    conversation.columns["state"] = outcome.parts["state"]
    if text is None or not may_continue:
        return False
    ids = reply_ids(text, conversation.ids[-1], tokenizer, data)
    conversation.finished = len(conversation.ids) + len(ids) < max_tokens
    if conversation.finished:
        append_turn(conversation, ids, [0.0] * len(ids), text)
    return conversation.finished


def reply_ids(text: str, last: int, tokenizer, data) -> list[int]:
    """The token ids of an environment's text, after the model's end token `last`.

    The text is verbatim, or with data.chat_template the user's next message: all that the template writes between the
    model's end token and its next answer. Where `last` is not the template's end token, the template's follows it.
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
    """Seed of the turn after `turn`, of a prompt's answer; the first turn has the prompt's own `seed`."""
    return int(np.random.SeedSequence([seed, answer, turn]).generate_state(1)[0])


def broadcast_in_engine(value: Any, tp: int) -> Any:
    """The value of the first of an engine's `tp` ranks, on each of them; only the first rank calls functions."""
    if tp == 1:
        return value
    from vllm.distributed import get_tp_group

    values = [value]
    group = get_tp_group()
    dist.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
    return values[0]


def check(cfg: Config, tokenizer, row: dict) -> None:
    """Check that the function of rollout.turns exists, that the chat template can hold its replies, and that the data
    have no columns of the names that it adds. Raises ValueError.
    """
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
        raise ValueError(f"{place}: the data have a column {min(taken)!r}, a name of the conversation; rename it")
    try:
        reply_ids("1", 0, tokenizer, cfg.data)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"{place}: the chat template refuses a user's second message: {error}") from None
