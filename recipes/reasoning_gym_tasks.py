"""Train on any generator of reasoning-gym (pip install reasoning-gym), whose own scores are the reward.

    torchrun --nproc_per_node=2 train_grpo.py --config configs/smollm2.yaml \
        data.custom=recipes/reasoning_gym_tasks.py:rows data.train=chain_sum:500:0:max_terms=2,max_digits=1 \
        reward.default=custom reward.custom=recipes/reasoning_gym_tasks.py:score data.eval=gcd:64:1:max_value=20

A name in data.train and data.eval is GENERATOR:ROWS:SEED, or GENERATOR:ROWS:SEED:OPTION=NUMBER,... The score is that of
the text in <answer> tags; without tags, of the last number if the right answer is a number, else of the whole text.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache

import reasoning_gym
from reasoning_gym.utils import extract_answer

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@lru_cache
def data_set(name: str):
    """The data set of a name; the same entries in every process."""
    generator, size, seed, *options = re.split("[:,]", name)
    settings = {key: json.loads(value) for key, value in (option.split("=") for option in options)}
    return reasoning_gym.create_dataset(generator, size=int(size), seed=int(seed), **settings)


def rows(name: str) -> Iterator[dict]:
    """Rows for data.custom; `source` separates the generators in the metrics."""
    for n, entry in enumerate(data_set(name)):
        yield dict(prompt=entry["question"], answer=str(entry["answer"]), source=name.split(":")[0], name=name, n=n)


def score(text: str, answer: str, row: dict) -> float:
    """The generator's score of an answer, 0 to 1."""
    numbers = NUMBER.findall(text) if NUMBER.fullmatch(answer) else []
    found = extract_answer(text) or (numbers or [text.strip()])[-1]
    return float(data_set(row["name"]).score_answer(found, data_set(row["name"])[row["n"]]))
