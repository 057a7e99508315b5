//! Checkpoints in the hands of who is no server: looked at, put to the proof, their model taken, and nothing changed.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::kept::{Place, Steps, bytes, copy_files, until_the_first};
use common::{eventually, start, status, tensor};
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::Want;
use offbeat_net::checkpoint::{
    Checkpoint, DirectoryError, Model, Watch, checkpoints, inspect, model, names, verify,
};
use offbeat_net::server::{Every, Resume, Server, ServerConfig, Snapshot};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of a model long enough to be told of while it is read.
const LARGE: usize = 1_200_000;

/// Names, lengths and times of all that is in a directory.
fn listed(path: &Path) -> Vec<(PathBuf, u64, std::time::SystemTime)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let told = entry.metadata().unwrap();
        all.push((entry.path(), told.len(), told.modified().unwrap()));
        if told.is_dir() {
            all.extend(listed(&entry.path()));
        }
    }
    all.sort();
    all
}

fn newest(place: &Place) -> PathBuf {
    checkpoints(&place.0).unwrap().remove(0).1
}

fn inspected(path: &Path) -> Value {
    serde_json::from_str(&inspect(path).unwrap()).unwrap()
}

/// A server's checkpoints at versions 0 and 3, while it still has the directory; with that, it is stopped.
fn kept(place: &Place) -> Server {
    let server = start(place.config());
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    for _ in 0..3 {
        worker.push(1.0);
    }
    server.stop();
    server
}

#[test]
fn what_no_server_does_with_checkpoints_changes_nothing() {
    let place = Place::new();
    let server = kept(&place);
    let before = listed(&place.0);
    let newest = newest(&place);
    assert_eq!(names(&place.0).unwrap().unwrap(), ["checkpoint-000002", "checkpoint-000001"]);
    assert_eq!(names(&newest).unwrap(), None);
    assert!(verify(&newest, &Watch::none()).unwrap());
    for path in [&place.0, &newest] {
        let Model { name, version, tensors, passed_over } = model(path, &Watch::none()).unwrap();
        assert_eq!((&*name, version, passed_over.len()), ("checkpoint-000002", 3, 0));
        assert_eq!(tensors.1, bytes(&server));
    }
    let told = inspected(&place.0);
    assert_eq!(told["next"], "checkpoint-000002");
    assert_eq!(told["checkpoints"][1]["checkpoint"]["version"], 0);
    let told = inspected(&newest);
    assert_eq!((&told["run_id"], &told["version"]), (&server.run_id().into(), &3.into()));
    assert_eq!((&told["num_tensors"], &told["files"][0]["name"]), (&2.into(), &"model.safetensors".into()));
    let worker = &told["workers"][0];
    assert_eq!(
        (&worker["id"], &worker["last_push"], &worker["applied"]),
        (&"a".into(), &3.into(), &3.into())
    );
    let status = status(&server);
    for same in ["optimizer", "schedule", "staleness", "tickets", "rejected", "transaction", "contribution"] {
        assert_eq!(told[same], status[same], "{same}");
    }
    fs::remove_file(place.0.join("lock")).unwrap();
    assert!(verify(&newest, &Watch::none()).unwrap() && inspected(&place.0)["refusal"].is_null());
    assert_eq!(listed(&place.0).len(), before.len() - 1, "no lock is made");
}

#[test]
fn a_damaged_one_is_passed_over_with_its_reason_and_stays_where_it_is() {
    let place = Place::new();
    drop(kept(&place));
    let newest = newest(&place);
    let file = newest.join("model.safetensors");
    let mut bits = fs::read(&file).unwrap();
    *bits.last_mut().unwrap() ^= 1;
    fs::write(&file, &bits).unwrap();
    let before = listed(&place.0);
    let told = verify(&newest, &Watch::none()).unwrap_err().to_string();
    assert!(told.contains("checkpoint-000002: model.safetensors is damaged: its SHA-256 is "), "{told}");
    let Model { name, version, passed_over, .. } = model(&place.0, &Watch::none()).unwrap();
    assert_eq!((&*name, version, passed_over), ("checkpoint-000001", 0, vec![told]));
    assert!(model(&newest, &Watch::none()).is_err(), "that one was asked for");
    assert_eq!(inspected(&place.0)["next"], "checkpoint-000002", "of its values nothing is read");
    bits.truncate(100);
    fs::write(&file, &bits).unwrap();
    let told = inspected(&place.0);
    assert_eq!(told["next"], "checkpoint-000001");
    let error = told["checkpoints"][0]["error"].as_str().unwrap();
    assert!(
        error.contains("model.safetensors is damaged: it has 100 bytes where the manifest says"),
        "{error}"
    );
    assert!(inspect(&newest).is_err());
    fs::remove_dir_all(place.0.join("checkpoint-000001")).unwrap();
    assert!(matches!(model(&place.0, &Watch::none()), Err(DirectoryError::NoneUsable { found: 1, .. })));
    let refusal = inspected(&place.0)["refusal"].as_str().unwrap().to_owned();
    let Err(same) = Server::bind(place.config()) else { panic!("it has nothing to go on from") };
    assert_eq!(refusal, same.to_string(), "what a start would say");
    assert_eq!(listed(&place.0).len(), before.len() - 3);
}

