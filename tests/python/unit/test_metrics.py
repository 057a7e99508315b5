"""Metrics are means over samples, computed where the tensors are and read once."""

import math

import pytest
import torch
import torchmetrics

from offbeat.errors import ConfigError
from offbeat.metrics import accuracy, meters


def read(metric, batches):
    """Measure (outputs, targets, loss) batches with one metric."""
    (meter,) = meters(metric)
    for outputs, targets, loss in batches:
        meter.update(outputs, targets, loss, len(outputs))
    return meter.read()


def test_accuracy_is_the_argmax_over_dim_1():
    outputs = torch.tensor([[0.1, 0.9], [2.0, 1.0], [0.0, 1.0], [5.0, 0.0]])
    assert accuracy(outputs, torch.tensor([1, 0, 0, 0])) == 0.75


def test_accuracy_of_pixels_is_the_argmax_over_dim_1():
    outputs = torch.randn(2, 3, 4, 5)
    assert accuracy(outputs, outputs.argmax(1)) == 1


def test_accuracy_takes_targets_of_the_outputs_shape():
    outputs = torch.tensor([[0.1, 0.9], [2.0, 1.0]])
    assert accuracy(outputs, torch.tensor([[0.0, 1.0], [0.2, 0.8]])) == 0.5


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("target_shape", [(4,), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_accuracy_of_one_logit_is_its_sign(shape, target_shape, dtype):
    outputs = torch.tensor([-1.0, 2.0, 3.0, -4.0]).reshape(shape)
    targets = torch.tensor([0, 1, 0, 0]).to(dtype).reshape(target_shape)
    assert accuracy(outputs, targets) == 0.75


@pytest.mark.parametrize("target_shape", [(2, 1, 1, 3), (2, 1, 3)])
def test_accuracy_of_pixels_of_one_class_is_their_sign(target_shape):
    outputs = torch.tensor([-1.0, 2.0, 3.0, -4.0, 5.0, -6.0]).reshape(2, 1, 1, 3)
    targets = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 1.0]).reshape(target_shape)
    assert accuracy(outputs, targets) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 3), torch.zeros(5)),
        (torch.zeros(4, 1, 2, 2), torch.zeros(4, 4)),
        (torch.zeros(4, 3, 2), torch.zeros(4)),
        ({"logits": torch.zeros(4, 3)}, torch.zeros(4)),
        (torch.tensor(1.0), torch.tensor(1.0)),
    ],
    ids=["lengths", "pixels", "dimensions", "a dict", "scalars"],
)
def test_accuracy_of_what_does_not_fit_is_refused(outputs, targets):
    with pytest.raises(ConfigError, match="accuracy"):
        accuracy(outputs, targets)


def test_a_mean_is_weighted_by_samples():
    batches = [
        (torch.zeros(1, 2), torch.zeros(1), torch.tensor(1.0)),
        (torch.zeros(3, 2), torch.zeros(3), torch.tensor(5.0)),
    ]
    assert read("loss", batches) == 4.0


def test_reading_begins_anew():
    (meter,) = meters("loss")
    meter.update(None, None, torch.tensor(1.0), 2)
    assert meter.read() == 1.0
    meter.update(None, None, torch.tensor(3.0), 2)
    assert meter.read() == 3.0


def test_a_mean_keeps_nothing_of_the_graph():
    (meter,) = meters("loss")
    loss = torch.ones(1, requires_grad=True).sum()
    meter.update(None, None, loss, 1)
    assert not meter._values[0].requires_grad


def test_a_callable_gets_outputs_and_targets_and_may_give_a_plain_number():
    def count_even(outputs, targets):
        return sum(t % 2 == 0 for t in targets.tolist()) / len(outputs)

    (meter,) = meters([count_even])
    assert meter.name == "count_even"
    meter.update(torch.zeros(4), torch.arange(4), None, 4)
    meter.update(torch.zeros(2), torch.tensor([0, 2]), None, 2)
    assert meter.read() == pytest.approx(4 / 6)


def test_a_callable_that_gives_more_than_one_number_is_refused():
    (meter,) = meters(lambda outputs, targets: outputs)
    with pytest.raises(ConfigError, match=r"shape \[3\]"):
        meter.update(torch.zeros(3), None, None, 3)


