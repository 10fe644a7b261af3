"""Tiny vision-language models, samples with images, and transformers' own computation on them."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_async.types import Picture
from miles_async.types.pictures import digest_of
from tests.integration.family_table import WITH_IMAGES
from tests.integration.plain_reference import PlainTrainer
from tests.integration.served_models import save_words
from tests.integration.tiny_models import VOCAB
from tests.integration.toy_batches import ToySample, toy_samples

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

IMAGE, VIDEO, START, END = VOCAB - 4, VOCAB - 3, VOCAB - 2, VOCAB - 1
TEXT = VOCAB - 4  # ids below are of texts

MODEL_TYPES = {name: kind for kind, name in WITH_IMAGES.items()}

_LANGUAGE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}

CONFIGS: dict[str, dict[str, dict[str, object]]] = {
    "qwen2.5-vl": {
        "text_config": _LANGUAGE | {"rope_parameters": _ROPE},
        "vision_config": {  # one layer with windows of 2 × 2 tokens, one without
            **_VISION,
            "intermediate_size": 44,  # not divisible by 8, as that of Qwen2.5-VL-7B's
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3-vl": {
        "text_config": {
            **_LANGUAGE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": {  # features of two of its three layers go to the first two layers of the language model
            **_VISION,
            "depth": 3,
            "intermediate_size": 48,
            "patch_size": 14,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
}
CONFIGS["qwen3-vl-moe"] = {
    "text_config": {
        **CONFIGS["qwen3-vl"]["text_config"],
        "num_hidden_layers": 6,
        "moe_intermediate_size": 24,
        "num_experts": 12,
        "num_experts_per_tok": 2,
    },
    # SGLang 0.5.23 expects features for three layers of a mixture.
    "vision_config": CONFIGS["qwen3-vl"]["vision_config"] | {"deepstack_visual_indexes": [0, 1, 2]},
}
"""Model → parts of its config."""
_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 16,
}


def save_tiny_vision(directory: Path, name: str, *, tied: bool, seed: int = 0, layers: int | None = None) -> Path:
    """A model of CONFIGS, its parameters shaken so that no two of them are alike. ``layers``: of the language model,
    if not as many as there.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = {part: dict(fields) for part, fields in CONFIGS[name].items()}
        if layers is not None:
            parts["text_config"]["num_hidden_layers"] = layers
        config = AutoConfig.for_model(
            MODEL_TYPES[name],
            **parts,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            tie_word_embeddings=tied,
        )
        model = AutoModelForImageTextToText.from_config(config)
        for tensor in model.parameters():
            if tensor.ndim > 1:
                tensor.data.mul_(3)
            else:
                tensor.data.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(directory)
    if "moe" in name:
        _transpose_experts(directory / "model.safetensors")
    (directory / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR))
    return directory


def _transpose_experts(file: Path) -> None:
    """Published files have them input by output; transformers (5.19) reads both, and writes them the other way."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    experts = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".experts." in name}
    save_file(tensors | experts, file, metadata={"format": "pt"})


def save_served_vision(directory: Path, name: str, *, seed: int = 0) -> Path:
    """With a tokenizer of the words t0 .. t59 and the names of the four tokens about images."""
    save_tiny_vision(directory, name, tied="moe" not in name, seed=seed)
    save_words(directory, special=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"))
    return directory


def picture(width: int, height: int, seed: int) -> Picture:
    """An image of random pixels."""
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return Picture(content=file.getvalue(), digest=digest_of(file.getvalue()), width=width, height=height)


def with_images(text: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Put images in front of text tokens, as chat templates do; sizes are multiples of 28."""
    tokens: list[int] = []
    for each in pictures:
        tokens += [START, *[IMAGE] * (each.width // 28 * (each.height // 28)), END]
    return [*tokens, *text]


@lru_cache
def cases() -> tuple[tuple[list[int], tuple[Picture, ...]], ...]:
    """Sequences of different numbers of images of different sizes, and texts between them. Two end at a placeholder."""
    draw = np.random.default_rng(1)
    sizes = [[(56, 56)], [], [(28, 84), (112, 56)], [(84, 112)], [], [(56, 56)]]
    found = []
    for number, of_sequence in enumerate(sizes):
        pictures = tuple(picture(*size, seed=10 * number + place) for place, size in enumerate(of_sequence))
        text = draw.integers(0, TEXT, 5 + 3 * number).tolist()
        end = {0: [IMAGE], 1: [VIDEO]}.get(number, [])
        found.append((with_images([*text, *end], pictures), pictures))
    return tuple(found)


def vision_samples(count: int, *, seed: int = 0) -> list[ToySample]:
    """``toy_samples`` of which two in three have an image or two in front."""
    samples = []
    for index, sample in enumerate(toy_samples(count, vocab=TEXT, seed=seed)):
        sizes = ([], [(56, 56)], [(28, 56), (84, 56)])[index % 3]
        pictures = tuple(picture(*size, seed=100 * seed + 10 * index + place) for place, size in enumerate(sizes))
        before = with_images((), pictures)

        def padded(values: np.ndarray, fill: float, length: int = len(before)) -> np.ndarray:
            return np.r_[np.full(length, fill), values].astype(values.dtype)

        samples.append(
            dataclasses.replace(
                sample,
                tokens=np.r_[before, sample.tokens].astype(np.int32),
                loss_mask=padded(sample.loss_mask, 0),
                rollout_logprobs=padded(sample.rollout_logprobs, 0.0),
                weight_versions=padded(sample.weight_versions, -1),
                pictures=pictures,
            )
        )
    return samples


def pictures_by_tokens(samples: Iterable[ToySample]) -> dict[tuple[int, ...], tuple[Picture, ...]]:
    """The images of ``cases()`` and of samples, by their tokens."""
    known = [*cases(), *((sample.tokens.tolist(), sample.pictures) for sample in samples)]
    return {tuple(tokens): pictures for tokens, pictures in known}


class PlainVisionTrainer(PlainTrainer):
    """The plain trainer, of which each sequence's images are known by its tokens."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        from transformers import AutoImageProcessor

        super().__init__(directory, **settings)
        self._processor = AutoImageProcessor.from_pretrained(directory)
        self.pictures: dict[tuple[int, ...], tuple[Picture, ...]] = {}

    def logprobs(self, tokens: Sequence[int], model: PreTrainedModel | None = None) -> torch.Tensor:
        import torch
        from PIL import Image

        whole = torch.tensor([list(tokens)]).long()
        row = whole[:, :-1]  # the last token may stand for an image
        images = [Image.open(io.BytesIO(each.content)) for each in self.pictures[tuple(whole[0].tolist())]]
        inputs = self._processor(images=images, return_tensors="pt") if images else {}
        logits = (model or self.model)(row, mm_token_type_ids=(row == IMAGE).int(), **inputs).logits[0]
        return torch.log_softmax(logits, -1).gather(1, whole[0, 1:, None])[:, 0]
