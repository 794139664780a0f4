"""Runs under torchrun: the first update of made-up samples with one fault after the other, watched by FirstUpdate.

    torchrun --nproc_per_node=2 tests/update_worker.py CASES.json

CASES.json: {"samples": file, "common": [overrides], "out": file, "cases": {name: {"keys": [overrides], "fault": a name
below, "old": with old log-probs, "trained_adapters": not those of a start}}}. Rank 0 writes to "out" {name: {"error":
message or "", "same": where there is no fault, whether the weights get the bits that they get without the
check}}.
"""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import optimizer as megatron_optimizer

import megatron_bridge as bridge
import train_grpo
from config import TrainingError
from support.base import ranks
from support.base.read_config import load_config
from support.check import checks
from support.model import lora
from support.proof import update
from support.proof.adam import gather_weights
from support.proof.update import FirstUpdate, Passes, report_together
from support.step.packing import to_micro_batches
from tests.layout_worker import made_up_factor

# ---------------------------------------------------------------- faults of the gradient: before it is watched

GRADIENT = {  # fault → (factor of the gradient, of the weights for whose name and dimensions this is true)
    "summed_twice": (2, lambda name, dims: True),
    "scaled_by_accumulation": (0.5, lambda name, dims: True),
    "norms_missing": (0, lambda name, dims: dims == 1 and "norm" in name),
    "one_norm_missing": (0, lambda name, dims: name == "decoder.layers.2.input_layernorm.weight"),
    "layer_halved": (0.5, lambda name, dims: ".layers.1." in name),
}


def scale_gradients(model: list, fault: str) -> None:
    factor, is_chosen = GRADIENT[fault]
    for name, weight in (bridge.named_weights(model) | bridge.named_weights(model, factors=True)).items():
        if weight.requires_grad and is_chosen(name, weight.dim()):
            weight.main_grad.mul_(factor)


# ---------------------------------------------------------------- faults of the passes: a patch around them


def not_reduced():
    """The reduce-scatter over replicas, or experts' replicas, leaves each shard as it is."""
    return mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", lambda *args, **kwargs: None)


def divided_by_positions():
    """The divisor counts the tokens of prompts too."""
    grpo_loss = train_grpo.grpo_loss

    def wrong(mb, *args, **kwargs):
        loss, _, report = grpo_loss(mb, *args, **kwargs)
        return loss, torch.tensor(mb.index_T.numel(), dtype=torch.int), report

    return mock.patch.object(train_grpo, "grpo_loss", wrong)


PASSES = (not_reduced, divided_by_positions)


def another_micro_batch(micro_batches):
    return [micro_batches[0], *micro_batches[:-1]]


# ---------------------------------------------------------------- faults of the optimizer: a patch around its step


def clipped_twice():
    clip = megatron_optimizer.clip_grad_by_total_norm_fp32

    def twice(*args, **kwargs):
        clip(*args, **kwargs)
        clip(*args, **kwargs)

    return mock.patch.object(megatron_optimizer, "clip_grad_by_total_norm_fp32", twice)


def stale_lr():
    step = bridge.optimizer_step
    return mock.patch.object(bridge, "optimizer_step", lambda optimizer, lr, **rest: step(optimizer, lr * 0.9, **rest))


OPTIMIZER = (clipped_twice, stale_lr)


# ---------------------------------------------------------------- one case


def one_case(plan: dict, case: dict, watched: bool) -> dict:
    """{"error", "weights"} of the update."""
    cfg = load_config(
        "configs/tiny.yaml", [*plan["common"], *case["keys"], f"train.check_update={str(watched).lower()}"]
    )
    checks.check_config(cfg, dist.get_world_size())
    bridge.init_model_parallel(cfg.parallel, cfg.seed)
    initial = made_up_factor if case.get("trained_adapters") else lora.initial_factor
    with mock.patch.object(lora, "initial_factor", initial):
        model = bridge.build_model(
            cfg.model.path, cfg.parallel, bridge.DTYPES[cfg.model.dtype], cfg.megatron, trained=cfg.lora
        )
    optimizer = bridge.build_optimizer(model, cfg.train, cfg.megatron)
    samples = [train_grpo.Sample(**sample) for sample in json.loads(Path(plan["samples"]).read_text())]
    batch = train_grpo.flatten(samples)
    noise = torch.Generator().manual_seed(1)
    chosen = list(range(len(samples)))
    logp_F = train_grpo.score(model, batch, cfg)
    batch = replace(
        batch,
        advantages=torch.tensor([sample.advantage for sample in samples])[batch.seq_id],
        old_logp=logp_F if case.get("old") else None,
        ref_logp=logp_F + 0.3 * torch.randn(len(logp_F), generator=noise),
        weights=train_grpo.loss_weights(batch, chosen, cfg.algo.loss_norm, 32),
    )
    micro_batches = to_micro_batches(batch, chosen, cfg.train.max_tokens_per_micro_batch, cfg)
    fault = case.get("fault", "")
    faulty = globals().get(fault)
    around_passes = faulty() if faulty in PASSES else contextlib.nullcontext()
    around_step = faulty() if faulty in OPTIMIZER else contextlib.nullcontext()

    def forward_backward(model, optimizer, micro_batches, cfg):
        computed = another_micro_batch(micro_batches) if fault == "another_micro_batch" else micro_batches
        train_grpo.forward_backward(model, optimizer, computed, cfg)
        if fault in GRADIENT:
            scale_gradients(model, fault)

    error = ""
    check = FirstUpdate(model, optimizer, None)
    try:
        with around_passes:
            passes = Passes(train_grpo.score, train_grpo.run_schedule, forward_backward, train_grpo.grpo_loss)
            check.compare_gradient(batch, cfg, 1, passes)
            forward_backward(model, optimizer, micro_batches, cfg)
        check.before_step(cfg, 1)
        with around_step:
            norm = bridge.optimizer_step(optimizer, cfg.train.lr, offloaded=False)
        check.after_step(cfg, 1, norm)
    except TrainingError as caught:
        error = str(caught)
    gather_weights(model)  # with overlap_param_gather the next forward pass would
    weights = [weight.detach().clone() for chunk in model for weight in chunk.parameters()]
    bridge.mpu.destroy_model_parallel()
    return {"error": error, "weights": weights}


def always_raise(step: int, found: list[str], is_error: bool = True) -> None:
    report_together(step, found)


def main() -> None:
    update.report_together = always_raise  # what is a warning in bf16, too
    plan = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for name, case in plan["cases"].items():
        ranks.init_distributed(timeout_s=600)
        result = one_case(plan, case, watched=True)
        weights = result.pop("weights")
        if not case.get("fault"):
            plain = one_case(plan, case, watched=False)["weights"]
            same = all(torch.equal(x, y) for x, y in zip(weights, plain, strict=True))
            result["same"] = not ranks.on_any_rank(not same)
        found[name] = result
        if dist.get_rank() == 0:
            print(name, result, flush=True)
            Path(plan["out"]).write_text(json.dumps(found))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
