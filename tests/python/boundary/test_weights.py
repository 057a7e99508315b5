"""What a late push is worth: every policy's closed form, through two clients of known staleness."""

import numpy as np
import pytest

import offbeat
from offbeat import optim, staleness
from offbeat.errors import StateError

MODEL = {"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32)}
ZERO = {name: np.zeros_like(a) for name, a in MODEL.items()}
ONE = {name: np.ones_like(a) for name, a in MODEL.items()}

CLOSED_FORMS = [
    ("constant", lambda tau: 1.0),
    ("adaptive_lr", lambda tau: 0.9**tau),
    (staleness.AdaptiveLR(factor=0.5), lambda tau: 0.5**tau),
    ("inverse", lambda tau: 1 / (1 + tau)),
    ("polynomial", lambda tau: (1 + tau) ** -0.5),
    (staleness.Polynomial(a=2.0), lambda tau: (1 + tau) ** -2.0),
    ("hinge", lambda tau: 1.0 if tau <= 4 else 1 / (10 * (tau - 4) + 1)),
    (staleness.Hinge(a=0.5, b=1), lambda tau: 1.0 if tau <= 1 else 1 / (0.5 * (tau - 1) + 1)),
    (["inverse", staleness.AdaptiveLR(0.5)], lambda tau: 0.5**tau / (1 + tau)),
]


def push_at(tau, fast, slow, late=ONE):
    """Let `slow` push `late` when it has missed exactly tau updates; return the receipt."""
    slow.pull()
    for _ in range(tau):
        fast.pull()
        assert fast.push(ZERO).applied
    return slow.push(late)


@pytest.mark.parametrize("transaction", ["fragment", "model"])
@pytest.mark.parametrize(("policy", "weight"), CLOSED_FORMS, ids=lambda v: str(v) if not callable(v) else "")
def test_weight_is_the_closed_form_of_the_staleness(host, policy, weight, transaction):
    with (
        host.serving(
            MODEL, optimizer=optim.SGD(lr=1.0), staleness_policy=policy, transaction=transaction
        ) as server,
        offbeat.Client(server.address) as fast,
        offbeat.Client(server.address) as slow,
    ):
        for tau in range(8):
            before = fast.pull()["w"][0]
            receipt = push_at(tau, fast, slow)
            expected = weight(tau)
            assert receipt.staleness == tau
            assert receipt.weight == pytest.approx(expected, rel=1e-12)
            assert receipt.verdict == ("admit" if expected == 1.0 else "damp")
            moved = before - fast.pull()["w"][0]
            assert moved == pytest.approx(expected, abs=1e-6)  # of numbers up to 8, in float32


@pytest.mark.parametrize("transaction", ["fragment", "model"])
def test_damped_push_moves_w_times_as_far_through_the_servers_momentum(host, transaction):
    random = np.random.default_rng(0)
    late = {name: random.standard_normal(a.shape, np.float32) for name, a in MODEL.items()}

    def moved(tau):
        with (
            host.serving(
                MODEL,
                optimizer=optim.SGD(lr=0.1, momentum=0.9),
                momentum_correction=False,
                staleness_policy=staleness.AdaptiveLR(factor=0.6),
                transaction=transaction,
            ) as server,
            offbeat.Client(server.address) as fast,
            offbeat.Client(server.address) as slow,
        ):
            receipt = push_at(tau, fast, slow, late)
            out = fast.pull()
            for _ in range(200):
                fast.push_pull(ZERO, out=out)
            return receipt.weight, out

    one, far = moved(0)
    assert one == 1.0
    for tau in (1, 3):
        w, near = moved(tau)
        assert w == pytest.approx(0.6**tau)
        for name in MODEL:
            assert np.abs(near[name] - w * far[name]).max() <= 1e-5 * np.abs(w * far[name]).max()


def test_staler_than_the_bound_is_rejected_and_at_the_bound_is_not(host):
    with (
        host.serving(
            MODEL, optimizer=optim.SGD(lr=1.0), staleness_policy=staleness.GradientFiltering(max_staleness=2)
        ) as server,
        offbeat.Client(server.address) as fast,
        offbeat.Client(server.address) as slow,
    ):
        assert push_at(2, fast, slow).applied
        receipt = push_at(3, fast, slow)
        assert (receipt.verdict, receipt.reason, receipt.weight) == ("reject", "stale", 0.0)


def test_momentum_correction_of_one_client_is_torchs_nesterov_bit_for_bit(host):
    import torch

    random = np.random.default_rng(3)
    start = {"w": random.standard_normal(33, np.float32)}
    parameter = torch.nn.Parameter(torch.from_numpy(start["w"].copy()))
    theirs = torch.optim.SGD(
        [parameter], lr=0.01, momentum=0.9, weight_decay=1e-3, nesterov=True, foreach=False
    )
    spec = optim.SGD(lr=0.01, momentum=0.9, weight_decay=1e-3)
    with host.serving(start, optimizer=spec) as server, offbeat.Client(server.address) as client:
        assert client.run["momentum_correction"] is True
        ours = client.pull()
        for _ in range(200):
            gradient = random.standard_normal(33, np.float32)
            parameter.grad = torch.from_numpy(gradient.copy())
            theirs.step()
            assert client.push_pull({"w": gradient}, out=ours).applied
    assert np.array_equal(ours["w"].view(np.uint32), parameter.detach().numpy().view(np.uint32))


CORRECTED = optim.SGD(lr=1.0, momentum=0.5)
"""The first gradient of 1 is sent as 1 + 0.5 · 1, the next as 1 + 0.5 · 1.5, where the velocity was kept."""


def test_new_incarnation_begins_without_velocity(host):
    with host.serving(MODEL, optimizer=CORRECTED) as server:
        for _ in range(2):
            with offbeat.Client(server.address, worker_id="same") as client:
                moved = []
                for _ in range(2):
                    before = client.pull()["w"]
                    client.push(ONE)
                    moved.append(float((before - client.pull()["w"])[0]))
            assert moved == [1.5, 1.75]


def test_corrected_momentum_takes_no_memory_on_the_server(host):
    def held(**keywords):
        with host.serving(MODEL, optimizer=CORRECTED, **keywords) as server:
            with offbeat.Client(server.address) as client:
                client.pull()
                assert client.push(ONE).applied
            return server.status()["memory"]["roots_bytes"]

    values = sum(a.nbytes for a in MODEL.values())
    assert (held(), held(momentum_correction=False)) == (values, 2 * values)


def test_velocity_of_a_push_that_was_applied_in_part_is_kept(host):
    large = np.zeros(65_536, np.float32)  # a fragment of its own
    start = {"a": large, "b": np.full_like(large, 3e38)}
    with host.serving(start, optimizer=CORRECTED) as server, offbeat.Client(server.address) as client:
        client.pull()
        receipt = client.push({"a": large + 1, "b": large - 2e38})  # b would overflow
        assert (receipt.applied, receipt.reason) == (True, "nonfinite_result")
        after = client.pull()
        assert (after["a"][0], after["b"][0]) == (-1.5, np.float32(3e38))
        assert client.push({"a": large}).applied
        assert client.pull()["a"][0] == -1.5 - 0.25


def test_client_that_learns_of_the_momentum_after_its_pull_is_told_to_pull_again(host):
    with host.serving(MODEL) as server, offbeat.Client(server.address) as client:
        client.pull()
        client.set_optimizer(optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1))
        with pytest.raises(StateError, match="pull once more"):
            client.push(ONE)
        client.pull()
        assert client.push(ONE).applied
