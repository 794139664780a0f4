"""Rewards by example, their combination, and the pool of grading processes."""

import datetime
import http.server
import json
import shutil
import socket
import subprocess
import sys
import threading

import pytest
import torch
import transformers

import reward
from config import RewardConfig
from grpo.parts.base import user_code
from grpo.parts.data import tables
from grpo.step import named_rewards
from grpo.step.grading import Outcome
from rewards import code, model, remote
from tests.conftest import REPO
from tests.pools import FILES, JUDGE, fenced, grade, grade_with, pool_of
from tests.processes import wait_until

# ---------------------------------------------------------------- rewards that compare


def boxed(expression):
    return f"so it is \\boxed{{{expression}}}."


NUMBERS = [
    ("so 9 * 2 = 18\n#### 18", "18"), ("#### $1,234.50.", "1234.50"), ("#### x = 42", "42"),
    ("he has 3 apples and 4 pears, so 7 fruits", "7"),
    ("= -$3", "-3"), ("a loss of − 12", "-12"),
    ("#### - 18", "-18"), ("The answer is:\n- 18", "18"), ("**Total** - $18", "18"),
    ("first #### 3 then #### 4 and 12", "4"), ("#### 1/2", "0.5"),
    ("4E-2", "0.04"), ("1e999", "1e999"), ("5/0", None), ("5 apples ####", None),
]  # fmt: skip


@pytest.mark.parametrize("text, number", NUMBERS)
def test_final_number(text, number):
    assert reward.final_number(text) == (number and reward.Decimal(number))


REFERENCES = {
    "2 + 3 = 5": "5", "$1,234.50": "1234.5", "3/4": "0.75", "50%": "50",
    "16 ft^3": "16", "3 apples, 4 pears.\nSo he has 7 fruits": "7",
    "48/2 = <<48/2=24>>24 clips in 2 months\n#### 24": "24",
}  # fmt: skip
UNCLEAR = [
    "3,5", "1 000", "1'000", "2 1/2", "10:30", "1.234.567", "0,500", "10²", "3 or 5", "3.5 million", "3π",
    "It costs 3,5", "none",
]  # fmt: skip


@pytest.mark.parametrize("text, number", [*REFERENCES.items(), *((text, None) for text in UNCLEAR)])
def test_a_reference_is_one_number(text, number):
    for reference in (text, text if "\n" in text or text.startswith("It") else f"2 + 2 = 4\n#### {text}"):
        if number:
            assert reward.reference_number(reference) == reward.Decimal(number)
        else:
            with pytest.raises(ValueError, match=r"the reference answer .*(not clearly one|no) number"):
                reward.gsm8k("#### 5", reference, {})


# What is in \\boxed{} and the reference answer, of the same value and of another.
SAME_BOXED = [
    ("\\$1,800", "1800"), ("18 \\, \\mathrm{km/h}", "18"), ("18^\\circ", "18"), ("50", "50\\%"), ("1.2e3", "1200"),
    ("1\\frac{1}{2}", "3/2"), ("0.333333", "1/3"), ("x=5", "5"), ("2, 1", "\\{1,2\\}"), ("(-\\infty, 3]", "x \\le 3"),
    ("12 miles per hour", "12"), ("12 cm^2", "12"), ("3500000", "3.5 million"),
    ("No", "no"), ("no solution", "\\text{no solution}"), ("12_8", "12_{8}"), ("12_{10}", "12"),
    ("2pi", "2\\pi"), ("cba", "abc"), ("axe^{bx}", "xae^{bx}"), ("5, 3", "3 or 5"),
    ("7", "3 + 4 = 7\n#### 7"), ("7", "we see that \\boxed{7}"),
]  # fmt: skip
OTHER_BOXED = [
    ("3", "-3"), ("0.3333", "1/3"), ("3.14", "\\pi"), ("(2,1)", "(1,2)"), ("7, 8", "7"), ("on", "no"), ("12", "12_8"),
    ("12_9", "12_8"), ("3.5", "3.5 million"), ("", "4"), ("1" + "+1" * 500_000, "500001"),
]  # fmt: skip
SAME = [
    ("Final answer: 25%", "25"), ("the answer is 3/4", "\\frac{3}{4}"), ("\\[ x = \\frac{9}{3} \\]", "3"),
    ("First \\boxed{3}, then \\boxed{4}.", "4"), ("It costs $5 a day, $35 in all.", "35"),
    ("**Answer:** $x = 12$", "12"),
]  # fmt: skip
OTHER = [
    ("First \\boxed{3}, then \\boxed{4}.", "3"), ("\\boxed{4", "4"), ("", "4"), ("The reference is right.", "8"),
]  # fmt: skip


