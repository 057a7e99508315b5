"""`train`: what it does with data, what it writes down, how it ends."""

import functools
import logging
import os
import signal
import threading

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import offbeat
from offbeat.errors import ConfigError, RejectedError
from support.follow import follow

SPEC = offbeat.optim.SGD(lr=0.1)
LOSS = nn.CrossEntropyLoss()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def dataset(length=100):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Recorder(nn.Module):
    """Writes down the first feature of all it is shown."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.seen = []

    def forward(self, x):
        self.seen.append(x[:, 0].tolist())
        return self.net(x)


def same_parameters(model, server):
    held = server.state_dict()
    return all(torch.equal(p, held[name]) for name, p in model.named_parameters())


def flat(lists):
    return [value for one in lists for value in one]


@pytest.fixture
def train(serve, join):
    """A server and a worker of its model; returns what `train` returns."""

    def run(worker=None, **keywords):
        worker = worker or join(serve(net()), net())
        return worker.train(**{"loss_fn": LOSS, "optimizer": SPEC, "progress": False} | keywords)

    return run


def test_a_dataset_is_learned(serve, join):
    worker = join(
        serve(net()), seed=0
    )  # of its order: what the last few batches are moves BatchNorm's statistics
    before = worker.evaluate([tuple(dataset().tensors)])
    history = worker.train(
        dataset=dataset(), epochs=20, loss_fn=LOSS, optimizer=SPEC, log_frequency=10, progress=False
    )
    assert worker.evaluate([tuple(dataset().tensors)]) > max(before, 0.9)
    assert history.records[0].metrics["loss"] > history.records[-1].metrics["loss"] > 0


@pytest.mark.parametrize("given", [{}, {"dataset": dataset(), "dataloader": []}], ids=["neither", "both"])
def test_dataset_and_dataloader_both_or_neither_are_refused(train, given, request):
    with pytest.raises(ConfigError, match=f"one of the two, and got {request.node.callspec.id}"):
        train(**given)


def test_a_loader_without_a_length_is_trained_on(train):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(dataset(30))

    history = train(dataloader=DataLoader(Stream(), batch_size=10), epochs=2)
    assert (history.samples, history.epochs, history.stopped) == (60, 2, "epochs")


def test_a_loader_that_gives_its_batches_once_is_refused_for_several_epochs(train):
    def batches():
        yield tuple(dataset(30).tensors)

    with pytest.raises(ConfigError, match="a generator, which gives its batches once, and epochs is 3: give"):
        train(dataloader=batches(), epochs=3)
    assert train(dataloader=batches()).samples == 30
    loader = DataLoader(dataset(30), batch_size=10)
    with pytest.raises(
        ConfigError, match="DataLoaderIter, which gives its batches once, and epochs is 2: give"
    ):
        train(dataloader=iter(loader), epochs=2)
    assert train(dataloader=iter(loader)).samples == 30


def test_a_pass_that_gives_nothing_after_one_that_did_is_an_error(train):
    class Once:
        batches = iter([tuple(dataset(30).tensors)])

        def __iter__(self):
            return self.batches

    with pytest.raises(ConfigError, match=r"the data gave no batch in epoch 2, .* gone through again"):
        train(dataloader=Once(), epochs=3)


@pytest.mark.parametrize("name", ["epochs", "log_frequency", "max_steps"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_a_count_that_is_none_is_refused(train, name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        train(dataset=dataset(), **{name: value})


def test_every_count_that_is_none_is_named_at_once(train):
    with pytest.raises(
        ConfigError, match=r"epochs is '3'.*log_frequency is 0.*max_steps is 0.*progress is 'yes'"
    ):
        train(dataset=dataset(), epochs="3", log_frequency=0, max_steps=0, progress="yes")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_fn": "cross_entropy"}, "loss_fn is 'cross_entropy': give a function of .*CrossEntropyLoss"),
        ({"loss_fn": None}, r"loss_fn is None: give a function of \(outputs, targets\)"),
        ({"loss_fn": nn.MSELoss}, r"loss_fn is the class MSELoss: give an object, as MSELoss\("),
        ({"metrics": None}, "metrics: None is no metric: give"),
        ({"dataloader": 5, "dataset": None}, "dataloader is 5, which gives no batches: give a DataLoader"),
        ({"dataloader": DataLoader, "dataset": None}, "dataloader is the class DataLoader: give an object"),
        ({"dataset": 5}, "dataset is of type int, which has no length: give a dataset"),
        ({"dataset": TensorDataset}, "dataset is the class TensorDataset: give an object"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_with_is_refused_by_name_and_nothing_changes(serve, join, given, said):
    server = serve(net())
    worker = join(server, net())
    with pytest.raises(ConfigError, match=said):
        worker.train(**{"dataset": dataset(), "loss_fn": LOSS, "optimizer": SPEC, "progress": False} | given)
    assert server.status()["optimizer"] is None
    assert server.status()["version"] == 0


def test_an_unknown_keyword_names_the_nearest(serve, join):
    server = serve(net())
    with pytest.raises(
        ConfigError, match=r"AsyncWorker 'update_frequencie'; did you mean 'update_frequency'"
    ):
        join(server, net(), update_frequencie=2)
    with pytest.raises(ConfigError, match=r"AsyncWorker\.train 'metric'; did you mean 'metrics'"):
        join(server, net()).train(dataset=dataset(), loss_fn=LOSS, metric="loss")


def test_a_value_without_its_keyword_is_refused_with_the_keyword(train, serve, join):
    server = serve(net())
    with pytest.raises(ConfigError, match=r"AsyncWorker\.train got a TensorDataset .*: write dataset=…"):
        join(server, net()).train(dataset(), loss_fn=LOSS)
    with pytest.raises(ConfigError, match=r"AsyncWorker got a SGD .*: write optimizer=…"):
        join(server, net(), 32, 1, "cpu", SPEC)


@pytest.mark.parametrize("make", [tuple, list])
def test_tensors_given_for_a_dataset_are_refused_with_the_dataset_to_make_of_them(train, make):
    with pytest.raises(ConfigError, match=r"dataset is a (tuple|list) of tensors.*TensorDataset\("):
        train(dataset=make((torch.ones(8, 4), torch.zeros(8, dtype=torch.long))))
    assert train(dataset=make(dataset(8))).stopped == "epochs"


# ---------------------------------------------------------------------------------------- order of the data


def orders(join, server, epochs=2, **keywords):
    """What a new worker is shown, epoch by epoch."""
    worker = join(server, Recorder(), **keywords)
    worker.train(dataset=dataset(20), epochs=epochs, loss_fn=LOSS, optimizer=SPEC, progress=False)
    seen = flat(worker.model.seen)
    return [seen[i : i + 20] for i in range(0, len(seen), 20)]


def test_each_worker_has_its_own_order_and_each_epoch_another(serve, join):
    server = serve(Recorder())
    torch.manual_seed(0)
    one = orders(join, server, local_batch_size=8)
    torch.manual_seed(0)
    other = orders(join, server, local_batch_size=8)
    assert len({tuple(order) for order in (*one, *other)}) == 4
    assert {tuple(sorted(order)) for order in (*one, *other)} == {tuple(sorted(one[0]))}


def test_the_order_follows_from_run_worker_and_epoch_and_not_from_the_global_seed(serve, join):
    found = []
    for seed in (1, 2):
        server = serve(Recorder(), run_id="the run")
        torch.manual_seed(seed)
        found.append(orders(join, server, worker_id="me"))
    assert found[0] == found[1]
    assert orders(join, serve(Recorder(), run_id="another"), worker_id="me") != found[0]


def test_seed_overrides_the_order(serve, join):
    server = serve(Recorder())
    assert orders(join, server, seed=3) == orders(join, server, seed=3) != orders(join, server, seed=4)


def test_a_second_train_goes_on_with_new_orders(serve, join):
    worker = join(serve(Recorder()), Recorder())
    for _ in range(2):
        worker.train(dataset=dataset(20), loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert worker.model.seen[0] != worker.model.seen[1]


def test_a_metric_that_raises_takes_back_no_push_that_was_made(serve, join):
    server = serve(net())
    worker = join(server, net())

    def metric(outputs, targets):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        worker.train(dataset=dataset(), loss_fn=LOSS, optimizer=SPEC, metrics=[metric], progress=False)
    assert server.status()["version"] == worker.history.steps == worker.history.receipts["applied"] == 1


def test_training_on_a_dataset_draws_no_global_random_numbers(serve, join):
    worker = join(serve(net()), net())
    before = torch.get_rng_state()
    worker.train(dataset=dataset(), loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dataloader_is_told_its_epoch_and_a_second_train_goes_on(serve, join):
    class Told(list):
        def __init__(self):
            self.numbers = []

        def set_epoch(self, number):
            self.numbers.append(number)

    loader, worker = Told(), join(serve(net()), net())
    loader.append(tuple(dataset(10).tensors))
    for epochs in (2, 1):
        worker.train(dataloader=loader, epochs=epochs, loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert loader.numbers == [0, 1, 2]


def test_a_dataloader_is_used_as_it_is(serve, join):
    worker = join(serve(Recorder()), Recorder())
    worker.train(
        dataloader=DataLoader(dataset(20), batch_size=7), loss_fn=LOSS, optimizer=SPEC, progress=False
    )
    assert worker.model.seen == [part.tolist() for part in dataset(20).tensors[0][:, 0].split(7)]


def test_a_dataset_is_loaded_in_batches_of_local_batch_size_and_the_last_is_ragged(serve, join):
    worker = join(serve(Recorder()), Recorder(), 16)
    worker.train(dataset=dataset(40), loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert [len(batch) for batch in worker.model.seen] == [16, 16, 8]


def test_an_iterable_dataset_is_trained_on_in_its_order(serve, join):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*dataset(20).tensors, strict=True)

    worker = join(serve(Recorder()), Recorder(), 8)
    history = worker.train(dataset=Stream(), epochs=2, loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert flat(worker.model.seen) == dataset(20).tensors[0][:, 0].tolist() * 2
    assert (history.samples, history.epochs) == (40, 2)


def test_a_share_of_the_data_is_given_by_partition(serve, join):
    server = serve(Recorder())
    seen = []
    for rank in range(3):
        worker = join(server, Recorder())
        share = offbeat.partition(dataset(20), rank, 3)
        worker.train(dataset=share, loss_fn=LOSS, optimizer=SPEC, progress=False)
        seen += flat(worker.model.seen)
    assert sorted(seen) == sorted(dataset(20).tensors[0][:, 0].tolist())


# ---------------------------------------------------------------------------------------- batches


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, inputs):
        return {"logits": self.net(inputs["x"][0])}


def test_nested_batches_are_moved_and_counted(serve, join):
    x, y = dataset(6).tensors
    worker = join(serve(Nested()), Nested())
    history = worker.train(
        dataloader=[({"x": [x, "text"]}, {"y": y})],
        loss_fn=lambda outputs, targets: LOSS(outputs["logits"], targets["y"]),
        optimizer=SPEC,
        progress=False,
    )
    assert history.samples == 6


def test_another_kind_of_batch_raises_and_shows_the_loop_of_one_s_own(train):
    with pytest.raises(ConfigError, match=r"gave a tuple of 3.*(?s:.*)worker\.step\(samples="):
        train(dataloader=[(torch.zeros(2, 4), torch.zeros(2), torch.zeros(2))])


def test_a_batch_without_a_sample_is_refused_before_it_trains(serve, join):
    server = serve(net())
    worker = join(server)
    loader = [tuple(dataset(6).tensors), (torch.empty(0, 4), torch.empty(0).long())]
    with pytest.raises(ConfigError, match=r"the batch has no sample.*drop_last"):
        worker.train(dataloader=loader, epochs=1, loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert server.status()["version"] == 1
    assert all(p.isfinite().all() for p in worker.model.parameters())


def test_a_loss_that_is_no_scalar_is_refused(train):
    with pytest.raises(ConfigError, match=r"loss_fn gave a tensor of shape \[6\]"):
        train(dataloader=[tuple(dataset(6).tensors)], loss_fn=nn.CrossEntropyLoss(reduction="none"))


def test_gradients_left_from_before_are_not_trained_on(serve, join):
    x, y = dataset(8).tensors
    found = []
    for spoil in (False, True):
        worker = join(serve(net()), net())
        if spoil:
            worker.model(x).sum().backward()
            worker.model[1].load_state_dict(net()[1].state_dict())
        worker.train(dataloader=[(x, y)], loss_fn=LOSS, optimizer=SPEC, progress=False)
        found.append(worker.model[0].weight.detach().clone())
    assert torch.equal(*found)


# ---------------------------------------------------------------------------------------- modes


def test_a_model_in_eval_mode_as_a_whole_is_woken(train, serve, join):
    worker = join(serve(net()), net())
    worker.model.eval()
    train(worker, dataset=dataset())
    assert all(module.training for module in worker.model.modules())


def test_a_part_in_eval_mode_stays_so(train, serve, join):
    worker = join(serve(net()), net())
    worker.model[1].eval()
    train(worker, dataset=dataset())
    assert [module.training for module in worker.model] == [True, False, True, True]
    assert worker.model[1].num_batches_tracked == 0


# ---------------------------------------------------------------------------------------- history


def test_the_history_has_a_record_per_log_line_and_one_for_the_rest(serve, join):
    server = serve(net())
    worker = join(server, net(), 10)
    history = worker.train(
        dataset=dataset(100), epochs=2, loss_fn=LOSS, optimizer=SPEC, log_frequency=8, progress=False
    )
    assert [r.step for r in history.records] == [8, 16, 20]
    assert [r.samples for r in history.records] == [80, 160, 200]
    assert [r.version for r in history.records] == [8, 16, 20]
    assert (history.steps, history.samples, history.epochs, history.stopped) == (20, 200, 2, "epochs")
    assert history.receipts == {"applied": 20}
    assert 0 < history.records[0].seconds <= history.records[-1].seconds <= history.seconds
    assert "SGD(lr=0.1) on the server" in history.optimizer
    assert worker.history is history


def test_the_rest_of_fewer_than_update_frequency_batches_is_pushed_at_the_end_of_each_epoch(serve, join):
    server = serve(net())
    worker = join(server, net(), 10, 4)
    history = worker.train(dataset=dataset(100), epochs=2, loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert history.steps == server.status()["version"] == 6  # 10 batches: 4, 4 and 2
    assert server.status()["samples"] == 200


def test_max_steps_counts_pushes(serve, join):
    server = serve(net())
    worker = join(server, net(), 10, 2)
    history = worker.train(
        dataset=dataset(100), epochs=9, max_steps=7, loss_fn=LOSS, optimizer=SPEC, progress=False
    )
    assert (history.steps, history.stopped, history.epochs) == (7, "max_steps", 1)
    assert server.status()["samples"] == 140


def test_max_steps_counts_the_steps_of_a_live_optimizer(serve, join):
    server = serve(net())
    model = net()
    worker = join(server, model, 10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = worker.train(
        dataset=dataset(100), epochs=9, max_steps=7, loss_fn=LOSS, optimizer=optimizer, progress=False
    )
    assert (history.steps, history.stopped) == (7, "max_steps")
    status = server.status()
    assert status["version"] == 4
    assert status["samples"] == history.samples == 70
    assert same_parameters(model, server)
    assert "SGD(lr=0.1) on the worker" in history.optimizer


def test_after_train_nothing_is_in_flight_and_the_model_is_the_newest(serve, join):
    server = serve(net())
    worker = join(server, net(), in_flight=2)
    history = worker.train(dataset=dataset(), epochs=2, loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert history.receipts == {"applied": history.steps}
    assert worker.flush() == []
    for name, tensor in server.state_dict().items():
        assert torch.equal(worker.model.state_dict()[name], tensor)


def test_receipts_that_an_evaluate_inside_of_train_waited_for_are_noted(serve, join):
    worker = join(serve(net()), net(), in_flight=2)

    def loss(outputs, targets):
        follow(worker)
        return LOSS(worker.model(dataset().tensors[0]), dataset().tensors[1])

    history = worker.train(
        dataset=dataset(), max_steps=3, loss_fn=loss, optimizer=SPEC, metrics=(), progress=False
    )
    assert history.receipts == {"applied": 3}
    assert worker.flush() == []


def test_metrics_of_every_kind_are_means_over_samples(serve, join):
    worker = join(serve(net()), net(), 16)
    worker.model.eval()
    x, y = dataset(40).tensors
    outputs = []

    def positive(found, targets):
        outputs.append((found.detach(), targets))
        return (found[:, 1] > 0).float().mean()

    history = worker.train(
        dataloader=[(x[:30], y[:30]), (x[30:], y[30:])],
        loss_fn=LOSS,
        optimizer=SPEC,
        metrics=[
            "accuracy",
            "loss",
            positive,
            torchmetrics.classification.MulticlassAccuracy(2, average="micro"),
        ],
        progress=False,
    )
    (record,) = history.records
    found, targets = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    assert list(record.metrics) == ["accuracy", "loss", "positive", "MulticlassAccuracy"]
    assert record.metrics["accuracy"] == pytest.approx(float((found.argmax(1) == targets).float().mean()))
    assert record.metrics["accuracy"] == pytest.approx(record.metrics["MulticlassAccuracy"])
    assert record.metrics["positive"] == pytest.approx(float((found[:, 1] > 0).float().mean()))
    assert record.metrics["loss"] == pytest.approx(float(LOSS(found, targets)))


def test_an_unknown_metric_names_the_nearest(train):
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        train(dataset=dataset(), metrics=["acurracy"])


def test_optimizers_of_every_form_are_taken(serve, join):
    for optimizer in (
        offbeat.optim.SGD(lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1),
        torch.optim.SGD,
        offbeat.optim.AdamW,
    ):
        worker = join(serve(net()), net())
        history = worker.train(
            dataset=dataset(), optimizer=optimizer, loss_fn=LOSS, max_steps=2, progress=False
        )
        assert history.receipts == {"applied": 2}
    model = net()
    live = offbeat.optim.SGD(model.parameters(), lr=0.1)
    history = join(serve(net()), model).train(
        dataset=dataset(), optimizer=live, loss_fn=LOSS, max_steps=2, progress=False
    )
    assert "on the worker" in history.optimizer


@pytest.mark.parametrize("change", ["assign", "submodule"])
def test_a_live_optimizer_of_the_model_as_it_is_now_is_taken(serve, join, train, change):
    server = serve(net())
    worker = join(server, net())
    if change == "assign":
        worker.model.load_state_dict(net(1).state_dict(), assign=True)
        worker.model.requires_grad_(True)
    else:
        worker.model[3] = nn.Linear(8, 2)
    adam = torch.optim.Adam(worker.model.parameters())
    assert train(worker, dataset=dataset(), optimizer=adam).stopped == "epochs"
    assert same_parameters(worker.model, server)


@pytest.mark.parametrize("live", [False, True])
def test_the_worker_s_own_optimizer_means_the_one_there_is(serve, join, live):
    model = net()
    given = torch.optim.Adam(model.parameters()) if live else SPEC
    worker = join(serve(net()), model, optimizer=given)
    for _ in range(2):
        history = worker.train(
            dataset=dataset(), optimizer=worker.optimizer, loss_fn=LOSS, max_steps=2, progress=False
        )
        assert history.receipts == {"applied": 2}
        assert ("on the worker" in history.optimizer) is live


def test_another_worker_s_optimizer_is_refused(serve, join, train):
    other = join(serve(net()), net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match="optimizer of another worker"):
        train(dataset=dataset(), optimizer=other.optimizer)
    with pytest.raises(ConfigError, match="optimizer of another worker"):
        join(serve(net()), net(), optimizer=other.optimizer)


# ---------------------------------------------------------------------------------------- endings


def test_the_budget_of_samples_ends_train_for_all(serve, join):
    server = serve(net(), max_samples=500, optimizer=SPEC)
    workers = [join(server, net(), 10) for _ in range(2)]
    histories = {}

    def run(worker):
        histories[worker] = worker.train(dataset=dataset(), epochs=1000, loss_fn=LOSS, progress=False)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [history.stopped for history in histories.values()] == ["budget", "budget"]
    assert 500 <= server.status()["samples"] < 520
    for worker in workers:
        follow(worker)  # the other's last push may have come after this one's end
        for name, tensor in server.state_dict().items():
            assert torch.equal(worker.model.state_dict()[name], tensor)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_hundred_rejections_in_a_row_raise_with_the_reasons(serve, join, in_flight):
    server = serve(net(), staleness_policy=offbeat.staleness.GradientFiltering(max_norm=1e-9))
    worker = join(server, net(), 2, in_flight=in_flight)
    with pytest.raises(RejectedError, match=r"rejected 100 pushes in a row: 100x \w+"):
        worker.train(dataset=dataset(400), loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert worker.history.stopped == "failed"
    assert server.status()["version"] == 0


@pytest.mark.parametrize(("error", "stopped"), [(OSError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_a_train_that_ends_before_its_first_batch_has_stopped(serve, join, monkeypatch, error, stopped):
    worker = join(serve(net()), net())

    def pull():
        assert worker.history.stopped == "running"
        raise error

    monkeypatch.setattr(worker._link, "pull", pull)
    with pytest.raises(error):
        worker.train(dataset=dataset(), loss_fn=LOSS, optimizer=SPEC, progress=False)
    assert worker.history.stopped == stopped


def warned(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(("said", "taken"), [("sum", "mean"), ("mean", "sum")])
def test_a_loss_that_reduces_otherwise_than_the_worker_was_told_is_warned_of(
    serve, join, caplog, said, taken
):
    worker = join(serve(net(), optimizer=offbeat.optim.SGD(lr=1e-3)), net(), loss_reduction=taken)
    loss = nn.CrossEntropyLoss(reduction=said)
    worker.train(dataset=dataset(64), loss_fn=loss, progress=False)
    (line,) = warned(caplog)
    assert f'CrossEntropyLoss(reduction="{said}")' in line
    assert f'loss_reduction="{taken}"' in line
    worker.train(dataset=dataset(64), loss_fn=loss, progress=False)
    assert len(warned(caplog)) == 1, "once is enough"


def test_a_loss_that_reduces_as_the_worker_was_told_is_no_news(serve, join, caplog):
    worker = join(serve(net(), optimizer=offbeat.optim.SGD(lr=1e-3)), net(), loss_reduction="sum")
    worker.train(dataset=dataset(64), loss_fn=nn.CrossEntropyLoss(reduction="sum"), progress=False)
    assert warned(caplog) == []


def test_a_loader_given_as_dataset_and_a_dataset_given_as_loader_are_refused_by_name(serve, join):
    worker = join(serve(net(), optimizer=SPEC), net())
    with pytest.raises(ConfigError, match=r"dataset is a DataLoader.*give it as dataloader="):
        worker.train(dataset=DataLoader(dataset()), loss_fn=LOSS)
    with pytest.raises(ConfigError, match=r"dataloader is a TensorDataset.*give it as dataset="):
        worker.train(dataloader=dataset(), loss_fn=LOSS)


@pytest.mark.parametrize("given", [{"dataset": dataset(0)}, {"dataset": []}, {"dataloader": []}])
def test_training_on_nothing_is_warned_of(serve, join, caplog, given):
    worker = join(serve(net(), optimizer=SPEC), net())
    assert worker.train(**given, loss_fn=LOSS, progress=False).steps == 0
    (line,) = warned(caplog)
    assert f"the {next(iter(given))} gave no batch" in line


def test_a_push_in_flight_when_train_failed_is_settled_with_its_own_state(serve, join):
    server = serve(net(), max_staleness=1)
    fast, model = join(server, net()), net()
    live = torch.optim.Adam(model.parameters(), lr=0.01)
    worker = join(server, model, in_flight=2, optimizer=live)
    fast_live = torch.optim.SGD(fast.model.parameters(), lr=0.01)
    batch = dataset(4).tensors

    def loss(outputs, targets):
        if live.state:
            raise ZeroDivisionError
        for _ in range(2):  # so that the push of this batch is too late
            LOSS(fast.model(batch[0]), batch[1]).backward()
            assert fast.step().applied
        return LOSS(outputs, targets)

    fast.train(dataloader=[batch], loss_fn=LOSS, optimizer=fast_live, progress=False)
    with pytest.raises(ZeroDivisionError):
        worker.train(dataloader=[batch] * 2, loss_fn=loss, progress=False)
    assert live.state
    LOSS(worker.model(batch[0]), batch[1]).backward()
    assert worker.step().reason == "stale"
    assert not live.state  # as before the first push


def test_fewer_rejections_are_counted_by_reason(serve, join):
    server = serve(net(), max_staleness=0)
    other = join(server, net(), optimizer=SPEC)
    batches = dataset(30)

    class Loader:
        """Between a worker's pull and its push, another pushes: on every third batch."""

        def __iter__(self):
            for number in range(9):
                yield tuple(t[number : number + 4] for t in batches.tensors)

    def loss(outputs, targets):
        if loss.calls % 3 == 0:
            follow(other)
            other.model(batches.tensors[0]).sum().backward()
            other.step()
        loss.calls += 1
        return LOSS(outputs, targets)

    loss.calls = 0
    worker = join(server, net())
    history = worker.train(dataloader=Loader(), loss_fn=loss, optimizer=SPEC, progress=False)
    assert history.receipts["applied"] == 6
    assert sum(history.receipts.values()) == 9
    assert history.stopped == "epochs"


