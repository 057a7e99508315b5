"""What the log and the history call an optimizer."""

import json

import pytest

from offbeat import optim
from offbeat.worker import words


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (optim.SGD(lr=0.1, momentum=0.9), "SGD(lr=0.1, momentum=0.9)"),
        (
            optim.AdamW(lr=0.1, weight_decay=0.5),
            "AdamW(lr=0.1, betas=[0.9, 0.999], eps=1e-08, weight_decay=0.5)",
        ),
        (optim.Adam(lr=0.1), "Adam(lr=0.1, betas=[0.9, 0.999], eps=1e-08)"),
    ],
)
def test_an_optimizer_on_the_server_is_called_as_its_user_did(spec, said):
    run = json.dumps({"optimizer": spec.spec(), "momentum_correction": False})
    assert words.of_run(run) == f"{said} on the server"
