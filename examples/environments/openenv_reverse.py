"""A server of OpenEnv: `uvicorn --app-dir examples/environments openenv_reverse:app`."""

import random

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    digits: str


class Shown(Observation):
    text: str


class Reverse(Environment[Said, Shown, State]):
    """Digits to reverse, twice: half a point for each round whose digits are all right, less for fewer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.random, self.rounds = random.Random(seed), 0
        return self.shown(None)

    def step(self, action, timeout_s=None, **kwargs):
        right = sum(said == digit for said, digit in zip(action.digits, reversed(self.digits), strict=False))
        self.rounds += 1
        return self.shown(right / len(self.digits) / 2)

    def shown(self, reward):
        self.digits = "".join(self.random.choices("0123456789", k=4))
        return Shown(text=f"rev {self.digits}", reward=reward, done=self.rounds == 2)

    @property
    def state(self):
        return State(step_count=self.rounds)


app = create_fastapi_app(Reverse, Said, Shown, max_concurrent_envs=512)
