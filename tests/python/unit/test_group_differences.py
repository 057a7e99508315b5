"""In what members of a process group differ is said in the same words in all of them."""

from offbeat.local.group import differing, listed


def test_each_setting_that_differs_is_told_with_both_values():
    assert differing([{"overlap": True}, {"overlap": 1}]) == {
        "overlap": "overlap is True in member 0 and 1 in member 1"
    }
    assert differing([{"overlap": True, "lr": [0.1]}, {"overlap": True, "lr": [0.1]}]) == {}


def test_of_what_a_member_has_no_name_for_it_has_nothing_to_say():
    assert differing([{"a": 1}, {"a": 1, "lr": [0.1]}, {"a": 1, "lr": [0.2]}]) == {
        "lr": "lr is [0.1] in member 1 and [0.2] in member 2"
    }
    assert differing([{"a": 1}, {"lr": [0.1]}]) == {}


def test_of_many_settings_that_differ_some_are_named_and_the_others_counted():
    everybody = [{str(name): 0 for name in range(5)}, {str(name): 0 for name in range(5)}]
    everybody.append({str(name): name for name in range(5)})
    assert listed(differing(everybody)) == (
        "1 is 0 in member 0 and 1 in member 2; 2 is 0 in member 0 and 2 in member 2; 3 is 0 in member 0 and "
        "3 in member 2, and 1 more"
    )
