"""The vLLM engine that samples: generate, load_weights, sleep, wake.

One engine spans `tp` neighbouring ranks of torchrun's world (vLLM's external launcher), so a world of N ranks has
N / tp engines, colocated with the trainer. This file knows nothing of Megatron or of rewards.
"""

import dataclasses
import gc
import math
import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy import ndarray

from config import ModelConfig, RankError, RolloutConfig
from grpo.parts.engine import cpu_engine, lean, linear_attention, private
from grpo.parts.engine.push_check import PushCheck
from grpo.parts.engine.vllm_process import (
    capture_size,
    cpu_cache,
    keeps_weights,
    let_segments_grow,
    most_sequences,
    set_environment,
)

# Of vLLM's SamplingParams, written beside each answer. With n > 1 answer i is sampled with `seed` + i.
SETTINGS = ("seed", "temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids")


@dataclasses.dataclass
class Trace:
    """How an answer came about, besides its tokens. A field is empty where nothing of its kind happened."""

    requests: list[dict] = dataclasses.field(default_factory=list)  # the settings of vLLM for each turn of the model
    # What the trainer replays of the sampler, by name, as records.REPLAYED lists it: "routes", "nuclei".
    replay: dict[str, ndarray] = dataclasses.field(default_factory=dict)
    # With rollout.turns:
    turns: list[int] = dataclasses.field(default_factory=list)  # tokens of the model, the environment, the model, ...
    columns: dict = dataclasses.field(default_factory=dict)  # added to the row of the data that the reward gets
    ended: str = ""  # why it did: done (says the environment), max_turns, limit (of tokens), timeout or error
    failure: object | None = None  # of the environment, a grading.Outcome; such an answer is not graded


@dataclasses.dataclass
class Completion:
    """One sampled answer, or with rollout.turns one conversation."""

    ids: list[int]  # with the end token
    logps: list[float]  # of each id; 0 where an environment wrote it
    finished: bool  # ended by itself
    trace: Trace


