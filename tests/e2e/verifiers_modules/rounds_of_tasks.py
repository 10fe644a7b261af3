"""For verifiers 0.4: an environment that talks to the policy, and asks the same again."""

import verifiers.v1 as vf

__all__ = ["Numbers", "TwoRounds"]


class NumberData(vf.TaskData):
    digits: str


class Number(vf.Task[NumberData, vf.State]):
    @vf.reward
    async def reversed_twice(self, task, trace) -> float:
        replies = [str(node.message.content).strip() for node in trace.nodes if node.sampled]
        return sum(reply == task.digits[::-1] for reply in replies) / 2


class Numbers(vf.Taskset[Number]):
    def load(self):
        for number in range(1000, 1100):
            yield Number(NumberData(prompt=f"rev {number}", digits=str(number)), self.config.task)


class TwoRoundsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    runs: int = 1  # of the policy in an episode


class TwoRounds(vf.Env[TwoRoundsConfig]):
    async def run(self, task, agents):
        for _ in range(self.config.runs):
            async with agents.agent.interaction(task) as talk:
                if not (await talk.turn()).terminated:
                    await talk.turn(task.data.prompt_text)
