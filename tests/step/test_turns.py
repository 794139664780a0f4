"""Conversations: what an environment says enters the sequence, not the loss; a bad environment costs its sample."""

import re
import shutil
from types import SimpleNamespace

import make_tiny
import numpy as np
import pytest
import transformers

from grpo.parts.data.ends import Ends, endless
from grpo.step import turns
from grpo.step.grading import GradingPool
from rollout import Completion, Trace
from tests.conftest import tiny_config
from tests.pools import grade_with, pool_of

EOS = 0


class Script:
    """rollout.Engine that plays what it is given: seed → answer, ending with EOS or cut off; one a step, the last."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.asked = []

    def ask(self, requests, n, sampling):
        self.asked += requests

    def steps(self, sampling):
        while True:
            ended = []
            if self.asked:
                number, _, seed, limit = self.asked.pop()
                ids = [*self.tokenizer(str(seed)[-2:])["input_ids"], EOS][:limit]
                ended = [(number, [Completion(ids, [-1.0] * len(ids), ids[-1] == EOS, Trace())])]
            yield ended


@pytest.fixture
def converse(world, tokenizer, tmp_path, request):
    """converse("a function's body", max_new_tokens, rows, ...) → the conversations of each prompt."""

    def run(body, budget, rows, n=2, **rollout):
        (tmp_path / "play.py").write_text(f"import os, time, sys\ndef play(text, row, state):\n    {body}\n")
        cfg = tiny_config(
            f"rollout.turns={tmp_path / 'play.py'}:play", "reward.timeout_s=1", "reward.memory_gb=2",
            *(f"rollout.{key}={value}" for key, value in rollout.items()),
        )  # fmt: skip
        pool = GradingPool(cfg.reward)
        request.addfinalizer(pool.close)
        prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
        seeds = [100 + 10 * p for p in range(len(rows))]
        inputs = SimpleNamespace(tokenizer=tokenizer, vocab_size=15)  # a row for every token but "="
        conversations = turns.Conversations(Script(tokenizer), pool, inputs, cfg, rows)
        found = dict(conversations.generate(prompts, seeds, n, None, budget))
        return [found[p] for p in range(len(rows))]

    return run


def test_what_ends_a_conversation(converse):
    rows = [{"prompt": "1>", "say": "+"}, {"prompt": "2>", "say": "+" * 6}, {"prompt": "3>", "say": ""}]
    (short,), (long,), (mute,) = converse('return row["say"]', 10, rows, n=1, max_turns=3)
    assert short.trace.turns == [3, 1, 3, 1, 2] and not short.finished  # by the budget, in the third answer
    assert long.trace.turns == [3, 6, 1] and not long.finished
    assert mute.trace.turns == [3, 0, 3, 0, 3] and mute.finished  # by max_turns: no token budget cut it
    ((alone,),) = converse('state["seen"] = text; return "+" * 7', 10, rows[:1], n=1)
    assert alone.trace.turns == [3] and not alone.finished  # no room for an answer: what it said is dropped
    ((once,),) = converse('state["seen"] = text; return "+"', 10, rows[:1], n=1, max_turns=1)
    assert once.trace.turns == [3] and once.finished and once.trace.columns["state"] == {"seen": "00"}


PATIENT = """
import os, random, time

def play(text, row, state):
    while row["prompt"] == "0>" and not os.path.exists("ENDED"):  # in each of its turns
        time.sleep(0.01)
    time.sleep(random.random() / 20)
    state["said"] = state.get("said", "") + text[:2]
    return state["said"] if len(state["said"]) < 7 else None
"""
ALONE = """
import os
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from config import Config
from rollout import Engine
from grpo.parts.base import ranks, user_code
from grpo.parts.data.prompts import load_tokenizer
from grpo.step.grading import GradingPool
from grpo.step.turns import Conversations

ranks.join_ranks(timeout_s=600)
cfg = Config(
    model={"path": "MODEL", "dtype": "fp32"}, data={"train": "-", "chat_template": False},
    rollout={"turns": "PLAY:play"}, reward={"workers": 4, "timeout_s": 100},
)
engine = Engine("MODEL", cfg.model, cfg.rollout, 128, asleep=False)
tokenizer = load_tokenizer("MODEL")
play = user_code.load_function("rollout.turns", "PLAY:play")
rows = [{"prompt": f"{p}>"} for p in range(5)]
prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]

