"""A run that is paused is one that can be ended."""

import signal
import subprocess
import sys

PAUSED = """
import math, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import offbeat

inputs = torch.randn(80, 4)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
inputs[40:] = math.nan
model = nn.Linear(4, 2)
monitor = offbeat.AsyncTrainingMonitor(
    model, remediation_strategy="pause", callbacks=lambda alert: print("paused", flush=True)
)
trainer = offbeat.FaultTolerantTrainer(model, checkpoint_dir=sys.argv[1])
trainer.train(dataset=data, batch_size=8, optimizer=offbeat.optim.SGD(lr=0.1), loss_fn=nn.CrossEntropyLoss())
"""


def test_sigterm_lets_a_paused_run_go_on_to_where_it_is_saved(tmp_path):
    command = [sys.executable, "-c", PAUSED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "paused\n"
        run.send_signal(signal.SIGTERM)
        try:
            assert run.wait(30) == 128 + signal.SIGTERM
        finally:
            run.kill()
    assert list(tmp_path.glob("*/manifest*")), list(tmp_path.iterdir())
