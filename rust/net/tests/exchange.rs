//! Pushes and pulls, over real sockets: what is applied, how often, and what comes back.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::{
    B, FRAGMENTS, NEVER, Raw, W, client, config, eventually, floats, parameters, start, status, tensor,
    until_state, values,
};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{StalenessSpec, Transaction};
use offbeat_core::store::Fate;
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::message::{Call, Event, FINISHED_BUDGET, Parting, RefusalCode};
use offbeat_core::wire::{Header, Kind, Want, encode};
use offbeat_net::client::{Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig, ServerError, Snapshot};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

const TRANSACTIONS: [Transaction; 2] = [Transaction::Fragment, Transaction::Model];

fn with(transaction: Transaction) -> ServerConfig {
    ServerConfig { transaction, ..config() }
}

/// A whole push under either transaction.
fn push(
    raw: &mut Raw,
    server: &Server,
    sequence: u64,
    at: (u64, u64),
    base: u64,
    value: f32,
) -> common::Answer {
    if status(server)["transaction"] == "fragment" {
        return raw.push(sequence, at, base, value, Want::Parameters);
    }
    raw.push_head(sequence, at, Want::Parameters, None);
    assert_eq!(raw.next().unwrap().0.kind, Kind::Grant);
    for (i, len) in FRAGMENTS.into_iter().enumerate() {
        raw.fragment(sequence, u32::try_from(i).unwrap(), base, &floats(len, value));
    }
    raw.answer()
}

#[test]
fn a_push_comes_back_as_parameters_and_a_receipt() {
    for transaction in TRANSACTIONS {
        let server = start(with(transaction));
        let (mut raw, joined) = Raw::joined(&server, "a");
        assert_eq!(joined.run.transaction, transaction);
        let answer = push(&mut raw, &server, 1, (joined.term, joined.version), 0, 1.0);
        assert_eq!(answer.roots, [(1, Some(-1.0)), (1, Some(-1.0))]);
        assert_eq!(answer.read, (joined.term, 1));
        let receipt = answer.receipt();
        assert_eq!(
            (receipt.verdict, receipt.weight, receipt.staleness, receipt.version),
            (Fate::Admit, 1.0, 0, 1)
        );
        let answer = push(&mut raw, &server, 2, answer.read, 1, 2.0);
        assert_eq!(answer.receipt().staleness, 0, "what a push brings back counts as read");
        assert!(parameters(&server).iter().all(|&p| p == -3.0));
    }
}

#[test]
fn the_client_and_the_server_agree() {
    for transaction in TRANSACTIONS {
        let server = start(with(transaction));
        let mut client = client(&server, "a");
        let (mut gradients, mut out) = (values(1.0), values(9.0));
        let pulled =
            client.pull(&out.iter_mut().map(|o| Memory::of(o)).collect::<Vec<_>>(), false, &NEVER).unwrap();
        assert_eq!(pulled.version, 0);
        assert_eq!(out, values(0.0));
        for step in 1..=3_u16 {
            let gradients: Vec<_> = gradients.iter_mut().map(|g| Some(Memory::of(g))).collect();
            let input = PushInput { values: &gradients, samples: 4 };
            let memory: Vec<_> = out.iter_mut().map(|o| Memory::of(o)).collect();
            let receipt = client.push_pull(input, &memory, true, &NEVER).unwrap().unwrap();
            assert_eq!((receipt.version, receipt.staleness), (u64::from(step), 0));
            drop(memory);
            assert_eq!(out, values(-f32::from(step)));
        }
        client.close(Parting::Finished, &NEVER).unwrap();
        let status = status(&server);
        assert_eq!((&status["samples"], &status["tickets"]["applied"]), (&12.into(), &3.into()));
        assert_eq!(common::worker(&status, "a")["state"], "finished");
    }
}

#[test]
fn the_end_of_a_connection_in_mid_frame_leaves_no_half_fragment() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    raw.push_head(1, (joined.term, joined.version), Want::Receipt, None);
    raw.fragment(1, 0, 0, &floats(FRAGMENTS[0], 1.0));
    let rest = floats(FRAGMENTS[1], 1.0);
    let header = Header { sequence: 1, fragment: 1, ..Header::new(Kind::Fragment) };
    raw.write(&header.with_payload(&rest).encode()).unwrap();
    raw.write(&rest[..rest.len() / 2]).unwrap();
    drop(raw);
    let cause = until_state(&server, "a", "lost");
    assert!(cause.contains("in the middle of a frame"), "{cause}");
    let status = eventually(&server, "the ticket ended", |s| s["tickets"]["open"] == 0);
    assert_eq!(status["tickets"]["partial"], 1);
    let now = parameters(&server);
    assert!(now[..FRAGMENTS[0]].iter().all(|&p| p == -1.0), "the fragment that came is applied, whole");
    assert!(now[FRAGMENTS[0]..].iter().all(|&p| p == 0.0), "of the other nothing is");
}

