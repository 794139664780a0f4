"""The rewards, tried on the references of the data before anything is built."""

from types import SimpleNamespace

import pytest

from config import DataConfig, RewardConfig, UserError
from grpo.parts.data.prompts import Prompt
from grpo.run.preflight.reward_trial import try_rewards

LETTERS = ["A", "B", "C", "D"]
COLUMNS = "         the columns {} are read by no key; a reward of your own gets them in its row"
NUMBERS = [str(number) for number in range(200)]


def lines_of(answers, reward, question="How many?", sources=("default",), columns=None, **keys):
    rows = []
    for number, answer in enumerate(answers):
        source = sources[number % len(sources)]
        row = {"prompt": question, "answer": answer, **(columns or {})}
        rows.append(Prompt([1], answer, source, row))
    cfg = SimpleNamespace(reward=RewardConfig(default=reward, **keys), data=DataConfig(train="a.jsonl"))
    return list(try_rewards(cfg, rows))


@pytest.mark.parametrize(
    ("answers", "reward", "question"),
    [
        (NUMBERS, "gsm8k", "How many?"),
        ([f"3 + 4 = 7\n#### 1,{number}.50" for number in range(100, 200)], "gsm8k", "Put it in \\boxed{}."),
        (["1/2", "0.5", *(f"so \\boxed{{{n}}}" for n in NUMBERS[1:30])], "math", "Two ways to write one value."),
        (LETTERS, "multiple_choice", "Choose a letter, in <answer> tags."),
        (["a word", "a #### b"], "exact", "How many?"),
        (LETTERS, {"multiple_choice": 0.9, "format": 0.1}, "Think first."),
    ],
)  # fmt: skip
def test_healthy_rows_get_one_line(answers, reward, question):
    (line,) = lines_of(answers, reward, question)
    tried = min(len(answers), 100)
    assert f"gives 1 to each of {tried} references of the source default, to " in line


def test_what_does_not_compare_is_not_tried():
    assert lines_of(NUMBERS, {"length": 1}, options={"length": {"limit": 9}}) == []


def test_rows_that_no_program_can_be_tested_on_are_refused():
    code = {"functions": {"code": "rewards/code.py:code"}}
    assert lines_of(["3"], "code", columns={"tests": ["assert f(1) == 2"]}, **code) == [COLUMNS.format("tests")]
    with pytest.raises(UserError, match=r"code cannot grade rows .*: the row has 1 `inputs` and 2 `outputs`"):
        lines_of(["3"], "code", columns={"inputs": ["1"], "outputs": [1, 2]}, **code)


def test_references_that_the_reward_cannot_read():
    (line,) = lines_of([*NUMBERS[:50], *["cat"] * 10], "gsm8k")
    assert line.startswith("warning: the reward gsm8k does not give 1 to 10 of 60 references of the source 'default'")
    assert line.count("to 'cat' (ValueError: the reference answer 'cat' holds no number") == 3

    with pytest.raises(UserError, match=r"the reward gsm8k gives 1 to none of 2 references.*Choose another reward"):
        lines_of(["cat", "dog"], "gsm8k")


def test_a_form_that_the_prompts_ask_for_and_the_reward_does_not_read():
    (line,) = lines_of(NUMBERS, "exact", "Put your answer in \\boxed{}.")
    assert line.startswith("warning: the prompts ask for answers in a form that the reward exact does not read:")


def test_a_reward_that_passes_the_answer_of_another_row():
    (line,) = lines_of(["(B) red", "(B) blue"], "multiple_choice")
    assert "gives 1 to 2 of 2 references" in line


def test_each_source_is_tried_with_its_own_reward():
    lines = lines_of(NUMBERS, "exact", sources=("a", "b"), by_source={"b": "gsm8k"})
    assert [line.split()[1] for line in lines] == ["exact", "gsm8k"]


def test_columns_that_nothing_reads_are_listed():
    keys = {"options": {"format": {"row_key": "pattern"}}}
    (line, _) = lines_of(NUMBERS, "exact", columns={"level": 1, "pattern": "a+", "source": "x"}, **keys)
    assert line == COLUMNS.format("level")
