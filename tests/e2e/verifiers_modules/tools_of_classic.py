"""For verifiers 0.3: a tool that is given what the model doesn't see."""

import verifiers as vf
from datasets import Dataset


class Calculator(vf.StatefulToolEnv):
    def __init__(self, **options):
        super().__init__(max_turns=4, **options)
        self.add_tool(self.calculator, args_to_skip=["call"])

    async def calculator(self, expression: str, call: int) -> str:
        """Works out a product of two whole numbers."""
        a, _, b = expression.partition("*")
        return f"{int(a) * int(b)} by call {call}"

    async def setup_state(self, state):
        state["calls"] = 0
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **_):
        state["calls"] += 1
        return {**tool_args, "call": state["calls"]}


def right(completion, answer) -> float:
    return float(completion[-1].content.strip() == answer)


def load_environment():
    rows = [{"question": f"{n}*{n}=?", "answer": f"{n * n} by call 2"} for n in range(10, 100)]
    return Calculator(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
