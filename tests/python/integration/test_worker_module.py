"""The module is the user's: whatever torch allows to do with it between two steps, the next step is right."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

import offbeat
from offbeat.errors import ConfigError, ModelMismatchError, UnsupportedTensorError

SPEC = offbeat.optim.SGD(lr=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Linear(16, 16, bias=False)
        self.two = nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        x = functional.relu(self.norm(self.conv(x))).flatten(1)
        return self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 3, 4, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def loss_of(model, number):
    x, y = batch(number)
    return functional.cross_entropy(model(x), y)


def is_the_server_s(worker, server):
    held = server.state_dict()
    state = {
        k.replace("_orig_mod.", "").removeprefix("module."): v for k, v in worker.model.state_dict().items()
    }
    assert sorted(state) == sorted(held)
    for name, tensor in state.items():
        assert torch.equal(tensor, held[name]), name


@pytest.fixture
def pair(serve, join):
    """A server, a worker on it, and a plain twin with torch's SGD."""

    def make(wrap=lambda model: model, **keywords):
        twin = wrap(net())
        server = serve(net())
        worker = join(server, wrap(net(seed=1)), optimizer=SPEC, **keywords)
        return server, worker, twin, torch.optim.SGD(twin.parameters(), lr=0.1)

    return make


def same(worker, twin):
    for (name, mine), theirs in zip(
        worker.model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


def run(worker, twin, optimizer, before=lambda model: None, clip=False):
    """Four steps on both sides; `before` is what the user does ahead of each."""
    for number in range(4):
        for model in (worker.model, twin):
            before(model)
            loss_of(model, number).backward()
            if clip:
                clip_grad_norm_(model.parameters(), 0.1)
        worker.step(samples=8)
        optimizer.step()
        optimizer.zero_grad()
        same(worker, twin)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_both_forms(pair, set_to_none):
    _, worker, twin, optimizer = pair()
    run(worker, twin, optimizer, before=lambda model: model.zero_grad(set_to_none=set_to_none))


def test_gradients_are_none_after_a_step(pair):
    _, worker, _, _ = pair()
    loss_of(worker.model, 0).backward()
    worker.step()
    assert all(p.grad is None for p in worker.model.parameters())


def test_clip_grad_norm(pair):
    _, worker, twin, optimizer = pair()
    run(worker, twin, optimizer, clip=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph(pair):
    _, worker, twin, optimizer = pair()
    for model in (worker.model, twin):
        loss_of(model, 0).backward(create_graph=True)
    worker.step(samples=8)
    optimizer.step()
    same(worker, twin)


def test_two_backwards_before_a_step_add_up(pair):
    _, worker, twin, optimizer = pair()
    for model in (worker.model, twin):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
    worker.step(samples=16)
    optimizer.step()
    same(worker, twin)


def test_accumulation_over_calls_is_the_mean_over_samples(serve, join):
    model = nn.Linear(4, 2)
    x, y = torch.randn(12, 4), torch.randint(0, 2, (12,))
    twin = copy.deepcopy(model)
    worker = join(serve(model), copy.deepcopy(model), optimizer=SPEC, update_frequency=3)
    receipts = []
    for part in (slice(0, 2), slice(2, 5), slice(5, 12)):
        functional.cross_entropy(worker.model(x[part]), y[part]).backward()
        receipts.append(worker.step(samples=len(x[part])))
    assert [receipt is None for receipt in receipts] == [True, True, False]
    functional.cross_entropy(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for mine, theirs in zip(worker.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_channels_last_goes_through_staging_with_the_same_bits(pair):
    server, worker, twin, optimizer = pair(lambda model: model.to(memory_format=torch.channels_last))
    assert not worker.model.conv.weight.is_contiguous()
    run(worker, twin, optimizer)
    is_the_server_s(worker, server)


def test_channels_last_chosen_in_mid_run(pair):
    server, worker, twin, optimizer = pair()
    run(worker, twin, optimizer)
    for model in (worker.model, twin):
        model.to(memory_format=torch.channels_last)
    run(worker, twin, optimizer)
    for model in (worker.model, twin):
        model.to(memory_format=torch.contiguous_format)
    run(worker, twin, optimizer)
    is_the_server_s(worker, server)


def test_a_transposed_parameter_goes_through_staging_with_the_same_bits(pair):
    def transposed(model):
        model.out.weight = nn.Parameter(model.out.weight.detach().t().contiguous().t())
        return model

    server, worker, twin, optimizer = pair(transposed)
    assert not worker.model.out.weight.is_contiguous()
    run(worker, twin, optimizer)
    is_the_server_s(worker, server)


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_model_is_moved_to_its_device_and_trained_there(serve, join, device):
    server, twin = serve(net()), net().to(device)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    worker = join(server, net(seed=1), device=device, optimizer=SPEC)
    assert {tensor.device.type for tensor in worker.model.state_dict().values()} == {device}
    for number in range(4):
        x, y = (tensor.to(device) for tensor in batch(number))
        for model in (worker.model, twin):
            functional.cross_entropy(model(x), y).backward()
        worker.step(samples=8)
        optimizer.step()
        optimizer.zero_grad()
        for mine, theirs in zip(worker.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
    for name, tensor in worker.model.state_dict().items():
        assert torch.equal(tensor.cpu(), server.state_dict()[name]), name


@pytest.mark.parametrize("in_flight", [1, 2])
def test_load_state_dict_between_steps_is_undone_by_the_next_step(pair, in_flight):
    server, worker, _, _ = pair(in_flight=in_flight)
    worker.model.out.requires_grad_(False)
    for number in range(4):
        worker.model.load_state_dict(net(seed=5).state_dict())
        loss_of(worker.model, number).backward()
        worker.step(samples=8)
    worker.flush()
    is_the_server_s(worker, server)


def test_load_state_dict_with_assign_is_followed_where_no_tie_breaks(serve, join):
    server = serve(nn.Linear(4, 2))
    worker = join(server, nn.Linear(4, 2), optimizer=SPEC)
    for number in range(3):
        worker.model.load_state_dict(nn.Linear(4, 2).state_dict(), assign=True)
        worker.model.weight.requires_grad_(True)
        worker.model.bias.requires_grad_(number != 1)
        worker.model(torch.ones(3, 4)).sum().backward()
        worker.step(samples=3)
        is_the_server_s(worker, server)


def test_ties_that_load_state_dict_with_assign_parts_are_named(pair):
    _, worker, _, _ = pair()
    worker.model.load_state_dict(copy.deepcopy(worker.model.state_dict()), assign=True)
    loss_of(worker.model, 0).backward()
    with pytest.raises(ModelMismatchError, match=r"'one\.weight', 'two\.weight' were one tensor"):
        worker.step()


def test_to_another_dtype_is_refused_by_name_and_back_is_fine(pair):
    server, worker, _, _ = pair()
    worker.model.to(torch.bfloat16)
    with pytest.raises(ModelMismatchError, match=r"'conv\.weight' .* became .* bfloat16"):
        worker.evaluate([batch(0)])
    worker.model.to(torch.float64)
    with pytest.raises(UnsupportedTensorError, match=r"'conv\.weight' is float64"):
        worker.evaluate([batch(0)])
    worker.model.to(torch.float32)
    loss_of(worker.model, 0).backward()
    worker.step(samples=8)
    is_the_server_s(worker, server)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(self.into(x))


def test_a_tie_to_a_replaced_submodule_is_watched_there(serve, join):
    worker = join(serve(Tied()), Tied(), optimizer=SPEC)

    def step():
        worker.model(torch.ones(1, 4)).sum().backward()
        return worker.step()

    worker.model.out = nn.Linear(4, 4, bias=False)
    worker.model.out.weight = worker.model.into.weight
    assert step().applied
    worker.model.out.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ModelMismatchError, match="were one tensor when the worker was made"):
        step()


def test_a_parameter_pruned_in_its_place_is_refused_by_name(serve, join):
    server = serve(nn.Linear(4, 4))
    worker = join(server, nn.Linear(4, 4), optimizer=SPEC)
    for parameter in worker.model.parameters():
        parameter.data = parameter.data[:2]  # the same object at the same address
    worker.model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ModelMismatchError, match=r"'weight' .* became .*\[2, 4\]"):
        worker.step()
    assert server.status()["version"] == 0


def test_a_parameter_transposed_in_its_place_is_written_in_its_own_order(serve, join):
    server = serve(nn.Linear(4, 4, bias=False))
    worker = join(server, nn.Linear(4, 4, bias=False), optimizer=SPEC)
    worker.model.weight.data = worker.model.weight.data.t()
    for number in range(2):
        worker.model(torch.full((1, 4), number + 1.0)).sum().backward()
        worker.step()
        is_the_server_s(worker, server)


def test_a_gradient_with_lazy_negation_has_the_right_sign(serve, join):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta = nn.Parameter(torch.ones(()))

    worker = join(serve(One()), One(), optimizer=offbeat.optim.SGD(lr=1.0))
    lazy = torch.complex(torch.zeros(()), torch.full((), 3.0)).conj().imag  # -3, over memory that says 3
    assert lazy.is_neg()
    worker.model.theta.grad = lazy
    worker.step()
    assert worker.model.theta == 1 + 3


def test_a_replaced_parameter_is_followed(pair):
    server, worker, _, _ = pair()
    for number in range(2):
        worker.model.out.weight = nn.Parameter(torch.zeros(3, 16))
        loss_of(worker.model, number).backward()
        worker.step(samples=8)
        is_the_server_s(worker, server)


def test_a_replaced_submodule_is_followed_by_train(pair):
    server, worker, _, _ = pair()
    worker.model.out = nn.Linear(16, 3)
    worker.train(dataloader=[batch(0), batch(1)], loss_fn=nn.CrossEntropyLoss(), progress=False)
    is_the_server_s(worker, server)
    worker.model.out = nn.Linear(16, 4)
    with pytest.raises(ModelMismatchError, match=r"'out\.weight'"):
        worker.train(dataloader=[batch(0)], loss_fn=nn.CrossEntropyLoss(), progress=False)


def test_a_replaced_submodule_is_followed_by_step(pair):
    server, worker, _, _ = pair()
    loss_of(worker.model, 0).backward()
    worker.step(samples=8)
    worker.model.out = nn.Linear(16, 3)
    worker.model.norm = nn.BatchNorm2d(4)
    before = server.state_dict()["out.weight"].clone()
    for number in (1, 2):
        loss_of(worker.model, number).backward()
        assert worker.step(samples=8).applied
        is_the_server_s(worker, server)
    assert not torch.equal(server.state_dict()["out.weight"], before)
    worker.model.out = nn.Linear(16, 4)
    loss_of(worker.model, 0).backward()
    with pytest.raises(ModelMismatchError, match=r"'out\.weight'"):
        worker.step()


def test_a_replaced_submodule_that_a_live_optimizer_does_not_hold_is_refused_by_name(serve, join):
    model = net()
    worker = join(serve(net()), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model.out = nn.Linear(16, 3)
    loss_of(model, 0).backward()
    with pytest.raises(ConfigError, match=r"'out\.weight'"):
        worker.step()


def test_a_replaced_submodule_is_followed_by_evaluate(pair):
    server, worker, _, _ = pair()
    worker.model.out = nn.Linear(16, 3)
    worker.evaluate([batch(0)])
    is_the_server_s(worker, server)
    worker.model.out = nn.Linear(16, 4)
    with pytest.raises(ModelMismatchError, match=r"'out\.weight'"):
        worker.evaluate([batch(0)])


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2, bias=False)
        self.more = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x):
        bias = 0 if self.out.bias is None else self.out.bias
        return self.out(x) + sum(self.more) + bias


def with_a_bias(model):
    model.out.bias = nn.Parameter(torch.ones(2))


ADDED = {
    "scale": lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(2))),
    "more.1": lambda model: model.more.append(nn.Parameter(torch.ones(2))),
    "out.bias": with_a_bias,
    "out.mean": lambda model: model.out.register_buffer("mean", torch.zeros(2)),
    "seen": lambda model: model.register_buffer("seen", torch.zeros(2), persistent=True),
}


