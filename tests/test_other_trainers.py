"""Keys of other trainers are answered with ours, and whole configurations of theirs are translated."""

import re
import subprocess
import sys

import pytest
import yaml

import megatron_bridge as bridge
import train_grpo
from config import UserError
from support.base.from_other_trainers import answer, answer_keys, read_defaults, read_tables
from support.base.read_config import KEYS, SECTIONS, load_config
from support.check import checks
from support.engine.vllm_process import engine_options
from support.run.inputs import with_steps
from tests.conftest import REPO
from tools import translate

CONFIG = str(REPO / "configs/tiny.yaml")
TABLES = read_tables()
ROWS = [(trainer, theirs, row) for trainer, table in TABLES.items() for theirs, row in table.items()]
FILES = sorted((REPO / "tests/data/other_trainers").glob("*.yaml"))


def refused(*overrides: str, config: str = CONFIG) -> str:
    with pytest.raises(UserError) as error:
        load_config(config, list(overrides))
    return str(error.value)


def test_the_page_has_every_row():
    assert list(TABLES) == ["verl", "TRL", "ROLL", "NeMo-RL", "OpenRLHF", "other spellings"]
    assert all(len(table) >= 80 for table in TABLES.values())
    _, heading, tables = translate.PAGE.read_text().partition("\n## verl\n")
    assert heading + tables == translate.page_tables(), "python -m tools.translate --page"


def test_every_key_of_ours_exists():
    legal = {*KEYS, *(f"megatron.{key}" for key in bridge.megatron_fields()), "rollout.vllm", "megatron"}
    legal |= {f"rollout.vllm.{key}" for key in engine_options()}
    assert {row.ours for _, _, row in ROWS if row.ours} <= legal
    assert all(row.ours or row.note for _, _, row in ROWS)


def test_every_value_can_be_translated():
    for trainer, theirs, row in ROWS:
        if isinstance(row.by, str) and row.by != "lost":
            assert row.by in translate.FUNCTIONS, (trainer, theirs)
    used = {row.by for _, _, row in ROWS if isinstance(row.by, str)}
    assert set(translate.FUNCTIONS) <= used
    for trainer, defaults in read_defaults().items():
        assert all(translate.find_row(key, TABLES[trainer]) for key in defaults)


def test_every_key_of_ours_in_a_note_exists():
    known = {*KEYS, *(f"megatron.{key}" for key in bridge.megatron_fields()), *TABLES["verl"], *TABLES["OpenRLHF"]}
    known |= {"reward.options.model", "reward.options.remote"}
    sections = "|".join(SECTIONS)
    for _, theirs, row in ROWS:
        for key in re.findall(rf"(?<![.\w])(?:{sections}|megatron)\.\w+(?:\.\w+)?", row.note):
            found = {key, key.rpartition(".")[0]} & known
            assert found or key.endswith((".md", ".py")), (theirs, key)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_each_key_of_theirs_is_answered(row):
    _, theirs, _ = row
    if theirs in KEYS:
        return  # one of ours as well, so it is never unknown
    said = answer(theirs, TABLES, KEYS)
    assert said.startswith(f"unknown key '{theirs}', of ")
    # Where two trainers have a key of this name, the first one's answer is given.
    first = next(table[theirs] for table in TABLES.values() if theirs in table)
    assert f"; here {first.ours}" in said if first.ours else "; nothing to set here: " in said


# Names of the articles that this trainer goes back to, in their own spelling, and where the answer leads.
SPELLED = {
    "system.tp_size": "parallel.tp", "system.pp_size": "parallel.pp", "system.dp_size": "nothing to set",
    "trainer.num_epochs": "train.epochs", "model.actor": "nothing to set", "model.actor.pretrained": "model.path",
    "model.critic.type": "there is no critic", "algorithm.group_size": "rollout.group_size",
    "algorithm.ppo.clip_coef": "algo.clip_low", "algorithm.kl_coeff": "algo.kl_coef", "kl_coeff": "algo.kl_coef",
    "enable_activation_offload": "recompute_granularity", "forward_prefetch": "overlap_param_gather",
    "profiler.enable": "profile.start", "profiler.level": "profile.torch",
    "moe_grouped_gemm": "megatron.moe_grouped_gemm",
    "moe_layer_recompute": "megatron.moe_layer_recompute", "overlap_grad_reduce": "megatron.overlap_grad_reduce",
    "moe_token_dispatcher_type": "megatron.moe_token_dispatcher_type", "TP_SIZE": "parallel.tp",
    "expert_model_parallel_size": "parallel.ep", "recompute_activations": "megatron.recompute_granularity",
    "enable_hybrid_engine": "nothing to set", "reward.type": "reward.default", "fp16": "model.dtype",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "train.logprob_max_tokens_per_micro_batch",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "megatron.recompute_granularity",
    "actor_train.training_args.gradient_accumulation_steps": "rollout.prompts_per_step",
    "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size": "parallel.vpp",
    "reference.strategy_args.strategy_config.tensor_model_parallel_size": "layout of the trainer",
    "vllm_importance_sampling_mode": "algo.correction", "vllm_importance_sampling_clip_max": "algo.correction_high",
    "vllm_importance_sampling_clip_min": "algo.correction_low", "lr_scheduler_type": "schedule.lr",
    "steps_per_generation": "gradient_accumulation_steps", "epsilon_high": "epsilon_high - 1",
    "loss_fn.reference_policy_kl_penalty": "algo.kl_coef", "grpo.num_prompts_per_step": "rollout.prompts_per_step",
    "algo.kl.estimator": "algo.kl", "vllm.num_engines": "rollout.tp",
}  # fmt: skip


