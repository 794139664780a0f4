"""The one line in which a check says what must hold and what to tell the user otherwise."""

from functools import partial

from config import UserError


def require(ok: bool, message: str, error: type[Exception] = UserError) -> None:
    """Raises `error` with the message unless `ok`. The message is made in any case: in a loop, use `if`."""
    if not ok:
        raise error(message)


require_data = partial(require, error=ValueError)  # of grpo/parts/data, whose callers add the key or the file
