"""GRPO on Megatron-core and vLLM, in one file.

    torchrun --nproc_per_node=2 train_grpo.py --config configs/tiny.yaml                    # a laptop, no GPU
    torchrun --nproc_per_node=8 train_grpo.py --config configs/qwen7b.yaml algo.kl_coef=0   # eight, with an override
    python train_grpo.py --config configs/qwen7b.yaml --dry-run --world-size 8              # check only, on any machine

The objective with the defaults. For each prompt vLLM samples G answers; answer i has reward r_i, token t entropy H_t:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-6)            group_advantages   std with ddof 1; 0 where all r are equal
    rho_t = exp(logp_t - old_logp_t)                     policy_loss        old = before the first update of the step
    L_t   = -min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i)
    KL_t  = exp(d) - d - 1,  d = ref_logp_t - logp_t     token_kl           k3, d clamped to +-20, the result to +-10
    loss  = sum_t (L_t + kl_coef KL_t - entropy_coef H_t) / number of trained tokens of the update       grpo_loss

The file follows a step from top to bottom: sample -> grade -> rows of tokens -> (old, reference log-probs) ->
advantages -> update(s) -> push. Read reward.py, rollout.py and megatron_bridge.py next. Every key is in config.py, and
what flows through a step is in grpo/step/records.py: Sample, Batch, MicroBatch. grpo/parts/ holds what Megatron and
vLLM are given, to be read when needed. grpo/run/ checks, saves and logs; a reader can leave it out.

To fork, change the function: a name such as `algo.loss` is a branch in it and nowhere else (docs/forking.md).

Names: a suffix gives a tensor's shape. _N per sample, _F per position of a batch, _T per position of a packed row: so
rewards_N has a reward for each sample. Other files also have _S per sequence of a row, _M per position with mask 1, _R
per rank, _E per expert, _D per row dispatched to an expert, _B per bin, _U per unit of a bin, _P per piece of a
sequence's queries. Where answers share a prompt, C of the T positions are computed.
"""

import argparse
import gc
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

if sys.flags.safe_path:  # PYTHONSAFEPATH=1 leaves out this file's folder, where its modules are
    sys.path.insert(0, __file__.rpartition("/")[0])

import megatron_bridge as bridge
from config import (
    AlgoConfig,
    Config,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    ScheduleConfig,
    TrainingError,
    UserError,
)
from grpo.parts.base.ranks import device, tell, to_device
from grpo.parts.base.read_config import override
from grpo.parts.data.prompts import Prompt, prompt_batch, sampling_seed
from grpo.parts.model import checkpoint, fp16, head, optimizer_state, routes
from grpo.parts.model.head import token_logprobs
from grpo.parts.model.offload import offload_state, offloaded_activations
from grpo.run import evaluation, guard, launch, logs, record
from grpo.run.clock import Clock, StopRequested
from grpo.run.inputs import with_steps
from grpo.run.preflight import machines, rehearsal
from grpo.step import gdpo, grading, metrics, schedule, teacher, turns
from grpo.step.packing import measure_rows, sequence_mean, sequence_sum, to_micro_batches
from grpo.step.records import Batch, Collected, MicroBatch, Sample, gather_samples, to_replay
from rollout import Engine

# ---------------------------------------------------------------- 1. the run, and one step of it


@dataclass
class Run:
    """The state of a run, on every rank. Weights that a fork adds go into `copies`, which checkpoints have. Other state
    it writes in `save` and reads in `build`.
    """

    cfg: Config
    clock: Clock  # phases, their seconds, stop requests, the watchdog
    inputs: launch.Inputs  # tokenizer, prompts, eval_prompts; the checkpoint to resume from
    engine: Engine
    model: list  # Megatron's model chunks on this rank: one, or parallel.vpp
    optimizer: object  # Megatron's, its state sharded over the replicas
    reference: list[Tensor] | None  # weights of the reference model; None without a KL
    teacher: teacher.Teacher | None  # None without distillation
    grading: grading.GradingPool
    writer: checkpoint.CheckpointWriter
    guard: guard.Guard
    copies: dict[str, list[Tensor]] = field(default_factory=dict)  # name -> weights as bridge.copy_weights gives them
    prompts_taken: int = 0  # of inputs.prompts, an endless stream


def train(cfg: Config, inputs: launch.Inputs, clock: Clock) -> None:
    """Run all steps, from the first one or from the checkpoint's; every rank calls this."""
    t = cfg.train
    run = build(cfg, inputs, clock)
    gc.freeze()  # what was built stays to the end: a full collection in a step need not walk through it
    log = logs.Log(cfg, inputs, run.writer.rollouts, clock)

    if t.eval_every and not inputs.checkpoint:
        numbers, samples = evaluate(run)
        log.write(log.evaluated(0, numbers, samples))

    for step in range(inputs.done + 1, t.steps + 1):
        try:
            numbers, samples, lines = train_step(run, step)
        except StopRequested:  # this step is given up
            finished = step - 1
            if finished != run.writer.step:  # the last finished step is not saved yet
                save(run, finished)
            run.writer.finish()
            log.stopped(finished)
            break

        if t.eval_every and (step % t.eval_every == 0 or step == t.steps):  # the new weights are in vLLM already
            found, answers = evaluate(run)
            numbers |= log.evaluated(step, found, answers)
        log.write(numbers, samples, lines)

    run.writer.finish()
    run.grading.close()
    log.close()


