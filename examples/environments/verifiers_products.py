"""A tool environment of verifiers 0.3: `--environment verifiers:verifiers_products`."""

import verifiers as vf
from datasets import Dataset


def calculator(expression: str) -> str:
    """Works out a product of two whole numbers, such as 17*23."""
    a, _, b = expression.partition("*")
    return str(int(a) * int(b))


def right(completion, answer) -> float:
    last = completion[-1]  # without content, if it calls a tool and there is no room for another turn
    return float(last.role == "assistant" and (last.content or "").strip() == answer)


def load_environment():
    rows = [{"question": f"{a}*{b}=?", "answer": str(a * b)} for a in range(10, 100) for b in range(10, 100)]
    dataset = Dataset.from_list(rows).shuffle(seed=1)
    return vf.ToolEnv(dataset=dataset, tools=[calculator], rubric=vf.Rubric(funcs=[right]), max_turns=3)
