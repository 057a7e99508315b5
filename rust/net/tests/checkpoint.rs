//! A server that ends and one that goes on: real sockets, real files.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::kept::{Place, Steps, bytes, copy_files, until_the_first};
use common::{config, eventually, parameters, plain_sgd, start, start_with, status, table, tensor, values};
use offbeat_core::checkpoint::{MANIFEST, Manifest};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Contribution, Group, OptimizerSpec, Rule, Schedule, ScheduleShape, Transaction};
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::Want;
use offbeat_core::wire::message::{Call, Parting, Reply};
use offbeat_net::checkpoint::{Checkpoint, Watch, checkpoints};
use offbeat_net::client::{Client, ClientConfig};
use offbeat_net::server::{Every, Resume, Server, ServerConfig, ServerError, Snapshot};
use serde_json::Value;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn refused(config: ServerConfig) -> ServerError {
    Server::bind(config).and_then(|bound| bound.serve(None)).unwrap_err()
}

#[test]
fn a_server_goes_on_from_where_it_was_stopped() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    for _ in 0..5 {
        worker.push(1.0);
    }
    let before = status(&server);
    server.stop();
    let told = status(&server);
    assert_eq!(told["checkpoints"]["version"], 5);
    assert!(told["checkpoints"]["path"].as_str().unwrap().ends_with("checkpoint-000002"), "{told:#}");
    assert_eq!(place.numbers(), [2, 1], "one with the model, one at the end");

    // The first one is still there, stopped; its directory is free.
    let again = Server::start(place.config()).unwrap();
    let after = status(&again);
    assert_eq!((&after["version"], &after["samples"], &after["term"]), (&5.into(), &5.into(), &2.into()));
    assert_eq!(after["tickets"], before["tickets"]);
    assert_eq!((again.run_id(), again.address()), (server.run_id(), server.address()));
    assert!(parameters(&again).iter().all(|&p| p == -5.0));
    let mut worker = Steps::of(&again, "a");
    assert_eq!(worker.read, (2, 5));
    worker.push(1.0);
    assert!(parameters(&again).iter().all(|&p| p == -6.0));
    let one = status(&again);
    assert_eq!(common::worker(&one, "a")["applied"], 6, "its counts go on");
}

#[test]
fn no_incarnation_is_given_twice_though_more_join_than_were_reserved_at_once() {
    const JOINS: u32 = 4200;
    let place = Place::new();
    let server = start(place.config());
    let reserved = || {
        let life: Value = serde_json::from_slice(&fs::read(place.0.join("life.json")).unwrap()).unwrap();
        life["last_incarnation"].as_u64().unwrap()
    };
    let before = reserved();
    assert!(before < u64::from(JOINS), "or this shows nothing");
    for n in 1..=JOINS {
        assert_eq!(common::Raw::joined(&server, "a").1.incarnation, n);
    }
    assert!(reserved() >= u64::from(JOINS));
    // As a crash leaves it: the checkpoint has heard of none of them.
    let crashed = Place::new();
    copy_files(&place.0, &crashed.0);
    server.stop();
    let again = start(crashed.config());
    assert!(common::Raw::joined(&again, "a").1.incarnation > JOINS);
}

#[test]
fn a_start_that_is_refused_uses_up_no_life() {
    let place = Place::new();
    start(place.config()).stop();
    let before = fs::read(place.0.join("life.json")).unwrap();
    let other = TensorTable::new(vec![tensor("other", 3, Role::Parameter)]).unwrap();
    let other = Snapshot::of(other, &[vec![0; 12]]).unwrap();
    let refused = Server::with_model(place.config(), other).unwrap_err();
    assert!(matches!(refused, ServerError::OtherModel { .. }), "{refused}");
    assert_eq!(fs::read(place.0.join("life.json")).unwrap(), before);
}

