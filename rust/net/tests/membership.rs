//! Who is there, who is lost and why, and who brings what.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::{
    DEADLINE, NEVER, Raw, W, client, config, eventually, join, parameters, plain_sgd, start, status, table,
    try_client, until_state, until_withdrawn, values,
};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Contribution, Group, OptimizerSpec, Rule};
use offbeat_core::store::Claim;
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::header::{MAX_MODEL_BYTES, MAX_RUN_BYTES};
use offbeat_core::wire::message::{
    Attempt, Back, Call, Event, FINISHED_STOPPED, Join, Joined, MOST_TERMS_BYTES, New, Parting, Purpose,
    RefusalCode, Refused, Reply, Welcome,
};
use offbeat_core::wire::{Header, Kind, Want};
use offbeat_net::client::{Client, ClientConfig, ClientError, Entry};
use offbeat_net::server::{Server, ServerConfig, ServerError, Snapshot};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn quick() -> ServerConfig {
    ServerConfig { linger: Duration::ZERO, rejoin_grace: Duration::from_millis(300), ..config() }
}

fn goodbye(raw: &mut Raw, parting: Parting) {
    raw.call(1000, &Call::Goodbye { parting });
    assert_eq!(raw.reply(), Reply::Goodbye);
}

#[test]
fn a_connection_that_ends_without_a_goodbye_is_a_loss_at_once() {
    let server = start(config());
    let (raw, joined) = Raw::joined(&server, "a");
    let _control = Raw::attached(&server, &joined);
    drop(raw);
    assert_eq!(until_state(&server, "a", "lost"), "the peer closed the connection");
    let status = status(&server);
    assert_eq!(status["departures"][0]["worker"], "a");
    assert_eq!(status["departures"][0]["state"], "lost");
}

#[test]
fn the_end_of_the_control_connection_ends_the_session() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    drop(Raw::attached(&server, &joined));
    assert_eq!(until_state(&server, "a", "lost"), "the peer closed the control connection");
    assert_eq!(raw.refused().code, RefusalCode::Lost);
}

#[test]
fn of_the_attempts_of_one_process_the_latest_counts_in_whatever_order_they_are_heard() {
    let server = start(config());
    let try_it = |clock: u8, at_ns, back: Option<Back>| {
        let mut raw = Raw::connect(server.address());
        raw.greet(None, Purpose::Data);
        let _: Welcome = raw.expect(Kind::Welcome);
        let attempt = Some(Attempt { clock: [clock; 16], at_ns });
        raw.send(Kind::Join, 0, &Join { attempt, back, ..join("a") });
        raw
    };
    let is_overtaken = |mut raw: Raw| {
        let refused = raw.refused();
        assert_eq!(refused.code, RefusalCode::Fenced);
        assert!(refused.message.contains("a later attempt"), "{refused}");
    };
    let mut first = try_it(1, 20, None);
    let joined: Joined = first.expect(Kind::Joined);
    let _control = Raw::attached(&server, &joined);
    is_overtaken(try_it(1, 10, None));
    let claim = Claim {
        incarnation: joined.incarnation,
        term: joined.term,
        settled: 0,
        applied: 0,
        unsettled: vec![],
    };
    let back = || Some(Back { claim: claim.clone(), secret: joined.secret });
    let mut again = try_it(1, 40, back());
    assert_eq!(again.expect::<Joined>(Kind::Joined).incarnation, joined.incarnation);
    is_overtaken(try_it(1, 30, back()));
    is_overtaken(try_it(1, 30, None));
    assert_eq!(status(&server)["workers"][0]["incarnation"], joined.incarnation);
    let mut other = try_it(2, 5, None);
    assert!(other.expect::<Joined>(Kind::Joined).incarnation > joined.incarnation, "another process");
}