def alone(p, i):
    ids, logps, state = [], [], {}
    for turn in range(cfg.rollout.max_turns):
        seed = int(np.random.SeedSequence([p, i, turn]).generate_state(1)[0]) if turn else p + i
        ((_, (answer,)),) = engine.generate([prompts[p] + ids], [seed], 1, cfg.rollout, 100 - len(ids))
        ids, logps = ids + answer.ids, logps + answer.logps
        text = play(tokenizer.decode(answer.ids, skip_special_tokens=True), rows[p], state) if answer.finished else None
        reply = tokenizer(text or "", add_special_tokens=False)["input_ids"]
        if text is None or turn + 1 == cfg.rollout.max_turns or len(ids + reply) >= 100:
            return ids, logps
        ids, logps = ids + reply, logps + [0.0] * len(reply)

inputs = SimpleNamespace(tokenizer=tokenizer, vocab_size=len(tokenizer))
together = Conversations(engine, GradingPool(cfg.reward), inputs, cfg, rows)
found, turns = {}, set()
for p, group in together.generate(prompts, range(5), 2, cfg.rollout, 100):
    found[p] = [(talk.ids, talk.logps) for talk in group]
    turns |= {len(talk.trace.turns) for talk in group}
    if len(found) == 4:
        Path("ENDED").touch()
assert [*found][-1] == 0
assert found == {p: [alone(p, i) for i in range(2)] for p in range(5)}
assert max(turns) >= 5  # three answers
os._exit(0)
"""


def test_they_do_not_wait_for_each_other(fork_server, tiny, tmp_path):
    """One prompt's environment replies once the others' conversations have ended. Each has the bits of one alone."""
    names = {"MODEL": tiny / "model", "PLAY": tmp_path / "play.py", "ENDED": tmp_path / "ended"}
    for file, text in (("play.py", PATIENT), ("alone.py", ALONE)):
        for name, path in names.items():
            text = text.replace(name, str(path))
        (tmp_path / file).write_text(text)
    printed = tmp_path / "output.txt"
    assert fork_server.run(printed, tmp_path / "alone.py", nproc=1) == 0, printed.read_text()


HOSTILE = {
    "hangs": ("time.sleep(1000)", "timeout", ""),
    "raises": ('return row["nothing"]', "error", r"rollout.turns failed: KeyError: 'nothing' \(play.py, line \d+\)"),
    "a megabyte": ('return "+" * 2**20', "error", "the text that it returned has 1048576 bytes; at most 100000"),
    "a megabyte of state": ('state["x"] = "+" * 2**20; return "+"', "error", "the state that it returned has 1048"),
    "a number": ("return 3", "error", "TypeError: it returned a int; it must return a text or None"),
    "a token without a row": ('return "="', "error", "reply: the token '=' has the id 15, but .* has 15 rows"),
    "no JSON": ("state['x'] = {1, 2}; return '+'", "error", "Object of type set is not JSON serializable"),
}


def test_a_hostile_function_costs_one_sample(converse):
    """In the second turn; the other answer's conversation goes on as if nothing had been, and grading knows."""
    body = "if text[-1] == '0' or 'ok' in state:\n        state['ok'] = 1; return '+'\n"
    body += "".join(f"    if row['name'] == {name!r}:\n        {code}\n" for name, (code, _, _) in HOSTILE.items())
    found = converse(body, 10, [{"prompt": "5>", "name": name} for name in HOSTILE], max_turns=2)
    for (good, bad), (_, status, message) in zip(found, HOSTILE.values(), strict=True):
        assert good.trace.failure is None and good.trace.columns["turns"][1] == "+"
        assert bad.trace.turns == [3] and bad.trace.failure.status == status and not bad.trace.failure.parts
        assert bad.trace.failure.error.startswith("rollout.turns failed: ") == (status != "timeout")
        assert re.search(message, bad.trace.failure.error)
    jobs = [("s", "5", "5", {}), *(("s", "5", "5", {}, None, bad.trace.failure) for _, bad in found)]
    wanted = [("ok", 1), *((status, 0) for _, status, _ in HOSTILE.values())]
    assert [(o.status, sum(o.parts.values())) for o in grade_with("exact", jobs)] == wanted