def test_ctrl_c_keeps_the_worker_joined_and_the_history_and_the_next_train_works(serve, join):
    server = serve(net())
    worker = join(server, net(), 10, 4)

    def loss(outputs, targets):
        if loss.calls == 6:
            os.kill(os.getpid(), signal.SIGINT)
        loss.calls += 1
        return LOSS(outputs, targets)

    loss.calls = 0
    with pytest.raises(KeyboardInterrupt):
        worker.train(dataset=dataset(), epochs=5, loss_fn=loss, optimizer=SPEC, progress=False)
    assert worker.history.stopped == "interrupted"
    assert (worker.history.steps, server.status()["version"]) == (1, 1)
    history = worker.train(dataset=dataset(40), loss_fn=LOSS, progress=False)
    assert history.stopped == "epochs"
    assert server.status()["version"] == 2  # 4 batches of 10: the unsent ones from before are gone
    assert server.status()["workers"][0]["state"] == "joined"


def test_ctrl_c_gives_a_live_optimizer_its_state_back_and_takes_its_steps_back(serve, join):
    model = net()
    server = serve(net())
    worker = join(server, model, 10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(outputs, targets):
        if loss.calls == 2:
            os.kill(os.getpid(), signal.SIGINT)
        loss.calls += 1
        return LOSS(outputs, targets)

    loss.calls = 0
    with pytest.raises(KeyboardInterrupt):
        worker.train(dataset=dataset(), loss_fn=loss, optimizer=optimizer, progress=False)
    assert not optimizer.state
    assert same_parameters(model, server)
    history = worker.train(dataset=dataset(), loss_fn=LOSS, optimizer=optimizer, progress=False)
    assert history.stopped == "epochs"


def test_an_exception_of_the_user_s_is_raised_and_the_next_train_works(serve, join):
    worker = join(serve(net()), net())

    def loss(outputs, targets):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        worker.train(dataset=dataset(), loss_fn=loss, optimizer=SPEC, progress=False)
    assert worker.history.stopped == "failed"
    assert worker.train(dataset=dataset(), loss_fn=LOSS, progress=False).stopped == "epochs"


def test_gradients_of_a_train_that_failed_are_not_pushed_by_the_next_step(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)

    def metric(outputs, targets):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        worker.train(dataset=dataset(), loss_fn=LOSS, metrics=metric, progress=False)
    assert all(parameter.grad is None for parameter in worker.model.parameters())


class ReadsOfScalars(TorchDispatchMode):
    """Counts what makes Python wait for a device: `item()`, `float()`, `if tensor`."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("metrics", ["loss", ["loss", "accuracy"]], ids=str)
@pytest.mark.parametrize("update_frequency", [1, 2])
def test_between_log_lines_no_scalar_is_read(serve, join, metrics, update_frequency):
    def reads(num_batches):
        worker = join(serve(net()), net(), local_batch_size=8, update_frequency=update_frequency)
        with ReadsOfScalars() as reads:
            worker.train(
                dataset=dataset(8 * num_batches),
                loss_fn=LOSS,
                optimizer=SPEC,
                metrics=metrics,
                log_frequency=1000,
                progress=False,
            )
        return reads.count

    assert reads(40) == reads(4) > 0
