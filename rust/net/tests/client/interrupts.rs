//! Ctrl-C in the middle of a call.

use crate::replies::{
    Key, LARGE, large, patient, pull, pull_end, push, push_pull, receipt, rejected, root, roots, settle,
    small, waits,
};
use crate::script::{Peer, attach, join, rejoin, run, serve, serve_again};
use crate::support::{bytes_of, client_config, filled, floats, memories, never, parameter, table};
use offbeat_core::spec::{Contribution, Transaction};
use offbeat_core::wire::message::{Call, Parting, Reply};
use offbeat_core::wire::{Header, Kind, PullRequest, PushRequest, flags};
use offbeat_net::client::{Client, ClientError, PushInput};
use offbeat_net::server::{Server, ServerConfig};
use std::net::TcpListener;
use std::time::{Duration, Instant};

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
