"""A factor of 1.001 anywhere in a formula is noticed by the comparison with its reference.

# covers: C12
"""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.unit.algorithms.cases import CASES, SEEDS, Case, disagreement
from tests.unit.algorithms.formula_errors import Errors, instrumented

MODULES = (
    "aggregation",
    "corrections.age",
    "corrections.importance",
    "corrections.opsm",
    "corrections.reject",
    "distillation",
    "kl",
    "ratio",
    "sequences",
    "losses.covariance",
    "losses.dppo",
    "losses.gmpo",
    "losses.gspo",
    "losses.ppo_clip",
    "losses.sapo",
    "losses.sat",
    "losses.sft",
    "losses.weighted_reinforce",
    "token_advantages.gae",
    "token_advantages.kl_in_reward",
    "value_loss",
    "whole_batch.second_moment",
    "whole_batch.whiten",
)

TYPE, METRIC = "only its shape, type or presence counts", "it is for a metric"
HARMLESS = {
    "aggregation": {"batch.loss_mask": TYPE, "tokens": TYPE, "loss_tokens(batch)": TYPE},
    "sequences": {"values": TYPE, "total": TYPE},
    "corrections.reject": {
        "found": TYPE,
        "(bounded_exp(difference) < self._veto).to(difference.dtype)": "only whether it is 0 counts",
    },
    "losses.sapo": {"advantages": TYPE},
    "losses.sat": {"of_batch": TYPE, "values": "only how many there are counts", "1e-9": "far below one token"},
    "token_advantages.gae": dict.fromkeys(("batch.loss_mask", "batch.advantages", "self._kl_coef"), TYPE),
    "value_loss": {
        **dict.fromkeys(("bounded", "loss", "(bounded > loss).to(loss.dtype)"), METRIC),
        **dict.fromkeys(("total", "clipped", "returns"), METRIC),
    },
    "losses.dppo": {**dict.fromkeys(("now", "old"), "only which is larger counts"), "TINY": "far below 1 - p"},
    "losses.covariance": {
        **dict.fromkeys(
            (
                "count",
                "batch.loss_mask",
                "values",
                "values.double()",
                "batch.loss_mask.double()",
                "values.double() * batch.loss_mask.double()",
                "(values.double() * batch.loss_mask.double()).sum()",
                "torch.stack([(values.double() * batch.loss_mask.double()).sum() for values in _terms(batch)])",
                "torch.stack(sums)",
                "torch.stack(sums).sum(0)",
                "gather(torch.stack(sums).sum(0))",
                "gather(torch.stack(sums).sum(0)).view(-1, 3)",
                "gather(torch.stack(sums).sum(0)).view(-1, 3).sum(0)",
            ),
            "a factor of the count and of both sums cancels",
        ),
        **dict.fromkeys(
            (
                "_lots(batch)",
                "2.0",
                "torch.where((found > self._low) & (found < self._high) & (batch.loss_mask != 0), _lots(batch), 2.0)",
                "of_batch",
                "torch.cat([of_batch[of_batch < 1] for of_batch in lots])",
                "gather(torch.cat([of_batch[of_batch < 1] for of_batch in lots]))",
                "gather(torch.cat([of_batch[of_batch < 1] for of_batch in lots])).sort().values",
                "ascending",
                "ascending[: max(1, int(self._ratio * tokens))][-1:].sum()",
                "last",
                "_shifted(mixed, 11).double()",
                "2.0**-53",
                "_shifted(mixed, 11).double() * 2.0**-53",
                "found",
            ),
            "no two lots, or covariances, are so close to each other",
        ),
    },
    "whole_batch.second_moment": {"kept": "it lies between the moments of two tokens"},
    "whole_batch.whiten": {
        **dict.fromkeys(
            (
                "batch.advantages.double() ** power",
                "batch.loss_mask",
                "batch.loss_mask.double()",
                "batch.advantages.double() ** power * batch.loss_mask.double()",
                "(batch.advantages.double() ** power * batch.loss_mask.double()).sum()",
                "torch.stack([(batch.advantages.double() ** power * batch.loss_mask.double()).sum() "
                "for power in (0, 1, 2)])",
                "torch.stack(sums)",
                "torch.stack(sums).sum(0)",
                "whole.gather(torch.stack(sums).sum(0))",
                "whole.gather(torch.stack(sums).sum(0)).view(-1, 3)",
                "whole.gather(torch.stack(sums).sum(0)).view(-1, 3).sum(0)",
            ),
            "a factor of the count and of both sums cancels",
        ),
        "EPSILON": "far below the variance",
    },
    "losses.ppo_clip": {
        **dict.fromkeys(("clipped", "plain", "loss", "most"), METRIC),
        **dict.fromkeys(("(clipped < plain).float()", "(loss > most).float()"), METRIC),
    },
}
"""Module → expressions that may be wrong by a thousandth somewhere without a consequence → the reason."""

CANCELLED = {
    "sequences": {"sums.index_add(0, sequence_of_token(offsets), values)": "of the sum and of the number of terms"}
}


@pytest.fixture(scope="module")
def all_errors() -> Iterator[tuple[dict[str, Errors], dict[tuple[str, int], list[tuple[Case, int]]]]]:
    """Errors by module, and for each expression the steps on which the factor changes its value."""
    with contextlib.ExitStack() as stack:
        errors = {
            name: stack.enter_context(instrumented(importlib.import_module(f"miles_async.algorithms.{name}")))
            for name in MODULES
        }
        reached = defaultdict(list)
        for case in CASES:
            for seed in SEEDS:
                for of_module in errors.values():
                    of_module.reached = set()
                assert disagreement(case, seed) == ""
                for name, of_module in errors.items():
                    for number in of_module.reached:
                        reached[name, number].append((case, seed))
        yield errors, reached


@pytest.mark.parametrize("name", MODULES)
def test_an_error_of_a_thousandth_is_noticed(
    name: str, all_errors: tuple[dict[str, Errors], dict[tuple[str, int], list[tuple[Case, int]]]]
) -> None:
    errors, reached = all_errors[0][name], all_errors[1]
    steps = {number: on_steps for (module, number), on_steps in reached.items() if module == name}
    assert steps, "no case computes anything here"
    harmless = HARMLESS.get(name, {}) | CANCELLED.get(name, {})
    unnoticed = []
    for number, on_steps in steps.items():
        if errors.expressions[number].split(": ", 1)[1] in harmless:
            continue
        with errors.in_expression(number):
            if not any(disagreement(case, seed) for case, seed in on_steps):
                unnoticed.append(errors.expressions[number])
    assert unnoticed == []