@pytest.mark.parametrize("boxes, texts, value", [(SAME_BOXED, SAME, 1), (OTHER_BOXED, OTHER, 0)])
def test_math_by_example(boxes, texts, value):
    for text, answer in [*((boxed(expression), answer) for expression, answer in boxes), *texts]:
        assert reward.math_answer(text, answer, {}) == value, (text[:99], answer)


@pytest.mark.parametrize(
    "name, text, answer, options, value",
    [
        ("gsm8k", "it is 1072.00 clips.", "48/2 = <<48/2=24>>24 clips in May.\n#### 1,072", {}, 1),
        ("gsm8k", "it is 1072", "#### 1,072", {"strict": True}, 0),
        ("gsm8k", "5 clips\n#### 1,072 clips", "#### 1,072", {"strict": True}, 1),
        ("exact", " ab\n", "ab", {}, 1), ("exact", "abc", "ab", {}, 0),
        ("multiple_choice", "Answer: B", "(B)", {}, 1),
        ("format", "<think>\n2 + 2\n</think>\n4", "", {}, 1), ("format", "4", "", {}, 0),
        ("format", "2 + 2\n</think>\n4", "", {}, 1), ("format", "2 + 2\n</think>\n", "", {}, 0),
        ("format", "4 <think>2</think> 4", "", {}, 0), ("format", "ab", "", {"pattern": "a."}, 1),
        ("format", "yes!", "", {"row_key": "shape"}, 1),
        ("length", "xxxx", "", {"limit": 4, "buffer": 2}, 0), ("length", "xxxxx", "", {"limit": 4, "buffer": 2}, -0.5),
        ("length", "one two three", "", {"limit": 2, "unit": "words"}, -0.5),
    ],
)  # fmt: skip
def test_rewards_by_example(name, text, answer, options, value):
    assert reward.REWARDS[name](text, answer, {"shape": "(yes|no)!"}, **options) == value


LETTERS = [
    ("**Answer:** D", "D"), ("the answer is option c.", "C"), ("\\boxed{B} beats Answer: C", "B"),
    ("(A) is wrong, so (C)", "C"), ("I think A is right, but rather B", "B"),
    ("Answer: I believe it is B.", "B"), ("Answer: I, since", "I"), ("D) 5", "D"),
    ("A cat sat; I am sure", None), ("the answer is a dog", None), ("", None),
]  # fmt: skip


@pytest.mark.parametrize("text, letter", LETTERS)
def test_chosen_letter(text, letter):
    assert reward.chosen_letter(text) == letter


NO_ANSWER = "is not a text, a number or a list of them; check data.answer_key"


def test_a_list_holds_several_right_answers():
    """For rewards that compare; one of another kind gets the list as JSON, and a text is never taken for a list."""
    jobs = [  # source, text, answer, reward or what is said
        ("s", "8", [7, 8], 1), ("s", "8", ["7", "seven"], 0),
        ("s", '["7"]', '["7"]', 1), ("math", boxed("\\frac12"), ["0.5", "2"], 1),
        ("both", "7", ["8", "7"], 1), ("x", "answer == '[\"é\", 1]'", ["é", 1], 1),
        ("s", "7", [], NO_ANSWER), ("s", "7", {"ground_truth": "7"}, NO_ANSWER),
        ("gsm8k", "7", ["7", "none"], "the reference answer 'none' holds no number"),
    ]  # fmt: skip
    sources = {"gsm8k": "gsm8k", "math": "math", "x": "custom", "both": {"exact": 1, "gsm8k": 0}}

    outcomes = grade_with("exact", [(*job[:3], {}) for job in jobs], by_source=sources, custom=JUDGE)
    for (*job, wanted), outcome in zip(jobs, outcomes, strict=True):
        assert sum(outcome.parts.values()) == wanted if outcome.status == "ok" else wanted in outcome.error, job


