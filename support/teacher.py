"""The teacher of on-policy distillation (algo.teacher): another model, or the model itself with a hint in its prompt.

It scores the policy's answers, each after the teacher's own prompt, in the same kind of pass as the reference model. A
teacher of another size is a second Megatron model on the same layout, without gradients or optimizer.
"""

from dataclasses import dataclass, replace

import torch
import transformers

import megatron_bridge as bridge
from config import Config
from support import checks, hf_folder
from support.data import load_tokenizer
from support.records import Batch, Sample

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


def with_teacher_prompts(samples: list[Sample]) -> list[Sample]:
    """The samples with the teacher's prompts: those with hints, where there are hints, before the same answers.

    They have no routes, so the routers of the teacher's pass choose for themselves.
    """
    seen = []
    for sample in samples:
        ids = sample.prompt_ids if sample.asked is None else sample.asked
        routes = None if sample.routes is None else sample.routes[:0]
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


def check_shape(cfg: Config) -> None:
    """See, from its config.json alone, that the teacher can be built on this layout. Raises ValueError naming a key."""
    path = another(cfg)
    if path is None:
        return
    try:
        checks.check_model(path, cfg.parallel, 1, checks.longest_sample(cfg), cfg.model.dtype, cfg.megatron)
    except ValueError as error:
        raise ValueError(by_its_key(path, error)) from None
    rows, needed = (transformers.AutoConfig.from_pretrained(name).vocab_size for name in (path, cfg.model.path))
    if rows < needed:
        raise ValueError(
            f"algo.teacher={path}: its vocabulary has {rows} rows, that of model.path={cfg.model.path} {needed}; an id "
            "beyond them could be sampled, so it must have as many at least"
        )


def check_tokens(cfg: Config, tokenizer, weights: bool) -> None:
    """See that the teacher knows the `tokenizer`'s tokens by the same ids; with `weights` look at its files as well.
    Raises ValueError naming the key."""
    path = another(cfg)
    if path is None:
        return
    try:
        known = load_tokenizer(path).get_vocab()
        if weights:
            checks.check_weights(hf_folder.local_folder(path))
    except ValueError as error:
        raise ValueError(by_its_key(path, error)) from None
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            raise ValueError(
                f"algo.teacher={path}: its tokenizer is another one: token {number} of model.path={cfg.model.path} is "
                f"{token!r}, which the teacher has as {known.get(token, 'none of its tokens')}; it scores the very ids "
                "that were sampled, so it has to know all tokens of the model by the same ids"
            )


def by_its_key(path: str, error: ValueError) -> str:
    """The message of a check that is made for model.path, about the teacher."""
    text = str(error).replace(f"model.path={path}", f"algo.teacher={path}")
    return text if "algo.teacher" in text else f"algo.teacher={path}: {text}"