@pytest.mark.parametrize(("key", "leads"), SPELLED.items())
def test_names_of_articles_are_answered(key, leads):
    assert leads in answer_keys({key: 1}, KEYS)[key]


@pytest.mark.parametrize(
    ("key", "needle"),
    [
        ("algo.kl_loss_coef", "; here algo.kl_coef: with algo.kl_in=loss"),
        ("rollout.n", ", like actor_rollout_ref.rollout.n of verl; here rollout.group_size"),
        ("critic.optim.lr", "there is no critic"),
        ("actor_rollout_ref.actor.optim.lr_decay_style", "; here schedule.lr: "),
    ],
)
def test_a_key_like_one_of_theirs_is_answered(key, needle):
    assert needle in answer_keys({key: 1}, KEYS)[key]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.n", "unknown key 'train.n'; the nearest legal key is 'train'"),
        ("evall.max_new_tokens", "unknown key 'evall'; the nearest legal key is 'eval'"),
        ("trian.lr", "unknown key 'trian'; the nearest legal key is 'train'"),
        ("data.trian", "unknown key 'data.trian'; the nearest legal key is 'data.train'"),
        ("rollout.group_sise", "unknown key 'rollout.group_sise'; the nearest legal key is 'rollout.group_size'"),
    ],
)
def test_a_misspelt_key_of_ours_is_not_taken_for_theirs(key, said):
    assert answer(key, TABLES, KEYS) is None
    assert refused(f"{key}=1") == said


def test_all_unknown_keys_of_a_configuration_are_answered_at_once(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_files: a.parquet, prompt_key: q}\nactor_rollout_ref:\n  rollout: {n: 5}\n"
        "  actor: {kl_loss_coef: 0.001, use_dynamic_bsz: true, made_up: 3}\n"
    )
    lines = refused("num_iterations=2", "train.lrr=1", config=str(path)).split("\n       ")
    answers = {line.split("'")[1]: line for line in lines}
    assert answers.keys() == {
        "data.train_files", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.kl_loss_coef", "train.lrr",
        "actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.made_up", "num_iterations",
    }  # fmt: skip
    assert answers["data.train_files"].endswith("here data.train")
    assert answers["actor_rollout_ref.actor.use_dynamic_bsz"].endswith("nothing to set here: always")
    assert answers["train.lrr"].endswith("the nearest legal key is 'train.lr'")
    assert "the nearest legal key is" in answers["actor_rollout_ref.actor.made_up"]


def test_a_key_inside_of_ours_is_answered():
    assert "unknown key 'schedule.lr.sahpe'; the nearest" in refused("schedule.lr.sahpe=linear")


def test_a_start_without_unknown_keys_does_not_read_the_tables():
    code = "import sys; from support.base.read_config import load_config; load_config('configs/tiny.yaml', [])"
    code += "; assert 'support.base.from_other_trainers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)
    assert "from_other_trainers" not in (REPO / "support/run/launch.py").read_text()


# ---------------------------------------------------------------- whole configurations


def translated(path, capsys) -> tuple[dict, str]:
    """(our tree, all of the text) of a configuration of theirs."""
    assert translate.main([str(path)]) == 0
    text = capsys.readouterr().out
    return yaml.safe_load(text), text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_configuration_of_theirs_is_translated_and_checked(path, capsys, tmp_path):
    _, text = translated(path, capsys)
    ranks = int(re.search(r"--nproc_per_node=(\d+)", text)[1])
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    here = ["data.train=a.jsonl", "log.tensorboard=false", "log.wandb=false", "resume=none"]  # not of this machine
    if "default: custom" in text:
        here.append("reward.default=math")  # their file is not here
    cfg = load_config(str(mine), here)
    checks.check_config(cfg, ranks)
    train_grpo.rehearse(with_steps(cfg, cfg.rollout.prompts_per_step))
    # Each of their keys is either translated or listed with its value.
    theirs = translate.read_theirs(path, None)
    table = TABLES[theirs.trainer]
    listed = "\n".join(line for line in text.splitlines() if line.startswith("#   "))
    for key, value in theirs.flat.items():
        row = table.get(translate.find_row(key, table) or "")
        lost = row is None or row.by == "lost" or (not row.ours and row.by is None)
        if lost and value not in (None, {}, []):
            assert f"#   {key}: " in listed, key


