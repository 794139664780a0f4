"""Options that go to Megatron-core and vLLM as they are: which may be given, and why the others may not.

A key under `megatron` or `rollout.vllm` is handed to the library. One that would be ignored, that would break what the
trainer relies on, or that would fail hours later is refused by its name before anything is built. The names are in
options.yaml beside this file: of Megatron-core those that may be set, of vLLM those that may not. docs/models.md shows
what works, tests/test_options.py runs it.
"""

import dataclasses
import enum
import json
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field

from config import UserError
from support.base.read_config import nearest

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def by_name(table: str) -> dict[str, str]:
    """{name: what is said of it} of a table of options.yaml."""
    return {name: text for text, names in TABLES[table].items() for name in names}


MEGATRON_OWNED = by_name("megatron_owned")
MEGATRON_REASONS = by_name("megatron_reasons")
MEGATRON_WORKS = by_name("megatron_works")
MEGATRON_NEEDS = {name: (other, value) for other, value, names in TABLES["megatron_needs"] for name in names}
VLLM_OWNED = by_name("vllm_owned")


def check_type(key: str, value: Any, hint: Any) -> None:
    """Raises UserError where the `value` of `key`, as YAML gives it, is not of the type that the library declares."""
    if isinstance(hint, str) or hint is Any:
        return
    if dataclasses.is_dataclass(hint):  # a section of options, which the library checks itself
        hint = dict[str, Any]
    members = []
    for kind in (hint, *typing.get_args(hint)):
        if isinstance(kind, enum.EnumType):
            members += kind.__members__
    if members and isinstance(value, str):
        if value.upper() not in members:
            near = nearest(value.upper(), members)
            raise UserError(f"{key}={value!r}: no such value; the nearest is {near}")
        return
    settings = {"arbitrary_types_allowed": True, "allow_inf_nan": False, "strict": True}
    adapter = pydantic.TypeAdapter(hint, config=settings)
    try:
        adapter.validate_json(json.dumps(value, default=str))
    except pydantic.ValidationError as error:
        legal = dict.fromkeys(problem["msg"] for problem in error.errors())
        raise UserError(f"{key}={value!r}: {' or '.join(legal).replace('Input should', 'must')}") from None


# ---------------------------------------------------------------- Megatron-core

# Narrower than what Megatron declares.
MEGATRON_TYPES = {
    "adam_eps": Annotated[float, Field(ge=0)],
    "bucket_size": Annotated[int, Field(ge=1)] | None,
    "moe_aux_loss_coeff": Annotated[float, Field(ge=0)],
    "optimizer_offload_fraction": Annotated[float, Field(gt=0, le=1)],
    "recompute_num_layers": Annotated[int, Field(ge=1)] | None,
    # Those that Megatron-core recomputes without Transformer Engine.
    "recompute_modules": list[Literal["core_attn", "mlp", "moe", "shared_experts"]],
}

FLEX = ("moe_token_dispatcher_type", "flex")  # may be set too; refused where DeepEP is missing: check_model


def check_megatron(options: dict[str, Any], classes: tuple[type, ...], dtype: str) -> None:
    """Check that `options` are fields of Megatron's config `classes` that do what they say here.

    `dtype`: model.dtype. Raises UserError.
    """
    fields = {field.name: field for cls in classes for field in dataclasses.fields(cls)}
    for name, value in options.items():
        key = f"megatron.{name}"
        if name in MEGATRON_OWNED:
            raise UserError(f"{key}: {MEGATRON_OWNED[name]}")
        if name not in fields:
            near = nearest(name, [*fields])
            raise UserError(f"unknown key '{key}'; the nearest field of Megatron-core is 'megatron.{near}'")
        default = in_effect(fields[name])
        if name in MEGATRON_WORKS or (name, value) == FLEX:
            check_type(key, value, MEGATRON_TYPES.get(name, fields[name].type))
            other, needed = MEGATRON_NEEDS.get(name, (name, value))
            if value != default and options.get(other) != needed:
                raise UserError(f"{key}={value!r} has no effect without megatron.{other}={needed!r}")
        elif value != default or isinstance(value, bool) != isinstance(default, bool):
            reason = MEGATRON_REASONS.get(name, "not tried with this trainer")
            error = f"{key}={value!r}: {reason}; legal is {default!r}, as without this key"
            if name not in MEGATRON_REASONS:
                error += f". Fields that may be set: {', '.join(sorted(MEGATRON_WORKS))}"
            raise UserError(error)
    if options.get("optimizer_cpu_offload") and dtype == "fp32":
        raise UserError(
            "megatron.optimizer_cpu_offload=True: Megatron-core 0.16 offloads that of bf16 alone; use model.dtype=bf16"
        )


def in_effect(field: dataclasses.Field) -> Any:
    """The value of a field of Megatron's configuration that nobody set."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return TABLES["megatron_in_effect"].get(field.name, default)


# ---------------------------------------------------------------- vLLM


def check_vllm(options: dict[str, Any]) -> None:
    """Check that `options` may go to vLLM, and have the types that it declares. Raises UserError."""
    for name in options:
        if name in VLLM_OWNED:
            raise UserError(f"rollout.vllm.{name}: {VLLM_OWNED[name]}")
    if options.get("quantization") not in (None, "fp8"):
        raise UserError(
            f"rollout.vllm.quantization={options['quantization']!r}: a push is quantised as it is loaded; legal is fp8"
        )
    if not options:
        return
    from support.engine.vllm_process import engine_options  # only where it is used: importing vLLM takes seconds

    types = engine_options()
    for name, value in options.items():
        if name not in types:
            near = nearest(name, [*types])
            raise UserError(f"unknown key 'rollout.vllm.{name}'; the nearest option of vLLM is 'rollout.vllm.{near}'")
        check_type(f"rollout.vllm.{name}", value, types[name])
