"""What a push carries, computed on a real module: no server is needed to add up gradients."""

import ctypes

import pytest
import torch
from torch import nn

from offbeat.errors import ConfigError, NonFiniteError, StateError, UnsupportedTensorError
from offbeat.module import Binding, describe
from offbeat.receipt import Receipt
from offbeat.worker.gradients import Gradients
from offbeat.worker.live import LiveOptimizer

APPLIED = Receipt(1, 1, 0, 1.0, "admit", applied=True, duplicate=False)
REJECTED = Receipt(1, 1, 9, 0.0, "reject", applied=False, duplicate=False, reason="too_stale")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


def bound(model, **options) -> Binding:
    """Bind a model to its own table, as if it had just been pulled."""
    description = describe(model)
    binding = Binding(model, description.table, **options)
    land(binding, [t.detach().clone() for t in description.tensors])
    return binding


def land(binding, values):
    """Do what a pull does: write into the memory that the binding offers."""
    binding.refresh()
    for (_, address, nbytes), value in zip(binding.out(), map(torch.Tensor.contiguous, values), strict=True):
        assert value.nbytes == nbytes
        ctypes.memmove(address, value.data_ptr(), nbytes)
    binding.landed()


def backward(model, samples, seed=0, scale=1.0):
    """One batch: gradients of a mean loss."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    y = torch.randint(0, 2, (samples,), generator=generator)
    (nn.functional.cross_entropy(model(x), y) * scale).backward()


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def pushed(contribution, binding):
    """The pushed values of the parameters, in the module's order."""
    values = contribution.take()
    of = {id(slot.tensor): value for slot, value in zip(binding.slots, values, strict=True)}
    return [of[id(p)] for p in binding.module.parameters()]


def add(contribution, binding, samples):
    binding.refresh()
    contribution.add(samples)


def test_one_batch_keeps_its_bits():
    model = mlp()
    binding = bound(model)
    backward(model, 5)
    wanted = gradients(model)
    contribution = Gradients(binding, "mean")
    add(contribution, binding, 5)
    found = pushed(contribution, binding)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_one_batch_is_pushed_from_where_autograd_left_it():
    model = mlp()
    binding = bound(model)
    backward(model, 5)
    where = [p.grad.data_ptr() for p in model.parameters()]
    contribution = Gradients(binding, "mean", waits=False)
    add(contribution, binding, 5)
    memories = binding.memories(contribution.take())
    of = {id(slot.tensor): memory[1] for slot, memory in zip(binding.slots, memories, strict=True)}
    assert [of[id(p)] for p in model.parameters()] == where


def test_a_pull_writes_into_the_tensors_own_memory():
    model = mlp()
    binding = bound(model)
    places = zip(binding.slots, binding.out(), strict=True)
    assert all((m[1] == slot.tensor.data_ptr()) == slot.is_parameter for slot, m in places)
    assert {id(slot.tensor) for slot in binding.slots} == set(
        map(id, (*model.parameters(), *model.buffers()))
    )


def test_batches_are_weighted_by_their_size_and_divided_once():
    model = mlp()
    binding = bound(model)
    contribution = Gradients(binding, "mean")
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for seed, samples in enumerate((4, 1, 3)):
        model.eval()
        backward(model, samples, seed)
        wanted = [w + g * samples for w, g in zip(wanted, gradients(model), strict=True)]
        add(contribution, binding, samples)
    found = pushed(contribution, binding)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b / 8, rtol=1e-6, atol=1e-8)


