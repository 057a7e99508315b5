//! Who gets in, and what those hear who do not.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use common::{Raw, client, config, join, start, status, table, tensor, try_client};
use offbeat_core::checksum::checksum;
use offbeat_core::table::{Role, TensorTable};
use offbeat_core::wire::auth::{Side, prove, verify};
use offbeat_core::wire::message::{
    Authenticate, Challenge, Hello, Join, Purpose, RefusalCode, Refused, Welcome,
};
use offbeat_core::wire::{Header, Kind, PROTOCOL, encode};
use offbeat_net::client::{Client, ClientConfig, ClientError, fetch_status};
use offbeat_net::server::{ServerConfig, ServerError};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

fn with_token() -> ServerConfig {
    ServerConfig { token: Some("secret".into()), ..config() }
}

#[test]
fn the_right_token_opens_the_door() {
    let server = start(with_token());
    assert!(try_client(&server, "a", Some("secret"), Some(&table())).is_ok());
}

#[test]
fn a_wrong_token_is_found_by_the_worker_before_it_proves_anything() {
    let server = start(with_token());
    let refused = try_client(&server, "a", Some("guess"), None).unwrap_err();
    assert!(matches!(refused, ClientError::Authentication { .. }), "{refused}");
}

#[test]
fn the_words_of_a_peer_that_has_proved_nothing_are_not_repeated() {
    let server = start(with_token());
    let message = "a line\nof its own".to_owned();
    let refused = Refused { code: RefusalCode::State, message, fatal: true };
    let mut first = Raw::connect(server.address());
    first.send(Kind::Refused, 0, &refused);
    let mut second = Raw::connect(server.address());
    let hello =
        Hello { protocol_min: PROTOCOL, protocol_max: PROTOCOL, nonce: [5; 32], purpose: Purpose::Data };
    second.send(Kind::Hello, 0, &hello);
    let _: Challenge = second.expect(Kind::Challenge);
    second.send(Kind::Refused, 0, &refused);
    for mut raw in [first, second] {
        let answer = raw.refused();
        assert_eq!((answer.code, answer.message.as_str()), (RefusalCode::State, "the peer refused (State)"));
    }
}

#[test]
fn nor_is_what_it_says_in_a_message_that_cannot_be_read() {
    let server = start(with_token());
    let forged = serde_json::json!({"purpose": "a line\nof its own"});
    let mut bytes = vec![];
    encode(&forged, &mut bytes);
    let mut raw = Raw::connect(server.address());
    raw.send(Kind::Hello, 0, &forged);
    let refused = raw.refused();
    let told = format!("a Hello message of {} bytes cannot be read", bytes.len());
    assert_eq!((refused.code, refused.message), (RefusalCode::Malformed, told));
}

#[test]
fn a_host_that_could_forge_a_line_of_a_table_is_refused() {
    let server = start(config());
    let mut raw = Raw::connect(server.address());
    raw.greet(None, Purpose::Data);
    let _: Welcome = raw.expect(Kind::Welcome);
    raw.send(Kind::Join, 0, &Join { host: "here\nworker-1".into(), ..join("a") });
    let refused = raw.refused();
    assert_eq!(refused.code, RefusalCode::Malformed);
    assert!(refused.message.starts_with("host \"here\\nworker-1\" is not"), "{refused}");
}

#[test]
fn a_wrong_proof_is_refused_by_the_server() {
    let server = start(with_token());
    let mut raw = Raw::connect(server.address());
    raw.greet(Some("guess"), Purpose::Data);
    let refused = raw.refused();
    assert_eq!(refused.code, RefusalCode::Authentication);
    assert!(refused.message.contains("OFFBEAT_TOKEN"), "{refused}");
}

#[test]
fn a_missing_token_is_refused() {
    let server = start(with_token());
    let refused = try_client(&server, "a", None, None).unwrap_err();
    assert!(matches!(refused, ClientError::Authentication { .. }), "{refused}");
}

