"""Where numbers go as a run goes on: trackers, what a server's status measures, and pictures of a run.

Nothing here imports torch, but TensorBoard's writer, which is torch's.
"""

from offbeat.tracking.base import Tracker
from offbeat.tracking.files import CSV, JSONL
from offbeat.tracking.run import Moment, Run
from offbeat.tracking.tensorboard import TensorBoard
from offbeat.tracking.watch import watch

__all__ = ["CSV", "JSONL", "Moment", "Run", "TensorBoard", "Tracker", "watch"]
