"""The one line in which a check says what must hold and what to tell the user otherwise."""

from collections.abc import Callable

from config import UserError


def require(ok: bool, message: str | Callable[[], str], error: type[Exception] = UserError) -> None:
    """Raises `error` with the message unless `ok`. A message that is costly to make is given as a function of it."""
    if not ok:
        raise error(message() if callable(message) else message)
