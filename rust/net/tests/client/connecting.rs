//! Joining, and everything that can go wrong with it.

use crate::script::{Peer, attach, join, run, serve};
use crate::support::{Worker, client_config, config, eventually, filled, never, parameter, sgd, table};
use offbeat_core::spec::Transaction;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::message::{Attach, Event, Heartbeat, Parting, RefusalCode, Refused};
use offbeat_core::wire::{Header, Kind};
use offbeat_net::client::{Client, ClientConfig, ClientError, Interrupt, fetch_status};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use std::net::{Shutdown, TcpListener};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

fn model() -> TensorTable {
    table(vec![parameter("w", 10), parameter("b", 2)])
}

fn start(config: ServerConfig) -> Server {
    Server::with_model(config, Snapshot::of(model(), &filled(&model(), 0)).unwrap()).unwrap()
}

fn with_token(token: &str) -> ServerConfig {
    ServerConfig { token: Some(token.into()), host: Some("127.0.0.1".into()), ..config(sgd(1.0, 0.0, 0.0)) }
}

#[test]
fn a_token_lets_in_who_holds_it() {
    let server = start(with_token("sesame"));
    let join = |token: Option<&str>| {
        let config = ClientConfig { token: token.map(Into::into), ..client_config(server.address(), 1) };
        Client::connect(config, None, &never)
    };
    assert!(join(Some("sesame")).is_ok());
    for wrong in [None, Some("open")] {
        match join(wrong) {
            Err(ClientError::Authentication { message, .. }) => {
                assert!(message.contains("OFFBEAT_TOKEN"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        fetch_status(&server.address().to_string(), Some("sesame"), Duration::from_secs(5), &never)
            .unwrap()
            .contains("run_id")
    );
    assert!(fetch_status(&server.address().to_string(), None, Duration::from_secs(5), &never).is_err());
    let open = start(config(sgd(1.0, 0.0, 0.0)));
    let config = ClientConfig { token: Some("sesame".into()), ..client_config(open.address(), 1) };
    let refused = Client::connect(config, None, &never);
    assert!(matches!(refused, Err(ClientError::Authentication { .. })), "the server must hold it too");
}

#[test]
fn an_address_where_nobody_listens_says_what_was_tried() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap(); // free again
    let timeout = Duration::from_secs(1);
    let config = ClientConfig { connect_timeout: timeout, ..client_config(address, 1) };
    let begun = Instant::now();
    match Client::connect(config, None, &never) {
        Err(error @ ClientError::Unreachable { .. }) => {
            let ClientError::Unreachable { address: told, attempts, waited, cause } = &error else {
                unreachable!()
            };
            assert_eq!(*told, address.to_string());
            assert!(*attempts >= 2 && *waited <= begun.elapsed() && cause.contains("refused"), "{error}");
            assert!(*waited >= timeout, "the last try is at the limit: {error}");
            assert!(error.to_string().contains("Is the server started"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_is_let_in_at_the_last_moment_has_time_for_the_other_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let limit = Duration::from_secs(5);
    let config = ClientConfig { connect_timeout: limit, ..client_config(listener.local_addr().unwrap(), 1) };
    let server = thread::spawn(move || {
        let (_never, clock) = mpsc::channel::<()>();
        // Both are within the limit, and their sum is not.
        clock.recv_timeout(Duration::from_secs(3)).ok();
        let mut data = join(&listener, model(), run(Transaction::Fragment));
        clock.recv_timeout(Duration::from_millis(2500)).ok();
        let _control = attach(&listener);
        data.next(Kind::Call); // the goodbye of a client that is dropped
    });
    let joined = Client::connect(config, None, &never);
    assert!(joined.is_ok(), "{joined:?}");
    drop(joined);
    server.join().unwrap();
}

#[test]
fn a_server_that_takes_its_time_for_the_other_connection_is_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let config = client_config(listener.local_addr().unwrap(), 1);
    let server = thread::spawn(move || {
        let mut data = join(&listener, model(), run(Transaction::Fragment));
        let mut control = Peer::greet(&listener);
        let _: Attach = control.expect(Kind::Attach);
        // Longer than a try of an address: to hang up now would be to leave.
        let (_never, clock) = mpsc::channel::<()>();
        clock.recv_timeout(Duration::from_millis(5500)).ok();
        control.frame(Header::new(Kind::Attached), &[]);
        data.next(Kind::Call);
    });
    let joined = Client::connect(config, None, &never);
    assert!(joined.is_ok(), "{joined:?}");
    drop(joined);
    server.join().unwrap();
}

#[test]
fn what_ends_a_session_before_its_other_connection_stands_is_told() {
    let fenced = Refused { code: RefusalCode::Fenced, message: "a newer process".into(), fatal: true };
    // At once with the news that it is in; while the other connection is opened; and where that was refused first.
    for (said, attaches) in [
        (Some(&fenced), None),
        (Some(&fenced), Some(false)),
        (Some(&fenced), Some(true)),
        (None, Some(false)),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let config = client_config(listener.local_addr().unwrap(), 1);
        let said = said.cloned();
        let is_said = said.is_some();
        let server = thread::spawn(move || {
            let mut data = join(&listener, model(), run(Transaction::Fragment));
            let mut control = attaches.map(|_| Peer::greet(&listener));
            if let (Some(control), Some(is_refused)) = (&mut control, attaches) {
                let _: Attach = control.expect(Kind::Attach);
                if is_refused {
                    let (code, message) = (RefusalCode::State, "there is no such session (any more)".into());
                    control.send(Kind::Refused, 0, &Refused { code, message, fatal: true });
                }
            }
            if let Some(said) = said {
                data.send(Kind::Refused, 0, &said);
            }
            drop(data);
            control
        });
        match Client::connect(config, None, &never) {
            Err(ClientError::Fenced { message }) => assert!(is_said && message == "a newer process"),
            Err(ClientError::Lost { .. }) => assert!(!is_said),
            other => panic!("{other:?}"),
        }
        drop(server.join().unwrap());
    }
}

#[test]
fn a_server_that_starts_late_is_found() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = client_config(address, 1);
    let client = thread::spawn(move || Client::connect(config, None, &never).map(|_| ()));
    let late = ServerConfig { port: address.port(), ..ServerConfig::default() };
    let _server = start(late);
    client.join().unwrap().unwrap();
}

#[test]
fn what_is_no_address_is_refused_at_once() {
    let refused = Client::connect(client_config("nowhere", 1), None, &never);
    assert!(matches!(refused, Err(ClientError::BadInput { .. })), "{refused:?}");
    let refused = Client::connect(client_config("127.0.0.1:1", 3), None, &never);
    assert!(matches!(refused, Err(ClientError::BadInput { .. })), "{refused:?}");
}

#[test]
fn what_does_not_speak_our_language_is_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // A long answer; a short one, behind which nothing comes; and one that is all there is before the end.
    for (answer, begins, waits) in [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".repeat(4), "HTTP", true),
        (b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(), "SSH-", true),
        (b"no\n".to_vec(), "no\\n", false),
    ] {
        let listener = listener.try_clone().unwrap();
        let other = thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&answer).unwrap();
            if waits {
                stream.read_to_end(&mut vec![]).ok();
            }
        });
        let refused = Client::connect(client_config(address, 1), None, &never);
        let wanted = format!("no Offbeat frame: it begins with \"{begins}\"");
        assert!(
            matches!(&refused, Err(ClientError::Protocol { cause, .. }) if cause.contains(&wanted)),
            "{refused:?}"
        );
        other.join().unwrap();
    }
}

#[test]
fn a_server_that_says_nothing_is_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let timeout = Duration::from_millis(100);
    let config =
        ClientConfig { connect_timeout: timeout, ..client_config(listener.local_addr().unwrap(), 1) };
    let refused = Client::connect(config, None, &never);
    let Err(refused @ ClientError::Timeout { .. }) = refused else { panic!("{refused:?}") };
    let told = refused.to_string();
    let address = listener.local_addr().unwrap();
    assert!(
        told.starts_with(&format!("something accepts connections at {address} but has not answered in 0.")),
        "{told}"
    );
    assert!(told.contains("look at its process") && told.contains("another program has the port"), "{told}");
}

