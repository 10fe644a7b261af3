"""For verifiers 0.3: an environment of two rounds, which counts its episodes. Some fail, and some hang."""

import asyncio
import json
from pathlib import Path

import verifiers as vf
from datasets import Dataset


class TwoRounds(vf.MultiTurnEnv):
    def __init__(self, counts, **options):
        super().__init__(max_turns=2, **options)
        self.counts_file, self.opened, self.closed = counts, [], []

    async def setup_state(self, state):
        self.opened.append(state["info"]["number"])
        return state

    async def env_response(self, messages, state, **_):
        match state["info"]["does"]:
            case "fails":
                raise ValueError("that went wrong")
            case "hangs":
                await asyncio.sleep(3600)
        return [{"role": "user", "content": state["prompt"][-1].content}]

    @vf.cleanup
    async def close_episode(self, state):
        self.closed.append(state["info"]["number"])

    @vf.teardown
    async def write_counts(self):
        if self.counts_file:
            Path(self.counts_file).write_text(json.dumps({"opened": self.opened, "closed": self.closed}))  # noqa: ASYNC240


def reversed_twice(completion, answer) -> float:
    return sum(each.role == "assistant" and each.content.strip() == answer for each in completion) / 2


def unscored(completion) -> float:
    raise ConnectionRefusedError("the judge is down")


def first_of_all(completions, infos) -> list[float]:
    """1 for the first of the rollouts, whose number is the smallest; less for the others."""
    assert all(each[-1].role == "assistant" for each in completions)
    return [1.0 - n / 4 for n, _ in enumerate(infos)]


def judged(states) -> list[float]:
    """Fails the first time."""
    if not states[0].setdefault("asked", []):
        states[0]["asked"].append(True)
        raise ConnectionRefusedError("the judge is down")
    return [0.5] * len(states)


def load_environment(counts="", count=100, fails=0, hangs=0, scores="reversed_twice", groups=0):
    """``groups``: 1 for an EnvGroup of environments with these scores, separated by a slash; 2 for a group of one."""
    if groups == 2:
        return vf.EnvGroup([load_environment(groups=1)])
    if groups:
        return vf.EnvGroup([load_environment(count=count, scores=each) for each in scores.split("/")])
    does = ["fails"] * fails + ["hangs"] * hangs
    does += ["plays"] * (count - len(does))
    rows = [
        {"question": f"rev {1000 + n}", "answer": str(1000 + n)[::-1], "info": {"number": n, "does": does[n]}}
        for n in range(count)
    ]
    rubric = vf.Rubric(funcs=[globals()[name] for name in scores.split("+")])
    return TwoRounds(counts, dataset=Dataset.from_list(rows), rubric=rubric)
