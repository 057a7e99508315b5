//! Bytes that no worker sends: none of them may end the server, reach the store, or keep others out.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::{
    FRAGMENTS, Raw, client, config, eventually, floats, parameters, start, status, until_state,
    until_withdrawn,
};
use offbeat_core::pipeline::Reason;
use offbeat_core::spec::Transaction;
use offbeat_core::wire::header::{MAX_HANDSHAKE_BYTES, MAX_TABLE_BYTES};
use offbeat_core::wire::message::{
    Authenticate, Call, Challenge, Hello, Joined, Parting, Purpose, RefusalCode, Welcome,
};
use offbeat_core::wire::{Header, Kind, PROTOCOL, Want, encode};
use offbeat_net::server::ServerConfig;
use proptest::prelude::*;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::Duration;

/// Patient enough for an honest handshake on a busy machine.
fn impatient() -> ServerConfig {
    let time = Duration::from_secs(2);
    ServerConfig { handshake_timeout: time, progress_timeout: time, max_pending: 2, ..config() }
}

/// Reads to the end, whatever comes.
fn drain(stream: &mut TcpStream) {
    let mut sink = vec![];
    stream.read_to_end(&mut sink).ok();
}

#[test]
fn a_length_bomb_before_the_proof_is_refused_by_its_header() {
    let server = start(config());
    for (kind, bytes, code) in [
        (Kind::Hello, MAX_HANDSHAKE_BYTES + 1, RefusalCode::Malformed),
        (Kind::Hello, u32::MAX, RefusalCode::Malformed),
        (Kind::Join, MAX_TABLE_BYTES, RefusalCode::State),
    ] {
        let mut raw = Raw::connect(server.address());
        raw.write(&Header { payload_len: bytes, ..Header::new(kind) }.encode()).unwrap();
        assert_eq!(raw.refused().code, code, "{kind:?} of {bytes}");
    }
}

#[test]
fn a_promised_table_that_does_not_come_costs_nothing_and_ends() {
    let server = start(impatient());
    let mut raw = Raw::connect(server.address());
    raw.greet(None, Purpose::Data);
    let _: Welcome = raw.expect(Kind::Welcome);
    raw.write(&Header { payload_len: MAX_TABLE_BYTES, ..Header::new(Kind::Join) }.encode()).unwrap();
    raw.write(&[0xdd; 10]).unwrap();
    assert_eq!(raw.refused().code, RefusalCode::Timeout);
    eventually(&server, "no connection is left", |s| s["connections"] == 0);
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let server = start(config());
    let mut raw = Raw::connect(server.address());
    raw.write(
        b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nX: yyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n\r\n",
    )
    .unwrap();
    assert!(raw.next().is_none(), "what is no peer of ours gets no answer");
    client(&server, "a");
}

#[test]
fn a_slow_loris_is_cut_off_and_holds_nobody_up() {
    let server = start(impatient());
    let mut lorises: Vec<_> = (0..6).map(|_| Raw::connect(server.address())).collect();
    for loris in &mut lorises {
        loris.write(&Header { payload_len: 90, ..Header::new(Kind::Hello) }.encode()[..20]).unwrap();
    }
    client(&server, "a");
    for loris in &mut lorises {
        drain(&mut loris.stream);
    }
}

#[test]
fn only_so_many_connections_are_heard_before_they_have_proved_themselves_and_the_first_gives_way() {
    let long = common::DEADLINE * 9;
    let server = start(ServerConfig { max_pending: 2, handshake_timeout: long, ..config() });
    let say_hello = || {
        let mut raw = Raw::connect(server.address());
        let (protocol_min, protocol_max, purpose) = (PROTOCOL, PROTOCOL, Purpose::Data);
        raw.send(Kind::Hello, 0, &Hello { protocol_min, protocol_max, nonce: [3; 32], purpose });
        raw
    };
    let [mut first, mut second] = [say_hello(), say_hello()];
    for raw in [&mut first, &mut second] {
        let _: Challenge = raw.expect(Kind::Challenge);
    }
    let mut third = say_hello();
    assert!(first.next().is_none(), "its place is another's");
    let _: Challenge = third.expect(Kind::Challenge);
    for raw in [&mut second, &mut third] {
        raw.send(Kind::Authenticate, 0, &Authenticate { proof: None });
        let _: Welcome = raw.expect(Kind::Welcome);
    }
}

