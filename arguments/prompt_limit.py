"""Limits on prompt lengths, so that samples can be generated and trained."""

from __future__ import annotations

from dataclasses import dataclass

from miles_async.arguments import Arguments
from miles_async.arguments.data import DataArguments
from miles_async.arguments.evaluation_sets import EvaluationSet
from miles_async.arguments.model_files import read_config
from miles_async.arguments.server_groups import context_lengths


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Prompts with more tokens are skipped."""

    tokens: int
    reason: str  # which flag or model says so
    change: str  # what lets longer prompts in


def asked_limit(data: DataArguments, held_out: EvaluationSet | None = None) -> PromptLimit | None:
    """The limit that ``--rollout-max-prompt-len``, or the file of ``held_out`` prompts, asks for."""
    if held_out is not None and (tokens := held_out.max_prompt_len) is not None:
        return PromptLimit(tokens, f"max_prompt_len of {held_out.name} in --eval-config is {tokens}", "raise it")
    if (tokens := data.rollout_max_prompt_len) is None:
        return None
    return PromptLimit(tokens, f"--rollout-max-prompt-len is {tokens}", "raise --rollout-max-prompt-len")


def prompt_limit(arguments: Arguments, held_out: EvaluationSet | None = None) -> PromptLimit | None:
    """The lowest limit of prompts of training, or of ``held_out`` ones, by flags and by what engines can generate.

    Engines refuse a request whose prompt and response exceed their context. Trajectories of several turns have a
    separate limit; in one turn, a sample may exceed ``--max-tokens-per-gpu``. Raises ConfigurationError for a file of
    ``--server-groups`` that cannot be read.
    """
    limits = [asked] if (asked := asked_limit(arguments.data, held_out)) else []
    if arguments.sessions.is_multi_turn:
        most = trajectory_limit(arguments)
        reason = f"trajectories have at most {most} tokens (--max-tokens-per-gpu, or the context of model and engines)"
        limits.append(PromptLimit(most - 1, reason, "raise --max-tokens-per-gpu"))
    elif (context := engine_context(arguments)) is not None:
        if arguments.rollout.custom_generate_function_path is not None:
            reason = f"more than {context.tokens - 1} leave no room for a response in {context.name}"
            limits.append(PromptLimit(context.tokens - 1, reason, "leave them out"))
        else:
            flag, response = response_length(arguments, held_out)
            room = max(0, context.tokens - response)
            left = f"{flag} {response} leaves {room or 'none'} of {context.name}"
            limits.append(PromptLimit(room, left, f"lower {flag}"))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def trajectory_limit(arguments: Arguments) -> int:
    """Tokens that a trajectory of several turns may have, prompt included."""
    most, context = arguments.micro_batch_tokens, engine_context(arguments)
    return most if context is None else min(most, context.tokens)


def response_length(arguments: Arguments, held_out: EvaluationSet | None = None) -> tuple[str, int]:
    """(Flag, tokens that a response may have)."""
    if held_out is not None:
        return held_out.response_length(arguments.evaluation, arguments.rollout)
    return "--rollout-max-response-len", arguments.rollout.rollout_max_response_len


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens that an engine may have for prompt and response."""

    tokens: int
    name: str


def engine_context(arguments: Arguments) -> Context | None:
    """The smaller of the model's positions and the context that flags leave engines; None if neither is known."""
    path = arguments.model.hf_checkpoint
    positions = read_config(path).get("max_position_embeddings") if path is not None else None
    contexts = [
        Context(length, f"the {length} tokens of --sglang-context-length") for length in context_lengths(arguments)
    ]
    if isinstance(positions, int):
        contexts.append(Context(positions, f"the model's {positions} positions"))
    return min(contexts, key=lambda context: context.tokens, default=None)
