"""On-policy distillation: the prompt of a teacher, and which model may be one. Runs are in test_engine.py and
test_pairs.py."""

import json

import make_tiny
import numpy as np
import pytest

import megatron_bridge as bridge
import train_grpo
from config import DataConfig, UserError
from grpo.parts.data.prompts import load_prompts
from grpo.run import launch
from grpo.run.preflight import configuration
from grpo.step.teacher import with_teacher_prompts
from rollout import Trace
from tests.conftest import tiny_config, tiny_model, write_rows
from tests.layout_worker import equal
from tests.step.one_rank import weights


def test_another_model_gets_no_routes_of_the_policy():
    """It may have other layers and experts; the policy itself, as its own teacher, replays none."""
    routes = np.zeros((2, 4, 2), np.uint8)  # of two tokens in four layers, two experts each
    routes[..., 1] = 1
    sample = train_grpo.Sample(0, [7], [1, 2], [-1.0, -2.0], True, "", "", Trace(replay={"routes": routes}))
    assert train_grpo.flatten(with_teacher_prompts([sample], is_policy=False)).replay == {}
    own = train_grpo.flatten(with_teacher_prompts([sample], is_policy=True)).replay["routes"].experts
    assert own.shape == (2, 4, 2) and not own.any()


def test_a_teacher_scores_over_the_tokens_from_which_the_policy_drew():
    """Another model, and the policy as its own teacher."""
    nuclei = np.array([1, 3, -1, 2, -1], "i4")
    sample = train_grpo.Sample(0, [7], [1, 2], [-1.0, -2.0], True, "", "", Trace(replay={"nuclei": nuclei}))
    for is_policy in (False, True):
        (seen,) = train_grpo.flatten(with_teacher_prompts([sample], is_policy)).replay["nuclei"].ids
        assert seen.tolist() == nuclei.tolist()


def test_a_hint_stands_before_what_the_user_asks(tokenizer, tmp_path):
    message = "{{ {'system': '+', 'user': '-'}[m.role] }}{{ m.content }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{message}{{% endfor %}}"
    chat = [{"role": "user", "content": "1"}, {"role": "system", "content": "2"}, {"role": "user", "content": "3"}]
    write_rows(tmp_path / "text.jsonl", [{"prompt": "5", "answer": 12, "hint": "7="}])
    write_rows(tmp_path / "chat.jsonl", [{"prompt": chat, "answer": 12, "hint": "7="}])

    def prompt(file, **options):
        found = load_prompts(DataConfig(train=str(tmp_path / file), **options), tokenizer, 16)[0]
        return tokenizer.decode(found.ids), None if found.asked is None else tokenizer.decode(found.asked)

    assert prompt("text.jsonl") == ("-5", None)
    assert prompt("text.jsonl", hint_key="hint") == ("-5", "-7=5")
    assert prompt("text.jsonl", hint_key="answer", chat_template=False) == ("5", "125")
    assert prompt("chat.jsonl", hint_key="hint", system_prompt="9") == ("+9-1+2-3", "+9-1+2-7=3")


def test_hints_count_for_length_and_fingerprint_and_must_be_there(tokenizer, tmp_path):
    rows = [{"prompt": "123>", "answer": "1", "hint": hint} for hint in ("", "9", "99999")]

    def load(rows, key="train", **options):
        write_rows(tmp_path / "a.jsonl", rows)
        cfg = DataConfig(**{"train": "no", key: str(tmp_path / "a.jsonl")}, **options)
        return load_prompts(cfg, tokenizer, 16, key)

    prompts = load(rows, hint_key="hint", max_prompt_tokens=5)
    assert [len(prompt.asked) for prompt in prompts] == [4, 5] and prompts.dropped == 1
    assert load(rows, max_prompt_tokens=5).dropped == 0
    other = [rows[0], {**rows[1], "hint": "8"}]
    assert load(other).fingerprint["rows"] == load(rows[:2]).fingerprint["rows"]
    assert load(other, hint_key="hint").fingerprint["rows"] != load(rows[:2], hint_key="hint").fingerprint["rows"]
    with pytest.raises(ValueError, match=r"a\.jsonl, row 2: 'hint' is null"):
        load([rows[0], {**rows[1], "hint": None}], hint_key="hint")
    assert load(rows, "eval", hint_key="hnt")[0].asked is None  # nobody is taught there


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A teacher of another shape and family for the tiny model."""
    return tiny_model(tmp_path_factory.mktemp("larger"), "qwen3", tied=False, hidden=128, layers=3, seed=5)


def test_a_teacher_has_no_gradients_and_changes_no_bit_of_what_it_does_not_teach(build, larger):
    """With coefficient 0 the run is the one without a teacher, which has no adapters either, wherever it waits."""
    trained, numbers = [], []
    for waits in (None, "gpu", "host"):
        teacher = [f"algo.teacher={larger}", "algo.teacher_coef=0", f"algo.reference_on={waits}"] if waits else []
        run = build("train.lr=0.01", "lora.rank=4", *teacher)
        numbers.append([train_grpo.train_step(run, step)[0] for step in (1, 2)])
        trained.append(weights(run))
        if waits:
            (chunk,) = run.teacher.model
            assert not chunk.buffers and not any(weight.requires_grad for weight in chunk.parameters())
            assert not bridge.named_weights(run.teacher.model, factors=True)

    assert all(weight.numel() == 0 for weight in chunk.parameters())  # on the host: between its passes nothing is left
    for taught in trained[1:]:
        assert equal(taught, trained[0])
    for plain, on_gpu, on_host in zip(*numbers, strict=True):
        assert plain["loss/total"] == on_gpu["loss/total"] == on_host["loss/total"]
        assert plain["kl/teacher"] is None and on_gpu["kl/teacher"] == on_host["kl/teacher"] != 0


def test_who_may_teach(larger, tiny, tmp_path, offline):
    def prepare(*overrides):
        cfg = tiny_config(f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}", *overrides)
        configuration.check_config(cfg, world_size=2)
        launch.prepare(cfg, world_size=2, weights=True)

    prepare(f"algo.teacher={larger}")
    make_tiny.save_model(tmp_path / "shuffled", make_tiny.char_tokenizer("1023456789>+-="))
    make_tiny.save_model(tmp_path / "more", make_tiny.char_tokenizer("0123456789>+-=ab"))  # knows more: legal
    tiny_model(tmp_path / "narrow", hidden=96, kv_heads=1)
    tiny_model(tmp_path / "few")
    config = tmp_path / "few/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 15}))
    prepare(f"algo.teacher={tmp_path / 'more'}")
    for folder, message in {
        "shuffled": r"algo\.teacher=.*: its tokenizer is another one: token 2 of model\.path=.* is '0', which",
        "few": r"algo\.teacher=.*: its vocabulary has 15 rows, model\.path=.* has 16",
        "nowhere": r"algo\.teacher=.*nowhere",
    }.items():
        with pytest.raises(UserError, match=message):
            prepare(f"algo.teacher={tmp_path / folder}")
    with pytest.raises(UserError, match=r"algo\.teacher=.*narrow: parallel\.tp=2 does not divide .* attention heads 3"):
        prepare(f"algo.teacher={tmp_path / 'narrow'}", "parallel.tp=2")