# ---------------------------------------------------------------- rewards/


DOUBLE = "Here:\n" + fenced("def double(x):\n    return x * 2") + "\n"
ASSERTS = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(3) == 7"]
ECHO = fenced("import sys\nprint(*sorted(map(int, sys.stdin.read().split())))").replace("python", "py")
SHIFT = fenced("def shift(xs, n):\n    return tuple(x + n for x in xs)")
SOLUTION = fenced(
    "class Solution:\n    def shift(self, xs: List[int], n: int) -> List[int]:\n        return [x + n for x in xs]"
)
EURUS = {"fn_name": "shift", "inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[4, 5]", "[]"]}
APPS = {"fn_name": "shift", "inputs": [[[1, 2], 3], [[5], 1]], "outputs": [[[4, 5]], [6]]}
LEETCODE = {"functional": "def check(f):\n    assert f([1], 2) == [3]\n\ncheck(Solution().shift)"}
STDIN = {"inputs": ["3 1\n2\n", ["9", "8"]], "outputs": ["1 2 3\n", ["8 9"]]}
TYPED = {"prelude": "from typing import *"}
SHARE = {"partial": True}


@pytest.mark.parametrize(
    "text, tests, options, value",
    [
        (DOUBLE, ASSERTS, SHARE, 2 / 3), (DOUBLE, {"tests": json.dumps(ASSERTS)}, SHARE, 2 / 3),
        ("```python\nwrong\n```\nbetter: " + DOUBLE, ASSERTS[:1], {}, 1.0),
        ("def double(x): return x * 2", ASSERTS, {}, 0.0), ("```\ndef f(:\n```", ASSERTS, {}, 0.0),
        (ECHO, STDIN, {}, 1.0),
        (ECHO, {"inputs": "3", "outputs": "3\n"}, {}, 1.0),
        ("```\nprint(1)\nraise SystemExit(1)\n```", {"inputs": [""], "outputs": ["1"]}, {}, 0.0),
        (SHIFT, EURUS, {}, 1.0), (SOLUTION, EURUS, TYPED, 1.0), (SHIFT, APPS, {}, 1.0),
        (SOLUTION, LEETCODE, TYPED, 1.0), (SOLUTION.replace("+", "-"), LEETCODE, TYPED, 0.0),
        (SHIFT, "assert shift([1], 2) == (3,)\nassert shift([], 2) == ()", {}, 1.0),
    ],
)  # fmt: skip
def test_code(text, tests, options, value):
    """Tests in columns of the row, as JSON in the reference answer, and in the column of verl's data sets."""
    columns = tests if isinstance(tests, dict) else {"tests": tests}
    found = json.dumps(columns if isinstance(tests, str) else tests)
    for answer, row in ((found, {}), ("", {"reward_model": {"ground_truth": found}})):
        assert code.find_tests(row, answer) == code.find_tests(columns, "")
    assert code.code(text, "", columns, **options) == value


@pytest.mark.parametrize(
    "function, answer, row, options, said",
    [
        (reward.multiple_choice, "42", {}, {}, "no letter"),
        (reward.math_answer, "\\frac{1}{", {}, {}, "no mathematical expression"),
        (reward.math_answer, "2 hours 30 minutes", {}, {}, "not clearly one expression"),
        (reward.math_answer, "1 000", {}, {}, "not clearly one expression"),
        (code.code, "", {}, {}, "no tests"),
        (code.code, '[{"input": "1"}]', {}, {}, "a text of Python"),
        (code.code, "", {"inputs": ["1", "2"], "outputs": "3\n4\n"}, {}, "2 `inputs` and 1 `outputs`: give a list"),
    ],
)  # fmt: skip
def test_rows_that_a_reward_refuses(function, answer, row, options, said):
    with pytest.raises(ValueError, match=said):
        function(DOUBLE, answer, row, **options)


