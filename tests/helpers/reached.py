"""The step of a verb that a test is about."""


class Reached(Exception):
    """The step was reached; its work is another test's."""