#[test]
fn a_worker_whose_return_is_refused_is_told_of_as_lost() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    assert!(raw.push(1, (joined.term, joined.version), 0, 1.0, Want::Receipt).receipt().applied);
    let claim = Claim {
        incarnation: joined.incarnation,
        term: joined.term,
        settled: 1,
        applied: 7,
        unsettled: vec![],
    };
    let mut again = Raw::connect(server.address());
    again.greet(None, Purpose::Data);
    let _: Welcome = again.expect(Kind::Welcome);
    let back = Some(Back { claim, secret: joined.secret });
    again.send(Kind::Join, 0, &Join { back, ..join("a") });
    let refused = again.refused();
    assert_eq!(refused.code, RefusalCode::Malformed, "{refused}");
    let told = eventually(&server, "a departure", |s| s["departures"][0]["worker"] == "a");
    assert_eq!(told["departures"][0]["state"], "lost");
    let cause = told["departures"][0]["cause"].as_str().unwrap();
    assert!(cause.contains("says what cannot be"), "{cause}");
    assert_eq!(common::worker(&told, "a")["state"], "lost");
}

#[test]
fn silence_for_the_lease_is_a_loss_and_not_the_end() {
    let server = start(ServerConfig { lease: Duration::from_secs(1), ..config() });
    let (mut raw, joined) = Raw::joined(&server, "a");
    let mut control = Raw::attached(&server, &joined);
    let (mut other, _) = Raw::joined(&server, "b");
    assert!(other.push(1, (joined.term, joined.version), 0, 1.0, Want::Receipt).receipt().applied);
    goodbye(&mut other, Parting::Finished);
    assert_eq!(until_state(&server, "a", "lost"), "no heartbeat for 1 s");
    // It had only slept: heard again, it is back, but what it had read before is too old.
    let beating = AtomicBool::new(true);
    let (late, next) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (_never, clock) = std::sync::mpsc::channel::<()>();
            for progress in 1.. {
                if !beating.load(Ordering::Relaxed) {
                    break;
                }
                control.heartbeat(progress);
                clock.recv_timeout(Duration::from_millis(20)).ok();
            }
        });
        until_state(&server, "a", "joined");
        let late = raw.push(1, (joined.term, joined.version), 0, 1.0, Want::Parameters);
        let next = raw.push(2, late.read, late.roots[0].0, 1.0, Want::Parameters);
        beating.store(false, Ordering::Relaxed);
        (late, next)
    });
    assert_eq!(late.receipt().reason, Some(Reason::Slept), "{:?}", late.receipt());
    assert!(next.receipt().applied, "{:?}", next.receipt());
}

#[test]
fn heartbeats_without_progress_show_a_stall() {
    let server = start(ServerConfig { lease: Duration::from_millis(500), ..config() });
    let (_raw, joined) = Raw::joined(&server, "a");
    let mut control = Raw::attached(&server, &joined);
    eventually(&server, "a stalled", |s| {
        control.heartbeat(5);
        common::worker(s, "a")["state"] == "stalled"
    });
}

#[test]
fn a_newer_process_with_the_same_name_fences_the_older() {
    let server = start(config());
    let (mut old, joined) = Raw::joined(&server, "a");
    let mut control = Raw::attached(&server, &joined);
    let (mut new, again) = Raw::joined(&server, "a");
    assert!(again.incarnation > joined.incarnation);
    assert!(matches!(control.event(), Event::Fenced { .. }));
    assert_eq!(old.refused().code, RefusalCode::Fenced);
    let answer = new.push(1, (again.term, again.version), 0, 1.0, Want::Parameters);
    assert!(answer.receipt().applied);
    assert_eq!(common::worker(&status(&server), "a")["state"], "joined");
}

#[test]
fn a_newer_process_fences_a_lost_one_that_is_still_connected() {
    let server = start(ServerConfig { lease: Duration::from_secs(1), ..config() });
    let (mut old, joined) = Raw::joined(&server, "a");
    let mut control = Raw::attached(&server, &joined);
    until_state(&server, "a", "lost");
    let (new, _) = Raw::joined(&server, "a");
    assert!(matches!(control.event(), Event::Fenced { .. }));
    assert_eq!(old.refused().code, RefusalCode::Fenced);
    drop(new);
    eventually(&server, "no connection is left", |s| s["connections"] == 0);
}

