"""For verifiers 0.4: a tool with the episode's state."""

import verifiers.v1 as vf

__all__ = ["Products"]


class Calls(vf.State):
    calls: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, Calls]):
    TOOL_PREFIX = None

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Works out a product of two whole numbers."""
        self.state.calls += 1
        a, _, b = expression.partition("*")
        return str(int(a) * int(b)) if a.isdigit() and b.isdigit() else "error"


class ProductData(vf.TaskData):
    answer: str


class Product(vf.Task[ProductData, Calls]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right_by_tool(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer and trace.state.calls > 0)


class Products(vf.Taskset[Product]):
    def load(self):
        for a in range(10, 100):
            for b in range(10, 100):
                yield Product(ProductData(prompt=f"{a}*{b}=?", answer=str(a * b)), self.config.task)


if __name__ == "__main__":  # as which verifiers starts the tools' server
    Calculator.run()
