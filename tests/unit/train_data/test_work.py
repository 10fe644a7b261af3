"""Work per sequence against torch's count of multiplications, and what sharing it out does. # covers: M2"""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from miles_async.train_data.balance import balance, exchanged, largest_differencing
from miles_async.train_data.work import ModelWork, model_work, quadratic_work, sequence_work
from miles_async.types import JsonObject
from tests.integration.tiny_models import FAMILIES


def counted_work(name: str, length: int) -> int:
    """Multiplications of a forward pass by transformers, all pairs of tokens included."""
    import torch
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    kind, settings = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**settings, attn_implementation="eager")
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-tied", "gemma", "gemma4"])
def test_the_quadratic_part_is_that_of_the_model(name: str) -> None:
    short, long = 16, 64
    counts = {length: counted_work(name, length) for length in (short, long)}
    # count = linear · length + square · length²; a causal mask leaves half of the pairs
    square = (counts[long] / long - counts[short] / short) / (long - short)
    linear = counts[short] / short - square * short
    config = config_of(name)
    assert quadratic_work(config) == pytest.approx(square / 2 / linear, rel=0.01)


def config_of(name: str) -> JsonObject:
    import transformers

    kind, settings = FAMILIES[name]
    config: JsonObject = json.loads(getattr(transformers, f"{kind}Config")(**settings).to_json_string())
    return config


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "deepseek-v3", "moonlight"])
def test_weights_that_a_token_passes_are_counted(name: str) -> None:
    """In a mixture: all but the experts that a token is not sent to."""
    import torch
    import transformers

    kind, settings = FAMILIES[name]
    settings = settings | {"tie_word_embeddings": True, "attention_bias": False}
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))
    config = config_of(name)
    passed = 0.0
    for path, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            routed = ".experts." in path
            experts = config.get("num_local_experts") or config["n_routed_experts"]
            passed += parameter.numel() * (config["num_experts_per_tok"] / experts if routed else 1)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if "kv_lora_rank" in config:
        width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
    else:
        width = 2 * config["head_dim"]
    assert quadratic_work(config) == pytest.approx(layers * heads * width / 2 / passed, rel=0.01)


def test_a_config_without_sizes_means_tokens() -> None:
    assert quadratic_work({}) == quadratic_work({"model_type": "unknown", "hidden_size": 64}) == 0
    assert sequence_work([3, 5], 0.0).tolist() == [3, 5]
    assert sequence_work([3, 5], 0.1).tolist() == pytest.approx([3.9, 7.5])


def test_attention_is_as_much_as_the_rest_at_tens_of_thousands_of_tokens() -> None:
    """Qwen3-4B."""
    config = {
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
    }  # fmt: skip
    assert 1 / quadratic_work(config) == pytest.approx(27_300, rel=0.01)


def test_equal_lengths_that_fill_no_micro_batch_are_shared_out_equally() -> None:
    """Five micro-batches are full; eight ranks used to get the halves of three of them, 62 % above the mean."""
    lengths = [1000] * 160
    plan = balance(lengths, sequence_work(lengths, 1 / 27_000), 8, 32_768)
    assert [[len(members) for members in bins] for bins in plan] == [[20]] * 8


def test_long_sequences_count_for_their_attention() -> None:
    """Shared out by tokens, the rank with the long sequence would have a third more than the mean."""
    lengths = [32_000] + [1000] * 100
    with_long, without = sorted(
        balance(lengths, sequence_work(lengths, 1 / 27_000), 2, 32_768), key=lambda bins: sum(map(len, bins))
    )
    assert sum(map(len, with_long)) == 17  # by tokens: 35
    assert sum(work_of(with_long, lengths)) == pytest.approx(sum(work_of(without, lengths)), rel=0.02)


def work_of(bins: list[list[int]], lengths: list[int]) -> list[float]:
    work = sequence_work(lengths, 1 / 27_000)
    return [float(work[members].sum()) for members in bins]


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_differencing_unites_what_is_spread_most(parts: int) -> None:
    """Karmarkar and Karp's method, written down with lists."""
    work = np.random.default_rng(0).random(20)
    united = [[(float(each), [index])] + [(0.0, [])] * (parts - 1) for index, each in enumerate(work)]
    while len(united) > 1:
        united.sort(key=lambda union: union[0][0] - union[-1][0])
        first, second = united.pop(), united.pop()
        sums = [(a + b, one + other) for (a, one), (b, other) in zip(first, reversed(second), strict=True)]
        united.append(sorted(sums, reverse=True))
    assert sorted(largest_differencing(work, parts)) == sorted(sorted(members) for _, members in united[0])


