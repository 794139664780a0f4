"""Options that go to Megatron-core and vLLM as they are. docs/options.md says which and why.

An option that would be ignored, or would break what the trainer relies on, is refused before anything is built. Each
check raises UserError.
"""

import dataclasses
import enum
import fnmatch
import json
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from config import UserError
from grpo.parts.base.read_config import TABLES, dotted_items, here, nearest

MEGATRON_NEEDS = {name: (other, value) for other, value, names in TABLES["megatron_needs"] for name in names}
COUNT = Annotated[int, Field(ge=1)]
SCALE = Annotated[float, Field(gt=0, le=2**32)]
# Narrower than what Megatron declares.
MEGATRON_TYPES = {
    "adam_eps": Annotated[float, Field(ge=0)],
    "bucket_size": COUNT | None,
    "hysteresis": COUNT,
    "initial_loss_scale": SCALE,
    "loss_scale": SCALE,
    "loss_scale_window": COUNT,
    "min_loss_scale": SCALE,
    "moe_aux_loss_coeff": Annotated[float, Field(ge=0)],
    "moe_token_dispatcher_type": Literal["alltoall", "allgather"],  # flex needs DeepEP
    "optimizer_offload_fraction": Annotated[float, Field(gt=0, le=1)],
    "pipeline_model_parallel_layout": str | list | None,
    "recompute_num_layers": COUNT | None,
    "recompute_modules": list[Literal["core_attn", "mlp", "moe", "shared_experts"]],  # without Transformer Engine
}


def check_megatron(options: dict[str, Any], classes: tuple[type, ...], dtype):
    """`options` are fields of Megatron's config `classes` that may be set and have an effect at this model.dtype."""
    types = {field.name: field.type for cls in classes for field in dataclasses.fields(cls)}
    works = f"the fields that may be set are {', '.join(TABLES['megatron_works'])}"
    for name, value in options.items():
        key = f"megatron.{name}"
        if name not in types:
            key, _ = next(dotted_items({key: value}))  # the first one of a section of another trainer
            ours = here(key)
            raise UserError(f"unknown key '{key}'; {f'here {ours}' if ours else nearest_of(name, types) or works}")
        if name in TABLES["megatron_owned"]:
            raise UserError(f"{key} may not be set: use {TABLES['megatron_owned'][name]}")
        if name not in TABLES["megatron_works"]:
            raise UserError(f"{key} may not be set, see docs/options.md; {works}")
        check_type(key, value, MEGATRON_TYPES.get(name, types[name]))

        other, needed = MEGATRON_NEEDS.get(name, (name, value))
        if options.get(other) != needed:
            raise UserError(f"{key}={value!r} has no effect without megatron.{other}={needed!r}")
        if dtype != "fp16" and ("loss_scale" in name or name == "hysteresis"):
            raise UserError(f"{key}: only fp16 needs a loss scale; leave it out, or use model.dtype=fp16")

    least = options.get("min_loss_scale", 1.0)
    scale = options.get("initial_loss_scale", least)
    if scale < least:
        raise UserError(f"megatron.initial_loss_scale={scale:g} is below megatron.min_loss_scale={least:g}")
    if options.get("optimizer_cpu_offload") and dtype == "fp32":
        raise UserError("megatron.optimizer_cpu_offload=True: not for an fp32 model; use model.dtype=bf16")


def check_vllm(options: dict[str, Any]):
    """`options` may go to vLLM, and have the types that it declares."""
    for name in options:
        for owner, patterns in TABLES["vllm_owned"].items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                raise UserError(f"rollout.vllm.{name} may not be set: it is settled by {owner}")

    quantization = options.get("quantization")
    if quantization not in (None, "fp8"):
        raise UserError(
            f"rollout.vllm.quantization={quantization!r}: must be fp8, to which a push is quantised as vLLM loads it"
        )

    if not options:
        return
    from grpo.parts.engine.vllm_process import engine_options  # importing vLLM takes seconds

    types = engine_options()
    for name, value in options.items():
        key = f"rollout.vllm.{name}"
        if name not in types:
            raise UserError(f"unknown key '{key}'; {nearest_of(name, types) or 'it must be one of EngineArgs of vLLM'}")
        check_type(key, value, types[name])


def check_type(key, value: Any, hint: Any):
    """The `value` of `key`, as YAML gives it, is of the type `hint` that the library declares."""
    if isinstance(hint, str) or hint is Any:
        return
    if dataclasses.is_dataclass(hint):  # a section of options, which the library checks itself
        hint = dict[str, Any]

    # Members of an enum are given by name, in any case.
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, enum.EnumType)]
    members = [member for kind in kinds for member in kind.__members__]
    if members and isinstance(value, str):
        if value.upper() not in members:
            legal = nearest_of(value.upper(), members) or f"it must be one of {', '.join(members)}"
            raise UserError(f"{key}={value!r}: no such value; {legal}")
        return

    settings = {"arbitrary_types_allowed": True, "allow_inf_nan": False, "strict": True}
    try:
        pydantic.TypeAdapter(hint, config=settings).validate_json(json.dumps(value, default=str))
    except pydantic.ValidationError as error:
        problems = dict.fromkeys(problem["msg"] for problem in error.errors())
        raise UserError(f"{key}={value!r}: {' or '.join(problems).replace('Input should', 'must')}") from None


def nearest_of(name, names: Iterable[str]) -> str | None:
    near = nearest(name, names)
    return near and f"the nearest is {near}"