#[test]
fn a_byte_now_and_then_does_not_keep_a_worker_in_its_frame() {
    let time = Duration::from_secs(1);
    let server = start(ServerConfig { progress_timeout: time, ..config() });
    for in_head in [true, false] {
        let (mut raw, joined) = Raw::joined(&server, "a");
        if in_head {
            raw.write(&Header::new(Kind::Pull).encode()[..10]).unwrap();
        } else {
            raw.push_head(1, (joined.term, joined.version), Want::Receipt, None);
            let header = Header { sequence: 1, ..Header::new(Kind::Fragment) };
            raw.write(&header.with_payload(&floats(FRAGMENTS[0], 1.0)).encode()).unwrap();
        }
        raw.stream.set_read_timeout(Some(time / 5)).unwrap();
        let end = std::time::Instant::now() + common::DEADLINE;
        // Until there is something to read: what it was told, or its end.
        while matches!(raw.stream.peek(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock) {
            assert!(std::time::Instant::now() < end, "nobody minds");
            raw.write(&[0]).ok(); // it may be over
        }
        let cause = if in_head { until_withdrawn(&server, "a") } else { until_state(&server, "a", "lost") };
        assert!(cause.contains("bytes for 1 s in the middle of a frame"), "{cause}");
    }
    assert!(parameters(&server).iter().all(|&p| p == 0.0));
}

#[test]
fn an_unknown_kind_and_a_flipped_bit_are_refused() {
    let server = start(config());
    let damaged = |damage: &dyn Fn(&mut [u8; 64])| {
        let (mut raw, _) = Raw::joined(&server, "a");
        let mut bytes = Header::new(Kind::Pull).encode();
        damage(&mut bytes);
        raw.write(&bytes).unwrap();
        raw.refused().code
    };
    assert_eq!(damaged(&|b| b[20] ^= 4), RefusalCode::Checksum);
    let unknown = |b: &mut [u8; 64]| {
        b[6] = 99;
        let checksum = offbeat_core::checksum::checksum(&b[..60]);
        b[60..].copy_from_slice(&checksum.to_le_bytes());
    };
    assert_eq!(damaged(&unknown), RefusalCode::Malformed);
}

#[test]
fn a_frame_out_of_place_is_refused() {
    let server = start(config());
    for kind in
        [Kind::Hello, Kind::Fragment, Kind::Value, Kind::Root, Kind::Receipt, Kind::Heartbeat, Kind::Join]
    {
        let (mut raw, _) = Raw::joined(&server, "a");
        raw.frame(Header::new(kind), &[]);
        assert_eq!(raw.refused().code, RefusalCode::State, "{kind:?}");
    }
}

#[test]
fn a_fragment_of_another_length_place_or_push_is_refused_and_applied_nowhere() {
    let server = start(config());
    let good = Header { sequence: 1, fragment: 0, ..Header::new(Kind::Fragment) };
    let bytes = floats(FRAGMENTS[0], 1.0);
    let cases = [
        (good, &bytes[4..], RefusalCode::Malformed),
        (good, &[][..], RefusalCode::Malformed),
        (Header { codec: 3, ..good }, &bytes[..], RefusalCode::Malformed),
        (Header { fragment: 1, ..good }, &bytes[..], RefusalCode::State),
        (Header { sequence: 2, ..good }, &bytes[..], RefusalCode::State),
        (Header { kind: Kind::Pull, ..good }, &[][..], RefusalCode::State),
    ];
    for (header, payload, code) in cases {
        let (mut raw, joined) = Raw::joined(&server, "a");
        raw.push_head(1, (joined.term, joined.version), Want::Receipt, None);
        // The server may have closed before all is written.
        let mut frame = header.with_payload(payload).encode().to_vec();
        frame.extend_from_slice(payload);
        raw.write(&frame).ok();
        assert_eq!(raw.refused().code, code, "{header:?}");
    }
    assert!(parameters(&server).iter().all(|&p| p == 0.0));
}

#[test]
fn a_damaged_payload_is_refused_and_not_applied() {
    let server = start(config());
    let (mut raw, joined) = Raw::joined(&server, "a");
    raw.push_head(1, (joined.term, joined.version), Want::Receipt, None);
    let mut bytes = floats(FRAGMENTS[0], 1.0);
    let header = Header { sequence: 1, ..Header::new(Kind::Fragment) }.with_payload(&bytes);
    bytes[100_000] ^= 1;
    raw.write(&header.encode()).unwrap();
    raw.write(&bytes).unwrap();
    assert_eq!(raw.refused().code, RefusalCode::Checksum);
    assert!(until_state(&server, "a", "lost").contains("damaged"));
    assert!(parameters(&server).iter().all(|&p| p == 0.0));
}

#[test]
fn heads_that_make_no_sense_are_refused() {
    let server = start(config());
    let push = |bytes: &[u8]| {
        let (mut raw, _) = Raw::joined(&server, "a");
        raw.frame(Header { sequence: 1, ..Header::new(Kind::Push) }, bytes);
        raw.refused().code
    };
    assert_eq!(push(&[]), RefusalCode::Malformed);
    assert_eq!(push(&[1; 40]), RefusalCode::Malformed);
    // Versions of fragments that are not in a push which has them all.
    let mut bytes = vec![1, 8, 0, 0, 0, 0, 0, 0];
    bytes.extend_from_slice(&1_u64.to_le_bytes());
    bytes.extend_from_slice(&1_u32.to_le_bytes());
    bytes.extend_from_slice(&5_u64.to_le_bytes());
    assert_eq!(push(&bytes), RefusalCode::Malformed);
}

#[test]
fn a_push_that_ends_anywhere_leaves_whole_fragments_under_fragment_and_nothing_under_model() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let server = start(ServerConfig { transaction, ..config() });
        let (_, joined) = Raw::joined(&server, "a");
        let at = (joined.term, joined.version);
        let frames: Vec<Vec<u8>> = (0..2).map(|i| fragment_frame(i, 1.0)).collect();
        let [first, second] = [frames[0].len(), frames[1].len()];
        let middle = [first / 2, first - 1, first, first + 1, first + 63, first + 64, first + 65];
        for cut in [0, 1, 63, 64, 65].into_iter().chain(middle).chain([first + second - 1]) {
            let (mut raw, _) = Raw::joined(&server, "a");
            raw.push_head(1, at, Want::Receipt, None);
            if transaction == Transaction::Model {
                assert_eq!(raw.next().unwrap().0.kind, Kind::Grant);
            }
            let before = parameters(&server);
            raw.write(&frames.concat()[..cut]).unwrap();
            drop(raw);
            assert!(until_state(&server, "a", "lost").contains("closed"));
            let after = parameters(&server);
            let moved: Vec<f32> = before.iter().zip(&after).map(|(before, after)| before - after).collect();
            let (of_first, of_second) = moved.split_at(FRAGMENTS[0]);
            let whole = transaction == Transaction::Fragment && cut >= first;
            assert!(of_first.iter().all(|&m| m == if whole { 1.0 } else { 0.0 }), "cut at {cut}");
            assert!(of_second.iter().all(|&m| m == 0.0), "cut at {cut}");
        }
    }
}

