"""The teacher of on-policy distillation (algo.teacher): another model, or the model itself with a hint in its prompt.

It scores the policy's answers, each after the teacher's own prompt, in the same kind of pass as the reference model. A
teacher of another size is a second Megatron model on the same layout, without gradients or optimizer.
"""

from dataclasses import dataclass, replace

import torch

import megatron_bridge as bridge
from config import Config
from support.base import hf_folder
from support.step.records import Batch, Sample

SELF = "self"  # algo.teacher: the model's own present weights


@dataclass
class Teacher:
    """The chunks of a model, and its weights where they are offloaded to the host (None: they are in the model)."""

    model: list
    weights: list[torch.Tensor] | None = None


def build_teacher(model: list, cfg: Config) -> Teacher | None:
    """The teacher of a run that trains `model`; None without one."""
    algo = cfg.algo
    if algo.teacher is None:
        return None
    if algo.teacher == SELF:
        return Teacher(model)
    path = hf_folder.local_folder(algo.teacher)
    dtype = bridge.DTYPES[cfg.model.dtype]
    chunks = bridge.build_model(path, cfg.parallel, dtype, cfg.megatron, cfg.model.fp32_head, trained=None)
    if algo.reference_on != "host":
        return Teacher(chunks)
    weights = bridge.copy_weights(chunks, "host")
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.new_empty(0)
    return Teacher(chunks, weights)


def with_teacher_prompts(samples: list[Sample], is_policy: bool) -> list[Sample]:
    """The samples as the teacher sees them: the same answers after the prompts with hints, if there are hints.

    The teacher's routers choose for themselves. If the teacher `is_policy`, the same model, its routers replay where
    there are routes, so the samples get empty ones. Another model may differ in layers and experts, and gets none.
    """
    seen = []
    for sample in samples:
        ids = sample.prompt_ids if sample.asked is None else sample.asked
        routes = sample.routes[:0] if is_policy and sample.routes is not None else None
        seen.append(replace(sample, prompt_ids=ids, routes=routes))
    return seen


def align_logp(batch: Batch, seen: Batch, logp_F: torch.Tensor) -> torch.Tensor:
    """The teacher's log-probs at the positions of `batch`, [F], given those at the positions of `seen`.

    Both have the same answers, perhaps after different prompts.
    """
    return torch.zeros(len(batch.mask)).masked_scatter(batch.mask, logp_F[seen.mask])


def another(cfg: Config) -> str | None:
    """Where the teacher comes from if it is another model; None where there is none, or the model itself."""
    return None if cfg.algo.teacher == SELF else cfg.algo.teacher
