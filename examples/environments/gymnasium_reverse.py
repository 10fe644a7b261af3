"""A game of Gymnasium: `--environment gymnasium:gymnasium_reverse:Reverse-v0`."""

import gymnasium
from gymnasium.spaces import Text


class Reverse(gymnasium.Env):
    """Digits to reverse, twice: half a point for each round whose digits are all right, less for fewer."""

    observation_space = Text(9, charset="rev 0123456789")
    action_space = Text(6, min_length=0, charset="0123456789")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.rounds = 0
        return self.next_digits(), {}

    def step(self, action):
        right = sum(said == digit for said, digit in zip(action, reversed(self.digits), strict=False))
        reward = right / len(self.digits) / 2
        self.rounds += 1
        return self.next_digits(), reward, self.rounds == 2, False, {}

    def next_digits(self):
        self.digits = "".join(self.np_random.choice(list("0123456789"), 4))
        return f"rev {self.digits}"


gymnasium.register("Reverse-v0", entry_point="gymnasium_reverse:Reverse")