#[test]
fn under_model_nothing_of_a_broken_push_is_applied_and_its_staging_is_free_again() {
    let budget = 4 * (W + B) as u64; // one push
    let server = start(ServerConfig { staging_budget: Some(budget), ..with(Transaction::Model) });
    let (mut raw, joined) = Raw::joined(&server, "a");
    raw.push_head(1, (joined.term, joined.version), Want::Receipt, None);
    assert_eq!(raw.next().unwrap().0.kind, Kind::Grant);
    raw.fragment(1, 0, 0, &floats(FRAGMENTS[0], 1.0));
    let (mut second, _) = Raw::joined(&server, "b");
    second.push_head(1, (joined.term, joined.version), Want::Receipt, None);
    drop(raw);
    assert_eq!(second.next().unwrap().0.kind, Kind::Grant, "granted when the first has died");
    for (i, len) in FRAGMENTS.into_iter().enumerate() {
        second.fragment(1, u32::try_from(i).unwrap(), 0, &floats(len, 5.0));
    }
    assert!(second.answer().receipt().applied);
    assert!(parameters(&server).iter().all(|&p| p == -5.0));
}

#[test]
fn a_model_larger_than_the_staging_budget_is_refused_at_the_start() {
    let config = ServerConfig { staging_budget: Some(1000), ..with(Transaction::Model) };
    let refused =
        Server::with_model(config, Snapshot::of(common::table(), &values(0.0)).unwrap()).unwrap_err();
    assert!(matches!(refused, ServerError::StagingBudget { needed: 400_040, budget: 1000 }), "{refused}");
}

#[test]
fn a_sequence_that_comes_twice_is_applied_once() {
    for transaction in TRANSACTIONS {
        let server = start(with(transaction));
        let (mut raw, joined) = Raw::joined(&server, "a");
        let at = (joined.term, joined.version);
        let first = push(&mut raw, &server, 1, at, 0, 1.0);
        let again = push(&mut raw, &server, 1, at, 0, 1.0);
        assert!(!first.receipt().duplicate && again.receipt().duplicate);
        assert_eq!(again.receipt().version, first.receipt().version);
        assert_eq!(again.roots, [(1, Some(-1.0)), (1, Some(-1.0))], "with the newest parameters");
        assert_eq!(again.read, (joined.term, 1));
        assert!(parameters(&server).iter().all(|&p| p == -1.0));
    }
}

#[test]
fn a_stale_push_is_rejected_and_still_brings_the_newest_parameters() {
    for transaction in TRANSACTIONS {
        let staleness = StalenessSpec { max_staleness: Some(0), ..StalenessSpec::default() };
        let server = start(ServerConfig { staleness, ..with(transaction) });
        let (mut a, joined) = Raw::joined(&server, "a");
        let (mut b, _) = Raw::joined(&server, "b");
        let read = (joined.term, joined.version);
        push(&mut a, &server, 1, read, 0, 1.0);
        let late = push(&mut b, &server, 1, read, 0, 1.0);
        let receipt = late.receipt();
        assert_eq!((receipt.verdict, receipt.reason), (Fate::Reject, Some(Reason::Stale)));
        assert_eq!(late.roots, [(1, Some(-1.0)), (1, Some(-1.0))]);
        let next = push(&mut b, &server, 2, late.read, 1, 1.0);
        assert!(next.receipt().applied, "after it has read, it is let in: {:?}", next.receipt());
    }
}

#[test]
fn what_the_worker_has_need_not_come_again() {
    for transaction in TRANSACTIONS {
        let server = start(with(transaction));
        let (mut raw, joined) = Raw::joined(&server, "a");
        let pulled = raw.pull(joined.term, None);
        assert_eq!(pulled.roots, [(0, Some(0.0)), (0, Some(0.0))]);
        assert_eq!(raw.pull(joined.term, Some(&[0, 0])).roots, [(0, None), (0, None)]);
        assert_eq!(raw.pull(joined.term, Some(&[0, 5])).roots, [(0, None), (0, Some(0.0))]);
        assert_eq!(
            raw.pull(joined.term + 1, Some(&[0, 0])).roots,
            [(0, Some(0.0)), (0, Some(0.0))],
            "another life"
        );
        push(&mut raw, &server, 1, pulled.read, 0, 1.0);
        assert_eq!(raw.pull(joined.term, Some(&[0, 1])).roots, [(1, Some(-1.0)), (1, None)]);
    }
}

