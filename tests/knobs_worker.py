"""Runs under torchrun: train_grpo.py, which writes down what it reads of its configuration and how it packs.

    torchrun --nproc_per_node=1 tests/knobs_worker.py OUT.json --config ... section.key=value ...

OUT.json has "read", the keys that were read outside of checks and logs; "packed", for each entry of CHANGES and each
phase the number of micro-batches of every plan; "response_ids" of the last step; "max_num_seqs", as vLLM has it. With
train.lr=0 every entry packs the same samples.
"""

import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path

import train_grpo

CHANGES = {
    "none": {},
    "train": {"max_tokens_per_micro_batch": 64},
    "logprob": {"logprob_max_tokens_per_micro_batch": 64},
    "none again": {},
}
# What only looks at the configuration: a key that nothing else reads is dead.
LOOKS = {"load_config", "check_config", "describe", "check_model", "check_resumed"}
LIBRARIES = ("/omegaconf/", "/dataclasses.py")  # asdict, and the YAML text of the whole


def watch_reads(cls: type, read: set[str], prefix: str = "") -> None:
    """Add the dotted name of every key to `read`, once it is used."""
    names = {f.name: prefix + f.name for f in dataclasses.fields(cls)}
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(f.type):
            watch_reads(f.type, read, f"{prefix}{f.name}.")

    def getattribute(self, name):
        if name in names and names[name] not in read and not only_looked_at():
            read.add(names[name])
        return object.__getattribute__(self, name)

    cls.__getattribute__ = getattribute


def only_looked_at() -> bool:
    frame = sys._getframe(2)
    while frame:
        if frame.f_code.co_name in LOOKS or any(part in frame.f_code.co_filename for part in LIBRARIES):
            return True
        frame = frame.f_back
    return False


def main() -> int:
    out, found = Path(sys.argv[1]), {"packed": {}}
    read, plans = set(), defaultdict(list)
    watchdogs = []
    train_step, plan_bins = train_grpo.train_step, train_grpo.plan_bins

    def every_change(trainer, step):
        watchdogs.append(trainer.watchdog)
        for name, change in CHANGES.items():
            before, cfg = trainer.cfg, trainer.cfg
            trainer.cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **change))
            trainer.prompts_taken = 0
            result = train_step(trainer, step)
            trainer.cfg = before
            found["packed"][name] = dict(plans)
            plans.clear()
        found["max_num_seqs"] = trainer.engine.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        found["response_ids"] = [sample.response_ids for sample in result[1]]
        return result

    def counted(lengths_N, max_tokens, multiple):
        bins = plan_bins(lengths_N, max_tokens, multiple)
        plans[watchdogs[-1].phase].append(len(bins))
        return bins

    watch_reads(train_grpo.Config, read)
    train_grpo.train_step, train_grpo.plan_bins = every_change, counted
    code = train_grpo.main(sys.argv[2:])
    out.write_text(json.dumps({**found, "read": sorted(read)}))
    return code


if __name__ == "__main__":
    sys.exit(main())