#[test]
fn connecting_can_be_interrupted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap(); // accepts in the kernel and says nothing
    let begun = Instant::now();
    let refused = Client::connect(client_config(listener.local_addr().unwrap(), 1), None, &|| true);
    assert_eq!(refused.unwrap_err(), ClientError::Interrupted);
    assert!(begun.elapsed() < Duration::from_secs(2));
}

#[test]
fn asking_for_the_status_can_be_interrupted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap(); // as above
    let address = listener.local_addr().unwrap().to_string();
    let refused = fetch_status(&address, None, Duration::from_secs(20), &|| true);
    assert_eq!(refused, Err(ClientError::Interrupted));
}

#[test]
fn another_model_or_run_is_refused() {
    let server = start(config(sgd(1.0, 0.0, 0.0)));
    let other = table(vec![parameter("w", 10), parameter("b", 3)]);
    match Client::connect(client_config(server.address(), 1), Some(&other), &never) {
        Err(ClientError::ModelMismatch { message }) => {
            assert!(message.contains("b float32 [2]") && message.contains("b float32 [3]"), "{message}");
        }
        result => panic!("{result:?}"),
    }
    let config = ClientConfig { run_id: Some("another".into()), ..client_config(server.address(), 1) };
    let refused = Client::connect(config, None, &never);
    assert!(matches!(refused, Err(ClientError::Refused { code: RefusalCode::RunId, .. })), "{refused:?}");
}