#[test]
fn a_run_that_begins_anew_sets_nothing_aside_before_it_has_its_port() {
    let place = Place::new();
    let first = start(place.config());
    let taken = first.address();
    let other = Place::new();
    start(other.config()).stop();
    let kept = || checkpoints(&other.0).unwrap().len();
    let before = kept();
    let anew = |port| ServerConfig { port, ..other.every(Every::Versions(1_000_000), Resume::Never) };
    let told = refused(anew(taken.port()));
    assert!(matches!(told, ServerError::AddressInUse { .. }), "{told}");
    assert_eq!((kept(), before > 0), (before, true));
    let begun = Server::start(anew(0)).unwrap();
    assert_eq!(kept(), 0);
    begun.stop();
    first.stop();
}

#[test]
fn many_restarts_leave_the_same_bits() {
    let rule = Rule::Adam {
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.01,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: true,
    };
    let groups = vec![Group { pattern: "*".into(), lr: 0.1, rule }];
    let optimizer = Some(OptimizerSpec { groups, momentum_correction: false });
    let schedule =
        Schedule { shape: ScheduleShape::Linear { total: 50, end_factor: 0.1 }, ..Schedule::default() };
    let place = Place::new();
    let begin =
        |config: ServerConfig| start(ServerConfig { optimizer: optimizer.clone(), schedule, ..config });
    let undisturbed = begin(config());
    let mut steady = Steps::of(&undisturbed, "a");
    let mut server = begin(place.config());
    let mut worker = Steps::of(&server, "a");
    for step in 0..40_u8 {
        let gradient = f32::from(step % 7) - 3.1;
        steady.push(gradient);
        worker.push(gradient);
        if step % 4 == 3 {
            server.stop();
            server = begin(place.config());
            worker = Steps::of(&server, "a");
        }
    }
    assert_eq!(bytes(&undisturbed), bytes(&server));
    assert_eq!(status(&server)["term"], 11);
    assert_eq!(status(&undisturbed)["schedule"], status(&server)["schedule"]);
    server.stop(); // which has written, perhaps not before, what it has gone on from: a copy of the newest
    assert_eq!(place.numbers().len(), 3 + 1);
}

#[test]
fn one_is_written_every_so_many_updates_or_so_often() {
    for every in [Every::Versions(3), Every::Time(Duration::from_millis(1))] {
        let place = Place::new();
        let server = start(place.every(every, Resume::Auto));
        until_the_first(&server);
        let mut worker = Steps::of(&server, "a");
        for _ in 0..3 {
            worker.push(1.0);
        }
        let told = eventually(&server, "another", |s| s["checkpoints"]["version"] == 3);
        assert!(told["checkpoints"]["write_s"].as_f64().unwrap() > 0.0);
        assert_eq!(told["checkpoints"]["failed"], Value::Null);
    }
}

#[test]
fn what_workers_have_agreed_on_is_gone_on_with() {
    let place = Place::new();
    let open = || ServerConfig { optimizer: None, ..place.config() };
    let server = start(ServerConfig { blueprint: Some("how to build it".into()), ..open() });
    until_the_first(&server);
    server.set_optimizer(plain_sgd()).unwrap();
    server.set_lr(0.5, None).unwrap();
    let agreed = |server: &Server| {
        let status = status(server);
        ["contribution", "optimizer", "momentum_correction"].map(|name| status[name].clone())
    };
    let before = agreed(&server);
    assert_eq!(before[0], serde_json::to_value(Contribution::Gradient).unwrap());
    server.stop();
    let again = Server::start(open()).unwrap();
    assert_eq!(agreed(&again), before);
    let mut worker = Steps::of(&again, "a");
    worker.push(1.0);
    assert!(parameters(&again).iter().all(|&p| p == -0.5), "at the rate of then");
    again.stop();
    let other = Server::start(place.config()).unwrap();
    let lr = |server: &Server| status(server)["schedule"]["lr"][0].as_f64();
    assert_eq!(lr(&other), Some(1.0), "what this server is given comes first");
}

