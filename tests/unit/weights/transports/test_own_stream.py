"""Devices of senders, without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.cuda._utils import _get_device_index

from miles_async.weights.transports.own_stream import sending_device


def test_a_senders_device_is_one_that_a_thread_can_take() -> None:
    """``torch.cuda.set_device`` refuses a device without a number, which streams and tensors accept."""
    with pytest.raises(ValueError, match="specified index"):
        _get_device_index(torch.device("cuda"))
    assert _get_device_index(sending_device("cuda")) == 0
    assert sending_device("cpu") == torch.device("cpu")
