//! Opening a connection: find the address, try until the time is up, shake hands, say who we are.

use super::error::ClientError;
use crate::fork::ClosedInChildren;
use crate::frame::{FrameError, FrameReader, Socket};
use crate::handshake::{HandshakeError, expect, greet, random, refused, send};
use offbeat_core::wire::Kind;
use offbeat_core::wire::header::{MAX_HANDSHAKE_BYTES, MAX_TABLE_BYTES};
use offbeat_core::wire::message::{Attach, Call, Join, Joined, Purpose, Reply};
use socket2::{SockRef, TcpKeepalive};
use std::collections::HashSet;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};
use std::{fmt, io};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::warn;

/// As long as can be; a time that far ahead is still a time.
const ENDLESS: Duration = Duration::from_secs(1 << 30);
/// Longest wait for an address to accept, and then to prove itself, before the next address or the next try.
pub(super) const ATTEMPT: Duration = Duration::from_secs(5);
/// Longest time for a server that has proved itself to hear who we are and to answer; on a slow line a model's table
/// takes a while, both ways.
const PATIENCE: Duration = Duration::from_secs(30);
/// A silence that was shorter says nothing of the server: the way to it may take as long.
const TELLING: Duration = Duration::from_secs(1);
/// Pauses between attempts grow from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// After so long without a server it is said that there is none yet: who waits wants to know for what.
const SILENT: Duration = Duration::from_secs(1);
/// A peer that vanished without a word is noticed after idle + retries × interval, where nothing is on its way to it.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(10))
    .with_interval(Duration::from_secs(3))
    .with_retries(3);
/// While something is on its way nothing is probed, and the system goes on sending for a quarter of an hour: that long
/// heartbeats may stay without an acknowledgement. On the control connection alone: a server that only stands still
/// (stopped, moved to another host) acknowledges heartbeats, but has no room for a push, which would count too.
const UNACKNOWLEDGED: Duration = Duration::from_secs(20);

/// What a connection begins with, after the handshake.
#[derive(Debug)]
pub(super) enum Opening<'a> {
    Data(&'a Join),
    Control(Attach),
    Status,
}

/// What the server answered.
#[derive(Debug)]
pub(super) enum Opened {
    Data(Box<Joined>),
    Control,
    Status(String),
}

/// Where to and with what.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// As it was given, and as errors name it.
    pub(super) address: String,
    /// What it stands for, if that is known.
    pub(super) at: Option<SocketAddr>,
    pub(super) token: Option<String>,
}

/// An attempt that failed.
#[derive(Debug)]
enum Failure {
    /// Trying again may help.
    Again(String),
    /// Somebody accepted, and broke it off; trying again may help.
    Broken(String),
    /// Nothing was heard for so long (of one address; another may have said no), and then there was no more time;
    /// trying again may help.
    OutOfTime(String, Duration),
    /// The server is there, but said nothing for so long.
    Silent(Duration),
    /// What answered is no server of ours, and nobody else accepted: final, unless somebody else has been there before.
    Stranger(ClientError),
    Final(ClientError),
}

impl Failure {
    /// How long nothing was heard.
    const fn silence(&self) -> Option<Duration> {
        match self {
            Self::OutOfTime(_, waited) | Self::Silent(waited) => Some(*waited),
            Self::Again(_) | Self::Broken(_) | Self::Stranger(_) | Self::Final(_) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Again(cause)
            | Self::Broken(cause)
            | Self::OutOfTime(cause, _)
            | Self::Stranger(ClientError::Protocol { cause, .. })
            | Self::Final(ClientError::Protocol { cause, .. }) => f.write_str(cause),
            Self::Silent(_) => f.write_str("something there accepts, and says nothing"),
            Self::Stranger(error) | Self::Final(error) => error.fmt(f),
        }
    }
}

/// What is told of the tries so far. The last one may have had only what was left of the time: where that was too
/// little to hear anything, one before knows more.
fn last_words(before: Option<Failure>, last: Failure) -> Failure {
    match before {
        Some(before) if last.silence().is_some_and(|waited| waited < TELLING) => before,
        _ => last,
    }
}

