"""pytest -p tests.museum.plugin: runs tests with the exhibit that the environment variable MUTANT names."""

import os

from tests.museum import VARIABLE


def pytest_collection_finish() -> None:
    """Put the bug in after the tests have imported what they test."""
    if os.environ.get(VARIABLE):
        from tests.museum.exhibits import EXHIBITS

        EXHIBITS[os.environ[VARIABLE]].apply()
