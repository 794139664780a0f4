"""What differs between the tested Megatron-core 0.16.1 (Python 3.11) and 0.19.2 (3.12 on); layers.py imports it."""

import functools
import importlib.util
import inspect
import logging

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import optimizer_config
from megatron.core.transformer.moe import moe_utils

# For use_precision_aware_optimizer both check the version of Transformer Engine even if it is missing.
if importlib.util.find_spec("transformer_engine") is None:
    optimizer_config.is_te_min_version = lambda *args, **kwargs: False
# 0.16 reads this name in each router's forward pass, and defines it only where Transformer Engine is installed.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
# Two notes of 0.19 about every model, which need no action: GPTModel is deprecated, DDP lays out the weights itself.
for name in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


def submodules(spec):
    """The submodules in the spec of a feed-forward block: a ModuleSpec in 0.16, a functools.partial in 0.19."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def last_hidden_state(hidden_states, **others):
    return hidden_states


class HiddenGPT(GPTModel):
    """A GPTModel that returns the last hidden state, so that logits are computed only where a log-prob is needed.

    `inv_freq`, set after construction, are the frequencies of its rotary embedding.
    """

    if "output_processor" in inspect.signature(GPTModel.forward).parameters:  # 0.19
        forward = functools.partialmethod(GPTModel.forward, output_processor=last_hidden_state)
    else:
        _postprocess = staticmethod(last_hidden_state)
