"""How long prompts may be, so that their samples can be generated and trained."""

from __future__ import annotations

from dataclasses import dataclass

from arguments import Arguments
from arguments.data import DataArguments
from arguments.model_files import read_config


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Prompts with more tokens are skipped."""

    tokens: int
    reason: str  # which flag or model says so
    change: str  # what lets longer prompts in


def asked_limit(data: DataArguments) -> PromptLimit | None:
    """The limit that ``--rollout-max-prompt-len`` asks for."""
    tokens = data.rollout_max_prompt_len
    if tokens is None:
        return None
    return PromptLimit(tokens, f"--rollout-max-prompt-len is {tokens}", "raise --rollout-max-prompt-len")


def prompt_limit(arguments: Arguments, *, evaluation: bool = False) -> PromptLimit | None:
    """The lowest limit of training prompts, or of held-out ones: what is asked for, and what can be generated at all.

    Engines refuse a request whose prompt and response exceed the model's positions. Trajectories of several turns have
    a limit of their own; in one turn, a sample may exceed ``--max-tokens-per-gpu``.
    """
    limits = [asked] if (asked := asked_limit(arguments.data)) else []
    positions = model_positions(arguments)
    if arguments.sessions.is_multi_turn:
        most = trajectory_limit(arguments)
        reason = f"trajectories have at most {most} tokens (--max-tokens-per-gpu, the model's positions)"
        limits.append(PromptLimit(most - 1, reason, "raise --max-tokens-per-gpu"))
    elif positions is not None and arguments.rollout.custom_generate_function_path is not None:
        limits.append(PromptLimit(positions - 1, f"the model has {positions} positions", "leave them out"))
    elif positions is not None:
        flag, response = response_length(arguments, evaluation=evaluation)
        room = positions - response
        reason = f"{flag} {response} leaves {room} of the model's {positions} positions"
        limits.append(PromptLimit(room, reason, f"lower {flag}"))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def trajectory_limit(arguments: Arguments) -> int:
    """Tokens that a trajectory of several turns may have, prompt included."""
    most = arguments.optimizer.max_tokens_per_gpu
    return min(most, model_positions(arguments) or most)


def response_length(arguments: Arguments, *, evaluation: bool = False) -> tuple[str, int]:
    """(Flag, tokens that a response may have)."""
    held_out = arguments.evaluation.eval_max_response_len
    if evaluation and held_out is not None:
        return "--eval-max-response-len", held_out
    return "--rollout-max-response-len", arguments.rollout.rollout_max_response_len


def model_positions(arguments: Arguments) -> int | None:
    """``max_position_embeddings`` of the model; None where its config.json does not say."""
    path = arguments.model.hf_checkpoint
    positions = read_config(path).get("max_position_embeddings") if path is not None else None
    return positions if isinstance(positions, int) else None