impl Target {
    /// Connects, trying again until `limit`.
    ///
    /// # Cancel safety
    /// Safe: a connection that was being opened is closed.
    pub(super) async fn open(
        &self,
        opening: &Opening<'_>,
        limit: Duration,
    ) -> Result<(Socket, FrameReader, Opened), ClientError> {
        let begun = Instant::now();
        let limit = limit.min(ENDLESS);
        let mut pause = PAUSES.0;
        let mut attempts = 0;
        let mut is_warned = false;
        let mut told = None;
        let mut silent_since = None;
        let mut was_there = false;
        loop {
            attempts += 1;
            let tried_at = Instant::now();
            let left = limit.saturating_sub(begun.elapsed()).max(PAUSES.0);
            let failure = match self.attempt(opening, left).await {
                Ok(opened) => return Ok(opened),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Stranger(error)) if !was_there => return Err(error),
                Err(failure) => {
                    // It may be one of ours, which is being started again.
                    was_there |= matches!(failure, Failure::Broken(_) | Failure::Silent(_));
                    last_words(told, failure)
                }
            };
            let silent_from = *silent_since.get_or_insert(tried_at);
            if !matches!(failure, Failure::Silent(_)) {
                silent_since = None;
            }
            let waited = begun.elapsed();
            if waited >= limit {
                let address = self.address.clone();
                return Err(match failure {
                    Failure::Silent(_) => {
                        let waited = silent_from.elapsed();
                        ClientError::Timeout { address, what: "its handshake", waited }
                    }
                    failure => {
                        ClientError::Unreachable { address, attempts, waited, cause: failure.to_string() }
                    }
                });
            }
            if waited >= SILENT && !is_warned {
                is_warned = true;
                let address = &self.address;
                let until = match limit {
                    ENDLESS => "until there is one".to_owned(),
                    _ => format!("for up to {:.0} s", limit.as_secs_f64()),
                };
                warn!("no server at {address} yet ({failure}); trying {until}");
            }
            // Workers that lost one server must not come back in step.
            let jitter = random::<1>().map_or(0.5, |[byte]| f64::from(byte) / 255.0);
            // The last try is at the limit.
            let nap = pause.mul_f64(0.75 + jitter / 2.0).min(limit.saturating_sub(waited));
            tokio::time::sleep(nap).await;
            pause = (pause * 2).min(PAUSES.1);
            told = Some(failure);
        }
    }

    async fn attempt(
        &self,
        opening: &Opening<'_>,
        left: Duration,
    ) -> Result<(Socket, FrameReader, Opened), Failure> {
        let deadline = Instant::now() + left;
        let addresses = match self.at {
            Some(known) => vec![known],
            None => resolve(&self.address, left, |name| Ok(name.to_socket_addrs()?.collect())).await?,
        };
        any_of(&self.address, &addresses, deadline, async |address, deadline| {
            let stream = reach(address, deadline).await?;
            let limit = time_until(deadline).min(ATTEMPT);
            let (socket, mut reader) = self.within(limit, self.greet(stream, opening)).await?;
            // A server of ours has answered, and may take its time; of an Attach that it may have heard, all there is: to
            // hang up after that is to leave.
            let left = time_until(deadline);
            let limit = if matches!(opening, Opening::Control(_)) { left } else { left.min(PATIENCE) };
            let opened = self.within(limit, say_who_we_are(&socket, &mut reader, opening)).await?;
            Ok((socket, reader, opened))
        })
        .await
    }

    /// Waits for a part of the handshake, for so long.
    async fn within<T>(
        &self,
        limit: Duration,
        part: impl Future<Output = Result<T, HandshakeError>>,
    ) -> Result<T, Failure> {
        match timeout(limit, part).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(HandshakeError::Frame(error @ (FrameError::Io(_) | FrameError::Closed { .. })))) => {
                Err(Failure::Broken(error.to_string()))
            }
            Ok(Err(error)) => Err(Failure::Final(ClientError::from_handshake(&self.address, error))),
            Err(_) => Err(Failure::Silent(limit)),
        }
    }

    async fn greet(
        &self,
        stream: ClosedInChildren<TcpStream>,
        opening: &Opening<'_>,
    ) -> Result<(Socket, FrameReader), HandshakeError> {
        SockRef::from(&*stream).set_tcp_keepalive(&KEEPALIVE)?;
        if matches!(opening, Opening::Control(_)) {
            SockRef::from(&*stream).set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
        }
        let socket = Socket::of(stream)?;
        let mut reader = FrameReader::default();
        let purpose = match opening {
            Opening::Data(_) => Purpose::Data,
            Opening::Control(_) => Purpose::Control,
            Opening::Status => Purpose::Status,
        };
        greet(&socket, &mut reader, self.token.as_deref(), purpose).await?;
        Ok((socket, reader))
    }
}