def test_an_object_that_got_no_batch_is_nan_and_is_not_asked():
    class Share:
        def reset(self):
            self.taken = []

        def update(self, outputs, targets):
            self.taken.append(float((outputs == targets).float().mean()))

        def compute(self):
            return sum(self.taken) / len(self.taken)

    (meter,) = meters(Share())
    assert math.isnan(meter.read())
    meter.update(torch.ones(4), torch.ones(4), None, 4)
    assert meter.read() == 1.0
    assert math.isnan(meter.read())


class Share:
    """Of right answers; nothing can have a weak reference to it, and it has no hash."""

    __hash__ = None
    __slots__ = ("num", "right")

    def update(self, outputs, targets):
        self.right += int((outputs.argmax(1) == targets).sum())
        self.num += len(targets)

    def compute(self):
        return self.right / self.num

    def reset(self):
        self.right = self.num = 0

    def __eq__(self, other):
        return True


@pytest.mark.parametrize(
    "made",
    [
        lambda: torchmetrics.classification.MulticlassAccuracy(num_classes=2, average="micro"),
        Share,
    ],
    ids=["torchmetrics", "slots"],
)
def test_an_object_that_is_given_to_an_evaluation_in_between_keeps_what_it_has_of_the_training(made):
    metric = made()
    (training,) = meters([metric])
    right, wrong = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    target = torch.zeros(1, dtype=torch.long)
    for outputs in (right, wrong, wrong):
        training.update(outputs, target, None, 1)
    assert read(metric, [(right, target, None)]) == 1.0
    training.update(wrong, target, None, 1)
    assert training.read() == 0.25
    assert read(metric, [(wrong, target, None)]) == 0.0
    assert math.isnan(training.read())


def test_a_torchmetrics_object_computes_over_all_batches():
    torch.manual_seed(0)
    outputs, targets = torch.randn(50, 4), torch.randint(0, 4, (50,))
    metric = torchmetrics.classification.MulticlassF1Score(num_classes=4)
    batches = [(outputs[:30], targets[:30], None), (outputs[30:], targets[30:], None)]
    wanted = torchmetrics.functional.classification.multiclass_f1_score(outputs, targets, num_classes=4)
    assert read(metric, batches) == pytest.approx(float(wanted))
    assert meters([metric])[0].name == "MulticlassF1Score"


def collection():
    """Metrics of which torchmetrics would update but one of each kind of state, and two of one class."""
    of_classes = {f"of {n}": torchmetrics.classification.MulticlassRecall(4, top_k=n) for n in (1, 2)}
    precision = torchmetrics.classification.MulticlassPrecision(4)
    return torchmetrics.MetricCollection(of_classes | {"p": precision}, prefix="val/", postfix="_4")


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "with groups of shared states"])
def test_a_collection_gives_its_members_under_its_names(used):
    torch.manual_seed(0)
    batches = [(torch.randn(20, 4), torch.randint(0, 4, (20,))) for _ in range(3)]
    reference, measured = collection(), collection()
    for batch in batches:
        reference.update(*batch)
    wanted = {name: float(value) for name, value in reference.compute().items()}
    assert sorted(wanted) == ["val/of 1_4", "val/of 2_4", "val/p_4"]
    if used:
        measured.update(*batches[0])
        assert any(len(group) > 1 for group in measured.compute_groups.values())
    made = meters(measured)
    for _ in range(2):  # reading begins anew
        for batch in batches:
            for meter in made:
                meter.update(*batch, None, len(batch))
        assert {meter.name: meter.read() for meter in made} == wanted


def test_a_collection_stands_beside_other_metrics():
    assert [meter.name for meter in meters(["loss", collection()])] == [
        "loss",
        *("val/of 1_4", "val/of 2_4", "val/p_4"),
    ]


