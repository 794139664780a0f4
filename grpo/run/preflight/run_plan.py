"""What a configuration means before it runs: layout and arithmetic of a step in words, and what will be slow."""

import os
import re
from collections.abc import Iterator

from grpo.step.packing import bubble


def describe(cfg, world_size) -> str:
    """The layout, the arithmetic of a step and of the run, and the loss, in words."""
    p, r, t, a = cfg.parallel, cfg.rollout, cfg.train, cfg.algo
    replicas = replica_count(cfg, world_size)
    samples = r.prompts_per_step * r.group_size
    updates = t.updates_per_step * t.epochs_per_step

    layout = f"layout:  {plural(world_size, 'rank')} = tp {p.tp} × pp {p.pp}"
    if p.vpp > 1:
        layout += f" (vpp {p.vpp})"
    if p.cp > 1:
        layout += f" × cp {p.cp}"
    layout += f" × dp {replicas}"
    if p.ep * p.etp > 1:
        layout += f"; experts: ep {p.ep} × etp {p.etp} × pp {p.pp} × dp {world_size // (p.etp * p.ep * p.pp)}"
    layout += f"; rollout: {plural(world_size // r.tp, 'vLLM engine')} of tp {r.tp}"

    step = f"a step:  {plural(r.prompts_per_step, 'prompt')} × {r.group_size} = {samples} samples"
    if r.turns:
        step += f", each a conversation of up to {plural(r.max_turns, 'answer')}"
    if a.max_rounds > 1:
        step += f", up to {a.max_rounds} rounds"
    if t.epochs_per_step > 1:
        step += f" × {plural(t.epochs_per_step, 'epoch')}"
    step += f" → {plural(updates, 'update')} of {samples // t.updates_per_step} samples"
    step += f" → micro-batches of ≤ {t.max_tokens_per_micro_batch} tokens over {plural(replicas, 'replica')}"

    run = f"a run:   {plural(t.steps, 'step')}"
    if t.epochs:
        run += f" ({plural(t.epochs, 'epoch')})"
    run += f" = {t.steps * samples} samples, {plural(t.steps * updates, 'update')}"
    run += f"; lr {t.lr:g} after {plural(t.warmup_steps, 'warm-up step')}"

    loss = f"loss:    {a.loss} ({a.clip_low:g}, {a.clip_high:g})"
    if a.kl_coef:
        loss += f" + {a.kl_coef:g} {a.kl} in the {a.kl_in}"
    if a.entropy_coef:
        loss += f" - {a.entropy_coef:g} entropy"
    if a.teacher and a.teacher_kl != "sampled":
        loss += f" + {a.teacher_coef:g} {a.teacher_kl} divergence from the teacher"
    loss += f"; {a.advantage} advantages"
    if a.teacher and a.teacher_kl == "sampled":
        loss += f" + {a.teacher_coef:g} log(teacher / policy)"
    loss += f"; {a.loss_norm} over an update"
    if a.correction != "none":
        loss += f"; {a.correction}"

    return "\n".join([layout, step, run, loss, *describe_prompts(cfg)])


def describe_prompts(cfg) -> Iterator[str]:
    """What a file of configs/ may bring that is not meant for other data: the reward, a system prompt, stops."""
    reward = f"reward:  {cfg.reward.default}"
    if cfg.reward.custom:
        reward += f" ({cfg.reward.custom})"
    for source, spec in cfg.reward.by_source.items():
        reward += f"; of source {source}: {spec}"
    yield reward

    if cfg.data.system_prompt is not None:
        yield f"system:  {cfg.data.system_prompt!r}"
    if cfg.rollout.stop:
        yield f"stops:   {', '.join(map(repr, cfg.rollout.stop))}"


def plural(number: float, what: str) -> str:
    ending = "" if number == 1 else "s"
    return f"{number:.12g} {what}{ending}"


def replica_count(cfg, world_size) -> int:
    """The data-parallel size."""
    return world_size // (cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.cp)