def test_there_are_five_of_each():
    found = [translate.read_theirs(path, None).trainer for path in FILES]
    assert {trainer: found.count(trainer) for trainer in translate.TRAINERS} == dict.fromkeys(translate.TRAINERS, 5)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "verl_7b_megatron",  # 1024 prompts in mini-batches of 256; 4 samples of 2048 tokens; its dual clip is on
            {
                "rollout.prompts_per_step": 1024, "train.updates_per_step": 4, "train.max_tokens_per_micro_batch": 8192,
                "algo.kl_coef": 0.001, "algo.kl": "k3", "algo.kl_in": "loss", "algo.dual_clip": 3.0, "rollout.tp": 4,
                "train.weight_decay": 0.01, "train.eval_every": 5, "train.epochs": 15, "log.wandb": True,
                "data.answer_key": "reward_model.ground_truth", "eval.temperature": 0.0,
                "data.source_key": "data_source",
            },
        ),
        (
            "verl_dapo_30b_moe",
            {
                "algo.clip_high": 0.28, "algo.dual_clip": 10.0, "algo.max_rounds": 10, "algo.overlong_buffer": 4096,
                "algo.correction": "tis", "algo.correction_high": 2.0, "algo.replay_routes": True, "parallel.ep": 8,
                "megatron.moe_router_dtype": "fp32", "train.offload": "optimizer", "train.adam_beta2": 0.98,
                "train.steps": 500, "train.eval_every": None, "megatron.moe_permute_fusion": None,
            },
        ),
        (
            "verl_lora",
            {"algo.kl_in": "reward", "algo.kl": "k1", "lora.rank": 32, "lora.targets": None, "train.warmup_steps": 12},
        ),
        (
            "verl_gspo",
            {
                "algo.loss": "gspo", "algo.correction_level": "sequence", "rollout.max_new_tokens": 4096,
                "reward.custom": "rewards/mine.py:score", "output_dir": None, "eval.temperature": 0.6,
            },
        ),
        ("verl_dppo", {"algo.loss": "dppo_tv", "algo.old_logp": "rollout", "algo.advantage": "reinforce_pp"}),
        (
            "trl_defaults",  # 8 answers a device on 8 devices are 8 prompts of 8
            {
                "rollout.prompts_per_step": 8, "rollout.group_size": 8, "algo.correction": "icepop",
                "algo.correction_level": "sequence", "algo.correction_low": 0.0, "algo.correction_high": 3.0,
                "schedule.lr.shape": "linear", "schedule.lr.to": 0.0, "reward.default.math": 1.0, "train.epochs": 3,
            },
        ),
        (
            "trl_dapo",  # 4 · 8 · 16 answers of 16 a prompt; 16 / 4 updates; 400 updates are 100 steps
            {
                "rollout.prompts_per_step": 32, "train.updates_per_step": 4, "train.steps": 100, "rollout.tp": 2,
                "train.warmup_steps": 2, "algo.clip_low": 0.2, "algo.clip_high": 0.28, "algo.correction": "tis",
                "algo.correction_level": None, "schedule.lr.shape": None, "train.save_every": 12,
            },
        ),
        (
            "trl_cispo",
            {"algo.loss": "cispo", "algo.clip_low": 1.0, "algo.clip_high": 4.0, "algo.advantage": "grpo_batch"},
        ),
        (
            "trl_gdpo_lora",
            {
                "algo.advantage": "gdpo", "reward.default.format": 0.2, "rollout.prompts_per_step": 16,
                "train.updates_per_step": 2, "train.steps": 100, "lora.targets": ["qkv", "proj"],
            },
        ),
        (
            "trl_gspo",  # two iterations: 800 updates are 800 / (4 · 2) steps
            {
                "algo.loss": "gspo", "train.steps": 100, "algo.correction_high": "inf", "algo.advantage": "dr_grpo",
                "algo.loss_norm": "seq_mean_token_mean", "algo.dual_clip": 4.0, "resume": "auto",
            },
        ),
        (
            "roll_7b",  # 16 replicas · 32 · 1 answers an update
            {
                "train.updates_per_step": 1, "algo.dual_clip": 1.4, "rollout.top_p": 0.99,
                "rollout.max_logp_gap": "inf",
                "reward.by_source.KodCode": "code", "eval.max_new_tokens": 4096, "train.steps": 500,
            },
        ),
        (
            "roll_30b_moe",  # 32 GPUs / (2 · 2) = 8 replicas · 16 answers
            {
                "train.updates_per_step": 4, "parallel.vpp": 8, "megatron.moe_layer_recompute": True,
                "train.warmup_steps": 5,
            },
        ),
        ("roll_reinforce", {"algo.advantage": "reinforce_pp", "algo.kl_in": "reward", "algo.kl_coef": 0.01}),
        ("roll_lora", {"algo.loss": "gspo", "lora.targets": ["proj", "qkv"], "train.warmup_steps": 15}),
        (
            "nemo_1b",
            {
                "algo.advantage": "grpo_loo", "algo.kl": "k3+", "algo.kl_coef": 0.01, "train.lr": 5e-6,
                "train.max_tokens_per_micro_batch": 2048, "train.epochs": 1, "train.warmup_steps": 50, "parallel.tp": 1,
                "data.max_prompt_tokens": 256, "rollout.max_new_tokens": 256, "rollout.top_k": None,
            },
        ),
        (
            "nemo_8b_megatron",
            {
                "train.lr": 3e-7, "parallel.pp": 2, "train.updates_per_step": 4, "train.warmup_steps": 3,
                "train.steps": 300,
                "train.save_every": 0, "megatron.overlap_grad_reduce": True, "train.adam_beta2": 0.98,
            },
        ),
        ("nemo_30b_moe", {"algo.correction": "icepop", "parallel.ep": 8, "rollout.vllm.moe_backend": "triton"}),
        (
            "nemo_gspo_dapo",
            {"algo.loss": "gspo", "algo.advantage": "grpo", "algo.max_rounds": 10, "algo.overlong_buffer": 64},
        ),
        (
            "nemo_gdpo_cispo",
            {"algo.loss": "cispo", "algo.clip_high": 4.0, "algo.advantage": "gdpo", "data.eval": "test.jsonl"},
        ),
    ],
)  # fmt: skip
def test_values_are_translated_by_hand(name, wanted, capsys):
    tree, _ = translated(REPO / f"tests/data/other_trainers/{name}.yaml", capsys)
    found = dict(translate.dotted_items(tree))
    assert {key: found.get(key) for key in wanted} == wanted


