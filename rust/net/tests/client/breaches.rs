//! What a server may not say: the session ends before anything of it is believed.

use crate::replies::{
    Key, LARGE, large, patient, pull, pull_end, push, push_pull, receipt, root, roots, settle, small,
    unchanged, waits,
};
use crate::script::{Peer, joined, run, serve, serve_again};
use crate::support::{bytes_of, client_config, filled, floats, memories, never, parameter, table, tensor};
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::Layout;
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::store::{Fate, Receipt};
use offbeat_core::table::Role;
use offbeat_core::wire::message::{Attach, Join, Joined, Parting, Reply};
use offbeat_core::wire::{Header, Kind, flags};
use offbeat_net::client::{Client, ClientError, PushInput};
use std::time::Duration;

/// What must be in the error, and a frame that brings it about.
type Bad = (&'static str, fn(&mut Peer, u32));

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