#[test]
fn who_finds_no_room_is_not_waited_for() {
    let server = start(ServerConfig { max_workers: 1, rejoin_grace: DEADLINE * 9, ..quick() });
    let (mut a, _) = Raw::joined(&server, "a");
    let mut b = Raw::connect(server.address());
    b.greet(None, Purpose::Data);
    let _: Welcome = b.expect(Kind::Welcome);
    b.send(Kind::Join, 0, &join("b"));
    assert_eq!(b.refused().code, RefusalCode::Full);
    goodbye(&mut a, Parting::Finished);
    assert!(!server.wait_until_joined(2, Some(Duration::ZERO), NEVER).unwrap());
    assert!(server.wait_for_workers(1, Some(DEADLINE), NEVER).unwrap());
}

#[test]
fn waiting_for_workers_ends_with_their_goodbyes() {
    let server = start(quick());
    let (mut a, _) = Raw::joined(&server, "a");
    assert!(
        !server.wait_for_workers(1, Some(Duration::from_millis(50)), NEVER).unwrap(),
        "one is still there"
    );
    assert!(server.wait_until_joined(1, Some(DEADLINE), NEVER).unwrap());
    assert!(!server.wait_until_joined(2, Some(Duration::ZERO), NEVER).unwrap());
    goodbye(&mut a, Parting::Finished);
    assert!(server.wait_for_workers(1, Some(DEADLINE), NEVER).unwrap());
    assert!(!server.wait_for_workers(2, Some(Duration::from_millis(50)), NEVER).unwrap());
}

#[test]
fn all_lost_and_none_finished_is_an_error_that_says_why() {
    let server = start(quick());
    let (raw, joined) = Raw::joined(&server, "a");
    let _control = Raw::attached(&server, &joined);
    drop(raw);
    let failed = server.wait_for_workers(1, Some(DEADLINE), NEVER).unwrap_err();
    let ServerError::NoneFinished { causes } = failed else { panic!("{failed}") };
    assert_eq!(causes, [("a".to_owned(), "the peer closed the connection".to_owned())]);
}

#[test]
fn a_wait_is_interrupted_and_ends_with_the_server() {
    let server = start(config());
    assert!(matches!(server.wait_for_workers(1, None, &|| true), Err(ServerError::Interrupted)));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.wait_for_workers(1, None, NEVER));
        server.stop();
        assert!(matches!(waiting.join().unwrap(), Err(ServerError::Stopped)));
    });
}

#[test]
fn a_stopped_server_waits_for_nobody_who_only_asks_how_it_is() {
    let server = start(config());
    let mut raw = Raw::connect(server.address());
    raw.greet(None, Purpose::Status);
    let _: Welcome = raw.expect(Kind::Welcome);
    std::thread::scope(|scope| {
        scope.spawn(|| server.stop());
        assert_eq!(raw.refused().code, RefusalCode::Finished);
    });
}

#[test]
fn a_stopped_server_tells_its_workers_that_the_run_has_finished() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    let mut control = Raw::attached(&server, &joined);
    std::thread::scope(|scope| {
        scope.spawn(|| server.stop());
        assert_eq!(control.event(), Event::Finished { reason: FINISHED_STOPPED.into() });
        let refused = raw.refused();
        assert_eq!(
            (refused.code, refused.message.as_str()),
            (RefusalCode::Finished, "the server was stopped")
        );
    });
    assert_eq!(status(&server)["state"], "stopped");
}

/// Sends the initial values of both fragments.
fn send_values(raw: &mut Raw, value: f32) {
    for (i, len) in common::FRAGMENTS.into_iter().enumerate() {
        let header = Header { fragment: u32::try_from(i).unwrap(), ..Header::new(Kind::Value) };
        raw.frame(header, &common::floats(len, value));
    }
}

