"""A worker's life: forks, copies, ends. What the server sees of each."""

import contextlib
import copy
import logging
import multiprocessing
import os
import pickle  # noqa: TID251  that it refuses is the claim
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import ClosedError, ConfigError, ConnectionLostError, StateError
from support.fault_plan import Bytes, Hold, plan
from support.fault_proxy import FaultProxy
from support.host import Host
from support.waiting import AT_ONCE_S, wait_for
from support.worker import train_in_a_process

SPEC = offbeat.optim.SGD(lr=0.1)
SLOW = [pytest.mark.slow, pytest.mark.timeout(180)]  # each process imports torch anew


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(worker):
    worker.model(torch.ones(3, 4)).sum().backward()
    return worker.step(samples=3)


def states(server):
    return [worker["state"] for worker in server.status()["workers"]]


def last_departure(server):
    wait_for(lambda: states(server) not in (["joined"], ["stalled"]))
    (worker,) = server.status()["workers"]
    return worker


# ---------------------------------------------------------------------------------------- ends


def test_close_says_finished_may_be_called_twice_and_the_model_stays_usable(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    step(worker)
    worker.close()
    worker.close()
    assert last_departure(server)["state"] == "finished"
    assert worker.model(torch.ones(1, 4)).shape == (1, 2)
    assert worker.history.steps == 0


@pytest.mark.parametrize(
    "end", [lambda worker: worker.close(), lambda worker: worker.__exit__(None, None, None)]
)
def test_closing_with_batches_that_were_not_pushed_warns_with_their_number(serve, join, caplog, end):
    server = serve(net())
    worker = join(server, net(), update_frequency=3, optimizer=SPEC, worker_id="me")
    for _ in range(5):
        step(worker)
    end(worker)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"worker me at {server.address} is closed with 2 batch(es) gathered and not pushed" in line
    assert "flush()" in line


def test_closing_after_a_flush_or_by_an_exception_warns_of_nothing(serve, join, caplog):
    server = serve(net())
    first, second = (join(server, net(), update_frequency=3, optimizer=SPEC) for _ in range(2))
    step(first)
    first.flush()
    first.close()
    step(second)
    second.__exit__(ValueError, ValueError(), None)
    assert [r for r in caplog.records if r.levelno == logging.WARNING] == []


def test_repr_names_worker_and_server_or_says_closed(serve, join):
    server = serve(net())
    worker = join(server, net(), worker_id="me")
    assert repr(worker) == f"<offbeat.AsyncWorker me at {server.address}>"
    worker.close()
    assert repr(worker) == "<offbeat.AsyncWorker, closed>"


def busy(worker, proxy):
    """A thread that stays in a step of the worker until the proxy heals."""
    worker.model.weight.sum().backward()
    thread = threading.Thread(target=worker.step)
    thread.start()
    proxy.wait_for("holds")
    return thread


@pytest.mark.parametrize(
    "use",
    [
        lambda worker: worker.step(),
        lambda worker: worker.optimizer.step(),
        lambda worker: worker.flush(),
        lambda worker: worker.evaluate([]),
        lambda worker: worker.train(dataloader=[], loss_fn=nn.MSELoss()),
        lambda worker: worker.close(),
    ],
)
def test_two_threads_in_one_worker_are_told_so_and_nothing_is_mixed(serve, join, use):
    server = serve(net(), optimizer=SPEC)
    worker = join(server, net())
    inside, go_on = threading.Event(), threading.Event()

    def loss(outputs, targets):
        inside.set()
        assert go_on.wait(20)
        return nn.functional.mse_loss(outputs, targets)

    batches = [(torch.ones(3, 4), torch.zeros(3, 2))]
    thread = threading.Thread(
        target=worker.train, kwargs={"dataloader": batches, "loss_fn": loss, "progress": False}
    )
    thread.start()
    assert inside.wait(20)
    with pytest.raises(StateError, match="another thread is in a call of this worker"):
        use(worker)
    go_on.set()
    thread.join(20)
    assert worker.history.receipts == {"applied": 1}
    assert step(worker).applied
    assert server.status()["version"] == 2


def test_a_worker_that_was_never_made_was_never_there(serve):
    server = serve(net(), optimizer=SPEC)
    with pytest.raises(ConfigError, match="lr"):
        offbeat.AsyncWorker(server.address, worker_id="a", optimizer=offbeat.optim.SGD(lr=0.123))
    status = server.status()
    assert status["workers"] == []
    assert (status["departures"][0]["worker"], status["departures"][0]["state"]) == ("a", "left")
    assert status["departures"][0]["cause"].startswith("could not begin: ConfigError: ")


def test_version_may_be_read_while_another_thread_is_in_a_call(serve, join):
    server = serve(nn.Linear(4, 100_000))
    with FaultProxy(server.address, plan(Hold(Bytes(300_000)))) as proxy:
        worker = join(proxy.address, nn.Linear(4, 100_000), optimizer=SPEC, reconnect_timeout_s=0)
        thread = busy(worker, proxy)
        try:
            assert (worker.version, worker.id, worker.run_id) == (0, "worker-0", server.status()["run_id"])
        finally:
            proxy.heal()
            thread.join()
        assert worker.version == 1


def test_close_while_another_thread_is_in_a_call_raises_and_works_afterwards(serve, join):
    server = serve(nn.Linear(4, 100_000))
    with FaultProxy(server.address, plan(Hold(Bytes(300_000)))) as proxy:
        worker = join(proxy.address, nn.Linear(4, 100_000), optimizer=SPEC, reconnect_timeout_s=0)
        thread = busy(worker, proxy)
        try:
            with pytest.raises(StateError, match="another thread is in a call"):
                worker.close()
        finally:
            proxy.heal()
            thread.join()
        assert states(server) == ["joined"]
        worker.close()
        assert last_departure(server)["state"] == "finished"


@pytest.mark.slow
def test_one_that_cannot_say_goodbye_at_the_end_of_the_process_keeps_no_other_from_it(serve):
    server = serve(nn.Linear(4, 100_000))
    script = textwrap.dedent("""
        import sys, threading, torch, offbeat
        worker = offbeat.AsyncWorker(sys.argv[2], worker_id="busy", optimizer=offbeat.optim.SGD(lr=0.1))
        worker.model.weight.sum().backward()
        others = [offbeat.Client(sys.argv[1], worker_id=f"idle {n}") for n in range(8)]
        threading.Thread(target=worker.step, daemon=True).start()
        sys.stdin.readline()
    """)
    with FaultProxy(server.address, plan(Hold(Bytes(300_000)))) as proxy:
        process = subprocess.Popen(
            [sys.executable, "-c", script, server.address, proxy.address], stdin=subprocess.PIPE
        )
        proxy.wait_for("holds", timeout_s=40)
        process.communicate(b"\n", timeout=40)
        idle = {w["id"]: w["state"] for w in server.status()["workers"] if w["id"] != "busy"}
        assert idle == {f"idle {n}": "finished" for n in range(8)}


@pytest.mark.parametrize(
    "use",
    [
        step,
        lambda w: w.flush(),
        lambda w: w.train(dataloader=[], loss_fn=nn.MSELoss()),
        lambda w: w.evaluate([]),
        lambda w: w.optimizer,
        lambda w: w.version,
    ],
    ids=["step", "flush", "train", "evaluate", "optimizer", "version"],
)
def test_using_a_closed_worker_raises(serve, join, use):
    worker = join(serve(net()), net(), optimizer=SPEC)
    worker.close()
    with pytest.raises(ClosedError, match="closed"):
        use(worker)


def test_a_with_block_finishes_and_an_exception_in_it_only_leaves(serve):
    server = serve(net())
    with offbeat.AsyncWorker(server.address, worker_id="a"):
        pass
    assert last_departure(server)["state"] == "finished"
    other = serve(net())
    with pytest.raises(ZeroDivisionError), offbeat.AsyncWorker(other.address, worker_id="b"):
        raise ZeroDivisionError
    assert last_departure(other)["state"] == "left"


@pytest.mark.parametrize(("code", "state"), [(None, "finished"), (0, "finished"), (3, "left")])
def test_sys_exit_without_failure_in_a_with_block_is_no_failure(serve, code, state):
    server = serve(net())
    with pytest.raises(SystemExit), offbeat.AsyncWorker(server.address):
        sys.exit(code)
    assert last_departure(server)["state"] == state


def test_train_does_not_leave_and_close_does(serve, join):
    server = serve(net(), linger_s=0.05)
    worker = join(server, net(), optimizer=SPEC)
    batch = (torch.ones(3, 4), torch.zeros(3, dtype=torch.long))
    worker.train(dataloader=[batch], loss_fn=nn.CrossEntropyLoss(), progress=False)
    assert server.wait_for_workers(timeout_s=0.5) is False
    assert states(server) == ["joined"]
    worker.close()
    assert server.wait_for_workers(timeout_s=20) is True


def test_a_worker_that_goes_out_of_scope_finishes(serve):
    server = serve(net())

    def run():
        worker = offbeat.AsyncWorker(server.address, optimizer=SPEC)
        worker.train(
            dataloader=[(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))],
            loss_fn=nn.CrossEntropyLoss(),
            progress=False,
        )
        assert worker.optimizer is not None

    run()
    assert last_departure(server)["state"] == "finished"


