//! A worker that brings values for a model that is there, which gives way to them or stays: real sockets, real files.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::kept::{Place, Steps, until_the_first};
use common::{
    FRAGMENTS, NEVER, Raw, client, config, eventually, floats, parameters, start, status, table, values,
};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::message::{Call, Event, FIRST_TERM, RefusalCode, Replaces, Reply};
use offbeat_core::wire::{Header, Kind};
use offbeat_net::server::{Server, ServerConfig};
use std::path::PathBuf;
use std::sync::Arc;

const TRANSACTIONS: [Transaction; 2] = [Transaction::Fragment, Transaction::Model];

fn with(transaction: Transaction) -> ServerConfig {
    ServerConfig { transaction, ..config() }
}

fn begin(raw: &mut Raw, replaces: Replaces) -> Reply {
    raw.call(1, &Call::InitBegin { table: table(), blueprint: None, replaces: Some(replaces) });
    raw.reply()
}

/// That of the server's first life.
fn at(version: u64) -> Replaces {
    Replaces::At { term: FIRST_TERM, version }
}

/// Sends the values of all fragments, and what ends them.
fn commit(raw: &mut Raw, value: f32) -> Reply {
    for (i, len) in FRAGMENTS.into_iter().enumerate() {
        let header = Header { fragment: u32::try_from(i).unwrap(), ..Header::new(Kind::Value) };
        raw.frame(header, &floats(len, value));
    }
    raw.call(2, &Call::InitCommit);
    raw.reply()
}

/// Brings values to a model that gives way to them.
fn bring(raw: &mut Raw, replaces: Replaces, value: f32) {
    assert_eq!(begin(raw, replaces), Reply::Init { taken: true }, "{replaces:?}");
    assert_eq!(commit(raw, value), Reply::Init { taken: true }, "{replaces:?}");
}

fn assert_all(server: &Server, value: f32) {
    assert!(parameters(server).iter().all(|&p| p == value), "{value} expected");
}

#[test]
fn a_model_that_is_what_it_was_gives_way_in_a_new_term() {
    for transaction in TRANSACTIONS {
        let server = start(with(transaction));
        let (mut raw, joined) = Raw::joined(&server, "a");
        let mut control = Raw::attached(&server, &joined);
        bring(&mut raw, at(0), 7.0);
        assert_eq!(control.event(), Event::Term { term: joined.term + 1 });
        assert_all(&server, 7.0);
    }
}

#[test]
fn what_was_computed_on_the_values_before_is_not_added_to_those_that_were_brought() {
    let server = start(config());
    let mut late = Steps::of(&server, "late");
    late.push(1.0);
    let (mut raw, _) = Raw::joined(&server, "a");
    bring(&mut raw, at(1), 7.0);
    assert_eq!(status(&server)["version"], 1, "the count of updates goes on");
    assert_eq!(late.try_push(1.0).reason, Some(Reason::ServerRolledBack));
    late.push(1.0);
    assert_all(&server, 6.0);
}

#[test]
fn a_model_that_has_had_a_push_since_stays() {
    let server = start(config());
    let mut other = Steps::of(&server, "other");
    other.push(1.0);
    let (mut raw, joined) = Raw::joined(&server, "a");
    assert_eq!(begin(&mut raw, at(0)), Reply::Init { taken: false });
    assert_eq!(status(&server)["term"], joined.term);
    other.push(1.0);
    assert_all(&server, -2.0);
}

#[test]
fn a_model_of_an_earlier_version_is_of_another_life_and_stays() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    assert_eq!(begin(&mut raw, at(1)), Reply::Init { taken: false });
    assert_eq!(status(&server)["term"], joined.term);
    assert_all(&server, 0.0);
}

#[test]
fn a_push_that_comes_while_values_are_brought_is_not_lost_to_them() {
    let server = start(config());
    let mut other = Steps::of(&server, "other");
    let (mut raw, joined) = Raw::joined(&server, "a");
    assert_eq!(begin(&mut raw, at(0)), Reply::Init { taken: true });
    other.push(1.0);
    assert_eq!(commit(&mut raw, 7.0), Reply::Init { taken: false });
    assert_eq!(status(&server)["term"], joined.term);
    assert_all(&server, -1.0);
}

