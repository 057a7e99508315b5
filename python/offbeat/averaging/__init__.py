"""Models that are trained apart and averaged now and then, and the methods of averaging.

A method is given by its name, or as an object where its numbers are to be others than the papers'.
"""

from offbeat.averaging.averager import AsyncModelAverager
from offbeat.averaging.methods import BMUF, EASGD, Average, DiLoCo, Gossip, Method, SlowMo

__all__ = ["BMUF", "EASGD", "AsyncModelAverager", "Average", "DiLoCo", "Gossip", "Method", "SlowMo"]