def test_exchanges_find_what_differencing_misses() -> None:
    work = np.random.default_rng(1).integers(100, 8192, 32).astype(float)
    before = largest_differencing(work, 8)
    after = exchanged(before, work)
    heaviest = [max(work[part].sum() for part in parts) * 8 / work.sum() for parts in (before, after)]
    assert heaviest[0] > 1.01 > heaviest[1]


def test_micro_batches_of_a_rank_are_heaviest_first() -> None:
    lengths = np.random.default_rng(0).integers(100, 8192, 64).tolist()
    for bins in balance(lengths, sequence_work(lengths, 1 / 27_000), 4, 16_384):
        work = work_of(bins, lengths)
        assert work == sorted(work, reverse=True)


def test_a_large_batch_is_shared_out_in_no_time() -> None:
    lengths = np.random.default_rng(0).integers(1, 8192, 20_000).tolist()
    started = time.perf_counter()
    balance(lengths, sequence_work(lengths, 1 / 27_000), 64, 16_384)
    assert time.perf_counter() - started < 5  # 0.3 s when alone; quadratic would be minutes


DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432,
    "vocab_size": 129280, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
}  # fmt: skip


QWEN3_NEXT = {
    "hidden_size": 2048, "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


def test_sizes_of_a_hybrid_model() -> None:
    """Qwen3-Next-80B-A3B, whose name has them rounded."""
    work = model_work(QWEN3_NEXT)
    assert work.weights == pytest.approx(80e9, rel=0.01)
    assert work.pair == 12 * 16 * 256 * 2  # of the layers with attention


def test_sizes_of_layers_of_one_part_each() -> None:
    """NVIDIA-Nemotron-3-Nano-30B-A3B, whose name has them rounded: 31.6 billion parameters, 3.2 of which a token passes
    without the embedding.
    """
    config = {
        "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "intermediate_size": 1856, "vocab_size": 131072, "mamba_num_heads": 64, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    }  # fmt: skip
    work = model_work(config)
    assert work.weights == pytest.approx(31.6e9, rel=0.01)
    assert work.passed_weights == pytest.approx(3.2e9, rel=0.03)
    assert work.pair == 6 * 32 * 128 * 2  # of the layers with attention


def test_sizes_of_layers_with_other_heads_where_attention_has_no_window() -> None:
    """Gemma 4 26B-A4B: 25.2 billion parameters, 3.8 of which a token passes."""
    config = {
        "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2,
        "attention_k_eq_v": True, "layer_types": 5 * [*5 * ["sliding_attention"], "full_attention"],
        "intermediate_size": 2112, "vocab_size": 262144, "tie_word_embeddings": True,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    }  # fmt: skip
    work = model_work(config)
    assert work.weights == pytest.approx(25.2e9, rel=0.01)
    assert work.passed_weights == pytest.approx(3.8e9, rel=0.01)
    assert work.pair == 25 * 16 * 256 * 2 + 5 * 16 * 512 * 2


@pytest.mark.parametrize(
    ("changes", "weights", "passed"),
    [
        ({}, 671e9, 37e9),
        # Kimi-K2: more experts, fewer heads
        (
            {"n_routed_experts": 384, "num_attention_heads": 64, "vocab_size": 163840, "first_k_dense_replace": 1},
            1.03e12,
            32e9,
        ),
    ],
)
def test_sizes_of_published_models(changes: dict[str, int], weights: float, passed: float) -> None:
    """As their reports give them, rounded."""
    work = model_work(DEEPSEEK_V3 | changes)
    assert work.weights == pytest.approx(weights, rel=0.01)
    assert work.passed_weights == pytest.approx(passed, rel=0.02)


def test_intermediate_size_may_be_that_of_an_expert() -> None:
    minimax_m2 = {
        "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 1536, "vocab_size": 200064, "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }  # fmt: skip
    work = model_work(minimax_m2)
    assert work.weights == pytest.approx(229e9, rel=0.01)
    assert work.routed_weights == 62 * 256 * 3 * 3072 * 1536


def test_many_tokens_touch_all_experts() -> None:
    work = model_work(DEEPSEEK_V3)
    assert work.touched_weights(1) == pytest.approx(work.passed_weights)
    assert work.touched_weights(10_000) == pytest.approx(work.weights - 7168 * 129280)  # but for the embedding


def test_weights_of_attention_and_embedding_are_told() -> None:
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    work = model_work(config | {"head_dim": 4, "intermediate_size": 16, "vocab_size": 32})
    assert work.attention_weights == 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8)  # queries, keys and values, output
    assert work.embedding_weights == 32 * 8


def test_sequence_flops_are_linear_and_quadratic() -> None:
    work = ModelWork(
        weights=100,
        passed_weights=10,
        routed_weights=0,
        expert_share=0.0,
        attention_weights=5,
        embedding_weights=90,
        pair=6,
    )
    assert work.sequence_flops(4) == 4 * 10 + 16 * 3
