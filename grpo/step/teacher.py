"""The teacher of on-policy distillation (algo.teacher): another model, or the same one with a hint in its prompt."""

from dataclasses import dataclass, replace

import torch

import megatron_bridge as bridge
from grpo.parts.base import hf_folder
from grpo.parts.data.prompts import load_tokenizer
from grpo.parts.model import matched
from grpo.parts.model.divergence import OtherModel
from grpo.parts.model.head import own_rows
from grpo.step.records import MicroBatch, Sample

SELF = "self"  # algo.teacher: the model's own present weights


@dataclass
class Teacher:
    """The chunks of a model, and its weights if they are offloaded to the host."""

    model: list
    weights: list[torch.Tensor] | None = None


def build_teacher(model: list, cfg):
    """The teacher of a run that trains `model`."""
    algo = cfg.algo
    if algo.teacher == SELF:
        return Teacher(model)

    path = hf_folder.local_folder(algo.teacher)
    dtype = bridge.DTYPES[cfg.model.dtype]
    match_engine = bool(cfg.model.match_engine) and matched.supports(hf_folder.read_config(path))
    chunks = bridge.build_model(
        path, cfg.parallel, dtype, cfg.megatron, cfg.model.fp32_head, adapters=None, match_engine=match_engine
    )
    if algo.reference_on != "host":
        return Teacher(chunks)

    weights = bridge.copy_weights(chunks, "host")
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.new_empty(0)
    return Teacher(chunks, weights)


def with_teacher_prompts(samples: list[Sample], is_policy) -> list[Sample]:
    """The samples as the teacher sees them: the same answers after the prompts with hints, if there are hints.

    The teacher's routers choose for themselves. If the teacher `is_policy`, the same model, its routers replay where
    there are routes, so the samples get empty ones. Another model may differ in layers and experts, and gets none. Its
    log-probs are over the tokens from which the policy drew.
    """
    seen = []
    for sample in samples:
        replay = dict(sample.trace.replay)
        routes = replay.pop("routes", None)
        if is_policy and routes is not None:
            replay["routes"] = routes[:0]
        prompt_ids = sample.prompt_ids if sample.asked is None else sample.asked
        seen.append(replace(sample, prompt_ids=prompt_ids, trace=replace(sample.trace, replay=replay)))
    return seen


def another(cfg) -> str | None:
    """Where the teacher comes from, if it is another model than the policy; else None."""
    return None if cfg.algo.teacher == SELF else cfg.algo.teacher


def check_vocabulary(cfg):
    """See from its config.json that the teacher has a row for every token of the model. Raises ValueError."""
    path = cfg.algo.teacher
    rows, needed = (hf_folder.read_config(name).vocab_size for name in (path, cfg.model.path))
    if rows < needed:
        raise ValueError(
            f"algo.teacher={path}: its vocabulary has {rows} rows, model.path={cfg.model.path} has {needed}, so an id "
            "could be sampled that the teacher lacks; it must have as many rows at least"
        )


def check_top_k(cfg):
    """See that the vocabulary has as many tokens. Raises ValueError."""
    top_k, vocab = cfg.algo.teacher_top_k, hf_folder.read_config(cfg.model.path).vocab_size
    if top_k > vocab:
        raise ValueError(
            f"algo.teacher_top_k={top_k} is above the {vocab} tokens of model.path={cfg.model.path}; use at most as "
            "many, or 0 for all"
        )


def check_tokens(cfg, tokenizer):
    """See that the teacher knows the `tokenizer`'s tokens by the same ids. Raises ValueError."""
    path = cfg.algo.teacher
    try:
        known = load_tokenizer(path).get_vocab()
    except ValueError as error:
        raise ValueError(str(error).replace("model.path=", "algo.teacher=")) from None
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != number:
            raise ValueError(
                f"algo.teacher={path}: its tokenizer is another one: token {number} of model.path={cfg.model.path} is "
                f"{token!r}, which the teacher has as {known.get(token)}; it scores the ids that were sampled, so it "
                "must know all tokens of the model by the same ids"
            )


# ---------------------------------------------------------------- over the whole vocabulary


def with_other(mb: MicroBatch, name: str, states_M: torch.Tensor, **how) -> MicroBatch:
    """The micro-batch with another model's hidden states at all its tokens, of which this rank keeps its own; `how` are
    further fields of OtherModel.
    """
    _, _, own_M = own_rows(mb)
    if not own_M.all():
        states_M = states_M[torch.from_numpy(own_M).to(states_M.device)]
    return replace(mb, others=mb.others | {name: OtherModel(states_M, **how)})


def with_divergences(mb: MicroBatch, compared: list[tuple[torch.Tensor, ...]]) -> MicroBatch:
    """The micro-batch with what token_logprobs found of each of mb.others: divergence, log-prob, entropy, [T] each."""
    found = {name: [values_T[None] for values_T in own] for name, own in zip(mb.others, compared, strict=True)}
    rows = {}
    if "reference" in found:
        rows["ref_kl"], rows["ref_logp"], _ = found["reference"]
    if "teacher" in found:
        rows["teacher_kl"], _, rows["teacher_entropy"] = found["teacher"]
    return replace(mb, **rows)
