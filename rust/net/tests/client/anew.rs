//! Workers that lose their connection while they wait for the model: there is nothing that they could lose with it.

use crate::cells::{model, status};
use crate::relay::Relay;
use crate::support::{DEADLINE, client_config, config, eventually, filled, never, sgd};
use offbeat_core::wire::message::Parting;
use offbeat_net::client::{Client, ClientConfig, ClientError, Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig};
use std::net::SocketAddr;
use std::thread::{Scope, ScopedJoinHandle};

fn start(run_id: &str) -> Server {
    Server::start(ServerConfig { run_id: Some(run_id.into()), ..config(sgd(1.0, 0.0, 0.0)) }).unwrap()
}

fn joined(address: impl ToString, worker_id: Option<&str>, run_id: Option<&str>) -> Client {
    let config = ClientConfig {
        worker_id: worker_id.map(str::to_owned),
        run_id: run_id.map(str::to_owned),
        patience: Some(DEADLINE),
        ..client_config(address, 1)
    };
    Client::connect(config, None, &never).unwrap()
}

/// Waits for the model, pushes once and leaves: under which name, and in which run.
fn waits<'scope>(
    scope: &'scope Scope<'scope, '_>,
    mut client: Client,
) -> ScopedJoinHandle<'scope, Result<(String, String), ClientError>> {
    scope.spawn(move || {
        let table = client.wait_for_model(&never)?;
        let (mut params, mut gradient) = (filled(&table, 0xa5), filled(&table, 0));
        let out: Vec<_> = params.iter_mut().map(|p| Memory::of(p)).collect();
        client.pull(&out, false, &never)?;
        let values: Vec<_> = gradient.iter_mut().map(|g| Some(Memory::of(g))).collect();
        assert!(client.push(PushInput { values: &values, samples: 1 }, &never)?.applied);
        let session = client.session()?;
        let who = (session.worker_id.clone(), session.run_id.clone());
        client.close(Parting::Finished, &never)?;
        Ok(who)
    })
}

fn bring_model(address: SocketAddr) {
    let mut client = joined(address, Some("brings"), None);
    let table = model(false);
    let values = filled(&table, 0);
    let values: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
    assert!(client.init(&table, &values, None, &never).unwrap());
}

fn until_there(server: &Server, id: &str, incarnation: u32) {
    eventually("a worker", || {
        let status = status(server);
        let is_it = |w: &serde_json::Value| w["id"] == id && w["incarnation"] == incarnation;
        status["workers"].as_array().unwrap().iter().any(is_it)
    });
}

fn until_all_are_gone(server: &Server) {
    eventually("their ends", || status(server)["workers"].as_array().unwrap().is_empty());
}

#[test]
fn who_waits_for_the_model_and_is_cut_off_waits_on() {
    let server = start("run");
    let relay = Relay::new(server.address(), []);
    let (named, unnamed) = (joined(relay.address, Some("a"), None), joined(relay.address, None, None));
    std::thread::scope(|scope| {
        let waiting = [waits(scope, named), waits(scope, unnamed)];
        relay.go_down();
        until_all_are_gone(&server);
        relay.come_up(server.address());
        eventually("both", || status(&server)["workers"].as_array().unwrap().len() == 2);
        bring_model(server.address());
        let names = waiting.map(|waiting| waiting.join().unwrap().unwrap().0);
        assert!(names[0] == "a" && names[1].starts_with("worker-"), "{names:?}");
    });
}

#[test]
fn whose_name_was_the_servers_choice_gets_another_if_it_is_taken() {
    let server = start("run");
    let relay = Relay::new(server.address(), []);
    let first = joined(relay.address, None, None);
    assert_eq!(first.session().unwrap().worker_id, "worker-0");
    std::thread::scope(|scope| {
        let waiting = waits(scope, first);
        relay.go_down();
        until_all_are_gone(&server);
        let second = joined(server.address(), None, None);
        assert_eq!(second.session().unwrap().worker_id, "worker-0");
        relay.come_up(server.address());
        until_there(&server, "worker-1", 3);
        bring_model(server.address());
        assert_eq!(waiting.join().unwrap().unwrap().0, "worker-1");
    });
}

#[test]
fn a_name_that_was_given_belongs_to_the_newer_process() {
    let server = start("run");
    let relay = Relay::new(server.address(), []);
    let first = joined(relay.address, Some("a"), None);
    std::thread::scope(|scope| {
        let waiting = waits(scope, first);
        relay.go_down();
        let _newer = joined(server.address(), Some("a"), None);
        relay.come_up(server.address());
        assert!(matches!(waiting.join().unwrap().unwrap_err(), ClientError::Fenced { .. }));
    });
}

#[test]
fn who_waits_for_the_model_goes_on_in_another_run_unless_it_wants_the_one() {
    let server = start("first");
    let relay = Relay::new(server.address(), []);
    let (any, one) =
        (joined(relay.address, Some("any"), None), joined(relay.address, Some("one"), Some("first")));
    std::thread::scope(|scope| {
        let (any, one) = (waits(scope, any), waits(scope, one));
        relay.go_down();
        server.stop();
        let again = start("second");
        relay.come_up(again.address());
        let lost = one.join().unwrap().unwrap_err();
        let why = "has not this session: this server holds run \"second\", the worker wants \"first\"";
        assert!(matches!(&lost, ClientError::Lost { cause, .. } if cause.contains(why)), "{lost}");
        until_there(&again, "any", 1);
        bring_model(again.address());
        assert_eq!(any.join().unwrap().unwrap(), ("any".into(), "second".into()));
    });
}
