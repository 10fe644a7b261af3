"""Log-probs in chunks at real sizes: values, speed, and the memory of ``--logprob-chunk`` rows of logits."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.figures import Figures, Head, chunked_step, peak_bytes, plain_step, seconds_of

CHUNK = 1024
HEADS = {
    "0.6B": Head(tokens=8192, width=1024, vocabulary=151_936, dtype=torch.bfloat16),
    "8B": Head(tokens=8192, width=4096, vocabulary=151_936, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", HEADS)
def test_chunks_take_bounded_memory_and_the_plain_forms_values(name: str, figures: Figures) -> None:
    head = HEADS[name]
    inputs = head.make("cuda")
    gradient_bytes = sum(tensor.nbytes for tensor in inputs[:2])
    chunked = peak_bytes(lambda: chunked_step(inputs, CHUNK), "cuda")
    plain = peak_bytes(lambda: plain_step(inputs), "cuda")
    figures.add(
        "log-prob chunks",
        head=name,
        chunked_mib=chunked / 2**20,
        plain_mib=plain / 2**20,
        chunked_seconds=seconds_of(lambda: chunked_step(inputs, CHUNK), "cuda"),
        plain_seconds=seconds_of(lambda: plain_step(inputs), "cuda"),
    )
    # The weight's gradient is summed in fp32 where Megatron has no buffer for it.
    assert chunked <= head.logits_bytes(CHUNK) + 3 * gradient_bytes
    assert plain >= head.logits_bytes(head.tokens)
    (ours, *our_gradients), (expected, *gradients) = chunked_step(inputs, CHUNK), plain_step(inputs)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-2)
    for gradient, plain_gradient in zip(our_gradients, gradients, strict=True):
        assert (gradient - plain_gradient).float().norm() < 1e-2 * plain_gradient.float().norm()
