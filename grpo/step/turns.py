"""Multi-turn rollouts: an environment, such as a tool or a game, replies to the model's answers (docs/turns.md).

Each turn is sampled from the ids of prompt and response so far: what vLLM sampled is never tokenised again.
"""

import inspect
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from config import Config, EvalConfig, RolloutConfig
from grpo.parts.base import user_code
from grpo.parts.data.ends import after_answer
from grpo.parts.data.tokens import check_ids, own_options
from grpo.step.grading import TURNS, GradingPool, Outcome
from grpo.step.records import REPLAYED
from rollout import Completion, Engine, Trace

FAILED = f"{TURNS} failed: "  # how the error of a sample begins whose environment failed


class Talk(NamedTuple):
    """A conversation: the number of its prompt, its number among the prompt's, and what was said."""

    prompt: int
    number: int
    said: Completion  # its trace has the columns "turns", texts of model, environment, model, ..., and "state"

    def add(self, ids: list[int], logps: list[float], text):
        self.said.ids = self.said.ids + ids
        self.said.logps = self.said.logps + logps
        self.said.trace.turns.append(len(ids))
        self.said.trace.columns["turns"].append(text)


@dataclass
class Conversations:
    """Whole conversations, each a function of prompt, seed, number and replies; `generate` replaces the engine's."""

    engine: Engine
    pool: GradingPool  # calls the function of rollout.turns
    inputs: Any  # grpo.run.inputs.Inputs: tokenizer, vocab_size
    cfg: Config
    rows: list[dict]  # the data row of each prompt

    def generate(
        self, prompts: list[list[int]], seeds: list[int], n, sampling: RolloutConfig | EvalConfig, max_tokens
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (number of the prompt, its `n` conversations of at most `max_tokens`) once all of them have ended.

        Each goes on as soon as its reply is there, while the engine samples the answers of others.
        """
        talks = []
        for p in range(len(prompts)):
            for i in range(n):
                said = Completion([], [], False, Trace(columns={"turns": [], "state": {}}))
                talks.append(Talk(p, i, said))

        active = {*range(len(talks))}  # numbers of the conversations that have not ended
        to_sample = [*range(len(talks))]  # those whose next answer is to be sampled
        calls = {}  # {number: call of the environment}, those that await a reply
        steps = self.engine.steps(sampling)
        while active:
            requests = []
            for number in to_sample:
                p, i, said = talks[number]
                seed = turn_seed(seeds[p], i, len(said.trace.turns) // 2)
                requests.append((number, prompts[p] + said.ids, seed, max_tokens - len(said.ids)))
            self.engine.ask(requests, 1, sampling)

            # An answer that ended by itself goes to the environment. One that was truncated ends its conversation.
            to_sample, ended = [], []
            for number, (answer,) in next(steps):
                self.add_answer(talks[number], answer)
                if answer.finished:
                    calls[number] = self.call(talks[number])
                else:
                    talks[number].said.trace.ended = "limit"
                    ended.append(number)

            for number, outcome in self.take_replies(calls, wait=len(calls) == len(active)):
                why_ended = self.reply(talks[number], outcome, max_tokens)
                talks[number].said.trace.ended = why_ended
                if why_ended:
                    ended.append(number)
                else:
                    to_sample.append(number)

            active -= {*ended}
            for p in sorted({talks[number].prompt for number in ended}):
                group = range(p * n, p * n + n)
                if active.isdisjoint(group):
                    yield p, [talks[number].said for number in group]

    def add_answer(self, talk, answer):
        talk.add(answer.ids, answer.logps, self.inputs.tokenizer.decode(answer.ids, skip_special_tokens=True))
        talk.said.finished = answer.finished
        trace = talk.said.trace
        trace.requests += answer.trace.requests
        for name, values in answer.trace.replay.items():
            before = trace.replay.get(name)
            trace.replay[name] = values if before is None else REPLAYED[name].join(before, values)

    def call(self, talk) -> Future | None:
        """Queue the environment's reply to the last answer; None on the engine's ranks that call no functions."""
        rollout, columns = self.cfg.rollout, talk.said.trace.columns
        if dist.get_rank() % rollout.tp:
            return None
        return self.pool.submit_turn(rollout.turns, columns["turns"][-1], self.rows[talk.prompt], columns["state"])

    def take_replies(self, calls: dict[int, Future | None], wait) -> list[tuple[int, Outcome]]:
        """Take the calls that are done out of `calls`, the same on all ranks of the engine; `wait` for one of them."""
        replies = []
        if dist.get_rank() % self.cfg.rollout.tp == 0:
            if wait:  # nothing is left to sample meanwhile
                futures.wait(calls.values(), return_when=futures.FIRST_COMPLETED)
            replies = [(number, call.result()) for number, call in calls.items() if call.done()]
        if calls:
            replies = broadcast_in_engine(replies, self.cfg.rollout.tp)
        for number, _ in replies:
            del calls[number]
        return replies

    def reply(self, talk, outcome, max_tokens):
        """Add the environment's reply to the last answer. Returns why the conversation ends; "" if it goes on."""
        said, trace = talk.said, talk.said.trace
        if outcome.status != "ok":
            error = FAILED + outcome.error if outcome.error else ""
            trace.failure = replace(outcome, error=error)
            return outcome.status

        text = outcome.parts["reply"]
        trace.columns["state"] = outcome.parts["state"]
        if text is None:
            return "done"
        if len(trace.turns[::2]) == self.cfg.rollout.max_turns:
            return "max_turns"

        data = own_options(self.rows[talk.prompt], self.cfg.data)
        ids = reply_ids(text, said.ids[-1], self.inputs.tokenizer, data)
        try:
            check_ids("its reply", ids, self.inputs.tokenizer, self.inputs.vocab_size)
        except ValueError as error:
            trace.failure = Outcome(status="error", error=f"{FAILED}{error}")
            return "error"

        said.finished = len(said.ids) + len(ids) < max_tokens  # there is room for one more token, of the model
        if not said.finished:
            return "limit"
        talk.add(ids, [0.0] * len(ids), text)
        return ""


def reply_ids(text, last, tokenizer, data) -> list[int]:
    """The token ids of an environment's text, or with data.chat_template of the user's next message, after `last`.

    Where `last`, the token that ended the answer, is not the template's end token, the template's follows it.
    """
    if data.chat_template:
        text = after_answer(tokenizer, data, text).removeprefix(tokenizer.decode([last]))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def turn_seed(seed, answer, turn):
    """Seed of a turn of a prompt's answer."""
    if turn == 0:
        return seed + answer  # as vLLM seeds several answers to a prompt
    return int(np.random.SeedSequence([seed, answer, turn]).generate_state(1)[0])


def broadcast_in_engine(value, tp):
    """The value of the first of an engine's `tp` ranks, on each of them; only the first rank calls functions."""
    if tp == 1:
        return value
    from vllm.distributed import get_tp_group

    values = [value]
    group = get_tp_group()
    dist.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
    return values[0]


def check(cfg, tokenizer, vocab_size, row: dict):
    """ValueError unless rollout.turns exists, model and template hold its replies, and the data lacks its columns."""
    if cfg.rollout.turns is None:
        return
    place = f"{TURNS}={cfg.rollout.turns}"

    function = user_code.load_function(TURNS, cfg.rollout.turns)
    try:
        inspect.signature(function).bind("text", {}, {})
    except TypeError as error:
        raise ValueError(f"{place}: {error}; it is called with (text, row, state)") from None

    taken = row.keys() & {"turns", "state"}
    if taken:
        raise ValueError(f"{place}: the data have a column {min(taken)!r}, a name of the conversation; rename it")

    try:
        ids = reply_ids("1", 0, tokenizer, own_options(row, cfg.data))
    except Exception as error:  # a template fails as code does, with any exception
        raise ValueError(f"{place}: the chat template refuses a user's second message: {error}") from None
    check_ids(f"{place}: a reply", ids, tokenizer, vocab_size)
