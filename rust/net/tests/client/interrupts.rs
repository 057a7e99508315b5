//! Ctrl-C in the middle of a call, and what the server may do in its worst moments.

use crate::script::{Peer, attach, join, joined, rejoin, run, serve, serve_again};
use crate::support::{
    DEADLINE, bytes_of, client_config, filled, floats, memories, never, parameter, table, tensor,
};
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::Layout;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::{Contribution, Transaction};
use offbeat_core::store::{Fate, Receipt};
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::message::{
    Attach, Call, Join, Joined, ModelInfo, Parting, RefusalCode, Refused, Reply,
};
use offbeat_core::wire::{Header, Kind, PullRequest, PushRequest, encode, flags};
use offbeat_net::client::{Client, ClientConfig, ClientError, Interrupt, Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// Larger than what both socket buffers hold, so that a call cannot leave the rest to the kernel.
const LARGE: usize = 6_000_000;

/// Ctrl-C, pressed by the other side of the script.
#[derive(Clone, Default)]
struct Key(Arc<AtomicBool>);

impl Key {
    fn press(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Interrupt for Key {
    fn interrupted(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}

fn root(peer: &mut Peer, request: u32, fragment: usize, version: u64, payload: &[u8]) {
    let fragment = u32::try_from(fragment).unwrap();
    peer.frame(Header { request, fragment, version, term: 1, ..Header::new(Kind::Root) }, payload);
}

/// The first fragment is as the client has it.
fn unchanged(peer: &mut Peer, request: u32, version: u64, term: u64) {
    let header = Header { request, version, term, flags: flags::UNCHANGED, ..Header::new(Kind::Root) };
    peer.frame(header, &[]);
}

/// All roots with one value, from `first` on.
fn roots(peer: &mut Peer, layout: &Layout, request: u32, first: usize, version: u64, value: f32) {
    for (f, fragment) in layout.fragments.iter().enumerate().skip(first) {
        root(peer, request, f, version, &bytes_of(&vec![value; fragment.len]));
    }
}

fn pull_end(peer: &mut Peer, request: u32, version: u64) {
    peer.frame(Header { request, version, term: 1, ..Header::new(Kind::PullEnd) }, &[]);
}

fn receipt(version: u64) -> Receipt {
    Receipt {
        term: 1,
        version,
        staleness: 0,
        weight: 1.0,
        verdict: Fate::Admit,
        applied: true,
        duplicate: false,
        reason: None,
        detail: String::new(),
    }
}

fn settle(peer: &mut Peer, request: u32, version: u64) {
    let mut bytes = vec![];
    encode(&receipt(version), &mut bytes);
    peer.frame(Header { request, version, term: 1, ..Header::new(Kind::Receipt) }, &bytes);
}

/// Takes a whole push; the header of its head, and the payloads.
fn push(peer: &mut Peer, layout: &Layout) -> (Header, Vec<Vec<u8>>) {
    let (head, _) = peer.next(Kind::Push);
    let fragments = layout.fragments.iter().map(|_| peer.next(Kind::Fragment).1).collect();
    (head, fragments)
}

fn pull(
    client: &mut Client,
    params: &mut [Vec<u8>],
    incremental: bool,
    key: &dyn Interrupt,
) -> Result<u64, ClientError> {
    let out: Vec<Memory<'_>> = params.iter_mut().map(|p| Memory::of(p)).collect();
    client.pull(&out, incremental, key).map(|p| p.version)
}

fn push_pull(
    client: &mut Client,
    gradient: &mut [Option<Vec<u8>>],
    params: &mut [Vec<u8>],
    key: &dyn Interrupt,
) -> Result<Option<Receipt>, ClientError> {
    let out: Vec<Memory<'_>> = params.iter_mut().map(|p| Memory::of(p)).collect();
    client.push_pull(PushInput { values: &memories(gradient), samples: 1 }, &out, true, key)
}

fn waits() -> (Sender<()>, Receiver<()>) {
    mpsc::channel()
}

fn large() -> (TensorTable, Layout) {
    let table = table(vec![parameter("w", LARGE)]);
    let layout = Layout::of(&table);
    (table, layout)
}

#[test]
fn a_pull_can_be_interrupted_and_the_client_goes_on() {
    let (table, layout) = large();
    let key = Key::default();
    let (on, go_on) = waits();
    let (address, server) = serve(table.clone(), run(Transaction::Fragment), {
        let (layout, key) = (layout.clone(), key.clone());
        move |peer, _| {
            let (first, _) = peer.next(Kind::Pull);
            roots(peer, &layout, first.request, 0, 3, 1.0);
            pull_end(peer, first.request, 3);

            // In the middle of a root: the second one stops after 1000 bytes.
            let (second, _) = peer.next(Kind::Pull);
            root(peer, second.request, 0, 4, &bytes_of(&vec![2.0; layout.fragments[0].len]));
            let payload = bytes_of(&vec![2.0; layout.fragments[1].len]);
            let header = Header {
                request: second.request,
                fragment: 1,
                version: 4,
                term: 1,
                ..Header::new(Kind::Root)
            };
            peer.write(&header.with_payload(&payload).encode());
            peer.write(&payload[..1000]);
            key.press();
            go_on.recv().unwrap();
            peer.write(&payload[1000..]);
            roots(peer, &layout, second.request, 2, 4, 2.0);
            pull_end(peer, second.request, 4);

            // What was torn must not be answered by "unchanged".
            let (third, bytes) = peer.next(Kind::Pull);
            assert_eq!((third.version, third.term), (3, 1), "the read that was broken off does not count");
            assert_eq!(PullRequest::decode(&bytes).unwrap().have, None);
            roots(peer, &layout, third.request, 0, 5, 3.0);
            pull_end(peer, third.request, 5);
            let (fourth, bytes) = peer.next(Kind::Pull);
            assert!(PullRequest::decode(&bytes).unwrap().have.is_some());
            for f in 0..layout.fragments.len() {
                let header = Header {
                    request: fourth.request,
                    fragment: f as u32,
                    version: 5,
                    term: 1,
                    ..Header::new(Kind::Root)
                };
                peer.frame(Header { flags: flags::UNCHANGED, ..header }, &[]);
            }
            pull_end(peer, fourth.request, 5);
            peer.goodbye();
        }
    });
    let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
    let mut params = filled(&table, 0);
    assert_eq!(pull(&mut client, &mut params, false, &key), Ok(3));
    let begun = Instant::now();
    assert_eq!(pull(&mut client, &mut params, true, &key), Err(ClientError::Interrupted));
    assert!(begun.elapsed() < Duration::from_secs(5));
    params[0].fill(9); // nobody writes it any more
    on.send(()).unwrap();
    assert_eq!(client.flush(None, &never), Ok(vec![]), "no push was in flight");
    assert!(params[0].iter().all(|&b| b == 9));
    assert_eq!(pull(&mut client, &mut params, true, &never), Ok(5));
    assert!(floats(&params[0]).iter().all(|&p| p == 3.0));
    assert_eq!(pull(&mut client, &mut params, true, &never), Ok(5));
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

#[test]
fn a_push_can_be_interrupted_and_arrives_whole() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let (table, layout) = large();
        let key = Key::default();
        let (on, go_on) = waits();
        let (address, server) = serve(table.clone(), run(transaction), {
            let (layout, key) = (layout.clone(), key.clone());
            move |peer, _| {
                let grant = |peer: &mut Peer, request| {
                    if transaction == Transaction::Model {
                        peer.frame(Header { request, ..Header::new(Kind::Grant) }, &[]);
                    }
                };
                let (first, _) = peer.next(Kind::Pull);
                roots(peer, &layout, first.request, 0, 0, 0.0);
                pull_end(peer, first.request, 0);
                // Takes the head and nothing more until the caller has gone.
                let (head, _) = peer.next(Kind::Push);
                assert_eq!(head.sequence, 1);
                key.press();
                go_on.recv().unwrap();
                grant(peer, head.request);
                for fragment in &layout.fragments {
                    let (header, payload) = peer.next(Kind::Fragment);
                    assert_eq!((header.sequence, payload), (1, bytes_of(&vec![1.5; fragment.len])));
                }
                roots(peer, &layout, head.request, 0, 1, -1.0);
                settle(peer, head.request, 1);
                // The next push is the second, based on what was read before.
                let (head, bytes) = peer.next(Kind::Push);
                assert_eq!((head.sequence, head.version), (2, 0));
                assert!(PushRequest::decode(&bytes).unwrap().have.is_some(), "nothing was torn");
                grant(peer, head.request);
                for _ in &layout.fragments {
                    peer.next(Kind::Fragment);
                }
                roots(peer, &layout, head.request, 0, 2, -2.0);
                settle(peer, head.request, 2);
                peer.goodbye();
            }
        });
        let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
        let mut params = filled(&table, 0);
        pull(&mut client, &mut params, false, &never).unwrap();
        let mut gradient = vec![Some(bytes_of(&vec![1.5; LARGE]))];
        assert_eq!(push_pull(&mut client, &mut gradient, &mut params, &key), Err(ClientError::Interrupted));
        gradient[0].as_mut().unwrap().fill(0); // the memory is the caller's again
        on.send(()).unwrap();
        let second = push_pull(&mut client, &mut gradient, &mut params, &never).unwrap();
        assert_eq!(second, Some(receipt(2)));
        assert!(floats(&params[0]).iter().all(|&p| p == -2.0));
        assert_eq!(client.flush(None, &never), Ok(vec![receipt(1)]), "the interrupted push was applied");
        client.unclaim(&[receipt(1), receipt(2)]).unwrap();
        assert_eq!(
            client.flush(None, &never),
            Ok(vec![receipt(1), receipt(2)]),
            "what did not reach the caller"
        );
        client.close(Parting::Finished, &never).unwrap();
        server.join().unwrap();
    }
}

#[test]
fn answers_are_read_while_a_push_is_sent() {
    // The server sends the whole answer before it takes the second half of the push: with full buffers on both sides
    // only a client that does both at once gets through. With two in flight the answer is early and waits.
    let (table, layout) = large();
    for in_flight in [1, 2] {
        let (address, server) = serve(table.clone(), run(Transaction::Fragment), {
            let layout = layout.clone();
            move |peer, _| {
                let (first, _) = peer.next(Kind::Pull);
                roots(peer, &layout, first.request, 0, 0, 0.0);
                pull_end(peer, first.request, 0);
                for sequence in 1..=3 {
                    let (head, _) = peer.next(Kind::Push);
                    assert_eq!((head.sequence, head.version), (sequence, sequence - in_flight.min(sequence)));
                    let half = layout.fragments.len() / 2;
                    for _ in 0..half {
                        peer.next(Kind::Fragment);
                    }
                    for (f, fragment) in layout.fragments.iter().enumerate().take(half) {
                        root(
                            peer,
                            head.request,
                            f,
                            sequence,
                            &bytes_of(&vec![-(sequence as f32); fragment.len]),
                        );
                    }
                    for _ in half..layout.fragments.len() {
                        peer.next(Kind::Fragment);
                    }
                    roots(peer, &layout, head.request, half, sequence, -(sequence as f32));
                    settle(peer, head.request, sequence);
                }
                peer.goodbye();
            }
        });
        let mut client = Client::connect(client_config(address, in_flight as usize), None, &never).unwrap();
        let mut params = filled(&table, 0);
        pull(&mut client, &mut params, false, &never).unwrap();
        let mut gradient = vec![Some(bytes_of(&vec![1.0; LARGE]))];
        for step in 1..=3_u64 {
            let got = push_pull(&mut client, &mut gradient, &mut params, &never).unwrap();
            let read = step + 1 - in_flight;
            assert_eq!(got, (read > 0).then(|| receipt(read)));
            assert!(floats(&params[0]).iter().all(|&p| p == -(read as f32)));
        }
        client.close(Parting::Finished, &never).unwrap();
        server.join().unwrap();
    }
}

#[test]
fn a_push_that_is_rejected_by_its_head_sends_no_more() {
    let (table, layout) = large();
    let (address, server) = serve(table.clone(), run(Transaction::Model), {
        let layout = layout.clone();
        move |peer, _| {
            let (first, _) = peer.next(Kind::Pull);
            roots(peer, &layout, first.request, 0, 0, 0.0);
            pull_end(peer, first.request, 0);
            let (head, _) = peer.next(Kind::Push);
            roots(peer, &layout, head.request, 0, 0, 0.0);
            let mut bytes = vec![];
            encode(&Receipt { applied: false, verdict: Fate::Reject, ..receipt(0) }, &mut bytes);
            peer.frame(Header { request: head.request, term: 1, ..Header::new(Kind::Receipt) }, &bytes);
            peer.goodbye();
        }
    });
    let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
    let mut params = filled(&table, 0);
    pull(&mut client, &mut params, false, &never).unwrap();
    let mut gradient = vec![Some(bytes_of(&vec![1.0; LARGE]))];
    assert!(!push_pull(&mut client, &mut gradient, &mut params, &never).unwrap().unwrap().applied);
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

#[test]
fn a_reason_of_a_newer_server_is_unknown_and_the_session_goes_on() {
    let table = table(vec![parameter("w", 10)]);
    let layout = Layout::of(&table);
    let (address, server) = serve(table.clone(), run(Transaction::Fragment), move |peer, _| {
        let (first, _) = peer.next(Kind::Pull);
        roots(peer, &layout, first.request, 0, 0, 0.0);
        pull_end(peer, first.request, 0);
        let (head, _) = push(peer, &layout);
        let newer = Receipt { applied: false, verdict: Fate::Reject, detail: "why".into(), ..receipt(0) };
        let mut newer = serde_json::to_value(newer).unwrap();
        newer["reason"] = "of_tomorrow".into();
        peer.send(Kind::Receipt, head.request, &newer);
        let (head, _) = push(peer, &layout);
        settle(peer, head.request, 1);
        peer.goodbye();
    });
    let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
    pull(&mut client, &mut filled(&table, 0), false, &never).unwrap();
    let mut gradient = vec![Some(bytes_of(&[1.0; 10]))];
    let mut push = || client.push(PushInput { values: &memories(&mut gradient), samples: 1 }, &never);
    let rejected = push().unwrap();
    assert_eq!((rejected.reason, rejected.detail.as_str()), (Some(Reason::Unknown), "why"));
    assert!(push().unwrap().applied);
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

/// What must be in the error, and a frame that brings it about.
type Bad = (&'static str, fn(&mut Peer, u32));

#[test]
fn what_a_server_may_not_send_ends_the_session() {
    let table = table(vec![parameter("w", 10), tensor("count", 1, Dtype::I64, Role::Buffer)]);
    let cases: [Bad; 12] = [
        ("fits no model", |peer, request| {
            root(peer, request, 2, 1, &[0; 40]);
        }),
        ("fits no model", |peer, request| {
            root(peer, request, 0, 1, &[0; 36]);
        }),
        ("fits no model", |peer, request| {
            peer.frame(Header { request, flags: flags::UNCHANGED, ..Header::new(Kind::Root) }, &[0; 40]);
        }),
        ("came unasked", |peer, request| {
            root(peer, request + 1, 0, 1, &[0; 40]);
        }),
        ("waits for 2 roots", |peer, request| pull_end(peer, request, 1)),
        ("came unasked", |peer, request| settle(peer, request + 1, 1)),
        ("damaged", |peer, request| {
            let header = Header { request, term: 1, ..Header::new(Kind::Root) }.with_payload(&[0; 40]);
            peer.write(&Header { payload_checksum: header.payload_checksum ^ 1, ..header }.encode());
            peer.write(&[0; 40]);
        }),
        ("was never read", |peer, request| unchanged(peer, request, 0, 0)),
        ("where that of fragment 0 was due", |peer, request| root(peer, request, 1, 1, &[0; 8])),
        ("where that of fragment 1 was due", |peer, request| {
            root(peer, request, 0, 1, &[0; 40]);
            root(peer, request, 0, 1, &[0; 40]);
        }),
        ("where none was due", |peer, request| {
            root(peer, request, 0, 1, &[0; 40]);
            root(peer, request, 1, 1, &[0; 8]);
            root(peer, request, 1, 1, &[0; 8]);
        }),
        ("Reply ends a request", |peer, request| {
            root(peer, request, 0, 1, &[0; 40]);
            root(peer, request, 1, 1, &[0; 8]);
            peer.send(Kind::Reply, request, &Reply::Goodbye);
        }),
    ];
    for (says, bad) in cases {
        let (address, server) = serve(table.clone(), run(Transaction::Fragment), move |peer, _| {
            let (first, _) = peer.next(Kind::Pull);
            bad(peer, first.request);
        });
        let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
        let mut params = filled(&table, 0);
        let error = pull(&mut client, &mut params, false, &never).unwrap_err();
        assert!(
            matches!(&error, ClientError::Protocol { cause, .. } if cause.contains(says)),
            "{says}: {error}"
        );
        assert_eq!(pull(&mut client, &mut params, false, &never), Err(error));
        server.join().unwrap();
    }
}

#[test]
fn what_follows_a_receipt_is_refused_before_a_byte_of_it_is_written() {
    // The push is still leaving, so that the call goes on; its memory must not be that of a root that nobody waits for.
    let (table, layout) = large();
    let (tell_refused, refused) = waits();
    let (address, server) = serve(table.clone(), run(Transaction::Fragment), move |peer, _| {
        let (first, _) = peer.next(Kind::Pull);
        roots(peer, &layout, first.request, 0, 0, 0.0);
        pull_end(peer, first.request, 0);
        let (head, _) = peer.next(Kind::Push);
        roots(peer, &layout, head.request, 0, 1, -1.0);
        settle(peer, head.request, 1);
        let more = bytes_of(&vec![7.0; layout.fragments[0].len]);
        let header = Header { request: head.request, version: 2, term: 1, ..Header::new(Kind::Root) };
        peer.write(&header.with_payload(&more).encode());
        peer.write(&more[..more.len() / 2]);
        if refused.recv_timeout(Duration::from_secs(10)).is_err() {
            for _ in &layout.fragments {
                peer.next(Kind::Fragment); // so that a client that took it ends the call and not the test
            }
        }
    });
    let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
    let mut params = filled(&table, 0);
    pull(&mut client, &mut params, false, &never).unwrap();
    let mut gradient = vec![Some(bytes_of(&vec![1.0; LARGE]))];
    let error = push_pull(&mut client, &mut gradient, &mut params, &never).unwrap_err();
    tell_refused.send(()).unwrap();
    assert!(
        matches!(&error, ClientError::Protocol { cause, .. } if cause.contains("came unasked")),
        "{error}"
    );
    assert!(floats(&params[0]).iter().all(|&p| p == -1.0));
    assert_eq!(client.status(&never), Err(error));
    server.join().unwrap();
}

#[test]
fn a_call_ends_with_a_reply_and_nothing_else() {
    let table = table(vec![parameter("w", 10)]);
    let cases: [Bad; 3] = [
        ("PullEnd ends a request", |peer, request| pull_end(peer, request, 1)),
        ("Receipt ends a request", |peer, request| settle(peer, request, 1)),
        ("where none was due", |peer, request| root(peer, request, 0, 1, &[0; 40])),
    ];
    for (says, bad) in cases {
        let (address, server) = serve(table.clone(), run(Transaction::Fragment), move |peer, _| {
            let (call, _) = peer.next(Kind::Call);
            bad(peer, call.request);
        });
        let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
        let error = client.status(&never).unwrap_err();
        assert!(error.to_string().contains(says), "{says}: {error}");
        assert_eq!(client.status(&never), Err(error));
        server.join().unwrap();
    }
}

#[test]
fn only_what_was_read_under_the_same_term_is_unchanged() {
    let table = table(vec![parameter("w", 10)]);
    for (incremental, term, fits) in [(true, 1, true), (true, 2, false), (false, 1, false)] {
        let (address, server) = serve(table.clone(), run(Transaction::Fragment), move |peer, _| {
            let (first, _) = peer.next(Kind::Pull);
            root(peer, first.request, 0, 3, &[7; 40]);
            pull_end(peer, first.request, 3);
            let (second, _) = peer.next(Kind::Pull);
            unchanged(peer, second.request, 3, term);
            if fits {
                pull_end(peer, second.request, 3);
                peer.goodbye();
            }
        });
        let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
        let mut params = filled(&table, 0);
        pull(&mut client, &mut params, false, &never).unwrap();
        let second = pull(&mut client, &mut params, incremental, &never);
        match &second {
            Ok(3) => assert!(fits),
            Err(ClientError::Protocol { cause, .. }) => assert!(!fits && cause.contains("was never read")),
            other => panic!("{incremental} {term}: {other:?}"),
        }
        client.close(Parting::Finished, &never).unwrap();
        server.join().unwrap();
    }
}

#[test]
fn what_was_brought_was_read_unless_other_values_were_loaded_since() {
    let table = table(vec![parameter("w", 10)]);
    for (term, ready) in [(1, true), (2, false)] {
        let (address, server) = serve(table.clone(), run(Transaction::Fragment), {
            let table = table.clone();
            move |peer, _| {
                let (begin, _) = peer.next(Kind::Call);
                peer.send(Kind::Reply, begin.request, &Reply::Init { taken: true });
                peer.next(Kind::Value);
                let (commit, _) = peer.next(Kind::Call);
                peer.send(Kind::Reply, commit.request, &Reply::Init { taken: true });
                let (wait, _) = peer.next(Kind::Call);
                let model = ModelInfo { table, blueprint: None };
                let reply = Reply::Model { model, run: run(Transaction::Fragment), term, version: 0 };
                peer.send(Kind::Reply, wait.request, &reply);
                if ready {
                    let (head, _) = peer.next(Kind::Push);
                    assert_eq!((head.term, head.version), (1, 0));
                    peer.next(Kind::Fragment);
                    settle(peer, head.request, 1);
                }
                peer.goodbye();
            }
        });
        let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
        assert_eq!(client.init(&table, &[&[0; 40]], None, &never), Ok(true));
        let mut gradient = [Some(bytes_of(&[1.0; 10]))];
        let pushed = client.push(PushInput { values: &memories(&mut gradient), samples: 1 }, &never);
        match pushed {
            Ok(_) => assert!(ready),
            Err(error) => assert!(!ready && error.to_string().contains("pull before"), "{error}"),
        }
        client.close(Parting::Finished, &never).unwrap();
        server.join().unwrap();
    }
}

#[test]
fn a_model_that_was_read_does_not_become_another() {
    let table = table(vec![parameter("w", 10)]);
    let (address, server) = serve(table.clone(), run(Transaction::Fragment), |peer, _| {
        let (first, _) = peer.next(Kind::Pull);
        root(peer, first.request, 0, 3, &[7; 40]);
        pull_end(peer, first.request, 3);
        let (call, _) = peer.next(Kind::Call);
        let model = ModelInfo { table: crate::support::table(vec![parameter("w", 9)]), blueprint: None };
        let reply = Reply::Model { model, run: run(Transaction::Fragment), term: 1, version: 3 };
        peer.send(Kind::Reply, call.request, &reply);
    });
    let mut client = Client::connect(client_config(address, 1), None, &never).unwrap();
    let mut params = filled(&table, 0);
    pull(&mut client, &mut params, false, &never).unwrap();
    let error = client.wait_for_model(&never).unwrap_err();
    assert!(matches!(error, ClientError::Protocol { .. }), "{error}");
    server.join().unwrap();
}

#[test]
fn buffers_that_come_early_wait_until_their_own_are_sent() {
    // Two in flight, one memory for what is sent and what comes: the answer to the push before is already here.
    let table = table(vec![parameter("w", LARGE), tensor("count", 1, Dtype::I64, Role::Buffer)]);
    let layout = Layout::of(&table);
    let last = layout.fragments.len() - 1;
    let (address, server) = serve(table.clone(), run(Transaction::Fragment), {
        let layout = layout.clone();
        move |peer, _| {
            let answer = |peer: &mut Peer, request, version, count: i64| {
                for (f, fragment) in layout.fragments.iter().enumerate().take(last) {
                    root(peer, request, f, version, &bytes_of(&vec![0.0; fragment.len]));
                }
                root(peer, request, last, version, &count.to_le_bytes());
            };
            let (first, _) = peer.next(Kind::Pull);
            answer(peer, first.request, 0, 100);
            pull_end(peer, first.request, 0);
            let (head, sent) = push(peer, &layout);
            assert_eq!(sent[last], [101_i64.to_le_bytes(), 100_i64.to_le_bytes()].concat());
            let (next, _) = peer.next(Kind::Push);
            answer(peer, head.request, 1, 500); // before the second push's buffers are taken
            settle(peer, head.request, 1);
            let sent: Vec<Vec<u8>> = layout.fragments.iter().map(|_| peer.next(Kind::Fragment).1).collect();
            let change = [102_i64.to_le_bytes(), 101_i64.to_le_bytes()].concat();
            assert_eq!(sent[last], change, "since the push before, and not 500");
            answer(peer, next.request, 2, 502);
            settle(peer, next.request, 2);
            peer.goodbye();
        }
    });
    let mut client = Client::connect(client_config(address, 2), None, &never).unwrap();
    let mut params = filled(&table, 0);
    pull(&mut client, &mut params, false, &never).unwrap();
    let gradient = bytes_of(&vec![1.0; LARGE]);
    for (step, count) in [(1, 101_i64), (2, 102)] {
        params[1] = count.to_le_bytes().to_vec();
        let mut values = vec![Some(gradient.clone()), None];
        let (w, buffer) = params.split_at_mut(1);
        #[expect(unsafe_code, reason = "only so can the same memory be sent and written")]
        // SAFETY: `params` outlives these, and nobody else touches it.
        let mut twice = || unsafe { Memory::from_raw(buffer[0].as_mut_ptr(), 8) };
        let (sent, out) = (twice(), twice());
        let mut sent_values = memories(&mut values);
        sent_values[1] = Some(sent);
        let out = [Memory::of(&mut w[0]), out];
        let got =
            client.push_pull(PushInput { values: &sent_values, samples: 1 }, &out, true, &never).unwrap();
        assert_eq!(got.is_some(), step == 2);
    }
    assert_eq!(params[1], 500_i64.to_le_bytes());
    let out: Vec<Memory<'_>> = params.iter_mut().map(|p| Memory::of(p)).collect();
    assert_eq!(client.flush(Some(&out), &never).unwrap().len(), 1);
    assert_eq!(params[1], 502_i64.to_le_bytes());
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

#[test]
fn a_gradient_in_the_memory_of_the_parameters_is_sent_before_they_come() {
    // Two in flight, and the gradient of w²/2, which is w: the answer to the push before comes first.
    let (table, layout) = large();
    let (address, server) = serve(table.clone(), run(Transaction::Fragment), {
        let layout = layout.clone();
        move |peer, _| {
            let (first, _) = peer.next(Kind::Pull);
            roots(peer, &layout, first.request, 0, 0, 1.0);
            pull_end(peer, first.request, 0);
            let (head, _) = push(peer, &layout);
            let (next, _) = peer.next(Kind::Push);
            roots(peer, &layout, head.request, 0, 1, 2.0);
            settle(peer, head.request, 1);
            for fragment in &layout.fragments {
                let (_, payload) = peer.next(Kind::Fragment);
                assert!(payload == bytes_of(&vec![1.0; fragment.len]), "what it was at the call");
            }
            roots(peer, &layout, next.request, 0, 2, 3.0);
            settle(peer, next.request, 2);
            peer.goodbye();
        }
    });
    let mut client = Client::connect(client_config(address, 2), None, &never).unwrap();
    let mut params = filled(&table, 0);
    pull(&mut client, &mut params, false, &never).unwrap();
    for step in 1..=2 {
        let start = params[0].as_mut_ptr();
        #[expect(unsafe_code, reason = "only so can the same memory be sent and written")]
        // SAFETY: `params` outlives these, and nobody else touches it.
        let twice = || unsafe { Memory::from_raw(start, LARGE * 4) };
        let (sent, out) = ([Some(twice())], [twice()]);
        let got = client.push_pull(PushInput { values: &sent, samples: 1 }, &out, true, &never).unwrap();
        assert_eq!(got.is_some(), step == 2);
    }
    assert!(floats(&params[0]).iter().all(|&p| p == 2.0));
    let out: Vec<Memory<'_>> = params.iter_mut().map(|p| Memory::of(p)).collect();
    assert_eq!(client.flush(Some(&out), &never).unwrap().len(), 1);
    assert!(floats(&params[0]).iter().all(|&p| p == 3.0));
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

/// A small model, and a client that waits for its server.
fn small() -> (TensorTable, Layout) {
    let table = table(vec![parameter("w", 8)]);
    let layout = Layout::of(&table);
    (table, layout)
}

fn patient(address: SocketAddr, in_flight: usize) -> Client {
    let config = ClientConfig { patience: Some(DEADLINE), ..client_config(address, in_flight) };
    Client::connect(config, None, &never).unwrap()
}

fn rejected() -> Receipt {
    let reason = Some(Reason::ConnectionLost);
    Receipt { verdict: Fate::Reject, applied: false, weight: 0.0, reason, ..receipt(1) }
}

#[test]
fn a_gradient_that_lies_where_the_answer_to_the_push_before_has_come_is_not_sent_again() {
    let (table, layout) = small();
    let (address, server) = serve_again(table.clone(), run(Transaction::Fragment), {
        let (table, layout) = (table.clone(), layout.clone());
        move |mut peer, control, listener| {
            let (first, _) = peer.next(Kind::Pull);
            roots(&mut peer, &layout, first.request, 0, 0, 1.0);
            pull_end(&mut peer, first.request, 0);
            let (head, _) = push(&mut peer, &layout);
            push(&mut peer, &layout);
            roots(&mut peer, &layout, head.request, 0, 1, 2.0); // over the gradient of the second
            drop((peer, control));
            let answers = vec![(1, receipt(1)), (2, rejected())];
            let run = run(Transaction::Fragment);
            let (mut peer, claim) = rejoin(listener, table, run, answers);
            let _control = attach(listener);
            assert!(claim.unsettled.iter().all(|u| u.gone), "it is no gradient any more: {claim:?}");
            let (pull, _) = peer.next(Kind::Pull);
            roots(&mut peer, &layout, pull.request, 0, 1, 2.0);
            pull_end(&mut peer, pull.request, 1);
            peer.goodbye();
        }
    });
    let mut client = patient(address, 2);
    let mut params = filled(&table, 0);
    pull(&mut client, &mut params, false, &never).unwrap();
    for due in [None, Some(receipt(1))] {
        let start = params[0].as_mut_ptr();
        #[expect(unsafe_code, reason = "only so can the same memory be sent and written")]
        // SAFETY: `params` outlives these, and nobody else touches it.
        let twice = || unsafe { Memory::from_raw(start, 32) };
        let (sent, out) = ([Some(twice())], [twice()]);
        let got = client.push_pull(PushInput { values: &sent, samples: 1 }, &out, true, &never).unwrap();
        assert_eq!(got, due);
    }
    assert_eq!(client.flush(None, &never).unwrap(), [rejected()]);
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

#[test]
fn who_gives_up_while_it_says_again_what_it_pushes_forgets_no_push() {
    let (table, layout) = small();
    let key = Key::default();
    let (address, server) = serve_again(table.clone(), run(Transaction::Fragment), {
        let (table, layout, key) = (table.clone(), layout.clone(), key.clone());
        let run = || run(Transaction::Fragment);
        move |mut peer, control, listener| {
            let (first, _) = peer.next(Kind::Pull);
            roots(&mut peer, &layout, first.request, 0, 0, 1.0);
            pull_end(&mut peer, first.request, 0);
            let (configure, _) = peer.next(Kind::Call);
            peer.send(Kind::Reply, configure.request, &Reply::Configured { run: run() });
            peer.next(Kind::Push);
            drop((peer, control));
            // It is to be sent again; but first the run has no optimizer, and is told of the worker's.
            let (mut silent, claim) = rejoin(listener, table.clone(), run(), vec![]);
            let _control = attach(listener);
            assert_eq!(claim.unsettled.iter().map(|u| u.gone).collect::<Vec<_>>(), [false]);
            silent.next(Kind::Call);
            key.press();
            let (mut peer, claim) = rejoin(listener, table, run(), vec![(1, rejected())]);
            let _control = attach(listener);
            assert_eq!(claim.unsettled.iter().map(|u| u.gone).collect::<Vec<_>>(), [true]);
            let (configure, _) = peer.next(Kind::Call);
            peer.send(Kind::Reply, configure.request, &Reply::Configured { run: run() });
            let (head, _) = push(&mut peer, &layout);
            assert_eq!(head.sequence, 2);
            settle(&mut peer, head.request, 1);
            peer.goodbye();
        }
    });
    let mut client = patient(address, 1);
    let mut params = filled(&table, 0);
    pull(&mut client, &mut params, false, &never).unwrap();
    client.configure(Contribution::Gradient, None, &never).unwrap();
    let mut gradient = vec![Some(bytes_of(&[1.0; 8]))];
    let given_up = client.push(PushInput { values: &memories(&mut gradient), samples: 1 }, &key);
    assert_eq!(given_up, Err(ClientError::Interrupted));
    let told = client.push(PushInput { values: &memories(&mut gradient), samples: 1 }, &never);
    assert_eq!(told, Ok(receipt(1)));
    assert_eq!(client.flush(None, &never).unwrap(), [rejected()]);
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

#[test]
fn a_server_that_takes_who_is_back_for_another_or_passes_a_push_over_breaks_the_protocol() {
    for (incarnation, why) in [(8, "incarnation 7 is back"), (7, "what has become of push 1")] {
        let (table, layout) = small();
        let key = Key::default();
        let (on, go_on) = waits();
        let (address, server) = serve_again(table.clone(), run(Transaction::Fragment), {
            let (table, layout, key) = (table.clone(), layout.clone(), key.clone());
            move |mut peer, control, listener| {
                let (first, _) = peer.next(Kind::Pull);
                roots(&mut peer, &layout, first.request, 0, 0, 1.0);
                pull_end(&mut peer, first.request, 0);
                push(&mut peer, &layout);
                key.press();
                go_on.recv().unwrap();
                drop((peer, control));
                let mut data = Peer::greet(listener);
                let join: Join = data.expect(Kind::Join);
                let joined = joined(&join, table, run(Transaction::Fragment));
                data.send(Kind::Joined, 0, &Joined { incarnation, ..joined });
                let mut control = Peer::greet(listener);
                let _: Attach = control.expect(Kind::Attach);
                control.frame(Header::new(Kind::Attached), &[]);
                assert!(!matches!(data.read(&mut [0]), Ok(1..)), "it does not go on");
            }
        });
        let mut client = patient(address, 1);
        let mut params = filled(&table, 0);
        pull(&mut client, &mut params, false, &never).unwrap();
        let mut gradient = vec![Some(bytes_of(&[1.0; 8]))];
        let given_up = client.push(PushInput { values: &memories(&mut gradient), samples: 1 }, &key);
        assert_eq!(given_up, Err(ClientError::Interrupted));
        on.send(()).unwrap();
        let told = client.flush(None, &never).unwrap_err();
        assert!(matches!(&told, ClientError::Protocol { cause, .. } if cause.contains(why)), "{told}");
        drop(client);
        server.join().unwrap();
    }
}

#[test]
fn who_is_back_and_is_cut_off_between_its_two_connections_tries_again() {
    let (table, layout) = small();
    let (address, server) = serve_again(table.clone(), run(Transaction::Fragment), {
        let table = table.clone();
        move |mut peer, control, listener| {
            peer.next(Kind::Pull);
            drop((peer, control));
            let again = || rejoin(listener, table.clone(), run(Transaction::Fragment), vec![]).0;
            let _silent = again();
            let mut control = Peer::greet(listener);
            let _: Attach = control.expect(Kind::Attach);
            // The server has heard the end of the data connection, and the worker has not.
            let message = "there is no such session (any more)".to_owned();
            control.send(Kind::Refused, 0, &Refused { code: RefusalCode::State, message, fatal: true });
            let mut peer = again();
            let _control = attach(listener);
            let (pull, _) = peer.next(Kind::Pull);
            roots(&mut peer, &layout, pull.request, 0, 0, 1.0);
            pull_end(&mut peer, pull.request, 0);
            peer.goodbye();
        }
    });
    let mut client = patient(address, 1);
    let mut params = filled(&table, 0);
    assert_eq!(pull(&mut client, &mut params, false, &never), Ok(0));
    client.close(Parting::Finished, &never).unwrap();
    server.join().unwrap();
}

#[test]
fn what_is_kept_for_a_flush_has_an_end() {
    let (table, _) = small();
    let server = Server::with_model(
        ServerConfig::default(),
        offbeat_net::server::Snapshot::of(table.clone(), &filled(&table, 0)).unwrap(),
    );
    let server = server.unwrap();
    let mut client = Client::connect(client_config(server.address(), 1), None, &never).unwrap();
    client.unclaim(&(1..=70).map(receipt).collect::<Vec<_>>()).unwrap();
    let kept: Vec<u64> = client.flush(None, &never).unwrap().iter().map(|receipt| receipt.version).collect();
    assert_eq!(kept, (7..=70).collect::<Vec<_>>(), "the newest 64");
}

#[test]
fn waiting_for_a_model_can_be_given_up() {
    let server = Server::start(ServerConfig::default()).unwrap();
    let mut client = Client::connect(client_config(server.address(), 1), None, &never).unwrap();
    let begun = Instant::now();
    assert_eq!(client.wait_for_model(&|| true).unwrap_err(), ClientError::Interrupted);
    assert_eq!(client.wait_for_model(&|| true).unwrap_err(), ClientError::Interrupted);
    client.close(Parting::Left { cause: None }, &never).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "closing does not wait for others");
}

#[test]
fn who_gives_up_between_its_two_connections_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let key = Key::default();
    let pressed = key.clone();
    let server = std::thread::spawn(move || {
        let table = table(vec![parameter("w", 10)]);
        let mut data = join(&listener, table, run(Transaction::Fragment));
        let _control = listener.accept().unwrap(); // is not answered
        pressed.press();
        let parting = Parting::Withdrawn { cause: Some("interrupted while it joined".into()) };
        assert_eq!(data.expect::<Call>(Kind::Call), Call::Goodbye { parting });
    });
    let given_up = Client::connect(client_config(address, 1), None, &key);
    assert_eq!(given_up.unwrap_err(), ClientError::Interrupted);
    server.join().unwrap();
}

#[test]
fn a_goodbye_is_the_last_frame() {
    let table = table(vec![parameter("w", 10)]);
    let (address, server) = serve(table, run(Transaction::Fragment), |peer, _| {
        let parting = Parting::Left { cause: None };
        assert_eq!(peer.expect::<Call>(Kind::Call), Call::Goodbye { parting });
    });
    drop(Client::connect(client_config(address, 1), None, &never).unwrap());
    server.join().unwrap();
}
