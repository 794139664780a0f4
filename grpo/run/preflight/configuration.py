"""Rules that a run must keep before a process group, a model or an engine exists. Each check here raises UserError.

A rule is one call of `require`: what must be true, and otherwise the message, which names the key and what would be
legal. To add a rule, add a call to the function it belongs to: under `check_config` if it needs the keys alone, under
`check_model` if it needs the model's config.json.
"""

import math
import os
from pathlib import Path

from safetensors import safe_open

import megatron_bridge as bridge
from config import AlgoConfig, LoraConfig, UserError
from grpo.parts.base import versions
from grpo.parts.base.hf_folder import QUANTISED, UNTRAINED, check_found, read_config, safetensor_files, show_kind
from grpo.parts.base.ranks import is_first_rank, say
from grpo.parts.base.require import require
from grpo.parts.model import stages
from grpo.parts.model.attention import rotary_embedding, sliding_window
from grpo.run.preflight import linear_attention, options
from grpo.step import named_rewards

# ---------------------------------------------------------------- rules between keys


def check_config(cfg, world_size):
    """The rules between keys, and between keys and the number of ranks."""
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


def check_state_and_precision(cfg):
    """Where weights and state wait, and how exactly both sides compute."""
    r, t = cfg.rollout, cfg.train
    p, a = cfg.parallel, cfg.algo

    require(
        t.offload != "optimizer" or (cfg.model.dtype != "fp32" and not cfg.megatron.get("optimizer_cpu_offload")),
        "train.offload=optimizer needs model.dtype=bf16 or fp16 (in fp32 the main weights are the model's own) "
        "and no megatron.optimizer_cpu_offload, which keeps them on the host all the time; use train.offload=grads",
    )

    require(
        a.kl_coef > 0 or not a.moving_reference,
        "algo.moving_reference=true has no effect with algo.kl_coef=0, which keeps no reference model; leave it out",
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

    require(
        not r.exact or (r.tp == p.tp and not r.vllm.get("quantization")),
        f"rollout.exact=true: sums have the same order on both sides only if rollout.tp={r.tp} is parallel.tp={p.tp}, "
        "in the same precision; set them alike, and leave out rollout.vllm.quantization",
    )


def check_what_is_learned(cfg):
    """Keys of teacher, adapters, routes and turns that would do nothing, or harm."""
    r, a = cfg.rollout, cfg.algo

    require(
        a.advantage != "none" or a.teacher,
        "algo.advantage=none leaves rewards out of the loss, so there is nothing to learn without algo.teacher",
    )

    require(
        a.advantage not in ("none", "gdpo") or a.kl_coef == 0 or a.kl_in == "loss",
        f"algo.kl_in=reward has no effect with algo.advantage={a.advantage}, which takes no KL into the advantage; use "
        "algo.kl_in=loss or algo.kl_coef=0",
    )

    require(
        cfg.data.hint_key is None or a.teacher,
        f"data.hint_key={cfg.data.hint_key} has no effect without algo.teacher, who alone sees the hints; leave it out",
    )

    require(
        a.teacher != "self" or cfg.data.hint_key is not None,
        "algo.teacher=self without hints says just what the policy says; name their column in data.hint_key",
    )

    require(
        a.teacher or a.teacher_kl == "sampled",
        f"algo.teacher_kl={a.teacher_kl} needs the model that teaches, in algo.teacher; or leave it out",
    )
    require(
        a.teacher_kl != "sampled" or a.teacher_top_k == 0,
        f"algo.teacher_top_k={a.teacher_top_k} has no effect with algo.teacher_kl=sampled, which looks at the sampled "
        "token alone; use teacher_kl=reverse, forward or jsd, or 0",
    )
    require(
        a.teacher_kl == "jsd" or a.teacher_beta == AlgoConfig().teacher_beta,
        f"algo.teacher_beta={a.teacher_beta:g} has no effect with algo.teacher_kl={a.teacher_kl}; leave it out, or use "
        "algo.teacher_kl=jsd",
    )
    require(
        a.kl != "full" or (a.kl_coef > 0 and a.kl_in == "loss"),
        "algo.kl=full is a term of the loss with algo.kl_coef above 0: over the whole vocabulary a KL has a gradient, "
        "and no part in a reward; use algo.kl_in=loss, or k1, k2, k3, k3+",
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


def check_length_of_run(cfg):
    """How long to train, from where, and what to evaluate."""
    t = cfg.train

    require(
        t.steps is None or t.epochs is None,
        f"train.steps={t.steps} and train.epochs={t.epochs} both say how long to train; set one of them to null",
    )
    require(t.steps or t.epochs, "train.steps=null: say how long to train, by train.steps or by train.epochs")

    require(
        t.eval_every == 0 or cfg.data.eval is not None,
        f"train.eval_every={t.eval_every}, but data.eval is not set; name the data or use train.eval_every=0",
    )
    check_evaluation(cfg)

    require(
        cfg.resume in ("none", "auto") or os.path.isdir(cfg.resume),
        f"resume={cfg.resume}: there is no such folder; resume must be none, auto, or the folder of a checkpoint",
    )


def check_evaluation(cfg):
    """How an evaluation samples."""
    require(
        cfg.eval.temperature > 0 or cfg.eval.samples == 1,
        f"eval.temperature=0 gives the same answer {cfg.eval.samples} times; use eval.samples=1",
    )


def check_sampling(cfg):
    """How vLLM samples, and what corrects its log-probs."""
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

    # With a nucleus, log-probs are of a cut distribution: all who compute them must know which tokens it has.
    if not r.is_cut:
        return
    cut = f"rollout.top_p={r.top_p}, rollout.top_k={r.top_k}"
    found = versions.installed("vllm") or "1"  # the start reports a missing vLLM
    require(
        versions.numbers(found) >= (0, 32) or r.max_logp_gap is not None,
        f"{cut}: vLLM {found} does not say which tokens it draws from, so its log-probs are of the cut distribution "
        "and the trainer's of the full one. Use vLLM 0.32, 1 and -1, or rollout.max_logp_gap=inf to train anyway",
    )


def check_logs(cfg):
    """Trackers and the profiler."""
    for name, version in versions.TRACKERS.items():
        require(
            not getattr(cfg.log, name) or versions.installed(name),
            f"log.{name}=true needs a package: pip install {name}=={version}, or use log.{name}=false",
        )

    first, last = cfg.profile.start, cfg.profile.stop
    require(first <= last, f"profile.start={first} is after profile.stop={last}, the last step that is profiled")


def check_world_size(cfg, world_size):
    """The layouts of the model, of its experts and of vLLM must divide the ranks."""
    p = cfg.parallel
    layouts = {
        "parallel.tp · pp · cp": p.tp * p.pp * p.cp,
        "parallel.etp · ep · pp": p.etp * p.ep * p.pp,
        "rollout.tp": cfg.rollout.tp,
    }
    for keys, ranks in layouts.items():
        require(
            world_size % ranks == 0,
            f"{keys} = {ranks} does not divide the world size {world_size}; start a multiple of {ranks} processes "
            "(--nproc_per_node; for a dry run --world-size) or make the layout smaller",
        )


def check_batch(cfg):
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
        tokens = getattr(t, key)
        require(
            tokens >= least,
            f"train.{key}={tokens} cannot hold one sample of data.max_prompt_tokens + rollout.max_new_tokens = "
            f"{longest} tokens; make it at least {least}",
        )


def check_rewards(cfg):
    """The names of rewards."""
    specs = {"reward.default": cfg.reward.default}
    for source, spec in cfg.reward.by_source.items():
        specs[f"reward.by_source.{source}"] = spec

    for key, spec in specs.items():
        try:
            named_rewards.check(spec, cfg.reward)
        except ValueError as error:
            raise UserError(f"{key}={spec}: {error}") from None


def named_files(cfg) -> dict[str, list[str]]:
    """{key: the files, folders and hub names that the run reads}."""
    given = {
        "model.path": cfg.model.path,
        "algo.teacher": cfg.algo.teacher,
        "data.train": cfg.data.train,
        "data.eval": cfg.data.eval,
        "data.custom": cfg.data.custom,
        "rollout.turns": cfg.rollout.turns,
        "reward.custom": cfg.reward.custom,
        "reward.functions": list(cfg.reward.functions.values()),
    }
    return {key: [names] if isinstance(names, str) else list(names or []) for key, names in given.items()}


def group_timeout_s(cfg) -> float:
    """Seconds that a collective may take: more than the watchdog allows, whose message says more."""
    return cfg.train.stall_timeout_s + 60 if cfg.train.stall_timeout_s else 86400.0


# ---------------------------------------------------------------- the model's config.json


# Attributes of a config.json that change the computation and have no counterpart here, with the one value supported.
SUPPORTED = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "qkv_bias": True, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "router_jitter_noise": 0.0, "attn_output_gate": True, "output_gate_type": "swish",
}  # fmt: skip


def check_model(cfg, path, rollout_tp, key="model.path"):
    """By its config.json, the model `path`, given at `key`, can be built here and split over the ranks."""
    model = f"{key}={path}"
    check_found(path, key)
    try:
        hf = read_config(path)
    except Exception as error:  # transformers raises any exception for a damaged config.json
        kind = show_kind(file.name for file in Path(path).glob("*"))
        raise UserError(f"{model}: {' '.join(str(error).split())[:300]}{kind}") from None

    # What its layers compute has a counterpart here.
    require(not hf.quantised, f"{model}: its config.json has a quantization_config; {QUANTISED}")
    family = (hf.architectures or ["?"])[0]
    require(family in bridge.FAMILIES, f"{model} is a {family}; supported are {', '.join(bridge.FAMILIES)}")
    if bridge.has_linear_attention(hf):
        linear_attention.check_layers(hf, model, cfg.model.dtype)
    for attribute, value in SUPPORTED.items():
        found = getattr(hf, attribute, None)
        require(
            found in (None, value), f"{model}: {attribute}={found!r} in its config.json is not supported, only {value}"
        )

    # The layout splits it evenly.
    try:
        rotary_embedding(hf)
        sliding_window(hf)
        check_layout(hf, cfg.parallel, rollout_tp)
        check_stages(hf.num_hidden_layers, cfg)
    except (UserError, ValueError) as error:
        raise UserError(f"{model}: {error}") from None

    longest = cfg.longest_sample
    require(
        longest <= hf.max_position_embeddings,
        "data.max_prompt_tokens + the larger of rollout.max_new_tokens and eval.max_new_tokens = "
        f"{longest} is beyond max_position_embeddings={hf.max_position_embeddings} of {model}",
    )

    # Megatron-core accepts the fields that go to it as they are.
    for name in cfg.megatron:
        require(
            bridge.is_moe(hf) or not name.startswith("moe_"),
            f"megatron.{name}: {model} is a {family}, which has no experts",
        )
    try:
        bridge.transformer_config(hf, cfg.parallel, bridge.DTYPES[cfg.model.dtype], cfg.megatron)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{model}: Megatron-core refuses this layout or megatron section: {error}") from None


def check_layout(hf, parallel, rollout_tp):
    """Every parallel size divides what it splits."""
    heads = {"attention heads": hf.num_attention_heads}
    kv_heads = hf.num_key_value_heads
    if bridge.is_moe(hf):
        check_divides("parallel.ep", parallel.ep, {"experts": bridge.num_experts(hf)})
        check_divides("parallel.etp", parallel.etp, {"expert feed-forward size": bridge.expert_width(hf)})
        require(
            parallel.sp or parallel.tp == 1,
            "parallel.sp=false: experts with parallel.tp above 1 need sequence parallelism, use true",
        )
    else:
        heads["feed-forward size"] = hf.intermediate_size
        require(
            parallel.ep * parallel.etp == 1,
            f"parallel.ep={parallel.ep}, parallel.etp={parallel.etp}: both must be 1 for a model without experts",
        )

    shared = getattr(hf, "shared_expert_intermediate_size", None)
    if shared:
        heads["shared expert's feed-forward size"] = shared
    if bridge.has_linear_attention(hf):
        heads |= linear_attention.check_split(hf, parallel)

    rows = (hf.num_attention_heads + 2 * kv_heads) * bridge.head_dim(hf)
    others = {"rows of queries, keys and values": rows, "vocabulary size": hf.vocab_size}
    check_divides("parallel.tp", parallel.tp, heads | others, kv_heads)
    check_divides("rollout.tp", rollout_tp, heads, kv_heads)  # vLLM pads the vocabulary


def check_divides(key, by: int, sizes: dict[str, int], kv_heads: int = 1):
    """`by`, the value of `key`, divides each of the model's sizes, and divides `kv_heads` or is a multiple of it."""
    legal = []
    common = math.gcd(*sizes.values())
    for n in range(1, common + 1):
        if common % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0):
            legal.append(n)
    if by in legal:
        return

    wrong = [f"does not divide the model's {what} {size}" for what, size in sizes.items() if size % by]
    wrong.append(f"neither divides the model's key-value heads {kv_heads} nor is a multiple of them")
    raise UserError(f"{key}={by} {wrong[0]}; it must be one of {legal[:16]}")


