"""Whether a remedy holds with which a model was gone back to."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from offbeat import AsyncTrainingMonitor
from offbeat.local.lr_scale import factor_of
from offbeat.monitor.band import Band
from offbeat.monitor.detector import Detector
from offbeat.monitor.judge import Judge
from offbeat.monitor.ladder import Ladder
from offbeat.monitor.trial import Trial
from support.goes_back import GoesFurther, KeepsNothing, Steps
from support.small_net import net

LOSSES = st.lists(st.floats(0, 10), max_size=30)


class NoOptimizerYet:
    optimizer = None


class Watched:
    """A monitor whose losses were .7 and 1.3: its range ends at 1.75, and its limit is 2.6, nearly."""

    def __init__(
        self, *, thing=None, ladder=("rollback", "reduce_lr"), metrics=("loss",), acts_on=None, **given
    ):
        self.thing = Steps() if thing is None else thing
        self.live = torch.optim.SGD(net().parameters(), lr=1.0)
        if acts_on is None:
            acts_on = [
                it for it, name in ((self.thing, "rollback"), (self.live, "reduce_lr")) if name in ladder
            ]
        given = {"patience": 2, "warm_up": 10, "quiet_steps": 1000, "acts_on": acts_on, **given}
        self._made = lambda: AsyncTrainingMonitor(
            None, list(metrics), remediation_strategy=list(ladder), **given
        )
        self.monitor, self.step, self.alerts = self._made(), 0, []
        for n in range(40):
            self.see(loss=0.7 + n % 2 * 0.6)

    def see(self, *, worker=None, **values):
        """Observe a step; give its alerts."""
        self.thing.began_step = self.step
        alerts = self.monitor.observe(self.step, worker=worker, **values)
        self.step += 1
        self.alerts += alerts
        return alerts

    def see_until_cut(self, loss=9.0):
        while not self.cuts:
            self.see(loss=loss)
        assert self.step == 43

    def restart(self):
        state = self.monitor.state_dict()
        self.monitor.close()
        self.monitor = self._made()
        self.monitor.load_state_dict(state)

    @property
    def cuts(self):
        return [alert.step for alert in self.alerts if alert.is_taken and alert.action == "reduce_lr"]


# ------------------------------------------------------------------------------------ the value


@hypothesis.given(LOSSES, st.floats(0, 10), st.floats(-2, 5), st.floats(0, 2), st.integers(5, 20))
def test_it_lasts_from_the_fifth_loss_to_the_last_and_goes_by_the_range_or_the_first_loss(
    losses, least, mean, deviation, most
):
    trial = Trial(least, mean, deviation)
    for num, loss in enumerate(losses, start=1):
        trial = trial.after(loss)
        edge = trial.edge(most)
        assert math.isinf(edge) == (not 5 <= num <= most)
        assert math.isinf(edge) or edge >= max(least, losses[0] + 1.5 * deviation)
        if not math.isinf(edge) and losses[0] <= mean:
            assert edge == max(least, losses[0] + 1.5 * deviation)


@pytest.mark.parametrize(
    ("mean", "deviation", "stray"),
    [
        (1.0, 0.2, 0.6),
        (2.0, 0.2, 0.3),
        (4.0, 0.2, 0.2),
        (0.1, 0.2, 3.0),
        (5e-324, 0.2, 3.0),
        (-1.0, 0.2, 0.2),
        (1.0, 0.0, 0.0),
    ],
)
def test_a_loss_that_was_higher_strays_as_much_more_and_no_more_than_by_itself(mean, deviation, stray):
    trial = Trial(0.0, mean, deviation)
    for _ in range(5):
        trial = trial.after(3.0)
    assert trial.edge(100) == pytest.approx(3.0 + 1.5 * stray)


@pytest.mark.parametrize(("deviation", "least"), [(0.1, 1.5), (0.2, 1.5), (0.4, 2.0)])
def test_a_mean_above_the_edge_is_no_harm_unless_it_is_above_the_mean_by_the_share_as_well(deviation, least):
    band = Band(10, seen=10, mean=1.0, variance=deviation**2)
    assert Trial.of(Detector("loss", 0.5, band)) is None, "there was no alert"
    begun = Trial.of(Detector("loss", 0.5, band).held())
    assert begun == Trial(pytest.approx(least), 1.0, pytest.approx(deviation))


# ------------------------------------------------------------------------------------ in a run


@pytest.mark.parametrize("restarts_at", [(), (44, 46, 48, 49, 55)])
def test_a_loss_above_its_range_on_what_was_gone_back_to_cuts_the_rate_three_times_more(restarts_at):
    """It is below the limit: a rate that is too high still may keep it there, and what is learnt with it."""
    run = Watched()
    run.see_until_cut()
    for _ in range(150):
        if run.step in restarts_at:
            run.restart()
        run.see(loss=1.0 if run.step == run.cuts[-1] + 1 else 2.4)
    first = run.cuts[0]
    assert [step - first for step in run.cuts] == [0, 6, 12, 18], "five losses of each model, and patience"
    below = next(alert for alert in run.alerts if alert.value == 2.4)
    assert str(below).startswith("step 47: loss is 2.4, expected 1.746 at most; reduce_lr: in effect")
    assert below.limit == below.expected[1] < below.value, "and not the range that it has meanwhile"


@pytest.mark.parametrize(
    "level",
    [lambda step: 1.7, lambda step: 1.5 + (step % 4 == 0) * 0.5, lambda step: 1.4 + step % 2 * 0.5],
    ids=["below the edge", "one above it in four", "one above it in two"],
)
def test_losses_whose_mean_is_in_the_range_cut_the_rate_no_further(level):
    run = Watched()
    run.see_until_cut()
    for _ in range(150):
        run.see(loss=level(run.step))
    assert run.cuts == [42]


def test_the_end_of_alerts_below_the_limit_names_the_range_that_these_had():
    run = Watched()
    run.see_until_cut()
    for loss in [*[1.0] * 6, *[2.0] * 6, *[1.0] * 6]:
        run.see(loss=loss)
    *_, recovery = run.monitor.report().recoveries
    assert recovery.expected_then[1] == run.alerts[-1].expected[1]
    assert len(run.cuts) == 2


def test_a_loss_in_the_range_is_no_alert_whatever_came_before():
    run = Watched()
    run.see_until_cut()
    for loss in [1.0, 2.5, 2.5, 2.5]:
        assert run.see(loss=loss) == ()
    assert run.see(loss=1.6) == (), "the mean is 2.02"
    assert run.see(loss=1.8) != ()


@pytest.mark.parametrize(
    ("thing", "ladder"),
    [
        (Steps, ["rollback"]),
        (Steps, ["reduce_lr"]),
        (Steps, ["reduce_lr", "rollback"]),
        (Steps, ["rollback", "alert"]),
        (KeepsNothing, ["rollback", "reduce_lr"]),
        (GoesFurther, ["rollback", "reduce_lr"]),
    ],
)
def test_nothing_is_on_trial_where_nothing_was_taken_with_going_back(thing, ladder):
    run = Watched(thing=thing(), ladder=ladder)
    while sum(alert.is_taken for alert in run.alerts) < len(ladder):
        run.see(loss=9.0)
    num = len(run.alerts)
    for n in range(150):
        run.see(loss=1.0 if n == 0 else 2.0)
    assert len(run.alerts) == num


def test_a_remedy_that_could_not_be_done_is_not_on_trial():
    thing = Steps()
    run = Watched(thing=thing, acts_on=[thing, NoOptimizerYet()])
    for loss in [9.0, 9.0, 9.0, 1.0, *[2.0] * 100]:
        run.see(loss=loss)
    assert [alert.step for alert in run.alerts] == [40, 41, 42]
    assert thing.went == [30, 20]


def test_what_only_tells_is_not_on_trial_where_a_model_that_is_lost_was_gone_back_from_with_it():
    run = Watched(ladder=["rollback", "alert"], patience=3)
    for loss in [9.0, math.nan, math.nan, math.nan, math.nan]:
        run.see(loss=loss)
    assert run.monitor.in_effect == ("rollback", "alert")
    assert len(run.thing.went) == 2
    num = len(run.alerts)
    for loss in [1.0, *[2.0] * 50]:
        run.see(loss=loss)
    assert len(run.alerts) == num


def test_a_remedy_has_held_after_quiet_steps_and_is_on_trial_no_more():
    run = Watched(quiet_steps=50)
    run.see_until_cut()
    for n in range(50):
        run.see(loss=0.7 + n % 2 * 0.6)
    num = len(run.alerts)
    for _ in range(30):
        run.see(loss=2.0)
    assert len(run.alerts) == num


def test_where_several_workers_are_observed_none_is_on_trial_since_some_have_the_model_of_before():
    run = Watched(quiet_steps=10)
    for worker in "abcd":
        for n in range(10):
            run.see(worker=worker, loss=0.7 + n % 2 * 0.6)
    while not run.cuts:
        run.see(worker="a", loss=9.0)
    num = len(run.alerts)
    for loss in [1.0, *[2.0] * 30]:
        for worker in "abcd":
            run.see(worker=worker, loss=loss)
    assert len(run.alerts) == num


@pytest.mark.parametrize("metrics", [("loss", "gradient_norm"), ("gradient_norm", "loss")])
def test_the_loss_of_the_step_in_which_it_was_gone_back_is_none_of_the_trial_s(metrics):
    run = Watched(metrics=metrics)
    for n in range(40):
        run.see(loss=0.7 + n % 2 * 0.6, gradient_norm=0.7 + n % 2 * 0.6)
    while not run.cuts:
        run.see(loss=9.0, gradient_norm=9.0)
    for loss in [1.0, 1.0, 1.0, 1.0]:
        assert run.see(loss=loss, gradient_norm=1.0) == ()
    assert run.see(loss=1.8, gradient_norm=1.0) == (), "its mean with the last four is 1.16"
    for loss in [2.4, 2.4, 2.4]:
        alerts = run.see(loss=loss, gradient_norm=1.0)
    assert [alert.metric for alert in alerts] == ["loss"]


def test_it_ends_with_what_is_on_trial():
    """A loss may be told each tenth step, and a remedy is let go of by steps."""
    run = Watched(metrics=("loss", "gradient_norm"), quiet_steps=50)
    for _ in range(20):
        run.see(loss=1.0, gradient_norm=1.0)
    while not run.cuts:
        run.see(loss=9.0, gradient_norm=1.0)
    for n in range(200):
        run.see(gradient_norm=1.0, **({"loss": 1.0} if n % 10 == 0 else {}))
    assert run.monitor.in_effect == ()
    num = len(run.alerts)
    for n in range(300):
        run.see(gradient_norm=1.0, **({"loss": 1.9} if n % 10 == 0 else {}))
    assert len(run.alerts) == num


def test_it_ends_where_the_range_is_learnt_anew():
    ladder = Ladder(
        2, patience=2, quiet_steps=1000, repeats=3, back=0, most_back=3, mending=frozenset({0, 1})
    )
    made = Judge(["loss"], ladder, threshold=0.5, warm_up=5)
    for step in range(6):
        made.begin(step)
        made.see("loss", 1.0)
    made.begin(6)
    assert made.see("loss", 9.0) is not None
    made.went_back(5, is_mended=True)
    made.take_level(also=["loss"])
    found = []
    for step in range(7, 60):
        made.begin(step)
        found.append(made.see("loss", 3.0 if step < 20 else 4.0))
    assert found == [None] * 53, "the limit is 4.5 now"


def test_a_worker_that_joins_ends_it():
    run = Watched(quiet_steps=50)
    while not run.cuts:
        run.see(worker="a", loss=9.0)
    for loss in [1.0, 1.0, 1.0]:
        run.see(worker="a", loss=loss)
    num = len(run.alerts)
    for _ in range(30):
        for worker in "ab":
            run.see(worker=worker, loss=2.0)
    assert len(run.alerts) == num


@pytest.mark.parametrize("num_late", [0, 1, 2, 3])
def test_losses_of_before_that_are_told_late_are_none_of_its(num_late):
    run = Watched()
    run.see_until_cut()
    for loss in [9.0] * num_late:
        run.see(loss=loss)
    num = len(run.cuts)
    for loss in [1.0, *[2.4] * 7]:
        run.see(loss=loss)
    assert len(run.cuts) == num + 1


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.1])
def test_a_section_that_is_a_little_harder_cuts_no_rate(noise):
    """With losses that stray little their mean is above the edge by then, and far below the limit."""
    run = Watched()
    for n in range(300):
        run.see(loss=1 + (n % 2 * 2 - 1) * noise)
    while not run.cuts:
        run.see(loss=9.0)
    for n in range(600):
        run.see(loss=(1.2 if n % 60 >= 30 else 1.0) + (n % 2 * 2 - 1) * noise)
    assert len(run.cuts) == 1


def descends(num):
    return 2 * math.exp(-num / 400) + 0.1


def flattens(num):
    return 10 * (num + 10) ** -0.3


@pytest.mark.parametrize(
    ("loss_after", "every"), [(descends, 50), (descends, 100), (flattens, 100), (flattens, 500)]
)
def test_of_an_older_model_the_loss_is_above_the_range_and_no_rate_is_cut_for_that(loss_after, every):
    """A loss that falls is higher at each checkpoint than at the alert, and further back still more."""
    for seed in range(3):
        noise = torch.Generator().manual_seed(seed)
        thing, live = Steps(every), torch.optim.SGD(net().parameters(), lr=1.0)
        monitor = AsyncTrainingMonitor(
            None, ["loss"], remediation_strategy=["rollback", "reduce_lr"], acts_on=[thing, live]
        )
        begin, learnt, at = 3 * every + every // 2 + 100, 0.0, {}
        taken = []
        for step in range(begin + 1500):
            thing.began_step, at[step], num = step, learnt, len(thing.went)
            loss = loss_after(learnt) * (1 + 0.02 * float(torch.randn((), generator=noise)))
            alerts = monitor.observe(step, loss=40.0 if begin <= step < begin + 6 else loss)
            learnt = at[thing.went[-1]] if len(thing.went) > num else learnt + factor_of(live)
            taken += [alert for alert in alerts if alert.is_taken]
        assert [alert.action for alert in taken] == ["rollback", "reduce_lr"]
        assert loss_after(at[thing.went[-1]]) > 1.1 * loss_after(at[begin - 1])
        assert factor_of(live) == 1.0
