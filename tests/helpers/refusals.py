"""Errors for a user: one line with the words that matter."""

import pytest

from swin_quant.base.errors import SwinQuantError


def refused(call, *words, kind=SwinQuantError) -> str:
    """The message of the error of `call()`: one printable line that holds all `words`."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 2000
    assert [word for word in words if word not in message] == [], message
    return message
