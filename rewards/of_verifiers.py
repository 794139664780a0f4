"""Environments of verifiers (pip install verifiers==0.4.0): a taskset's rows, what its Env.run says, and its rewards.

data.custom, rollout.turns and reward.custom are rewards/of_verifiers.py:rows, :play and :score, and data.train is the
TOML file of docs/turns.md. At each turn Env.run starts again and hears the answers so far: it must repeat its words.
"""

import asyncio
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["Answers"]  # where verifiers looks for a harness


class Answers(vf.Harness[vf.HarnessConfig]):
    """Gives the answers in sampling.turns, the texts of model, environment, model, ..., in place of a program."""

    SUPPORTS_RESUME = APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Add the next answer to the trace. If none is left, raise if the conversation `goes_on`, else stop."""
        messages = opening(data)
        said = messages[-1].content
        turns = ctx.sampling.turns
        place = 2 * trace.num_turns  # of the next answer in `turns`
        if place and len(messages) != len(trace.messages) + 1:
            raise ValueError("the environment sent several messages at once; it may send one a turn")
        if 0 < place < len(turns) and said != turns[place - 1]:
            raise ValueError(f"after the same answers the environment said {turns[place - 1]!r} and then {said!r}")

        if place < len(turns):
            message = vf.AssistantMessage(content=turns[place])
            answer = vf.Response(id="", created=0, model=ctx.model, message=message, finish_reason="stop")
            vf.graph.prepare_turn(trace, messages).commit(answer)
        elif ctx.sampling.goes_on:
            trace.info["said"] = said
            raise vf.RolloutError("the next answer is not sampled yet")
        else:
            trace.stop("max_turns")

        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def opening(data: vf.TaskData) -> vf.Messages:
    """System prompt and prompt of a task."""
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
    return [vf.SystemMessage(content=data.system_prompt), *prompt] if data.system_prompt else prompt


@functools.cache
def served(file: str) -> tuple[asyncio.Runner, vf.Env, vf.Taskset]:
    """The event loop of a TOML file's environment, the environment, and its selected tasks."""
    settings = {"env": {}, "select": {}, **tomllib.loads(Path(file).read_text())}
    agents = [name for name, value in vf.resolve_env_config(settings["env"]) if isinstance(value, vf.AgentConfig)]
    if len(agents) != 1:
        raise ValueError(f"{file}: it has the agents {', '.join(agents)}; it must have one, which is trained")

    agent = {**settings["env"].get(agents[0], {}), "harness": {"id": "of_verifiers"}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({**settings["env"], agents[0]: agent}))
    loop = asyncio.Runner()
    env.open = env.serving()  # kept in it, since what nothing refers to is closed
    loop.run(env.open.__aenter__())
    return loop, env, env.taskset.select(vf.SelectConfig(**settings["select"]))


def rows(file: str) -> Iterator[dict]:
    """Yield a row for each selected task. Raises ValueError if they have no end, or a hook that nothing here calls."""
    _, env, tasks = served(file)
    for task in tasks.shuffle():  # it refuses tasks without end
        if task.hooks("stop") or vf.utils.decorators.discover_decorated(task, "intercept"):
            raise ValueError(f"{file}: {type(task).__name__} has @stop or @intercept, which nothing calls here")
        row = {"answer": "", "source": env.config.env_id, "env": file, "task": task.data.model_dump(mode="json")}
        prompt = [message.model_dump() for message in opening(task.data)]
        if task.data.prompt is None:  # the environment speaks first
            prompt.append({"role": "user", "content": replay(row, [], goes_on=True)[0]})
        yield row | {"prompt": prompt if len(prompt) > 1 else prompt[0]["content"]}


def replay(row: dict, turns: list[str], goes_on: bool) -> tuple[str | None, dict[str, float]]:
    """(what the environment says next, {}), or at its end (None, rewards). Raises RuntimeError."""
    # Run the environment from its start, with the answers so far.
    loop, env, tasks = served(row["env"])
    kind = tasks.task_type()
    task = kind(kind.data_type().model_validate(row["task"]), tasks.config.task)
    sampling = vf.SamplingConfig(turns=turns, goes_on=goes_on)
    episode = loop.run(env.run_episode(task, vf.ModelContext("policy", vf.EvalClientConfig(), sampling)))

    for trace in episode.traces:
        if "said" in trace.info:
            return trace.info["said"], {}
    for part in (episode, *episode.traces):
        if part.errors:
            raise RuntimeError(part.errors[0].message)
    (trace,) = episode.traces
    return None, {name: reward.value for name, reward in trace.rewards.items()}


def play(text: str, row: dict, state: dict) -> str | None:
    """Reply as the environment does. At its end the state gets the rewards."""
    turns = [*state.get("turns", []), text]
    said, state["rewards"] = replay(row, turns, goes_on=True)
    state["turns"] = [*turns, said]
    return said


def score(text: str, answer: str, row: dict) -> dict[str, float]:
    """The rewards, each times its weight. If the conversation was cut off, it ends as after max_turns."""
    rewards = row.get("state", {}).get("rewards")
    if not rewards:
        _, rewards = replay(row, row.get("turns", [text]), goes_on=False)
    return rewards