def check_stages(layers, cfg):
    """Each layer is on just one pipeline stage."""
    pp, vpp = cfg.parallel.pp, cfg.parallel.vpp
    uneven = {name: cfg.megatron[name] for name in stages.UNEVEN if cfg.megatron.get(name)}

    try:
        stages.split_layers(layers, pp, vpp, **uneven)
    except Exception as error:  # Megatron raises many classes
        given = "".join(f", megatron.{name}={value}" for name, value in uneven.items())
        why = " ".join(str(error).split())
        raise UserError(
            f"parallel.pp={pp}, parallel.vpp={vpp}{given} for {layers} layers: {why}; use parallel.pp · parallel.vpp "
            f"that divides {layers}, or megatron.pipeline_model_parallel_layout alone"
        ) from None


def check_routes(cfg):
    """With algo.replay_routes there are routes to replay."""
    if not cfg.algo.replay_routes:
        return
    found = versions.installed("vllm") or "1"  # the start reports a missing vLLM
    second_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # our default on a GPU
    require(
        not second_runner or versions.numbers(found) >= (0, 32),
        f"algo.replay_routes=true: vLLM {found} returns no routes with its second model runner; use vLLM 0.32, "
        "VLLM_USE_V2_MODEL_RUNNER=0 in the environment, or algo.replay_routes=false",
    )
    require(
        bridge.is_moe(read_config(cfg.model.path)),
        f"algo.replay_routes=true: model.path={cfg.model.path} has no experts; use false",
    )


