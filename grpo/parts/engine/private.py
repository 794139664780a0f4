"""What the engine needs of vLLM 0.26 to 0.32 beyond its public interface."""

from collections.abc import Iterator

import torch

from grpo.parts.engine import cpu_engine


def load_weights(llm, weights: Iterator[tuple[str, torch.Tensor]], keeps_weights):
    """Let vLLM replace its weights by the (Hugging Face name, full tensor) pairs.

    `keeps_weights`: it holds them as a checkpoint has them, so they are copied in.
    """
    if keeps_weights:
        llm.apply_model(lambda model: model.load_weights(weights))
        return

    on_cpu = torch.cuda.device_count() == 0
    if on_cpu:
        llm.apply_model(cpu_engine.unpack_experts)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if on_cpu:
        llm.apply_model(cpu_engine.repack_lm_head)


def return_nuclei(llm, wanted):
    """Switch on or off that vLLM returns the ids from which each token was drawn."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    worker.model_runner.sampler.return_sampling_mask = wanted


def decode_once(engine):
    """Where stop texts need each token decoded, spare vLLM decoding it again, alone, to show beside its log-prob."""
    for state in engine.output_processor.request_states.values():
        state.logprobs_processor.tokenizer = None
