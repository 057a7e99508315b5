"""A run that diverges: noticed, told, and mended where something can be done."""

from offbeat.monitor.alert import Alert, Recovery, Release
from offbeat.monitor.monitor import AsyncTrainingMonitor
from offbeat.monitor.report import MonitorReport

__all__ = ["Alert", "AsyncTrainingMonitor", "MonitorReport", "Recovery", "Release"]
