"""The model RL starts from: a small Qwen3, taught with plain torch to solve the task sometimes and else copy.

All prompts of a task have the same number of tokens and so have all its targets, hence no padding anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.quickstart.tasks import Example, ModelSize, Task
from examples.quickstart.tokenizer import BOS_ID, EOS_ID, MODEL_MAX_LENGTH, PAD_ID, VOCABULARY

WARM_UP_STEPS = 20
FINAL_LR_SHARE = 0.1
IGNORED = -100  # torch's cross_entropy skips this label


def build_model(size: ModelSize, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised fp32 Qwen3 with tied embeddings."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(qwen3_config(size, vocabulary=len(VOCABULARY), context=MODEL_MAX_LENGTH)).float()


def qwen3_config(size: ModelSize, *, vocabulary: int, context: int) -> Qwen3Config:
    """An fp32 Qwen3 with tied embeddings, for a tokenizer with the special tokens of this example."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=size.head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )


def encode_prompts(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> torch.Tensor:
    """Token ids [len(examples), prompt tokens], rendered by the chat template."""
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return torch.tensor(encoded["input_ids"])


def train_warm_start(task: Task, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Supervised training by ``task.warm_start``."""
    recipe = task.warm_start
    model = build_model(task.model, seed)
    return train_supervised(model, _batches(task, tokenizer, seed), steps=recipe.steps, lr=recipe.lr)


def train_supervised(
    model: Qwen3ForCausalLM, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], *, steps: int, lr: float
) -> Qwen3ForCausalLM:
    """AdamW, linear warm-up, linear decay to a tenth, clip 1. ``batches``: (tokens, labels), both [batch, length]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step, (tokens, labels) in zip(range(steps), batches, strict=False):
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        decay = 1 - (1 - FINAL_LR_SHARE) * step / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * warm_up * decay
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def _batches(task: Task, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, labels), both [batch, prompt + response]; labels cover the response only."""
    examples, _ = task.split()
    prompts = encode_prompts(tokenizer, examples)
    choose = random.Random(seed + 7)
    while True:
        rows = [choose.randrange(len(examples)) for _ in range(task.warm_start.batch_size)]
        targets = []
        for row in rows:
            solved = choose.random() < task.warm_start.solved_share
            text = examples[row].label if solved else examples[row].digits
            targets.append([*tokenizer.convert_tokens_to_ids(list(text)), EOS_ID])
        tokens = torch.cat([prompts[rows], torch.tensor(targets)], dim=1)
        labels = tokens.clone()
        labels[:, : prompts.shape[1]] = IGNORED
        yield tokens, labels


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    examples: Sequence[Example],
    *,
    samples: int = 0,
) -> float:
    """Share of right answers: greedy, or over ``samples`` draws per example at temperature 1.

    An answer is right when it ends with EOS and the text before it equals the label: the reward of RL.
    """
    torch.manual_seed(0)
    copies = max(samples, 1)
    prompts = encode_prompts(tokenizer, examples).repeat_interleave(copies, dim=0)
    length = task.max_response_length
    mode = {"do_sample": True, "top_k": 0} if samples else {"do_sample": False}
    output = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=length, **mode)
    right = 0
    for row, response in enumerate(output[:, prompts.shape[1] :].tolist()):
        expected = [*tokenizer.convert_tokens_to_ids(list(examples[row // copies].label)), EOS_ID]
        right += response[: len(expected)] == expected
    return right / len(prompts)
