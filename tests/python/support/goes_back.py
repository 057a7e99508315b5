"""What a "rollback" acts on, without a model: they keep checkpoints by their steps, or do not tell which."""

from offbeat.errors import ConfigError

__all__ = ["GoesFurther", "KeepsNothing", "Steps"]


class Steps:
    """Keeps a checkpoint of each so many steps, and knows to which it went back."""

    def __init__(self, every=10, *, newest=10**9, num_kept=30):
        self.every, self.newest, self.num_kept = every, newest, num_kept
        self.began_step, self.went = 0, []

    def checkpoint_steps(self):
        newest = min(self.began_step // self.every * self.every, self.newest)
        return list(range(newest, 0, -self.every))[: self.num_kept]

    def rollback(self, step=None):
        self.went.append(step)
        return step


class KeepsNothing(Steps):
    def checkpoint_steps(self):
        return []

    def rollback(self, step=None):
        raise ConfigError("there is no checkpoint yet")


class GoesFurther:
    """Goes further back by each call, and does not tell which steps it has."""

    def __init__(self):
        self.num_calls = 0

    def rollback(self, version=None, /):
        del version
        self.num_calls += 1
        return "what was kept before"