def build(cfg: Config, inputs: launch.Inputs, clock: Clock) -> Run:
    """Build engine, model and optimizer, restore the checkpoint if there is one, and push the weights to the engine."""
    clock.watchdog.enter("build")
    m, r, t = cfg.model, cfg.rollout, cfg.train

    # vLLM measures free memory when it starts, so it comes first. It sleeps until weights are pushed.
    engine = Engine(inputs.model_path, m, r, cfg.longest_sample, cfg.algo.replay_routes)
    clock.memory.leave_out_engine()

    model = bridge.build_model(
        inputs.model_path,
        cfg.parallel,
        bridge.DTYPES[m.dtype],
        cfg.for_megatron,
        m.fp32_head,
        adapters=cfg.lora,
        match_engine=m.match_engine,
    )
    optimizer = bridge.build_optimizer(model, t, cfg.megatron, inputs.model_path)
    reference = bridge.copy_weights(model, cfg.algo.reference_on) if cfg.algo.kl_coef > 0 else None

    run = Run(
        cfg=cfg,
        clock=clock,
        inputs=inputs,
        engine=engine,
        model=model,
        optimizer=optimizer,
        reference=reference,
        copies={"reference": reference} if cfg.algo.moving_reference else {},
        teacher=teacher.build_teacher(model, cfg) if cfg.algo.teacher else None,
        grading=grading.GradingPool(cfg.reward),
        writer=checkpoint.CheckpointWriter(f"{cfg.output_dir}/checkpoints", t.keep_last, t.keep_every),
        guard=guard.Guard(cfg, model, optimizer, reference, engine, score, run_schedule),
    )
    push_weights(run)  # vLLM has read the same weights from disk, so this checks the mapping of names

    if inputs.checkpoint:
        engine.sleep()
        state = optimizer_state.restore(inputs.checkpoint, model, optimizer, run.copies)
        run.prompts_taken, run.guard.skipped = state["prompts_taken"], state["skipped"]
        run.writer.step = state["step"]
        push_weights(run)
    return run


def save(run: Run, step: int) -> None:
    """Begin to write the checkpoint of `step`; it gets its final name when it is complete (run.writer.finish).

    `state`, written as JSON, is what a resumed run needs besides weights and optimizer state. It has no state of random
    generators: every random choice is a function of seed, step and group.
    """
    state = {
        "step": step,
        "updates": optimizer_state.optimizer_steps(run.optimizer),
        "prompts_taken": run.prompts_taken,
        "skipped": run.guard.skipped,
        "loss_scale": fp16.scaler_state(run.optimizer),
        "data": run.inputs.prompts.fingerprint,
        "base": run.inputs.base,
        "ranks": dist.get_world_size(),
        "config": run.cfg.model_dump(),
    }
    sharded = optimizer_state.sharded_state(run.model, run.optimizer, loading=False)
    run.writer.start(step, state, sharded | optimizer_state.sharded_copies(run.model, run.copies))


def config_at(cfg: Config, step: int) -> Config:
    """The configuration that this step uses: `cfg` with schedules and warm-up."""
    if cfg.schedule != ScheduleConfig():
        cfg = override(cfg, schedule.scheduled_values(cfg, step))
    if step < cfg.train.warmup_steps:
        cfg = override(cfg, {"train.lr": cfg.train.lr * (step / cfg.train.warmup_steps)})
    return cfg


def train_step(run: Run, step: int) -> tuple[dict, list[Sample], list[dict]]:
    """One step of GRPO: sample, grade, log-probs, advantages, updates, push, save.

    Returns the step's metrics, its samples, and what rollouts/ says of each update.
    """
    clock, model = run.clock, run.model
    clock.start_step(step)
    cfg = config_at(run.cfg, step)
    algo, t = cfg.algo, cfg.train
    bridge.seed_step(cfg.seed, step)  # of dropout, so that a resumed run draws the same

    collected = collect(run, cfg, step)  # the same on every rank, as is `batch`
    samples = collected.kept
    batch = flatten(samples, algo.mask_truncated)

    # Whole groups, since the answers of a prompt share its positions in a row.
    groups = [s.group for s in samples]
    updates = update_order(groups, t.updates_per_step, t.epochs_per_step, cfg.seed, step)
    with clock("logprob"):
        batch = with_logprobs(run, samples, batch, cfg, several_updates=len(updates) > 1)
    batch = add_advantages(samples, batch, algo, cfg.reward)

    reports = []
    recorded = record.Updates(run.cfg, cfg, collected.samples, samples, run.optimizer)
    for number, chosen in enumerate(updates):
        with clock("train"):
            weights = loss_weights(batch, chosen, algo.loss_norm, cfg.norm_length)
            weighted = replace(batch, weights=weights)
            micro_batches = to_micro_batches(weighted, chosen, t.max_tokens_per_micro_batch, cfg)  # of this replica
            if algo.compared:
                micro_batches = with_other_models(run, samples, weighted, chosen, micro_batches, cfg)
            report = forward_backward(model, run.optimizer, micro_batches, cfg)
            # Before the weights move: the log-probs of this pass are of the weights that vLLM sampled with.
            if run.guard.may_step(report, weighted, cfg, step, number):
                report["grad_norm"] = bridge.optimizer_step(run.optimizer, t.lr, t.offload == "optimizer")
            run.guard.stepped(report, micro_batches)
            recorded.add(report, weighted, chosen)
            reports.append(report)

    with clock("sync"):
        push_weights(run)
    export_and_save(run, step)

    numbers = {"step": step} | metrics.summarize(collected, reports, clock.end_step(), batch, model, cfg)
    numbers |= run.engine.metrics() | clock.memory.numbers()
    return numbers, collected.samples, recorded.finish()


def export_and_save(run: Run, step: int) -> None:
    """Write the export, then the checkpoint, where `step` has them. A checkpoint is thus never without its export."""
    t = run.cfg.train
    with run.clock("save"):
        if t.save_every:
            run.writer.finish()  # of the previous checkpoint
        if step == t.steps or (t.export_every and step % t.export_every == 0):
            bridge.export(run.model, run.inputs.model_path, run.cfg, step)
        if t.save_every and (step % t.save_every == 0 or step == t.steps):
            save(run, step)