fn begin(raw: &mut Raw) {
    raw.call(1, &Call::InitBegin { table: table(), blueprint: Some("how".into()), replaces: None });
}

#[test]
fn the_first_worker_brings_the_model_and_others_wait_for_it() {
    let server = Server::start(config()).unwrap();
    assert_eq!(status(&server)["state"], "waiting_for_model");
    let (mut a, joined) = Raw::joined(&server, "a");
    assert_eq!(joined.model, None);
    let (mut b, _) = Raw::joined(&server, "b");
    begin(&mut a);
    assert_eq!(a.reply(), Reply::Init { taken: true });
    begin(&mut b);
    let (mut c, _) = Raw::joined(&server, "c");
    c.call(1, &Call::WaitModel);
    send_values(&mut a, 4.0);
    a.call(2, &Call::InitCommit);
    assert_eq!(a.reply(), Reply::Init { taken: true });
    assert_eq!(b.reply(), Reply::Init { taken: false });
    let Reply::Model { model, term, .. } = c.reply() else { panic!("a model was due") };
    assert_eq!((model.table, model.blueprint.as_deref()), (table(), Some("how")));
    assert_eq!(c.pull(term, None).roots[0].1, Some(4.0));
    assert!(parameters(&server).iter().all(|&p| p == 4.0));
}

#[test]
fn a_worker_that_dies_while_it_brings_the_model_leaves_none() {
    let server = Server::start(config()).unwrap();
    let (mut a, _) = Raw::joined(&server, "a");
    begin(&mut a);
    assert_eq!(a.reply(), Reply::Init { taken: true });
    let (mut b, _) = Raw::joined(&server, "b");
    begin(&mut b);
    a.frame(Header::new(Kind::Value), &common::floats(common::FRAGMENTS[0], 1.0));
    drop(a);
    assert_eq!(b.reply(), Reply::Init { taken: true }, "the next one may");
    send_values(&mut b, 2.0);
    b.call(2, &Call::InitCommit);
    assert_eq!(b.reply(), Reply::Init { taken: true });
    assert!(parameters(&server).iter().all(|&p| p == 2.0));
}

#[test]
fn who_waits_its_turn_with_another_model_could_not_begin() {
    let server = Server::start(ServerConfig { rejoin_grace: DEADLINE * 9, ..quick() }).unwrap();
    let (mut a, _) = Raw::joined(&server, "a");
    begin(&mut a);
    assert_eq!(a.reply(), Reply::Init { taken: true });
    let (mut b, joined) = Raw::joined(&server, "b");
    let _control = Raw::attached(&server, &joined);
    let other = TensorTable::new(vec![common::tensor("other", 3, Role::Parameter)]).unwrap();
    b.call(1, &Call::InitBegin { table: other, blueprint: None, replaces: None });
    send_values(&mut a, 1.0);
    a.call(2, &Call::InitCommit);
    assert_eq!(a.reply(), Reply::Init { taken: true });
    assert_eq!(b.refused().code, RefusalCode::ModelMismatch);
    let cause = until_withdrawn(&server, "b");
    assert!(cause.starts_with("could not begin: it was refused: "), "{cause}");
    goodbye(&mut a, Parting::Finished);
    assert!(!server.wait_until_joined(2, Some(Duration::ZERO), NEVER).unwrap());
    assert!(server.wait_for_workers(1, Some(DEADLINE), NEVER).unwrap());
}

fn begin_with_another_model(raw: &mut Raw) {
    let other = TensorTable::new(vec![common::tensor("other", 3, Role::Parameter)]).unwrap();
    raw.call(1, &Call::InitBegin { table: other, blueprint: None, replaces: None });
    assert_eq!(raw.refused().code, RefusalCode::ModelMismatch);
}

