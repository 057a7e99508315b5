//! A server with a small model, and a worker that speaks frames by hand: it can send what no client would.
#![allow(dead_code, unreachable_pub, reason = "every test crate uses its part")]

pub mod kept;

use offbeat_core::dtype::Dtype;
use offbeat_core::spec::{Group, OptimizerSpec, Rule};
use offbeat_core::store::Receipt;
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use offbeat_core::wire::auth::{Side, prove};
use offbeat_core::wire::message::{
    Attach, Authenticate, Call, Challenge, Event, Heartbeat, Hello, Join, Joined, Purpose, Refused, Reply,
    Welcome,
};
use offbeat_core::wire::{
    HEADER_BYTES, Header, Kind, PROTOCOL, PullRequest, PushRequest, Versions, Want, decode, encode, flags,
};
use offbeat_net::client::{Client, ClientConfig, ClientError};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// No test waits longer for anything.
pub const DEADLINE: Duration = Duration::from_secs(20);
pub const NEVER: &dyn Fn() -> bool = &|| false;

/// Elements of the first tensor: one fragment and a part of the second.
pub const W: usize = 100_000;
pub const B: usize = 10;
/// Elements in the two fragments.
pub const FRAGMENTS: [usize; 2] = [65_536, W + B - 65_536];

pub fn tensor(name: &str, len: usize, role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), aliases: vec![], shape: vec![len as u64], dtype: Dtype::F32, role }
}

pub fn table() -> TensorTable {
    TensorTable::new(vec![tensor("w", W, Role::Parameter), tensor("b", B, Role::Parameter)]).unwrap()
}

pub fn values(value: f32) -> Vec<Vec<u8>> {
    vec![floats(W, value), floats(B, value)]
}

pub fn floats(len: usize, value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(len)
}

/// p ← p − g, exactly for small whole numbers.
pub fn plain_sgd() -> OptimizerSpec {
    let rule =
        Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    OptimizerSpec { groups: vec![Group { pattern: "*".into(), lr: 1.0, rule }], momentum_correction: false }
}

pub fn config() -> ServerConfig {
    ServerConfig { optimizer: Some(plain_sgd()), num_data_threads: Some(2), ..ServerConfig::default() }
}

pub fn start(config: ServerConfig) -> Server {
    start_with(config, table(), &values(0.0))
}

pub fn start_with(config: ServerConfig, table: TensorTable, values: &[Vec<u8>]) -> Server {
    Server::with_model(config, Snapshot::of(table, values).unwrap()).unwrap()
}

pub fn status(server: &Server) -> Value {
    serde_json::from_str(&server.status_json().unwrap()).unwrap()
}

/// A worker's entry in a status.
pub fn worker<'a>(status: &'a Value, id: &str) -> &'a Value {
    let workers = status["workers"].as_array().unwrap();
    workers.iter().find(|w| w["id"] == id).unwrap_or_else(|| panic!("no worker {id} in {workers:?}"))
}

/// Waits until the status is as `is` wants it, and returns it.
pub fn eventually(server: &Server, what: &str, mut is: impl FnMut(&Value) -> bool) -> Value {
    let end = Instant::now() + DEADLINE;
    let (_never, clock) = mpsc::channel::<()>();
    loop {
        let status = status(server);
        if is(&status) {
            return status;
        }
        assert!(Instant::now() < end, "{what} did not come about: {status:#}");
        clock.recv_timeout(Duration::from_millis(5)).ok();
    }
}

/// Waits for a worker's state and returns the cause of it.
pub fn until_state(server: &Server, id: &str, state: &str) -> String {
    let status = eventually(server, &format!("{id} {state}"), |s| {
        s["workers"].as_array().unwrap().iter().any(|w| w["id"] == id && w["state"] == state)
    });
    worker(&status, id)["cause"].as_str().unwrap_or_default().to_owned()
}

/// Waits for the departure of a worker that is no member, and returns its cause.
pub fn until_withdrawn(server: &Server, id: &str) -> String {
    let status = eventually(server, &format!("{id} gone"), |s| {
        let gone = |departure: &Value| departure["worker"] == id;
        s["departures"].as_array().unwrap().iter().any(gone)
    });
    assert!(status["workers"].as_array().unwrap().iter().all(|w| w["id"] != id), "{status:#}");
    let departures = status["departures"].as_array().unwrap();
    let [departure] = departures.as_slice() else { panic!("{departures:?}") };
    assert_eq!(departure["state"], "left");
    departure["cause"].as_str().unwrap().to_owned()
}

