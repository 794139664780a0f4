"""Environments of reasoning-gym and verifiers, which only these tests install: bad input, and runs that learn."""

import json
import subprocess
import sys
import sysconfig
from contextlib import closing

import pytest

from tests.conftest import REPO
from tests.pools import grade, grade_with, pool_of

pytestmark = pytest.mark.slow

LIBRARIES = ("reasoning-gym==0.1.25", "verifiers==0.4.0")
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


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """The PYTHONPATH with both libraries, what they need beside our environment, and the taskset above."""
    folder = tmp_path_factory.mktemp("environments")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", folder / "bin/python"]
    subprocess.run([*pip, "install", *LIBRARIES], check=True)
    (site / "guess.py").write_text(GUESS)
    return f"{REPO}:{site}"


def puzzles(path: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "rewards/of_reasoning_gym.py", *arguments]
    return subprocess.run(command, cwd=REPO, env={"PYTHONPATH": path}, capture_output=True, text=True)


def test_puzzles_have_the_score_of_their_task(path, monkeypatch):
    """The scorer of rearc compares tuples, and gives its right answer 0.05 where they are lists."""
    monkeypatch.setenv("PYTHONPATH", path)
    row = json.loads(puzzles(path, "rearc", '{"size": 1}').stdout)
    texts = (f"<answer>{row['answer']}</answer>", row["answer"])
    jobs = [("", text, "", row) for text in texts]
    right, untagged = grade_with("custom", jobs, custom="rewards/of_reasoning_gym.py:score")
    assert right.parts == {"reward": 1.0} and untagged.parts == {"reward": 0.0}
    said = puzzles(path, "chainsum").stderr
    assert said.startswith("reasoning-gym has no task 'chainsum'; the nearest are chain_sum,") and said.count("\n") == 1


def test_a_conversation_is_that_of_the_environment(path, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", path)

    def talk(settings: str, *answers: str) -> list:
        """The replies to the answers, by their errors where they fail, and the outcome of the reward."""
        (tmp_path / "guess.toml").write_text(f'[env]\ntaskset = {{id = "guess", task = {{{settings}}}}}\n')
        row = {"env": str(tmp_path / "guess.toml"), "task": {"prompt": ">", "number": 3}, "turns": []}
        found, state = [], {}
        with closing(pool_of("custom", custom="rewards/of_verifiers.py:score")) as pool:
            for text in answers:
                outcome = pool.submit_turn("rewards/of_verifiers.py:play", text, row, state).result()
                found.append(outcome.parts.get("reply", outcome.error))
                row["turns"] += [text, found[-1]]
                state = outcome.parts.get("state", {})
            return [*found, *grade(pool, [("", "", "", row | {"turns": row["turns"][:-1], "state": state})])]

    *replies, outcome = talk("", "1", "5", "3")
    assert replies == ["+", "-", None] and outcome.parts == {"right": 2.0, "guesses": pytest.approx(0.3)}
    *_, outcome = talk("", "1", "5")  # cut off: what verifiers gives at max_turns
    assert outcome.parts == {"right": 0.0, "guesses": pytest.approx(0.2)}
    reply, _ = talk("says = 3", "1")
    assert "HigherOrLower.run(): TypeError: 'int' object" in reply
    reply, _ = talk('says = [{role = "user", content = [{type = "text", text = "+"}]}]', "1")
    assert "it returned a list; legal are a text and None" in reply
    *_, outcome = talk('wrong = "no"', "x")
    assert "task Guess scoring: ValueError: could not convert string to float: 'no'" in outcome.error


GYM = ("reward.custom=rewards/of_reasoning_gym.py:score", 'reward.options.custom={tag: ""}', "data.max_prompt_tokens=8")
VERIFIERS = (
    "data.custom=rewards/of_verifiers.py:rows", "rollout.turns=rewards/of_verifiers.py:play",
    "reward.custom=rewards/of_verifiers.py:score",
)  # fmt: skip


@pytest.mark.parametrize(("config", "keys"), [("tiny", GYM), ("tiny_turns", VERIFIERS)], ids=["gym", "verifiers"])
def test_the_reward_of_a_run_rises(config, keys, path, start, tmp_path):
    rows = puzzles(path, "chain_sum", '{"size": 100, "min_terms": 1, "max_terms": 1, "max_digits": 1}').stdout
    (tmp_path / "one.jsonl").write_text(rows)
    (tmp_path / "guess.toml").write_text('[env]\ntaskset = {id = "guess"}\n')
    data = tmp_path / {"tiny": "one.jsonl", "tiny_turns": "guess.toml"}[config]
    run = start(2, f"data.train={data}", *keys, "train.steps=20", config=config, PYTHONPATH=path)
    assert run.process.wait(600) == 0, run.text
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
