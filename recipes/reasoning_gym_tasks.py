"""Train on any generator of reasoning-gym (pip install reasoning-gym), whose own scores are the reward.

    torchrun --nproc_per_node=2 train_grpo.py --config configs/smollm2.yaml data.max_prompt_tokens=512 \
        data.custom=recipes/reasoning_gym_tasks.py:rows data.train=chain_sum:500:0 data.eval=chain_sum:64:1 \
        reward.default=custom reward.custom=recipes/reasoning_gym_tasks.py:score

A name in data.train and data.eval is GENERATOR:ROWS:SEED. What stands in <answer> tags is scored, else the whole text,
of which most generators score a part if it contains the right answer.
"""

from collections.abc import Iterator
from functools import lru_cache

import reasoning_gym
from reasoning_gym.utils import extract_answer


@lru_cache
def data_set(name: str):
    """The data set of GENERATOR:ROWS:SEED; the same entries in every process."""
    generator, size, seed = name.split(":")
    return reasoning_gym.create_dataset(generator, size=int(size), seed=int(seed))


def rows(name: str) -> Iterator[dict]:
    """Rows for data.custom; `source` separates the generators in the metrics."""
    for number, entry in enumerate(data_set(name)):
        source = name.partition(":")[0]
        yield {"prompt": entry["question"], "answer": str(entry["answer"]), "source": source, "name": name, "n": number}


def score(text: str, answer: str, row: dict) -> float:
    """The generator's score of an answer, 0 to 1."""
    found = extract_answer(text) or text.strip()
    return float(data_set(row["name"]).score_answer(found, data_set(row["name"])[row["n"]]))
