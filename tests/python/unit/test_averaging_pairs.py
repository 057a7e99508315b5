"""Who meets whom in a round of gossip, and how fast that brings members together."""

from collections import Counter

import pytest
import torch

from offbeat.averaging.pairs import lag, partner

ROUNDS = 3000


@pytest.mark.parametrize("size", range(1, 12))
def test_each_round_is_a_matching_in_which_one_member_is_left_over_where_their_number_is_odd(size):
    for number in range(60):
        met = [partner(number, member, size) for member in range(size)]
        assert met.count(None) == size % 2
        for member, other in enumerate(met):
            assert other is None or (other != member and met[other] == member)


def test_who_meets_whom_is_the_same_in_every_version():
    assert [[partner(number, member, 5) for member in range(5)] for number in range(3)] == [
        [1, 0, 4, None, 2],
        [4, 3, None, 1, 0],
        [2, None, 0, 4, 3],
    ]


@pytest.mark.parametrize("size", [4, 5])
def test_all_pairs_are_as_frequent(size):
    met = Counter(
        (member, partner(number, member, size)) for number in range(ROUNDS) for member in range(size)
    )
    expected = ROUNDS / (size - 1 + size % 2)
    pairs = [met[a, b] for a in range(size) for b in range(size) if a != b]
    assert len(pairs) == size * (size - 1)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in pairs)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
def test_a_round_leaves_as_much_of_the_distance_from_the_mean_as_the_closed_form_says(size):
    """Each member's square is a quarter of (x + y)², and a partner's is drawn from those who add up to -x."""
    random = torch.Generator().manual_seed(0)
    left = []
    for number in range(ROUNDS):
        apart = torch.randn(size, dtype=torch.float64, generator=random)
        apart -= apart.mean()
        others = [partner(number, member, size) for member in range(size)]
        together = (apart + apart[[m if o is None else o for m, o in enumerate(others)]]) / 2
        assert together.sum().abs() < 1e-12
        left.append((together.square().sum() / apart.square().sum()).item())
    expected = 0.5 if size % 2 else (size - 2) / (2 * (size - 1))
    found = torch.tensor(left, dtype=torch.float64)
    assert abs(found.mean().item() - expected) < max(4 * found.std().item() / ROUNDS**0.5, 1e-12)


def test_what_all_have_said_is_known_when_all_could_have_heard_of_it_from_one_another():
    assert [lag(size) for size in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 3, 3, 4]
