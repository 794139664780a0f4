"""The algorithm against numbers worked by hand, and the packing against the samples it came from."""

from dataclasses import replace

import torch

from config import AlgoConfig
from support.data.prompts import Prompt, prompt_batch, sampling_seed
from support.step.packing import Batch, pack
from train_grpo import Sample, flatten, grpo_loss, loss_weights


def sample(group: int, prompt: list[int], response: list[int], advantage=0.0) -> Sample:
    logp = [-0.1 * token for token in response]
    return Sample(group, prompt, response, logp, True, "", "s", advantage=advantage)


SAMPLES = [
    sample(0, [11, 12], [1, 2, 3], 1.5),
    sample(0, [11, 12], [4], -1.5),
    sample(1, [13], [5, 6], 0.5),
    sample(2, [14, 15, 16], [7, 8], 2.0),
]


def flat(samples: list[Sample]) -> Batch:
    """flatten with what train_step adds for one update on all samples."""
    batch = flatten(samples)
    advantages_N = torch.tensor([s.advantage for s in samples])
    weights_F = loss_weights(batch, list(range(len(samples))), "token_mean", 1)
    return replace(batch, advantages=advantages_N[batch.seq_id], weights=weights_F)


def test_packing_aligns_every_field_on_the_position_that_predicts():
    batch = flat(SAMPLES)
    assert batch.lengths_N.tolist() == [4, 2, 2, 4]
    mb = pack(batch, [2, 0], width=8, device="cpu")
    assert mb.tokens.tolist() == [[13, 5, 11, 12, 1, 2, 0, 0]]
    assert mb.targets.tolist() == [[5, 6, 12, 1, 2, 3, 0, 0]]
    assert mb.mask.tolist() == [[1, 1, 0, 1, 1, 1, 0, 0]]
    assert mb.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert mb.advantages.tolist() == [[0.5, 0.5, 1.5, 1.5, 1.5, 1.5, 0, 0]]
    torch.testing.assert_close(mb.rollout_logp, torch.tensor([[-0.5, -0.6, 0, -0.1, -0.2, -0.3, 0, 0]]))
    assert mb.seq_id.tolist() == [[2, 2, 0, 0, 0, 0, -1, -1]]
    assert mb.cu_seqlens.tolist() == [0, 2, 6, 8] and mb.sizes.tolist() == [2, 4, 2]
    assert batch.tokens[mb.index_T].tolist() == mb.tokens[0, :6].tolist()
    assert mb.old_logp is None and mb.ref_logp is None


def test_an_empty_micro_batch_counts_nothing():
    mb = pack(flat(SAMPLES), [], width=2, device="cpu")
    assert mb.tokens.shape == (1, 2) and mb.mask.sum() == 0
    loss, denominator, _ = grpo_loss(mb, torch.zeros(2, requires_grad=True), torch.zeros(2), AlgoConfig())
    assert loss.item() == 0 and denominator.item() == 0


def test_prompts_are_a_seeded_stream_without_gaps():
    prompts = [Prompt([i], "", "s", {}) for i in range(10)]
    stream = [p.ids[0] for step in range(5) for p in prompt_batch(prompts, 4 * step, 4, seed=3)]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10)) and stream[:10] != stream[10:]
    assert stream == [p.ids[0] for p in prompt_batch(prompts, 0, 20, seed=3)]
    assert stream[:10] != [p.ids[0] for p in prompt_batch(prompts, 0, 10, seed=4)]
    assert len({sampling_seed(s, t, g) for s in range(5) for t in range(5) for g in range(5)}) == 125