def evaluate(run: Run | evaluation.Sampler) -> tuple[dict[str, float], list[Sample]]:
    """Evaluate the current weights on data.eval. Returns the metrics of each source, and the samples."""
    options = run.cfg.eval
    prompts = dict(enumerate(run.inputs.eval_prompts))
    length = options.max_new_tokens or run.cfg.rollout.max_new_tokens

    with run.clock("eval"):  # as step 0, so always with the same seeds
        samples, _ = sample_and_grade(run, prompts, 0, options.samples, options, length)
    guard.check_rewards(samples, prompts, run.grading)
    return metrics.evaluation(samples, options) | {"time/eval": run.clock.seconds["eval"]}, samples


# ---------------------------------------------------------------- 2. sample and grade


def collect(run: Run, cfg: Config, step: int) -> Collected:
    """Sample and grade the groups of a step, then put the engine to sleep.

    Samples are in the order of their groups. With algo.max_rounds above 1, new prompts replace groups whose rewards are
    all equal (dynamic sampling: DAPO, arXiv 2503.14476, eq. 11). Raises StopRequested, on every rank, if a signal has
    come meanwhile.
    """
    r, max_rounds = cfg.rollout, cfg.algo.max_rounds
    samples = []
    kept = set()  # groups to train on
    rounds = 0
    taken = run.prompts_taken
    while len(kept) < r.prompts_per_step and rounds < max_rounds:
        run.clock.check_stop()
        missing = r.prompts_per_step - len(kept)
        drawn = prompt_batch(run.inputs.prompts, taken, missing, cfg.seed)
        first = taken - run.prompts_taken  # groups are numbered from 0 over all rounds of a step
        prompts = {first + i: prompt for i, prompt in enumerate(drawn)}

        answers, rank_seconds = sample_and_grade(run, prompts, step, r.group_size, r, r.max_new_tokens)
        run.clock.check_stop()  # before errors count: a scheduler's signal may have ended grading processes too
        guard.check_rewards(answers, prompts, run.grading)
        samples += answers

        kept |= set(prompts)  # with one round groups of equal rewards stay, with advantage 0
        if max_rounds > 1:
            kept -= metrics.groups_of_equal_rewards(answers)
        rounds += 1
        taken += missing
    run.prompts_taken = taken  # only now: a stop gives up the step, and a resume takes its prompts again

    if len(kept) < r.prompts_per_step:
        tell(f"step {step}: after {rounds} rounds {len(kept)} of {r.prompts_per_step} groups have mixed rewards")
    if not kept:  # the last round is trained on: an update with a KL or an entropy bonus still has a gradient
        kept = set(prompts)
    if cfg.algo.overlong_buffer:
        penalize_length(samples, cfg.algo, r.max_new_tokens)  # afterwards: it makes no group a mixed one

    with run.clock("sleep"):
        run.engine.sleep()
    return Collected(samples, [s for s in samples if s.group in kept], rounds, rank_seconds)


def sample_and_grade(
    run: Run | evaluation.Sampler,
    prompts: dict[int, Prompt],
    step: int,
    n: int,
    sampling: RolloutConfig | EvalConfig,
    max_tokens: int,
) -> tuple[list[Sample], list[dict]]:
    """Sample and grade `n` answers to each of {group: prompt}. Returns the samples by group, and each rank's seconds.

    Every engine answers its share; every rank gets all samples. A complete group is graded while others are sampled.
    """
    cfg, clock, tp = run.cfg, run.clock, run.cfg.rollout.tp
    rank = dist.get_rank()
    share = list(prompts.items())[rank // tp :: dist.get_world_size() // tp]  # of this rank's engine
    seeds = [sampling_seed(cfg.seed, step, group) for group, _ in share]

    samples = []
    with clock("rollout"):
        generate = run.engine.generate
        if cfg.rollout.turns:
            rows = [prompt.row for _, prompt in share]
            generate = turns.Conversations(run.engine, run.grading, run.inputs, cfg, rows).generate
        generated = generate([prompt.ids for _, prompt in share], seeds, n, sampling, max_tokens)
        for number, completions in logs.answers_bar(generated, n * len(share)):
            if rank % tp:
                continue  # the ranks of an engine have the same answers, and its first one grades them
            group, prompt = share[number]
            texts = run.inputs.tokenizer.batch_decode([c.ids for c in completions], skip_special_tokens=True)
            for c, text in zip(completions, texts, strict=True):  # graders work while vLLM samples on
                samples.append(Sample.of(group, prompt, c, text, seeds[number]))
                row = prompt.row | c.trace.columns
                run.grading.submit(prompt.source, text, prompt.answer, row, c.ids, c.trace.failure)

    with clock("reward"):
        for sample, outcome in zip(samples, run.grading.collect(), strict=True):
            sample.graded, sample.error = outcome.status, outcome.error
            sample.reward, sample.reward_parts = sum(outcome.parts.values()), outcome.parts

    with clock("gather"):
        return gather_samples(samples, dict(clock.seconds))


def penalize_length(samples: list[Sample], algo: AlgoConfig, limit: int) -> None:
    """Add a penalty on the length in tokens: 0 up to `limit` - overlong_buffer, then linear, -overlong_coef at `limit`.

    Source: soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13.
    """
    for s in samples:
        beyond = len(s.response_ids) - (limit - algo.overlong_buffer)
        share = min(max(beyond / algo.overlong_buffer, 0.0), 1.0)
        penalty = -share * algo.overlong_coef
        s.reward_parts["overlong"] = penalty
        s.reward += penalty


# ---------------------------------------------------------------- 3. from samples to rows of tokens


def flatten(samples: list[Sample], mask_truncated: bool = False) -> Batch:
    """The samples end to end, as F positions: each holds a token and its target, the next token of the same sample.

    A prompt a b with the answer c d gives tokens a b c, targets b c d, mask 0 1 1. An environment's tokens have mask 0.
    `mask_truncated`: truncated answers keep their mask, but are not in `loss_mask`.
    """
    parts = {"tokens": [], "targets": [], "rollout_logp": [], "mask": []}
    for s in samples:
        predicted = len(s.prompt_ids) - 1  # prompt tokens that are targets
        parts["tokens"] += [s.prompt_ids, s.response_ids[:-1]]  # the last token predicts nothing
        parts["targets"] += [s.prompt_ids[1:], s.response_ids]
        parts["rollout_logp"] += [np.zeros(predicted, "f4"), s.rollout_logp]
        parts["mask"] += [np.zeros(predicted, bool), s.sampled]

    rows = {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in parts.items()}
    lengths_N = np.array([s.positions for s in samples])

    # Truncated answers stay in `mask`: entropy, KL and the gap are measured on them, though they are not trained.
    kept_F = torch.from_numpy(np.repeat([s.finished or not mask_truncated for s in samples], lengths_N))
    loss_mask = rows["mask"] & kept_F
    return Batch(**rows, loss_mask=loss_mask, lengths_N=lengths_N, replay=to_replay(samples, lengths_N))


def update_order(
    groups: list[int],
    updates: int,
    epochs: int,
    seed: int,
    step: int,
) -> list[list[int]]:
    """The sample numbers of each update, given the group of each sample; the same on every rank and layout.

    Every epoch shuffles the groups and divides them into `updates` parts of whole groups; empty parts are left out.
    """
    parts = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, step, epoch]).permutation(np.unique(groups))
        for part in filter(len, np.array_split(order, updates)):
            parts.append(np.flatnonzero(np.isin(groups, part)).tolist())
    return parts