#[test]
fn what_workers_cannot_have_agreed_on_is_refused_as_a_start_refuses_it() {
    let place = Place::new();
    drop(kept(&place));
    let Checkpoint { path, mut manifest } = Checkpoint::unverified(&newest(&place)).unwrap();
    let as_set = manifest.run.agreed.as_set.as_mut().unwrap();
    as_set.groups[0].lr = -1.0;
    fs::write(path.join("manifest.json"), manifest.encode().unwrap()).unwrap();
    let told = verify(&path, &Watch::none()).unwrap_err().to_string();
    assert!(told.contains("manifest.json does not hold together: ") && told.contains("lr"), "{told}");
    let by_workers = ServerConfig { optimizer: None, ..place.config() };
    let Err(refused) = Server::bind(by_workers) else { panic!("such an optimizer is none") };
    assert_eq!(refused.to_string(), told);
}

#[test]
fn what_its_server_removes_while_it_is_read_is_gone_and_not_damaged() {
    let place = Place::new();
    let table = TensorTable::new(vec![tensor("w", LARGE / 4, Role::Parameter)]).unwrap();
    let large = Snapshot::of(table, &[vec![0; LARGE]]).unwrap();
    let bound = Server::bind(place.config()).unwrap();
    let server = bound.serve(Some(large)).unwrap();
    until_the_first(&server);
    server.load_tensors(&[vec![0; LARGE]]).unwrap();
    server.stop();
    let newest = newest(&place);
    assert!(newest.ends_with("checkpoint-000002"), "{newest:?}");
    let removes = |_, _| {
        fs::remove_dir_all(&newest).ok();
        true
    };
    assert!(!verify(&newest, &Watch::new(&removes)).unwrap());
    assert!(matches!(model(&newest, &Watch::none()), Err(DirectoryError::Io { .. })), "nothing was there");
    let oldest = place.0.join("checkpoint-000001");
    copy_files(&oldest, &newest);
    let Model { name, passed_over, .. } = model(&place.0, &Watch::new(&removes)).unwrap();
    assert_eq!((&*name, passed_over.len()), ("checkpoint-000001", 0), "looked for anew");
    let breaks_off = |read, all| {
        assert_eq!(
            (read >= 1 << 20, all),
            (true, 2 * fs::metadata(oldest.join("model.safetensors")).unwrap().len())
        );
        false
    };
    let told = verify(&oldest, &Watch::new(&breaks_off)).unwrap_err().to_string();
    assert!(told.ends_with("model.safetensors cannot be read: it was broken off"), "{told}");
}

#[test]
fn what_is_no_place_of_checkpoints_is_refused_and_an_empty_one_is_told() {
    let place = Place::new();
    fs::create_dir(&place.0).unwrap();
    assert!(matches!(inspect(&place.0), Err(DirectoryError::Foreign { .. })));
    assert!(matches!(names(&place.0), Err(DirectoryError::Foreign { .. })));
    fs::write(place.0.join("lock"), "").unwrap();
    assert!(matches!(model(&place.0, &Watch::none()), Err(DirectoryError::Empty { .. })));
    assert_eq!(inspected(&place.0)["next"], Value::Null);
    fs::write(place.0.join("life.json"), "{").unwrap();
    let refusal = inspected(&place.0)["refusal"].as_str().unwrap().to_owned();
    assert!(refusal.contains("life.json is damaged"), "{refusal}");
    let bare = place.0.join("damaged-checkpoint-000007");
    fs::create_dir(&bare).unwrap();
    assert_eq!(inspected(&place.0)["set_aside"][0], "damaged-checkpoint-000007");
    let told = verify(&bare, &Watch::none()).unwrap_err().to_string();
    assert!(told.ends_with("manifest.json is damaged: it is not there"), "{told}");
}

#[test]
fn a_push_under_way_is_named() {
    let place = Place::new();
    let cut_deadline = Duration::from_millis(1);
    let server = start(ServerConfig { cut_deadline, ..place.every(Every::Versions(1), Resume::Auto) });
    until_the_first(&server);
    let mut worker = Steps::of(&server, "a");
    worker.raw.push_head(1, worker.read, Want::Parameters, None);
    worker.raw.fragment(1, 0, worker.base, &common::floats(common::FRAGMENTS[0], 1.0));
    eventually(&server, "the next", |s| s["checkpoints"]["version"] == 1);
    let told = inspected(&newest(&place));
    let push = &told["workers"][0]["unfinished"][0];
    assert_eq!((&push["push"], &push["ticket"], &push["num_applied"]), (&1.into(), &1.into(), &1.into()));
}