#[test]
fn a_worker_with_a_token_does_not_trust_a_server_without() {
    let server = start(config());
    let refused = try_client(&server, "a", Some("secret"), None).unwrap_err();
    assert!(matches!(refused, ClientError::Authentication { .. }), "{refused}");
}

/// The same words again and again, as somebody says them who has only heard them.
const HEARD: Hello =
    Hello { protocol_min: PROTOCOL, protocol_max: PROTOCOL, nonce: [5; 32], purpose: Purpose::Data };

/// What the server answers to them.
fn challenge(raw: &mut Raw) -> Challenge {
    raw.send(Kind::Hello, 0, &HEARD);
    raw.expect(Kind::Challenge)
}

#[test]
fn a_proof_that_opened_one_connection_opens_no_other() {
    let server = start(with_token());
    let (mut first, mut second) = (Raw::connect(server.address()), Raw::connect(server.address()));
    let (a, b) = (challenge(&mut first), challenge(&mut second));
    assert_ne!(a.nonce, b.nonce);
    assert_ne!(a.proof, b.proof);
    let captured = Authenticate { proof: Some(prove("secret", Side::Worker, &HEARD.nonce, &a.nonce)) };
    first.send(Kind::Authenticate, 0, &captured);
    let _: Welcome = first.expect(Kind::Welcome);
    second.send(Kind::Authenticate, 0, &captured);
    assert_eq!(second.refused().code, RefusalCode::Authentication);
}

#[test]
fn a_servers_proof_is_none_of_a_worker() {
    let server = start(with_token());
    let mut raw = Raw::connect(server.address());
    let Challenge { proof, nonce, .. } = challenge(&mut raw);
    assert!(
        verify("secret", Side::Server, &HEARD.nonce, &nonce, &proof.unwrap()),
        "it is right, as a server's"
    );
    raw.send(Kind::Authenticate, 0, &Authenticate { proof });
    assert_eq!(raw.refused().code, RefusalCode::Authentication);
}

#[test]
fn a_server_that_repeats_what_another_has_said_is_not_trusted_and_is_given_no_proof() {
    let server = start(with_token());
    let heard = challenge(&mut Raw::connect(server.address()));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let worker = thread::spawn(move || {
        let (worker_id, token, run_id) = (None, Some("secret".into()), None);
        let connect_timeout = common::DEADLINE;
        let config = ClientConfig {
            address,
            worker_id,
            token,
            run_id,
            in_flight: 1,
            connect_timeout,
            patience: Some(Duration::ZERO),
        };
        Client::connect(config, None, &|| false).unwrap_err()
    });
    let mut raw = Raw::of(listener.accept().unwrap().0);
    let (hello, said) = raw.next().unwrap();
    assert_eq!(hello.kind, Kind::Hello);
    raw.send(Kind::Challenge, 0, &heard);
    let (refused, why) = raw.next().unwrap();
    assert_eq!(refused.kind, Kind::Refused, "instead of a proof, which somebody else might use");
    assert!(raw.next().is_none());
    let refused = worker.join().unwrap();
    assert!(matches!(refused, ClientError::Authentication { .. }), "{refused}");
    for bytes in [said, why] {
        assert!(!bytes.is_empty() && !bytes.windows(6).any(|w| w == b"secret"), "the token was sent");
    }
}

#[test]
fn no_protocol_in_common_is_said_with_both() {
    let server = start(config());
    let mut raw = Raw::connect(server.address());
    raw.send(
        Kind::Hello,
        0,
        &Hello { protocol_min: 7, protocol_max: 9, nonce: [0; 32], purpose: Purpose::Data },
    );
    let refused = raw.refused();
    assert_eq!(refused.code, RefusalCode::Protocol);
    assert!(refused.message.contains("protocol 1, the worker 7 to 9"), "{refused}");
}

