"""The worker: trains a torch module against a parameter server."""

from offbeat.worker.worker import AsyncWorker

__all__ = ["AsyncWorker"]
