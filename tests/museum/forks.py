"""Right forks: edits of the script that change the algorithm on purpose. No run is stopped, and `make check` names what
each changed and nothing else; test_museum.py runs them."""

import dataclasses

from tests.museum import Exhibit


@dataclasses.dataclass(frozen=True)
class Fork:
    """An edit in place, one or several pieces of the script, and the items of `make check` that part by it."""

    what: str
    edits: tuple[tuple[str, str, str], ...]  # (function, a piece of its source, what the fork has there)
    parts: set[str]
    options: tuple[str, ...] = ()

    def exhibits(self) -> list[Exhibit]:
        """The edits as the museum plants them."""
        return [Exhibit("", "", module_of(function), before, after) for function, before, after in self.edits]


def module_of(function):
    """The function as an exhibit names it; one of the bridge is named as the script does."""
    name = function.removeprefix("bridge.")
    return f"megatron_bridge:{name}" if name != function else f"train_grpo:{name}"


ADDED = "batch = add_advantages(samples, batch, algo, cfg.reward)"
FORKS = {
    # the six that were stopped by the second trainer inside of the run
    "advantages in train_step": Fork(
        "negative advantages count half, in train_step", (("train_step", ADDED, f"{ADDED}\n    batch = replace("
        "batch, advantages=torch.where(batch.advantages < 0, batch.advantages / 2, batch.advantages))"),),
        {"advantages"}),
    "a norm of its own": Fork(
        "a new loss_norm leaves out the second half of an answer's tokens",
        (("loss_weights", "    if kind not in weights_N:", "    if kind == 'first_half':\n        half_F = "
          "batch.loss_mask & (batch.position_ids < 5)\n"
          "        return chosen_N.float().index_select(0, batch.seq_id) * half_F\n"
          "    if kind not in weights_N:"),),
        {"updates"}, ("algo.loss_norm=first_half",)),
    "half of a group": Fork(
        "PODS: the best and the worst two answers of a group are trained", (("train_step", "samples = collected.kept",
        "samples = [s for g in sorted({s.group for s in collected.kept}) for s in (lambda m: m[:1] + m[-1:])(sorted("
        "[s for s in collected.kept if s.group == g], key=lambda s: s.reward))]"),), {"updates"}),
    "a fourth term": Fork(
        "a loss of a new name with a term on the squared log-prob", (
        ("policy_loss", 'if algo.loss == "reinforce":', 'if algo.loss == "squared":\n        return -advantages_T * '
         'logp_T + 0.01 * logp_T**2, torch.zeros_like(logp_T)\n    if algo.loss == "reinforce":'),),
        set(), ("algo.loss=squared",)),
    "a curriculum": Fork(
        "prompts by a function of seed, step and position", (("collect", "prompt_batch(run.inputs.prompts, taken, "
        "missing, cfg.seed)", "[run.inputs.prompts[(7 * (taken + i) + step) % 100] for i in range(missing)]"),),
        {"order"}, ("train.save_every=2",)),
    "equal groups skipped": Fork(
        "groups of equal rewards are not trained", (("train_step", "samples = collected.kept",
        "samples = [s for s in collected.kept if len({o.reward for o in collected.kept if o.group == s.group}) "
        "> 1] or collected.kept"),), {"updates"}, ("train.save_every=2",)),
    # five of other kinds
    "a second model's reward": Fork(
        "a score of the answer's log-prob is added to its reward", (("sample_and_grade", "sample.reward, "
        "sample.reward_parts = sum(outcome.parts.values()), outcome.parts", "sample.reward_parts = outcome.parts | "
        "{'sure': float(sample.rollout_logp.mean()) / 10}\n            sample.reward = sum(sample.reward_parts"
        ".values())"),), {"rewards"}),
    "half of the batch": Fork(
        "half of the groups of a step are trained", (("update_order", "np.unique(groups))",
        "np.unique(groups))[: len(np.unique(groups)) // 2]"),), {"updates"}),
    "tokens resampled": Fork(
        "answers are sampled with other seeds", (("sample_and_grade", "sampling_seed(cfg.seed, step, group)",
        "sampling_seed(cfg.seed, step, group) // 2"),), {"seeds"}),
    "another order": Fork(
        "the updates of a step come in another order", (("update_order", "return parts", "return parts[::-1]"),),
        {"updates"}, ("train.updates_per_step=2",)),
    # which tokens and answers are trained, in which update
    "an entropy mask": Fork(
        "only the fifth of the tokens with the highest entropy is trained, arXiv 2506.01939", (
        ("train_step", ADDED, f"""{ADDED}
    entropy_F = score(model, batch, cfg, "entropy")
    least = entropy_F[batch.loss_mask].quantile(0.8)
    batch = replace(batch, loss_mask=batch.loss_mask & (entropy_F >= least))"""),
        ("score", """    with bridge.swapped_weights(model, weights):
        rows = run_schedule(model, micro_batches, cfg.rollout.temperature)
""", """    wanted = weights if weights == "entropy" else None
    with bridge.swapped_weights(model, None if wanted else weights):
        rows = run_schedule(model, micro_batches, cfg.rollout.temperature, wanted)
"""),
        ("run_schedule", "training = loss_func is not None", "training = callable(loss_func)"),
        ("forward_step", """        return logp_T

    return logp_T, loss if loss_func else values""", """        return entropy_T if loss_func == "entropy" else logp_T

    return logp_T, loss if callable(loss_func) else values""")),
        {"updates"}),
    "a replayed group": Fork(
        "the first group of the step before is trained again", (("train_step", "samples = collected.kept",
        """samples = collected.kept + [replace(s, group=-1) for s in getattr(run, "replayed", [])]
    run.replayed = [s for s in collected.kept if s.group == collected.kept[0].group]"""),),
        {"updates"}, ("algo.old_logp=rollout", "rollout.max_logp_gap=inf")),
    "duplicates once": Fork(
        "equal answers of a group are trained once", (("train_step", "samples = collected.kept",
        "samples = list({(s.group, *s.response_ids.tolist()): s for s in collected.kept}.values())"),), {"updates"}),
    "a KL stop": Fork(
        "a step makes no more updates once the policy is too far from the one that sampled", (("train_step",
        """    for number, chosen in enumerate(updates):
""", """    for number, chosen in enumerate(updates):
        if number:
            moved_F = (score(model, batch, cfg) - batch.old_logp)[batch.mask]
            if (moved_F.exp() - moved_F - 1).mean() > 1e-4:
                break
"""),), {"updates"}, ("train.epochs_per_step=3", "train.lr=0.01")),
    "later tokens count less": Fork(
        "a token's weight falls with its position", (("loss_weights", "batch.seq_id) * batch.loss_mask",
        "batch.seq_id) * batch.loss_mask * 0.9**batch.position_ids"),), {"token-weights"}),
    # the loss and the advantages
    "VESPO": Fork(
        "a soft weight of the answer's ratio in place of the clip, arXiv 2602.10693", (("policy_loss",
        'if algo.loss == "reinforce":', """if algo.loss == "vespo":
        log_w_T = sequence_sum(log_ratio_T.detach() * mask_T, sequence_T)
        c1_T = torch.where(advantages_T > 0, 2.0, 3.0)
        kernel_T = (c1_T * log_w_T + (5 - c1_T) * (1 - log_w_T.exp())).exp()
        return -kernel_T * advantages_T * logp_T, torch.zeros_like(logp_T)
    if algo.loss == "reinforce":"""),), set(), ("algo.loss=vespo", "train.updates_per_step=2")),
    "a positive LM loss": Fork(
        "good answers are also imitated, as in VAPO, arXiv 2504.05118", (("grpo_loss",
        "loss = (loss_T * weight_T).sum()", "loss = ((loss_T - 0.1 * (advantages_T > 0) * logp_T) * weight_T).sum()"),),
        {"loss"}),
    "a halved clip": Fork(
        "the lower bound of the ratio is half as far", (("policy_loss",
        "ratio_T.clamp(1 - algo.clip_low, 1 +", "ratio_T.clamp(1 - algo.clip_low / 2, 1 +"),),
        {"loss"}, ("train.updates_per_step=2", "train.lr=0.01")),
    "leave one out": Fork(
        "the baseline of an answer is the mean of the others", (("group_advantages",
        "(r - r.mean()) / (r.std(ddof=1) + 1e-6)", "r - (r.sum() - r) / (len(r) - 1)"),), {"advantages"}),
    "bounded advantages": Fork(
        "no advantage is larger than 1", (("group_advantages", "    return advantages_N",
        "    return advantages_N.clip(-1, 1)"),), {"advantages"}),
    # rewards
    "a length reward": Fork(
        "each token costs a little", (("sample_and_grade", "sample.reward, sample.reward_parts = "
        "sum(outcome.parts.values()), outcome.parts", "sample.reward_parts = outcome.parts | {'length': -0.01 * "
        "len(sample.response_ids)}\n            sample.reward = sum(sample.reward_parts.values())"),), {"rewards"}),
    "self-certainty": Fork(
        "the mean log-prob of an answer is its only reward", (("sample_and_grade", "sample.reward, sample.reward_parts "
        "= sum(outcome.parts.values()), outcome.parts", "sample.reward = float(sample.rollout_logp.mean())\n"
        "            sample.reward_parts = {'certainty': sample.reward}"),), {"rewards"}),
    # schedules
    "group size by step": Fork(
        "each step samples more answers to a prompt", (("config_at", "    return cfg",
        "    return override(cfg, {'rollout.group_size': cfg.rollout.group_size + step})"),), {"groups"}),
    "temperature by step": Fork(
        "each step samples with a lower temperature", (("config_at", "    return cfg",
        "    return override(cfg, {'rollout.temperature': cfg.rollout.temperature - 0.1 * step})"),), {"sampling"}),
    "a cosine rate": Fork(
        "the learning rate follows a cosine", (("config_at", "    return cfg", "    return override(cfg, "
        "{'train.lr': cfg.train.lr * (1 + math.cos(math.pi * step / cfg.train.steps)) / 2})"),), {"lr"}),
    # the optimizer, and further sets of weights
    "two rates": Fork(
        "the norms are trained with a tenth of the learning rate", (("bridge.optimizer_step", 'group["lr"] = lr',
        'group["lr"] = lr * (0.1 if group["wd_mult"] == 0 else 1)'),), {"weights"}),
    "a frozen embedding": Fork(
        "the token embeddings keep their values", (("forward_backward",
        "    report = metrics.add_up(reports)", """    for chunk in model:
        for name, weight in chunk.named_parameters():
            if "embedding" in name:
                weight.main_grad.zero_()
    report = metrics.add_up(reports)"""),), {"gradient"}),
    "a reference reset": Fork(
        "the reference becomes the present weights in every second step", (("train_step",
        """    with clock("logprob"):
""", """    if step % 2 == 0:
        for reference, weight in zip(run.reference, bridge.trainable_weights(model)):
            reference.copy_(weight.detach())
    with clock("logprob"):
"""),), {"reference"}, ("algo.kl_coef=0.1", "algo.moving_reference=true", "train.save_every=2")),
    "an average that samples": Fork(
        "vLLM samples with a running average of the weights", (
        ("build", "    push_weights(run)  # vLLM has read", """    run.copies["ema"] = bridge.copy_weights(model)
    push_weights(run)  # vLLM has read"""),
        ("train_step", """    with clock("sync"):
""", """    for average, weight in zip(run.copies["ema"], bridge.trainable_weights(model)):
        average.lerp_(weight.detach(), 0.5)
    with clock("sync"):
"""),
        ("push_weights", """    weights = bridge.hf_weights(run.model, run.cfg.rollout.sync_bucket_mb << 20)
    run.engine.load_weights(weights, bridge.hf_shards(run.model))
""", """    with bridge.swapped_weights(run.model, run.copies["ema"]):
        weights = bridge.hf_weights(run.model, run.cfg.rollout.sync_bucket_mb << 20)
        run.engine.load_weights(weights, bridge.hf_shards(run.model))
""")), {"log-probs"}, ("rollout.max_logp_gap=inf", "train.save_every=2")),
}  # fmt: skip