def test_equal_shares_of_a_batch_are_the_batch():
    model = mlp().eval()
    binding = bound(model)
    x, y = torch.randn(12, 4), torch.randint(0, 2, (12,))
    nn.functional.cross_entropy(model(x), y).backward()
    wanted = gradients(model)
    model.zero_grad()
    contribution = Gradients(binding, "mean")
    for part in (slice(0, 6), slice(6, 9), slice(9, 12)):
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        add(contribution, binding, len(x[part]))
    for a, b in zip(pushed(contribution, binding), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_sums_are_added_up_and_not_divided():
    model = mlp().eval()
    binding = bound(model)
    contribution = Gradients(binding, "sum")
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for seed, samples in enumerate((4, 2)):
        backward(model, samples, seed, scale=samples)
        wanted = [w + g for w, g in zip(wanted, gradients(model), strict=True)]
        add(contribution, binding, samples)
    assert all(torch.equal(a, b) for a, b in zip(pushed(contribution, binding), wanted, strict=True))


def test_half_precision_batches_do_not_overflow_when_they_are_weighted():
    model = nn.Linear(1, 1, bias=False).half()
    binding = bound(model)
    contribution = Gradients(binding, "mean")
    for _ in range(2):
        model.weight.grad = torch.full((1, 1), 6e4, dtype=torch.float16)
        add(contribution, binding, 100)
    (value,) = contribution.take()
    memory = binding.memories([value])
    assert memory[0][0].dtype is torch.float16
    assert float(memory[0][0]) == 6e4


def test_gradients_are_none_after_each_batch():
    model = mlp()
    binding = bound(model)
    backward(model, 3)
    add(Gradients(binding, "mean"), binding, 3)
    assert all(p.grad is None for p in model.parameters())


def test_none_gradients_are_left_out_and_what_is_frozen_is_not_pushed():
    model = mlp()
    binding = bound(model)
    contribution = Gradients(binding, "mean")
    backward(model, 3)
    model[0].weight.grad = None
    model[3].bias.requires_grad_(False)
    add(contribution, binding, 3)
    found = dict(zip(dict(model.named_parameters()), pushed(contribution, binding), strict=True))
    assert {name for name, value in found.items() if value is None} == {"0.weight", "3.bias"}
    model[3].bias.requires_grad_(True)
    backward(model, 3)
    add(contribution, binding, 3)
    assert all(value is not None for value in pushed(contribution, binding))


def test_a_tensor_with_a_gradient_in_one_batch_of_two_counts_the_other_as_zero():
    model = mlp().eval()
    binding = bound(model)
    contribution = Gradients(binding, "mean")
    backward(model, 2)
    wanted = model[3].bias.grad.clone() / 2
    add(contribution, binding, 2)
    backward(model, 2, seed=1)
    model[3].bias.grad = None
    add(contribution, binding, 2)
    torch.testing.assert_close(pushed(contribution, binding)[-1], wanted)


def test_no_gradient_at_all_raises():
    binding = bound(mlp())
    with pytest.raises(StateError, match=r"call loss\.backward\(\) before"):
        add(Gradients(binding, "mean"), binding, 1)


@pytest.fixture
def alone(tmp_path):
    meet = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_gradients_of_ddp_buckets_are_copied_where_they_wait_for_another_batch():
    model = nn.parallel.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    binding = bound(model)
    contribution = Gradients(binding, "mean", waits=True)
    backward(model, 3)
    wanted, held = gradients(model), [p.grad for p in model.parameters()]
    add(contribution, binding, 3)
    for gradient in held:
        gradient.zero_()
    found = pushed(contribution, binding)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("given", [lambda own: own, torch.Tensor.detach], ids=["itself", "an alias"])
@pytest.mark.parametrize("num", [1, 2])
def test_memory_that_a_user_puts_each_batch_s_gradient_into_is_left_alone(num, given):
    model = mlp().eval()
    binding = bound(model)
    memory = [torch.zeros_like(p) for p in model.parameters()]
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    contribution = Gradients(binding, "mean")
    for seed in range(num):
        for parameter, own in zip(model.parameters(), memory, strict=True):
            parameter.grad = given(own.zero_())
        backward(model, 4, seed)
        wanted = [w + g / num for w, g in zip(wanted, gradients(model), strict=True)]
        add(contribution, binding, 4)
    memory[0].fill_(9.0)
    for a, b in zip(pushed(contribution, binding), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("view", [False, True])
def test_no_gradient_is_copied_that_waits_for_no_other_batch(view):
    model = nn.parallel.DistributedDataParallel(mlp(), gradient_as_bucket_view=view)
    binding = bound(model)
    contribution = Gradients(binding, "mean", waits=False)
    backward(model, 3)
    where = [p.grad.data_ptr() for p in model.parameters()]
    add(contribution, binding, 3)
    assert [value.data_ptr() for value in pushed(contribution, binding)] == where


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph_gradients_are_pushed():
    model = mlp()
    binding = bound(model)
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward(create_graph=True)
    assert model[0].weight.grad.requires_grad
    contribution = Gradients(binding, "mean")
    add(contribution, binding, 3)
    memories = binding.memories(contribution.take())
    assert all(m is not None for m, slot in zip(memories, binding.slots, strict=True) if slot.is_parameter)


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    binding = bound(model)
    model(torch.tensor([1])).sum().backward()
    contribution = Gradients(binding, "mean")
    add(contribution, binding, 1)
    with pytest.raises(UnsupportedTensorError, match=r"gradient of '0\.weight' is sparse"):
        binding.memories(contribution.take())


# ---------------------------------------------------------------------------------------- buffers


def buffers_in(values, binding):
    return {
        slot.spec["name"]
        for slot, value in zip(binding.slots, values, strict=True)
        if value is not None and not slot.is_parameter
    }


def test_buffers_go_with_a_push():
    model = mlp()
    binding = bound(model)
    contribution = Gradients(binding, "mean")
    backward(model, 3)
    add(contribution, binding, 3)
    assert buffers_in(contribution.take(), binding) == {f"1.{name}" for name, _ in model[1].named_buffers()}


def test_a_buffer_that_the_module_replaced_is_pushed():
    model = mlp()
    model.register_buffer("average", torch.zeros(3))
    binding = bound(model)
    model.average = model.average * 0.9 + 1
    backward(model, 3)
    contribution = Gradients(binding, "mean")
    add(contribution, binding, 3)
    values = contribution.take()
    assert "average" in buffers_in(values, binding)
    land(binding, [torch.full(slot.tensor.shape, 2).to(slot.tensor.dtype) for slot in binding.slots])
    assert model.average.tolist() == [2, 2, 2]


def test_local_buffers_are_filled_once_and_neither_pushed_nor_written_again():
    model = mlp()
    binding = bound(model, local_buffers=True)
    assert model[1].num_batches_tracked == 0
    contribution = Gradients(binding, "mean")
    backward(model, 3)
    add(contribution, binding, 3)
    assert buffers_in(contribution.take(), binding) == set()
    mean = model[1].running_mean.clone()
    land(binding, [torch.full(slot.tensor.shape, 7).to(slot.tensor.dtype) for slot in binding.slots])
    assert torch.equal(model[1].running_mean, mean)
    assert (model[0].weight == 7).all()


# ---------------------------------------------------------------------------------------- live optimizers


def live(model, optimizer):
    binding = bound(model)
    contribution = LiveOptimizer(binding, optimizer)
    land(binding, [slot.tensor.detach().clone() for slot in binding.slots])
    return binding, contribution


def local_step(model, binding, contribution, seed):
    backward(model, 6, seed)
    add(contribution, binding, 6)


def test_the_difference_of_k_local_steps_is_pushed():
    model, plain = mlp(), mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    binding, contribution = live(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    twin = torch.optim.Adam(plain.parameters(), lr=0.01)
    for seed in range(3):
        local_step(model, binding, contribution, seed)
        backward(plain, 6, seed)
        twin.step()
        twin.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    found = pushed(contribution, binding)
    for difference, then, now in zip(found, before, model.parameters(), strict=True):
        assert torch.equal(difference, now.detach() - then)


def test_what_no_step_moved_is_left_out_of_the_difference():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    binding, contribution = live(model, optimizer)
    local_step(model, binding, contribution, 0)
    found = dict(zip(dict(model.named_parameters()), pushed(contribution, binding), strict=True))
    assert {name for name, value in found.items() if value is None} == {"0.weight", "0.bias"}


def optimizer_values(optimizer):
    return [
        (k, v.clone() if isinstance(v, torch.Tensor) else v)
        for state in optimizer.state.values()
        for k, v in state.items()
    ]


def test_after_a_rejection_the_optimizer_s_state_is_that_from_before_the_push():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    binding, contribution = live(model, optimizer)
    local_step(model, binding, contribution, 0)
    contribution.take()
    contribution.settled(APPLIED)
    before = optimizer_values(optimizer)
    land(binding, [slot.tensor.detach().clone() for slot in binding.slots])
    for seed in (1, 2):
        local_step(model, binding, contribution, seed)
    contribution.take()
    assert not all(
        torch.equal(a, b) for (_, a), (_, b) in zip(before, optimizer_values(optimizer), strict=True)
    )
    contribution.settled(REJECTED)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, optimizer_values(optimizer), strict=True))


@pytest.mark.parametrize("fate", [APPLIED, REJECTED], ids=["applied", "rejected"])
def test_no_step_of_a_rejected_push_comes_back_with_the_push_after_it(fate):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    binding, contribution = live(model, optimizer)
    local_step(model, binding, contribution, 0)
    contribution.take()
    contribution.settled(APPLIED)
    before = optimizer_values(optimizer)

    def is_as_before():
        now = optimizer_values(optimizer)
        return all(torch.equal(a, b) for (_, a), (_, b) in zip(before, now, strict=True))

    for seed in (1, 2):
        local_step(model, binding, contribution, seed)
        contribution.take()
    contribution.settled(REJECTED)
    assert is_as_before()
    local_step(model, binding, contribution, 3)
    contribution.take()
    assert not is_as_before()
    contribution.settled(fate)
    assert is_as_before() is (fate is REJECTED)
    contribution.settled(REJECTED)
    assert is_as_before()


def test_what_is_loaded_into_the_optimizer_stays_when_pushes_begun_before_are_rejected():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    binding, contribution = live(model, optimizer)
    local_step(model, binding, contribution, 0)
    contribution.take()  # in flight
    local_step(model, binding, contribution, 1)  # gathered
    other = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for parameter in model.parameters():
        other.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 7.0)
    optimizer.load_state_dict(other.state_dict())

    def is_loaded():
        return all(bool((value == 7.0).all()) for _, value in optimizer_values(optimizer))

    assert is_loaded()
    local_step(model, binding, contribution, 2)
    contribution.take()
    for _ in range(2):
        contribution.settled(REJECTED)
        assert is_loaded()
    contribution.close()
    other.state.clear()
    optimizer.load_state_dict(other.state_dict())  # and the hook is gone


