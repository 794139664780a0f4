"""Which layers a pipeline stage has: as Megatron-core splits them, seen to leave none out and to have none twice."""

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


def stage_layers(config: TransformerConfig) -> list[list[range]]:
    """Numbers, from 0, of the layers of each model chunk of each pipeline stage, [pp][vpp]. Needs no process group.

    Raises ValueError unless they are each layer of the model once, in the order in which a row passes the chunks.
    """
    layout = config.pipeline_model_parallel_layout
    vpp = config.virtual_pipeline_model_parallel_size
    stages: list[list[range]] = [[] for _ in range(config.pipeline_model_parallel_size)]
    order: list[int] = []
    for chunk in range(vpp or 1):
        for number, stage in enumerate(stages):
            place = (config, chunk if vpp else None, number)
            if layout:  # Megatron's functions take the stage of this process then, whatever the number
                first, count = len(order), layout.layout[number][chunk].count(LayerType.decoder)
            else:
                first, count = get_transformer_layer_offset(*place), get_num_layers_to_build(*place)
            stage.append(range(first, first + count))
            order += stage[-1]
    if order != [*range(config.num_layers)]:
        raise ValueError(f"stages would have the layers {stages}, which are not each of the {config.num_layers} once")
    if layout and [layout.layout[0][0][:1], layout.layout[-1][-1][-1:]] != [[LayerType.embedding], [LayerType.loss]]:
        raise ValueError("the embedding E is in the first stage and the loss L in the last, wherever a layout has them")
    return stages


def split_layers(layers: int, pp: int, vpp: int, **uneven) -> list[list[range]]:
    """`stage_layers` of so many layers; `uneven`: fields of UNEVEN. Raises what Megatron-core does, or ValueError."""
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