@pytest.mark.parametrize("call", ["step", "flush", "evaluate", "train"])
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_module_is_refused_by_name(serve, join, name, call):
    server = serve(Lists())
    worker = join(server, Lists(), update_frequency=2 if call == "flush" else 1, optimizer=SPEC)
    if call == "flush":
        worker.model(torch.ones(1, 4)).sum().backward()
        worker.step()
    ADDED[name](worker.model)
    worker.model(torch.ones(1, 4)).sum().backward()
    calls = {
        "step": worker.step,
        "flush": worker.flush,
        "evaluate": lambda: worker.evaluate([]),
        "train": lambda: worker.train(dataloader=[], loss_fn=nn.CrossEntropyLoss(), progress=False),
    }
    for _ in range(2):
        with pytest.raises(ModelMismatchError, match=f"'{name}'.* the server's has no such tensor"):
            calls[call]()
    assert server.status()["version"] == 0


def test_a_buffer_outside_the_state_dict_may_come_and_go(serve, join):
    worker = join(serve(Lists()), Lists(), optimizer=SPEC)
    for change in (
        lambda: worker.model.register_buffer("cache", torch.zeros(2), persistent=False),
        lambda: delattr(worker.model, "seen"),
    ):
        change()
        worker.model(torch.ones(1, 4)).sum().backward()
        assert worker.step().applied