BLOCKS = [
    "```bash\npip install x\n```\nthen\n```python\nx = 1\n```", "```Python\nx = 1\n```\n```text\n1\n```",
    "~~~py3\nx = 1\n~~~", "```python\r\nx = 1\r\n```", "```{.python title='a'}\nx = 1\n```",
    "1. so\n   ```py\n   x = 1\n   ```",
    "```\nx = 1\n```\nOutput:\n```\n1\n```\nand\n```\nno Python\n```",
    "Mind the ``` here\n```python\nx = 1\n```\n```bash\npython main.py\n```",
]  # fmt: skip


@pytest.mark.parametrize("text", BLOCKS)
def test_the_program_of_a_text(text):
    assert code.find_program(text) == "x = 1\n"


VALUES = """
import collections, decimal, enum, fractions
class Two(enum.IntEnum):
    b = 2
Pair = collections.namedtuple("Pair", "a b")
class Number:
    item = lambda self: 7
text, raw, counts, price = "é'\\n", b"a", collections.Counter("aab"), decimal.Decimal("2.5")
def f(expression):
    return eval(expression)
"""


def test_values_equal_as_they_do_in_python():
    right = [
        "assert f('[Two.b]') == [2]", "assert f('Pair(1, 2)') == (1, 2)", "assert f('counts') == {'a': 2, 'b': 1}",
        "assert f('frozenset([1])') == {1}", "assert f('None') == None",
        "assert f('price') == 2.5", "assert f('fractions.Fraction(1, 2)') == 0.5", "assert f('Number()') == 7",
        "assert f('text') == 'é\\'\\n'", "assert b'a' == f('raw')", "assert f('{1: [(2, {3})]}') == {1: [(2, {3})]}",
        "assert f('set()') == set([])", "assert f('-1') == -1, 'with a message'",
        "x = f('True')\nimport math\nassert math.floor(f('price')) == 2 and x",
    ]  # fmt: skip
    assert code.code(fenced(VALUES), "", {"tests": right}, partial=True) == 1.0
    wrong = ["f('Pair(1, 2)') == [1, 2]", "f('[Two.b]') == 2", "f('text') == b'a'", "f('no') == 1"]
    assert code.code(fenced(VALUES), "", {"tests": [f"assert {test}" for test in wrong]}, partial=True) == 0.0


