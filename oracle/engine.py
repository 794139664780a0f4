"""A vLLM in a process of its own: what it answers to requests. again.py starts it.

Reads {"dtype", "options": of vllm.LLM, "models": [{"folder", "requests": [{"ids", "settings": of SamplingParams}]}]} as
JSON from standard input, and prints for each model its answers: [[token ids, their log-probs], ...].
"""

import json
import os
import sys

from grpo.parts.engine import linear_attention
from grpo.parts.engine.vllm_process import set_environment


def main():
    job = json.load(sys.stdin)
    printed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not among the answers
    set_environment(dtype=job["dtype"])
    from vllm import LLM, SamplingParams

    found = []
    for model in job["models"]:
        needed = linear_attention.prepare(model["folder"], job["dtype"])
        llm = LLM(model["folder"], **job["options"] | needed)
        prompts = [{"prompt_token_ids": request["ids"]} for request in model["requests"]]
        more = {"logprobs": 0, "skip_special_tokens": False, "include_stop_str_in_output": True}
        params = [SamplingParams(**request["settings"], **more) for request in model["requests"]]
        answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        for a in answers:
            a.logprobs = [at[token].logprob for at, token in zip(a.logprobs, a.token_ids, strict=True)]
        found.append([(a.token_ids, a.logprobs) for a in answers])
        del llm
    json.dump(found, printed)


if __name__ == "__main__":
    main()