@pytest.mark.parametrize(
    ("metric", "gave"),
    [
        (torchmetrics.classification.MulticlassRecall(4, average=None), r"a tensor of shape \[4\]"),
        (
            torchmetrics.MetricCollection(
                {
                    "each": torchmetrics.ClasswiseWrapper(
                        torchmetrics.classification.MulticlassRecall(4, average=None)
                    )
                }
            ),
            "dict {",
        ),
    ],
    ids=["MulticlassRecall", "each"],
)
def test_an_object_that_gives_more_than_one_number_is_refused_by_name(metric, gave, request):
    with pytest.raises(ConfigError, match=f"the metric '{request.node.callspec.id}' gave {gave}"):
        read(metric, [(torch.randn(8, 4), torch.randint(0, 4, (8,)), None)])


@pytest.mark.parametrize("value", [{"a": 1.0}, None], ids=["dict", "NoneType"])
def test_a_callable_that_gives_no_number_is_refused_by_name(value, request):
    def mine(outputs, targets):
        return value

    with pytest.raises(ConfigError, match=f"the metric 'mine' gave {request.node.callspec.id} "):
        read(mine, [(torch.zeros(3), None, None)])


def test_an_unknown_metric_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        meters(["loss", "acuracy"])


def test_what_is_no_metric_is_refused():
    with pytest.raises(ConfigError, match="5 is no metric"):
        meters([5])


def test_what_is_neither_a_metric_nor_several_is_refused():
    with pytest.raises(ConfigError, match="metrics: None is no metric: give"):
        meters(None)


@pytest.mark.parametrize("asked", [torchmetrics.MeanMetric, ["loss", torchmetrics.MeanMetric]])
def test_the_class_of_a_metric_is_refused_with_the_object(asked):
    with pytest.raises(
        ConfigError, match=r"metrics is the class MeanMetric: give an object, as MeanMetric\("
    ):
        meters(asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (5, "monitor: 5 is no metric: give"),
        ("los", "monitor: unknown metric 'los'; did you mean 'loss'"),
        (torchmetrics.MeanMetric, "monitor is the class MeanMetric"),
    ],
)
def test_what_is_no_metric_is_refused_by_its_keyword(asked, said):
    with pytest.raises(ConfigError, match=said):
        meters(asked, name="monitor")


def test_the_same_name_twice_is_refused():
    with pytest.raises(ConfigError, match=r"two metrics are called 'loss'.*MetricCollection"):
        meters(["loss", "loss"])


def test_loss_without_a_loss_function_is_refused():
    (meter,) = meters("loss")
    with pytest.raises(ConfigError, match=r"needs a loss function, .* train first, with loss_fn="):
        meter.update(None, None, None, 1)


def test_measuring_a_batch_never_waits_for_the_device():
    outputs, targets = torch.empty(4, 3, device="meta"), torch.empty(4, device="meta", dtype=torch.long)
    for meter in meters(["loss", "accuracy", lambda outputs, targets: outputs.mean()]):
        meter.update(outputs, targets, torch.empty((), device="meta"), 4)  # reading a meta tensor would raise


def test_no_more_values_are_kept_than_a_thousand_and_the_mean_is_that_of_all_of_them():
    (meter,), (restored,) = meters("loss"), meters("loss")
    losses, samples = torch.arange(2500, dtype=torch.float64) / 8, [1 + number % 3 for number in range(2500)]
    most = 0
    for loss, number in zip(losses, samples, strict=True):
        meter.update(None, None, loss, number)
        restored.update(None, None, loss, number)
        if number == 3:
            state, (restored,) = restored.state_dict(), meters("loss")
            restored.load_state_dict(state)
        most = max(most, len(meter.state_dict()["values"]))
    assert 0 < most <= 1000
    expected = sum(float(loss) * n for loss, n in zip(losses, samples, strict=True)) / sum(samples)
    assert restored.read() == meter.read() == expected  # eighths are exact
    meter.update(None, None, torch.tensor(2.0), 3)
    assert meter.read() == 2.0


def test_a_state_is_read_with_one_wait_for_the_device(monkeypatch):
    (meter,) = meters("loss")
    for number in range(5):
        meter.update(None, None, torch.tensor(number / 2), 1)

    def no_single_one(_):
        raise AssertionError("one value was waited for")

    monkeypatch.setattr(torch.Tensor, "__float__", no_single_one)
    assert meter.state_dict()["values"] == [0.0, 0.5, 1.0, 1.5, 2.0]
