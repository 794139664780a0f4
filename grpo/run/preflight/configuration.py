"""What can be known wrong before a process group, a model or an engine exists: UserError with key and legal values."""

import math
import os
from pathlib import Path

from safetensors import safe_open

import megatron_bridge as bridge
from config import Config, LoraConfig, UserError
from grpo.parts.base import versions
from grpo.parts.base.hf_folder import UNTRAINED, check_found, read_config, safetensor_files
from grpo.parts.base.ranks import is_first_rank, say
from grpo.parts.base.require import require
from grpo.parts.model import stages
from grpo.parts.model.attention import rotary_embedding, sliding_window
from grpo.run.preflight import linear_attention, options
from grpo.step import named_rewards

# ---------------------------------------------------------------- the configuration


def check_config(cfg: Config, world_size: int) -> None:
    """Keys that do not go together, with each other or with so many ranks. Raises UserError, as all of these do."""
    options.check_megatron(cfg.megatron, bridge.CONFIG_CLASSES, cfg.model.dtype)
    options.check_vllm(cfg.rollout.vllm)
    check_state_and_precision(cfg)
    check_what_is_learned(cfg)
    check_length_of_run(cfg)
    check_sampling(cfg)
    check_logs(cfg)
    check_world_size(cfg, world_size)
    check_batch(cfg)
    check_rewards(cfg)


def check_length_of_run(cfg: Config) -> None:
    """Keys of how long to train, from where, and what to evaluate."""
    t = cfg.train
    require(
        t.eval_every == 0 or cfg.data.eval is not None,
        f"train.eval_every={t.eval_every}, but data.eval is not set; name the data or use train.eval_every=0",
    )
    require(
        t.steps is None or t.epochs is None,
        f"train.steps={t.steps} and train.epochs={t.epochs} both say how long to train; set one of them to null",
    )
    require(bool(t.steps or t.epochs), "train.steps=null: say how long to train, by train.steps or by train.epochs")
    check_evaluation(cfg)
    require(
        cfg.resume in ("none", "auto") or os.path.isdir(cfg.resume),
        f"resume={cfg.resume}: no such folder; legal is none, auto, or the folder of a checkpoint",
    )


def check_evaluation(cfg: Config) -> None:
    """Keys of how an evaluation samples."""
    require(
        cfg.eval.temperature > 0 or cfg.eval.samples == 1,
        f"eval.temperature=0 gives the same answer {cfg.eval.samples} times; use eval.samples=1",
    )


def check_sampling(cfg: Config) -> None:
    """Keys of how vLLM samples, and of what corrects its log-probs."""
    r, a = cfg.rollout, cfg.algo
    require(
        a.correction == "none" or a.old_logp == "trainer",
        f"algo.correction={a.correction} weighs the trainer's log-probs against vLLM's; use algo.old_logp=trainer",
    )
    require(
        a.correction_level == "token" or a.correction in ("tis", "icepop"),
        f"algo.correction_level={a.correction_level} is for algo.correction=tis or icepop, not {a.correction}",
    )
    require(
        a.overlong_buffer <= r.max_new_tokens,
        f"algo.overlong_buffer={a.overlong_buffer} is beyond rollout.max_new_tokens={r.max_new_tokens}",
    )
    if not r.is_cut:
        return
    found = versions.installed("vllm") or "1"  # where there is none, the start says so
    cut = f"rollout.top_p={r.top_p}, rollout.top_k={r.top_k}"
    require(
        versions.numbers(found) >= (0, 32) or r.max_logp_gap is not None,
        f"{cut}: vLLM {found} does not say which tokens it draws from, so its log-probs are of the cut distribution "
        "and the trainer's of the full one. Use vLLM 0.32, 1 and -1, or rollout.max_logp_gap=inf to train anyway",
    )
    require(
        a.teacher is None,
        f"{cut}: the policy's log-probs are of the tokens it draws from, those of algo.teacher={a.teacher} of all, so "
        "that their difference is no KL. Use 1 and -1",
    )