#[test]
fn who_brings_another_model_than_the_one_there_could_not_begin() {
    let server = start(ServerConfig { max_workers: 1, rejoin_grace: DEADLINE * 9, ..quick() });
    let (mut a, joined) = Raw::joined(&server, "a");
    let _control = Raw::attached(&server, &joined);
    begin_with_another_model(&mut a);
    let cause = until_withdrawn(&server, "a");
    assert!(cause.starts_with("could not begin: it was refused: this worker's model"), "{cause}");
    let (mut b, joined) = Raw::joined(&server, "b");
    let pushed = b.push(1, (joined.term, joined.version), 0, 1.0, Want::Receipt);
    assert!(pushed.receipt().applied, "in its place");
    begin_with_another_model(&mut b);
    assert!(until_state(&server, "b", "lost").contains("this worker's model"), "it had begun");
}

#[test]
fn who_goes_while_it_waits_for_the_model_could_not_begin() {
    let server = Server::start(quick()).unwrap();
    let (mut a, joined) = Raw::joined(&server, "a");
    let control = Raw::attached(&server, &joined);
    a.call(1, &Call::WaitModel);
    drop(a);
    assert_eq!(until_withdrawn(&server, "a"), "could not begin: the peer closed the connection");
    drop(control);
    assert!(
        !server.wait_for_workers(1, Some(Duration::from_millis(500)), NEVER).unwrap(),
        "nobody has come who could lose anything"
    );
    assert_eq!(until_withdrawn(&server, "a"), "could not begin: the peer closed the connection");
}

#[test]
fn who_goes_before_it_has_heard_that_it_was_in_comes_again_as_the_same_worker() {
    let server = start(config());
    drop(Raw::joined(&server, "worker-0"));
    assert_eq!(until_withdrawn(&server, "worker-0"), "could not begin: the peer closed the connection");
    let config = ClientConfig {
        address: server.address().to_string(),
        worker_id: None,
        token: None,
        run_id: None,
        in_flight: 1,
        connect_timeout: DEADLINE,
        patience: Some(Duration::ZERO),
    };
    let again = Client::connect(config, None, &NEVER).unwrap();
    assert_eq!(again.session().unwrap().worker_id, "worker-0");
    assert!(!server.wait_until_joined(2, Some(Duration::ZERO), NEVER).unwrap(), "there is one worker");
}

#[test]
fn a_goodbye_behind_a_wait_for_the_model_is_heard_when_the_worker_has_gone() {
    let server = Server::start(quick()).unwrap();
    let (mut a, joined) = Raw::joined(&server, "a");
    let _control = Raw::attached(&server, &joined);
    a.call(1, &Call::WaitModel);
    a.call(2, &Call::Goodbye { parting: Parting::Withdrawn { cause: Some("given up".into()) } });
    drop(a);
    assert_eq!(until_withdrawn(&server, "a"), "could not begin: given up");
    eventually(&server, "no connection is left", |s| s["connections"] == 0);
}

#[test]
fn a_model_is_taken_whole_or_refused() {
    let server = Server::start(config()).unwrap();
    let (mut a, _) = Raw::joined(&server, "a");
    begin(&mut a);
    a.reply();
    a.call(2, &Call::InitCommit);
    assert_eq!(a.refused().code, RefusalCode::State, "values are missing");
    let (mut b, _) = Raw::joined(&server, "b");
    begin(&mut b);
    b.reply();
    b.frame(Header::new(Kind::Value), &[0; 12]);
    assert_eq!(b.refused().code, RefusalCode::Malformed, "not the length of the first fragment");
    let (mut c, joined) = Raw::joined(&server, "c");
    c.push_head(1, (joined.term, joined.version), Want::Receipt, None);
    assert_eq!(c.refused().code, RefusalCode::NoModel);
    assert_eq!(server.tensors().unwrap(), None);
    assert!(matches!(server.load_tensors(&values(0.0)), Err(ServerError::NoModel)));
}

