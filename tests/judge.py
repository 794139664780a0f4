"""A reward for tests: the value of the answer, a Python expression."""

import datetime  # noqa: F401
import os
import subprocess  # noqa: F401, these for the answers
import sys  # noqa: F401
import tempfile  # noqa: F401
import time  # noqa: F401


def judge(text, answer, row):
    print("noise on standard output")
    os.write(1, b"more noise")
    return eval(text)
