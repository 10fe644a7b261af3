"""A rank's memory is freed and comes back with its contents, under the same tensors and their views."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from miles_async.backends.megatron.offload import HostStorages, gradients, model_tensors, optimizer_tensors


def rank() -> tuple[list[torch.nn.Module], object, Tensor]:
    """Modules, optimizer and the buffer that the gradients are views of, as Megatron has them."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    flat = torch.zeros(sum(parameter.numel() for parameter in module.parameters()))
    start = 0
    for parameter in module.parameters():
        parameter.main_grad = flat[start : start + parameter.numel()].view(parameter.shape)  # type: ignore[attr-defined]
        start += parameter.numel()
    adam = torch.optim.AdamW(module.parameters(), lr=0.1)
    return [module], SimpleNamespace(optimizer=adam), flat


def step(modules: list[torch.nn.Module], optimizer: Any) -> None:
    modules[0](torch.arange(8.0).view(2, 4)).square().mean().backward()
    optimizer.optimizer.step()


def contents(modules: list[torch.nn.Module], optimizer: object) -> list[Tensor]:
    return [tensor.clone() for tensor in (*model_tensors(modules), *optimizer_tensors(optimizer))]


def test_everything_is_freed_and_comes_back() -> None:
    modules, optimizer, flat = rank()
    step(modules, optimizer)
    before, weight = contents(modules, optimizer), next(modules[0].parameters())
    row = weight.data[1]  # a view
    everything = [*model_tensors(modules), *optimizer_tensors(optimizer)]
    on_host = HostStorages(everything, scratch=gradients(modules))
    assert {tensor.untyped_storage().nbytes() for tensor in (*everything, flat)} == {0}

    on_host.restore()
    for tensor, expected in zip(everything, before, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    torch.testing.assert_close(row, weight.data[1], rtol=0, atol=0)
    assert len(everything) >= 4 + 3 + 3 * 4  # parameters, buffers, and twice moments and a step per parameter


def test_training_goes_on_as_if_nothing_had_been() -> None:
    torch.manual_seed(0)
    modules, optimizer, _ = rank()
    torch.manual_seed(0)
    others, other_optimizer, _ = rank()
    for _ in range(3):
        step(modules, optimizer)
        step(others, other_optimizer)
        tensors = [*model_tensors(modules), *optimizer_tensors(optimizer)]
        HostStorages(tensors, scratch=gradients(modules)).restore()
    for tensor, expected in zip(contents(modules, optimizer), contents(others, other_optimizer), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