# ---------------------------------------------------------------- the model's weights


WIDE = ("BF16", "F16", "F32", "F64")  # types of tensors, as safetensors names them


def check_weights(path, key="model.path"):
    """The safetensors of the folder `path`, given at `key`, hold just the tensors that the model is made of."""
    model = f"{key}={path}"
    hf = read_config(path)
    try:
        files = safetensor_files(path)
    except ValueError as error:
        raise UserError(f"{model}: {error}") from None

    names = set(bridge.TOP_RULES)
    experts = range(bridge.num_experts(hf) if bridge.is_moe(hf) else 1)
    for layer in range(hf.num_hidden_layers):
        for name in bridge.layer_rules(hf, layer):
            names.update(f"decoder.layers.{layer}.{name.format(e=e)}" for e in experts)
    wanted = {part for name in names for part in bridge.rule_of(name, hf)[1]}

    untrained = {name for name in files if name.startswith(UNTRAINED)}
    found = {name for name in files if not name.endswith("rotary_emb.inv_freq")} - untrained
    if hf.tie_word_embeddings:
        found.discard("lm_head.weight")  # a copy that some exporters write
    lacking, extra = sorted(wanted - found), sorted(found - wanted)
    kind = show_kind(found)
    require(not lacking, f"{model} lacks {', '.join(lacking[:3])}{kind}")
    require(not extra, f"{model} has tensors this model has no place for: {', '.join(extra[:3])}{kind}")

    for file in sorted({*files.values()}):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                dtype = opened.get_slice(name).get_dtype()
                require(dtype in WIDE or name.startswith(UNTRAINED), f"{model}: {name} is {dtype}; {QUANTISED}")

    if untrained and is_first_rank():
        say(
            f"note: {len(untrained)} tensors of {model} are for images or multi-token prediction: not trained, and "
            "exported as they are"
        )

    check_embedding(hf, files, model)


def check_embedding(hf, files: dict[str, str], model):
    """The embedding has the rows that config.json says, and a head that is tied to it is no other tensor."""
    head, embedding = "lm_head.weight", f"{hf.prefix}.embed_tokens.weight"
    rows = safe_open(files[embedding], framework="pt").get_slice(embedding).get_shape()[0]
    require(
        rows == hf.vocab_size,
        f"{model}: vocab_size={hf.vocab_size} in its config.json, but {embedding} has {rows} rows; write {rows}",
    )

    if hf.tie_word_embeddings and head in files:
        own = safe_open(files[head], framework="pt").get_tensor(head)
        shared = safe_open(files[embedding], framework="pt").get_tensor(embedding)
        require(
            own.equal(shared),
            f"{model}: tie_word_embeddings=true in its config.json, but {head} and {embedding} differ, and "
            "transformers and vLLM use both: set tie_word_embeddings=false, or remove lm_head.weight from the file",
        )