#[test]
fn an_answer_holds_the_push_it_answers_however_slowly_others_read() {
    const FRAGMENTS: u32 = 64;
    const LEN: usize = 65_536; // 16 MiB in all: more than a sender's socket and a small receiver's hold
    let large = TensorTable::new(vec![tensor("w", FRAGMENTS as usize * LEN, Role::Parameter)]).unwrap();
    let zeros = floats(FRAGMENTS as usize * LEN, 0.0);
    let server =
        Server::with_model(with(Transaction::Model), Snapshot::of(large, &[zeros]).unwrap()).unwrap();
    let (mut a, joined) = Raw::joined(&server, "a");
    let push = |a: &mut Raw, sequence: u64| {
        a.push_head(sequence, (joined.term, sequence - 1), Want::Parameters, None);
        assert_eq!(a.next().unwrap().0.kind, Kind::Grant);
        let ones = floats(LEN, 1.0);
        (0..FRAGMENTS).for_each(|i| a.fragment(sequence, i, sequence - 1, &ones));
    };
    // Reads the beginning of the newest version, and so holds it.
    let pin = |id: &str| {
        let (mut slow, _) = Raw::joined(&server, id);
        socket2::SockRef::from(&slow.stream).set_recv_buffer_size(64 << 10).unwrap();
        slow.ask_to_pull(joined.term, None);
        let (first, _) = slow.next().unwrap();
        (slow, first.version)
    };
    let (_slow, held) = pin("b");
    assert_eq!(held, 0);
    push(&mut a, 1);
    assert_eq!(a.answer().read.1, 1);
    let (slower, held) = pin("c");
    assert_eq!(held, 1);
    push(&mut a, 2);
    eventually(&server, "the second push committed", |s| {
        s["version"] == 2 && s["memory"]["live_versions"] == 3 && s["memory"]["staging_bytes"] == 0
    });
    drop(slower);
    let answer = a.answer();
    assert_eq!(answer.read, (joined.term, 2));
    assert!(answer.roots.iter().all(|&root| root == (2, Some(-2.0))), "{:?}", answer.roots);
}

#[test]
fn two_connections_that_push_at_once_lose_nothing() {
    const PUSHES: u64 = 40;
    for transaction in TRANSACTIONS {
        let server = start(with(transaction));
        std::thread::scope(|scope| {
            for id in ["a", "b", "c"] {
                let server = &server;
                scope.spawn(move || {
                    let (mut raw, joined) = Raw::joined(server, id);
                    let mut read = (joined.term, joined.version);
                    let mut base = 0;
                    for sequence in 1..=PUSHES {
                        raw.push_head(sequence, read, Want::Parameters, None);
                        if transaction == Transaction::Model {
                            assert_eq!(raw.next().unwrap().0.kind, Kind::Grant);
                        }
                        for (i, len) in FRAGMENTS.into_iter().enumerate() {
                            raw.fragment(sequence, u32::try_from(i).unwrap(), base, &floats(len, 1.0));
                        }
                        let answer = raw.answer();
                        assert!(answer.receipt().applied, "{:?}", answer.receipt());
                        read = answer.read;
                        // The two fragments may be at different versions; the older is one both have reached.
                        base = answer.roots.iter().map(|r| r.0).min().unwrap();
                    }
                    raw.call(9, &Call::Goodbye { parting: Parting::Finished });
                    raw.reply();
                });
            }
        });
        assert!(parameters(&server).iter().all(|&p| p == -3.0 * PUSHES as f32));
        let status = status(&server);
        assert_eq!(status["tickets"]["applied"], 3 * PUSHES);
        assert_eq!(status["version"], 3 * PUSHES);
    }
}

