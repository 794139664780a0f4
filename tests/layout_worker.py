"""Runs under torchrun: one update of the same samples on one layout after the other, what it gave written to a folder.

    torchrun --nproc_per_node=4 tests/layout_worker.py PLANS.json

A plan is {"overrides", "samples", "out", "layouts": {name: [overrides]}, "bins": [[sample numbers]], "reference"}. If
bins are given, they are the micro-batches of the update. With a reference, the folder of its weights, the loss has
divergences from it and from algo.teacher.
For each layout, rank 0 writes NAME.safetensors: "logp" [F] as the trainer scores it, "loss", "grad_norm", the gradients
as "grad.<Hugging Face name>" (with adapters theirs, and "merged.<name>", the weights that were pushed), "load" per
layer where there are experts, "shared" (positions that were not computed again), "held" [ranks, 4] (held_bytes), and
"same". It is 1 if the export of the model just loaded equals the original bit by bit, and the digests of its shards
equal the digests of its tensors. With adapters, the push must equal the export, and the factors made_up_factor.

The gradients are read from the exported weights, so they have passed through the distributed optimizer and the weight
mapping: Adam with a huge eps steps by lr · grad / eps.
"""

import json
import sys
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from safetensors.torch import load_file, save_file

import megatron_bridge as bridge
import train_grpo
from grpo.parts.base import hf_folder, ranks
from grpo.parts.base.read_config import load_config
from grpo.parts.engine.push_check import add_up, shard_digests
from grpo.parts.model import lora
from grpo.run.preflight import configuration
from grpo.step import metrics, teacher
from grpo.step.packing import pack, to_micro_batches
from rollout import Trace

EPS, STEP = 1e8, 1e4  # a step moves a weight by STEP · gradient
KINDS = ("weights", "gradients", "optimizer", "reference")  # of what a rank holds
EXACT = ("train.clip_grad=0", f"megatron.adam_eps={EPS:.0f}", "algo.loss_norm_length=32")


def made_up_factor(name, shape: tuple[int, int]):
    """In place of lora.initial_factor, which lets B be 0; [out, rank] or [rank, in]."""
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def on_host(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: weight.cpu() for name, weight in weights}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of the memory that the tensors lie in."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def held_bytes(model, optimizer) -> list[int]:
    """Bytes of each of KINDS on this rank, the reference a copy of the weights, read off the tensors themselves.

    Not the optimizer's scalars, its numbers of steps, nor what stands for the host's with optimizer_cpu_offload.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    weights = storages(parameter.data for parameter in parameters)
    state = {}
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        adams = [inner.gpu_optimizer] if isinstance(inner, HybridDeviceOptimizer) else [inner]
        mains = [shard for group in part.shard_fp32_from_float16_groups for shard in group if shard is not None]
        stepped = [shard for adam in adams if adam for group in adam.param_groups for shard in group["params"]]
        moments = [m for adam in adams if adam for s in adam.state.values() for n, m in s.items() if n != "step"]
        state |= storages([*mains, *stepped, *moments])
    own = {address: size for address, size in state.items() if address not in weights}
    reference = storages(bridge.copy_weights(model))
    gradients = storages(parameter.main_grad for parameter in parameters if parameter.requires_grad)
    return [sum(table.values()) for table in (weights, gradients, own, reference)]


def sum_over_tp(x):
    """In place of vLLM's sum over the ranks of an engine, since there is no engine here."""
    dist.all_reduce(x, group=bridge.mpu.get_tensor_model_parallel_group())
    return x