def test_the_python_tool_of_the_examples_as_the_workers_call_it():
    pool = pool_of()
    programs = ("print(6 * 7)", "1 / 0", "import socket; socket.socket()")
    texts = [*(f"I compute\n```python\n{program}\n```" for program in programs), "It is 42."]
    calls = [pool.submit_turn("examples/tiny_turns.py:python", text, {}, {}) for text in texts]
    replies = {call.result().parts["reply"] for call in calls}
    pool.close()
    assert replies == {"```output\n42\n```\n", "```output\nit failed\n```\n", None}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix }}{% endif %}"
)


def test_the_chat_template_writes_what_stands_between_two_answers():
    bpe = make_tiny.bpe_tokenizer(["hello there, 12 and 13"], 300)
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, additional_special_tokens=special, chat_template=CHATML
    )
    data = SimpleNamespace(chat_template=True, template_kwargs={"prefix": "<think>"}, date=None)
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])

    between = "\n<|im_start|>user\n 12\n<|im_end|>\n<|im_start|>assistant\n<think>"
    assert tokenizer.decode(turns.reply_ids(" 12\n", end, tokenizer, data)) == between
    assert tokenizer.decode(turns.reply_ids(" 12\n", other, tokenizer, data)) == "<|im_end|>" + between

    # The whole conversation written at once has the same tokens.
    chat = [("user", "hi"), ("assistant", "ho"), ("user", " 12\n")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in chat], add_generation_prompt=True, tokenize=True,
        return_dict=False, **data.template_kwargs,
    )  # fmt: skip
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False, prefix=""
    )
    answer = tokenizer(prompt + "ho<|im_end|>")["input_ids"]
    assert answer + turns.reply_ids(" 12\n", end, tokenizer, data) == whole  # as if all had been written at once

    for tokens, texts in (({end}, []), ({other}, ["</answer>", "im_end|>"])):
        assert not list(endless(Ends(tokens, texts, tokenizer), data))
    (said,) = endless(Ends({other}, ["</answer>"], tokenizer), data)
    assert f"ends an answer with '<|im_end|>', token {end}, " in said and f"rollout.stop_token_ids=[{end}]" in said


PLAY = "def play(text, row, state): ..."


@pytest.mark.parametrize(
    "source, template, message",
    [
        ("class play:\n    def __call__(self, text, row, state): ...", None, r"called with \(text, row, state\)"),
        ("def play(text): ...", None, r"too many positional arguments; it is called with \(text, row, state\)"),
        (PLAY, "{% for m in messages %}{{ m.x.y }}{% endfor %}", "a user's second message"),
        (PLAY, "{{ messages[0]['content'] }}", "leaves an assistant's message out"),
        (PLAY, "{% for m in messages %}={{ m.content }}{% endfor %}", "a reply: the token '=' has the id 15"),
        (PLAY, "column", "the data have a column 'state'"),
    ],
)
def test_what_is_refused_before_the_start(tmp_path, tiny, source, template, message):
    (tmp_path / "play.py").write_text(source + "\n")
    shutil.copytree(tiny / "model", tmp_path / "model")
    if template not in (None, "column"):
        (tmp_path / "model/chat_template.jinja").write_text(template)
    cfg = tiny_config(
        f"rollout.turns={tmp_path / 'play.py'}:play", f"data.chat_template={str(template is not None).lower()}"
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message) as error:
        turns.check(cfg, tokenizer, 15, {"state": 1} if template == "column" else {})
    assert "rollout.turns" in str(error.value)


@pytest.mark.slow
def test_the_game_is_learned(train_forked, tmp_path):
    """From nothing, by reward alone: who does not listen wins at most 2 games of 3."""
    make_tiny.save_model(tmp_path / "model", make_tiny.char_tokenizer("0123456789>+-="))
    keys = (f"model.path={tmp_path / 'model'}", "data.train='123'")
    run = train_forked(2, *keys, config="tiny_turns", seconds=1800, code=0)
    rewards = [metrics["reward/mean"] for metrics in run.metrics]
    assert rewards[0] < 0.2 and np.mean(rewards[-10:]) > 0.9