#[test]
fn a_sender_that_stops_in_mid_frame_is_cut_off_and_told_why() {
    let server = start(ServerConfig { progress_timeout: Duration::from_secs(1), ..config() });
    let (mut raw, joined) = Raw::joined(&server, "a");
    raw.push_head(1, (joined.term, joined.version), Want::Receipt, None);
    raw.write(&Header::new(Kind::Fragment).encode()[..10]).unwrap();
    let refused = raw.refused();
    assert_eq!(refused.code, RefusalCode::Timeout);
    let said = until_state(&server, "a", "lost");
    assert!(said.contains("no byte for 1 s in"), "{said}");
}

#[test]
fn a_silent_reader_that_takes_nothing_is_cut_off() {
    let short = Duration::from_millis(200);
    let server = start(ServerConfig { progress_timeout: short, lease: short, ..config() });
    let (mut raw, joined) = Raw::joined(&server, "a");
    let mut bytes = vec![];
    offbeat_core::wire::PullRequest { have: None }.encode(&mut bytes);
    let header = Header { term: joined.term, ..Header::new(Kind::Pull) };
    let mut frame = header.with_payload(&bytes).encode().to_vec();
    frame.append(&mut bytes);
    // Far more answers than both socket buffers hold, and none is read.
    for _ in 0..200 {
        if raw.write(&frame).is_err() {
            break;
        }
    }
    assert_eq!(until_state(&server, "a", "lost"), "no heartbeat for 0.2 s");
    eventually(&server, "the connection is closed", |s| s["connections"] == 0);
}

#[test]
fn a_worker_that_asks_and_does_not_read_the_reply_is_cut_off_though_it_is_heard() {
    let (short, lease) = (Duration::from_millis(200), Duration::from_secs(60));
    for transaction in TRANSACTIONS {
        let server = start(ServerConfig { progress_timeout: short, lease, ..with(transaction) });
        let (mut raw, joined) = Raw::joined(&server, "a");
        raw.pull(joined.term, None);
        let mut message = vec![];
        encode(&Call::Status, &mut message);
        let mut frame = Header::new(Kind::Call).with_payload(&message).encode().to_vec();
        frame.append(&mut message);
        // Replies without end, until the server waits for room: nothing more is taken then, or all is over.
        raw.stream.set_write_timeout(Some(short)).unwrap();
        while raw.write(&frame).is_ok() {}
        assert!(until_state(&server, "a", "lost").contains("took none of the bytes"));
    }
}

#[test]
fn a_worker_that_computes_while_an_answer_waits_for_it_is_not_cut_off() {
    const LEN: usize = 4 << 20; // 16 MiB: more than the sockets hold
    let short = Duration::from_millis(200);
    for transaction in TRANSACTIONS {
        let large = TensorTable::new(vec![tensor("w", LEN, Role::Parameter)]).unwrap();
        let snapshot = Snapshot::of(large, &[floats(LEN, 0.0)]).unwrap();
        let config = ServerConfig { progress_timeout: short, ..with(transaction) };
        let server = Server::with_model(config, snapshot).unwrap();
        let (mut raw, joined) = Raw::joined(&server, "a");
        raw.ask_to_pull(joined.term, None);
        let (_never, clock) = mpsc::channel::<()>();
        clock.recv_timeout(short * 5).ok();
        assert_eq!(raw.answer().roots.len(), LEN / 65_536);
    }
}

#[test]
fn the_run_ends_by_its_samples() {
    for transaction in TRANSACTIONS {
        let server = start(ServerConfig { max_samples: Some(2), ..with(transaction) });
        let (mut raw, joined) = Raw::joined(&server, "a");
        let mut control = Raw::attached(&server, &joined);
        let first = push(&mut raw, &server, 1, (joined.term, joined.version), 0, 1.0);
        let second = push(&mut raw, &server, 2, first.read, 1, 1.0);
        assert!(second.receipt().applied);
        assert_eq!(control.event(), Event::Finished { reason: FINISHED_BUDGET.into() });
        let third = push(&mut raw, &server, 3, second.read, 2, 1.0);
        assert_eq!(third.receipt().reason, Some(Reason::Budget));
        assert_eq!(third.roots, [(2, Some(-2.0)), (2, Some(-2.0))]);
        assert_eq!(status(&server)["state"], "finished");
        raw.call(4, &Call::Goodbye { parting: Parting::Finished });
        raw.reply();
        assert!(
            server.wait_for_workers(1, Some(common::DEADLINE), NEVER).unwrap(),
            "at once: nobody can come back"
        );
    }
}

