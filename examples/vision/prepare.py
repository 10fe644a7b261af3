"""Draws the pictures and makes the model: ``data/`` and ``model/``. From the repository root:

python -m examples.vision.prepare

A picture has a square of one of four colours. The model is a Qwen2.5-VL of 0.5 M parameters that was
taught to answer the question with a colour, any: it has never seen a picture.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
SEED = 1234
SIZE = 56  # pixels: 2 × 2 tokens
TRAIN, TEST = 480, 96
WARM_START_STEPS = 200
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
}
GREY = (128, 128, 128)
QUESTION = "which colour has the square ?"

SPECIAL_TOKENS = (
    *("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
VOCABULARY = (*SPECIAL_TOKENS, *COLOURS, *QUESTION.split())
IDS = {word: i for i, word in enumerate(VOCABULARY)}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def draw(colour: str, dice: random.Random) -> Image.Image:
    """A square of any size and place on grey; shades differ from picture to picture."""
    picture = Image.new("RGB", (SIZE, SIZE), shade(GREY, dice))
    side = dice.randrange(SIZE // 4, SIZE // 2)
    left, top = dice.randrange(SIZE - side), dice.randrange(SIZE - side)
    picture.paste(shade(COLOURS[colour], dice), (left, top, left + side, top + side))
    return picture


def shade(colour: tuple[int, ...], dice: random.Random) -> tuple[int, ...]:
    return tuple(min(max(value + dice.randint(-16, 16), 0), 255) for value in colour)


def write_data(directory: Path) -> None:
    """``train.jsonl`` and ``test.jsonl``, whose rows name files in ``pictures/``."""
    dice = random.Random(SEED)
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", TRAIN), ("test", TEST)):
        rows = []
        for number in range(count):
            label = dice.choice(sorted(COLOURS))
            file = f"{name}-{number:03}.png"
            draw(label, dice).save(directory / "pictures" / file)
            rows.append(json.dumps({"prompt": f"<image> {QUESTION}", "images": [file], "label": label}))
        (directory / f"{name}.jsonl").write_text("\n".join([*rows, ""]))


def write_model(directory: Path) -> None:
    """A checkpoint as those of Qwen2.5-VL are, with random weights."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    language = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": IDS["<eos>"],
        "pad_token_id": IDS["<pad>"],
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=language,
        vision_config=vision,
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # a model this small only loses by sharing its work
    model = Qwen2_5_VLForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    question = [IDS[word] for word in f"<|user|> {QUESTION} <|assistant|>".split()]
    for _ in range(WARM_START_STEPS):
        answers = torch.randint(IDS["red"], IDS["red"] + len(COLOURS), (16, 1))
        rows = torch.cat([torch.tensor([question] * 16), answers, torch.full((16, 1), IDS["<eos>"])], 1)
        logits = model(rows).logits[:, len(question) - 1 : -1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, len(question) :].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    write_processors(directory)


def write_processors(directory: Path) -> None:
    """A tokenizer of words, and how pixels become patches."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.add_special_tokens(list(SPECIAL_TOKENS))
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": SIZE * SIZE,
        "max_pixels": SIZE * SIZE,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Pictures of squares, and a model.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for data/ and model/")
    output = parser.parse_args(arguments).output
    if not (output / "data" / "test.jsonl").exists():
        write_data(output / "data")
    if not (output / "model" / "preprocessor_config.json").exists():
        write_model(output / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
