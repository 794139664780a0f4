"""Trainer and vLLM hold the same weights, for every family, layout and precision; where they do not, the run stops."""

import itertools
import json
import shutil
from pathlib import Path
from statistics import median

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import REPO
from tests.test_layouts import LLAMA3

METRICS = [
    "step",
    "reward/mean",
    "reward/std",
    "reward/reverse/mean",
    "groups/zero_std_frac",
    "groups/sampled",
    "groups/trained",
    "groups/rounds",
    "loss/total",
    "loss/policy",
    "kl/ref",
    "kl/k1",
    "kl/k2",
    "entropy",
    "ratio/clip_frac",
    "logp_gap/mean",
    "logp_gap/max",
    "mismatch/k3",
    "mismatch/ess",
    "mismatch/cut_frac",
    "grad_norm",
    "moe/load",
    "lr",
    "tokens/prompt_mean",
    "tokens/response_mean",
    "tokens/response_max",
    "tokens/truncated_frac",
    "time/rollout",
    "time/reward",
    "time/logprob",
    "time/train",
    "time/sync",
    "time/save",
    "time/step",
    "speed/response_tokens_per_s",
    "speed/samples_per_s",
    "pack/fill",
    "idle_frac",
    "mem/peak_gb",
    "update/skipped",
]
LONG_ROPE = {"llama": {"rope_parameters": LLAMA3}}
SMALL = ["train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4"]


def test_a_stale_engine_is_caught(train):
    run = train(2, *SMALL, "train.warmup_steps=0", script=REPO / "tests/stale_push.py")
    assert run.code != 0 and len(run.metrics) == 1
    assert "error: step 2: trainer and vLLM disagree" in run.text
    assert "likely cause: the engine did not take up the last weight push" in run.text
    assert run.text.count("Traceback") == 1 and run.text.index("error: ") < run.text.index(
        "Traceback"
    )  # torchrun's own