#[test]
fn a_frame_of_another_protocol_is_refused_with_both() {
    let server = start(config());
    let mut raw = Raw::connect(server.address());
    let mut bytes = Header::new(Kind::Hello).encode();
    bytes[4..6].copy_from_slice(&9_u16.to_le_bytes());
    let checksum = checksum(&bytes[..60]);
    bytes[60..].copy_from_slice(&checksum.to_le_bytes());
    raw.write(&bytes).unwrap();
    let refused = raw.refused();
    assert_eq!(refused.code, RefusalCode::Protocol);
    assert!(refused.message.contains("protocol 9, this build protocol 1"), "{refused}");
}

#[test]
fn nothing_is_told_before_the_proof() {
    let server = start(with_token());
    for kind in [Kind::Join, Kind::Attach, Kind::Call, Kind::Pull, Kind::Push, Kind::Value] {
        let mut raw = Raw::connect(server.address());
        raw.frame(Header::new(kind), &[]);
        let refused = raw.refused();
        assert_eq!(refused.code, RefusalCode::State, "{kind:?}");
        assert!(!refused.message.contains("tensor"), "{refused}");
    }
    assert_eq!(status(&server)["workers"].as_array().unwrap().len(), 0);
}

#[test]
fn a_wrong_model_is_refused_with_the_first_difference() {
    let server = start(config());
    let other = TensorTable::new(vec![tensor("w", 7, Role::Parameter)]).unwrap();
    let refused = try_client(&server, "a", None, Some(&other)).unwrap_err();
    let ClientError::ModelMismatch { message } = refused else { panic!("{refused}") };
    assert!(message.contains("float32 [100000]") && message.contains("float32 [7]"), "{message}");
}

#[test]
fn another_run_is_refused_by_name() {
    let server = start(ServerConfig { run_id: Some("mine".into()), ..config() });
    let mut raw = Raw::connect(server.address());
    raw.greet(None, Purpose::Data);
    let _: Welcome = raw.expect(Kind::Welcome);
    raw.send(Kind::Join, 0, &Join { run_id: Some("theirs".into()), ..join("a") });
    let refused = raw.refused();
    assert_eq!(refused.code, RefusalCode::RunId);
    assert!(refused.message.contains("mine") && refused.message.contains("theirs"), "{refused}");
}

#[test]
fn a_name_that_could_forge_a_log_line_is_refused() {
    let server = start(config());
    let mut raw = Raw::connect(server.address());
    raw.greet(None, Purpose::Data);
    let _: Welcome = raw.expect(Kind::Welcome);
    raw.send(Kind::Join, 0, &join("a\nworker b finished"));
    assert_eq!(raw.refused().code, RefusalCode::Malformed);
}

#[test]
fn more_connections_than_allowed_are_refused() {
    let server = start(ServerConfig { max_connections: 1, ..config() });
    let (_first, _) = Raw::joined(&server, "a");
    let mut second = Raw::connect(server.address());
    second.greet(None, Purpose::Data);
    let _: Welcome = second.expect(Kind::Welcome);
    assert_eq!(second.refused().code, RefusalCode::Full);
}

#[test]
fn status_needs_the_token_and_no_membership() {
    let server = start(with_token());
    let address = format!("127.0.0.1:{}", server.address().port());
    let limit = common::DEADLINE;
    let json = fetch_status(&address, Some("secret"), limit, &|| false).unwrap();
    let status: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(status["state"], "running");
    assert_eq!(status["workers"].as_array().unwrap().len(), 0);
    assert!(matches!(
        fetch_status(&address, None, limit, &|| false),
        Err(ClientError::Authentication { .. })
    ));
}

#[test]
fn a_port_in_use_is_an_error_that_names_it() {
    let server = start(config());
    let address = server.address();
    let again = offbeat_net::server::Server::start(ServerConfig { port: address.port(), ..config() });
    assert!(
        matches!(again, Err(ServerError::AddressInUse { address: named }) if named == address.to_string())
    );
}

#[test]
fn a_stopped_server_gives_its_port_back() {
    let server = start(config());
    let port = server.address().port();
    let _client = client(&server, "a");
    server.stop();
    server.stop();
    drop(server);
    start(ServerConfig { port, ..config() });
}
