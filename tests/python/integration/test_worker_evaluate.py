"""`evaluate` measures the newest model and leaves no trace."""

import logging
import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ConfigError
from support.follow import follow

SPEC = offbeat.optim.SGD(lr=0.5)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def dataset(length=50):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 4, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def expected(model):
    x, y = dataset().tensors
    modes = [module.training for module in model.modules()]
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    for module, training in zip(model.modules(), modes, strict=True):
        module.training = training
    return float((outputs.argmax(1) == y).float().mean()), float(nn.functional.cross_entropy(outputs, y))


def test_a_dataset_is_measured_in_batches(serve, join):
    worker = join(serve(net()), net(), local_batch_size=16, optimizer=SPEC)
    share, _ = expected(worker.model)
    state = torch.get_rng_state()
    assert worker.evaluate(dataset()) == pytest.approx(share)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("given", [5, None])
def test_what_gives_no_batches_is_refused_by_name(serve, join, given):
    worker = join(serve(net()), net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match=f"loader is {given}, which gives no batches: give a DataLoader"):
        worker.evaluate(given)


def test_one_metric_gives_a_float_and_a_list_a_dict(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)
    loader = DataLoader(dataset(), batch_size=16)  # the last batch is ragged: weighted by samples
    share, loss = expected(worker.model)
    assert worker.evaluate(loader) == pytest.approx(share)
    assert worker.evaluate(loader, "accuracy") == pytest.approx(share)
    worker.train(dataloader=[], loss_fn=nn.CrossEntropyLoss(), progress=False)
    f1 = torchmetrics.classification.MulticlassF1Score(3, average="micro")
    found = worker.evaluate(loader, ["accuracy", "loss", f1])
    assert found == pytest.approx({"accuracy": share, "loss": loss, "MulticlassF1Score": share})
    assert worker.evaluate(loader, lambda outputs, targets: 0.25) == 0.25


def test_a_collection_gives_a_dict_also_of_one(serve, join):
    worker = join(serve(net()), net())
    accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    found = worker.evaluate(DataLoader(dataset(), 16), torchmetrics.MetricCollection({"mine": accuracy}))
    assert found == {"mine": pytest.approx(expected(worker.model)[0])}


def test_the_loss_of_sums_is_the_mean_over_samples(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC, loss_reduction="sum")
    worker.train(dataloader=[], loss_fn=nn.CrossEntropyLoss(reduction="sum"), progress=False)
    assert worker.evaluate(DataLoader(dataset(), 16), "loss") == pytest.approx(expected(worker.model)[1])


def test_loss_before_any_train_is_refused(serve, join):
    worker = join(serve(net()), net())
    with pytest.raises(ConfigError, match="loss function"):
        worker.evaluate([tuple(dataset().tensors)], "loss")


def test_it_pulls_the_newest_model_first(serve, join):
    server = serve(net())
    worker, other = join(server, net(), optimizer=SPEC), join(server, net(), optimizer=SPEC)
    for _ in range(5):
        nn.functional.cross_entropy(other.model(dataset().tensors[0]), dataset().tensors[1]).backward()
        other.step()
    follow(worker)
    for name, tensor in server.state_dict().items():
        assert torch.equal(worker.model.state_dict()[name], tensor)


def test_a_server_that_is_gone_gives_a_warning_and_the_parameters_last_pulled(serve, join, caplog):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    wanted, _ = expected(worker.model)
    server.stop()
    with caplog.at_level(logging.WARNING, "offbeat"):
        assert worker.evaluate(DataLoader(dataset(), 16)) == pytest.approx(wanted)
    assert any("last pulled" in record.getMessage() for record in caplog.records)


def test_each_module_s_mode_is_restored_also_after_an_error(serve, join):
    worker = join(serve(net()), net())
    worker.model[1].eval()
    before = [module.training for module in worker.model.modules()]
    worker.evaluate(DataLoader(dataset(), 16))
    assert [module.training for module in worker.model.modules()] == before
    with pytest.raises(ConfigError):
        worker.evaluate([1])
    assert [module.training for module in worker.model.modules()] == before


@pytest.mark.parametrize("training", [True, False], ids=["in training", "in eval"])
def test_a_module_that_overrides_train_has_its_form_back(serve, join, training):
    class Merging(nn.Linear):
        """As loralib's layers: in eval mode the weight is another."""

        merged = False

        def train(self, mode=True):
            super().train(mode)
            if self.merged is mode:
                self.merged = not mode
                with torch.no_grad():
                    self.weight.mul_(0.5 if mode else 2)
            return self

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), Merging(8, 3))

    worker = join(serve(model()), model())
    layer = worker.model[1].train(training)
    follow(worker)
    assert (layer.training, layer.merged) == (training, not training)
    if training:
        assert torch.equal(layer.weight, model()[1].weight)


