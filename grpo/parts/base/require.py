"""Checks in one line: what must hold, and the error if it does not."""

from functools import partial

from config import UserError


def require(ok: bool, message: str, error: type[Exception] = UserError):
    """Raises `error` with the message unless `ok`. The message is built in any case, so in a loop use `if`."""
    if not ok:
        raise error(message)


require_data = partial(require, error=ValueError)  # for grpo/parts/data, whose callers add the key or the file
