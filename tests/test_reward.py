"""Rewards by example, and a grader that survives what it runs."""

import time

import pytest

import reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 9 * 2 = 18\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("#### $1,234.50.", "1234.50"),
        ("#### 18 dollars", "18"),
        ("The answer is 18.", "18"),
        ("She pays $2,000,000 in all", "2000000"),
        ("he has 3 apples and 4 pears, so 7 fruits", "7"),
        ("10-5 leaves 5", "5"),
        ("it fell to -3 °C.", "-3"),
        ("= -$3", "-3"),
        ("a loss of − 12", "-12"),
        ("9-4", "4"),
        ("about .5 of it", ".5"),
        ("#### 7\nand then 12", "7"),
        ("first #### 3 then #### 4", "4"),
        ("1,2,3", "3"),
        ("100%", "100"),
        ("#### 5.0", "5"),
        ("no number", None),
        ("5 apples ####", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    assert reward.final_number(text) == (None if number is None else reward.Decimal(number))


def test_gsm8k_and_exact():
    answer = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"
    assert reward.gsm8k("it is 1072.00 clips.", answer, {}) == 1.0
    assert reward.gsm8k("#### 1073", answer, {}) == reward.gsm8k("the answer is correct", answer, {}) == 0.0
    assert reward.exact(" ab\n", "ab", {}) == 1.0 and reward.exact("abc", "ab", {}) == 0.0
    with pytest.raises(ValueError, match="holds no number"):
        reward.gsm8k("5", "none", {})


CUSTOM = """
import os, time

def judge(text, answer, row):
    print("noise on standard output")
    if text == "loop":
        while True:
            pass
    if text == "die":
        os._exit(7)
    if text == "raise":
        raise KeyError("no such unit")
    if text == "nan":
        return float("nan")
    if text == "parts":
        return {"format": 0.25, "length": row["bonus"]}
    return len(text)
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(CUSTOM)
    return f"{path}:judge"


def test_grader_tells_wrong_from_failed_and_goes_on(custom):
    grader = reward.Grader("custom", {"math": "gsm8k"}, custom, timeout_s=1.0, workers=2)
    texts = ["abc", "loop", "parts", "raise", "die", "nan", "ok"]
    jobs = [("other", text, "", {"bonus": 0.5}) for text in texts] + [("math", "#### 4", "#### 4", {})]
    start = time.perf_counter()
    grades = dict(zip([*texts, "math"], grader.grade(jobs), strict=True))
    assert time.perf_counter() - start < 10
    assert grades["abc"].parts == {"reward": 3.0} and grades["ok"].parts == {"reward": 2.0}
    assert grades["parts"].parts == {"format": 0.25, "length": 0.5}
    assert grades["math"].parts == {"reward": 1.0}
    assert grades["loop"] == reward.Grade(status="timeout")
    assert grades["raise"].status == "error" and "KeyError: 'no such unit' (judge.py, line 12)" in grades["raise"].error
    assert "exit code 7" in grades["die"].error
    assert "finite number" in grades["nan"].error
    assert grader.grade(jobs[:1])[0].parts == {"reward": 3.0}
    workers = grader.workers
    grader.close()
    assert all(process.poll() is not None for process in workers)


def test_load_reward_says_what_is_legal(custom, tmp_path):
    with pytest.raises(ValueError, match="legal are exact, gsm8k, custom"):
        reward.load_reward("gsmk8", None)
    with pytest.raises(ValueError, match="a file that exists"):
        reward.load_reward("custom", "nowhere.py:f")
    with pytest.raises(ValueError, match="no function 'judg'"):
        reward.load_reward("custom", custom[:-1])
    (tmp_path / "broken.py").write_text("import nosuchmodule")
    with pytest.raises(ValueError, match="nosuchmodule"):
        reward.load_reward("custom", f"{tmp_path / 'broken.py'}:f")