#[test]
fn whatever_was_taken_another_worker_can_be_told_of() {
    let server = Server::start(ServerConfig { optimizer: None, ..config() }).unwrap();
    let text = |bytes: u32| "x".repeat(bytes as usize);
    let optimizer = |bytes: u32| {
        let mut optimizer = plain_sgd();
        let first = Group { pattern: text(bytes), ..optimizer.groups[0].clone() };
        optimizer.groups.insert(0, first);
        Some(optimizer)
    };
    let bring = |raw: &mut Raw, blueprint| {
        raw.call(1, &Call::InitBegin { table: table(), blueprint: Some(blueprint), replaces: None });
    };
    let agree = |raw: &mut Raw, optimizer| {
        raw.call(2, &Call::Configure { contribution: Contribution::Gradient, optimizer });
    };
    let (mut a, _) = Raw::joined(&server, "a");
    bring(&mut a, text(MAX_MODEL_BYTES));
    let refused = a.refused();
    assert!(refused.code == RefusalCode::Full && refused.message.contains("at most"), "{refused:?}");
    let (mut b, _) = Raw::joined(&server, "b");
    agree(&mut b, optimizer(MAX_RUN_BYTES));
    let refused: Refused = b.expect(Kind::Refused);
    assert!(refused.code == RefusalCode::Optimizer && refused.message.contains("at most"), "{refused:?}");
    agree(&mut b, optimizer(MAX_RUN_BYTES - 1000));
    assert!(matches!(b.reply(), Reply::Configured { .. }));
    bring(&mut b, text(MAX_MODEL_BYTES - 1000));
    assert_eq!(b.reply(), Reply::Init { taken: true });
    send_values(&mut b, 1.0);
    b.call(3, &Call::InitCommit);
    assert_eq!(b.reply(), Reply::Init { taken: true });
    let third = client(&server, "c");
    let session = third.session().unwrap();
    assert_eq!(session.blueprint.as_ref().map(String::len), Some(MAX_MODEL_BYTES as usize - 1000));
    assert_eq!(session.run.optimizer.as_ref(), optimizer(MAX_RUN_BYTES - 1000).as_ref());
    assert!(matches!(server.set_optimizer(optimizer(MAX_RUN_BYTES).unwrap()), Err(ServerError::Spec(_))));
    let blueprint = Some(text(MAX_MODEL_BYTES));
    let model = Snapshot::of(table(), &values(0.0)).unwrap();
    let refused = Server::with_model(ServerConfig { blueprint, ..config() }, model);
    assert!(matches!(refused, Err(ServerError::ModelTooLong(_))));
}

#[test]
fn a_model_that_is_too_long_to_tell_is_refused_before_it_is_sent() {
    let server = Server::start(config()).unwrap();
    let spec = |i| common::tensor(&format!("{i}{}", "x".repeat(500)), 0, Role::Parameter);
    let long = TensorTable::new((0..80_000).map(spec).collect()).unwrap();
    let refused = try_client(&server, "a", None, Some(&long)).unwrap_err();
    assert!(
        matches!(&refused, ClientError::BadInput { message } if message.contains("at most")),
        "{refused}"
    );
    let mut client = try_client(&server, "a", None, None).unwrap();
    let refused = client.init(&long, &vec![&[][..]; 80_000], None, &NEVER).unwrap_err();
    assert!(
        matches!(&refused, ClientError::BadInput { message } if message.contains("at most")),
        "{refused}"
    );
    let how = "x".repeat(MAX_MODEL_BYTES as usize);
    let given = values(0.0);
    let given: Vec<_> = given.iter().map(Vec::as_slice).collect();
    let refused = client.init(&table(), &given, Some(&how), &NEVER).unwrap_err();
    assert!(
        matches!(&refused, ClientError::BadInput { message } if message.contains("at most")),
        "{refused}"
    );
    assert_eq!(client.init(&table(), &given, Some("how"), &NEVER), Ok(true), "nothing had been sent");
}

fn adam() -> OptimizerSpec {
    let rule = Rule::Adam {
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.0,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: false,
    };
    OptimizerSpec { groups: vec![Group { pattern: "*".into(), lr: 1e-3, rule }], momentum_correction: false }
}

