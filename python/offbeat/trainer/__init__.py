"""Training with one call, alone or with others, in whichever way of the family a keyword says."""

from offbeat.trainer.trainer import AsyncTrainer

__all__ = ["AsyncTrainer"]