#[test]
fn what_is_agreed_on_and_what_the_store_obeys_belong_together_in_each() {
    let place = Place::new();
    let server = start(ServerConfig {
        cut_deadline: common::DEADLINE,
        ..place.every(Every::Versions(1), Resume::Auto)
    });
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    worker.sequence += 1;
    worker.raw.push_head(1, worker.read, Want::Parameters, None);
    worker.raw.fragment(1, 0, worker.base, &common::floats(common::FRAGMENTS[0], 1.0));
    eventually(&server, "a ticket", |s| s["version"] == 1);
    // The cut waits for the rest of the push; meanwhile:
    server.set_lr(0.25, None).unwrap();
    worker.raw.fragment(1, 1, worker.base, &common::floats(common::FRAGMENTS[1], 1.0));
    assert!(worker.raw.answer().receipt().applied);
    eventually(&server, "the next", |s| s["checkpoints"]["version"] == 1);
    server.stop();
    for (_, folder) in checkpoints(&place.0).unwrap() {
        let manifest = Checkpoint::verified(&folder, &Watch::none()).unwrap().manifest;
        assert_eq!(manifest.run.agreed.optimizer, manifest.book.run.map(|page| page.spec.optimizer));
    }
    let again = Server::start(ServerConfig { optimizer: None, ..place.config() }).unwrap();
    assert_eq!(status(&again)["schedule"]["lr"][0], 0.25);
}

#[test]
fn two_that_stop_a_server_at_once_both_find_everything_kept() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let acknowledged = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let pushing = scope.spawn(|| -> () {
            let mut worker = Steps::of(&server, "a");
            loop {
                worker.push(1.0);
                acknowledged.fetch_add(1, Ordering::SeqCst);
            }
        });
        eventually(&server, "some pushes", |s| s["version"].as_u64() > Some(20));
        let stop = || {
            server.stop();
            status(&server)["checkpoints"]["version"].as_u64().unwrap()
        };
        let stopping = [scope.spawn(stop), scope.spawn(stop)];
        let kept = stopping.map(|thread| thread.join().unwrap());
        assert!(pushing.join().is_err(), "with the server");
        assert_eq!(kept[0], kept[1]);
        assert!(kept[0] >= acknowledged.load(Ordering::SeqCst));
    });
}

#[test]
fn workers_with_optimizers_of_their_own_are_gone_on_with_or_refused() {
    let place = Place::new();
    let open = || ServerConfig { optimizer: None, ..place.config() };
    let server = start(open());
    let delta = || {
        let config = ClientConfig {
            address: server.address().to_string(),
            worker_id: Some("a".into()),
            token: None,
            run_id: None,
            in_flight: 1,
            connect_timeout: common::DEADLINE,
            patience: Some(Duration::ZERO),
        };
        let mut client = Client::connect(config, Some(&table()), &|| false).unwrap();
        client.configure(Contribution::Delta, None, &|| false).unwrap();
    };
    delta();
    eventually(&server, "an optimizer", |s| s["contribution"] == "delta");
    server.stop();
    let schedule =
        Schedule { shape: ScheduleShape::Linear { total: 9, end_factor: 0.0 }, ..Schedule::default() };
    let told = refused(ServerConfig { schedule, ..open() }).to_string();
    assert!(told.contains("had live optimizers of their own") && told.contains("lr_schedule"), "{told}");
    let again = Server::start(open()).unwrap();
    assert_eq!(status(&again)["contribution"], "delta");
}

#[test]
fn a_run_whose_samples_are_used_up_is_over_after_a_restart_too() {
    let place = Place::new();
    let over = || ServerConfig { max_samples: Some(2), ..place.config() };
    let server = start(over());
    let mut worker = Steps::of(&server, "a");
    worker.push(1.0);
    worker.push(1.0);
    assert_eq!(status(&server)["state"], "finished");
    server.stop();
    let again = Server::start(over()).unwrap();
    assert_eq!(status(&again)["state"], "finished");
}