def check_logs(cfg: Config) -> None:
    """Keys of trackers and of the profiler."""
    for name, version in versions.TRACKERS.items():
        require(
            not getattr(cfg.log, name) or versions.installed(name) is not None,
            f"log.{name}=true needs a package: pip install {name}=={version}, or use log.{name}=false",
        )
    p = cfg.profile
    require(
        p.start <= p.stop, f"profile.start={p.start} is after profile.stop={p.stop}, the last step that is profiled"
    )
    require(
        bool(p.start) or not p.stop,
        "profile.start=0: no step is profiled, so profile.stop does nothing; set it",
    )


def check_world_size(cfg: Config, world_size: int) -> None:
    """The layouts of trainer, experts and vLLM, which must divide the ranks."""
    for keys in (("tp", "pp", "cp"), ("etp", "ep", "pp")):  # of the model, and of its experts
        ranks = math.prod(getattr(cfg.parallel, key) for key in keys)
        sizes = " × ".join(f"parallel.{key}={getattr(cfg.parallel, key)}" for key in keys)
        require(
            world_size % ranks == 0,
            f"{sizes} = {ranks} does not divide the world size {world_size}; start a multiple of {ranks} processes "
            "(--nproc_per_node; for a dry run --world-size) or make the layout smaller",
        )
    tp = cfg.rollout.tp
    require(world_size % tp == 0, f"rollout.tp={tp} does not divide the world size {world_size} (--nproc_per_node)")


def check_batch(cfg: Config) -> None:
    """Updates take whole groups, and a row holds the longest sample."""
    r, t = cfg.rollout, cfg.train
    require(
        r.prompts_per_step % t.updates_per_step == 0,
        f"train.updates_per_step={t.updates_per_step} must divide rollout.prompts_per_step={r.prompts_per_step}: "
        "an update takes whole groups",
    )
    longest = cfg.data.max_prompt_tokens + r.max_new_tokens
    multiple = bridge.token_multiple(cfg.parallel)
    least = math.ceil(longest / multiple) * multiple
    for key in ("max_tokens_per_micro_batch", "logprob_max_tokens_per_micro_batch"):
        cap = getattr(t, key)
        require(
            cap >= least,
            f"train.{key}={cap} cannot hold one sample of data.max_prompt_tokens + rollout.max_new_tokens = {longest} "
            f"tokens; make it at least {least}",
        )


def check_rewards(cfg: Config) -> None:
    """The names of rewards."""
    by_source = {f"reward.by_source.{source}": name for source, name in cfg.reward.by_source.items()}
    for key, name in {"reward.default": cfg.reward.default, **by_source}.items():
        try:
            named_rewards.check(name, cfg.reward)
        except ValueError as error:
            raise UserError(f"{key}={name}: {error}") from None


def check_what_is_learned(cfg: Config) -> None:
    """Keys of teacher, adapters, routes and turns that do nothing, or harm."""
    r, a = cfg.rollout, cfg.algo
    require(
        a.advantage != "none" or a.teacher is not None,
        "algo.advantage=none leaves rewards out of the loss, so there is nothing to learn without algo.teacher",
    )
    require(
        a.advantage not in ("none", "gdpo") or a.kl_coef == 0 or a.kl_in == "loss",
        f"algo.kl_in=reward has no effect with algo.advantage={a.advantage}, which takes no KL into the advantage; use "
        "algo.kl_in=loss or algo.kl_coef=0",
    )
    require(
        cfg.data.hint_key is None or a.teacher is not None,
        f"data.hint_key={cfg.data.hint_key} has no effect without algo.teacher, who alone sees the hints; leave it out",
    )
    require(
        a.teacher != "self" or cfg.data.hint_key is not None,
        "algo.teacher=self without hints says just what the policy says; name their column in data.hint_key",
    )
    require(
        cfg.lora.rank > 0 or cfg.lora == LoraConfig(),
        "lora.rank=0: there are no adapters, so lora.alpha and lora.targets have no effect; give them a rank",
    )
    require(
        not a.replay_routes or r.vllm.get("enable_prefix_caching", True),
        "algo.replay_routes=true: vLLM keeps routes with cached prefixes; leave out rollout.vllm.enable_prefix_caching",
    )
    require(
        a.kl_coef > 0 or cfg.schedule.kl_coef is None,
        "algo.kl_coef=0 keeps no reference model, and schedule.kl_coef cannot bring it back; start above 0",
    )
    require(
        bool(r.turns) or r.max_turns == type(r)().max_turns,
        f"rollout.max_turns={r.max_turns} has no effect without rollout.turns; name its function or leave it out",
    )


