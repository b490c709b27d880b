"""The command line run in this process."""

import pytest


@pytest.fixture(autouse=True)
def every_process_left_alone(process_left_alone):
    """Whatever a test of the commands calls."""