def with_logprobs(
    run: Run,
    samples: list[Sample],
    batch: Batch,
    cfg: Config,
    several_updates: bool,
) -> Batch:
    """Add the log-probs to the batch that this step needs besides vLLM's, [F] each; each kind takes a forward pass.

    old_logp, of the policy before the updates, stays None where grpo_loss can use its own log-probs, detached.
    """
    algo = cfg.algo
    kl_in_reward = algo.kl_coef > 0 and algo.kl_in == "reward"
    if algo.old_logp == "rollout":
        batch = replace(batch, old_logp=batch.rollout_logp)
    elif several_updates or (run.teacher and algo.teacher_kl == "sampled") or kl_in_reward:
        batch = replace(batch, old_logp=score(run.model, batch, cfg))

    if run.reference is not None and algo.kl != "full":
        batch = replace(batch, ref_logp=score(run.model, batch.for_other_weights(), cfg, run.reference))

    if run.teacher and algo.teacher_kl == "sampled":  # it scores the same answers, perhaps after prompts of its own
        seen = flatten(teacher.with_teacher_prompts(samples, is_policy=run.teacher.model is run.model))
        logp_F = score(run.teacher.model, seen, cfg, run.teacher.weights)
        teacher_logp_F = torch.zeros(len(batch.mask))
        teacher_logp_F[batch.mask] = logp_F[seen.mask]  # the places of the answers in the policy's own rows
        batch = replace(batch, teacher_logp=teacher_logp_F)
    return batch


# ---------------------------------------------------------------- 4. what a token is worth: advantages and weights


def add_advantages(
    samples: list[Sample],
    batch: Batch,
    algo: AlgoConfig,
    reward: RewardConfig | None = None,
) -> Batch:
    """Add the advantage of each position, its answer's, [F]. `reward` has the weights of the parts for gdpo."""
    groups_N = np.array([s.group for s in samples])
    rewards_N = np.array([s.reward for s in samples])
    if algo.advantage == "gdpo":
        rewards_N = gdpo.normalize_parts(samples, reward, algo.overlong_coef)
    if algo.kl_coef > 0 and algo.kl_in == "reward":  # an answer's KL is subtracted from its reward, as in verl
        kl_F = token_kl(batch.old_logp, batch.ref_logp, algo.kl) * batch.mask
        rewards_N = rewards_N - algo.kl_coef * batch.sums(kl_F)

    advantages_N = group_advantages(rewards_N, groups_N, algo.advantage, batch.sums(batch.loss_mask))
    advantages_F = torch.from_numpy(advantages_N).float().index_select(0, batch.seq_id)
    for sample, advantage in zip(samples, advantages_N.tolist(), strict=True):
        sample.advantage = advantage

    if batch.teacher_logp is not None:  # on-policy distillation: reverse KL at the sampled token, arXiv 2306.13649
        advantages_F = advantages_F - algo.teacher_coef * (batch.old_logp - batch.teacher_logp)
    return replace(batch, advantages=advantages_F)


