//! Connections that prove nothing: they cost little, are cut off, and keep nobody from his work. Here, where memory is
//! counted.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use offbeat_core::dtype::Dtype;
use offbeat_core::spec::{Group, OptimizerSpec, Rule};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use offbeat_core::wire::header::MAX_HANDSHAKE_BYTES;
use offbeat_core::wire::message::{Hello, Purpose};
use offbeat_core::wire::{HEADER_BYTES, Header, Kind, PROTOCOL, encode};
use offbeat_fuzz::memory::{Counting, total};
use offbeat_net::client::{Client, ClientConfig, Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

#[global_allocator]
static MEMORY: Counting = Counting;

/// No test waits longer for anything.
const DEADLINE: Duration = Duration::from_secs(40);
const TOKEN: &str = "of the run";
/// What a connection may hold before it has proved itself.
const MAX_PENDING_BYTES: usize = 64 << 10;
const IDLE: usize = 1000;
const SLOW: usize = 200;
/// An honest worker's share of both sides' memory, of this small model.
const WORKER_BYTES: usize = 1 << 20;
const PUSHES: u64 = 300;

/// What the whole process holds is one test's at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn start(config: ServerConfig) -> Server {
    let (name, shape) = ("w".to_owned(), vec![10]);
    let spec = TensorSpec { name, aliases: vec![], shape, dtype: Dtype::F32, role: Role::Parameter };
    let rule =
        Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    let groups = vec![Group { pattern: "*".into(), lr: 1.0, rule }];
    let optimizer = Some(OptimizerSpec { groups, momentum_correction: false });
    let config = ServerConfig {
        host: Some("127.0.0.1".into()),
        token: Some(TOKEN.into()),
        optimizer,
        num_data_threads: Some(1),
        ..config
    };
    let table = TensorTable::new(vec![spec]).unwrap();
    Server::with_model(config, Snapshot::of(table, &[vec![0; 40]]).unwrap()).unwrap()
}

/// A worker that has pulled.
fn worker(server: &Server) -> Client {
    let config = ClientConfig {
        address: server.address().to_string(),
        worker_id: None,
        token: Some(TOKEN.into()),
        run_id: None,
        in_flight: 1,
        connect_timeout: DEADLINE,
        patience: Some(Duration::ZERO),
    };
    let mut client = Client::connect(config, None, &|| false).unwrap();
    client.pull(&[Memory::of(&mut [0; 40])], false, &|| false).unwrap();
    client
}

/// Each push moves every parameter by one.
fn push(client: &mut Client, times: u64) {
    let mut ones = 1_f32.to_le_bytes().repeat(10);
    for _ in 0..times {
        let values = [Some(Memory::of(&mut ones))];
        let input = PushInput { values: &values, samples: 1 };
        assert!(client.push(input, &|| false).unwrap().applied);
    }
}

fn connect(server: &Server) -> TcpStream {
    TcpStream::connect(server.address()).unwrap()
}

/// Every descriptor that we may have.
fn many_files() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit }).unwrap();
    let enough = (IDLE + SLOW + 200) as u64;
    assert!(limit.maximum.is_none_or(|most| most >= enough), "the machine allows {:?} files", limit.maximum);
}

fn waits(stream: &TcpStream) -> bool {
    matches!(stream.peek(&mut [0]), Err(e) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&e.kind()))
}

#[test]
fn a_thousand_idle_and_two_hundred_slow_connections_keep_no_worker_from_its_work() {
    let _alone = ALONE.lock();
    many_files();
    let server = start(ServerConfig { handshake_timeout: Duration::from_secs(2), ..ServerConfig::default() });
    let mut worker_before = worker(&server);
    let before = total();
    let idle: Vec<_> = (0..IDLE).map(|_| connect(&server)).collect();
    let mut slow: Vec<_> = (0..SLOW).map(|_| connect(&server)).collect();
    for stream in &slow {
        stream.set_nonblocking(true).unwrap();
    }
    let ours = idle.capacity() + slow.capacity();
    let (stop, clock) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let drip = scope.spawn(move || {
            // A header that never ends, a byte now and then.
            let header = Header { payload_len: 90, ..Header::new(Kind::Hello) }.encode();
            for byte in header[..HEADER_BYTES - 1].iter().cycle() {
                for stream in &mut slow {
                    stream.write_all(&[*byte]).ok(); // it may be over
                }
                if clock.recv_timeout(Duration::from_millis(50)) != Err(RecvTimeoutError::Timeout) {
                    return slow;
                }
            }
            unreachable!("a cycle has no end")
        });
        push(&mut worker_before, PUSHES);
        let mut newcomer = worker(&server);
        push(&mut newcomer, PUSHES);
        let held = total() - before - ours * size_of::<TcpStream>();
        let most = ServerConfig::default().max_pending * MAX_PENDING_BYTES + WORKER_BYTES;
        assert!(held <= most, "{held} bytes are held, {most} were due at most");
        // All are cut off while the slow ones still drip.
        let end = Instant::now() + DEADLINE;
        for mut stream in idle {
            stream.set_read_timeout(Some(end.saturating_duration_since(Instant::now()))).unwrap();
            let ended = stream.read(&mut [0]);
            assert!(!matches!(&ended, Ok(1..)) && !waits(&stream), "one is left alone: {ended:?}");
        }
        push(&mut worker_before, 1);
        push(&mut newcomer, 1);
        stop.send(()).unwrap();
        for stream in drip.join().unwrap() {
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            assert!(!waits(&stream), "one is left alone");
        }
    });
    let (_, tensors) = server.tensors().unwrap().unwrap();
    let due = -((2 * PUSHES + 2) as f32);
    assert!(tensors[0].as_chunks().0.iter().all(|b| f32::from_le_bytes(*b) == due));
}

#[test]
fn a_connection_that_has_not_proved_itself_holds_64_kib_at_most() {
    let _alone = ALONE.lock();
    let pending = ServerConfig::default().max_pending;
    let server = start(ServerConfig { handshake_timeout: DEADLINE * 2, ..ServerConfig::default() });
    worker(&server);
    let before = total();
    let (protocol_min, protocol_max, purpose) = (PROTOCOL, PROTOCOL, Purpose::Data);
    let mut hello = vec![];
    encode(&Hello { protocol_min, protocol_max, nonce: [3; 32], purpose }, &mut hello);
    let frame = [&Header::new(Kind::Hello).with_payload(&hello).encode()[..], &hello].concat();
    let answer = Header { payload_len: MAX_HANDSHAKE_BYTES, ..Header::new(Kind::Authenticate) }.encode();
    let most_of_it = vec![0; MAX_HANDSHAKE_BYTES as usize - 1];
    let ask = || {
        let mut stream = connect(&server);
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(&frame).unwrap();
        stream.read_exact(&mut [0; HEADER_BYTES]).unwrap();
        stream.write_all(&answer).unwrap();
        stream.write_all(&most_of_it).unwrap();
        stream
    };
    let streams: Vec<_> = (0..pending).map(|_| ask()).collect();
    // Until the server has read them: each is held.
    let (_never, clock) = mpsc::channel::<()>();
    let end = Instant::now() + DEADLINE;
    while total() - before < pending * MAX_HANDSHAKE_BYTES as usize {
        assert!(Instant::now() < end, "{} bytes are held for {pending} connections", total() - before);
        clock.recv_timeout(Duration::from_millis(5)).ok();
    }
    let each = (total() - before) / pending;
    assert!(each <= MAX_PENDING_BYTES, "{each} bytes for a connection that has proved nothing");
    drop(streams);
}
