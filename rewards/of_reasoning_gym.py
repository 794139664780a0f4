"""Puzzles of reasoning-gym (pip install reasoning-gym==0.1.25): rows of a task, and its scorer as a reward.

    python rewards/of_reasoning_gym.py chain_sum '{"size": 1000, "max_terms": 3}' >rows.jsonl
    torchrun ... data.train=rows.jsonl reward.default=custom reward.custom=rewards/of_reasoning_gym.py:score

Rows are written once, since some tasks (word_ladder and five more in 0.1.25) make other puzzles in each process.
"""

import ast
import difflib
import functools
import json
import sys
from collections.abc import Iterator

import numpy
import reasoning_gym
from reasoning_gym.factory import DATASETS


def rows(task: str, config: str = "{}") -> Iterator[dict]:
    """Yield a row for each puzzle of a task, whose config, JSON, has these fields. Raises ValueError for no task."""
    for puzzle in dataset_of(task, config):
        with numpy.printoptions(legacy="1.25"):  # without it repr writes np.str_('x')
            text = repr(puzzle)
        yield {
            "prompt": puzzle["question"],
            "answer": str(puzzle["answer"]),
            "source": task,
            "config": config,
            "puzzle": text,  # the scorers of arc_agi and rearc need tuples, which JSON has not
        }


@functools.cache
def dataset_of(task: str, config: str):
    """The task's ProceduralDataset. Raises ValueError that names the nearest tasks."""
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=5, cutoff=0)
        raise ValueError(f"reasoning-gym has no task {task!r}; the nearest are {', '.join(near)}")
    return reasoning_gym.create_dataset(task, **{"seed": 0, **json.loads(config)})


def score(text: str, answer: str, row: dict, tag: str = "answer") -> float:
    """The task's score, 0 to 1, of the text in the last <answer>…</answer>, or with tag "" of the whole response."""
    found = reasoning_gym.utils.extract_answer(text, tag) if tag else text.strip()
    return dataset_of(row["source"], row["config"]).score_answer(found, ast.literal_eval(row["puzzle"]))


if __name__ == "__main__":
    try:
        for row in rows(*sys.argv[1:]):
            print(json.dumps(row))
    except (ValueError, TypeError, AssertionError) as error:  # of the task's config too
        sys.exit(str(error))
