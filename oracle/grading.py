"""Rewards of recorded answers, computed anew by the functions that the configuration names."""

import inspect
import json
from collections.abc import Callable

import reward
from config import Config, RewardConfig
from grpo.parts.base import user_code
from grpo.parts.data.prompts import Prompt

ELSEWHERE = ("rewards/remote.py", "rewards/model.py")  # they need a service, or another model


def function_of(name: str, cfg: RewardConfig) -> Callable:
    """The reward of a name, with its options. ValueError where it cannot run here."""
    place = cfg.functions.get(name, cfg.custom if name == "custom" else name)
    if place.startswith(ELSEWHERE):
        raise ValueError(f"{place} needs more than this machine may have")
    function = reward.REWARDS.get(place) or user_code.load_function(f"reward {name}", place)
    options = cfg.options.get(name, {})
    call = function(**options) if inspect.isclass(function) else function
    options = {} if inspect.isclass(function) else options
    takes_ids = "response_ids" in inspect.signature(call).parameters

    def grade(text: str, answer, row: dict, ids: list[int]) -> dict:
        one_of = isinstance(answer, list) and function in reward.COMPARING
        texts = [str(one) for one in answer] if one_of else [answer if isinstance(answer, str) else json.dumps(answer)]
        given = options | ({"response_ids": ids} if takes_ids else {})
        value = max(call(text, one, row, **given) for one in texts)
        return value if isinstance(value, dict) else {"reward": value}

    return grade


class Grader:
    """Grades answers; `has_returned`: whether rewards can run here, as one has."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.functions: dict[str, Callable] = {}
        self.has_returned = False

    def parts(self, answer: dict, prompt: Prompt, turns: list[str], ended: bool) -> dict[str, float] | str:
        """The parts of the answer's reward, weighed; a text where the user's code raised, its last line.

        `turns`: the texts of model, environment, model, ...; `ended`: whether the last ended by itself.
        """
        spec = self.cfg.reward.by_source.get(answer["source"], self.cfg.reward.default)
        parts = {}
        try:
            row = json.loads(json.dumps(self.converse(prompt.row, turns[::2], ended), default=str))
            for reply, heard in zip(row["turns"][1::2] if self.cfg.rollout.turns else [], turns[1::2], strict=True):
                if "".join(reply.split()) not in "".join(heard.split()):  # with what the chat template adds
                    self.has_returned = True
                    return f"the environment says {reply!r}, its tokens {heard!r}"
            for name, weight in ({spec: 1.0} if isinstance(spec, str) else spec).items():
                if name not in self.functions:
                    self.functions[name] = function_of(name, self.cfg.reward)
                found = self.functions[name](answer["text"], prompt.answer, row, answer["response_ids"])
                self.has_returned = True
                for part, value in found.items():
                    if not isinstance(spec, str):
                        part = name if part == "reward" else f"{name}/{part}"
                    if value is not None:
                        parts[str(part)] = weight * float(value)
        except Exception as error:  # of the user's code
            return user_code.last_line(error)
        return parts

    def converse(self, row: dict, said: list[str], ended: bool) -> dict:
        """The row that the reward of a conversation gets: with its turns and its state."""
        if self.cfg.rollout.turns is None:
            return row
        environment = user_code.load_function("rollout.turns", self.cfg.rollout.turns)
        *before, last = said
        turns, state = [], {}
        for text in before:
            turns += [text, environment(text, row, state)]
        if ended:  # it is asked for the last time, and what it says is dropped
            environment(last, row, state)
        return row | {"turns": [*turns, last], "state": state}