@pytest.mark.parametrize("end", ["goes out of scope", "is closed", "with block"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_worker_whose_train_was_broken_off_only_leaves(serve, error, end):
    server = serve(net())

    def loss(outputs, targets):
        raise error

    def run(*losses):
        worker = offbeat.AsyncWorker(server.address, worker_id="a", optimizer=SPEC)
        batch = (torch.ones(3, 4), torch.zeros(3, dtype=torch.long))
        for loss_fn in losses:
            with contextlib.suppress(error):
                worker.train(dataloader=[batch], loss_fn=loss_fn, progress=False)
        if end == "is closed":
            worker.close()
        elif end == "with block":
            with worker:
                pass

    run(loss)
    assert last_departure(server)["state"] == "left"
    run(loss, nn.CrossEntropyLoss())
    assert last_departure(server)["state"] == "finished"


@pytest.mark.slow
def test_a_lost_server_is_told_with_what_to_do_and_doing_it_goes_on_from_the_worker_s_model(serve, join):
    host = Host()
    fresh = net()
    with torch.no_grad():
        fresh[0].bias.zero_()
    try:
        address = host.call(None, "start", (net(),))[1]
        worker = join(address, net(), optimizer=SPEC, reconnect_timeout_s=0.5)
        step(worker)
    finally:
        host.process.kill()
    kept = {name: value.clone() for name, value in worker.model.state_dict().items()}
    with pytest.raises(
        ConnectionLostError, match=r"is lost: .*make a new AsyncWorker, with model="
    ) as caught:
        step(worker)
    assert str(caught.value).count("make a new") == 1
    worker = join(serve(optimizer=SPEC), worker.model)
    for name, value in worker.model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert step(worker).applied
    assert torch.equal(join(serve(fresh), worker.model).model[0].bias, torch.zeros(8))


ENDINGS = {
    "the end of the script": ("", "finished"),
    "sys.exit(0)": ("sys.exit(0)", "finished"),
    "sys.exit(3), of which Python tells nobody": ("sys.exit(3)", "finished"),
    "sys.exit(3) in a with block": ("\nwith worker: sys.exit(3)", "left"),
    "an exception": ("raise ZeroDivisionError", "left"),
    "a train that failed": (
        "\ntry: worker.train(dataloader=[1], loss_fn=None)\nexcept Exception: pass",
        "left",
    ),
    "a kill": ("os.kill(os.getpid(), 9)", "lost"),
    "os._exit": ("os._exit(0)", "lost"),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_of_the_process_is_the_end_of_the_worker(serve, ending):
    code, state = ENDINGS[ending]
    server = serve(net())
    script = f"import os, sys, offbeat; worker = offbeat.AsyncWorker(sys.argv[1]); {code}"
    subprocess.run(
        [sys.executable, "-c", script, server.address], check=False, capture_output=True, timeout=50
    )
    departed = last_departure(server)
    assert departed["state"] == state
    assert departed["cause"]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=SLOW)])
