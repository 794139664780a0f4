"""Check gradients, offload and memory of the trainer without vLLM. See checks.py."""

import itertools
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers

import megatron_bridge as bridge
import train_grpo
from config import Config
from support.base import ranks
from support.model import offload
from support.model.attention import use_flash_attention_3
from support.step.packing import Batch, to_micro_batches
from tools.gpu_checks import worker

UPDATES = 5


def make_batch(samples: list[train_grpo.Sample], cfg: Config) -> Batch:
    """Return a batch of the samples with their advantages and the loss weights of a mean over all tokens."""
    batch = train_grpo.flatten(samples)
    advantages_F = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)[batch.seq_id]
    weights_F = train_grpo.loss_weights(batch, list(range(len(samples))), cfg.algo.loss_norm, 1)
    return replace(batch, advantages=advantages_F, weights=weights_F)


def make_micro_batches(samples: list[train_grpo.Sample], cfg: Config) -> list:
    """Return the micro-batches of this replica."""
    budget = cfg.train.max_tokens_per_micro_batch
    return to_micro_batches(make_batch(samples, cfg), list(range(len(samples))), budget, cfg)


# ---------------------------------------------------------------- gradients


def compute_gradient(cfg: Config, samples: list[train_grpo.Sample]) -> dict[str, torch.Tensor]:
    """Return the unsharded gradient of one update by Hugging Face names, on every rank, in fp32 on the host.

    Gradients are reduced over replicas, put into the storage of the weights, and exported like weights.
    """
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    model = bridge.build_model(cfg.model.path, cfg.parallel, bridge.DTYPES[cfg.model.dtype], cfg.megatron)
    for chunk in model:
        chunk.zero_grad_buffer()
    loss = partial(train_grpo.grpo_loss, algo=cfg.algo)
    train_grpo.run_schedule(model, make_micro_batches(samples, cfg), cfg.rollout.temperature, loss)
    for buffer in itertools.chain.from_iterable((*chunk.buffers, *chunk.expert_parallel_buffers) for chunk in model):
        for bucket in buffer.buckets:  # each replica has the sum of one part
            group = buffer.data_parallel_group
            part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
    gradients = [p.main_grad.to(p.dtype) for chunk in model for p in chunk.parameters()]
    with bridge.swapped_weights(model, gradients):
        found = {name: tensor.float().cpu() for name, tensor in bridge.hf_weights(model)}
    bridge.mpu.destroy_model_parallel()
    return found


def compute_transformers_gradient(
    path: Path, dtype: torch.dtype, samples: list[train_grpo.Sample]
) -> dict[str, torch.Tensor]:
    """Return the same gradient from transformers in fp32 on the host, with weights rounded to `dtype`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    tokens = sum(len(sample.response_ids) for sample in samples)
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()[None]
        logp = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[len(sample.prompt_ids) - 1 :, 0]
        (-sample.advantage * logp.sum() / tokens).backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        block, _, last = name.rpartition(".")
        if last == "gate_up_proj":  # all experts in one tensor
            for e, expert in enumerate(grad):
                gate, up = expert.chunk(2)
                found[f"{block}.{e}.gate_proj.weight"] = gate
                found[f"{block}.{e}.up_proj.weight"] = up
        elif last == "down_proj":
            for e, expert in enumerate(grad):
                found[f"{block}.{e}.down_proj.weight"] = expert
        elif last in ("weight", "bias"):
            found[name] = grad
    return found


def check_gradients(record: worker.Record) -> None:
    """Compare the gradient of an update with transformers: in fp32 for each weight, in bf16 for all together."""
    ranks.join_ranks(600)
    samples = worker.samples(24, 300 if torch.cuda.is_available() else 60)
    for kind in worker.MODELS:
        path = worker.make_model(kind)
        for dtype in ("fp32", "bf16"):
            use_flash_attention_3(bridge.DTYPES[dtype])
            cfg = worker.config(
                path, f"model.dtype={dtype}", *worker.layout(kind), "rollout.temperature=1", "algo.entropy_coef=0",
                "train.max_tokens_per_micro_batch=1024",
            )  # fmt: skip
            found = compute_gradient(cfg, samples)
            if dist.get_rank():
                continue
            wanted = compute_transformers_gradient(path, bridge.DTYPES[dtype], samples)
            if found.keys() != wanted.keys():
                raise ValueError(f"weights without a gradient: {sorted(found.keys() ^ wanted.keys())[:4]}")
            errors = {name: (found[name] - wanted[name]).norm().item() for name in wanted}
            norms = {name: wanted[name].norm().item() for name in wanted}
            worst = max(wanted, key=lambda name: errors[name] / norms[name])
            whole = torch.tensor([*errors.values()]).norm().item() / torch.tensor([*norms.values()]).norm().item()
            one = errors[worst] / norms[worst]
            row = f"gradient, {kind}, {dtype}"
            if dtype == "fp32":
                record(row, one, f"worst: {worst}")
            else:
                record(row, whole, f"of all weights; worst single one: {worst} {one:.2g}")


# ---------------------------------------------------------------- offload


def run_updates(what: str, path: Path, record: worker.Record) -> list[torch.Tensor]:
    """Return main weights and moments after UPDATES updates with train.offload=`what` between them."""
    cfg = worker.config(path, "train.lr=0.001", "train.max_tokens_per_micro_batch=512")
    model = bridge.build_model(path, cfg.parallel, torch.bfloat16, cfg.megatron)
    optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
    micro_batches = make_micro_batches(worker.samples(16, 60), cfg)
    for number in range(UPDATES):
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        offload.offload_state(what, model, optimizer)
        if torch.cuda.is_available() and what == "optimizer" and number == UPDATES - 1:
            freed = before - torch.cuda.memory_allocated()
            buffers = [buffer for chunk in model for buffer in chunk.buffers]
            shards = list(offload.state_shards(optimizer))
            held = sum(b.grad_data.numel() * 4 for b in buffers) + sum(shard.numel() * 4 for shard in shards)
            record("memory that train.offload=optimizer frees", freed / held, f"of {held / 2**20:.0f} MiB")
        train_grpo.forward_backward(model, optimizer, micro_batches, cfg)
        bridge.optimizer_step(optimizer, cfg.train.lr, offloaded=what == "optimizer")
    return [shard.detach().clone() for shard in offload.state_shards(optimizer)]


def check_offload(record: worker.Record) -> None:
    """Check that offloaded tensors come back bit for bit, with deterministic kernels so that updates repeat."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    ranks.join_ranks(600)
    path = worker.make_model("gqa")
    use_flash_attention_3(torch.bfloat16)
    bridge.init_model_parallel(worker.config(path).parallel, 0)
    wanted = run_updates("none", path, record)
    largest = max(float(shard.abs().max()) for shard in wanted)
    rows = {
        "none": "update made twice",
        "grads": "update with train.offload=grads",
        "optimizer": "update with train.offload=optimizer",
    }
    for what, row in rows.items():
        found = run_updates(what, path, record)
        different = sum(int((f != w).sum()) for f, w in zip(found, wanted, strict=True))
        total = sum(shard.numel() for shard in wanted)
        record(
            row, sum(ranks.gather(different)) if largest else float("nan"), f"of {total} per rank, {UPDATES} updates"
        )


