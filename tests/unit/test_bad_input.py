"""Mistakes a user can make before training: exit code 2, one message with the key and what is legal, no traceback."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from config import UserError
from grpo.run.preflight.configuration import check_weights
from tests.conftest import REPO, refused
from train_grpo import main


@pytest.fixture
def dry_run(tiny, capfd, offline):
    def run(*overrides, world_size=4):
        code = main([
            "--config", str(REPO / "configs/tiny.yaml"), "--dry-run", "--world-size", str(world_size),
            f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}", *overrides,
        ])  # fmt: skip
        streams = capfd.readouterr()
        return code, streams.err if code else streams.out

    return run


ROOM = "train.max_tokens_per_micro_batch=8192; train.logprob_max_tokens_per_micro_batch=8192"
TAUGHT = "algo.teacher=self; data.hint_key=answer"
# Options as a user would write them → what the refusal says.
MEGATRON = {
    "loss_scale=8": "only fp16 needs a loss scale; leave it out, or use model.dtype=fp16",
    "moe_token_dispatcher_type=flex": "must be 'alltoall' or 'allgather'",
    "moe_token_dispatcher_type=allgather": "is a Qwen2ForCausalLM, which has no experts",
    "optimizer_cpu_offload=true": "use model.dtype=bf16",
    "overlap_grad_reduce=1": "must be a valid boolean",
}
VLLM = {
    "max_num_seqs='8'": "max_num_seqs='8': must be a valid integer",
    "attention_backend=flash_atn": "attention_backend='flash_atn': no such value; the nearest is FLASH_ATTN",
    "data_parallel_size=2": "may not be set: it is settled by the trainer, in whose ranks vLLM runs",
}


@pytest.mark.parametrize(
    "overrides, needles",
    [
        ("resume=no", ["resume=False: must be none, auto, or the folder of a checkpoint"]),
        ("model.dtype=float16", ["'float16': must be 'bf16', 'fp16' or 'fp32'"]),
        ("actor.megatron.override_transformer_config.fp16=true", ["here model.dtype"]),
        ("train", ["section.key=value"]),
        ("rollout.temperature=0.005", ["rollout.temperature=0.005", "0.01"]),
        ("model.dtype=fp16; megatron.initial_loss_scale=0.5", ["=0.5 is below megatron.min_loss_scale=1"]),
        ("rollout.tp=3", ["rollout.tp = 3 does", "world size 4"]),
        ("parallel.pp=4", ["parallel.pp=4", "for 2 layers", "parallel.pp · parallel.vpp that divides 2, or megatron."]),
        ("rollout.stop_token_ids=[15, 16]", ["stop_token_ids, or eos_token_id of tokenizer", "has 16 rows"]),
        ("train.updates_per_step=3", ["train.updates_per_step=3", "prompts_per_step=16"]),
        ("megatron.recompute_granularity=full", ["Megatron-core refuses", "recompute_method"]),
        ("rollout.vllm.max_num_seq=8", ["unknown key 'rollout.vllm.max_num_seq'; the nearest is max_num_seqs"]),
        ("parallel.vpp=2", ["parallel.vpp=2", "needs parallel.pp above 1"]),
        ("model.path=build/smollm2/none", ["no folder /", "none; `make llm` makes build/smollm", "model.path=FOLDER"]),
        ("data.train=nowhere.jsonl", ["data.train", "nowhere.jsonl"]),
        (f"data.max_prompt_tokens=4000; {ROOM}", ["beyond max_position_embeddings=2048"]),
        # schedules
        ("schedule.lr={shape: cubic}", ["schedule.lr", "'constant', 'linear' or 'cosine'"]),
        ("schedule.kl_coef={to: 0.1}", ["algo.kl_coef=0 keeps no reference model"]),
        ("data.train={a.jsonl: 0}", ["data.train", "must be"]),
        ("algo.teacher=self", ["algo.teacher=self without hints", "data.hint_key"]),
        (f"{TAUGHT}; algo.advantage=none; algo.kl_coef=5; algo.kl_in=reward", ["use algo.kl_in=loss or algo."]),
        # divergences over the whole vocabulary
        ("algo.teacher_kl=jsd", ["algo.teacher_kl=jsd needs the model that teaches, in algo.teacher"]),
        (f"{TAUGHT}; algo.teacher_kl=kl", ["algo.teacher_kl", "'sampled', 'reverse', 'forward' or 'jsd'"]),
        (f"{TAUGHT}; algo.teacher_kl=jsd; algo.teacher_beta=1", ["algo.teacher_beta=1: must be less than 1"]),
        (f"{TAUGHT}; algo.teacher_kl=forward; algo.teacher_beta=0.9", ["algo.teacher_beta=0.9 has no effect"]),
        (f"{TAUGHT}; algo.teacher_top_k=4", ["algo.teacher_top_k=4 has no effect", "use teacher_kl=reverse, forward"]),
        (f"{TAUGHT}; algo.teacher_kl=reverse; algo.teacher_top_k=17", ["algo.teacher_top_k=17 is above the 16 tokens"]),
        ("algo.kl=full", ["algo.kl=full is a term of the loss with algo.kl_coef above 0"]),
        ("algo.kl=full; algo.kl_coef=1; algo.kl_in=reward", ["use algo.kl_in=loss, or k1, k2, k3, k3+"]),
        ("algo.loss=sapo", ["ppo_clip, gspo, cispo, ipo, dppo_tv, reinforce"]),
        ("algo.correction_low=3", ["above algo.correction_high=2"]),
        # options of Megatron-core and vLLM
        *((f"megatron.{option}", [option.partition("=")[0], said]) for option, said in MEGATRON.items()),
        *((f"rollout.vllm.{option}", [option.partition("=")[0], said]) for option, said in VLLM.items()),
    ],
)
def test_a_mistake_is_told(dry_run, overrides, needles):
    """Several overrides have "; " between them."""
    code, text = dry_run(*overrides.split("; "))
    assert code == 2 and text.startswith("error: ")
    for needle in needles:
        assert needle in text


def test_missing_config_and_missing_key(capfd, tmp_path):
    assert main(["--config", "nowhere.yaml", "--dry-run"]) == 2
    assert "--config nowhere.yaml: cannot read the configuration: [Errno 2] No such file" in capfd.readouterr().err
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    assert main(["--config", str(tmp_path / "c.yaml"), "--dry-run"]) == 2
    assert "model.path, data.train: not set" in capfd.readouterr().err


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
DEEP = {"num_hidden_layers": 94, "layer_types": None}  # as many as Qwen3-235B-A22B has
FIRST, LAST = (f"megatron.num_layers_in_{stage}_pipeline_stage" for stage in ("first", "last"))
STAGES = "megatron.pipeline_model_parallel_layout"
LINEAR = {  # attention in every other layer
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": None, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
SLIDING = {"layer_types": ["linear_attention", "sliding_attention"]}
MODELS = [  # what differs in config.json, overrides, what the refusal says
    ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "", "is a GPT2LMHeadModel; supported are LlamaFor"),
    ({"hidden_act": "gelu"}, "", "hidden_act='gelu'"),
    ({"quantization_config": {"quant_method": "awq"}}, "", "has a quantization_config; quantised weights (AWQ, "),
    ({"rope_parameters": YARN}, "", "rope type 'yarn' is not supported"),
    ({"num_attention_heads": 12, "num_key_value_heads": 3}, "rollout.tp=4",
     "rollout.tp=4 neither divides the model's key-value heads 3 nor is a multiple of them; it must be one of [1]"),
    ({"vocab_size": 99}, "parallel.tp=2", "size 99; it must be one of [1]"),
    (LINEAR, "parallel.tp=2 parallel.cp=2", "which parallel.tp=2 splits first; it must be one of [1]"),
    (LINEAR | SLIDING, "", "layer_types in its config.json has sliding_attention; beside linear_attention only full_"),
    # Megatron-core builds layers 34 to 59 twice
    (DEEP, f"parallel.pp=4 {FIRST}=60 {LAST}=60", "[range(34, 94)]], not each of the 94 once"),
    (DEEP, f"parallel.pp=2 parallel.vpp=2 {FIRST}=46 {LAST}=48", "by zero; use parallel.pp · "),
    (DEEP, f"parallel.pp=2 {STAGES}=Et*24|t*24|t*23|t*23L", "the layout is one of parallel.vpp=2; use "),
]  # fmt: skip


@pytest.mark.parametrize("changed, overrides, message", MODELS)
def test_a_model_without_a_counterpart_is_refused(dry_run, tiny, tmp_path, changed, overrides, message):
    config = json.loads((tiny / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    code, text = dry_run(f"model.path={tmp_path}", *overrides.split())
    assert code == 2 and message in text, text


INDEX = "model.safetensors.index.json"
CUT = "model-1.safetensors cannot be read (Error while deserializing header: {}): it is missing, cut off, or a pointer"
FILES = [  # what is done to a folder with two shards and their index, what the refusal says (None if there is none)
    (lambda folder, shard: shard.write_text("version https://git-lfs"), CUT.format("header too large")),
    (lambda folder, shard: shard.rename(folder / "model.safetensors"), "json, if model.safetensors is the model"),
    (lambda folder, shard: (folder / INDEX).unlink(), "it must hold model.safetensors and no others, but has model-0."),
    (lambda folder, shard: None, None),
    (
        lambda folder, shard: none_but(folder, "pytorch_model.bin"),
        "no safetensors; torch's own files are not read: con",
    ),
    (lambda folder, shard: none_but(folder, "model-Q4_K_M.gguf"), "no safetensors; GGUF is the format of llama.cpp"),
    (lambda folder, shard: none_but(folder, "training_args.bin"), "but has no safetensors$"),
]


def none_but(folder, name):
    """Removes the weights and their index, and leaves a file of this name."""
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    (folder / name).touch()


@pytest.mark.parametrize("harm, message", FILES)
def test_shards_that_are_not_whole_are_told_by_name(tiny, tmp_path, harm, message):
    folder = shutil.copytree(tiny / "model", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard_of = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(weights)}
    for shard in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: weights[name] for name in weights if shard_of[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    harm(folder, folder / "model-1.safetensors")
    with refused(UserError, message and re.escape(message).replace(r"\$", "$")):
        check_weights(str(folder))


@pytest.mark.parametrize(
    "name, said", [("adapter_config.json", "adapters of PEFT"), ("rank_0.safetensors", "a checkpoint is no")]
)
def test_a_folder_without_a_config_json_is_told_what_it_holds(dry_run, tmp_path, name, said):
    (tmp_path / name).write_text("{}")
    code, text = dry_run(f"model.path={tmp_path}")
    assert code == 2 and re.search(f"model.path=.*; {said}", text), text


def rename(old, new, weights):
    return {name.replace(old, new, 1): weight for name, weight in weights.items()}


def narrow(dtype, weights):
    return weights | {UP: weights[UP].to(dtype)}


EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.o_proj.bias"


@pytest.mark.parametrize(
    "config, change, message",
    [
        ({}, lambda weights: weights | {HEAD: weights[EMBEDDING].clone()}, None),
        # Where the head of a tied model is another tensor, transformers and vLLM use it, whatever config.json says.
        ({}, lambda weights: weights | {HEAD: weights[EMBEDDING] * 1.1}, "tie_word_emb.* differ"),
        ({}, lambda weights: weights | {BIAS: weights[UP][0].clone()}, f"no place for: {BIAS}"),
        ({}, lambda weights: {name: weights[name] for name in weights if name != UP}, f"lacks {UP}"),
        ({"vocab_size": 14}, dict, f"vocab_size=14 in its config.json, but {EMBEDDING} has 16 rows"),
        # Formats of quantised weights, names of PEFT and of wrappers
        ({}, partial(rename, UP, UP.replace("weight", "qweight")), f"lacks {UP}; quantised weights"),
        ({}, lambda weights: weights | {f"{UP}_scale_inv": torch.ones(4)}, "_scale_inv; quantised weights"),
        ({}, partial(narrow, torch.float8_e4m3fn), f"{UP} is F8_E4M3; quantised weights"),
        ({}, partial(narrow, torch.float64), None),
        ({}, partial(rename, "", "base_model.model."), f"lacks {EMBEDDING}.*; adapters of PEFT"),
        ({}, partial(rename, "", "_orig_mod."), f"lacks {EMBEDDING}.*; names begin with the prefix"),
        ({}, partial(rename, "model.", ""), f"lacks {EMBEDDING}.*; names lack their prefix"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(tiny, tmp_path, config, change, message):
    folder = shutil.copytree(tiny / "model", tmp_path / "model")
    weights, known = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    save_file(change(weights), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(known | config))
    with refused(UserError, message):
        check_weights(str(folder))


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(dry_run, tiny, tmp_path):
    """As an end of answers; in a prompt, tests/unit/test_data.py. A model that never meets the token trains."""
    folder = shutil.copytree(tiny / "model", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(folder)
    assert dry_run(f"model.path={folder}")[0] == 0
    said = "the token '<tool>' has the id 16, but the embedding of model.path has 16 rows"
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 16]}')
    code, text = dry_run(f"model.path={folder}")
    assert code == 2 and re.search(f"eos_token_id of .*generation_config.*: {said}", text), text
