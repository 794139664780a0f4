"""Multi-turn rollouts: an environment, such as a tool or a game, replies to the model's answers (docs/turns.md).

Each turn is sampled from the ids of prompt and response so far: what vLLM sampled is never tokenised again.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from config import Config, EvalConfig, RolloutConfig
from rollout import Completion, Engine
from support.base import user_code
from support.data.ends import after_answer
from support.data.tokens import check_ids, missing_row
from support.step.grading import TURNS, GradingPool, Outcome

FAILED = f"{TURNS} failed: "  # how the error of a sample begins whose environment failed


class Talk(NamedTuple):
    """A conversation: the number of its prompt, its number among the prompt's, and what was said."""

    prompt: int
    number: int
    said: Completion  # with the columns "turns", texts of model, environment, model, ..., and "state"

    def add(self, ids: list[int], logps: list[float], text: str) -> None:
        self.said.ids = self.said.ids + ids
        self.said.logps = self.said.logps + logps
        self.said.turns.append(len(ids))
        self.said.columns["turns"].append(text)


@dataclass
class Conversations:
    """Whole conversations, each a function of prompt, seed, number and replies; `generate` replaces the engine's."""

    engine: Engine
    pool: GradingPool  # calls the function of rollout.turns
    inputs: Any  # support.run.inputs.Inputs: tokenizer, vocab_size
    cfg: Config
    rows: list[dict]  # the data row of each prompt

    def generate(
        self, prompts: list[list[int]], seeds: list[int], n: int, sampling: RolloutConfig | EvalConfig, max_tokens: int
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (number of the prompt, its `n` conversations of at most `max_tokens`) once all of them have ended."""
        talks = [
            [Talk(p, i, Completion([], [], False, columns={"turns": [], "state": {}})) for i in range(n)]
            for p in range(len(prompts))
        ]
        asked = talks  # to which conversations the engine's answers belong
        answers = self.engine.generate(prompts, seeds, n, sampling, max_tokens)
        unfinished = set(range(len(prompts)))  # prompts with active conversations
        for turn in range(1, self.cfg.rollout.max_turns + 1):
            budget = max_tokens if turn < self.cfg.rollout.max_turns else 0
            active = [talk for talk, outcome in self.take_answers(answers, asked) if self.reply(talk, outcome, budget)]
            for p in sorted(unfinished - {talk.prompt for talk in active}):
                unfinished.remove(p)
                yield p, [talk.said for talk in talks[p]]
            if not active:
                return
            asked = [[talk] for talk in active]
            answers = self.engine.generate(
                [prompts[talk.prompt] + talk.said.ids for talk in active],
                [turn_seed(seeds[talk.prompt], talk.number, turn) for talk in active],
                1,
                sampling,
                [max_tokens - len(talk.said.ids) for talk in active],
            )

    def take_answers(self, answers: Iterator, asked: list[list[Talk]]) -> list[tuple[Talk, Outcome]]:
        """Add the engine's answers to their conversations; what the environment says to those that are complete."""
        rollout = self.cfg.rollout
        is_first = dist.get_rank() % rollout.tp == 0
        answered = []
        calls = []
        for number, completions in answers:
            texts = self.inputs.tokenizer.batch_decode([c.ids for c in completions], skip_special_tokens=True)
            for talk, answer, text in zip(asked[number], completions, texts, strict=True):
                talk.add(answer.ids, answer.logps, text)
                talk.said.routes = answer.routes  # of all tokens up to here
                talk.said.finished = answer.finished
                talk.said.sampling += answer.sampling
                if answer.finished:
                    answered.append(talk)
                    if is_first:  # while the engine samples the other answers
                        state = talk.said.columns["state"]
                        calls.append(self.pool.submit_turn(rollout.turns, text, self.rows[talk.prompt], state))
        outcomes = broadcast_in_engine([call.result() for call in calls], rollout.tp)
        return list(zip(answered, outcomes, strict=True))

    def reply(self, talk: Talk, outcome: Outcome, budget: int) -> bool:
        """Add the environment's reply to the last answer; returns whether the model goes on. Budget 0: last turn."""
        said = talk.said
        if outcome.status != "ok":
            error = FAILED + outcome.error if outcome.error else ""
            said.failure = replace(outcome, error=error)
            return False
        text = outcome.parts["reply"]
        said.columns["state"] = outcome.parts["state"]
        if text is None or not budget:
            return False
        ids = reply_ids(text, said.ids[-1], self.inputs.tokenizer, self.cfg.data)
        problem = missing_row("its reply", ids, self.inputs.tokenizer, self.inputs.vocab_size)
        if problem:
            said.failure = Outcome(status="error", error=FAILED + problem)
            return False
        said.finished = len(said.ids) + len(ids) < budget  # there is room for one more token, of the model
        if said.finished:
            talk.add(ids, [0.0] * len(ids), text)
        return said.finished


def reply_ids(text: str, last: int, tokenizer, data) -> list[int]:
    """The token ids of an environment's text, or with data.chat_template of the user's next message, after `last`.

    Where `last`, the token that ended the answer, is not the template's end token, the template's follows it.
    """
    if data.chat_template:
        text = after_answer(tokenizer, data, text).removeprefix(tokenizer.decode([last]))
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


def check(cfg: Config, tokenizer, vocab_size: int, row: dict) -> None:
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
        ids = reply_ids("1", 0, tokenizer, cfg.data)
    except Exception as error:  # a template fails as code does, with any exception
        raise ValueError(f"{place}: the chat template refuses a user's second message: {error}") from None
    check_ids(f"{place}: a reply", ids, tokenizer, vocab_size)
