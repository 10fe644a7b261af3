"""Log-probs in chunks: values and gradients against plain PyTorch, and their memory."""

from __future__ import annotations

import pytest
import torch

from miles_async.backends.megatron.memory.live_bytes import LiveBytes
from miles_async.backends.megatron.model.vocab_logprobs import VocabSettings, _chunks, vocab_logprobs

ROWS, WIDTH, VOCABULARY = 23, 16, 97
TEMPERATURE = 0.7


def make(
    rows: int = ROWS, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, WIDTH, generator=draw).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=draw)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, with all logits at one time."""
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    all_logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
    return all_logprobs.gather(1, labels[:, None])[:, 0], -(all_logprobs.exp() * all_logprobs).sum(-1)


def settings(chunk: int, *, entropy: bool = False, softcap: float | None = None) -> VocabSettings:
    return VocabSettings(temperature=TEMPERATURE, chunk=chunk, entropy=entropy, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, ROWS, 1000])
def test_values_and_gradients_for_any_size_of_chunk(chunk: int, entropy: bool, softcap: float | None) -> None:
    hidden, weight, labels = make()
    logprobs, entropies = vocab_logprobs(hidden, weight, labels, settings(chunk, entropy=entropy, softcap=softcap))
    coefficients = torch.linspace(-1, 2, ROWS)
    total = logprobs @ coefficients
    expected, expected_entropies = plain(hidden, weight, labels, softcap)
    expected_total = expected @ coefficients.double()
    if entropies is not None:
        total, expected_total = (
            one + of_entropies @ coefficients.flip(0).to(of_entropies)
            for one, of_entropies in ((total, entropies), (expected_total, expected_entropies))
        )
    gradients = torch.autograd.grad(total, (hidden, weight))
    expected_gradients = torch.autograd.grad(expected_total, (hidden, weight))
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)
    for found, right in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    if entropy:
        assert entropies is not None
        torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-5, atol=1e-6)
    else:
        assert entropies is None


@pytest.mark.parametrize("rows", [1, 39, 41, 81, 8192])
def test_chunks_are_of_about_one_size(rows: int) -> None:
    """Else the last one may be of a few rows, at which a GPU is slow."""
    chunks = [len(range(rows)[chunk]) for chunk in _chunks(rows, torch.zeros(1), 40)]
    assert sum(chunks) == rows
    assert max(chunks) <= 40
    assert max(chunks) - min(chunks) < len(chunks) <= rows / 40 + 1


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_labels_that_one_row_predicts_share_its_logits(chunk: int, entropy: bool, softcap: float | None) -> None:
    """Row 3 predicts two labels, one of them twice, row 0 labels far apart, and row 7 none."""
    hidden, weight, _ = make(rows=9)
    row_of = torch.tensor([0, 3, 3, 1, 2, 3, 4, 5, 6, 6, 8, 0])
    labels = torch.tensor([4, 16, 23, 8, 15, 16, 42, 4, 8, 15, 16, 96])
    sharing = settings(chunk, entropy=entropy, softcap=softcap)
    found = vocab_logprobs(hidden, weight, labels, sharing, row_of)
    expected = vocab_logprobs(hidden[row_of], weight, labels, sharing)
    torch.testing.assert_close(found, expected)
    coefficients = torch.linspace(-1, 2, len(labels))
    gradients = [
        torch.autograd.grad(
            logprobs @ coefficients + (0 if entropies is None else entropies @ coefficients.flip(0)), (hidden, weight)
        )
        for logprobs, entropies in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_logits_are_made_once_per_row() -> None:
    hidden, weight, _ = make(rows=2, vocabulary=2048)
    row_of, labels = torch.tensor([0] * 200 + [1] * 200), torch.arange(400)
    with torch.no_grad(), LiveBytes(but=[hidden, weight, row_of, labels]) as live:
        vocab_logprobs(hidden, weight, labels, settings(1000), row_of)
    assert live.most < 20 * 2048 * 4


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_derivatives_in_float64(entropy: bool, softcap: float | None) -> None:
    hidden, weight, labels = make(rows=7, vocabulary=11, dtype=torch.float64)
    capped = settings(3, entropy=entropy, softcap=softcap)
    function = lambda hidden, weight: vocab_logprobs(hidden, weight, labels, capped)[: 1 + entropy]  # noqa: E731
    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_an_entropy_that_is_only_logged_changes_no_gradient() -> None:
    hidden, weight, labels = make()
    logged, plainly = (vocab_logprobs(hidden, weight, labels, settings(4, entropy=on))[0] for on in (True, False))
    for one, other in zip(*(torch.autograd.grad(of.sum(), (hidden, weight)) for of in (logged, plainly)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weight_is_added_to_its_buffer(dtype: torch.dtype) -> None:
    """In fp32 whatever the weights are in; autograd gets none, which would be added a second time."""
    hidden, weight, labels = make(dtype=dtype)
    expected = torch.autograd.grad(plain(hidden, weight, labels)[0].sum(), weight)[0].float()
    weight.main_grad = torch.ones(weight.shape)  # type: ignore[attr-defined]
    vocab_logprobs(hidden, weight, labels, settings(6))[0].sum().backward()
    assert weight.grad is None
    rounding = 1e-5 if dtype == torch.float32 else 0.02 * float(expected.abs().max())
    torch.testing.assert_close(weight.main_grad - 1, expected, rtol=1e-2, atol=rounding)  # type: ignore[attr-defined]


def test_a_gradient_that_is_waited_for_is_zero_where_the_buffer_has_the_real_one() -> None:
    hidden, weight, labels = make()
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    waiting = VocabSettings(temperature=TEMPERATURE, chunk=6, zero_gradient=True)
    vocab_logprobs(hidden, weight, labels, waiting)[0].sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    assert weight.main_grad.any()  # type: ignore[attr-defined]


def test_no_tokens_give_a_gradient_of_zero() -> None:
    hidden, weight, _ = make()
    logprobs, _ = vocab_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), settings(4))
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_logits_far_from_zero_do_not_overflow() -> None:
    hidden, weight, labels = make()
    with torch.no_grad():
        found, _ = vocab_logprobs(hidden * 1000, weight, labels, settings(4))
        torch.testing.assert_close(found.double(), plain(hidden * 1000, weight, labels)[0], rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("rows", [100, 400])
def test_both_passes_take_one_chunk_of_logits_whatever_the_number_of_tokens(
    rows: int, entropy: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    vocabulary, chunk = 2048, 40
    hidden, weight, labels = make(rows=rows, vocabulary=vocabulary, dtype=dtype)
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    with LiveBytes(but=[hidden, weight, labels, weight.main_grad]) as live:  # type: ignore[attr-defined]
        logprobs, found = vocab_logprobs(hidden, weight, labels, settings(chunk, entropy=entropy, softcap=softcap))
        (logprobs if found is None else logprobs + found).sum().backward()
    beside = rows * (2 * WIDTH * hidden.element_size() + 80)  # gradient of hidden states; numbers per row
    assert live.most <= chunk * vocabulary * 4 + beside
    assert live.most >= 0.5 * chunk * vocabulary * 4  # it was counted
