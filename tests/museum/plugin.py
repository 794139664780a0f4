"""pytest -p tests.museum.plugin: runs tests, and the ranks that they fork, with the exhibit that MUTANT names."""

import os

from tests import museum


def pytest_collection_finish() -> None:
    """Put the bug in after the tests have imported what they test."""
    museum.put_in(os.environ)
