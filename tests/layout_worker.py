"""Runs under torchrun: one update of the same samples on one layout after the other, what it gave written to a folder.

    torchrun --nproc_per_node=4 tests/layout_worker.py PLAN.json

PLAN is {"config", "overrides", "samples", "out", "layouts": {name: [overrides]}, "orders": {name: [sample numbers]}}.
For each layout, rank 0 writes NAME.safetensors: "logp" [F] as the trainer scores it, "loss", "grad_norm", the gradients
as "grad.<Hugging Face name>", "load" per layer where there are experts, and "same" 1 where the export of the model just
loaded is the original bit by bit.

The gradients are read from the exported weights, so they have passed through the distributed optimizer and the weight
mapping: Adam with a huge eps steps by lr · grad / eps.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import load_file, save_file

import megatron_bridge as bridge
import train_grpo

EPS, STEP = 1e8, 1e4  # a step moves a weight by STEP · gradient


def one_layout(plan: dict, name: str) -> dict[str, torch.Tensor]:
    """What the layout gives, on every rank."""
    overrides = [*plan["overrides"], *plan["layouts"][name], f"megatron.adam_eps={EPS:.0f}"]
    cfg = train_grpo.load_config(train_grpo.Config, plan["config"], overrides)
    train_grpo.check_config(cfg, dist.get_world_size())
    bridge.check_model(cfg.model.path, cfg.parallel, 1, 64, cfg.model.dtype, cfg.megatron)
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    model = bridge.build_model(cfg.model.path, cfg.parallel, torch.float32, cfg.megatron)
    optimizer = bridge.build_optimizer(model, 1.0, 0.0, (0.9, 0.999), 0.0, cfg.megatron)
    before = dict(bridge.hf_weights(model, bucket_bytes=1 << 16))
    bridge.export_hf(model, cfg.model.path, Path(plan["out"], "hf"))
    exported = load_file(Path(plan["out"], "hf/model-00000.safetensors"))
    original = load_file(Path(cfg.model.path, "model.safetensors"))
    same = exported.keys() == original.keys() and all(torch.equal(exported[name], original[name]) for name in original)
    same &= before.keys() == original.keys() and all(torch.equal(before[name], original[name]) for name in before)

    samples = [train_grpo.Sample(**sample) for sample in json.loads(Path(plan["samples"]).read_text())]
    rows, lengths_N = train_grpo.flat_rows(samples)
    logp_F = train_grpo.score(model, rows, lengths_N, cfg)
    noise = torch.Generator().manual_seed(1)
    advantages_N = torch.tensor([sample.advantage for sample in samples])
    rows |= {"advantages": advantages_N[rows["seq_id"]], "trained": rows["mask"]}
    for name in ("old_logp", "ref_logp"):
        rows[name] = rows["rollout_logp"] + 0.3 * torch.randn(len(logp_F), generator=noise)
    order = plan.get("orders", {}).get(name, list(range(len(samples))))
    report = train_grpo.update(model, optimizer, rows, lengths_N, order, EPS * STEP, lambda report: None, cfg)
    after, load = dict(bridge.hf_weights(model)), bridge.expert_load(model)
    mpu.destroy_model_parallel()
    return {
        "logp": logp_F, "old_logp": rows["old_logp"], "ref_logp": rows["ref_logp"], "load": torch.tensor(load),
        "same": torch.tensor(float(same)),
        "loss": torch.tensor(report["loss"] / report["trained"], dtype=torch.float64),
        "grad_norm": torch.tensor(report["grad_norm"], dtype=torch.float64),
        **{f"grad.{name}": (before[name].double() - after[name].double()) / STEP for name in before},
    }  # fmt: skip


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    bridge.init_distributed(timeout_s=600)
    for name in plan["layouts"]:
        found = one_layout(plan, name)
        if dist.get_rank() == 0:
            save_file(found, Path(plan["out"], f"{name}.safetensors"))
            print(name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
