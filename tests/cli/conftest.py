"""Fixtures that run the command line in this process."""

import pytest


@pytest.fixture(autouse=True)
def every_process_left_alone(process_left_alone):
    """Restores the process after every test of the commands, whatever they call."""
