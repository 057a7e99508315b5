"""Training that goes on after a crash: `FaultTolerantTrainer`, and the checkpoints that it keeps.

What only looks at checkpoints runs without torch, so nothing is loaded here.
"""
