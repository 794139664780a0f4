"""docs/walkthrough.md quotes functions and lines that are there."""

import re

import pytest
from walkthrough import QUOTED, QUOTES, quote

from tests.conftest import REPO, differs_from_upstream

PAGE = (REPO / "docs/walkthrough.md").read_text()


@pytest.mark.parametrize(("file", "function", "count", "start"), QUOTES)
def test_what_the_page_quotes_is_there(file, function, count, start):
    try:
        assert start in quote(file, function, count, start)
    except LookupError as error:
        if not differs_from_upstream(file):
            raise
        pytest.skip(f"{file} differs from upstream's: {error}")


def test_the_page_has_each_quote_in_its_place():
    """What is quoted may lag behind the code by an edit; which functions are quoted may not."""
    names = [(file, function) for file, function, _, _ in QUOTES]
    assert QUOTED.findall(PAGE) == names, (
        "docs/make/walkthrough.py --quotes renews them, make walkthrough the numbers too"
    )
    assert not re.findall(r"\.py:\d|#L\d", PAGE)
