//! A server that does what a test tells it, one frame at a time.

use crate::support::DEADLINE;
use offbeat_core::spec::{Schedule, StalenessSpec, Transaction};
use offbeat_core::store::{Claim, Receipt};
use offbeat_core::table::TensorTable;
use offbeat_core::wire::message::{
    Attach, Authenticate, Call, Challenge, Hello, Join, Joined, ModelInfo, RunConfig, Welcome,
};
use offbeat_core::wire::{HEADER_BYTES, Header, Kind, PROTOCOL, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::SockRef;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

const RECEIVE_BUFFER_BYTES: usize = 256 << 10;

/// One connection, from the server's end.
pub(crate) struct Peer(TcpStream);

impl Peer {
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub(crate) fn frame(&mut self, header: Header, payload: &[u8]) {
        self.write(&header.with_payload(payload).encode());
        self.write(payload);
    }

    pub(crate) fn send<T: Serialize>(&mut self, kind: Kind, request: u32, message: &T) {
        let mut bytes = vec![];
        encode(message, &mut bytes);
        self.frame(Header { request, ..Header::new(kind) }, &bytes);
    }

    /// What comes, frame or not.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(bytes)
    }

    /// The next frame, which is of this kind.
    pub(crate) fn next(&mut self, kind: Kind) -> (Header, Vec<u8>) {
        let header = self.header();
        assert_eq!(header.kind, kind);
        let mut bytes = vec![0; header.payload_len as usize];
        self.0.read_exact(&mut bytes).unwrap();
        assert_eq!(offbeat_core::checksum::checksum(&bytes), header.payload_checksum);
        (header, bytes)
    }

    fn header(&mut self) -> Header {
        let mut head = [0; HEADER_BYTES];
        self.0.read_exact(&mut head).unwrap();
        Header::decode(&head).unwrap()
    }

    pub(crate) fn expect<T: DeserializeOwned>(&mut self, kind: Kind) -> T {
        decode(&self.next(kind).1).unwrap()
    }

    /// Answers a goodbye, or notices that the client is gone.
    pub(crate) fn goodbye(&mut self) {
        let (header, bytes) = self.next(Kind::Call);
        assert!(matches!(decode(&bytes), Ok(Call::Goodbye { .. })));
        self.send(Kind::Reply, header.request, &offbeat_core::wire::message::Reply::Goodbye);
    }

    pub(crate) fn greet(listener: &TcpListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        let mut peer = Self(stream);
        let _: Hello = peer.expect(Kind::Hello);
        let challenge = Challenge { protocol: PROTOCOL, nonce: [1; 32], token_required: false, proof: None };
        peer.send(Kind::Challenge, 0, &challenge);
        let _: Authenticate = peer.expect(Kind::Authenticate);
        peer.send(Kind::Welcome, 0, &Welcome { version: "test".into() });
        peer
    }
}

/// A run as the script's server has it.
pub(crate) fn run(transaction: Transaction) -> RunConfig {
    RunConfig {
        epoch: 0,
        transaction,
        contribution: None,
        optimizer: None,
        momentum_correction: false,
        staleness: StalenessSpec::default(),
        schedule: Schedule::default(),
        max_samples: None,
    }
}

/// Joins one worker: gives its data connection.
pub(crate) fn join(listener: &TcpListener, table: TensorTable, run: RunConfig) -> Peer {
    let mut data = Peer::greet(listener);
    let join: Join = data.expect(Kind::Join);
    data.send(Kind::Joined, 0, &joined(&join, table, run));
    data
}

/// The same of one that is back, which hears these answers: gives its data connection, and what it said of itself.
pub(crate) fn rejoin(
    listener: &TcpListener,
    table: TensorTable,
    run: RunConfig,
    answers: Vec<(u64, Receipt)>,
) -> (Peer, Claim) {
    let mut data = Peer::greet(listener);
    let join: Join = data.expect(Kind::Join);
    data.send(Kind::Joined, 0, &Joined { answers, ..joined(&join, table, run) });
    (data, join.back.unwrap().claim)
}

/// A worker, always the same, is in.
pub(crate) fn joined(join: &Join, table: TensorTable, run: RunConfig) -> Joined {
    Joined {
        run_id: "run".into(),
        worker_id: "worker".into(),
        slot: 0,
        incarnation: 7,
        secret: [9; 16],
        term: 1,
        version: 0,
        durable_version: 0,
        model: Some(ModelInfo { table, blueprint: None }),
        run,
        in_flight: join.in_flight,
        heartbeat_ms: 10,
        lease_ms: 10_000,
        keeps_checkpoints: false,
        answers: Vec::new(),
        lost_updates: 0,
    }
}

/// Attaches the worker that joined: gives its control connection.
pub(crate) fn attach(listener: &TcpListener) -> Peer {
    let mut control = Peer::greet(listener);
    let attach: Attach = control.expect(Kind::Attach);
    assert_eq!((attach.incarnation, attach.secret), (7, [9; 16]));
    control.frame(Header::new(Kind::Attached), &[]);
    control
}

/// Serves one worker: joins and attaches it, then `script` has its data and control connections.
pub(crate) fn serve(
    table: TensorTable,
    run: RunConfig,
    script: impl FnOnce(&mut Peer, &mut Peer) + Send + 'static,
) -> (SocketAddr, JoinHandle<()>) {
    serve_again(table, run, |mut data, mut control, _| script(&mut data, &mut control))
}

/// The same, and the script may let it in again.
pub(crate) fn serve_again(
    table: TensorTable,
    run: RunConfig,
    script: impl FnOnce(Peer, Peer, &TcpListener) + Send + 'static,
) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Else it grows to 32 MB, and takes a large push while the script reads nothing.
    SockRef::from(&listener).set_recv_buffer_size(RECEIVE_BUFFER_BYTES).unwrap();
    SockRef::from(&listener).set_read_timeout(Some(DEADLINE)).unwrap(); // of whom it waits for, too
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let data = join(&listener, table, run);
        let control = attach(&listener);
        script(data, control, &listener);
    });
    (address, thread)
}
