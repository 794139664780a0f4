"""oracle/engine.py in a process that is forked where vLLM is imported already: engine.py JOB ANSWERS, two files."""

import os
import sys

from oracle import engine

if __name__ == "__main__":
    job, answers = sys.argv[1:]
    os.dup2(os.open(answers, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    with open(job) as sys.stdin:
        engine.main()