def group_advantages(
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    kind: str,
    tokens_N: np.ndarray | None = None,
) -> np.ndarray:
    """Advantage of each answer against its own group, 0 in a group of equal rewards; [N] each → [N] float64.

    With mean m and std s (ddof 1) of the group of G answers, m' and s' of the other G - 1:

      grpo          (r - m) / (s + 1e-6)           DeepSeekMath, arXiv 2402.03300, 4.1.2; ddof and eps as in verl
      dr_grpo       r - m                          Dr. GRPO, arXiv 2503.20783, 3.2
      rloo          r - m'                         Ahmadian et al., arXiv 2402.14740, 3.2
      grpo_loo      (r - m') / (s' + 1e-6)         NeMo-RL; not divided where the others are equal
      max_rl        (r - m) / m, and 0 where m is not above 0      MaxRL, arXiv 2602.02710; for rewards of 0 and 1
      none          0                              for a teacher alone
    grpo_batch, gdpo and reinforce_pp take r - m, then scale_by_batch. Only reinforce_pp needs tokens_N, the number of
    trained tokens of each answer.
    """
    advantages_N = np.zeros_like(rewards_N)
    for group in np.unique(groups_N):
        members = groups_N == group
        r = rewards_N[members]  # [G]
        if r.min() == r.max():  # advantage 0: rounding of the mean must not give another value
            continue

        if kind == "grpo":
            advantages_N[members] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        elif kind in ("dr_grpo", "reinforce_pp", "grpo_batch", "gdpo"):
            advantages_N[members] = r - r.mean()
        elif kind == "max_rl":
            advantages_N[members] = (r - r.mean()) / r.mean() if r.mean() > 0 else 0.0
        elif kind == "rloo":
            advantages_N[members] = (r - r.mean()) * len(r) / (len(r) - 1)
        elif kind == "grpo_loo":
            others = np.stack([np.delete(r, i) for i in range(len(r))])  # [G, G - 1]
            equal = others.min(1) == others.max(1)
            std = others.std(1, ddof=1) if len(r) > 2 else 0.0
            advantages_N[members] = (r - others.mean(1)) / np.where(equal, 1.0, std + 1e-6)
        elif kind != "none":
            names = "grpo, dr_grpo, rloo, grpo_loo, grpo_batch, max_rl, gdpo, reinforce_pp, none"
            raise UserError(f"algo.advantage={kind!r}: must be one of {names}")

    if kind in ("grpo_batch", "gdpo", "reinforce_pp"):
        return scale_by_batch(advantages_N, rewards_N, kind, tokens_N)
    return advantages_N


def scale_by_batch(
    advantages_N: np.ndarray,
    rewards_N: np.ndarray,
    kind: str,
    tokens_N: np.ndarray | None,
) -> np.ndarray:
    """The advantages a = r - m of `group_advantages`, on a scale of the whole batch; [N] each → [N].

    grpo_batch    a / (std(r) + 1e-4), ddof 1    TRL's scale_rewards=batch: arXiv 2508.08221, 4.1
    gdpo          the same, where r is a sum of normalized parts, gdpo.normalize_parts
                                                 GDPO, arXiv 2601.05242; eps as in TRL
    reinforce_pp  (a - mean(a)) / sqrt(var(a) + 1e-8), over all trained tokens of the batch, ddof 1
                                                 REINFORCE++-baseline, arXiv 2501.03262; as in verl
    """
    if kind == "reinforce_pp" and np.sum(tokens_N) > 1:
        advantages_N = advantages_N - np.average(advantages_N, weights=tokens_N)
        variance = np.sum(tokens_N * advantages_N**2) / (np.sum(tokens_N) - 1)
        advantages_N = advantages_N / np.sqrt(variance + 1e-8)
    if kind in ("grpo_batch", "gdpo") and len(rewards_N) > 1:
        advantages_N = advantages_N / (rewards_N.std(ddof=1) + 1e-4)
    return advantages_N


def loss_weights(batch: Batch, chosen: list[int], kind: str, length: int) -> Tensor:
    """Weight of each token in an update on the `chosen` samples, [F]: the update's loss is sum_t weight · loss / T.

    With N answers that have trained tokens, y_i in answer i and T in all:

      token_mean               1               sum_i sum_t loss / T               DAPO, arXiv 2503.14476, eq. 8
      seq_mean_token_mean      T / (N y_i)     mean_i (1 / y_i) sum_t loss        GRPO, arXiv 2402.03300, eq. 3
      seq_mean_token_sum       T / N           mean_i sum_t loss
      seq_mean_token_sum_norm  T / (N length)  mean_i (1 / length) sum_t loss     Dr. GRPO, arXiv 2503.20783, appendix
    """
    # In float64: T is a sum over the tokens of a whole update, and weights must not depend on their order.
    counts_N = torch.bincount(batch.seq_id, weights=batch.loss_mask.double())
    chosen_N = torch.zeros(len(counts_N), dtype=torch.float64)
    chosen_N[chosen] = 1
    tokens_N = counts_N * chosen_N
    total = tokens_N.sum()
    answers = (tokens_N > 0).sum().clamp(min=1)

    weights_N = {
        "token_mean": 1.0,
        "seq_mean_token_mean": total / (answers * tokens_N.clamp(min=1)),
        "seq_mean_token_sum": total / answers,
        "seq_mean_token_sum_norm": total / (answers * length),
    }
    if kind not in weights_N:
        raise UserError(f"algo.loss_norm={kind!r}: must be one of {', '.join(weights_N)}")
    return (weights_N[kind] * chosen_N).float().index_select(0, batch.seq_id) * batch.loss_mask


# ---------------------------------------------------------------- 5. on Megatron, and back to vLLM


def score(
    model: list,
    batch: Batch,
    cfg: Config,
    weights: list[Tensor] | None = None,
) -> Tensor:
    """Log-prob of every target under `weights`, or without them under the current ones, on every rank; [F], 0 where the
    mask is 0.
    """
    everyone = list(range(len(batch.lengths_N)))
    micro_batches = to_micro_batches(batch, everyone, cfg.train.logprob_max_tokens_per_micro_batch, cfg)
    with bridge.swapped_weights(model, weights):
        rows = run_schedule(model, micro_batches, cfg.rollout.temperature)

    # Each replica has scored its own micro-batches. index_T says where they belong in the batch.
    logp_F = torch.zeros(len(batch.tokens), device=device())
    if bridge.reports_loss():  # one rank a replica, on the last stage
        for mb, logp_T in zip(micro_batches, rows, strict=True):
            index_T = to_device(mb.index_T, logp_F.device)
            logp_F[index_T] = logp_T[: mb.lengths.sum()]
    dist.all_reduce(logp_F)  # each token was scored on one rank, the others hold 0
    return logp_F.cpu()