@pytest.mark.parametrize(
    ("arch", "tied", "layout"),
    [
        ("qwen3", True, ["parallel.tp=2", "rollout.tp=1"]),
        ("llama", False, ["parallel.pp=2", "rollout.tp=2"]),
        ("qwen3_moe", False, ["parallel.ep=2", "rollout.tp=2"]),
        pytest.param("mistral", False, ["parallel.cp=2", "rollout.tp=1"], marks=pytest.mark.slow),
        pytest.param("qwen2", False, ["parallel.tp=2", "parallel.sp=false", "rollout.tp=2"], marks=pytest.mark.slow),
        pytest.param("qwen2_moe", False, ["parallel.tp=2", "parallel.ep=2", "rollout.tp=1"], marks=pytest.mark.slow),
        pytest.param("mixtral", False, ["parallel.pp=2", "rollout.tp=2"], marks=pytest.mark.slow),
    ],
)
def test_trainer_transformers_and_vllm_agree(train, tmp_path, arch, tied, layout):
    import make_tiny

    tokenizer = make_tiny.char_tokenizer("0123456789>+-=")
    make_tiny.save_model(tmp_path / "model", tokenizer, arch, tied, hidden=64, layers=2, **LONG_ROPE.get(arch, {}))
    run = train(
        2, f"model.path={tmp_path / 'model'}", *layout, *SMALL, "train.export_every=1", "train.warmup_steps=0",
        "train.lr=0.01", "rollout.max_new_tokens=24", "train.max_tokens_per_micro_batch=64", "rollout.temperature=0.8",
    )  # fmt: skip
    assert run.code == 0, run.text
    assert max(m["logp_gap/max"] for m in run.metrics) < 1e-4
    if "moe" in arch or arch == "mixtral":
        assert all(m["moe/load"] == max(m["moe/load/layer_00"], m["moe/load/layer_01"]) >= 1 for m in run.metrics)
    # Step 2 samples from pushed, changed weights; the export of step 1 holds the same.
    for step, path in enumerate([tmp_path / "model", run.out / "hf/step_000001"], start=1):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for row in run.rollouts(step):
            ids, prompt = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"])
            with torch.no_grad():
                logp = (model(ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(-1, ids[0, 1:, None])[prompt - 1 :, 0]
            assert (logp - torch.tensor(row["rollout_logp"])).abs().max() < 1e-4


def test_bf16_and_the_output_folder(train):
    run = train(2, *SMALL, "model.dtype=bf16", "data.eval=null")
    assert run.code == 0, run.text
    outcomes = ["reward/reverse/timeout_frac", "reward/reverse/error_frac"]
    assert [list(m) for m in run.metrics] == [[*METRICS[:4], *outcomes, *METRICS[4:]]] * 2
    assert all(m["logp_gap/mean"] < 0.05 for m in run.metrics)
    row = run.rollouts(2)[0]
    assert set(row) == {
        "group", "prompt_ids", "response_ids", "rollout_logp", "text", "source", "reward", "reward_parts", "advantage",
        "finished",
    }  # fmt: skip
    assert len(row["response_ids"]) == len(row["rollout_logp"]) and len(run.rollouts(1)) == 16
    assert "dtype: bf16" in (run.out / "config.yaml").read_text()
    assert "outputs: " in run.text and "at step 1," in run.text
    again = train(2, *SMALL, "model.dtype=bf16")  # a second run moves the first aside
    assert again.code == 0 and (run.out.with_name("out.1") / "metrics.jsonl").exists()
    same = [[json.loads(line)["response_ids"] for line in (folder / "rollouts/step_000001.jsonl").open()]
            for folder in (run.out, run.out.with_name("out.1"))]  # fmt: skip
    assert same[0] == same[1]


def test_a_reward_that_raises_stops_the_run_with_its_row(train, tmp_path):
    (tmp_path / "broken.py").write_text("def f(text, answer, row):\n    return row['bonus']\n")
    run = train(2, *SMALL, f"reward.custom={tmp_path / 'broken.py'}:f")
    assert run.code != 0
    assert "the reward of source 'reverse' failed: KeyError: 'bonus' (broken.py, line 2)" in run.text
    assert '"prompt": "' in run.text and "exitcode  : 2" in run.text


def test_rewards_that_fail_now_and_then_are_counted_and_shown_once(train, tmp_path):
    lines = (
        "def f(text, answer, row):",
        "    if text[:1] in ('0', '1'):",
        "        raise KeyError(text[:1])",
        "    return 1.0",
    )
    (tmp_path / "shaky.py").write_text("\n".join(lines))
    run = train(2, *SMALL, f"reward.custom={tmp_path / 'shaky.py'}:f", "reward.max_error_frac=0.9")
    assert run.code == 0, run.text
    for step, metrics in enumerate(run.metrics, start=1):
        rows = run.rollouts(step)
        failed = [row for row in rows if row["text"][:1] in ("0", "1")]
        assert metrics["reward/reverse/error_frac"] == len(failed) / len(rows)
        assert all(row["reward"] == 0 and row["reward_parts"] == {} for row in failed)
    assert run.text.count("warning: the reward of source 'reverse' failed: KeyError") == 1


HOSTILE = """
import subprocess, sys

def f(text, answer, row):
    kind = sum(map(ord, text)) % 6
    if kind == 0:
        while True:
            pass
    if kind == 1:
        return len(bytearray(10 << 30))
    if kind == 2:
        subprocess.Popen(["sleep", "5417"], start_new_session=True)
        while True:
            pass
    if kind == 3:
        return f(text, answer, row)
    if kind == 4:
        sys.exit(3)
    return 1.0
"""


@pytest.mark.slow
def test_a_run_survives_hostile_rewards(train, tmp_path):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    run = train(
        2, *SMALL, f"reward.custom={tmp_path / 'hostile.py'}:f", "reward.max_error_frac=1", "reward.timeout_s=1"
    )
    assert run.code == 0, run.text
    for step, metrics in enumerate(run.metrics, start=1):
        kinds = [sum(map(ord, row["text"])) % 6 for row in run.rollouts(step)]
        assert metrics["reward/reverse/timeout_frac"] == sum(k in (0, 2) for k in kinds) / len(kinds)
        assert metrics["reward/reverse/error_frac"] == sum(k in (1, 3, 4) for k in kinds) / len(kinds)
        assert metrics["reward/mean"] == sum(k == 5 for k in kinds) / len(kinds)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"5417" in command for command in commands)


@pytest.mark.slow
def test_grading_runs_beside_sampling(train, tmp_path):
    """Rewards that sleep 50 ms lengthen a step by less than a fifth of what they cost one after the other."""
    seconds = {}
    for sleep in (0.0, 0.05):
        (tmp_path / "slow.py").write_text(
            f"import time\ndef f(text, answer, row):\n    time.sleep({sleep})\n    return 1.0\n"
        )
        run = train(
            2, "train.steps=8", "rollout.prompts_per_step=16", "rollout.group_size=4", "rollout.max_new_tokens=128",
            "rollout.vllm.max_num_seqs=8", "reward.workers=2", f"reward.custom={tmp_path / 'slow.py'}:f",
            "train.lr=0",
        )  # fmt: skip
        assert run.code == 0, run.text
        seconds[sleep] = {key: median(m[key] for m in run.metrics[2:]) for key in ("time/step", "time/reward")}
    serial = 16 * 4 * 0.05
    print(f"serial cost {serial:.1f} s; {seconds}")
    assert seconds[0.05]["time/step"] - seconds[0.0]["time/step"] < 0.2 * serial


def test_evaluation_before_the_first_step_and_on_the_way(train, tiny, tmp_path):
    lines = (tiny / "train.jsonl").read_text().splitlines()[:5]
    rows = [{**json.loads(line), "source": "held"} for line in lines[:2]] + [json.loads(line) for line in lines[2:]]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train(
        2, *SMALL, "train.steps=3", f"data.eval={tmp_path / 'eval.jsonl'}", "train.eval_every=2", "eval.samples=4",
        "eval.pass_reward=0.3", "eval.max_new_tokens=6", "train.lr=0.01",
    )  # fmt: skip
    assert run.code == 0, run.text
    assert [m["step"] for m in run.metrics] == [0, 1, 2, 3]
    evaluated = {m["step"]: m for m in run.metrics if "time/eval" in m}
    assert list(evaluated) == [0, 2, 3] and not any(key.startswith("reward/") for key in evaluated[0])
    for step, metrics in evaluated.items():
        samples = [json.loads(line) for line in (run.out / f"rollouts/eval_{step:06d}.jsonl").open()]
        assert len(samples) == 20 and max(len(s["response_ids"]) for s in samples) > 4
        for source, groups in (("held", (0, 1)), ("reverse", (2, 3, 4))):
            rewards = [[s["reward"] for s in samples if s["group"] == g] for g in groups]
            assert metrics[f"eval/{source}/avg@4"] == pytest.approx(sum(map(sum, rewards)) / 4 / len(groups))
            for k in (1, 2, 4):  # by hand: the share of the k-subsets of the four answers with one that passes
                subsets = [any(x >= 0.3 for x in part) for r in rewards for part in itertools.combinations(r, k)]
                assert metrics[f"eval/{source}/pass@{k}"] == pytest.approx(sum(subsets) / len(subsets))
    assert "eval after step 0: held/avg@4" in run.text


@pytest.mark.slow
def test_words_with_long_prompts_and_cut_off_answers(train, tmp_path):
    """The path of configs/tiny_gsm8k.yaml: BPE tokenizer, chat template, prompts of many lengths, the gsm8k reward."""
    import make_tiny

    names = ["Ann", "Bo", "Cem", "Dora", "Eli"]
    questions = [
        " ".join(f"{name} buys {i + k} pears and gives {k} of them away." for k, name in enumerate(names[: 1 + i % 5]))
        for i in range(200)
    ]
    tokenizer = make_tiny.bpe_tokenizer(questions, vocab_size=300)
    make_tiny.save_model(tmp_path / "model", tokenizer, hidden=64)
    rows = [{"question": question, "answer": f"#### {i}"} for i, question in enumerate(questions)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train(
        2, "train.steps=2", f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'words.jsonl'}",
        "rollout.prompts_per_step=64", "rollout.max_new_tokens=48", config="configs/tiny_gsm8k.yaml",
    )  # fmt: skip
    assert run.code == 0, run.text
    rollouts = run.rollouts(1)
    assert len(rollouts) == 512 and len({len(row["prompt_ids"]) for row in rollouts}) > 10
    assert 0 < run.metrics[0]["tokens/truncated_frac"] < 1
    assert all(row["finished"] == (row["response_ids"][-1] == 0) for row in rollouts)
    assert all(m["logp_gap/max"] < 1e-4 for m in run.metrics)


@pytest.mark.parametrize("change", ["lacks", "has"])
def test_weights_that_do_not_fit_the_model_are_refused(tiny, tmp_path, change):
    import megatron_bridge

    shutil.copytree(tiny / "model", tmp_path / "model")
    megatron_bridge.check_weights(str(tmp_path / "model"))
    weights = load_file(tmp_path / "model/model.safetensors")
    if change == "lacks":
        del weights["model.layers.1.mlp.up_proj.weight"]
        message = "lacks model.layers.1.mlp.up_proj.weight"
    else:
        weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
        message = "no place for: model.layers.0.self_attn.o_proj.bias"
    save_file(weights, tmp_path / "model/model.safetensors")
    with pytest.raises(ValueError, match=message):
        megatron_bridge.check_weights(str(tmp_path / "model"))


@pytest.mark.slow
def test_the_demo_learns(train):
    run = train(2, "model.path=build/tiny/model", "data.train=build/tiny/train.jsonl")
    assert run.code == 0, run.text
    rewards = [m["reward/mean"] for m in run.metrics]
    assert rewards[0] < 0.2 and sum(rewards[-10:]) / 10 >= 0.9
    assert sum(m["time/step"] for m in run.metrics) < 240
    assert 2 * run.metrics[-1]["mem/peak_gb"] < 6