def check_state_and_precision(cfg: Config) -> None:
    """Keys of where weights and state wait, and of how exactly both sides compute."""
    r, t = cfg.rollout, cfg.train
    p, a = cfg.parallel, cfg.algo
    require(
        t.offload != "optimizer" or (cfg.model.dtype != "fp32" and not cfg.megatron.get("optimizer_cpu_offload")),
        "train.offload=optimizer needs model.dtype=bf16 or fp16 (in fp32 the main weights are the model's own) "
        "and no megatron.optimizer_cpu_offload, which keeps them on the host all the time; use train.offload=grads",
    )
    require(
        a.reference_on == "gpu" or a.kl_coef > 0 or a.teacher not in (None, "self"),
        "algo.reference_on=host has no effect with algo.kl_coef=0, which keeps no reference model, and without another "
        "model as algo.teacher; leave it out",
    )
    require(
        not cfg.model.fp32_head or (cfg.model.dtype != "fp32" and not cfg.megatron.get("overlap_param_gather")),
        "model.fp32_head=true is for model.dtype=bf16 and fp16, and reads the head's weight before "
        "megatron.overlap_param_gather has put it together; use fp32_head=false or overlap_param_gather=false",
    )
    if r.exact and (r.tp != p.tp or r.vllm.get("quantization")):
        raise UserError(
            f"rollout.exact=true: sums have the same order on both sides only where rollout.tp={r.tp} is "
            f"parallel.tp={p.tp}, and in the same precision; set them alike, and leave out rollout.vllm.quantization"
        )


def group_timeout_s(cfg: Config) -> float:
    """Longest time of a collective: more than the watchdog's, which says more."""
    return cfg.train.stall_timeout_s + 60 if cfg.train.stall_timeout_s else 86400.0


# ---------------------------------------------------------------- the model


def longest_sample(cfg: Config) -> int:
    """Tokens of the longest prompt and answer there can be."""
    return cfg.data.max_prompt_tokens + max(cfg.rollout.max_new_tokens, cfg.eval.max_new_tokens)


# Attributes of a config.json that change the computation and have no counterpart here, each with its one legal value.
SUPPORTED = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "qkv_bias": True, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "router_jitter_noise": 0.0, "attn_output_gate": True, "output_gate_type": "swish",
}  # fmt: skip

# A file → what a folder is that has it, and no weights of a model.
OTHER_FOLDERS = {
    "adapter_config.json": "an adapter. Merge it into its base (PEFT's merge_and_unload, then save_pretrained, and the "
    "tokenizer's files) and give that; a run here writes it merged too, in hf/, and resume=a checkpoint trains it on",
    "state.json": "a checkpoint. --export with resume=this folder writes its model to hf/; model.path stays the base",
    "metrics.jsonl": "the output of a run. Give one of the models in its hf/; --export makes one of a checkpoint",
}