#[test]
fn another_model_is_named_however_long_its_names_are() {
    let block = |len: usize, names: usize, padding: usize| {
        let mut spec = parameter(&format!("blocks.0.{}", "w".repeat(padding)), len);
        spec.aliases = (1..names).map(|i| format!("blocks.{i}.{}", "w".repeat(padding))).collect();
        table(vec![spec])
    };
    for (names, padding) in [(60, 35), (5, 1000)] {
        let (ours, theirs) = (block(10, names, padding), block(11, names, padding));
        let snapshot = Snapshot::of(ours.clone(), &filled(&ours, 0)).unwrap();
        let server = Server::with_model(config(sgd(1.0, 0.0, 0.0)), snapshot).unwrap();
        match Client::connect(client_config(server.address(), 1), Some(&theirs), &never) {
            Err(ClientError::ModelMismatch { message }) => {
                assert!(message.contains("float32 [10]") && message.contains("float32 [11]"), "{message}");
                assert!(names < 60 || message.len() < 1000, "{message}");
            }
            result => panic!("{names} names of {padding} bytes: {result:?}"),
        }
    }
}

#[test]
fn an_id_that_is_too_long_is_said_to_be_and_not_repeated() {
    let server = start(config(sgd(1.0, 0.0, 0.0)));
    let long = || Some("w".repeat(5000));
    let worker = ClientConfig { worker_id: long(), ..client_config(server.address(), 1) };
    let run = ClientConfig { run_id: long(), ..client_config(server.address(), 1) };
    for (config, code) in [(worker, RefusalCode::Malformed), (run, RefusalCode::RunId)] {
        match Client::connect(config, None, &never) {
            Err(ClientError::Refused { code: told, message }) => {
                assert_eq!(told, code, "{message}");
                assert!(message.contains("5000 bytes in all") && message.len() < 500, "{message}");
            }
            result => panic!("{code:?}: {result:?}"),
        }
    }
}

#[test]
fn who_gets_one_of_its_two_connections_could_not_begin() {
    let server = start(ServerConfig { max_connections: 1, ..config(sgd(1.0, 0.0, 0.0)) });
    let refused = Client::connect(client_config(server.address(), 1), None, &never);
    assert!(matches!(refused, Err(ClientError::Refused { code: RefusalCode::Full, .. })), "{refused:?}");
    let mut status = serde_json::Value::Null;
    eventually("its departure", || {
        status = serde_json::from_str(&server.status_json().unwrap()).unwrap();
        status["departures"].as_array().is_some_and(|departures| !departures.is_empty())
    });
    assert_eq!(status["departures"][0]["cause"], "could not begin: the server has its 1 connections already");
    assert_eq!(status["workers"].as_array().map(Vec::len), Some(0), "{status:#}");
}

#[test]
fn a_client_without_a_model_says_so() {
    let server = Server::start(ServerConfig::default()).unwrap();
    let mut client = Client::connect(client_config(server.address(), 1), None, &never).unwrap();
    assert!(matches!(client.pull(&[], false, &never), Err(ClientError::OutOfOrder { .. })));
    let status: serde_json::Value = serde_json::from_str(&client.status(&never).unwrap()).unwrap();
    assert_eq!(status["run_id"], client.session().unwrap().run_id.as_str());
}

#[test]
fn closing_is_final_and_may_be_repeated() {
    let server = start(config(sgd(1.0, 0.0, 0.0)));
    let states = |server: &Server| {
        let status: serde_json::Value = serde_json::from_str(&server.status_json().unwrap()).unwrap();
        let state = |w: &serde_json::Value| w["state"].as_str().unwrap().to_owned();
        status["workers"].as_array().unwrap().iter().map(state).collect::<Vec<_>>()
    };
    let mut worker = Worker::ready(&server, 1);
    worker.client.close(Parting::Finished, &never).unwrap();
    worker.client.close(Parting::Finished, &never).unwrap();
    assert_eq!(worker.pull(true).unwrap_err(), ClientError::Closed);
    assert_eq!(states(&server), ["finished"]);
    assert!(server.wait_until_joined(1, Some(Duration::ZERO), &never).unwrap());
}