def test_no_random_state_moves(serve, join):
    worker = join(serve(net()), net())

    class Drawing(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            random.random()  # noqa: S311  no secret
            np.random.rand()  # noqa: NPY002  the global state is the point
            return torch.rand(4), torch.tensor(0)

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    worker.evaluate(DataLoader(Drawing(), 4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


def test_no_gradient_and_no_buffer_moves(serve, join):
    worker = join(serve(net()), net())
    worker.model.eval()(dataset().tensors[0]).sum().backward()  # which leaves BatchNorm's statistics alone
    worker.model.train()
    gradients = [p.grad.clone() for p in worker.model.parameters()]
    buffers = [b.clone() for b in worker.model.buffers()]
    worker.evaluate(DataLoader(dataset(), 16))
    assert all(map(torch.equal, buffers, worker.model.buffers()))
    assert all(
        torch.equal(p.grad, kept) for p, kept in zip(worker.model.parameters(), gradients, strict=True)
    )


def backward(worker):
    x, y = dataset().tensors
    nn.functional.cross_entropy(worker.model(x), y).backward()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("live", [False, True])
def test_a_gradient_that_is_on_the_model_stays_as_late_as_it_is(serve, join, live, in_flight):
    server, model = serve(net()), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if live else SPEC
    worker, others = join(server, model, optimizer=optimizer, in_flight=in_flight), net()
    others_optimizer = torch.optim.SGD(others.parameters(), lr=0.5) if live else SPEC
    other = join(server, others, optimizer=others_optimizer)
    backward(worker)
    backward(other)
    assert other.step().applied
    wanted, _ = expected(worker.model)
    buffers = [b.clone() for b in worker.model.buffers()]
    assert worker.evaluate(dataset()) == pytest.approx(wanted)
    assert all(map(torch.equal, buffers, worker.model.buffers()))
    receipt = worker.step() or worker.flush()[-1]
    assert (receipt.applied, receipt.staleness) == (True, 1)


def test_a_batch_whose_gradient_is_zero_keeps_its_statistics(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    (worker.model(dataset().tensors[0]) * 0).sum().backward()
    worker.evaluate(dataset())
    assert worker.step().applied
    assert server.state_dict()["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("held", [1.0, float("nan")])
def test_zeros_and_gradients_of_before_the_worker_keep_no_model_from_being_the_newest(serve, join, held):
    def limited():
        model = net()
        model.register_buffer("limits", torch.tensor([held, 1.0]))
        return model

    server, used = serve(limited()), limited()
    for p in used.parameters():
        p.grad = torch.ones_like(p)  # of other parameters: joining fills in the server's
    worker, monitor = join(server, limited(), optimizer=SPEC), join(server, used)
    worker.optimizer.zero_grad(set_to_none=False)
    for p in worker.model.parameters():
        p.grad = torch.zeros_like(p)
    other = join(server, limited(), optimizer=SPEC)
    backward(other)
    assert other.step().applied
    for late in (worker, monitor):
        assert late.evaluate(dataset()) == pytest.approx(other.evaluate(dataset()))
        assert late.version == 1


def test_a_metric_that_evaluates_in_train_measures_the_newest_model(serve, join):
    server = serve(net())
    worker, other = (join(server, net(), optimizer=SPEC) for _ in range(2))

    def metric(outputs, targets):
        backward(other)
        other.step()
        worker.evaluate(dataset())
        return float(worker.version == server.status()["version"])

    x, y = dataset().tensors
    history = worker.train(
        dataloader=[(x, y)] * 3, loss_fn=nn.CrossEntropyLoss(), metrics=["loss", metric], progress=False
    )
    assert history.records[-1].metrics["metric"] == 1.0
    mine = {of["id"]: of["mean_staleness"] for of in server.status()["workers"]}
    assert mine[worker.id] == 0


@pytest.mark.parametrize("live", [False, True])
def test_while_batches_wait_the_model_is_measured_as_it_is(serve, join, live):
    server = serve(net())
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if live else SPEC
    worker = join(server, model, update_frequency=2, optimizer=optimizer)
    x, y = dataset().tensors
    nn.functional.cross_entropy(worker.model(x), y).backward()
    assert worker.step() is None
    wanted, _ = expected(worker.model)
    assert worker.evaluate([(x, y)]) == pytest.approx(wanted)
    assert server.status()["version"] == 0
    assert len(worker.flush()) == 1