def check_model(cfg: Config, path: str, rollout_tp: int, key: str = "model.path") -> None:
    """UserError unless, by its config, the model of `path`, the value of `key`, can be built and split."""
    model = f"{key}={path}"
    check_found(path, key)
    has_weights = any(Path(path).glob("model*.safetensors"))
    for file, what in OTHER_FOLDERS.items():
        if Path(path, file).exists() and not has_weights:
            raise UserError(f"{model} is {what}")
    try:
        hf = read_config(path)
    except Exception as error:  # a damaged config.json fails as code does, with any exception
        raise UserError(f"{model}: {' '.join(str(error).split())[:300]}") from None
    family = (hf.architectures or ["?"])[0]
    require(family in bridge.FAMILIES, f"{model} is a {family}; supported are {', '.join(bridge.FAMILIES)}")
    if bridge.has_linear_attention(hf):
        linear_attention.check_layers(hf, model, cfg.model.dtype)
    for attribute, value in SUPPORTED.items():
        found = getattr(hf, attribute, None)
        require(
            found in (None, value), f"{model}: {attribute}={found!r} in its config.json is not supported, only {value}"
        )
    try:
        rotary_embedding(hf)
        sliding_window(hf)
        check_layout(hf, cfg.parallel, rollout_tp)
        check_stages(hf.num_hidden_layers, cfg)
    except (UserError, ValueError) as error:
        raise UserError(f"{model}: {error}") from None
    longest = longest_sample(cfg)
    require(
        longest <= hf.max_position_embeddings,
        "data.max_prompt_tokens + the larger of rollout.max_new_tokens and eval.max_new_tokens = "
        f"{longest} is beyond max_position_embeddings={hf.max_position_embeddings} of {model}",
    )
    for name in cfg.megatron:
        require(
            bridge.is_moe(hf) or not name.startswith("moe_"),
            f"megatron.{name}: {model} is a {family}, which has no experts",
        )
    try:
        bridge.transformer_config(hf, cfg.parallel, bridge.DTYPES[cfg.model.dtype], cfg.megatron)
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"megatron.{name}" for name in cfg.megatron) or "empty"
        raise UserError(f"{model}: Megatron-core refuses this layout or megatron section ({given}): {error}") from None


def check_routes(cfg: Config) -> None:
    """See that there are routes to replay where algo.replay_routes asks for it. Raises UserError."""
    found = versions.installed("vllm") or "1"  # where there is none, the start says so
    second_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # our default on a GPU
    require(
        not (cfg.algo.replay_routes and second_runner) or versions.numbers(found) >= (0, 32),
        f"algo.replay_routes=true: vLLM {found} returns no routes with its second model runner; use vLLM 0.32, "
        "VLLM_USE_V2_MODEL_RUNNER=0 in the environment, or algo.replay_routes=false",
    )
    hf = read_config(cfg.model.path)
    require(
        not cfg.algo.replay_routes or bridge.is_moe(hf),
        f"algo.replay_routes=true: model.path={cfg.model.path} has no experts; use false",
    )


def check_layout(hf, parallel, rollout_tp: int) -> None:
    """See that every parallel size divides what it splits. Raises UserError naming the key and the legal values."""
    heads = {"attention heads": hf.num_attention_heads}
    if bridge.is_moe(hf):
        check_divides("parallel.ep", parallel.ep, {"experts": bridge.num_experts(hf)})
        check_divides("parallel.etp", parallel.etp, {"expert feed-forward size": bridge.expert_width(hf)})
    else:
        heads["feed-forward size"] = hf.intermediate_size
        require(
            parallel.ep * parallel.etp == 1,
            f"parallel.ep={parallel.ep}, parallel.etp={parallel.etp}: a model without experts has 1, 1",
        )
    shared = getattr(hf, "shared_expert_intermediate_size", None)
    if shared:
        heads["shared expert's feed-forward size"] = shared
    kv_heads = hf.num_key_value_heads
    if bridge.has_linear_attention(hf):
        heads |= linear_attention.check_split(hf, parallel)
    rows = (hf.num_attention_heads + 2 * kv_heads) * bridge.head_dim(hf)
    others = {"rows of queries, keys and values": rows, "vocabulary size": hf.vocab_size}
    check_divides("parallel.tp", parallel.tp, heads | others, kv_heads)
    check_divides("rollout.tp", rollout_tp, heads, kv_heads)  # vLLM pads the vocabulary
    require(
        parallel.sp or parallel.tp == 1 or not bridge.is_moe(hf),
        "parallel.sp=false: experts with parallel.tp above 1 need sequence parallelism, use true",
    )