def warnings(cfg, world_size) -> list[str]:
    """What of the plan will be slow, learns nothing, or learns from other ratios than it seems: with the key to try."""
    r, p, t = cfg.rollout, cfg.parallel, cfg.train
    found = []

    # An update that is too small for its stages or rows.
    samples = r.prompts_per_step * r.group_size // t.updates_per_step // replica_count(cfg, world_size)
    tokens = samples * (cfg.data.max_prompt_tokens + r.max_new_tokens)
    more_samples = "try a larger rollout.prompts_per_step, fewer train.updates_per_step"
    if samples < p.pp:
        found.append(
            f"an update has {samples} samples a replica for parallel.pp={p.pp} stages, which idle at least "
            f"{bubble(max(samples, 1), p):.0%} of it: {more_samples} or parallel.tp instead of parallel.pp"
        )
    if p.pp > 4 and not {"recompute_granularity", "moe_layer_recompute"} & cfg.megatron.keys():
        found.append(
            f"the first of parallel.pp={p.pp} stages keeps the activations of {p.pp} micro-batches: try "
            "megatron.recompute_granularity=full megatron.recompute_method=uniform megatron.recompute_num_layers=1"
        )
    if tokens < t.max_tokens_per_micro_batch / 2:
        found.append(
            f"an update has at most {tokens} tokens a replica, less than half of train.max_tokens_per_micro_batch: "
            f"small rows use a GPU badly: {more_samples}"
        )

    # Tensor parallelism over a network.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, 8)))  # a dry run plans for machines of eight GPUs
    for key, size in (("parallel.tp", p.tp), ("rollout.tp", r.tp)):
        if local % size:
            found.append(
                f"{key}={size} spans machines of {local} ranks, and its messages in every layer take the slower "
                "network: try one that divides the ranks of a machine, parallel.pp or parallel.cp in its place"
            )

    if cfg.algo.moving_reference:
        found.append("algo.moving_reference=true is for a fork that changes the reference: the run does not watch it")

    for text in dict.fromkeys([*r.stop, *(cfg.eval.stop or [])]):
        if re.search(r"\\[nrt]", text):
            found.append(
                f"a stop is {text!r}, with a backslash and a letter. For a line break use YAML's double quotes; "
                f"on a command line 'rollout.stop=\"{text}\"'"
            )
    return found + odd_ratios(cfg) + extremes(cfg)


def odd_ratios(cfg) -> list[str]:
    """Ratios of other probabilities, or of other units, than the loss expects."""
    a, t = cfg.algo, cfg.train
    found = []

    if cfg.rollout.vllm.get("quantization") and a.correction == "none":
        found.append(
            "rollout.vllm.quantization makes vLLM sample from other weights than are trained: try algo.correction=tis "
            "with rollout.max_logp_gap above the gap that the first steps show"
        )

    if a.loss == "gspo" and a.correction != "none" and a.correction_level == "token":
        found.append(
            f"algo.loss=gspo uses the ratio of an answer, but algo.correction={a.correction} uses the ratio of each "
            "token: try algo.correction_level=sequence with algo.correction=icepop or tis"
        )

    if a.loss in ("ipo", "dppo_tv") and a.old_logp == "trainer" and t.updates_per_step * t.epochs_per_step == 1:
        found.append(
            f"algo.loss={a.loss} masks by how far probabilities are from the old ones, which are the same in a first "
            "update of algo.old_logp=trainer: try algo.old_logp=rollout, which masks by the difference from vLLM"
        )

    return found


def extremes(cfg) -> list[str]:
    """Numbers beside which nothing is learnt."""
    t = cfg.train
    found = []
    if t.warmup_steps >= t.steps:
        found.append(f"train.warmup_steps={t.warmup_steps} of train.steps={t.steps}: the learning rate only rises")
    if t.lr * t.weight_decay >= 0.1:
        found.append(f"train.lr · train.weight_decay = {t.lr * t.weight_decay:g} of each weight goes with an update")

    for key in ("kl_coef", "entropy_coef", "teacher_coef"):
        value = getattr(cfg.algo, key)
        if value >= 10:
            found.append(f"algo.{key}={value:g}: beside it the reward does not count, as advantages are about 1")
    return found