@pytest.mark.parametrize("fail", [False, True])
def test_the_end_of_a_multiprocessing_process_is_the_end_of_the_worker(serve, method, fail, capfd):
    server = serve(net())
    process = multiprocessing.get_context(method).Process(
        target=train_in_a_process, args=(server.address, fail)
    )
    process.start()
    process.join(50)
    capfd.readouterr()
    assert last_departure(server)["state"] == ("left" if fail else "finished")


# ---------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_worker_is_not_copied_and_the_remedy_is_told(serve, join, make):
    worker = join(serve(net()), net(), optimizer=SPEC)
    with pytest.raises(TypeError, match=r"^AsyncWorker objects .*: make one in each process"):
        make(worker)
    assert step(worker).applied


def test_history_model_and_specs_pickle(serve, join):
    worker = join(serve(net()), net(), optimizer=SPEC)
    x, y = torch.ones(3, 4), torch.zeros(3, dtype=torch.long)
    worker.train(dataloader=[(x, y)], loss_fn=nn.CrossEntropyLoss(), progress=False)
    history, spec = pickle.loads(pickle.dumps((worker.history, SPEC)))  # noqa: S301  our own bytes
    assert (history, spec) == (worker.history, SPEC)
    assert torch.equal(copy.deepcopy(worker.model)(x), worker.model(x))