def test_after_a_rejected_first_push_the_optimizer_has_no_state():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    binding, contribution = live(model, optimizer)
    local_step(model, binding, contribution, 0)
    contribution.take()
    contribution.settled(REJECTED)
    assert not optimizer.state


def test_dropped_local_steps_leave_no_trace_in_the_optimizer():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    binding, contribution = live(model, optimizer)
    local_step(model, binding, contribution, 0)
    contribution.drop()
    assert not optimizer.state


def test_a_nan_never_reaches_a_live_optimizer():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    binding, contribution = live(model, optimizer)
    backward(model, 3)
    model[3].weight.grad[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match=r"'3\.weight' is nan at index 5"):
        add(contribution, binding, 3)
    assert not optimizer.state
    assert all(gradient is None for gradient in gradients(model)), "the next step would meet the NaN again"
    backward(model, 3)
    add(contribution, binding, 3)


def test_a_live_optimizer_steps_a_model_with_a_parameter_of_no_element():
    model = mlp()
    model.none = nn.Parameter(torch.empty(0, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    binding, contribution = live(model, optimizer)
    model.none.grad = torch.empty(0, 3)
    backward(model, 3)
    wanted = model[0].weight.detach() - 0.1 * model[0].weight.grad
    add(contribution, binding, 3)
    torch.testing.assert_close(model[0].weight.detach(), wanted)


def test_a_live_optimizer_steps_where_a_sparse_gradient_has_no_value():
    model = nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True, mode="sum"), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    binding, contribution = live(model, optimizer)
    before = model[0].weight.detach().clone()
    for num in (0, 2):
        model[1](model[0](torch.arange(num), torch.tensor([0]))).sum().backward()
        assert model[0].weight.grad._nnz() == num
        add(contribution, binding, 1)
    assert (model[0].weight != before).any(dim=1).tolist() == [True, True, False, False, False]
    model[1].requires_grad_(False)
    model[1](model[0](torch.arange(0), torch.tensor([0]))).sum().backward()
    add(contribution, binding, 1)


def test_the_user_s_own_call_of_a_live_optimizer_raises():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _, contribution = live(model, optimizer)
    backward(model, 3)
    with pytest.raises(StateError, match=r"call worker\.step\(\)"):
        optimizer.step()
    contribution.close()
    optimizer.step()


def test_a_live_optimizer_without_one_of_the_parameters_is_refused_by_its_name():
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
    with pytest.raises(ConfigError, match=r"does not hold the model's parameter '1\.weight'"):
        LiveOptimizer(bound(model), optimizer)


def test_a_live_optimizer_of_another_model_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *mlp().parameters()], lr=0.01)
    with pytest.raises(ConfigError, match=r"not parameters of worker\.model"):
        LiveOptimizer(bound(model), optimizer)


def test_a_live_optimizer_whose_step_needs_a_closure_is_refused():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match=r"LBFGS\.step\(\) needs a closure.* give an optimizer"):
        LiveOptimizer(bound(model), optimizer)


def test_unfreezing_what_a_live_optimizer_does_not_hold_is_refused():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    binding, contribution = live(model, optimizer)
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'0\.weight'"):
        local_step(model, binding, contribution, 0)


def test_what_is_in_flight_keeps_its_state_when_the_rest_is_dropped():
    model = mlp()
    binding = bound(model)
    live = torch.optim.Adam(model.parameters())
    contribution = LiveOptimizer(binding, live)
    for seed in range(2):
        backward(model, 4, seed)
        binding.refresh()
        contribution.add(4)
        if seed == 0:
            contribution.take()
    contribution.drop(in_flight=1)
    assert all(state["step"] == 1 for state in live.state.values())
    contribution.settled(REJECTED)
    assert not live.state