def with_other_models(
    run: Run,
    samples: list[Sample],
    batch: Batch,
    chosen: list[int],
    micro_batches: list[MicroBatch],
    cfg: Config,
) -> list[MicroBatch]:
    """Add the hidden states of teacher and reference to an update's micro-batches, for a KL over the whole vocabulary.

    Each replica passes the samples of its own rows through them, so that nothing is exchanged. The head then multiplies
    the states, with the policy's own, chunk by chunk: [tokens, vocabulary] never exists.
    """
    algo = cfg.algo
    others = {}  # name -> model, weights, the samples as it sees them, fields of OtherModel
    if "reference" in algo.compared:
        others["reference"] = run.model, run.reference, batch.for_other_weights(), {}
    if "teacher" in algo.compared:
        seen = flatten(teacher.with_teacher_prompts(samples, is_policy=run.teacher.model is run.model))
        how = {"kind": algo.teacher_kl, "beta": algo.teacher_beta, "top_k": algo.teacher_top_k}
        others["teacher"] = run.teacher.model, run.teacher.weights, seen, how

    is_last = bridge.mpu.is_pipeline_last_stage(ignore_virtual=True)
    read = partial(head.all_hidden_rows, on="cpu" if algo.reference_on == "host" else None)
    for name, (model, weights, seen, how) in others.items():
        rows = to_micro_batches(seen, chosen, cfg.train.max_tokens_per_micro_batch, cfg, plan_of=batch)
        with bridge.swapped_weights(model, weights):
            states = run_schedule(model, rows, cfg.rollout.temperature, read=read)
            if is_last:
                how["weight"] = head.head_weight_for(model[-1], len(head.head_weight(run.model[-1])))
                how["matches"] = bridge.unwrap_model(model[-1]).matches
        if is_last:
            pairs = zip(micro_batches, states, strict=True)
            micro_batches = [teacher.with_other(mb, name, states_M, **how) for mb, states_M in pairs]
    return micro_batches


def forward_backward(
    model: list,
    optimizer,
    micro_batches: list[MicroBatch],
    cfg: Config,
) -> dict[str, float]:
    """Accumulate an update's gradient in Megatron's buffers. Returns its report, of all ranks except measure_rows."""
    bridge.zero_gradients(model, optimizer)
    hooks = offloaded_activations(model) if cfg.train.offload_activations else nullcontext()
    with hooks:
        reports = run_schedule(model, micro_batches, cfg.rollout.temperature, partial(grpo_loss, algo=cfg.algo))

    report = metrics.add_up(reports) | measure_rows(micro_batches, cfg)
    report["grad_norm"] = math.nan  # until the optimizer has stepped
    report["loss_scale"] = None
    if cfg.model.dtype == "fp16":
        report["loss_scale"] = fp16.loss_scale(optimizer)
    if cfg.algo.replay_routes:
        report |= routes.reduce_counts(model)
    return report


def run_schedule(
    model: list,
    micro_batches: list[MicroBatch],
    temperature: float,
    loss_func=None,
    read=None,
) -> list:
    """Run Megatron's pipeline schedule: forward and backward passes, or forward passes alone without a `loss_func`.

    Returns, on the last pipeline stage only, the report of each micro-batch or, without `loss_func`, its log-probs [T],
    or what `read` takes from its hidden states.

    Megatron sums gradients over micro-batches and replicas and divides them once by the global sum of the denominators
    (calculate_per_token_loss), so neither the split into micro-batches nor the layout changes the result.
    """
    training = loss_func is not None
    for chunk in model:
        chunk.train(training)

    with torch.set_grad_enabled(training):
        return bridge.get_forward_backward_func()(
            forward_step_func=partial(forward_step, temperature=temperature, loss_func=loss_func, read=read),
            data_iterator=[iter(micro_batches) for _ in model],
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=max(mb.width for mb in micro_batches),
            micro_batch_size=1,
            forward_only=not training,
            collect_non_loss_data=not training,
        )


def forward_step(micro_batches, model, temperature: float, loss_func, read=None):
    """Megatron's forward_step: run the next micro-batch through one model chunk.

    Returns the output and, on the last stage, a function of it that gives the loss or, without `loss_func`, the
    log-probs, or what `read` takes from the hidden states.
    """
    mb = next(micro_batches)
    hidden = bridge.hidden_states(model, mb)  # [C / cp (/ tp under sequence parallelism), 1, h]
    if not bridge.unwrap_model(model).post_process:  # an earlier stage of the pipeline
        return hidden, None
    if read:
        return read(model, hidden, mb), lambda output, non_loss_data: output
    logp_T, entropy_T, *compared = token_logprobs(model, hidden, mb, temperature, with_entropy=loss_func is not None)
    if compared:
        mb = teacher.with_divergences(mb, compared)

    def loss(logp_T: Tensor):
        loss_sum, denominator, report = loss_func(mb, logp_T, entropy_T)
        return loss_sum, denominator * bridge.first_of_context(), report  # Megatron adds them over cp as well

    def values(logp_T: Tensor, non_loss_data: bool):
        return logp_T

    return logp_T, loss if loss_func else values


def push_weights(run: Run) -> None:
    """Push the trainer's weights to vLLM, as full tensors under Hugging Face names, then allocate its KV cache."""
    if run.cfg.train.offload or torch.cuda.is_available():
        offload_state(run.cfg.train.offload, run.model, run.optimizer)  # what nobody reads while vLLM samples
    run.engine.wake("weights")  # the KV cache stays away until the trainer's copies of a bucket are gone
    weights = bridge.hf_weights(run.model, run.cfg.rollout.sync_bucket_mb << 20)
    run.engine.load_weights(weights, bridge.hf_shards(run.model))
    run.engine.wake("kv_cache")