#[test]
fn values_that_are_loaded_reject_what_was_computed_before_them() {
    for transaction in TRANSACTIONS {
        let server = start(with(transaction));
        let (mut raw, joined) = Raw::joined(&server, "a");
        let mut control = Raw::attached(&server, &joined);
        server.load_tensors(&values(7.0)).unwrap();
        assert_eq!(control.event(), Event::Term { term: joined.term + 1 });
        let late = push(&mut raw, &server, 1, (joined.term, joined.version), 0, 1.0);
        assert_eq!(late.receipt().reason, Some(Reason::ServerRolledBack));
        assert_eq!(late.roots.iter().map(|r| r.1).collect::<Vec<_>>(), [Some(7.0), Some(7.0)]);
        assert_eq!(late.read.0, joined.term + 1);
        let base = late.roots[0].0;
        assert!(push(&mut raw, &server, 2, late.read, base, 1.0).receipt().applied);
        assert!(parameters(&server).iter().all(|&p| p == 6.0));
        let wrong = server.load_tensors(&values(0.0)[..1]).unwrap_err();
        assert!(matches!(wrong, ServerError::NumTensors { expected: 2, found: 1 }));
    }
}

#[test]
fn a_copy_of_the_model_holds_each_push_whole_or_not_at_all() {
    let server = start(ServerConfig { cut_deadline: common::DEADLINE, ..config() });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut raw, joined) = Raw::joined(&server, "a");
            let mut read = (joined.term, joined.version);
            for sequence in 1..=100 {
                read = raw.push(sequence, read, sequence - 1, 1.0, Want::Parameters).read;
            }
            raw.call(9, &Call::Goodbye { parting: Parting::Finished });
            raw.reply();
        });
        while status(&server)["version"] != 100 {
            let now = parameters(&server);
            assert!(now.iter().all(|p| *p == now[0]), "{} and {}", now[0], now[now.len() - 1]);
        }
    });
}

/// Values of a tensor that, when they are read for the `nth` time, let something else happen first.
struct Slow<'a> {
    bytes: Vec<u8>,
    reads: AtomicUsize,
    first: Option<&'a (dyn Fn() + Sync)>,
}

impl AsRef<[u8]> for Slow<'_> {
    fn as_ref(&self) -> &[u8] {
        // The first time they are only counted, the second time they are loaded.
        if self.reads.fetch_add(1, Ordering::Relaxed) == 1
            && let Some(first) = self.first
        {
            first();
        }
        &self.bytes
    }
}

/// Loads `value` everywhere; in the midst of it, with the first fragment loaded, `meanwhile` happens.
fn load_slowly(server: &Server, value: f32, meanwhile: &(dyn Fn() + Sync)) {
    let mut firsts = [None, Some(meanwhile)].into_iter();
    let tensors: Vec<Slow<'_>> = values(value)
        .into_iter()
        .map(|bytes| Slow { bytes, reads: AtomicUsize::new(0), first: firsts.next().flatten() })
        .collect();
    server.load_tensors(&tensors).unwrap();
}

#[test]
fn what_is_read_while_values_are_loaded_does_not_pass_for_the_new_ones() {
    for transaction in TRANSACTIONS {
        for by_push in [false, true] {
            let server = start(with(transaction));
            let (mut raw, joined) = Raw::joined(&server, "a");
            let first = push(&mut raw, &server, 1, (joined.term, joined.version), 0, 1.0);
            let (raw, read) = (Mutex::new(raw), Mutex::new(None));
            load_slowly(&server, 7.0, &|| {
                let mut raw = raw.lock().unwrap();
                let answer = if by_push {
                    push(&mut raw, &server, 2, first.read, 1, 1.0)
                } else {
                    raw.pull(joined.term, None)
                };
                assert!(answer.roots.iter().any(|r| r.1 != Some(7.0)), "not all is loaded: {answer:?}");
                *read.lock().unwrap() = Some(answer);
            });
            let (mut raw, read) = (raw.into_inner().unwrap(), read.into_inner().unwrap().unwrap());
            assert_eq!(read.read.0, joined.term, "{transaction:?}");
            let late = push(&mut raw, &server, 2 + u64::from(by_push), read.read, 1, 1.0);
            assert_eq!(late.receipt().reason, Some(Reason::ServerRolledBack));
            assert!(parameters(&server).iter().all(|&p| p == 7.0));
        }
    }
}

/// Starts something and waits for its end, a moment: it may have to wait for us.
fn start_and_wait_a_moment(work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let (tell, hear) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        tell.send(()).ok();
    });
    hear.recv_timeout(Duration::from_millis(300)).ok();
    thread
}