#[test]
fn a_server_that_stops_says_so() {
    let server = start(config(sgd(1.0, 0.0, 0.0)));
    let mut worker = Worker::ready(&server, 1);
    server.stop();
    let refused = worker.pull(true).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { code: RefusalCode::Finished, .. }), "{refused:?}");
    // The control connection says so too, in its own time.
    eventually("the event", || worker.client.events().unwrap().finished.is_some());
    assert_eq!(worker.client.events().unwrap().finished.as_deref(), Some("stopped"));
    worker.client.close(Parting::Finished, &never).unwrap();
}

#[test]
fn a_replaced_worker_must_stop() {
    let server = start(config(sgd(1.0, 0.0, 0.0)));
    let join = || {
        let config = ClientConfig { worker_id: Some("twin".into()), ..client_config(server.address(), 1) };
        Client::connect(config, None, &never).unwrap()
    };
    let mut older = join();
    let mut newer = join();
    assert!(newer.session().unwrap().incarnation > older.session().unwrap().incarnation);
    // A call that is there before its connection's task has heard of the end may still be answered.
    let mut refused = None;
    eventually("the refusal", || {
        refused = older.status(&never).err();
        refused.is_some()
    });
    assert!(matches!(refused, Some(ClientError::Fenced { .. })), "{refused:?}");
    assert!(newer.status(&never).is_ok());
}

#[test]
fn heartbeats_carry_progress_and_events_arrive() {
    let (address, server) = serve(model(), run(Transaction::Fragment), |data, control| {
        while control.expect::<Heartbeat>(Kind::Heartbeat).progress < 5 {}
        control.send(Kind::Event, 0, &Event::Drain);
        control.send(Kind::Event, 0, &serde_json::json!({"of_tomorrow": {"x": 1}}));
        control.send(Kind::Event, 0, &Event::Finished { reason: "budget".into() });
        control.send(Kind::Event, 0, &Event::Fenced { detail: "newer".into() });
        drop(data.next(Kind::Call)); // the goodbye of a client that is dropped
    });
    let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
    client.set_progress(5).unwrap();
    eventually("the last event", || client.events().unwrap().fenced.is_some());
    let events = client.events().unwrap();
    assert!(events.drain && events.finished.as_deref() == Some("budget"));
    assert_eq!(client.status(&never), Err(ClientError::Fenced { message: "newer".into() }));
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_server_that_dies_ends_the_session() {
    let (address, server) = serve(model(), run(Transaction::Fragment), |data, _| {
        drop(data.next(Kind::Call));
    });
    let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
    let lost = client.status(&never).unwrap_err();
    assert!(matches!(&lost, ClientError::Lost { cause, .. } if cause.contains("closed")), "{lost}");
    assert_eq!(client.status(&never), Err(lost));
    server.join().unwrap();
}

/// A plain function is an interrupt, and so is a closure that borrows.
#[test]
fn interrupts_are_functions() {
    let pressed = std::cell::Cell::new(false);
    let interrupt = || pressed.get();
    assert!(!(&interrupt as &dyn Interrupt).interrupted());
    pressed.set(true);
    assert!(interrupt.interrupted() && !never.interrupted());
}

#[test]
fn what_the_tries_said_is_told_and_not_that_the_last_was_short() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let limit = Duration::from_secs(3);
    // A tunnel whose far end is not there, and that says nothing at all in what is left for the last tries.
    thread::spawn(move || {
        let mut silent_from = None;
        let mut kept = vec![];
        loop {
            let (stream, _) = listener.accept().unwrap();
            let from = *silent_from.get_or_insert_with(|| Instant::now() + Duration::from_millis(2600));
            if Instant::now() < from {
                stream.shutdown(Shutdown::Write).ok(); // a drop with unread bytes would reset it
            }
            kept.push(stream);
        }
    });
    let config = ClientConfig { connect_timeout: limit, ..client_config(address, 1) };
    let error = Client::connect(config, None, &never).unwrap_err();
    let ClientError::Unreachable { attempts, cause, .. } = &error else { panic!("{error}") };
    assert!(*attempts >= 2 && cause.contains("closed the connection"), "{error}");
}