#[test]
fn workers_agree_on_the_optimizer() {
    let server = start(ServerConfig { optimizer: None, ..config() });
    let configure = |raw: &mut Raw, contribution, optimizer: Option<OptimizerSpec>| {
        raw.call(1, &Call::Configure { contribution, optimizer });
    };
    let (mut a, joined) = Raw::joined(&server, "a");
    let early = a.push(1, (joined.term, joined.version), 0, 1.0, Want::Receipt);
    assert!(!early.receipt().applied, "nothing is applied before an optimizer is set");
    configure(&mut a, Contribution::Gradient, Some(plain_sgd()));
    let Reply::Configured { run } = a.reply() else { panic!("a run was due") };
    assert_eq!((run.contribution, run.optimizer), (Some(Contribution::Gradient), Some(plain_sgd())));
    let blind = a.push(2, early.read, 0, 1.0, Want::Receipt);
    assert_eq!(blind.receipt().reason, Some(Reason::OptimizerChanged), "it did not know of the optimizer");
    a.epoch = run.epoch;
    assert!(a.push(3, early.read, 0, 1.0, Want::Receipt).receipt().applied);

    let (mut b, _) = Raw::joined(&server, "b");
    for (contribution, optimizer, code) in [
        (Contribution::Gradient, Some(adam()), RefusalCode::Optimizer),
        (Contribution::Delta, None, RefusalCode::Contribution),
    ] {
        configure(&mut b, contribution, optimizer);
        let refused: Refused = b.expect(Kind::Refused);
        assert_eq!((refused.code, refused.fatal), (code, false));
    }
    configure(&mut b, Contribution::Gradient, None);
    assert!(matches!(b.reply(), Reply::Configured { .. }), "a refusal is not the end");
    server.set_lr(0.5, None).unwrap();
    let status = status(&server);
    assert_eq!(status["schedule"]["lr"][0], 0.5);
    assert_eq!(status["optimizer"]["runs_on"], "server");
}

#[test]
fn status_says_what_there_is_to_know() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    raw.push(1, (joined.term, joined.version), 0, 1.0, Want::Parameters);
    let status = status(&server);
    let worker = common::worker(&status, "a");
    assert_eq!(
        (&worker["pushes"], &worker["applied"], &worker["samples"]),
        (&1.into(), &1.into(), &1.into())
    );
    assert_eq!(worker["staleness_histogram"][0], 1);
    assert_eq!(worker["host"], "here");
    assert!(worker["last_push_age_s"].as_f64().unwrap() >= 0.0);
    assert_eq!(status["state"], "running");
    assert_eq!(status["transaction"], "fragment");
    assert!(status["memory"]["roots_bytes"].as_u64().unwrap() >= 4 * W as u64);
    assert!(status["longest_poll_ms"].as_f64().unwrap() > 0.0);
    eventually(&server, "bytes are counted", |s| {
        let worker = common::worker(s, "a");
        worker["bytes_received"].as_u64().unwrap() > 4 * W as u64
            && worker["bytes_sent"].as_u64().unwrap() > 4 * W as u64
    });
}

#[test]
fn a_worker_that_is_silent_beyond_its_grace_is_disconnected() {
    let short = Duration::from_millis(500);
    let server = start(ServerConfig { lease: short, rejoin_grace: short * 3, ..config() });
    let (mut raw, joined) = Raw::joined(&server, "a");
    let _control = Raw::attached(&server, &joined);
    assert_eq!(raw.refused().code, RefusalCode::Timeout);
    assert_eq!(until_state(&server, "a", "lost"), "no heartbeat for 0.5 s");
}

fn entering(samples: f64, grace_ms: Option<u64>) -> Call {
    entering_with(samples, None, grace_ms)
}

fn entering_with(samples: f64, new: Option<New>, grace_ms: Option<u64>) -> Call {
    let (at_work, at_least, linger_ms, terms, wish) = (true, None, None, None, None);
    Call::Enter { samples, at_work, grace_ms, at_least, linger_ms, terms, wish, new }
}

