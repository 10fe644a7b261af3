"""What a Gemma 4 server computes with after a publication is what was published."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles_async.engines.sglang import gemma4


class Router(nn.Module):
    """As SGLang's: the product of norm and scale is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("product", torch.zeros(4))

    def fuse_scale(self) -> None:
        self.product.copy_(self.scale.detach() / 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.register_buffer("layer_scalar", torch.ones(1))


def load_weights(model: nn.Module, weights: list[tuple[str, Tensor]]) -> int:
    """As SGLang's, with a loader of the parameter's own where there is one."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in weights:
        loader = getattr(held[name], "weight_loader", lambda held, given: held.data.fill_(given.flatten()[0].item()))
        loader(held[name], tensor)
    return len(weights)


def test_scales_of_routers_and_factors_of_layers_are_those_that_were_loaded_last() -> None:
    model = nn.ModuleList([Layer(), Layer()])
    copied: list[int] = []
    for value in (2.0, 3.0):
        weights = [
            (f"{layer}.{name}", torch.full((size,), value + layer))
            for layer in range(2)
            for name, size in (("router.scale", 4), ("layer_scalar", 1))
        ]
        place = model[1].router.product.data_ptr()
        assert gemma4.load(load_weights, model, weights) == 4
        assert model[1].router.product.tolist() == [(value + 1) / 2] * 4
        assert model[1].router.product.data_ptr() == place  # which captured graphs read
        assert model[1].layer_scalar.item() == value + 1
        copied += [layer.layer_scalar.weight_loader is gemma4.copy for layer in model]
    assert all(copied)  # a loader that fills in a number can't be followed