def check_divides(key: str, by: int, sizes: dict[str, int], kv_heads: int = 1) -> None:
    """UserError unless `by`, of `key`, divides each of the model's sizes, and `kv_heads` unless these divide it."""
    common = math.gcd(*sizes.values())
    divisors = [n for n in range(1, common + 1) if common % n == 0]
    legal = [n for n in divisors if 0 in (kv_heads % n, n % kv_heads)]
    if by not in legal:
        wrong = [f"does not divide the model's {what} {size}" for what, size in sizes.items() if size % by]
        wrong.append(f"neither divides the model's key-value heads {kv_heads} nor is a multiple of them")
        remedy = f"legal are {legal[:16]}"
        if "vocabulary" in wrong[0]:
            remedy += f", or pad it: transformers' model.resize_token_embeddings(pad_to_multiple_of={by})"
        raise UserError(f"{key}={by} {wrong[0]}; {remedy}")


def check_stages(layers: int, cfg: Config) -> None:
    """See that each layer is on just one pipeline stage. Raises UserError with a split that is legal."""
    pp, vpp = cfg.parallel.pp, cfg.parallel.vpp
    fields = {name: cfg.megatron.get(name) for name in stages.UNEVEN}
    uneven = {name: value for name, value in fields.items() if value not in (None, False)}
    try:
        stages.split_layers(layers, pp, vpp, **uneven)
    except (ArithmeticError, AssertionError, LookupError, NotImplementedError, ValueError) as error:
        why = " ".join(str(error).split())
        given = "".join(f", megatron.{name}={value}" for name, value in uneven.items())
        legal = f"parallel.pp · parallel.vpp that divides {layers}"
        if pp > 1:
            chunks = pp * vpp
            even = "|".join(f"t*{(layers + i) // chunks}" for i in range(chunks))
            legal += f", or megatron.pipeline_model_parallel_layout=E{even}L alone"
        raise UserError(
            f"parallel.pp={pp}, parallel.vpp={vpp}{given} for {layers} layers: {why}; legal is {legal}"
        ) from None


def check_weights(path: str, key: str = "model.path") -> None:
    """See that the safetensors of the folder `path` hold just the tensors the model is made of. Raises UserError."""
    hf = read_config(path)
    experts = range(bridge.num_experts(hf) if bridge.is_moe(hf) else 1)
    names = {*bridge.TOP_RULES}
    for layer in range(hf.num_hidden_layers):
        rules = bridge.layer_rules(hf, layer)
        names |= {f"decoder.layers.{layer}.{name.format(e=e)}" for name in rules for e in experts}
    wanted = {part for name in names for part in bridge.rule_of(name, hf)[1]}
    try:
        files = safetensor_files(path)
    except ValueError as error:
        raise UserError(f"{key}={path}: {error}") from None
    found = {name for name in files if not name.endswith("rotary_emb.inv_freq") and not name.startswith(UNTRAINED)}
    if hf.tie_word_embeddings:
        found.discard("lm_head.weight")  # a copy that some exporters write
    for what, names in (("lacks", wanted - found), ("has tensors this model has no place for:", found - wanted)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{key}={path} {what} {min(names)}{more}")
    others = sum(name.startswith(UNTRAINED) for name in files)
    if others and is_first_rank():
        what = "are for images or multi-token prediction: not trained, and exported as they are"
        say(f"note: {others} tensors of {key}={path} {what}")
    head, embedding = "lm_head.weight", f"{hf.prefix}.embed_tokens.weight"
    rows = safe_open(files[embedding], framework="pt").get_slice(embedding).get_shape()[0]
    require(
        rows == hf.vocab_size,
        f"{key}={path}: vocab_size={hf.vocab_size} in its config.json, but {embedding} has {rows} rows; write {rows}",
    )
    if hf.tie_word_embeddings and head in files:
        own = safe_open(files[head], framework="pt").get_tensor(head)
        shared = safe_open(files[embedding], framework="pt").get_tensor(embedding)
        require(
            own.equal(shared),
            f"{key}={path}: tie_word_embeddings=true in its config.json, but {head} and {embedding} differ, and "
            "transformers and vLLM use both: set tie_word_embeddings=false, or remove lm_head.weight from the file",
        )
