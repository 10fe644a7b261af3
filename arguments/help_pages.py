"""``--help`` in three sizes: what most runs set, one group or what a word finds, and everything (``--help-all``)."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from miles_async.arguments.specification import argument_groups, group_flags, group_title
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError

Section = tuple[str | None, str | None, Sequence[argparse.Action]]
"""Title, description and flags of a part of a page."""

MOST_NEEDED: Mapping[str, str] = {
    "device": "where models run: cpu or cuda",
    "actor_num_nodes": "nodes that train",
    "actor_num_gpus_per_node": "GPUs per node that train (CPU: processes)",
    "rollout_num_gpus": "GPUs that generate (CPU: engines)",
    "rollout_num_gpus_per_engine": "GPUs per engine",
    "hf_checkpoint": "Hugging Face directory of the model",
    "tensor_model_parallel_size": "ranks that share each layer (also pipeline-,",
    "pipeline_model_parallel_size": "context- and expert-model-parallel-size)",
    "lora_rank": "train adapters of this rank; 0: all weights",
    "prompt_data": "prompts: .jsonl, .parquet, hf:NAME",
    "input_key": "column with the prompt",
    "label_key": "column with the answer",
    "num_rollout": "rollout steps to train",
    "rollout_batch_size": "prompts per rollout step",
    "n_samples_per_prompt": "samples of each prompt",
    "rollout_max_response_len": "tokens that a response may have",
    "rollout_temperature": "sampling temperature",
    "environment_path": "your Environment of turns (module:attr)",
    "rm_type": "reward by name",
    "custom_rm_path": "your own reward (module:attr)",
    "group_filter": "groups to replace, such as zero_variance",
    "max_weight_staleness": "largest age of trained tokens, in versions",
    "max_rollout_lead": "batches that generation may be ahead",
    "on_policy": "generate and train strictly in turn",
    "advantage_estimator": "grpo, rloo, ...",
    "policy_loss": "ppo_clip, gspo, cispo, ...",
    "eps_clip": "PPO clip range (also --eps-clip-high)",
    "use_rollout_logprobs": "correct for age: ratio to the engines",
    "use_tis": "correct for age: importance weights",
    "use_kl_loss": "KL to the reference (with --kl-loss-coef)",
    "lr": "learning rate",
    "global_batch_size": "samples per optimizer step",
    "max_tokens_per_gpu": "tokens of a micro-batch per GPU",
    "weight_transport": "how new weights reach the engines",
    "server_groups": "TOML file of engine groups",
    "save": "directory for checkpoints",
    "save_interval": "rollout steps between checkpoints",
    "load": "resume from this checkpoint",
    "save_hf": "directory for the final Hugging Face model",
    "eval_prompt_data": "held-out prompts",
    "eval_interval": "rollout steps between evaluations",
    "run_dir": "directory for logs, metrics and the ledger",
    "use_wandb": "log to Weights & Biases",
}
"""Field → its line in the short help. The whole text of a flag stands where it is declared."""


def short_page(parser: argparse.ArgumentParser) -> str:
    """Text of ``--help``: the most needed flags, a line each, and how to see the others."""
    lines = [f"Usage: {parser.usage}", "", str(parser.description), "What most runs set:", ""]
    for group in argument_groups():
        flags = [one for one in group_flags(group) if one.name in MOST_NEEDED]
        lines += [f"{group_title(group)}:"] if flags else []
        lines += [f"  {one.flag:<31} {MOST_NEEDED[one.name]}" for one in flags]
    lines += [
        "",
        "  @FILE, @preset:NAME             flags from a file, from an installed one",
        "  --config FILE                   flags from a TOML file (--print-config: one)",
        "  --dry-run                       check flags, model and data, and exit",
        "  --help GROUP                    explain all flags of a group",
        "  --help WORD ...                 explain flags that have these words",
        "  --help-all                      explain all flags",
        "",
        textwrap.fill(f"Groups: {', '.join(group_title(group).lower() for group in argument_groups())}.", 80),
        f"Example: {parser.prog} @examples/quickstart/reverse.args --lr 1e-3 --dry-run",
    ]
    return "\n".join(lines) + "\n"


def topic_page(parser: argparse.ArgumentParser, topic: Sequence[str]) -> str:
    """The whole group of that name, or else every flag with these words. Raises ConfigurationError if there is none."""
    name = " ".join(topic).lower()
    names = {group_title(group).lower(): group for group in argument_groups()}
    title = group_title(names.get(name, name)) if name in {*names, *names.values()} else None
    found: list[Section] = [
        (group.title, group.description, group._group_actions)
        for group in parser._action_groups
        if group.title == title
    ] or [*_with_words(parser, topic)]
    if not found:
        raise ConfigurationError(
            f"--help {name}: no group has this name, and no flag or its text these words{did_you_mean(name, names)}; "
            f"groups: {', '.join(names)}; --help-all lists all flags, --help-megatron Megatron's"
        )
    return _page(parser, found)


def _with_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterable[Section]:
    patterns = [re.compile(rf"\b{re.escape(word.lstrip('-').replace('_', '-'))}", re.IGNORECASE) for word in words]
    for group in parser._action_groups:
        texts = {action: f"{' '.join(action.option_strings)} {action.help}" for action in group._group_actions}
        if found := [one for one, text in texts.items() if all(pattern.search(text) for pattern in patterns)]:
            yield group.title, None, found


def _page(parser: argparse.ArgumentParser, sections: Iterable[Section]) -> str:
    formatter = parser._get_formatter()
    for title, description, actions in sections:
        formatter.start_section(title)
        formatter.add_text(description)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


class Help(argparse.Action):
    """``--help [GROUP | WORD ...]``."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: Any, *__: object) -> NoReturn:
        topic = [str(value) for value in values or ()]
        print(topic_page(parser, topic) if topic else short_page(parser), end="")
        parser.exit()
