"""Training that happens in this process: its optimizer, whichever way a user says which.

What trains alone, or averages what was trained alone, builds on this.
"""

from offbeat.local.optimizer import LocalOptimizer, check_holds, check_steps_alone

__all__ = ["LocalOptimizer", "check_holds", "check_steps_alone"]