@pytest.fixture
def endpoint():
    """(address, the requests that came, the replies (status, text) that are given one by one, the last one again)."""
    asked, replies = [], []

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, reply = replies.pop(0) if len(replies) > 1 else replies[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(reply.encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", asked, replies
        server.shutdown()


def test_remote_tries_again_then_says_why(endpoint):
    address, asked, replies = endpoint

    def ask(*given, url=address):
        replies[:] = given
        return remote.remote("abc", "a", {"n": 1}, url=url, backoff_s=0.01)

    assert ask((503, ""), (200, '{"reward": 3, "style": 0.5}')) == {"reward": 3, "style": 0.5}
    assert asked == [{"text": "abc", "answer": "a", "row": {"n": 1}}] * 2
    for status, tries in ((400, 1), (429, 3)):
        with pytest.raises(ConnectionError, match=rf"{status}.*tried {tries} times"):
            ask((status, ""))
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9/.*refused.*in at most 3 tries"):
        ask(url="http://127.0.0.1:9/")
    with pytest.raises(ValueError, match=f"^{address} replied .*a reward is"):
        ask((200, "<html>"))


@pytest.fixture
def silent():
    """The address of an endpoint that accepts and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


def test_a_remote_that_never_replies_is_an_error(silent):
    """Within its own tries, and where reward.timeout_s ends before them."""
    for options, said in (({"timeout_s": 0.1}, "Read timed out"), ({}, "no reply within reward.timeout_s=2")):
        options = {"remote": {"url": silent, "retries": 1} | options}
        (outcome,) = grade_with("remote", [("s", "a", "b", {})], timeout_s=2.0, options=options)
        assert outcome.status == "error" and said in outcome.error


def test_a_proxy_that_was_asked_is_named(endpoint, monkeypatch):
    address, _, replies = endpoint
    replies.append((403, ""))
    monkeypatch.setenv("http_proxy", address)
    with pytest.raises(ConnectionError, match=f"http://localhost:9/ through the proxy {address}.*: 403"):
        remote.remote("a", "b", {}, url="http://localhost:9/")


@pytest.fixture(scope="module")
def reward_model(tiny, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("reward_model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(tiny / "model", num_labels=1, initializer_range=1.0)
    config.pad_token_id = tokenizer.pad_token_id
    transformers.set_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_models_beside_other_rewards(reward_model):
    """Two models, one of them with pairs of texts, and a reward without a model: each grades as if it were alone."""
    options = {
        "first": {"path": reward_model}, "length": {"limit": 1, "buffer": 20},
        "second": {"path": reward_model, "pairs": True, "prompt_key": "question"},
    }  # fmt: skip
    functions = {"first": FILES["model"], "second": FILES["model"]}
    spec = {"first": 2.0, "second": 3.0, "length": 1.0}
    named = {"by_source": {"one": "first"}, "options": options, "functions": functions}
    texts = ["123", "8", "12345678", "312", "5", "77"]
    row = {"prompt": "12", "question": "81"}
    jobs = [("scored", text, "", row) for text in texts] + [("one", "35", "", row), ("scored", "123", "", {})]
    *outcomes, one, failed = grade_with(spec, jobs, **named, memory_gb=0.0)
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(reward_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(reward_model)

    def score(*given):
        with torch.inference_mode():
            return scorer(**tokenizer(*given, return_tensors="pt")).logits.item()

    for text, outcome in zip(texts, outcomes, strict=True):
        wanted = {"first": 2 * score("12" + text), "second": 3 * score("81", text), "length": -(len(text) - 1) / 20}
        assert outcome.parts == pytest.approx(wanted, rel=1e-4)
    assert one.parts == pytest.approx({"reward": score("1235")})
    assert failed.status == "error" and "KeyError: 'prompt'" in failed.error


def refusal(spec, **keys):
    """What is said against a reward before the start."""
    with pytest.raises(ValueError) as error:
        named_rewards.check(spec, RewardConfig(**keys))
    return str(error.value)


def test_only_a_model_that_scores_is_a_reward_model(reward_model, tmp_path):
    def model_at(path):
        return {"functions": {"m": FILES["model"]}, "options": {"m": {"path": str(path)}}}

    named_rewards.check("m", RewardConfig(**model_at(reward_model)))
    scorer = model.Model(reward_model)
    scorer.tokenizer.add_tokens(["<tool>"])
    with pytest.raises(ValueError, match=r"the token '<tool>' has the id 16, .* of the reward model has 16 rows"):
        scorer("<tool>", "", {"prompt": "1"})
    assert refusal("m", **model_at(tmp_path / "nowhere")).startswith(f"reward.options.m: path={tmp_path}/nowhere: ")
    other = tmp_path / "other"
    shutil.copytree(reward_model, other)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace("Qwen2ForSequenceClassification", "Qwen2ForCausalLM"))
    said = refusal("m", **model_at(other))
    assert "is a Qwen2ForCausalLM; a reward model is a ...ForSequenceClassification" in said
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    said = refusal("m", **model_at(other))
    assert (
        "has no safetensors. Pickled weights (.bin) may run code" in said
        and "convert it once, from weights you trust: python -c" in said
    )


# ---------------------------------------------------------------- rewards by their names, and the pool


def test_pool_works_while_the_caller_does_something_else(tmp_path):
    slow = tmp_path / "judge.py"
    slow.write_text((REPO / "tests/judge.py").read_text() + "time.sleep(0.6)\n")  # an import is no answer's time
    pool = pool_of("custom", by_source={"math": "gsm8k"}, custom=f"{slow}:judge", timeout_s=0.5, workers=2)
    answers = {"{'a': 0.25, 'b': row['bonus']}": {"a": 0.25, "b": 0.5}, "len(os.read(0, 9))": {"reward": 0}}
    late, *outcomes = grade(pool, [("other", text, "", {"bonus": 0.5}) for text in ("time.sleep(99)", *answers)])
    assert late == Outcome(status="timeout") and [outcome.parts for outcome in outcomes] == [*answers.values()]

    assert grade(pool, [("math", "#### 4", "#### 4", {})] * 4) == [Outcome({"reward": 1.0})] * 4

    for _ in range(10):
        pool.submit("s", "time.sleep(0.01) or 5", "", {})
    wait_until(lambda: all(future.done() for future in pool.submitted))
    assert [outcome.parts for outcome in pool.collect()] == [{"reward": 5.0}] * 10 and pool.collect() == []

    processes = [worker.process for worker in pool.workers if worker.process]
    pool.close()
    assert processes and all(process.poll() is not None for process in processes)


def test_a_row_reaches_the_reward_unchanged():
    row = {
        "a": (1, (2,)),
        3: {4.5: {"x"}},
        "b": b"\xff",
        "when": datetime.date(2026, 1, 2),
        "n": tables.JsonFloat("1.50"),
    }

    kept, typed, unsent = grade_with(
        "custom",
        [
            ("s", f"row == {row!r}", "", row), ("s", "type(row['n']) is float", "", row),
            ("s", "1", "", {"f": lambda: 1}),
        ],
        custom=JUDGE,
    )  # fmt: skip
    assert kept == typed == Outcome({"reward": 1.0})
    assert unsent.status == "error" and "pickle" in unsent.error


OWN = """
import os
made = []
class Novelty:
    def __init__(self, bonus, seen=()):
        made.append(self)
        self.bonus, self.seen = bonus, set(seen)
    def __call__(self, text, answer, row):
        if text == "die":
            os._exit(3)
        new = text not in self.seen
        self.seen.add(text)
        return {"new": self.bonus * new, "objects": len(made)}
def longer(words, reference, row, than=1):
    return len(words) > than
class NoFunction:
    pass
class Counts:
    def __init__(self, most):
        self.most = most
    def __call__(self, text, answer, row, response_ids):
        return min(len(response_ids), self.most)

def odd(text, answer, row):
    return None if len(text) % 2 == 0 else 0.5

def parts(text, answer, row):
    return {"a": None, "b": 1.0}

def never(text, answer, row):
    print("and no return")

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def exchanged(answer, text, row):
    return 1.0

def ids_third(text, answer, response_ids, row):
    return 1.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """own.py, with OWN, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)


def test_a_reward_that_is_none_is_left_out(own):
    keys = {
        "by_source": {"p": "parts", "n": "never", "both": {"exact": 1.0, "never": 0.5}},
        "functions": {"odd": "own.py:odd", "parts": "own.py:parts", "never": "own.py:never"},
    }
    config = RewardConfig(default={"odd": 2.0, "exact": 1.0}, **keys)
    jobs = [("s", "abc", "abc", {}), ("s", "ab", "ab", {}), *((source, "x", "", {}) for source in ("p", "n", "both"))]
    outcomes = grade_with(config.default, jobs, **keys)
    assert [o.parts for o in outcomes[:3]] == [{"odd": 1.0, "exact": 1.0}, {"exact": 1.0}, {"b": 1.0}]
    assert outcomes[3].status == "error"
    assert "the reward is None (never): no reward applies to this row" in outcomes[3].error


def test_functions_and_classes_by_names(own):
    functions = {"novel": "own.py:Novelty", "long": "own.py:longer", "counts": "own.py:Counts", "brief": "length"}
    options = {"novel": {"bonus": 4, "seen": ["c"]}, "long": {"than": 2}, "brief": {"limit": 2}, "counts": {"most": 2}}
    spec = {"novel": 0.5, "long": 1.0, "custom": 1.0}
    sources = {"n": "novel", "b": "brief", "c": {"counts": 1.0, "exact": 1.0}}
    answers = [("s", "333"), ("n", "333"), ("n", "c"), ("b", "abc"), ("n", "die"), ("n", "333"), ("c", "abc")]
    jobs = [(*answer, "", {}, [7, 8, 9]) for answer in answers]
    outcomes = grade_with(spec, jobs, by_source=sources, custom=JUDGE, options=options, functions=functions)
    assert outcomes[0].parts == {"novel/new": 2.0, "novel/objects": 0.5, "long": 1.0, "custom": 333.0}
    assert outcomes[1].parts == outcomes[2].parts == {"new": 0.0, "objects": 1.0}
    assert outcomes[3].parts == {"reward": -0.5}
    assert outcomes[4].status == "error" and outcomes[5].parts == {"new": 4.0, "objects": 1.0}  # a new worker
    assert outcomes[6].parts == {"counts": 2.0, "exact": 0.0}  # it gets the token ids
    named_rewards.check({"novel": 1.0, "long": 1.0}, RewardConfig(functions=functions, options=options))
    assert user_code.load_module("own.py").made == []  # checked, not made


def test_a_file_is_an_ordinary_module_of_its_folder(tmp_path):
    """With dataclasses and pools of processes, the modules beside it, and a name that another module has."""
    files = {
        "kit/__init__": "",
        "kit/inner": "from . import __name__ as package\ndef f(): return package\n",
        "beside_me": "LIMIT = 7\n",
        "code": "from __future__ import annotations\nimport dataclasses, multiprocessing\nfrom beside_me import LIMIT\n"
        "@dataclasses.dataclass\nclass Pair:\n    x: int = LIMIT\ndef double(x): return 2 * x\n"
        "def f():\n    with multiprocessing.get_context('fork').Pool(1) as pool: return pool.map(double, [Pair().x])\n",
        "a/helper_of_mine": "def f(): return 1\n",
        "a/one.2": "from helper_of_mine import f\n",
        "b/helper_of_mine": "def f(): return 2\n",
        "b/two": "from helper_of_mine import f\n",
        "reward/__init__": "",
        "reward/math_reward": "from kit.inner import f\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)

    program = (
        "import code, reward, sys; from grpo.parts.base.user_code import load_function\n"
        "print([load_function('reward.custom', place)() for place in sys.argv[1:]])\n"
        "print(hasattr(code, 'Pair'), reward is sys.modules['reward'])"
    )
    places = [f"{tmp_path}/{name}.py:f" for name in ("code", "kit/inner", "a/one.2", "b/two", "reward/math_reward")]
    said = subprocess.check_output([sys.executable, "-c", program, *places], cwd=REPO, text=True)
    assert said == "[[14], 'kit', 1, 2, 'kit']\nFalse True\n"  # `code` and `reward` are Python's and ours


PLACES = {  # of a function → what is said
    "no.py:f": "reward.functions.m='no.py:f': give path/to/file.py:function, a file",
    "own.py:NoFunction": "has no __call__",
    "own.py:Novelty": "reward.options.m: missing a required argument: 'bonus'; its",
    "own.py:verl": "so 'data_source' would get the text. Wrap",
    "own.py:exchanged": "so 'text' would get the answer",
    "own.py:ids_third": "multiple values for argument 'response_ids'",
}


@pytest.mark.parametrize(
    "spec, keys, said",
    [
        ("gsmk8", {}, "must be one of exact, gsm8k, math, multiple_choice, format, length, custom"),
        ({"math": 1.0, "fromat": 1.0}, {}, "unknown reward 'fromat'; it must be one of exact"),
        ("length", {"options": {"length": {"limit": 1, "limt": 1}}}, "'limt'; its options are limit, buffer, unit"),
        ("length", {"options": {"length": {"limit": 1, "unit": "tokens"}}}, "must be characters or words"),
        ("length", {"options": {"length": {"limit": 0}}}, "one of them must be above 0"),
        ("custom", {"custom": "own.py:f"}, "no function 'f'"), ("custom", {"custom": "broken.py:f"}, "nosuchmodule"),
        *(("m", {"functions": {"m": place}}, said) for place, said in PLACES.items()),
        ("exact", {"functions": {"math": JUDGE}}, "reward.functions.math: a reward has this name already"),
    ],
)  # fmt: skip
def test_what_is_legal_is_said(spec, keys, said, own, tmp_path):
    (tmp_path / "broken.py").write_text("import nosuchmodule")
    assert said in refusal(spec, **keys)


def test_a_worker_starts_without_large_packages():
    program = "import sys, grpo.step.grading; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=REPO, text=True)
    for name in ("torch", "transformers", "numpy", "datasets", "requests", "psutil", "math_verify", "pydantic"):
        assert repr(name) not in loaded