# ---------------------------------------------------------------- plan


def check_plan(record: worker.Record) -> None:
    """Compare the trainer's memory planned by --dry-run with what torch allocates; on a GPU at the shape of a 0.5B."""
    from tools import plan

    gpu = torch.cuda.is_available()
    ranks.join_ranks(600)
    path = worker.bench_model("qwen2.5-0.5b" if gpu else "tiny")
    world = dist.get_world_size()
    dist.destroy_process_group()  # the plan makes a fake process group
    tokens = 8192 if gpu else 512
    cfg = worker.config(
        path, "algo.kl_coef=0.05", f"train.max_tokens_per_micro_batch={tokens}", "rollout.prompts_per_step=8",
        f"train.logprob_max_tokens_per_micro_batch={tokens}", f"rollout.max_new_tokens={tokens // 8 - worker.PROMPT}",
        "rollout.group_size=8", "train.offload=none",
    )  # fmt: skip
    planned = plan.plan(cfg, world, plan.gpu_bytes(None))
    ranks.join_ranks(600)
    use_flash_attention_3(torch.bfloat16)
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    model = bridge.build_model(path, cfg.parallel, torch.bfloat16, cfg.megatron)
    optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
    reference = bridge.copy_weights(model)
    longest = tokens // 8 - worker.PROMPT
    made = worker.samples(16 * world, longest, vocabulary=512, shortest=longest - 8)  # rows are nearly full
    micro_batches, batch = make_micro_batches(made, cfg), make_batch(made, cfg)

    def record_ratio(row: str, measured: float, expected: int) -> None:
        measured = max(ranks.gather(measured))
        gib = f"{measured / 2**30:.2f} GiB of {expected / 2**30:.2f} planned"
        record(row, abs(measured / expected - 1), gib)

    def peak(phase: str) -> tuple[float, int]:
        """Return (bytes measured since the last call, bytes planned without the reserve and without vLLM)."""
        measured = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return measured, plan.total(planned.phases[phase]) - planned.phases[phase]["reserve"]

    if gpu:
        torch.cuda.reset_peak_memory_stats()  # without the peak of building
    for _ in range(2):  # the first allocates what stays
        train_grpo.forward_backward(model, optimizer, micro_batches, cfg)
        bridge.optimizer_step(optimizer, cfg.train.lr, offloaded=False)
    stays = max(sum(held.gpu.values()) for held in planned.held.values())
    if not gpu:
        buffers = [buffer for chunk in model for buffer in chunk.buffers]
        tensors = [t for b in buffers for t in (b.param_data, b.grad_data)] + list(offload.state_shards(optimizer))
        record_ratio("plan: what stays", sum(t.nbytes for t in (*tensors, *reference)), stays)
        return
    record_ratio("plan: what stays", torch.cuda.memory_allocated(), stays)
    record_ratio("plan: peak of training", *peak("train"))
    train_grpo.score(model, batch, cfg)
    record_ratio("plan: peak of log-probs", *peak("logprob"))


if __name__ == "__main__":
    sys.exit(worker.main({"gradients": check_gradients, "offload": check_offload, "plan": check_plan}))