/// All parameters of the server.
pub fn parameters(server: &Server) -> Vec<f32> {
    let (_, tensors) = server.tensors().unwrap().unwrap();
    tensors.iter().flat_map(|t| t.as_chunks().0).map(|b| f32::from_le_bytes(*b)).collect()
}

pub fn client(server: &Server, id: &str) -> Client {
    try_client(server, id, None, Some(&table())).unwrap()
}

pub fn try_client(
    server: &Server,
    id: &str,
    token: Option<&str>,
    table: Option<&TensorTable>,
) -> Result<Client, ClientError> {
    let config = ClientConfig {
        address: format!("127.0.0.1:{}", server.address().port()),
        worker_id: Some(id.into()),
        token: token.map(Into::into),
        run_id: None,
        in_flight: 1,
        connect_timeout: DEADLINE,
        patience: Some(Duration::ZERO),
    };
    Client::connect(config, table, &NEVER)
}

/// One connection, frame by frame.
pub struct Raw {
    pub stream: TcpStream,
    pub received: u64,
    /// Of the run, as joining told it.
    pub epoch: u32,
}

impl Raw {
    pub fn connect(address: SocketAddr) -> Self {
        Self::of(TcpStream::connect(("127.0.0.1", address.port())).unwrap())
    }

    pub fn of(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Self { stream, received: 0, epoch: 0 }
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    pub fn frame(&mut self, header: Header, payload: &[u8]) {
        let mut bytes = header.with_payload(payload).encode().to_vec();
        bytes.extend_from_slice(payload);
        self.write(&bytes).unwrap();
    }

    pub fn send<T: Serialize>(&mut self, kind: Kind, request: u32, message: &T) {
        let mut bytes = vec![];
        encode(message, &mut bytes);
        self.frame(Header { request, ..Header::new(kind) }, &bytes);
    }

    pub fn call(&mut self, request: u32, call: &Call) {
        self.send(Kind::Call, request, call);
    }

    /// The next frame, or `None` at the server's end of the connection (or its reset).
    pub fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut head = [0; HEADER_BYTES];
        match self.stream.read_exact(&mut head) {
            Ok(()) => {}
            Err(e) if [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset].contains(&e.kind()) => {
                return None;
            }
            Err(e) => panic!("no frame came: {e}"),
        }
        let header = Header::decode(&head).unwrap();
        let mut bytes = vec![0; header.payload_len as usize];
        self.stream.read_exact(&mut bytes).unwrap();
        assert_eq!(offbeat_core::checksum::checksum(&bytes), header.payload_checksum);
        Some((header, bytes))
    }

    pub fn expect<T: DeserializeOwned>(&mut self, kind: Kind) -> T {
        let (header, bytes) = self.next().expect("a frame, not the end");
        assert_eq!(header.kind, kind, "{:?}", decode::<Refused>(&bytes));
        decode(&bytes).unwrap()
    }

    /// The refusal that ends the connection.
    pub fn refused(&mut self) -> Refused {
        let refused = self.expect(Kind::Refused);
        self.stream.shutdown(std::net::Shutdown::Write).ok();
        assert!(self.next().is_none(), "nothing follows a fatal refusal");
        refused
    }

    pub fn greet(&mut self, token: Option<&str>, purpose: Purpose) {
        let nonce = [3; 32];
        self.send(Kind::Hello, 0, &Hello { protocol_min: PROTOCOL, protocol_max: PROTOCOL, nonce, purpose });
        let challenge: Challenge = self.expect(Kind::Challenge);
        let proof = token.map(|token| prove(token, Side::Worker, &nonce, &challenge.nonce));
        self.send(Kind::Authenticate, 0, &Authenticate { proof });
    }

    pub fn joined(server: &Server, id: &str) -> (Self, Joined) {
        let mut raw = Self::connect(server.address());
        raw.greet(None, Purpose::Data);
        let _: Welcome = raw.expect(Kind::Welcome);
        raw.send(Kind::Join, 0, &join(id));
        let joined: Joined = raw.expect(Kind::Joined);
        raw.epoch = joined.run.epoch;
        (raw, joined)
    }

