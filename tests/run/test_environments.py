"""Environments of reasoning-gym and verifiers, which only these tests install: bad input, and runs that learn."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import REPO

pytestmark = pytest.mark.slow

GUESS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int

class Guess(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace):
        return trace.last_reply == str(self.data.number) or self.config.wrong

    @vf.reward
    async def guesses(self, trace):
        return sum(message.content.isdigit() for message in trace.assistant_messages) / 10

class TaskConfig(vf.TaskConfig):
    wrong: object = 0
    says: object = "+"

class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()

class Numbers(vf.Taskset[Guess, Config]):
    def load(self):
        return [Guess(Data(prompt=">", number=number), self.config.task) for number in (1, 2, 3)]

class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class HigherOrLower(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            answer = await interaction.turn()
            while answer.last_reply.isdigit() and answer.last_reply != str(task.data.number):
                says = task.config.says if int(answer.last_reply) < task.data.number else "-"
                answer = await interaction.turn(says)

__all__ = ["Numbers", "HigherOrLower"]
"""


TALK = """
import json, sys
from of_verifiers import play, score

for file, *answers in json.loads(sys.argv[1]):
    row, state = {"env": file, "task": {"prompt": ">", "number": 3}}, {}
    try:
        replies = [play(answer, row, state) for answer in answers]
        print(json.dumps([replies, score("", "", {**row, "state": state, "turns": state["turns"][:-1]})]))
    except RuntimeError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The PYTHONPATH with both libraries, what they need beside our environment, and the taskset above."""
    folder = tmp_path_factory.mktemp("environments")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin/python"]
    subprocess.run([*pip, "install", "reasoning-gym==0.1.25", "verifiers==0.4.0"], check=True)
    (site / "guess.py").write_text(GUESS)
    return f"{REPO}:{REPO / 'rewards'}:{site}"


def python(path, *arguments):
    settings = {"cwd": REPO, "env": {**os.environ, "PYTHONPATH": path}, "text": True}
    return subprocess.run([sys.executable, *arguments], capture_output=True, **settings)


@pytest.mark.parametrize("task", ["rearc", "knights_knaves"])
def test_puzzles_have_the_score_of_their_task(path, task):
    """The scorer of rearc compares tuples: as lists, its own answers have 0.05. knights_knaves has texts of numpy."""
    row = json.loads(python(path, "rewards/of_reasoning_gym.py", task, '{"size": 1}').stdout)
    texts = [f"<answer>{row['answer']}</answer>", row["answer"]]
    code = f"from of_reasoning_gym import score; print([score(text, '', {row!r}) for text in {texts!r}])"
    assert python(path, "-c", code).stdout == "[1.0, 0.0]\n"
    said = python(path, "rewards/of_reasoning_gym.py", "chainsum").stderr
    assert said.startswith("reasoning-gym has no task 'chainsum'; the nearest are chain_sum,") and said.count("\n") == 1


def test_a_conversation_is_that_of_the_environment(path, tmp_path):
    """Its rewards at the end and where it was cut off, and a line for what is no text and no number."""
    files = []
    for number, settings in enumerate(("", "says = 3", 'wrong = "no"')):
        files.append(f"{tmp_path}/{number}.toml")
        Path(files[-1]).write_text(f'[env]\ntaskset = {{id = "guess", task = {{{settings}}}}}\n')
    talks = [(files[0], "1", "5", "3"), (files[0], "1", "5"), (files[1], "1"), (files[2], "x")]
    found = python(path, "-c", TALK, json.dumps(talks))
    assert list(map(json.loads, found.stdout.splitlines())) == [
        [["+", "-", None], {"guesses": 0.3, "right": 2.0}],
        [["+", "-"], {"guesses": 0.2, "right": 0.0}],
        "HigherOrLower.run(): TypeError: 'int' object is not iterable",
        "task Guess scoring: ValueError: could not convert string to float: 'no'",
    ], found.stderr


GYM = ("reward.custom=rewards/of_reasoning_gym.py:score", 'reward.options.custom={tag: ""}', "data.max_prompt_tokens=8")
VERIFIERS = (
    "data.custom=rewards/of_verifiers.py:rows", "rollout.turns=rewards/of_verifiers.py:play",
    "reward.custom=rewards/of_verifiers.py:score",
)  # fmt: skip


@pytest.mark.parametrize("config, data, keys", [("tiny", "rows.jsonl", GYM), ("tiny_turns", "env.toml", VERIFIERS)])
def test_the_reward_of_a_run_rises(config, data, keys, path, start, tmp_path):
    """In 20 steps: the model copies a digit; it learns to guess digits, and to guess again."""
    digits = '{"size": 100, "min_terms": 1, "max_terms": 1, "max_digits": 1}'
    rows = python(path, "rewards/of_reasoning_gym.py", "chain_sum", digits).stdout
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "env.toml").write_text('[env]\ntaskset = {id = "guess"}\n')
    run = start(2, f"data.train={tmp_path / data}", *keys, "train.steps=20", config=config, PYTHONPATH=path)
    assert run.process.wait(600) == 0, run.text
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
