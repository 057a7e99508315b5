"""In what a member at a server averages differently is said by name, and not by both settings whole."""

import pytest

from offbeat.averaging import Average, DiLoCo
from offbeat.averaging.members import differing_terms, terms_of, worded_terms
from offbeat.averaging.methods import shown, worded
from offbeat.averaging.waiting import for_the_others

EVERY_10 = ["iteration", 10]
SUITS_ALL = "; where machines differ in speed, averaging_policy='time' suits all"


def terms(method=None, pace=EVERY_10, overlap=True, trained=(True, True)):
    return terms_of(shown(method or Average()), [pace, overlap, None], trained)


@pytest.mark.parametrize(
    ("own", "theirs", "differences", "remedy"),
    [
        (terms(), terms(pace=["iteration", 7]), "averaging_frequency is 10 here and 7 there", SUITS_ALL),
        (terms(), terms(overlap=1), "overlap is True here and 1 there", ""),
        (
            terms(DiLoCo(lr=0.5)),
            terms(),
            f"method is {worded(shown(DiLoCo(lr=0.5)))} here and Average() there",
            "",
        ),
        (
            terms(pace=["time", 1.0]),
            terms(pace=["time", 0.25]),
            "averaging_frequency is '1s' here and '0.25s' there",
            "",
        ),
        (
            terms(pace=["adaptive", 10, 2, 40]),
            terms(),
            "averaging_policy is 'adaptive' here and 'iteration' there",
            SUITS_ALL,
        ),
        (
            terms(pace=["adaptive", 10, 2, 40], overlap=False),
            terms(pace=["adaptive", 10, 5, 40]),
            "min_averaging_frequency is 2 here and 5 there; overlap is False here and True there",
            SUITS_ALL,
        ),
    ],
)
def test_each_setting_that_differs_is_told_and_no_other(own, theirs, differences, remedy):
    assert differing_terms(own, theirs) == (
        f"this member averages otherwise than those at the server: {differences}: give the same to all of "
        f"them{remedy}"
    )


def test_which_parameters_are_trained_is_told_with_how_to_set_it():
    told = differing_terms(terms(), terms(trained=(True, False)))
    assert "trained parameters are 2 of 2 here and 1 of 2, " in told
    assert told.endswith("give the same to all of them, and train the same parameters (requires_grad)")


@pytest.mark.parametrize("theirs", ['{"method": ["avera', '{"frequency, overlap, metric": 3}', "[]"])
def test_terms_that_were_cut_off_or_are_of_another_version_are_told_whole(theirs):
    assert f"here by {worded_terms(terms())}, and there by {theirs}: give" in differing_terms(terms(), theirs)


def test_terms_read_as_a_user_writes_them():
    assert worded_terms(terms(pace=["time", 30.0])) == (
        "method=Average(), averaging_policy='time', averaging_frequency='30s', overlap=True, 2 of 2 "
        "parameters trained"
    )


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (["training"], "waiting for the members that begin together: 1 of 2 are there"),
        (["training", "training"], "all 2 members are at the server, and 1 have come to its next round"),
        (["training", "lost"], "waiting for the members that begin together: 1 of 2 are there"),
        (["training", "finished"], "waiting for the members that begin together: 1 of 2 are there"),
    ],
)
def test_who_comes_where_others_train_already_is_told_that_they_do(states, told):
    workers = [{"id": str(n), "state": state, "cause": None} for n, state in enumerate(states)]
    status = {"rounds": {"open_entrants": 1}, "workers": workers}
    words = for_the_others(status, num_expected=2)
    assert words.startswith(told)
    assert "after 60 s at most" in words
