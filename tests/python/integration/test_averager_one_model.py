"""One server is for one model: a second averager in a process at the same one is refused at once."""

import pytest

import offbeat
from offbeat.errors import StateError
from support.averaging import Counter, held_number

pytestmark = pytest.mark.timeout(60)

SYNCHRONOUS, ASYNCHRONOUS = {}, {"method": "diloco", "asynchronous": True}


@pytest.fixture
def at(request, monkeypatch):
    """Make averagers, which are closed at the end."""
    monkeypatch.setattr("offbeat.averaging.waiting.BEGIN_S", 2.0)  # for whom nobody starts here

    def make(server, model, *place, **settings):
        address = server if isinstance(server, str) else server.address
        averager = offbeat.AsyncModelAverager(
            model, *place, averaging_frequency=1, overlap=False, server_address=address, **settings
        )
        request.addfinalizer(averager.close)
        return averager

    return make


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS])
@pytest.mark.parametrize("has_same_model", [False, True])
@pytest.mark.parametrize("place", [(), (2, 0)])
def test_a_second_averager_of_a_process_at_one_server_is_refused_and_the_first_goes_on(
    serve, at, settings, has_same_model, place
):
    server, one = serve(transaction="model"), Counter()
    first = at(server, one.model, *place, **settings)
    addresses = [server.address, server.address.replace("127.0.0.1", "localhost")]
    for address in addresses:
        with pytest.raises(StateError) as caught:
            at(address, one.model if has_same_model else Counter().model, *place, **settings)
        assert f"averages at the server {address} already, as member 0, and one server is for" in str(
            caught.value
        )
        assert "server_address=" in str(caught.value)
        assert "communication_backend='gloo'" in str(caught.value)
    one.train(first, 2)
    held = held_number(server)
    assert (held == one.value) if settings is SYNCHRONOUS else (held > 0), "the outer step is not the mean"
    assert len(server.status()["workers"]) == 1, "who is refused does not come to the server"


def test_it_may_be_made_where_the_first_is_closed_or_gone_or_at_another_server(serve, at):
    server, other = serve(transaction="model"), serve(transaction="model")
    at(server, Counter().model).close()
    second = at(server, Counter().model)
    at(other, Counter().model)  # another server, for another model
    second.close()
    offbeat.AsyncModelAverager(Counter().model, server_address=server.address)  # of which nobody lets us know
    at(server, Counter().model)


def test_members_of_one_model_in_one_process_give_their_ranks(serve, at):
    server = serve(transaction="model")
    members = [at(server, Counter().model, 2, rank) for rank in range(2)]
    assert [member.rank for member in members] == [0, 1]
