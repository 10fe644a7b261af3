"""Tasks of verifiers 0.4: `--environment verifiers:verifiers_sums`."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)


class Sums(vf.Taskset[Sum]):
    def load(self):
        for a in range(10, 100):
            for b in range(10, 100):
                yield Sum(SumData(prompt=f"{a}*{b}=?", answer=str(a * b)), self.config.task)