#[test]
fn what_does_not_fit_the_checkpoint_is_refused_and_it_stays() {
    let place = Place::new();
    let must = place.every(Every::Versions(1), Resume::Must);
    assert!(matches!(refused(must.clone()), ServerError::NoCheckpoint { .. }));
    assert!(!place.0.exists(), "it may be mistyped");
    let server = start(place.config());
    let held = refused(place.config()).to_string();
    assert!(held.contains("is in use by another server"), "{held}");
    Steps::of(&server, "a").push(1.0);
    server.stop();
    let told = refused(ServerConfig { run_id: Some("mine".into()), ..must.clone() }).to_string();
    assert!(told.contains(&format!("is of run {:?}, not of \"mine\"", server.run_id())), "{told}");
    let other = TensorTable::new(vec![tensor("v", 3, Role::Parameter)]).unwrap();
    let other = Snapshot::of(other, &[common::floats(3, 0.0)]).unwrap();
    let told = Server::with_model(must.clone(), other).unwrap_err().to_string();
    assert!(
        told.starts_with("the model is not that of the checkpoint") && told.contains("\"never\""),
        "{told}"
    );
    let same = Snapshot::of(table(), &values(9.0)).unwrap();
    let again = Server::with_model(must, same).unwrap();
    assert!(parameters(&again).iter().all(|&p| p == -1.0), "the given parameters are not used");
}

#[test]
fn a_run_that_begins_anew_leaves_the_one_before_alone() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    Steps::of(&server, "a").push(1.0);
    server.stop();
    let anew = start(place.every(Every::Versions(1), Resume::Never));
    assert_ne!(anew.run_id(), server.run_id());
    assert_eq!(status(&anew)["version"], 0);
    assert_eq!(status(&anew)["term"], 2, "no worker of before is taken for one of now");
    let mut worker = Steps::of(&anew, "a");
    for _ in 0..5 {
        worker.push(1.0);
    }
    anew.stop();
    let aside = |name: &str| place.0.join(name).join("manifest.json").exists();
    assert!(aside("earlier-checkpoint-000001") && aside("earlier-checkpoint-000002"));
    assert!(place.numbers().iter().all(|&number| number > 2));
    drop((server, anew));
    let again = Server::start(place.config()).unwrap();
    assert!(parameters(&again).iter().all(|&p| p == -5.0));
}

#[test]
fn replaced_values_are_in_a_term_that_no_later_server_has() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let place = Place::new();
        let server = start(ServerConfig { transaction, ..place.config() });
        until_the_first(&server);
        // What a server that is killed now would leave behind.
        let copy = Place::new();
        server.load_tensors(&values(7.0)).unwrap();
        let term = status(&server)["term"].as_u64().unwrap();
        copy_files(&place.0, &copy.0);
        let again = Server::start(ServerConfig { transaction, ..copy.config() }).unwrap();
        assert!(status(&again)["term"].as_u64().unwrap() > term);
    }
}

#[test]
fn whatever_values_were_taken_while_the_server_stops_are_kept() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let (last, end) = std::thread::scope(|scope| {
        let (loaded, loads) = std::sync::mpsc::channel();
        let loading = scope.spawn({
            let server = &server;
            move || {
                let mut last = 0;
                loop {
                    // A server that takes values for ever is one that does not keep them.
                    match server.load_tensors(&values((last + 1) as f32)) {
                        Ok(()) if last < 100_000 => last += 1,
                        end => return (last, end),
                    }
                    loaded.send(()).ok();
                }
            }
        });
        loads.recv().unwrap();
        server.stop();
        loading.join().unwrap()
    });
    assert!(matches!(end, Err(ServerError::Stopped)), "{end:?}");
    assert!(matches!(server.load_tensors(&values(0.5)), Err(ServerError::Stopped)));
    assert!(matches!(server.roll_back(None), Err(ServerError::Stopped)));
    let again = Server::start(place.config()).unwrap();
    assert!(parameters(&again).iter().all(|&p| p == last as f32), "{last} are taken");
    let without = start(config());
    without.stop();
    without.load_tensors(&values(0.5)).unwrap();
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on() {
    let place = Place::new();
    let server = start(place.every(Every::Versions(1), Resume::Auto));
    until_the_first(&server);
    fs::write(place.0.join(".new"), "in the way").unwrap();
    let mut worker = Steps::of(&server, "a");
    worker.push(1.0);
    let told = eventually(&server, "a failure", |s| !s["checkpoints"]["failed"].is_null());
    assert!(told["checkpoints"]["failed"].as_str().unwrap().starts_with("cannot remove"), "{told:#}");
    assert_eq!(told["checkpoints"]["version"], 0, "the one before");
    worker.push(1.0);
    fs::remove_file(place.0.join(".new")).unwrap();
    server.stop();
    let last = status(&server);
    assert_eq!((&last["checkpoints"]["version"], &last["checkpoints"]["failed"]), (&2.into(), &Value::Null));
}

