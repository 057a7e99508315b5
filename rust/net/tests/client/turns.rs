//! What is sent and what is read when: answers while a push is sent, and memory that both sides use.

use crate::replies::{
    LARGE, large, patient, pull, pull_end, push, push_pull, receipt, rejected, root, roots, settle, small,
    unchanged,
};
use crate::script::{Peer, attach, rejoin, run, serve, serve_again};
use crate::support::{bytes_of, client_config, filled, floats, memories, never, parameter, table, tensor};
use offbeat_core::dtype::Dtype;
use offbeat_core::layout::Layout;
use offbeat_core::spec::Transaction;
use offbeat_core::store::{Fate, Receipt};
use offbeat_core::table::Role;
use offbeat_core::wire::message::{Attach, Call, ModelInfo, Parting, RefusalCode, Refused, Reply};
use offbeat_core::wire::{Header, Kind, encode};
use offbeat_net::client::{Client, ClientError, Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig};

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
fn a_goodbye_is_the_last_frame() {
    let table = table(vec![parameter("w", 10)]);
    let (address, server) = serve(table, run(Transaction::Fragment), |peer, _| {
        let parting = Parting::Left { cause: None };
        assert_eq!(peer.expect::<Call>(Kind::Call), Call::Goodbye { parting });
    });
    drop(Client::connect(client_config(address, 1), None, &never).unwrap());
    server.join().unwrap();
}