def test_what_is_lost_is_listed(capsys):
    _, text = translated(REPO / "tests/data/other_trainers/verl_dapo_30b_moe.yaml", capsys)
    lost = text.partition("\n# Without a counterpart here, or for you to choose:\n")[2]
    for line in (
        "actor_rollout_ref.actor.megatron.param_offload: true  (weights stay on the GPU",
        'trainer.logger: ["console", "tensorboard", "swanlab"]  (log.tensorboard and log.wandb alone',
        "megatron.moe_permute_fusion of ours: true  (megatron.moe_permute_fusion=True: needs Transformer Engine",
        "reward_model.reward_kwargs.max_resp_len: 8192  (no key here)",
    ):
        assert f"#   {line}" in lost
    _, text = translated(REPO / "tests/data/other_trainers/verl_gspo.yaml", capsys)
    assert '#   output_dir of ours: "${oc.env:HOME}/ckpt"  (write the value itself)' in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "no configuration: legal are keys with values"),
        ("a: [1, 2", "cannot read it"),
        ("a: 1\nb: 2\nc: {d: 3}\n", "no configuration of verl, TRL, ROLL, NeMo-RL: of its 3 keys"),
        ("model: {path: a}\ndata: {train: b}\ntrain: {lr: 1.0}\n", "no configuration of verl, TRL, ROLL, NeMo-RL"),
    ],
)
def test_a_file_that_is_none_ends_with_the_reason(text, reason, tmp_path, capsys):
    path = tmp_path / "their.yaml"
    path.write_text(text)
    assert translate.main([str(path)]) == 2
    assert reason in capsys.readouterr().err
    assert translate.main([str(tmp_path / "absent.yaml")]) == 2


def test_a_layout_that_is_not_legal_ends_with_the_reason(capsys):
    path = REPO / "tests/data/other_trainers/roll_30b_moe.yaml"
    assert translate.main([str(path), "--world-size", "3"]) == 2
    assert "does not divide the world size 3" in capsys.readouterr().err


def test_references_are_resolved():
    flat = {
        "a.b": 4,
        "a.c": "${.b}",
        "d": "${oc.select:no.such,7}",
        "e": "${mul:${a.b}, ${a.c}}",
        "f": "x-${a.b}",
        "g": "${g}",
    }
    found = {key: translate.resolve(value, key, flat) for key, value in flat.items()}
    assert found == {"a.b": 4, "a.c": 4, "d": 7, "e": 16, "f": "x-4", "g": "${g}"}
