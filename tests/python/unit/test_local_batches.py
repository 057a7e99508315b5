"""Batches: each worker's own order, nests moved whole, and a pair or nothing."""

from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from offbeat.errors import ConfigError
from offbeat.local.batches import Epochs, Given, count, moved, split

DATA = TensorDataset(torch.arange(50), torch.arange(50))


def order(name, epoch, dataset=DATA):
    return [int(x) for xs, _ in Epochs(dataset, 8, name, pin_memory=False).epoch(epoch) for x in xs]


def test_an_epoch_is_a_shuffled_pass_with_a_ragged_end():
    assert sorted(order("run a worker b", 0)) == list(range(50))
    assert order("run a worker b", 0) != list(range(50))
    sizes = [len(x) for x, _ in Epochs(DATA, 8, "a", pin_memory=False).epoch(0)]
    assert sizes == [8] * 6 + [2]


def test_the_order_follows_from_name_and_epoch_alone():
    first = order("run a worker b", 3)
    torch.manual_seed(99)
    assert order("run a worker b", 3) == first
    assert order("run a worker c", 3) != first
    assert order("run z worker b", 3) != first
    assert order("run a worker b", 4) != first


def test_an_epoch_s_order_does_not_depend_on_the_epochs_before():
    epochs = Epochs(DATA, 8, "a", pin_memory=False)
    for epoch in range(3):
        list(epochs.epoch(epoch))
    assert [int(x) for xs, _ in epochs.epoch(7) for x in xs] == order("a", 7)


def test_going_through_a_dataset_moves_no_global_random_state():
    before = torch.get_rng_state()
    order("a", 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_iterable_dataset_keeps_its_order():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from ((torch.tensor(i), torch.tensor(i)) for i in range(20))

    assert order("a", 0, Stream()) == list(range(20))


def test_a_loader_of_one_s_own_is_used_as_it_is():
    loader = DataLoader(DATA, batch_size=8)
    given = Given(loader)
    assert given.epoch(5) is loader
    assert len(given) == 7


@pytest.mark.parametrize("by_batches", [False, True], ids=["sampler", "batch_sampler"])
def test_a_distributed_sampler_is_told_the_epoch(by_batches):
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    batched = {"batch_sampler": BatchSampler(sampler, 8, drop_last=False)}
    given = Given(DataLoader(DATA, **(batched if by_batches else {"sampler": sampler, "batch_size": 8})))
    orders = [torch.cat([x for x, _ in given.epoch(number)]).tolist() for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sampler.epoch == 0


def test_whatever_of_a_loader_has_a_set_epoch_is_told_once():
    class Told(list):
        def set_epoch(self, number):
            self.append(number)

    loader, both, dataset = Told(), Told(), Told()
    loader.sampler = loader.batch_sampler = both
    loader.dataset = dataset
    for number in (4, 5):
        Given(loader).epoch(number)
    assert loader == both == dataset == [4, 5]


@pytest.mark.parametrize("kind", [IterableDataset, TensorDataset])
def test_a_dataset_that_has_a_set_epoch_is_told_the_epoch(kind):
    class Told(kind):
        epoch = None

        def set_epoch(self, number):
            self.epoch = number

        def __iter__(self):
            yield self.epoch, 0

    dataset = Told() if kind is IterableDataset else Told(torch.arange(3))
    epochs = Epochs(dataset, 1, "a", pin_memory=False)
    for number in (4, 5):
        list(epochs.epoch(number))
        assert dataset.epoch == number


@pytest.mark.parametrize(
    "batch", [torch.zeros(3), (1, 2, 3), [1], {"x": 1, "y": 2}, 5], ids=lambda b: type(b).__name__
)
def test_what_is_no_pair_is_refused_with_what_to_do(batch):
    with pytest.raises(ConfigError, match=r"is a pair .*; make it such .*collate_fn"):
        split(batch)


def test_a_nest_is_moved_whole_and_keeps_its_types():
    point = namedtuple("point", "x y")  # noqa: PYI024  the plain kind is the point
    nest = {"a": [torch.zeros(2), "text"], "b": point(torch.ones(1), (torch.ones(3), None))}
    found = moved(nest, torch.device("meta"))
    assert found["a"][0].is_meta
    assert found["a"][1] == "text"
    assert type(found["b"]) is point
    assert found["b"].y[0].is_meta
    assert found["b"].y[1] is None


def test_mappings_of_all_kinds_are_moved_and_keep_what_they_are():
    for made in (OrderedDict(), defaultdict(list), UserDict(), ChainMap()):
        made["x"], made["text"] = torch.zeros(3), "text"
        found = moved(made, torch.device("meta"))
        assert type(found) is type(made)
        assert found["x"].is_meta
        assert found["text"] == "text"
        assert made["x"].is_cpu
    assert found is not made
    assert moved(defaultdict(list), torch.device("meta"))["new"] == []
    assert moved(MappingProxyType({"x": torch.zeros(3)}), torch.device("meta"))["x"].is_meta


def test_moving_a_mapping_that_keeps_its_items_in_an_inner_dict_leaves_it_as_it_is():
    class Wrapped(MutableMapping):
        def __init__(self, inner):
            self.inner = inner

        __getitem__ = property(lambda self: self.inner.__getitem__)
        __setitem__ = property(lambda self: self.inner.__setitem__)
        __delitem__ = property(lambda self: self.inner.__delitem__)
        __iter__ = property(lambda self: self.inner.__iter__)
        __len__ = property(lambda self: self.inner.__len__)

    made = Wrapped({"x": torch.zeros(3), "text": "text"})
    found = moved(made, torch.device("meta"))
    assert made["x"].is_cpu
    assert found["x"].is_meta
    assert found["text"] == "text"


def test_what_has_a_to_of_its_own_is_moved_by_it():
    class Encoding(UserDict):
        """As transformers' BatchEncoding, whose constructor takes more than its items."""

        def __init__(self, data, encodings):
            super().__init__(data)
            self.encodings = encodings

        def to(self, device):
            return Encoding({key: tensor.to(device) for key, tensor in self.items()}, self.encodings)

    found = moved([Encoding({"ids": torch.zeros(3)}, ["kept"])], torch.device("meta"))[0]
    assert type(found) is Encoding
    assert found["ids"].is_meta
    assert found.encodings == ["kept"]


def test_packed_sequences_are_moved_by_their_to_and_counted_by_sequence():
    packed = pack_sequence([torch.zeros(n, 2) for n in (5, 3, 1)])
    assert count(packed, torch.zeros(3)) == 3
    found = moved((packed, 1), torch.device("meta"))[0]
    assert type(found) is PackedSequence
    assert found.data.is_meta
    assert found.batch_sizes.is_cpu  # torch has them nowhere else


def test_samples_are_counted_by_the_first_dimension_there_is():
    assert count(torch.zeros(7, 2), torch.zeros(7)) == 7
    assert count({"x": [torch.tensor(1.0), torch.zeros(5, 2)]}, None) == 5
    assert count("text", (torch.zeros(3),)) == 3
    assert count(UserDict(x=torch.zeros(4)), torch.zeros(5)) == 4
    with pytest.raises(ConfigError, match="cannot be counted"):
        count("text", 5)