def one_layout(plan, name) -> dict[str, torch.Tensor]:
    """What the layout gives, on every rank."""
    cfg = load_config("configs/tiny.yaml", [*plan["overrides"], *plan["layouts"][name], *EXACT])
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"lr": EPS * STEP})})  # above what is legal
    configuration.check_config(cfg, dist.get_world_size())
    configuration.check_model(cfg, cfg.model.path, rollout_tp=1)
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    if cfg.model.match_engine:
        from vllm import distributed

        distributed.tensor_model_parallel_all_reduce = sum_over_tp
    with mock.patch.object(lora, "initial_factor", made_up_factor):
        m = cfg.model
        dtype = bridge.DTYPES[m.dtype]
        model = bridge.build_model(
            m.path, cfg.parallel, dtype, cfg.megatron, m.fp32_head, adapters=cfg.lora, match_engine=m.match_engine
        )
    optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
    held = ranks.gather(held_bytes(model, optimizer))
    before = merged = on_host(bridge.hf_weights(model, bucket_bytes=1 << 16))
    folder = Path(plan["out"], "hf")
    hf_folder.export_hf(bridge.hf_weights(model), cfg.model.path, folder)
    exported, original = load_file(folder / "model-00000.safetensors"), load_file(f"{cfg.model.path}/model.safetensors")
    whole = shard_digests((name, 0, tensor) for name, tensor in bridge.hf_weights(model))
    names = list({name for name, _, _ in whole})
    shards = ranks.gather(shard_digests(bridge.hf_shards(model)))
    same = equal(exported, original) and equal(before, original)
    same &= bool((add_up(names, shards) == add_up(names, [whole]))[..., :2].all())  # a shard begins at any row
    if cfg.lora.rank:
        before = on_host(bridge.hf_weights(model, bucket_bytes=1 << 16, factors=True))
        same = equal(before, {name: made_up_factor(name, before[name].shape) for name in before})
        same &= merged.keys() == original.keys() and equal(exported, merged)

    samples = []
    for row in json.loads(Path(plan["samples"]).read_text()):
        types = {"routes": "u1", "nuclei": "i4"}
        replay = {name: np.array(row.pop(name), types[name]) for name in types.keys() & row.keys()}
        samples.append(train_grpo.Sample(**row, trace=Trace(replay=replay)))
    batch = train_grpo.flatten(samples)
    logp_F = train_grpo.score(model, batch, cfg)
    noise = torch.Generator().manual_seed(1)
    batch = replace(
        batch,
        advantages=torch.tensor([sample.advantage for sample in samples])[batch.seq_id],
        old_logp=batch.rollout_logp + 0.3 * torch.randn(len(logp_F), generator=noise),
        ref_logp=batch.rollout_logp + 0.3 * torch.randn(len(logp_F), generator=noise),
    )
    chosen = list(range(len(samples)))
    weights_F = train_grpo.loss_weights(batch, chosen, cfg.algo.loss_norm, cfg.algo.loss_norm_length)
    budget = cfg.train.max_tokens_per_micro_batch
    batch = replace(batch, weights=weights_F)
    if "bins" in plan:
        rank = bridge.mpu.get_data_parallel_rank()
        replicas = bridge.mpu.get_data_parallel_world_size()
        micro_batches = [pack(batch, members, budget, bridge.device()) for members in plan["bins"][rank::replicas]]
    else:
        micro_batches = to_micro_batches(batch, chosen, budget, cfg)
    if "reference" in plan:
        other = bridge.build_model(plan["reference"], cfg.parallel, dtype, {}, m.fp32_head, adapters=cfg.lora)
        models = {"reference": bridge.copy_weights(other), "teacher": teacher.build_teacher(model, cfg)}
        run = SimpleNamespace(model=model, **models)
        micro_batches = train_grpo.with_other_models(run, samples, batch, chosen, micro_batches, cfg)
    report = train_grpo.forward_backward(model, optimizer, micro_batches, cfg)
    grad_norm = bridge.optimizer_step(optimizer, cfg.train.lr, offloaded=False)
    after = on_host(bridge.hf_weights(model, factors=bool(cfg.lora.rank)))
    load = metrics.expert_load(model) if model[0].config.num_moe_experts else []
    bridge.mpu.destroy_model_parallel()
    return {
        "logp": logp_F, "old_logp": batch.old_logp, "ref_logp": batch.ref_logp, "load": torch.tensor(load),
        "held": torch.tensor(held), "shared": torch.tensor(sum(ranks.gather(report["shared"]))),
        "same": torch.tensor(float(same)), "grad_norm": torch.tensor(grad_norm, dtype=torch.float64),
        "loss": torch.tensor(report["loss"] / report["denominator"], dtype=torch.float64),
        **{f"grad.{name}": (before[name].double() - after[name].double()) / STEP for name in before},
        **({f"merged.{name}": weight for name, weight in merged.items()} if cfg.lora.rank else {}),
    }  # fmt: skip


def main():
    for plan in json.loads(Path(sys.argv[1]).read_text()):
        for name in plan["layouts"]:
            ranks.join_ranks(timeout_s=600)
            found = one_layout(plan, name)
            if dist.get_rank() == 0:
                save_file(found, Path(plan["out"], f"{name}.safetensors"))
                print(name, flush=True)
            dist.destroy_process_group()  # with all groups of the layout, whose threads would pile up


if __name__ == "__main__":
    main()
