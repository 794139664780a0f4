"""Which layers a pipeline stage has, as Megatron-core splits them, with a check that each layer is there once."""

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from grpo.parts.base.require import require

# The fields of TransformerConfig that give stages different numbers of layers.
UNEVEN = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def stage_layers(config) -> list[list[range]]:
    """Numbers, from 0, of the layers of each model chunk of each pipeline stage, [pp][vpp]. Needs no process group.

    Raises ValueError unless they are each layer of the model once, in the order in which a row passes the chunks.
    """
    layout = config.pipeline_model_parallel_layout
    vpp = config.virtual_pipeline_model_parallel_size
    stages = [[] for _ in range(config.pipeline_model_parallel_size)]
    order = []
    for chunk in range(vpp or 1):
        for number, stage in enumerate(stages):
            if layout:  # Megatron's functions would ignore the number and take the stage of this process
                first = len(order)
                count = layout.layout[number][chunk].count(LayerType.decoder)
            else:
                place = config, chunk if vpp else None, number
                first = get_transformer_layer_offset(*place)
                count = get_num_layers_to_build(*place)
            stage.append(range(first, first + count))
            order += stage[-1]

    layers = config.num_layers
    require(
        order == [*range(layers)], f"stages would have the layers {stages}, not each of the {layers} once", ValueError
    )
    return stages


def split_layers(layers, pp, vpp, **uneven) -> list[list[range]]:
    """`stage_layers` of a model with this number of layers; `uneven` has fields of UNEVEN.

    Raises ValueError, or what Megatron-core raises.
    """
    require(pp > 1 or (vpp == 1 and not uneven), "to divide the model otherwise needs parallel.pp above 1", ValueError)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
        **uneven,
    )
    stages = stage_layers(config)
    require(len(stages[0]) == vpp, f"the layout is one of parallel.vpp={len(stages[0])}", ValueError)
    return stages
