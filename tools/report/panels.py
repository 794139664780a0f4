"""Which metric is drawn where: sections of panels, each of one to three metrics; docs/metrics.md says what they mean.

A name with a star makes a panel of every metric that fits, one for each source, part or layer.
"""

# Scale: from 0 to 1; logarithmic; from 0; from 0 and never smoothed; None: as the values ask
FRACTION, LOG, ZERO, EXACT = "fraction", "log", "zero", "exact"

# section → (title, metrics, scale, what to know)
SECTIONS = {
    "Learning": [
        ("Reward", ["reward/mean"], ZERO, "mean over all samples of a step"),
        ("Spread of rewards", ["reward/std"], ZERO, "standard deviation over the samples of a step"),
        ("Entropy", ["entropy"], ZERO, "nats a token; near 0, the answers to a prompt are all the same"),
        ("Gradient norm", ["grad_norm"], ZERO, "before clipping"),
        ("Policy loss", ["loss/policy"], None, "of the first update of a step; it need not fall"),
        ("Learning rate", ["lr"], EXACT, ""),
    ],
    "Reward by source and part": [
        ("Reward of {}", ["reward/*/mean"], ZERO, "mean over the samples of this source"),
        ("Part {}", ["part/*"], None, "source / part of the reward; the parts of a source add up to its reward"),
        ("Graded too long, {}", ["reward/*/timeout_frac"], FRACTION, "share of samples; their reward is 0"),
        ("Grading failed, {}", ["reward/*/error_frac"], FRACTION, "share of samples; their reward is 0"),
    ],
    "Length": [
        (
            "Answer length",
            ["tokens/response_mean", "tokens/response_max"],
            ZERO,
            "tokens: mean; dashed the longest",
        ),
        ("Cut off", ["tokens/truncated_frac"], FRACTION, "share of answers that reached rollout.max_new_tokens"),
        ("Prompt length", ["tokens/prompt_mean"], ZERO, "tokens, mean"),
        ("Environment's tokens", ["tokens/environment_mean"], ZERO, "of rollout.turns: mean of a conversation"),
        ("Turns", ["turns/mean"], ZERO, "answers of a conversation, mean"),
    ],
    "Gap, clip and KL": [
        (
            "Trainer − vLLM",
            ["logp_gap/mean", "logp_gap/max"],
            LOG,
            "|log-prob| of a token: mean; dashed the largest",
        ),
        ("Clipped", ["ratio/clip_frac"], FRACTION, "share of response tokens that the clip holds"),
        ("Effective sample size", ["mismatch/ess"], FRACTION, "of the weights trainer ÷ vLLM; 1 where both agree"),
        ("KL(vLLM ‖ trainer)", ["mismatch/k3"], None, "k3 estimate a token"),
        ("KL to the reference", ["kl/ref", "kl/k1", "kl/k2"], None, "a token: k3; dashed k1; dotted k2"),
    ],
    "Groups": [
        ("Groups that teach nothing", ["groups/zero_std_frac"], FRACTION, "share whose rewards are all equal"),
        ("Sampled and trained", ["groups/sampled", "groups/trained"], EXACT, "groups; dashed: trained on"),
        ("Rounds of sampling", ["groups/rounds"], EXACT, "above 1 with algo.max_rounds"),
        ("Skipped updates", ["update/skipped"], EXACT, "NaN, infinity or a gradient of exactly 0"),
    ],
    "Speed": [
        ("A step", ["time/step"], ZERO, "seconds"),
        ("Response tokens a second", ["speed/response_tokens_per_s"], ZERO, "all ranks together"),
        ("Waiting for the slowest rank", ["idle_frac"], FRACTION, "share of a step, mean over ranks"),
        ("Pipeline bubble", ["pipeline/bubble"], FRACTION, "share of an update in which a stage idles"),
        ("Use of rows", ["pack/fill"], FRACTION, "positions ÷ what micro-batches may hold"),
        ("Attention ÷ that without padding", ["pack/attention_waste"], None, "1 is none"),
    ],
}
