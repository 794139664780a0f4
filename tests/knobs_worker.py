"""Runs under torchrun: train_grpo.py, which writes down what it samples and packs.

    torchrun --nproc_per_node=1 tests/knobs_worker.py OUT.json --config ... section.key=value ...

OUT.json has "packed", the number of micro-batches of every pass; "response_ids" of every step; "max_num_seqs", as vLLM
has it.
"""

import json
import sys
from pathlib import Path

import train_grpo


def main() -> int:
    found = {"packed": [], "response_ids": []}
    train_step, cut = train_grpo.train_step, train_grpo.to_micro_batches

    def noted_step(run, step):
        found["max_num_seqs"] = run.engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        result = train_step(run, step)
        found["response_ids"] += [sample.response_ids.tolist() for sample in result[1]]
        return result

    def noted_cut(*args):
        micro_batches = cut(*args)
        found["packed"].append(len(micro_batches))
        return micro_batches

    train_grpo.train_step, train_grpo.to_micro_batches = noted_step, noted_cut
    code = train_grpo.main(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main())
