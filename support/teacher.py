"""The teacher of on-policy distillation (algo.teacher): another model, or the model itself with a hint in its prompt.

It scores the answers that the policy gave, each after the teacher's own prompt, by the same pass as the reference. A
teacher of another size is a second model of Megatron on the same layout, without gradients or optimizer.
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
    """What `score` needs: the chunks of a model, and its weights where they wait on the host (None: in the model)."""

    model: list
    weights: list[torch.Tensor] | None = None


def build_teacher(model: list, cfg: Config) -> Teacher | None:
    """The teacher of a run that trains `model`; None without one."""
    a, m = cfg.algo, cfg.model
    if a.teacher is None:
        return None
    if a.teacher == SELF:
        return Teacher(model)
    path, dtype = hf_folder.local_folder(a.teacher), bridge.DTYPES[m.dtype]
    teacher = Teacher(bridge.build_model(path, cfg.parallel, dtype, cfg.megatron, m.fp32_head, trained=None))
    if a.reference_on == "host":
        teacher.weights = bridge.copy_weights(teacher.model, "host")
        for parameter in (parameter for chunk in teacher.model for parameter in chunk.parameters()):
            parameter.data = parameter.data.new_empty(0)
    return teacher


def with_teacher_prompts(samples: list[Sample]) -> list[Sample]:
    """The samples as the teacher sees them: the same answers after the prompts with hints, if there are hints.

    Their routes are empty: the routers of the teacher's pass choose for themselves.
    """
    seen = []
    for sample in samples:
        ids = sample.prompt_ids if sample.asked is None else sample.asked
        routes = None if sample.routes is None else sample.routes[:0]
        seen.append(replace(sample, prompt_ids=ids, routes=routes))
    return seen


def align_logp(batch: Batch, seen: Batch, logp_F: torch.Tensor) -> torch.Tensor:
    """The teacher's log-probs at the positions of `batch`, [F], given those of `seen`: the same answers, but perhaps
    after other prompts.
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
