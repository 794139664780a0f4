"""Rewards of recorded answers, computed anew by the functions that the configuration names."""

import inspect
import json
from pathlib import Path

import reward
from grpo.parts.base import user_code

ELSEWHERE = ("rewards/remote.py", "rewards/model.py")  # they need a service, or another model


class Grader:
    """Grades answers. `has_returned` says whether rewards can run here, as one has."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.functions = {}
        self.has_returned = False

    def parts(self, answer, prompt, turns, ended):
        """The weighted parts of the answer's reward, or the last line of an error that the user's code raised; and what
        the environment replies to the last turn.

        `turns` are the texts of model, environment, model, ..., and `ended` says whether the last ended by itself.
        """
        try:
            row, reply = self.converse(prompt.row, turns[::2], ended)
            row = json.loads(json.dumps(row, default=str))
            if self.cfg.rollout.turns:
                # The tokens have, besides, what the chat template adds.
                for said, tokens in zip(row["turns"][1::2], turns[1::2], strict=False):
                    if said is None or "".join(said.split()) not in "".join(tokens.split()):
                        self.has_returned = True
                        return f"the environment replies {said!r}, its tokens are {tokens!r}", None

            spec = self.cfg.reward.by_source.get(answer["source"], self.cfg.reward.default)
            if isinstance(spec, str):
                return self.grade(spec, answer, prompt, row), reply
            parts = {}
            for name, weight in spec.items():
                for part, value in self.grade(name, answer, prompt, row).items():
                    parts[name if part == "reward" else f"{name}/{part}"] = weight * value
            return parts, reply
        except Exception as error:  # of the user's code
            return user_code.last_line(error), None

    def grade(self, name, answer, prompt, row):
        """The parts that one reward function gives, without parts of None."""
        if name not in self.functions:
            self.functions[name] = function_of(name, self.cfg.reward)
        found = self.functions[name](answer["text"], prompt.answer, row, answer["response_ids"])
        self.has_returned = True
        return {str(part): float(value) for part, value in found.items() if value is not None}

    def converse(self, row, said, ended):
        """The row that the reward of a conversation gets, with its turns and its state; the reply to the last turn."""
        if self.cfg.rollout.turns is None:
            return row, None
        environment = user_code.load_function("rollout.turns", self.cfg.rollout.turns)
        *before, last = said
        turns = []
        state = {}
        for text in before:
            turns += [text, environment(text, row, state)]
            if turns[-1] is None:  # it ends a conversation that goes on in the run
                return row | {"turns": turns, "state": state}, None
        reply = environment(last, row, state) if ended else None  # it hears the last turn too
        return row | {"turns": [*turns, last], "state": state}, reply


def function_of(name, cfg):
    """The reward of a name, with its options. ValueError where it cannot run here."""
    place = cfg.functions.get(name, cfg.custom if name == "custom" else name)
    if "/".join(Path(place.rpartition(":")[0]).parts[-2:]) in ELSEWHERE:
        raise ValueError(f"{place} needs more than this machine may have")
    function = reward.REWARDS.get(place) or user_code.load_function(f"reward {name}", place)

    # A class takes its options once, a function at each call.
    call = function
    options = cfg.options.get(name, {})
    if inspect.isclass(function):
        call = function(**options)
        options = {}
    takes_ids = "response_ids" in inspect.signature(call).parameters

    def grade(text, answer, row, ids):
        texts = [answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)]
        if isinstance(answer, list) and function in reward.COMPARING:  # any of them is right
            texts = [str(one) for one in answer]
        more = {"response_ids": ids} if takes_ids else {}
        value = max(call(text, one, row, **options, **more) for one in texts)
        return value if isinstance(value, dict) else {"reward": value}

    return grade