/// A fragment of the first push, of one value everywhere.
fn fragment_frame(index: usize, value: f32) -> Vec<u8> {
    let payload = floats(FRAGMENTS[index], value);
    let fragment = u32::try_from(index).unwrap();
    let header = Header { sequence: 1, fragment, ..Header::new(Kind::Fragment) }.with_payload(&payload);
    [&header.encode()[..], &payload].concat()
}

#[test]
fn finite_gradients_whose_result_is_not_finite_move_nothing() {
    for transaction in [Transaction::Fragment, Transaction::Model] {
        let server = start(ServerConfig { transaction, ..config() });
        let (mut raw, joined) = Raw::joined(&server, "a");
        let at = (joined.term, joined.version);
        let push = |raw: &mut Raw, sequence, base| {
            raw.push_head(sequence, at, Want::Receipt, None);
            if transaction == Transaction::Model {
                assert_eq!(raw.next().unwrap().0.kind, Kind::Grant);
            }
            for (i, len) in FRAGMENTS.into_iter().enumerate() {
                raw.fragment(sequence, u32::try_from(i).unwrap(), base, &floats(len, 3e38));
            }
            raw.answer().receipt().clone()
        };
        assert!(push(&mut raw, 1, 0).applied);
        let refused = push(&mut raw, 2, 1);
        assert!(!refused.applied && refused.reason == Some(Reason::NonfiniteResult), "{refused:?}");
        assert!(parameters(&server).iter().all(|&p| p == -3e38), "{transaction:?}");
    }
}

#[test]
fn a_connection_for_status_may_ask_for_nothing_else() {
    let server = start(config());
    let frames: [&dyn Fn(&mut Raw); 4] = [
        &|raw| raw.call(1, &Call::Goodbye { parting: Parting::Finished }),
        &|raw| raw.call(1, &Call::InitCommit),
        &|raw| raw.frame(Header::new(Kind::Pull), &[]),
        &|raw| raw.send(Kind::Join, 0, &common::join("a")),
    ];
    for ask in frames {
        let mut raw = Raw::connect(server.address());
        raw.greet(None, Purpose::Status);
        let _: Welcome = raw.expect(Kind::Welcome);
        ask(&mut raw);
        assert_eq!(raw.refused().code, RefusalCode::State);
    }
    assert_eq!(status(&server)["workers"].as_array().unwrap().len(), 0);
}

