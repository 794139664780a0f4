"""The vLLM engine that samples: generate, load_weights, sleep, wake.

One engine spans `tp` neighbouring ranks of torchrun's world (vLLM's external launcher), so a world of N ranks holds N /
tp engines beside the trainer. Knows nothing of Megatron or of rewards.
"""

import dataclasses
import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from support import cpu_engine


@dataclasses.dataclass
class Completion:
    """One sampled answer: token ids (the end token included), their log-probs, and whether it ended by itself."""

    ids: list[int]
    logps: list[float]
    finished: bool


def set_environment() -> None:
    """What vLLM reads when it is imported; a variable that the user has set stays."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs inside this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else every rank is bound to the same cores
    if torch.cuda.device_count() == 0:  # vLLM would compile one small function, at every start, with a C++ compiler
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def engine_options() -> dict[str, Any]:
    """Fields of vLLM's EngineArgs and their types; support/options.py says which `rollout.vllm` may hold."""
    set_environment()
    from vllm import EngineArgs

    return {field.name: field.type for field in dataclasses.fields(EngineArgs)}


class Engine:
    """A vLLM engine on this rank's group of `tp` ranks.

    All ranks of a group must make the same calls with the same arguments.
    """

    def __init__(self, model: str, dtype: str, tp: int, max_model_len: int, gpu_memory_utilization: float, extra: dict):
        """Start vLLM on the Hugging Face folder `model`; `extra` goes to vllm.LLM and overrides what is set here."""
        on_gpu = torch.cuda.device_count() > 0
        rank = int(os.environ["RANK"])
        set_environment()
        import vllm
        from vllm.sampling_params import RequestOutputKind

        shm_prefix = None if on_gpu else cpu_engine.name_shared_memory_after_this_run()
        self.sampling_params, self.final_only = vllm.SamplingParams, RequestOutputKind.FINAL_ONLY
        settings = dict(
            model=model,
            dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher",
            seed=rank // tp,  # one seed an engine; sampling itself is seeded per prompt
            max_model_len=max_model_len,
            enforce_eager=not on_gpu,
            enable_prefix_caching=True,
            # A prompt prefilled in chunks winds its seeded generator back, which only CUDA generators can do.
            enable_chunked_prefill=on_gpu,
            enable_sleep_mode=on_gpu,
            gpu_memory_utilization=gpu_memory_utilization,
            logprobs_mode="processed_logprobs",  # of the distribution that was sampled from: after temperature
            disable_log_stats=True,
            load_format="safetensors",  # weights in pickles could run code
            use_tqdm_on_load=False,
        )
        settings = {**settings, **extra}
        self.llm = vllm.LLM(**settings)
        self.sleeps = settings["enable_sleep_mode"]
        if shm_prefix:  # every rank has mapped it by now: without a name nothing stays behind, however the run ends
            for file in Path("/dev/shm").glob(f"{shm_prefix}*"):
                file.unlink(missing_ok=True)

    def generate(
        self, prompts: list[list[int]], seeds: list[int], n: int, sampling, max_tokens: int
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (prompt's number, its `n` answers) for prompts of token ids as they finish, with one seed a prompt.

        The same prompt and seed give the same answers on any engine, whatever else it samples.
        `sampling`: a section of the configuration with temperature, top_p and top_k.
        """
        engine = self.llm.llm_engine
        for number, (ids, seed) in enumerate(zip(prompts, seeds, strict=True)):
            params = self.sampling_params(
                n=n,
                seed=seed,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=max_tokens,
                logprobs=0,
                detokenize=False,
                output_kind=self.final_only,
            )
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    yield int(output.request_id), [self._completion(answer) for answer in output.outputs]

    @staticmethod
    def _completion(answer) -> Completion:
        ids = list(answer.token_ids)
        logps = [at[token].logprob for at, token in zip(answer.logprobs, ids, strict=True)]
        return Completion(ids, logps, answer.finish_reason == "stop")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by the (Hugging Face name, full tensor) pairs, in layer order; forget cached prefixes."""
        if torch.cuda.device_count() == 0:
            self.llm.apply_model(cpu_engine.unpack_experts)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if torch.cuda.device_count() == 0:
            self.llm.apply_model(cpu_engine.repack_lm_head)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a weight push: requests are still running")

    def sleep(self) -> None:
        """Give the GPU memory of weights and KV cache to the trainer. On the CPU there is nothing to give."""
        if self.sleeps:
            self.llm.sleep(level=1)
            gc.collect()
            torch.cuda.empty_cache()

    def wake(self, part: str) -> None:
        """Take memory back for `part`: "weights" before a push, "kv_cache" after it; so the two peaks do not add up."""
        if self.sleeps:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=[part])