# ---------------------------------------------------------------- 6. the loss: pure functions


def grpo_loss(mb: MicroBatch, logp_T: Tensor, entropy_T: Tensor, algo: AlgoConfig):
    """(loss sum, number of tokens with a weight above 0, report) of one micro-batch.

    Megatron divides the sum of all gradients by the sum of these numbers: no factor of micro-batches, dp or cp belongs
    here (`run_schedule`). What needs the whole batch is computed in train_step and passed in a field of Batch.
    """
    mask_T = mb.mask[0].float()
    weight_T = mb.weights[0]
    rollout_logp_T = mb.rollout_logp[0]
    # With one update a step the policy has not moved since it sampled: the ratio is 1 and has the gradient of logp.
    old_logp_T = logp_T.detach() if mb.old_logp is None else mb.old_logp[0]
    trainer_logp_T = logp_T.detach() if algo.old_logp == "rollout" else old_logp_T  # never vLLM's

    advantages_T = mb.advantages[0]
    policy_T, clipped_T = policy_loss(logp_T, old_logp_T, advantages_T, mask_T, mb.sequence_T, algo)
    correction_T, outside_T = mismatch_weight(trainer_logp_T, rollout_logp_T, mask_T, mb.sequence_T, algo)
    policy_T = policy_T * correction_T

    loss_T = policy_T  # entropy and KL are the trainer's own, so no weight corrects them
    if algo.entropy_coef:
        loss_T = loss_T - algo.entropy_coef * entropy_T
    if mb.ref_logp is not None and algo.kl_in == "loss":
        kl_T = mb.ref_kl[0] if algo.kl == "full" else token_kl(logp_T, mb.ref_logp[0], algo.kl)
        loss_T = loss_T + algo.kl_coef * kl_T
    if mb.teacher_kl is not None:
        loss_T = loss_T + algo.teacher_coef * mb.teacher_kl[0]

    loss = (loss_T * weight_T).sum()
    denominator = (weight_T > 0).sum().int()

    # For the metrics, sums over the micro-batch: of the losses by weight, of the rest over response tokens.
    report = {
        "loss": loss,
        "policy": (policy_T * weight_T).sum(),
        "denominator": denominator,
    }
    per_token = {
        "tokens": mask_T,
        "entropy": entropy_T,
        "clipped": clipped_T,
        "outside": outside_T,
    }
    if mb.ref_logp is not None:
        per_token |= {kind: token_kl(logp_T.detach(), mb.ref_logp[0], kind) for kind in ("k1", "k2", "k3")}
    for name in ("ref_kl", "teacher_kl", "teacher_entropy"):
        if getattr(mb, name) is not None:
            per_token[name] = getattr(mb, name)[0]
    report |= {name: values_T @ mask_T for name, values_T in per_token.items()}
    report |= metrics.gap_report(trainer_logp_T - rollout_logp_T, old_logp_T - rollout_logp_T, mask_T)
    return loss, denominator, {name: value.detach().double() for name, value in report.items()}


def policy_loss(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    algo: AlgoConfig,
) -> tuple[Tensor, Tensor]:
    """Policy loss at each token, and 1.0 where a clip is active; [T] each → ([T], [T]).

    With ratio = exp(logp - old_logp), the exponent clamped to ±20, and clip to [1 - clip_low, 1 + clip_high]:

      ppo_clip   -min(ratio A, clip(ratio) A)      PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476
      gspo       the same with the sequence's ratio s = exp(mean_t(logp - old_logp)), the mean at most 10, and each
                 token's gradient s ∇logp          GSPO, arXiv 2507.18071, eq. 5 and 13 (GSPO-token); the cap as in verl
      cispo      -sg(clip(ratio)) A logp           MiniMax-M1, arXiv 2506.13585, eq. 4
      ipo        -ratio A, and 0 outside_trust_region; dppo_tv likewise
      reinforce  -A logp                           Williams (1992)
    dual_clip = c bounds ppo_clip and gspo at -c A where A < 0: arXiv 1912.09729, eq. 5.
    """
    log_ratio_T = logp_T - old_logp_T
    if algo.loss == "gspo":
        mean_T = sequence_mean(log_ratio_T.detach(), mask_T, sequence_T)
        log_ratio_T = mean_T.clamp(max=10) + logp_T - logp_T.detach()
    ratio_T = log_ratio_T.clamp(-20, 20).exp()
    bounded_T = ratio_T.clamp(1 - algo.clip_low, 1 + algo.clip_high)

    if algo.loss in ("ppo_clip", "gspo"):
        loss_T = torch.maximum(-ratio_T * advantages_T, -bounded_T * advantages_T)
        clipped_T = -bounded_T * advantages_T > -ratio_T * advantages_T
        if algo.dual_clip is not None:
            ceiling_T = torch.where(advantages_T < 0, -algo.dual_clip * advantages_T, torch.inf)
            clipped_T = clipped_T | (loss_T > ceiling_T)
            loss_T = torch.minimum(loss_T, ceiling_T)
        return loss_T, clipped_T.float()

    if algo.loss == "cispo":
        return -bounded_T.detach() * advantages_T * logp_T, (bounded_T != ratio_T).float()
    if algo.loss in ("ipo", "dppo_tv"):
        outside_T = outside_trust_region(logp_T, old_logp_T, advantages_T, algo)
        return torch.where(outside_T, 0.0, -ratio_T * advantages_T), outside_T.float()
    if algo.loss == "reinforce":
        return -advantages_T * logp_T, torch.zeros_like(logp_T)
    raise UserError(f"algo.loss={algo.loss!r}: must be one of ppo_clip, gspo, cispo, ipo, dppo_tv, reinforce")