def test_torch_compile(pair):
    server, worker, twin, optimizer = pair(lambda model: torch.compile(model, backend="eager"))
    run(worker, twin, optimizer)
    is_the_server_s(worker, server)


def test_torch_compile_in_place(pair):
    def compiled(model):
        model.compile(backend="eager")
        return model

    server, worker, twin, optimizer = pair(compiled)
    run(worker, twin, optimizer)
    is_the_server_s(worker, server)


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("view", [False, True])
def test_ddp_in_both_bucket_modes(pair, view, in_flight):
    def ddp(model):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)

    server, worker, twin, optimizer = pair(ddp, in_flight=in_flight)
    if in_flight == 1:
        run(worker, twin, optimizer)
    else:
        for number in range(4):
            loss_of(worker.model, number).backward()
            worker.step(samples=8)
        worker.flush()
    is_the_server_s(worker, server)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("view", [False, True])
def test_ddp_around_the_worker_s_model_in_both_bucket_modes(pair, view):
    server, worker, twin, optimizer = pair(update_frequency=2)
    ddp = nn.parallel.DistributedDataParallel(worker.model, gradient_as_bucket_view=view)
    for number in range(4):
        loss_of(ddp, number).backward()
        worker.step(samples=8)
        (loss_of(twin, number) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(worker.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    is_the_server_s(worker, server)


def test_deepcopy_and_averaged_model_are_plain_and_independent(pair):
    _, worker, _, _ = pair()
    average = AveragedModel(worker.model)
    twin = copy.deepcopy(worker.model)
    before = [p.detach().clone() for p in twin.parameters()]
    loss_of(worker.model, 0).backward()
    worker.step()
    average.update_parameters(worker.model)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), before, strict=True))
    assert not torch.equal(worker.model.out.weight, twin.out.weight)
    assert torch.equal(average.module.out.weight, worker.model.out.weight)