    /// The control connection of a session.
    pub fn attached(server: &Server, joined: &Joined) -> Self {
        let mut raw = Self::connect(server.address());
        raw.greet(None, Purpose::Control);
        let _: Welcome = raw.expect(Kind::Welcome);
        raw.send(Kind::Attach, 0, &Attach { incarnation: joined.incarnation, secret: joined.secret });
        assert_eq!(raw.next().unwrap().0.kind, Kind::Attached);
        raw
    }

    pub fn heartbeat(&mut self, progress: u64) {
        self.send(Kind::Heartbeat, 0, &Heartbeat { progress });
    }

    pub fn event(&mut self) -> Event {
        self.expect(Kind::Event)
    }

    pub fn reply(&mut self) -> Reply {
        self.expect(Kind::Reply)
    }

    /// The head of a push based on `at`.
    pub fn push_head(&mut self, sequence: u64, at: (u64, u64), want: Want, have: Option<&[u64]>) {
        let have = have.map(Versions::Numbers);
        let request =
            PushRequest { epoch: self.epoch, samples: 1, norm: None, want, answered: 0, present: None, have };
        let mut bytes = vec![];
        request.encode(&mut bytes);
        let request = u32::try_from(sequence).unwrap();
        self.frame(
            Header { request, sequence, term: at.0, version: at.1, ..Header::new(Kind::Push) },
            &bytes,
        );
    }

    /// One fragment of a push whose worker had read `base` of it.
    pub fn fragment(&mut self, sequence: u64, fragment: u32, base: u64, bytes: &[u8]) {
        let header = Header { sequence, fragment, version: base, ..Header::new(Kind::Fragment) };
        self.frame(header, bytes);
    }

    /// A whole push of one value everywhere, all fragments at the same base; returns the roots' headers with their
    /// first value, and the receipt with the term and version now read.
    pub fn push(&mut self, sequence: u64, at: (u64, u64), base: u64, value: f32, want: Want) -> Answer {
        self.push_head(sequence, at, want, None);
        for (i, len) in FRAGMENTS.into_iter().enumerate() {
            self.fragment(sequence, u32::try_from(i).unwrap(), base, &floats(len, value));
        }
        self.answer()
    }

    /// The answer to a push or a pull.
    pub fn answer(&mut self) -> Answer {
        let mut roots = vec![];
        loop {
            let (header, bytes) = self.next().expect("an answer");
            match header.kind {
                Kind::Root => {
                    let unchanged = header.flags & flags::UNCHANGED != 0;
                    assert_eq!(unchanged, bytes.is_empty());
                    let first = bytes.first_chunk().map(|b| f32::from_le_bytes(*b));
                    roots.push((header.version, first));
                }
                Kind::Receipt => {
                    let receipt = Some(decode(&bytes).unwrap());
                    return Answer { roots, receipt, read: (header.term, header.version) };
                }
                Kind::PullEnd => return Answer { roots, receipt: None, read: (header.term, header.version) },
                Kind::Refused => panic!("refused: {:?}", decode::<Refused>(&bytes)),
                other => panic!("{other:?} came"),
            }
        }
    }

    pub fn pull(&mut self, term: u64, have: Option<&[u64]>) -> Answer {
        self.ask_to_pull(term, have);
        self.answer()
    }

    pub fn ask_to_pull(&mut self, term: u64, have: Option<&[u64]>) {
        let mut bytes = vec![];
        PullRequest { have: have.map(Versions::Numbers) }.encode(&mut bytes);
        self.frame(Header { request: 77, term, ..Header::new(Kind::Pull) }, &bytes);
    }
}

pub fn join(id: &str) -> Join {
    Join {
        worker_id: Some(id.into()),
        run_id: None,
        table: None,
        host: "here".into(),
        in_flight: 1,
        back: None,
        attempt: None,
    }
}

#[derive(Debug)]
pub struct Answer {
    /// (version, first value; none if unchanged)
    pub roots: Vec<(u64, Option<f32>)>,
    pub receipt: Option<Receipt>,
    /// (term, version)
    pub read: (u64, u64),
}

impl Answer {
    pub fn receipt(&self) -> &Receipt {
        self.receipt.as_ref().unwrap()
    }
}