# ---------------------------------------------------------------------------------------- forks


def in_a_fork(act):
    """Run in a forked child, and give back what it raised: the class and the message, or ''."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        raised = ""
        try:
            act()
        except BaseException as error:  # noqa: BLE001  whatever it is goes to the parent
            raised = f"{type(error).__name__}: {error}"
        os.write(writer, raised.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as told:
        return told.read()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_allowed_and_only_using_the_worker_in_the_child_raises(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)
    assert in_a_fork(lambda: None) == ""
    assert in_a_fork(lambda: worker.model(torch.ones(1, 4))) == ""
    for use in (step, lambda w: w.evaluate([]), lambda w: w.flush(), lambda w: w.version):
        raised = in_a_fork(lambda use=use: use(worker))
        assert raised.startswith("ForkedError: "), raised
        assert 'make it after the fork, or start processes with the "spawn" method' in raised
    assert step(worker).applied


def test_nothing_that_a_child_does_with_an_inherited_worker_reaches_the_server(serve):
    server = serve(net())
    holder = [offbeat.AsyncWorker(server.address, optimizer=SPEC)]

    def child():
        holder[0].close()
        holder.clear()  # its destructor

    assert in_a_fork(child) == ""
    assert states(server) == ["joined"]
    assert step(holder[0]).applied
    holder[0].close()


def test_a_worker_made_in_a_forked_child_works_beside_its_parent_s(serve, join):
    server = serve(net())
    worker = join(server, net(), optimizer=SPEC)

    def child():
        with offbeat.AsyncWorker(server.address, optimizer=SPEC) as own:
            assert step(own).applied

    assert in_a_fork(child) == ""
    assert step(worker).version == 2


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=SLOW)])
def test_loader_processes_work_under_both_start_methods(serve, join, method):
    x = torch.randn(24, 4)
    loader = DataLoader(
        TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, num_workers=2, multiprocessing_context=method
    )
    worker = join(serve(net()), net(), optimizer=SPEC)
    history = worker.train(dataloader=loader, epochs=2, loss_fn=nn.CrossEntropyLoss(), progress=False)
    assert history.receipts == {"applied": 6}
    assert 0 <= worker.evaluate(loader) <= 1


@pytest.mark.slow
def test_a_worker_with_forked_loader_processes_that_is_killed_is_seen_at_once(serve):
    server = serve(net())
    script = textwrap.dedent("""
        import sys, torch, offbeat
        from torch.utils.data import DataLoader, TensorDataset
        worker = offbeat.AsyncWorker(sys.argv[1], optimizer=offbeat.optim.SGD(lr=0.1))
        data = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
        loader = DataLoader(data, 4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        for x, y in loader:
            torch.nn.functional.cross_entropy(worker.model(x), y).backward()
            worker.step()
            print("stepped", flush=True)
            sys.stdin.read()
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script, server.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "stepped\n"
    children = subprocess.run(
        ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(children) >= 2
    process.kill()
    began = time.monotonic()
    try:
        wait_for(lambda: states(server) == ["lost"])
        assert time.monotonic() - began < AT_ONCE_S
    finally:
        for child in children:  # they hold our pipe, and one may outlive its parent
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        process.communicate()