#[test]
fn two_loads_and_a_copy_at_once_are_each_whole() {
    for transaction in TRANSACTIONS {
        let server = Arc::new(start(with(transaction)));
        let threads = Mutex::new(Vec::new());
        load_slowly(&server, 7.0, &|| {
            let copied = Arc::clone(&server);
            let copy = start_and_wait_a_moment(move || {
                let now = parameters(&copied);
                assert!(now.iter().all(|p| *p == now[0]), "{} and {}", now[0], now[W]);
            });
            let loaded = Arc::clone(&server);
            let load = start_and_wait_a_moment(move || loaded.load_tensors(&values(9.0)).unwrap());
            threads.lock().unwrap().extend([copy, load]);
        });
        for thread in threads.into_inner().unwrap() {
            thread.join().unwrap();
        }
        let now = parameters(&server);
        assert!(now.iter().all(|p| *p == now[0] && [7.0, 9.0].contains(p)), "{} and {}", now[0], now[W]);
        let (mut raw, joined) = Raw::joined(&server, "a");
        let pulled = raw.pull(joined.term, None);
        let base = pulled.roots[0].0;
        let receipt = push(&mut raw, &server, 1, pulled.read, base, 1.0);
        assert!(receipt.receipt().applied, "no fragment is left behind: {:?}", receipt.receipt());
        let after = parameters(&server);
        assert!(after.iter().all(|p| *p == now[0] - 1.0));
    }
}

#[test]
fn a_sender_that_stops_after_a_copy_has_held_it_back_is_cut_off() {
    let timeout = Duration::from_millis(1500);
    let server = Arc::new(start(ServerConfig { progress_timeout: timeout, ..config() }));
    let (mut open, joined) = Raw::joined(&server, "open");
    let read = (joined.term, joined.version);
    let (mut c, _) = Raw::joined(&server, "c");
    let (mut b, _) = Raw::joined(&server, "b");
    open.push_head(1, read, Want::Receipt, None); // a ticket that the copy waits for
    let status = eventually(&server, "the ticket is open", |s| s["tickets"]["open"] == 1);
    assert_eq!(status["version"], 1);
    let copied = Arc::clone(&server);
    let copy = std::thread::spawn(move || parameters(&copied));
    // Pushes are answered at once until the copy has begun.
    c.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    for sequence in 1.. {
        c.push_head(sequence, read, Want::Receipt, None);
        for (i, len) in FRAGMENTS.into_iter().enumerate() {
            c.fragment(sequence, u32::try_from(i).unwrap(), 0, &floats(len, 1.0));
        }
        if c.stream.peek(&mut [0]).is_err() {
            break;
        }
        assert!(!copy.is_finished(), "the copy did not wait for the open ticket");
        c.answer();
    }
    b.push_head(1, read, Want::Receipt, None);
    b.fragment(1, 0, 0, &floats(FRAGMENTS[0], 1.0));
    copy.join().unwrap();
    assert!(until_state(&server, "b", "lost").contains("no byte for 1.5 s"));
}

#[test]
fn a_number_of_samples_that_is_none_ends_its_connection_and_not_the_run() {
    let server = start(ServerConfig { max_samples: Some(1000), ..config() });
    let (mut raw, _) = Raw::joined(&server, "a");
    let mut head = vec![1, 0, 0, 0];
    head.extend_from_slice(&raw.epoch.to_le_bytes());
    head.extend_from_slice(&(1_u64 << 63).to_le_bytes());
    raw.frame(Header { sequence: 1, term: 1, ..Header::new(Kind::Push) }, &head);
    assert_eq!(raw.refused().code, RefusalCode::Malformed);
    let status = status(&server);
    assert_eq!((&status["samples"], &status["state"]), (&0.into(), &"running".into()));

    let mut client = client(&server, "b");
    let (mut gradients, mut out) = (values(1.0), values(0.0));
    client.pull(&out.iter_mut().map(|o| Memory::of(o)).collect::<Vec<_>>(), false, &NEVER).unwrap();
    let gradients: Vec<_> = gradients.iter_mut().map(|g| Some(Memory::of(g))).collect();
    let refused = client.push(PushInput { values: &gradients, samples: 1 << 63 }, &NEVER).unwrap_err();
    assert!(refused.to_string().contains("samples is 9223372036854775808"), "{refused}");
    assert!(client.push(PushInput { values: &gradients, samples: 1 }, &NEVER).unwrap().applied);
}