/// Says what the connection is for, and who is at this end.
async fn say_who_we_are(
    socket: &Socket,
    reader: &mut FrameReader,
    opening: &Opening<'_>,
) -> Result<Opened, HandshakeError> {
    match opening {
        Opening::Data(join) => {
            send(socket, Kind::Join, 0, join).await?;
            let joined = expect(socket, reader, Kind::Joined, MAX_TABLE_BYTES).await?;
            Ok(Opened::Data(Box::new(joined)))
        }
        Opening::Control(attach) => {
            send(socket, Kind::Attach, 0, attach).await?;
            let header = reader.header(socket).await?;
            if let Some(refused) = refused(socket, reader, &header, MAX_HANDSHAKE_BYTES).await? {
                return Err(HandshakeError::Refused(refused));
            }
            if header.kind != Kind::Attached {
                let cause = format!("Attached was due, a {:?} frame came", header.kind);
                return Err(HandshakeError::OutOfPlace(cause));
            }
            Ok(Opened::Control)
        }
        Opening::Status => {
            send(socket, Kind::Call, 1, &Call::Status).await?;
            match expect(socket, reader, Kind::Reply, MAX_TABLE_BYTES).await? {
                Reply::Status { json } => Ok(Opened::Status(json)),
                other => {
                    let cause = format!("a status was due, {other:?} came");
                    Err(HandshakeError::OutOfPlace(cause))
                }
            }
        }
    }
}

fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// The addresses of a name, looked up on a thread of its own: the system's resolver can neither be interrupted nor
/// given a limit, and whoever waits for it has both.
async fn resolve(
    name: &str,
    limit: Duration,
    look_up: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> Result<Vec<SocketAddr>, Failure> {
    let port = name.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    if port.is_some_and(|(_, port)| port.parse() == Ok(0_u16)) {
        let message = format!("{name:?} is not an address: no server listens at port 0");
        return Err(Failure::Final(ClientError::bad_input(message)));
    }
    if let Ok(address) = name.parse() {
        return Ok(vec![address]);
    }
    if name.contains('/') || name.contains(char::is_whitespace) {
        let message =
            format!("{name:?} is not an address; give HOST:PORT, without a scheme, a path or spaces");
        return Err(Failure::Final(ClientError::bad_input(message)));
    }
    let (found, finding) = oneshot::channel();
    let of_thread = name.to_owned();
    let thread = std::thread::Builder::new().name("offbeat-resolve".into()).spawn(move || {
        drop(found.send(look_up(&of_thread))); // whoever asked may have gone
    });
    thread.map_err(|e| Failure::Again(e.to_string()))?;
    match timeout(limit, finding).await {
        Ok(Ok(Ok(addresses))) => Ok(addresses),
        Ok(Ok(Err(error))) if error.kind() == io::ErrorKind::InvalidInput || name.starts_with(':') => {
            let message = format!("{name:?} is not an address; give HOST:PORT");
            Err(Failure::Final(ClientError::bad_input(message)))
        }
        Ok(Ok(Err(error))) => Err(Failure::Again(error.to_string())),
        Ok(Err(_)) => Err(Failure::Again("the name could not be looked up".into())),
        Err(_) => {
            let seconds = limit.as_secs_f64();
            let cause = format!("looking up the name gave no answer within {seconds:.1} s");
            Err(Failure::OutOfTime(cause, limit))
        }
    }
}

/// What the first address gives that gives something. One that swallows what is sent, says nothing or is no server of
/// ours leaves time for the others. Where none gives anything, each is told of.
async fn any_of<T>(
    name: &str,
    addresses: &[SocketAddr],
    deadline: Instant,
    try_one: impl AsyncFn(SocketAddr, Instant) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut tried = HashSet::new();
    let addresses: Vec<_> = addresses.iter().filter(|address| tried.insert(**address)).collect();
    let mut failures = Vec::new();
    for (address, tries) in addresses.iter().zip((1..=addresses.len()).rev()) {
        let share = time_until(deadline) / u32::try_from(tries).unwrap_or(u32::MAX);
        match try_one(**address, Instant::now() + share).await {
            // What is no server of ours says nothing of the next address.
            Err(failure @ Failure::Final(ClientError::Protocol { .. })) => failures.push(failure),
            Err(Failure::Final(error)) => return Err(Failure::Final(error)),
            Err(failure) => failures.push(failure),
            Ok(given) => return Ok(given),
        }
    }
    let told = addresses.iter().zip(&failures).map(|(address, failure)| format!("{address}: {failure}"));
    let cause = told.collect::<Vec<_>>().join("; ");
    let all = |is: fn(&Failure) -> bool| failures.iter().all(is);
    let silence = failures.iter().filter_map(Failure::silence).max();
    let is_settled = failures.iter().any(|failure| matches!(failure, Failure::Final(_)));
    Err(match silence {
        _ if failures.is_empty() => Failure::Again("the name has no address".into()),
        _ if failures.len() == 1 && is_settled => failures.remove(0),
        // Nobody else has accepted who may be a server of ours.
        None if is_settled && all(|failure| matches!(failure, Failure::Final(_) | Failure::Again(_))) => {
            Failure::Stranger(ClientError::Protocol { address: name.to_owned(), cause })
        }
        None if all(|failure| matches!(failure, Failure::Again(_))) => Failure::Again(cause),
        None => Failure::Broken(cause),
        Some(waited) if all(|failure| matches!(failure, Failure::Silent(_))) => Failure::Silent(waited),
        Some(waited) => Failure::OutOfTime(cause, waited),
    })
}

/// Connects to an address.
async fn reach(address: SocketAddr, deadline: Instant) -> Result<ClosedInChildren<TcpStream>, Failure> {
    let connecting = async {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        connect(ClosedInChildren::new(socket), address).await
    };
    let limit = time_until(deadline).min(ATTEMPT);
    match timeout(limit, connecting).await {
        Ok(reached) => reached.map_err(|error| Failure::Again(error.to_string())),
        Err(_) => Err(Failure::OutOfTime(format!("no answer within {:.1} s", limit.as_secs_f64()), limit)),
    }
}

/// Connects; closed in children that are forked meanwhile too.
async fn connect(
    socket: ClosedInChildren<TcpSocket>,
    address: SocketAddr,
) -> io::Result<ClosedInChildren<TcpStream>> {
    let stream = socket.try_map_async(|socket| socket.connect(address)).await?;
    if stream.local_addr()? == stream.peer_addr()? {
        // Where nobody listens, a port of those that the system hands out may come to meet itself.
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

/// This machine's name, for the server's status; empty where the system does not tell.
pub(super) fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket as Socket2, Type};
    use std::io::Write;
    use std::sync::mpsc;

    /// An address that swallows what is sent to it while the rest is kept: the system drops what comes to a listener
    /// whose queue is full.
    fn swallowing() -> (SocketAddr, (Socket2, std::net::TcpStream)) {
        let full = Socket2::new(Domain::IPV4, Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        full.listen(0).unwrap();
        let address = full.local_addr().unwrap().as_socket().unwrap();
        let queued = std::net::TcpStream::connect(address).unwrap();
        (address, (full, queued))
    }

    #[test]
    fn what_is_no_address_is_refused_without_looking_it_up() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for (name, told) in [
            ("http://localhost:5000", "give HOST:PORT"),
            ("localhost:5000/run", "give HOST:PORT"),
            ("local host:5000", "give HOST:PORT"),
            ("localhost:0", "no server listens at port 0"),
            ("127.0.0.1:0", "no server listens at port 0"),
            ("[::1]:00", "no server listens at port 0"),
            ("::1:0", "no server listens at port 0"),
        ] {
            let look_up = |_: &str| -> io::Result<Vec<SocketAddr>> { panic!("it was looked up") };
            match runtime.block_on(resolve(name, Duration::from_secs(60), look_up)) {
                Err(Failure::Final(error)) => {
                    assert!(error.to_string().contains(told), "{error}");
                }
                other => panic!("{name} was not refused: {other:?}"),
            }
        }
    }

    #[test]
    fn the_last_words_are_those_of_a_try_that_had_time() {
        let refused = || Failure::Again("refused".into());
        let late = |millis| Failure::OutOfTime("no answer".into(), Duration::from_millis(millis));
        let silent = |millis| Failure::Silent(Duration::from_millis(millis));
        let told = |before, last| last_words(before, last).to_string();
        assert_eq!(told(Some(refused()), late(50)), "refused");
        assert_eq!(told(Some(refused()), silent(999)), "refused");
        assert_eq!(told(Some(silent(5000)), late(50)), silent(0).to_string());
        assert_eq!(told(Some(silent(5000)), refused()), "refused");
        assert_eq!(told(Some(refused()), late(1000)), "no answer");
        assert_eq!(told(Some(refused()), silent(5000)), silent(0).to_string());
        assert_eq!(told(None, late(50)), "no answer");
    }

    #[test]
    fn a_silence_is_as_long_as_its_part_of_the_try() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let ((one, _one), (other, _other)) = (swallowing(), swallowing());
        let left = Duration::from_millis(400);
        match runtime.block_on(any_of("two", &[one, other], Instant::now() + left, reach)) {
            Err(Failure::OutOfTime(_, waited)) => assert!(waited <= left / 2, "each had half: {waited:?}"),
            other => panic!("{other:?}"),
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap(); // accepts in the kernel
        let target = Target { address: listener.local_addr().unwrap().to_string(), at: None, token: None };
        match runtime.block_on(target.attempt(&Opening::Status, left)) {
            Err(Failure::Silent(waited)) => assert!(waited < left, "to connect took some: {waited:?}"),
            other => panic!("{:?}", other.err()),
        }
    }

    #[test]
    fn an_address_that_swallows_everything_leaves_time_for_the_next() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (swallows, _full) = swallowing();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let answers = listener.local_addr().unwrap();
        let deadline = Instant::now() + Duration::from_secs(4);
        let reached = runtime.block_on(any_of("two", &[swallows, answers], deadline, reach)).unwrap();
        assert_eq!(reached.peer_addr().unwrap(), answers);
        assert!(!time_until(deadline).is_zero(), "the first had all of the time");
        let swallowed = runtime.block_on(any_of("one", &[swallows], Instant::now() + TELLING, reach));
        assert!(matches!(swallowed, Err(Failure::OutOfTime(..))), "it does not swallow");
    }

    #[test]
    fn of_several_addresses_each_is_told_of_once() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // What is bound and does not listen refuses.
        let refusing = || {
            let socket = Socket2::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
            (socket.local_addr().unwrap().as_socket().unwrap(), socket)
        };
        let ((a, _a), (b, _b)) = (refusing(), refusing());
        let told = |addresses: &[SocketAddr], millis| {
            let deadline = Instant::now() + Duration::from_millis(millis);
            runtime.block_on(any_of("several", addresses, deadline, reach)).map(drop).unwrap_err()
        };
        let refused = "Connection refused (os error 111)";
        match told(&[a, b, a], 20_000) {
            Failure::Again(cause) => assert_eq!(cause, format!("{a}: {refused}; {b}: {refused}")),
            other => panic!("{other:?}"),
        }
        // The first had less than a second: in the try before it may have said more.
        let (swallows, _full) = swallowing();
        let short = told(&[swallows, b], 1600);
        let cause = short.to_string();
        assert!(cause.starts_with(&format!("{swallows}: no answer within 0.")), "{cause}");
        assert!(cause.ends_with(&format!(" s; {b}: {refused}")), "{cause}");
        assert_eq!(last_words(Some(Failure::Again("before".into())), short).to_string(), "before");
        assert_eq!(told(&[], 100).to_string(), "the name has no address");
    }

    #[test]
    fn what_is_no_server_of_ours_leaves_the_next_address_to_be_tried() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let [one, other] = [1, 2].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let stranger = || {
            let (address, cause) = ("there".into(), "no Offbeat frame".into());
            Failure::Final(ClientError::Protocol { address, cause })
        };
        let failures = |first: fn() -> Failure, second: fn() -> Failure| {
            let try_one = async |address, _| Err::<(), _>(if address == one { first() } else { second() });
            let deadline = Instant::now() + Duration::from_secs(60);
            runtime.block_on(any_of("two", &[one, other], deadline, try_one)).unwrap_err()
        };
        let both = |second: &str| format!("127.0.0.1:1: no Offbeat frame; 127.0.0.1:2: {second}");
        // Somebody was there who may be a server of ours.
        match failures(stranger, || Failure::Broken("it hung up".into())) {
            Failure::Broken(told) => assert_eq!(told, both("it hung up")),
            other => panic!("{other:?}"),
        }
        match failures(stranger, || Failure::Silent(Duration::from_secs(5))) {
            Failure::OutOfTime(told, waited) => {
                assert_eq!(told, both("something there accepts, and says nothing"));
                assert_eq!(waited, Duration::from_secs(5));
            }
            other => panic!("{other:?}"),
        }
        for (second, told) in [
            (stranger as fn() -> Failure, "no Offbeat frame"),
            (|| Failure::Again("refused".into()), "refused"),
        ] {
            match failures(stranger, second) {
                Failure::Stranger(ClientError::Protocol { address, cause }) => {
                    assert_eq!((address.as_str(), cause), ("two", both(told)));
                }
                other => panic!("{other:?}"),
            }
        }
        for failure in [
            failures(|| Failure::Final(ClientError::Closed), || panic!("it was settled before")),
            failures(stranger, || Failure::Final(ClientError::Closed)),
        ] {
            assert!(matches!(failure, Failure::Final(ClientError::Closed)), "{failure:?}");
        }
        let silent = || Failure::Silent(Duration::from_secs(5));
        assert!(matches!(failures(silent, silent), Failure::Silent(_)));
    }

    #[test]
    fn an_address_that_accepts_and_hangs_up_leaves_the_next_to_be_tried() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let [one, other] = [1, 2].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        for failure in [|| Failure::Again("it hung up".into()), || Failure::Silent(ATTEMPT)] {
            let try_one = async |address, _| if address == one { Err(failure()) } else { Ok(address) };
            let deadline = Instant::now() + Duration::from_secs(60);
            assert_eq!(runtime.block_on(any_of("two", &[one, other], deadline, try_one)).unwrap(), other);
        }
    }

    #[test]
    fn a_connection_to_itself_is_no_connection() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // From its own port: what the system does by chance where nobody listens.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let met = runtime.block_on(async {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(address).unwrap();
            connect(ClosedInChildren::new(socket), address).await
        });
        assert_eq!(met.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_limit_without_end_is_no_time_to_add() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let answering = std::thread::spawn(move || listener.accept().unwrap().0.write_all(b"SSH-2.0-x\r\n"));
        let target = Target { address, at: None, token: None };
        let refused = runtime.block_on(target.open(&Opening::Status, Duration::MAX)).unwrap_err();
        assert!(matches!(refused, ClientError::Protocol { .. }), "{refused}");
        answering.join().unwrap().unwrap();
    }

    #[test]
    fn a_name_that_nobody_answers_for_is_waited_for_within_the_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (answer, answered) = mpsc::channel::<()>();
        let limit = Duration::from_millis(50);
        let look_up = move |_: &str| {
            answered.recv().ok(); // a name server that is silent until the test is over
            Ok(Vec::new())
        };
        match runtime.block_on(resolve("somewhere.invalid:1", limit, look_up)) {
            Err(Failure::OutOfTime(cause, waited)) => {
                assert!(waited == limit && cause.contains("no answer within 0.1 s"), "{cause}");
            }
            other => panic!("it did not wait for the name: {other:?}"),
        }
        drop(answer);
    }
}