def test_freeze_and_unfreeze_in_mid_run(pair):
    _, worker, twin, optimizer = pair()
    run(worker, twin, optimizer)
    for frozen in (True, False):
        for model in (worker.model, twin):
            model.conv.requires_grad_(not frozen)
        before = worker.model.conv.weight.detach().clone()
        run(worker, twin, optimizer)
        assert torch.equal(worker.model.conv.weight, before) is frozen


def test_what_is_frozen_here_and_trained_elsewhere_arrives(serve, join):
    server = serve(net())
    one, other = join(server, net(), optimizer=SPEC), join(server, net(), optimizer=SPEC)
    one.model.conv.requires_grad_(False)
    for number in range(3):
        for worker in (other, one):
            loss_of(worker.model, number).backward()
            worker.step(samples=8)
    is_the_server_s(one, server)
    assert not torch.equal(one.model.conv.weight, net().conv.weight)


def test_each_side_freezes_for_itself_and_that_makes_no_other_model(serve, join):
    frozen = net()
    frozen.conv.requires_grad_(False)
    server = serve(frozen)
    trains, does_not = net(), net()
    does_not.out.requires_grad_(False)
    for model, moved in ((trains, {"conv", "out"}), (does_not, {"conv"})):
        worker = join(server, model, optimizer=SPEC)
        before = server.state_dict()
        loss_of(worker.model, 0).backward()
        assert worker.step(samples=8).applied
        after = server.state_dict()
        assert {
            n for n in ("conv", "out") if not torch.equal(after[f"{n}.weight"], before[f"{n}.weight"])
        } == moved


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_is_frozen_is_shipped_once(serve, join, in_flight):
    def model():
        built = nn.Sequential(nn.Linear(8, 8), nn.Linear(1000, 1000))
        built[1].requires_grad_(False)
        return built

    server = serve(model())
    worker = join(server, model(), optimizer=SPEC, in_flight=in_flight)
    for _ in range(20):
        worker.model[0](torch.ones(2, 8)).sum().backward()
        worker.step()
    worker.flush()
    (seen,) = server.status()["workers"]
    assert seen["pushes"] == 20
    frozen = 4 * (1000 * 1000 + 1000)
    fragment = 4 * 65536  # the trained tensors share one with the head of a frozen one
    assert frozen <= seen["bytes_sent"] < frozen + 21 * fragment
    assert seen["bytes_received"] < 0.1 * frozen