#[test]
fn values_of_another_model_and_what_is_not_finite_change_nothing() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    let other = TensorTable::new(vec![common::tensor("other", 3, Role::Parameter)]).unwrap();
    raw.call(1, &Call::InitBegin { table: other, blueprint: None, replaces: Some(at(0)) });
    assert_eq!(raw.refused().code, RefusalCode::ModelMismatch);
    let (mut raw, _) = Raw::joined(&server, "b");
    assert_eq!(begin(&mut raw, at(0)), Reply::Init { taken: true });
    raw.frame(Header::new(Kind::Value), &floats(FRAGMENTS[0], f32::NAN));
    assert_eq!(raw.refused().code, RefusalCode::Malformed);
    assert_eq!(status(&server)["term"], joined.term);
    assert_all(&server, 0.0);
    // Nobody else is kept from it by that.
    let (mut raw, _) = Raw::joined(&server, "c");
    bring(&mut raw, at(0), 3.0);
    assert_all(&server, 3.0);
}

#[test]
fn a_server_without_a_model_takes_them_as_it_takes_any() {
    let server = Server::start(config()).unwrap();
    let (mut raw, joined) = Raw::joined(&server, "a");
    bring(&mut raw, at(0), 5.0);
    assert_eq!(status(&server)["term"], joined.term);
    assert_all(&server, 5.0);
}

#[test]
fn a_server_that_is_killed_right_after_goes_on_with_them() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    let (mut raw, _) = Raw::joined(&server, "a");
    bring(&mut raw, at(0), 7.0);
    let copy = Place::new();
    common::kept::copy_files(&place.0, &copy.0);
    let again = Server::start(copy.config()).unwrap();
    assert_all(&again, 7.0);
}

#[test]
fn a_model_of_another_term_stays_whatever_its_version() {
    let server = start(config());
    let mut own = Steps::of(&server, "own");
    own.push(1.0);
    server.load_tensors(&values(5.0)).unwrap();
    let (mut raw, _) = Raw::joined(&server, "a");
    assert_eq!(begin(&mut raw, at(1)), Reply::Init { taken: false });
    assert_all(&server, 5.0);
    let (mut raw, _) = Raw::joined(&server, "b");
    let of_now = Replaces::At { term: FIRST_TERM + 1, version: 1 };
    bring(&mut raw, of_now, 7.0);
    assert_all(&server, 7.0);
}

#[test]
fn a_model_that_nobody_has_trained_is_its_owner_s_and_gives_way_once() {
    let server = start(config());
    for (taken, id) in [(true, "a"), (false, "b")] {
        let (mut raw, _) = Raw::joined(&server, id);
        assert_eq!(begin(&mut raw, Replaces::Untrained), Reply::Init { taken });
        if taken {
            assert_eq!(commit(&mut raw, 7.0), Reply::Init { taken });
        }
    }
    assert_all(&server, 7.0);
    let refuses = |server: &Server| {
        let (mut raw, _) = Raw::joined(server, "c");
        assert_eq!(begin(&mut raw, Replaces::Untrained), Reply::Init { taken: false });
    };
    let pushed_to = start(config());
    Steps::of(&pushed_to, "other").push(1.0);
    refuses(&pushed_to);
    let loaded = start(config());
    loaded.load_tensors(&values(3.0)).unwrap();
    refuses(&loaded);
    let brought = Server::start(config()).unwrap();
    let (mut raw, _) = Raw::joined(&brought, "a");
    bring(&mut raw, Replaces::Untrained, 5.0);
    refuses(&brought);
    assert_all(&brought, 5.0);
}

#[test]
fn what_a_server_goes_on_from_is_trained() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    server.stop();
    let again = Server::start(place.config()).unwrap();
    let (mut raw, _) = Raw::joined(&again, "a");
    assert_eq!(begin(&mut raw, Replaces::Untrained), Reply::Init { taken: false });
    assert_all(&again, 0.0);
}

#[test]
fn a_server_that_was_started_again_gives_way_to_who_has_all_that_its_checkpoint_has() {
    let place = Place::new();
    let server = start(place.config());
    let mut own = Steps::of(&server, "own");
    own.push(1.0);
    own.push(1.0);
    server.stop();
    let of_second_life = Replaces::At { term: FIRST_TERM + 1, version: 2 };
    for (replaces, has_push, taken) in [
        (at(1), false, false),         // another has pushed since
        (of_second_life, false, true), // it was here in this life
        (at(2), false, true),
        (at(9), false, true), // seven were lost with the server, and it has them
        (at(9), true, false),
        (Replaces::At { term: 0, version: 9 }, false, false),
        (Replaces::Untrained, false, false),
    ] {
        let copy = Place::new();
        common::kept::copy_files(&place.0, &copy.0);
        let again = Server::start(copy.config()).unwrap();
        if has_push {
            Steps::of(&again, "other").push(1.0);
        }
        let (mut raw, _) = Raw::joined(&again, "a");
        assert_eq!(begin(&mut raw, replaces), Reply::Init { taken }, "{replaces:?}, {has_push}");
        if taken {
            assert_eq!(commit(&mut raw, 7.0), Reply::Init { taken });
            assert_all(&again, 7.0);
            let (mut raw, _) = Raw::joined(&again, "b");
            assert_eq!(begin(&mut raw, at(9)), Reply::Init { taken: false }, "it has given way to another");
        }
    }
}