#[test]
fn a_server_does_not_go_back_to_a_checkpoint_of_another_model() {
    let (place, another) = (Place::new(), Place::new());
    let server = start(place.config());
    until_the_first(&server);
    let other = TensorTable::new(vec![tensor("v", 3, Role::Parameter)]).unwrap();
    start_with(another.config(), other, &[common::floats(3, 0.0)]).stop();
    let [(_, folder)] = &checkpoints(&another.0).unwrap()[..] else { panic!("one checkpoint") };
    copy_files(folder, &place.0.join("checkpoint-000007"));
    let told = server.roll_back(None).unwrap_err().to_string();
    assert!(told.contains("checkpoint-000007: tensor number 0 is w ") && told.contains("was v "), "{told}");
    assert!(told.contains("take it out of the directory"), "{told}");
    assert_eq!(status(&server)["term"], 1);
    server.load_tensors(&values(7.0)).unwrap();
    assert_eq!(status(&server)["term"], 2, "none was reserved for it");
}

#[test]
fn a_checkpoint_of_the_last_term_there_is_is_refused() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let path = place.0.join("checkpoint-000001").join(MANIFEST);
    let mut manifest = Manifest::decode(&fs::read(&path).unwrap()).unwrap();
    manifest.book.term = u64::MAX;
    fs::write(&path, manifest.encode().unwrap()).unwrap();
    let copy = Place::new();
    copy_files(&place.0, &copy.0);
    for told in [server.roll_back(None).unwrap_err(), refused(copy.config())] {
        assert!(told.to_string().contains(&u64::MAX.to_string()), "{told}");
    }
}

#[test]
fn a_server_goes_back_past_a_checkpoint_that_cannot_be_read() {
    let place = Place::new();
    let server = start(place.every(Every::Versions(1), Resume::Auto));
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    for version in 1..=2 {
        worker.push(1.0);
        eventually(&server, "a checkpoint", |s| s["checkpoints"]["version"] == version);
    }
    let newest = place.numbers()[0];
    fs::write(place.0.join(format!("checkpoint-{newest:06}")).join(MANIFEST), "{").unwrap();
    let told = server.roll_back(None).unwrap_err().to_string();
    assert!(told.contains("manifest.json is damaged") && told.contains("give another version"), "{told}");
    assert_eq!(server.roll_back(Some(1)).unwrap(), 1);
    assert!(parameters(&server).iter().all(|&p| p == -1.0));
}

#[test]
fn a_server_that_goes_back_to_a_checkpoint_goes_on_as_one_that_was_started_on_it() {
    let place = Place::new();
    let rule = Rule::Adam {
        betas: (0.9, 0.999),
        eps: 1e-8,
        weight_decay: 0.01,
        amsgrad: false,
        maximize: false,
        decoupled_weight_decay: true,
    };
    let groups = vec![Group { pattern: "*".into(), lr: 0.1, rule }];
    let optimizer = Some(OptimizerSpec { groups, momentum_correction: false });
    let config = |place: &Place| {
        let every = place.every(Every::Versions(1), Resume::Auto);
        ServerConfig { optimizer: optimizer.clone(), ..every }
    };
    let server = start(config(&place));
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    for n in 1..=3_u8 {
        worker.push(f32::from(n));
        eventually(&server, "a checkpoint", |s| s["checkpoints"]["version"] == u64::from(n));
    }
    let then = bytes(&server);
    let copy = Place::new();
    copy_files(&place.0, &copy.0);
    worker.push(4.0);
    eventually(&server, "a checkpoint", |s| s["checkpoints"]["version"] == 4);
    assert_eq!(server.roll_back(Some(3)).unwrap(), 3);
    assert_eq!(bytes(&server), then);
    let now = status(&server);
    assert_eq!((&now["version"], &now["term"], &now["lost_updates"]), (&4.into(), &2.into(), &0.into()));
    // A push on what was there in between is refused; its worker reads, and goes on.
    let late = worker.try_push(9.0);
    assert_eq!(late.reason, Some(Reason::ServerRolledBack));
    worker.push(5.0);
    let another = Server::start(config(&copy)).unwrap();
    Steps::of(&another, "b").push(5.0);
    assert_eq!(bytes(&server), bytes(&another), "the optimizer remembers what it had then");
    let told = server.roll_back(Some(77)).unwrap_err().to_string();
    assert!(told.contains("no checkpoint of version 77") && told.contains("of versions ["), "{told}");
    eventually(&server, "one of the new term", |s| s["checkpoints"]["version"] == 5);
    assert_eq!(server.roll_back(None).unwrap(), 5, "the newest");
    let told = start(common::config()).roll_back(None).unwrap_err().to_string();
    assert!(told.contains("keeps no checkpoints"), "{told}");
}

