"""A model's structure as text, so that a worker can build it without the user's code.

A blueprint is data: names of classes out of the table in `layers.py`, their arguments, which modules and
which parameters are one object, what is frozen, and dtypes other than float32. No pickle, no code, no import
by name. It describes `torch.nn` layers from one tensor to one tensor, nested in `Sequential`, nothing else.
"""

from offbeat.blueprint.build import build
from offbeat.blueprint.describe import describe

__all__ = ["build", "describe"]
