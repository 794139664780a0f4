"""A run of one rank in this process, built as the script builds it."""

from types import SimpleNamespace

import pytest
import torch
import transformers

import megatron_bridge as bridge
import train_grpo
from grpo.run import clock, launch
from grpo.run.preflight import configuration
from rollout import Completion, Trace
from tests.conftest import tiny_config


class PlainEngine:
    """rollout.Engine with the weights in a model of transformers, one token at a time."""

    def __init__(self, model, *_):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(self, prompts, seeds, n, sampling, max_tokens):
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            generator = torch.Generator().manual_seed(seed)
            yield number, [self.answer(prompt, generator, sampling.temperature, max_tokens) for _ in range(n)]

    @torch.no_grad()
    def answer(self, prompt, generator, temperature, max_tokens):
        ids, logps = [], []
        while len(ids) < max_tokens and ids[-1:] != [self.model.config.eos_token_id]:
            logp_V = (self.model(torch.tensor([prompt + ids])).logits[0, -1] / temperature).log_softmax(-1)
            ids.append(torch.multinomial(logp_V.exp(), 1, generator=generator).item())
            logps.append(logp_V[ids[-1]].item())
        return Completion(ids, logps, ids[-1] == self.model.config.eos_token_id, Trace())

    def load_weights(self, weights, shards):
        self.model.load_state_dict(dict(weights), strict=False)

    def metrics(self):
        return {"sync/checked": None}  # what test_push.py is about

    def sleep(self, *_):
        """There is no memory to free, and none to take back."""

    wake = sleep


@pytest.fixture
def build(world, tiny, tmp_path, monkeypatch, request):
    """build("section.key=value", ...) → a run for `train_step(run, step)`."""
    monkeypatch.setattr(train_grpo, "Engine", PlainEngine)
    monkeypatch.setattr(clock, "StopSignals", lambda: SimpleNamespace(requested=None))

    def one(*overrides):
        cfg = tiny_config(
            f"output_dir={tmp_path / 'out'}", f"model.path={tiny / 'model'}", f"data.train={tiny / 'train.jsonl'}",
            "rollout.prompts_per_step=4", "rollout.group_size=4", "train.warmup_steps=0", "train.save_every=0",
            "model.match_engine=false", *overrides,
        )  # fmt: skip
        configuration.check_config(cfg, world_size=1)
        train_grpo.rehearse(cfg)
        cfg, inputs = launch.prepare(cfg, world_size=1, weights=True)
        bridge.mpu.destroy_model_parallel()  # a test may build one run after the other
        bridge.init_model_parallel(cfg.parallel, cfg.seed)
        run = train_grpo.build(cfg, inputs, clock.Clock(0))
        request.addfinalizer(run.grading.close)
        return run

    return one


EQUAL = ("reward.default=length", "reward.options={length: {limit: 1000}}")  # one reward for all answers


def weights(run):
    return {name: weight.clone() for name, weight in bridge.hf_weights(run.model)}