def test_a_none_gradient_leaves_value_and_state_as_torch_does(serve, join):
    spec = offbeat.optim.AdamW(lr=0.05, weight_decay=0.1)
    twin = net()
    plain = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.1, foreach=False)
    worker = join(serve(net()), net(), optimizer=spec)
    for number in range(6):
        for model in (worker.model, twin):
            loss_of(model, number).backward()
            if number % 2:
                model.out.weight.grad = None
        before = worker.model.out.weight.detach().clone()
        worker.step(samples=8)
        plain.step()
        plain.zero_grad()
        if number % 2:
            assert torch.equal(worker.model.out.weight, before)
        for mine, theirs in zip(worker.model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        twin.load_state_dict(worker.model.state_dict())


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_stale_graph_raises_instead_of_giving_wrong_gradients(pair, in_flight):
    _, worker, _, _ = pair(in_flight=in_flight)
    stale = loss_of(worker.model, 0)
    loss_of(worker.model, 1).backward()
    worker.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_the_module_is_never_repointed(pair):
    _, worker, _, _ = pair()
    where = [(p, p.data_ptr()) for p in worker.model.parameters()]
    for number in range(3):
        loss_of(worker.model, number).backward()
        worker.step()
    assert all(
        p.data_ptr() == at and p is q for (p, at), q in zip(where, worker.model.parameters(), strict=True)
    )


def test_parameters_change_only_inside_step(serve, join):
    server = serve(net())
    one, other = join(server, net(), optimizer=SPEC, in_flight=2), join(server, net(), optimizer=SPEC)
    loss_of(one.model, 0).backward()
    one.step()
    held = [p.detach().clone() for p in one.model.parameters()]
    for number in range(3):
        loss_of(other.model, number).backward()
        other.step()
    assert all(torch.equal(p, h) for p, h in zip(one.model.parameters(), held, strict=True))
    one.flush()
    assert not all(torch.equal(p, h) for p, h in zip(one.model.parameters(), held, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_travel_in_their_own_dtype(serve, join, dtype):
    server = serve(nn.Linear(4, 2).to(dtype))
    worker = join(server, nn.Linear(4, 2).to(dtype), optimizer=SPEC)
    before = worker.model.weight.detach().clone()
    worker.model(torch.ones(3, 4, dtype=dtype)).sum().backward()
    worker.step(samples=3)
    assert worker.model.weight.dtype is dtype
    assert torch.equal(worker.model.weight.detach(), (before.float() - 0.1 * 3).to(dtype))


# ---------------------------------------------------------------------------------------- buffers


def test_counts_of_several_workers_add_up_and_averages_do_not_overshoot(serve, join):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("seen", torch.tensor(0))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.seen += len(x)
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
            return x @ self.weight.new_ones(3, 2) @ self.weight

    server = serve(Counter())
    workers = [join(server, Counter(), optimizer=SPEC) for _ in range(3)]
    for n, worker in enumerate(workers, start=1):
        worker.model(torch.ones(n, 3)).sum().backward()
    for worker in workers:
        worker.step(samples=1)
    held = server.state_dict()
    assert held["seen"] == 6
    assert held["mean"].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_batchnorm_of_many_workers_stays_between_what_they_saw(serve, join, in_flight):
    """Each gathers four batches from parameters that are seven pushes old: added up, the changes diverge."""
    torch.manual_seed(0)
    server = serve(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), optimizer=SPEC)

    def backward(worker):
        worker.model(0.1 * torch.randn(8, 4)).square().mean().backward()

    workers = [join(server, update_frequency=4, in_flight=in_flight) for _ in range(8)]
    for _ in range(15):
        for worker in workers:
            if worker.model[0].weight.grad is not None:
                worker.step(samples=8)
            for _ in range(3):
                backward(worker)
                worker.step(samples=8)
            backward(worker)
    variance = server.state_dict()["1.running_var"]
    assert variance.min() > 0
    assert variance.max() < 0.5, "the first value is 1, and the batches' far below"


def test_local_buffers_stay_this_worker_s_own(serve, join):
    server = serve(net())
    worker = join(server, net(seed=1), optimizer=SPEC, buffers="local")
    for number in range(3):
        loss_of(worker.model, number).backward()
        worker.step(samples=8)
    assert worker.model.norm.num_batches_tracked == 3
    assert server.state_dict()["norm.num_batches_tracked"] == 0
    assert torch.equal(server.state_dict()["conv.weight"], worker.model.conv.weight)


def test_two_pushes_in_flight_lose_no_change_of_a_buffer(pair):
    server, worker, _, _ = pair(in_flight=2)
    for number in range(5):
        loss_of(worker.model, number).backward()
        worker.step(samples=8)
        if number % 3 == 1:
            worker.flush()
    worker.flush()
    assert worker.model.norm.num_batches_tracked == 5
    is_the_server_s(worker, server)


def test_with_two_in_flight_rejected_pushes_leave_no_change_of_a_buffer_in_the_worker(serve, join):
    server = serve(net(), staleness_policy=offbeat.staleness.GradientFiltering(max_norm=1e-9))
    worker = join(server, net(), in_flight=2, optimizer=SPEC)
    for seed in range(3):
        loss_of(worker.model, seed).backward()
        worker.step(samples=8)
    assert [receipt.reason for receipt in worker.flush()] == ["norm"]
    is_the_server_s(worker, server)


def test_a_rejected_push_changes_no_buffer(serve, join):
    server = serve(net(), max_staleness=0)
    fast, slow = join(server, net(), optimizer=SPEC), join(server, net(), optimizer=SPEC)
    loss_of(slow.model, 0).backward()
    loss_of(fast.model, 1).backward()
    assert fast.step(samples=8).applied
    before = server.state_dict()
    receipt = slow.step(samples=8)
    assert (receipt.verdict, receipt.staleness) == ("reject", 1)
    is_the_server_s(slow, server)
    assert all(torch.equal(before[k], v) for k, v in server.state_dict().items())