/// Copies what a server that is killed now leaves behind, and starts another on it.
fn killed_now(place: &Place, copy: &Place) -> Server {
    copy_files(&place.0, &copy.0);
    Server::start(copy.config()).unwrap()
}

#[test]
fn a_server_that_is_killed_after_it_went_back_or_its_values_were_replaced_goes_on_from_there() {
    let (place, gone_back, replaced) = (Place::new(), Place::new(), Place::new());
    let server = start(place.config());
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    worker.push(1.0);
    assert_eq!(server.roll_back(None).unwrap(), 0);
    let again = killed_now(&place, &gone_back);
    assert!(parameters(&again).iter().all(|&p| p == 0.0), "{:?}", parameters(&again)[0]);
    assert_eq!(status(&again)["version"], 1, "versions go on");
    server.load_tensors(&values(7.0)).unwrap();
    let again = killed_now(&place, &replaced);
    assert!(parameters(&again).iter().all(|&p| p == 7.0), "{:?}", parameters(&again)[0]);
}

#[test]
fn what_cannot_be_kept_of_a_rollback_stands_and_is_told() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    worker.push(1.0);
    fs::write(place.0.join(".new"), "in the way").unwrap();
    assert_eq!(server.roll_back(None).unwrap(), 0);
    let told = status(&server);
    assert!(told["checkpoints"]["failed"].as_str().unwrap().starts_with("cannot remove"), "{told:#}");
    assert!(parameters(&server).iter().all(|&p| p == 0.0));
    assert_eq!(place.numbers(), [1]);
    fs::remove_file(place.0.join(".new")).unwrap();
    // As after any that could not be written it is not tried at each look.
    eventually(&server, "time", |s| s["checkpoints"]["age_s"].as_f64().unwrap() > 4.0);
    assert_eq!(place.numbers(), [1]);
    eventually(&server, "another try", |s| s["checkpoints"]["failed"].is_null());
    assert_eq!(place.numbers(), [2, 1]);
    server.stop();
    assert!(parameters(&Server::start(place.config()).unwrap()).iter().all(|&p| p == 0.0));
}

#[test]
fn what_was_gone_back_from_makes_room_before_what_is_older() {
    let place = Place::new();
    let server = start(place.every(Every::Versions(1), Resume::Auto));
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    for version in 1..=2 {
        worker.push(1.0);
        eventually(&server, "a checkpoint", |s| s["checkpoints"]["version"] == version);
    }
    assert_eq!(place.numbers(), [3, 2, 1]);
    assert_eq!(server.roll_back(Some(1)).unwrap(), 1);
    assert_eq!(place.numbers(), [4, 3, 2, 1], "three differ: the fourth is the second again");
    assert_eq!(server.roll_back(Some(0)).unwrap(), 0, "there it is, to go back further");
    assert!(parameters(&server).iter().all(|&p| p == 0.0));
    assert_eq!(place.numbers(), [5, 4, 3, 1], "what was gone back from has room until what is good needs it");
    worker.try_push(9.0); // on what was gone back from: it reads anew
    worker.push(3.0);
    eventually(&server, "a checkpoint", |s| s["checkpoints"]["version"] == 3);
    assert_eq!(place.numbers(), [6, 5, 4], "the oldest of it goes first, and a copy");
    worker.push(1.0);
    eventually(&server, "a checkpoint", |s| s["checkpoints"]["version"] == 4);
    assert_eq!(place.numbers(), [7, 6, 5]);
    assert!(matches!(server.roll_back(Some(1)), Err(ServerError::NoSuchCheckpoint { .. })));
}

