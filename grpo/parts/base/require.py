"""Checks in one line: what must hold, and the error if it does not; errors in one line."""

from functools import partial

from config import UserError


def require(ok: bool, message: str, error: type[Exception] = UserError):
    """Raises `error` with the message unless `ok`. The message is built in any case, so in a loop use `if`."""
    if not ok:
        raise error(message)


require_data = partial(require, error=ValueError)  # for grpo/parts/data, whose callers add the key or the file


def brief(error: BaseException) -> str:
    """An error in one line: its class, and up to 200 characters of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