def outside_trust_region(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantages_T: Tensor,
    algo: AlgoConfig,
) -> Tensor:
    """True where ipo or dppo_tv leaves a token out; [T] each → [T] bool. With p = exp(logp) and moved = p - old p:

    ipo       moved is outside [-clip_low, clip_high]                prime-rl
    dppo_tv   the same, but only the bound that A moves p towards counts: the upper one for A > 0
              DPPO, arXiv 2602.04879, binary TV; without verl's bound of the ratio
    """
    moved_T = (logp_T.exp() - old_logp_T.exp()).detach()
    above_T = moved_T > algo.clip_high
    below_T = moved_T < -algo.clip_low
    if algo.loss == "ipo":
        return above_T | below_T
    return torch.where(advantages_T > 0, above_T, below_T)


# algo.correction → bounds (low, high) of the weight, where algo.correction_low and correction_high are null
CORRECTION_BOUNDS = {
    "none": (0.0, 2.0),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "seq_mask": (0.999, 1.002),
}


def mismatch_weight(
    trainer_logp_T: Tensor,
    rollout_logp_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    algo: AlgoConfig,
) -> tuple[Tensor, Tensor]:
    """Importance weight of each token's policy loss, as vLLM and the trainer differ; [T] each → ([T], [T]).

    With w = exp(trainer - rollout), exponents clamped to ±20, and bounds [low, high], outside which the second is 1.0:

      none      1
      tis       clip(w)    Yao et al. (2025), "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
      icepop    w inside the bounds, else 0    Ring-1T, arXiv 2510.18855
      seq_mask  w in answers whose geometric mean of w is inside the bounds, else 0      as in NeMo-RL
    With correction_level=sequence, w of tis and icepop is the product over the answer. none uses the bounds of tis.
    """
    if algo.correction not in CORRECTION_BOUNDS:
        raise UserError(f"algo.correction={algo.correction!r}: must be one of {', '.join(CORRECTION_BOUNDS)}")
    low, high = CORRECTION_BOUNDS[algo.correction]
    if algo.correction_low is not None:
        low = algo.correction_low
    if algo.correction_high is not None:
        high = algo.correction_high
    if low > high:
        raise UserError(f"algo.correction_low={low:g} is above algo.correction_high={high:g}: no weight fits")

    log_w_T = trainer_logp_T - rollout_logp_T
    compared_T = log_w_T  # what is compared with the bounds
    if algo.correction == "seq_mask":
        compared_T = sequence_mean(log_w_T, mask_T, sequence_T)
    elif algo.correction_level == "sequence":
        compared_T = log_w_T = sequence_sum(log_w_T * mask_T, sequence_T)
    w_T = log_w_T.clamp(-20, 20).exp()
    compared_T = compared_T.clamp(-20, 20).exp()
    outside_T = ((compared_T < low) | (compared_T > high)).float()

    if algo.correction == "none":
        return torch.ones_like(w_T), outside_T
    if algo.correction == "tis":
        return w_T.clamp(low, high), outside_T
    return w_T * (1 - outside_T), outside_T


def token_kl(logp_T: Tensor, ref_logp_T: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || reference) at each token, from the sampled token alone; [T], [T] → [T].

    With d = ref - logp:  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - d - 1 with d clamped to ±20 and the result to ±10;
    k3+ has the value of k3 and the gradient of k2, which in expectation is the gradient of the true KL.
    Source: Schulman, "Approximating KL divergence" (2020); clamps and k3+ as in verl.
    """
    d_T = ref_logp_T - logp_T
    if kind == "k1":
        return -d_T
    if kind == "k2":
        return d_T**2 / 2
    if kind == "k3":
        d_T = d_T.clamp(-20, 20)
        return (d_T.exp() - d_T - 1).clamp(-10, 10)
    if kind == "k3+":
        k2_T = token_kl(logp_T, ref_logp_T, "k2")
        return token_kl(logp_T.detach(), ref_logp_T, "k3") + k2_T - k2_T.detach()
    raise UserError(f"algo.kl={kind!r}: must be one of k1, k2, k3, k3+, full")


# ---------------------------------------------------------------- 7. the command


def rehearse(cfg: Config) -> None:
    """Call advantages and loss before anything is built, so that an unknown name in `algo` or a fork's slip shows
    at once. Raises UserError.
    """
    cfg = with_steps(cfg, prompts=cfg.rollout.prompts_per_step)  # of train.epochs; the data are not read yet
    for step in (1, cfg.train.steps):  # the ends of schedules
        rehearsal.run(config_at(cfg, step), flatten, add_advantages, loss_weights, grpo_loss)


def start(args: argparse.Namespace):
    """Check, rehearse, read, join the ranks, train. Raises UserError, TrainingError."""
    cfg = launch.check(args)
    rehearse(cfg)
    if args.dry_run:
        launch.dry_run(cfg, args)
        return
    machines.check_start(cfg)
    cfg, inputs = launch.prepare(cfg, args.world_size, weights=True)
    with launch.joined(cfg) as clock, launch.output_dir(cfg, inputs) as inputs:
        if inputs.done < cfg.train.steps:  # else there is nothing to do
            train(cfg, inputs, clock)


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit code: 0 done, 2 a mistake the user can mend, 1 a failure during training."""
    args = launch.parse_args(argv, __doc__)
    try:
        if args.export:
            evaluation.export(args)
        elif args.evaluate:
            with evaluation.started(args, Engine) as sampler:
                evaluation.report(sampler.cfg, *evaluate(sampler))
        else:
            start(args)
    except (UserError, TrainingError) as error:
        return launch.exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