class Engine:
    """A vLLM engine on this rank's group of `tp` ranks.

    All ranks of a group must make the same calls with the same arguments.
    """

    def __init__(
        self, path: str, model: ModelConfig, rollout: RolloutConfig, max_model_len: int, return_routes: bool = False,
        asleep: bool = True,
    ):  # fmt: skip
        """Start vLLM on the Hugging Face folder `path`, asleep unless its weights are to be used as they are on disk.

        The options in rollout.vllm override those below.
        """
        on_gpu = torch.cuda.device_count() > 0
        set_environment(rollout.exact, model.dtype)
        import vllm

        shm_prefix = None if on_gpu else cpu_engine.prepare(bool(model.match_engine))
        self.sampling_params = vllm.SamplingParams
        self.final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        tp = rollout.tp
        settings = dict(
            model=path,
            dtype={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[model.dtype],
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher",
            seed=int(os.environ["RANK"]) // tp,  # one per engine; sampling itself is seeded per prompt
            max_model_len=max_model_len,
            enforce_eager=not on_gpu,
            enable_prefix_caching=True,
            # With chunked prefill vLLM rewinds a request's seeded generator, which only CUDA generators support.
            enable_chunked_prefill=on_gpu,
            enable_sleep_mode=on_gpu,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            logprobs_mode="processed_logprobs",  # of the distribution it samples from: after temperature
            disable_log_stats=True,
            load_format="safetensors",  # weights in pickles could run code
            use_tqdm_on_load=False,
            enable_return_routed_experts=return_routes and on_gpu,
        )
        engines = int(os.environ["WORLD_SIZE"]) // tp
        batch = math.ceil(rollout.prompts_per_step / engines) * rollout.group_size
        settings |= most_sequences(batch, tp)
        settings |= cpu_cache(**settings | rollout.vllm) | linear_attention.prepare(path, model.dtype)
        self.returns_nuclei = rollout.is_cut and hasattr(vllm.EngineArgs, "return_sampling_mask")
        if on_gpu:  # CUDA graphs up to the largest batch of a step
            settings["compilation_config"] = {"max_cudagraph_capture_size": capture_size(batch)}
            settings |= {"return_sampling_mask": True} if self.returns_nuclei else {}
        if model.fp32_head:
            settings["hf_overrides"] = {"head_dtype": "float32"}
        self.llm = vllm.LLM(**settings | rollout.vllm)
        if on_gpu:
            let_segments_grow()
        else:
            cpu_engine.patch_started(self.llm, shm_prefix, return_routes, self.returns_nuclei)
        self.returns_routes = return_routes
        self.collect = lean.own_loop if return_routes or self.returns_nuclei else lean.choose_loop(self.llm.llm_engine)
        self.requests = {}  # {number of a request: its settings}
        self.sleeps = on_gpu and rollout.vllm.get("enable_sleep_mode", True)
        self.sleep_level = rollout.sleep_level
        self.push_check = PushCheck(tp, self.llm)
        self.keeps_weights = on_gpu and all(self.llm.apply_model(keeps_weights))
        self.has_weights = True  # read from disk or pushed since it last slept
        if asleep:
            self.sleep()

    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        n: int,
        sampling,
        max_tokens: int,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index of a prompt, its `n` answers) as they finish; `prompts` are token ids, with one seed each.

        The same prompt and seed give the same answers on any engine. `sampling`: a section with temperature, top_p,
        top_k, stop and stop_token_ids; `max_tokens`: of an answer, which has all tokens up to the one in which a text
        of `stop` ends. Raises RankError if no weights were pushed since `sleep`.
        """
        pairs = zip(prompts, seeds, strict=True)
        self.ask([(i, prompt, seed, max_tokens) for i, (prompt, seed) in enumerate(pairs)], n, sampling)

        steps = self.steps(sampling)
        left = len(prompts)
        while left:
            ended = next(steps)
            yield from ended
            left -= len(ended)

    def ask(
        self,
        requests: Iterable[tuple[int, list[int], int, int]],
        n: int,
        sampling,
    ) -> None:
        """Let the engine sample `n` answers to each (number, prompt, seed, max_tokens) too; see `generate`."""
        if not self.has_weights:
            raise RankError("vLLM did not take up the weight push: none came since it slept, so its weights are stale")
        engine = self.llm.llm_engine
        if self.returns_nuclei:
            engine.model_config.return_sampling_mask = False  # else no greedy request, and none without top_k, is taken

        for number, ids, seed, limit in requests:
            params = self.sampling_params(
                n=n, seed=seed, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
                max_tokens=limit, logprobs=0, output_kind=self.final_only, stop_token_ids=sampling.stop_token_ids,
                # A text is looked for in all that was sampled, special tokens too. Without one nothing is decoded.
                stop=sampling.stop, detokenize=bool(sampling.stop), skip_special_tokens=False,
                include_stop_str_in_output=True,
            )  # fmt: skip
            # Read back: the constructor changes values.
            self.requests[number] = {name: getattr(params, name) for name in SETTINGS}
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)

        if sampling.stop:
            private.decode_once(engine)

    def steps(self, sampling) -> Iterator[list[tuple[int, list[Completion]]]]:
        """Yield, at each step of the engine and without end, the (number, answers) of the requests that end in it.

        Between two steps `ask` may add others. All requests have the same `sampling`.
        """
        collect = lean.own_loop if sampling.stop else self.collect
        wants_nuclei = self.returns_nuclei and isinstance(sampling, RolloutConfig)  # nobody trains on an evaluation
        if self.returns_nuclei:
            private.return_nuclei(self.llm, wants_nuclei)

        for outputs in collect(self.llm.llm_engine):
            ended = []
            for output in outputs:
                number = int(output.request_id)
                request = self.requests.pop(number)
                answers = []
                for answer in output.outputs:
                    replay = self.replay_of(answer, wants_nuclei)
                    finished = answer.finish_reason == "stop"
                    trace = Trace(requests=[request], replay=replay)
                    answers.append(Completion(list(answer.token_ids), answer.logprobs, finished, trace))
                ended.append((number, answers))
            yield ended

    def replay_of(self, answer, wants_nuclei: bool) -> dict[str, ndarray]:
        """What the trainer replays of vLLM's answer: its routes [tokens, layers, k], its nuclei with -1 after each."""
        replay = {}
        if self.returns_routes:
            if answer.routed_experts is None:
                raise RankError("vLLM returned no routes, which algo.replay_routes needs; set it to false")
            replay["routes"] = answer.routed_experts
        if wants_nuclei:
            replay["nuclei"] = np.array([i for ids in answer.sampling_mask.token_ids for i in (*ids, -1)], "i4")
        return replay

    def load_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        shards: Iterable[tuple[str, int, torch.Tensor]],
    ) -> None:
        """Replace all weights by the (Hugging Face name, full tensor) pairs, in layer order; clear the prefix cache.

        `shards`: the trainer's own, of which the pairs are made, read after them. All ranks of the world call this.
        Raises TrainingError unless every engine then holds the weights bit for bit, apart from weights that vLLM stores
        in a format of its own.
        """
        private.load_weights(self.llm, weights, self.keeps_weights)
        self.push_check.verify(self.llm, weights, shards)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a weight push: requests are still running")
        self.has_weights = True

    def layers(self) -> dict[int, torch.nn.Module]:
        """The layers of vLLM's model on this rank, by their number."""
        (layers,) = self.llm.apply_model(lambda model: dict(enumerate(model.model.layers)))
        return layers

    def compute(self, ids: list[int]) -> None:
        """Run one forward pass over a prompt, as vLLM prefills it."""
        self.llm.reset_prefix_cache()
        params = self.sampling_params(max_tokens=1, detokenize=False)
        self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)

    def metrics(self) -> dict[str, float | None]:
        """What the engine adds to the metrics of a step: "sync/checked", of the last weight push."""
        return self.push_check.metrics

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache for the trainer; `generate` needs a weight push afterwards."""
        self.has_weights = False
        if self.sleeps:
            self.llm.sleep(level=self.sleep_level)
            gc.collect()
            torch.cuda.empty_cache()

    def wake(self, part: str) -> None:
        """Allocate `part` again: "weights" before a push, "kv_cache" after it, so that their peaks do not add up."""
        if self.sleeps:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=[part])