#[test]
fn a_model_that_gave_way_once_or_nobody_has_pushed_to_does_so_after_another_start() {
    let place = Place::new();
    let server = start(place.config());
    Steps::of(&server, "own").push(1.0);
    server.stop();
    for _ in 0..2 {
        Server::start(place.config()).unwrap().stop();
    }
    let again = Server::start(place.config()).unwrap();
    let (mut raw, joined) = Raw::joined(&again, "a");
    assert_eq!(joined.term, FIRST_TERM + 3);
    bring(&mut raw, at(1), 7.0);
    again.stop();
    let after = Server::start(place.config()).unwrap();
    assert_all(&after, 7.0);
    let (mut raw, _) = Raw::joined(&after, "b");
    assert_eq!(begin(&mut raw, at(1)), Reply::Init { taken: false }, "others have brought theirs");
}

#[test]
fn one_that_is_killed_soon_after_another_start_gives_way_to_who_was_there_before_and_after_it() {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    server.stop();
    let num = place.numbers().len();
    let again = Server::start(place.config()).unwrap();
    eventually(&again, "its first", |_| place.numbers().len() > num);
    let killed = Place::new();
    common::kept::copy_files(&place.0, &killed.0);
    Steps::of(&again, "own").push(1.0);
    let of_its_life = Replaces::At { term: FIRST_TERM + 1, version: 1 };
    let of_none = Replaces::At { term: FIRST_TERM + 2, version: 1 };
    for (replaces, taken) in [(at(0), true), (of_its_life, true), (of_none, false)] {
        let copy = Place::new();
        common::kept::copy_files(&killed.0, &copy.0);
        let third = Server::start(copy.config()).unwrap();
        assert_all(&third, 0.0);
        let (mut raw, _) = Raw::joined(&third, "a");
        assert_eq!(begin(&mut raw, replaces), Reply::Init { taken }, "{replaces:?}");
    }
}

/// A place with two checkpoints, of versions 0 and 1, and the folder of the newer one.
fn two_checkpoints() -> (Place, PathBuf) {
    let place = Place::new();
    let server = start(place.config());
    until_the_first(&server);
    Steps::of(&server, "own").push(1.0);
    server.stop();
    let [newest, ..] = place.numbers()[..] else { panic!("there are two") };
    let newest = place.0.join(format!("checkpoint-{newest:06}"));
    (place, newest)
}

#[test]
fn a_model_to_which_an_owner_has_gone_back_stays() {
    let (place, newest) = two_checkpoints();
    let copy = Place::new();
    let older = "checkpoint-000001";
    common::kept::copy_files(&place.0.join(older), &copy.0.join(older));
    std::fs::remove_dir_all(newest).unwrap();
    for place in [place, copy] {
        let again = Server::start(place.config()).unwrap();
        assert_all(&again, 0.0);
        let (mut raw, _) = Raw::joined(&again, "a");
        assert_eq!(begin(&mut raw, at(1)), Reply::Init { taken: false });
    }
}

#[test]
fn where_the_newest_checkpoint_is_damaged_the_one_before_gives_way() {
    let (place, newest) = two_checkpoints();
    std::fs::remove_file(newest.join("manifest.json")).unwrap();
    let again = Server::start(place.config()).unwrap();
    assert_all(&again, 0.0);
    let (mut raw, _) = Raw::joined(&again, "a");
    bring(&mut raw, at(1), 7.0);
    assert_all(&again, 7.0);
}

#[test]
fn a_client_brings_them_and_pulls_what_it_has_brought() {
    for (replaces, taken) in [(at(0), true), (Replaces::Untrained, true), (at(0), false)] {
        let server = start(config());
        if !taken {
            Steps::of(&server, "other").push(1.0);
        }
        let mut client = client(&server, "a");
        let before = client.session().unwrap().term;
        let given = values(7.0);
        let slices: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
        assert_eq!(client.replace(&table(), &slices, replaces, &NEVER), Ok(taken));
        assert_eq!(client.session().unwrap().term, before + u64::from(taken));
        assert_eq!(client.wait_for_model(&NEVER).map(Arc::unwrap_or_clone), Ok(table()));
        assert_all(&server, if taken { 7.0 } else { -1.0 });
    }
}