#[test]
fn a_second_frame_of_a_control_connection_must_be_a_heartbeat() {
    let server = start(config());
    let (_data, joined) = Raw::joined(&server, "a");
    let mut control = Raw::attached(&server, &joined);
    control.frame(Header::new(Kind::Pull), &[]);
    assert_eq!(control.refused().code, RefusalCode::State);
    until_state(&server, "a", "lost");
}

#[test]
fn a_forged_secret_attaches_nothing() {
    let server = start(config());
    let (_data, mut joined) = Raw::joined(&server, "a");
    joined.secret[15] ^= 1;
    let mut raw = Raw::connect(server.address());
    raw.greet(None, Purpose::Control);
    let _: Welcome = raw.expect(Kind::Welcome);
    raw.send(
        Kind::Attach,
        0,
        &offbeat_core::wire::message::Attach { incarnation: joined.incarnation, secret: joined.secret },
    );
    assert_eq!(raw.refused().code, RefusalCode::State);
    assert_eq!(common::worker(&status(&server), "a")["state"], "joined");
}

/// What a fuzzer would send: valid frames of any kind with any payload, or no frames at all.
fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    let frame = (prop::sample::select(Kind::ALL.to_vec()), prop::collection::vec(any::<u8>(), 0..200))
        .prop_map(|(kind, payload)| {
            let payload = if kind.cap() == 0 { vec![] } else { payload };
            let mut bytes = Header::new(kind).with_payload(&payload).encode().to_vec();
            bytes.extend_from_slice(&payload);
            bytes
        });
    let hello = Just({
        let mut bytes = vec![];
        let hello =
            Hello { protocol_min: PROTOCOL, protocol_max: PROTOCOL, nonce: [0; 32], purpose: Purpose::Data };
        encode(&hello, &mut bytes);
        let mut frame = Header::new(Kind::Hello).with_payload(&bytes).encode().to_vec();
        frame.append(&mut bytes);
        frame
    });
    let part = prop_oneof![frame, hello, prop::collection::vec(any::<u8>(), 0..300)];
    prop::collection::vec(part, 1..5).prop_map(|parts| parts.concat())
}

#[test]
fn no_bytes_end_the_server() {
    let server = start(ServerConfig { max_pending: 64, ..impatient() });
    let runner = ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(runner, |(before: bool, bytes in any_bytes())| {
        let mut raw = if before { Raw::connect(server.address()) } else { Raw::joined(&server, "a").0 };
        raw.write(&bytes).ok();
        raw.stream.shutdown(std::net::Shutdown::Write).ok();
        drain(&mut raw.stream);
    });
    let status = eventually(&server, "no connection is left", |s| s["connections"] == 0);
    assert_eq!(status["version"], 0);
    let (mut raw, joined) = Raw::joined(&server, "b");
    let answer = raw.push(1, (joined.term, joined.version), 0, 1.0, Want::Parameters);
    assert!(answer.receipt().applied);
}

#[test]
fn what_came_with_the_handshake_is_still_a_debt_after_the_move_to_a_data_thread() {
    let server = start(ServerConfig { progress_timeout: Duration::from_millis(200), ..config() });
    let mut raw = Raw::connect(server.address());
    let nonce = [3; 32];
    let (protocol_min, protocol_max, purpose) = (PROTOCOL, PROTOCOL, Purpose::Data);
    raw.send(Kind::Hello, 0, &Hello { protocol_min, protocol_max, nonce, purpose });
    let _: Challenge = raw.expect(Kind::Challenge);
    // All at once, so that the control thread reads ahead: two frames, and the beginning of a third.
    let mut bytes = vec![];
    let mut add = |kind, message: &dyn Fn(&mut Vec<u8>)| {
        let mut payload = vec![];
        message(&mut payload);
        bytes.extend_from_slice(&Header::new(kind).with_payload(&payload).encode());
        bytes.append(&mut payload);
    };
    add(Kind::Authenticate, &|out| encode(&Authenticate { proof: None }, out));
    add(Kind::Join, &|out| encode(&common::join("a"), out));
    bytes.extend_from_slice(&Header::new(Kind::Pull).encode()[..10]);
    raw.write(&bytes).unwrap();
    let _: Welcome = raw.expect(Kind::Welcome);
    let _: Joined = raw.expect(Kind::Joined);
    assert_eq!(raw.refused().code, RefusalCode::Timeout);
    assert!(until_withdrawn(&server, "a").contains("no byte for 0.2 s"));
}
