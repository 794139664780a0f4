"""What the rehearsal replaces: vLLM by random answers, NCCL by gloo; and where it looks for the phase of a run."""

import collections
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
import transformers

import megatron_bridge as bridge
import train_grpo
from grpo.parts.engine.push_check import shard_digests
from rollout import Completion, Trace

TOKENS = range(2, 12)  # the digits of the tiny model's tokenizer


class Engine:
    """In place of rollout.Engine: answers of random digits, each as random as its prompt's seed."""

    def __init__(self, path, model, rollout, max_model_len, return_routes=False):
        self.hf = transformers.AutoConfig.from_pretrained(path)
        self.return_routes = return_routes

    def generate(self, prompts, seeds, n, sampling, max_tokens) -> Iterator[tuple[int, list[Completion]]]:
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            random = np.random.default_rng(seed)
            yield number, [self.answer(random, len(prompt), max_tokens) for _ in range(n)]

    def answer(self, random, prompt, max_tokens):
        length = int(random.integers(1, max_tokens + 1))
        ids = random.integers(TOKENS.start, TOKENS.stop, length).tolist()
        logps = (-2 - random.random(length)).tolist()
        replay = {}
        if self.return_routes:
            scores = random.random((prompt + length - 1, self.hf.num_hidden_layers, self.hf.num_experts))
            replay["routes"] = scores.argsort(-1)[..., : self.hf.num_experts_per_tok].astype(np.int32)
        return Completion(ids, logps, True, Trace(replay=replay))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], shards):
        for name, weight in weights:
            if weight.device != bridge.device() or not weight.is_contiguous():
                raise RuntimeError(f"{name} is pushed from {weight.device}, contiguous: {weight.is_contiguous()}")
        shard_digests(shards)

    def metrics(self):
        return {}

    def sleep(self, *_): ...

    wake = sleep


def replace_nccl():
    init = dist.init_process_group

    def init_process_group(backend=None, **kwargs):
        return init("fake" if backend == "fake" else "gloo", **kwargs)

    dist.init_process_group = init_process_group


def follow_phases(waits, units: collections.Counter):
    """Give `waits`, device.WAITS, the phase of the run's clock, with "passes" added inside the pipeline schedule, where
    the micro-batches are; count steps, updates and micro-batches into `units`."""
    train, schedule_of = train_grpo.train, bridge.get_forward_backward_func
    inside = []

    def train_with_phases(cfg, inputs, clock):
        waits.phase = lambda: f"{clock.phase}, passes" if inside else clock.phase
        return train(cfg, inputs, clock)

    def counted(unit, function):
        def call(*args, **kwargs):
            units[unit] += 1
            return function(*args, **kwargs)

        return call

    def counted_schedule():
        schedule = schedule_of()

        def run(**kwargs):
            kind = "log-prob micro-batch" if kwargs["forward_only"] else "training micro-batch"
            units[kind] += kwargs["num_microbatches"]
            units["log-prob pass"] += kwargs["forward_only"]
            inside.append(kind)
            try:
                return schedule(**kwargs)
            finally:
                inside.pop()

        return run

    train_grpo.train, train_grpo.train_step = train_with_phases, counted("step", train_grpo.train_step)
    bridge.get_forward_backward_func = counted_schedule
    bridge.optimizer_step = counted("update", bridge.optimizer_step)
