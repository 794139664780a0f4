"""Right forks: edits of the script that change the algorithm on purpose. No run is stopped, and `make check` names what
each changed and nothing else; test_museum.py runs them."""

import dataclasses

from tests.museum import Exhibit


@dataclasses.dataclass(frozen=True)
class Fork:
    """An edit in place, one or several pieces of the script, and the items of `make check` that part by it."""

    what: str
    edits: tuple[tuple[str, str, str], ...]  # (function, a piece of its source, what the fork has there)
    parts: set[str]
    options: tuple[str, ...] = ()

    def exhibits(self) -> list[Exhibit]:
        """The edits as the museum plants them."""
        return [Exhibit("", "", f"train_grpo:{function}", before, after) for function, before, after in self.edits]


ADDED = "batch = add_advantages(samples, batch, algo, cfg.reward)"
FORKS = {
    # the six that were stopped by the second trainer inside of the run
    "advantages in train_step": Fork(
        "negative advantages count half, in train_step", (("train_step", ADDED, f"{ADDED}\n    batch = replace("
        "batch, advantages=torch.where(batch.advantages < 0, batch.advantages / 2, batch.advantages))"),),
        {"updates"}),
    "a norm of its own": Fork(
        "a new loss_norm leaves out the second half of an answer's tokens",
        (("loss_weights", "    if kind not in weights_N:", "    if kind == 'first_half':\n        half_F = "
          "batch.loss_mask & (batch.position_ids < 5)\n"
          "        return chosen_N.float().index_select(0, batch.seq_id) * half_F\n"
          "    if kind not in weights_N:"),),
        set(), ("algo.loss_norm=first_half",)),
    "half of a group": Fork(
        "the best and the worst two answers of a group are trained", (("train_step", "samples = collected.kept",
        "samples = [s for g in sorted({s.group for s in collected.kept}) for s in (lambda m: m[:1] + m[-1:])(sorted("
        "[s for s in collected.kept if s.group == g], key=lambda s: s.reward))]"),), {"updates"}),
    "a fourth term": Fork(
        "a loss of a new name with a term on the squared log-prob", (
        ("policy_loss", 'if algo.loss == "reinforce":', 'if algo.loss == "squared":\n        return -advantages_T * '
         'logp_T + 0.01 * logp_T**2, torch.zeros_like(logp_T)\n    if algo.loss == "reinforce":'),),
        set(), ("algo.loss=squared",)),
    "a curriculum": Fork(
        "prompts by a function of seed, step and position", (("collect", "prompt_batch(run.inputs.prompts, taken, "
        "missing, cfg.seed)", "[run.inputs.prompts[(7 * (taken + i) + step) % 100] for i in range(missing)]"),),
        {"order"}, ("train.save_every=2",)),
    "equal groups skipped": Fork(
        "groups of equal rewards are not trained", (("train_step", "samples = collected.kept",
        "samples = [s for s in collected.kept if len({o.reward for o in collected.kept if o.group == s.group}) "
        "> 1] or collected.kept"),), {"updates"}, ("train.save_every=2",)),
    # five of other kinds
    "a second model's reward": Fork(
        "a score of the answer's log-prob is added to its reward", (("sample_and_grade", "sample.reward, "
        "sample.reward_parts = sum(outcome.parts.values()), outcome.parts", "sample.reward_parts = outcome.parts | "
        "{'sure': float(sample.rollout_logp.mean()) / 10}\n            sample.reward = sum(sample.reward_parts"
        ".values())"),), {"rewards"}),
    "half of the batch": Fork(
        "half of the groups of a step are trained", (("update_order", "np.unique(groups))",
        "np.unique(groups))[: len(np.unique(groups)) // 2]"),), {"updates"}),
    "two optimizers": Fork(
        "the norms are trained with a tenth of the learning rate", (("train_step",
        'report["grad_norm"] = bridge.optimizer_step(run.optimizer, t.lr, t.offload == "optimizer")',
        'report["grad_norm"] = bridge.optimizer_step(run.optimizer, t.lr, False)\n                [w.data.mul_(1.0001) '
        'for c in model for n, w in c.named_parameters() if "layernorm" in n]'),), {"weights"}),
    "tokens resampled": Fork(
        "answers are sampled with other seeds", (("sample_and_grade", "sampling_seed(cfg.seed, step, group)",
        "sampling_seed(cfg.seed, step, group) // 2"),), {"seeds"}),
    "another order": Fork(
        "the updates of a step come in another order", (("update_order", "return parts", "return parts[::-1]"),),
        {"updates"}, ("train.updates_per_step=2",)),
}  # fmt: skip
