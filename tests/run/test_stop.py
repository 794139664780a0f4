"""Answers that end at a text of rollout.stop or a token of rollout.stop_token_ids: sampled by vLLM, and trained."""

import make_tiny
import pytest

from oracle.repeat import repeat
from oracle.run import read_run
from tests.conftest import EXACT

ALPHABET = [*"0123456789>+-=", "7+8"]  # ids from 2 on; 0 is <eos>, 1 is <pad>, special as well
# The second text ends inside the token 7+8, the others but the first span two tokens.
STOPS = (f"rollout.stop={['<pad>', '7+', *(f'{digit}1' for digit in range(10))]}", "rollout.stop_token_ids=[15]")


@pytest.mark.parametrize("turns", ["null", "tools/tiny_turns.py:higher_or_lower"])
def test_answers_end_at_their_stops(train_forked, tmp_path, tiny, turns):
    """The second trainer agrees on ends, texts, log-probs and updates; an evaluation has its own texts, or none."""
    make_tiny.save_model(tmp_path / "model", make_tiny.char_tokenizer(ALPHABET), hidden=64)
    run = train_forked(
        2, *EXACT, *STOPS, f"rollout.turns={turns}", f"model.path={tmp_path / 'model'}", "train.steps=2",
        "rollout.prompts_per_step=8", "rollout.group_size=8", "rollout.max_new_tokens=24", "train.eval_every=2",
        f"data.eval={tiny / 'train.jsonl'}", "eval.stop=[]",
    )  # fmt: skip
    assert run.code == 0 and "warning: step" not in run.text, run.text
    comparison = repeat(read_run(run.out))
    assert not comparison.parted(), comparison.table()
    answers = [row for step in (1, 2) for row in run.rollouts(step) if row["finished"]]
    assert {row["response_ids"][-1] for row in answers} >= {0, 1, 3, 15, 16}  # <eos>, <pad>, the 1 of 31, =, 7+8
    assert all(row["text"].endswith("7+8") for row in answers if row["response_ids"][-1] == 16)
    evaluated = run.rollouts(2, "eval")
    assert any(16 in row["response_ids"][:-1] for row in evaluated)
    assert any(len(row["turns"]) > 1 for row in evaluated) == (turns != "null")