#[test]
fn who_falls_silent_in_a_round_is_waited_for_no_longer_than_its_lease_and_again_once_it_is_heard() {
    let server = start(ServerConfig { lease: Duration::from_millis(400), ..config() });
    let rounds = |server: &Server| status(server)["rounds"].clone();
    let enter = entering(1.0, Some(u64::MAX));
    // It has a control connection, and says nothing there: as if its process had been stopped.
    let (mut silent, joined) = Raw::joined(&server, "silent");
    let mut control = Raw::attached(&server, &joined);
    silent.call(1, &enter);
    let part = |round, share, members| {
        let (at_work, agreed, new_share) = (members, true, None);
        Reply::Entered { round, share, members, at_work, agreed, new_share }
    };
    assert_eq!(silent.reply(), part(1, 1.0, 1));
    let mut a = client(&server, "a");
    let entered = a.enter(&Entry::of(1.0), &NEVER).unwrap();
    assert_eq!((entered.round, entered.members), (2, 1));
    assert_eq!(rounds(&server)["missing"], 1, "it had not gathered");
    until_state(&server, "silent", "lost");
    // Nobody is waited for who is lost, though its connection stands and it has something to give.
    silent.call(2, &enter);
    assert_eq!(a.gather(2, &NEVER).unwrap().missing, 0);
    assert_eq!(a.enter(&Entry::of(1.0), &NEVER).unwrap().members, 1);
    assert_eq!(rounds(&server)["open_entrants"], 0);
    control.heartbeat(1);
    eventually(&server, "its return", |s| s["rounds"]["open_entrants"] == 1);
    a.gather(3, &NEVER).unwrap();
    assert_eq!(a.enter(&Entry::of(3.0), &NEVER).unwrap().share, 0.75);
    assert_eq!(silent.reply(), part(4, 0.25, 2));
}

#[test]
fn what_can_be_no_samples_is_refused_by_the_server_too() {
    let server = start(config());
    for samples in [f64::NAN, f64::INFINITY, -1.0] {
        for enter in [entering(samples, None), entering_with(1.0, Some(New { samples, of: 1 }), None)] {
            let (mut raw, _) = Raw::joined(&server, "a");
            raw.call(1, &enter);
            let refused = raw.refused();
            assert_eq!(refused.code, RefusalCode::Malformed);
            assert!(refused.message.contains("0 or more"), "{refused}");
        }
    }
    assert_eq!(status(&server)["rounds"]["closed"], 0);
}

#[test]
fn terms_that_are_too_long_are_refused_by_the_server_too() {
    let refused = refused_terms("x".repeat(MOST_TERMS_BYTES + 1));
    assert!(refused.contains("1024 bytes") && refused.len() < 300, "{refused}");
}

#[test]
fn terms_that_could_forge_a_line_of_a_log_or_a_status_are_refused_and_shown_escaped() {
    for forged in ["a mean\u{1b}[2J", "a mean\r\nWARNING server: all is lost", "\u{9b}2J"] {
        let refused = refused_terms(forged.to_owned());
        assert!(
            refused.contains(&format!("{forged:?}")) && !refused.contains(char::is_control),
            "{refused:?}"
        );
    }
}

/// What a worker is told that enters by these, or would from the next round on.
fn refused_terms(words: String) -> String {
    let server = start(config());
    let refused = [(Some(words.clone()), None), (None, Some(words))].map(|(terms, wish)| {
        let (mut raw, _) = Raw::joined(&server, "a");
        let (samples, at_work, grace_ms, at_least, linger_ms, new) = (1.0, true, None, None, None, None);
        raw.call(1, &Call::Enter { samples, at_work, grace_ms, at_least, linger_ms, terms, wish, new });
        let refused = raw.refused();
        assert_eq!(refused.code, RefusalCode::Malformed);
        refused.message
    });
    assert_eq!(status(&server)["rounds"]["closed"], 0);
    let [terms, wish] = refused;
    assert_eq!(terms, wish);
    terms
}