#[test]
fn a_version_is_gone_back_to_and_never_the_copy_of_another_that_was_written_at_it() {
    let place = Place::new();
    let server = start(place.every(Every::Versions(1), Resume::Auto));
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    for version in 1..=2 {
        worker.push(1.0);
        eventually(&server, "a checkpoint", |s| s["checkpoints"]["version"] == version);
    }
    let there = |server: &Server, at: f32| assert!(parameters(server).iter().all(|&p| p == -at));
    assert_eq!(server.roll_back(Some(1)).unwrap(), 1);
    there(&server, 1.0);
    // At version 2 there are now the values of 1, too.
    assert_eq!(server.roll_back(Some(2)).unwrap(), 2);
    there(&server, 2.0);
    assert_eq!(server.roll_back(Some(1)).unwrap(), 1);
    assert_eq!(server.roll_back(None).unwrap(), 1, "the newest has these");
    server.stop();
    let again = start(place.every(Every::Versions(1), Resume::Auto));
    there(&again, 1.0);
    assert_eq!(status(&again)["version"], 2);
    assert_eq!(again.roll_back(Some(1)).unwrap(), 1);
    there(&again, 1.0);
    assert_eq!(again.roll_back(Some(2)).unwrap(), 2);
    there(&again, 2.0);
}

fn goodbye(raw: &mut common::Raw) {
    raw.call(1000, &Call::Goodbye { parting: Parting::Finished });
    assert_eq!(raw.reply(), Reply::Goodbye);
}

#[test]
fn who_comes_pushes_and_finishes_while_another_stays_is_known_to_the_next_server() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let (_stays, _) = common::Raw::joined(&server, "stays");
    goodbye(&mut common::Raw::joined(&server, "a stranger").0);
    // The goodbye of one that matters would be kept by now.
    eventually(&server, "time", |s| s["checkpoints"]["age_s"].as_f64().unwrap() > 11.0);
    assert_eq!(place.numbers(), [1]);
    for round in 1..=2 {
        // The second time it is one that the last checkpoint has as gone, with fewer pushes.
        let mut worker = Steps::of(&server, "comes");
        worker.push(1.0);
        goodbye(&mut worker.raw);
        eventually(&server, "what it has done", |s| s["checkpoints"]["version"] == round);
    }
    let copy = Place::new();
    let told = status(&killed_now(&place, &copy));
    let comes = common::worker(&told, "comes");
    assert_eq!((&comes["state"], &comes["pushes"]), (&"finished".into(), &2.into()), "{told:#}");
}

#[test]
fn what_one_has_done_that_left_is_kept_though_another_has_its_name_at_once() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let (_stays, _) = common::Raw::joined(&server, "stays");
    let mut worker = Steps::of(&server, "a");
    worker.push(1.0);
    goodbye(&mut worker.raw);
    let (_other, _) = common::Raw::joined(&server, "a");
    eventually(&server, "what it has done", |s| s["checkpoints"]["version"] == 1);
}

#[test]
fn who_comes_and_goes_between_two_checkpoints_and_changes_nothing_causes_none() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let come_and_go = |name: &str| goodbye(&mut common::Raw::joined(&server, name).0);
    let age = |s: &Value| s["checkpoints"]["age_s"].as_f64().unwrap();
    come_and_go("a stranger");
    // Long enough for one that is due where nobody is there, and for many looks.
    eventually(&server, "time", |s| age(s) > 3.0);
    come_and_go("a stranger");
    come_and_go("another");
    assert_eq!(place.numbers(), [1]);
    let mut worker = Steps::of(&server, "a");
    worker.push(1.0);
    goodbye(&mut worker.raw);
    eventually(&server, "what it has done, when nobody is there", |s| s["checkpoints"]["version"] == 1);
    assert_eq!(place.numbers(), [2, 1]);
    server.stop();
    let told = status(&Server::start(place.config()).unwrap());
    assert_eq!(told["workers"].as_array().unwrap().len(), 3, "the next one has them, too: {told:#}");
}
