//! From a name to somebody who answers there: its addresses, one after the other, and what each try found.

use super::error::ClientError;
use crate::fork::ClosedInChildren;
use crate::limits::explained;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use std::{fmt, io};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Longest wait for an address to accept, and then to prove itself, before the next address or the next try.
pub(super) const ATTEMPT: Duration = Duration::from_secs(5);
/// A silence that was shorter says nothing of the server: the way to it may take as long.
const TELLING: Duration = Duration::from_secs(1);

/// An attempt that failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Trying again may help.
    Again(String),
    /// Somebody accepted, and broke it off; trying again may help.
    Broken(String),
    /// Nothing was heard for so long (of one address; another may have said no), and then there was no more time;
    /// trying again may help.
    OutOfTime {
        cause: String,
        waited: Duration,
        accepted: bool,
    },
    /// The server is there, but said nothing for so long.
    Silent(Duration),
    /// What answered is no server of ours, and nobody else accepted: final, unless somebody else has been there before.
    Stranger(ClientError),
    Final(ClientError),
}

impl Failure {
    /// Tells a failure after which trying again may help from one that is final. `was_there`: somebody accepted in a
    /// try before who may be a server of ours, and is being started again.
    pub(super) fn unless_final(self, was_there: bool) -> Result<Self, ClientError> {
        match self {
            Self::Final(error) => Err(error),
            Self::Stranger(error) if !was_there => Err(error),
            failure => Ok(failure),
        }
    }

    /// Whether somebody accepted who may be a server of ours.
    pub(super) const fn accepted(&self) -> bool {
        matches!(self, Self::Broken(_) | Self::Silent(_) | Self::OutOfTime { accepted: true, .. })
    }

    /// How long nothing was heard.
    const fn silence(&self) -> Option<Duration> {
        match self {
            Self::OutOfTime { waited, .. } | Self::Silent(waited) => Some(*waited),
            Self::Again(_) | Self::Broken(_) | Self::Stranger(_) | Self::Final(_) => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Again(cause)
            | Self::Broken(cause)
            | Self::OutOfTime { cause, .. }
            | Self::Stranger(ClientError::Protocol { cause, .. })
            | Self::Final(ClientError::Protocol { cause, .. }) => f.write_str(cause),
            Self::Silent(_) => f.write_str("something there accepts, and says nothing"),
            Self::Stranger(error) | Self::Final(error) => error.fmt(f),
        }
    }
}

/// What is told of the tries so far. The last one may have had only what was left of the time: where that was too
/// little to hear anything, one before knows more.
pub(super) fn last_words(before: Option<Failure>, last: Failure) -> Failure {
    match before {
        Some(before) if last.silence().is_some_and(|waited| waited < TELLING) => before,
        _ => last,
    }
}

pub(super) fn time_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// The addresses of a name, looked up on a thread of its own: the system's resolver can neither be interrupted nor
/// given a limit, and whoever waits for it has both.
pub(super) async fn resolve(
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
            Err(Failure::OutOfTime { cause, waited: limit, accepted: false })
        }
    }
}

/// What the first address gives that gives something. One that swallows what is sent, says nothing or is no server of
/// ours leaves time for the others. Where none gives anything, each is told of.
pub(super) async fn any_of<T>(
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
        Some(waited) => {
            Failure::OutOfTime { cause, waited, accepted: failures.iter().any(Failure::accepted) }
        }
    })
}

/// Connects to an address.
pub(super) async fn reach(
    address: SocketAddr,
    deadline: Instant,
) -> Result<ClosedInChildren<TcpStream>, Failure> {
    let connecting = async {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        connect(ClosedInChildren::new(socket), address).await
    };
    let limit = time_until(deadline).min(ATTEMPT);
    let Ok(reached) = timeout(limit, connecting).await else {
        let cause = format!("no answer within {:.1} s", limit.as_secs_f64());
        return Err(Failure::OutOfTime { cause, waited: limit, accepted: false });
    };
    reached.map_err(|error| Failure::Again(explained(&error)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket as Socket2, Type};
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
        let late = |millis| {
            let (cause, waited) = ("no answer".into(), Duration::from_millis(millis));
            Failure::OutOfTime { cause, waited, accepted: false }
        };
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
            Err(Failure::OutOfTime { waited, .. }) => {
                assert!(waited <= left / 2, "each had half: {waited:?}");
            }
            other => panic!("{other:?}"),
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
        assert!(matches!(swallowed, Err(Failure::OutOfTime { .. })), "it does not swallow");
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
            Failure::OutOfTime { cause: told, waited, accepted: true } => {
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
    fn a_stranger_is_final_unless_somebody_else_was_there_before() {
        let stranger = || {
            let (address, cause) = ("two".into(), "no Offbeat frame".into());
            Failure::Stranger(ClientError::Protocol { address, cause })
        };
        let waited = Duration::from_secs(5);
        let late = |accepted| Failure::OutOfTime { cause: "no answer".into(), waited, accepted };
        let refused = || Failure::Again("refused".into());
        for (before, is_final) in [
            (refused(), true),
            (late(false), true),
            (late(true), false),
            (Failure::Silent(waited), false),
            (Failure::Broken("it hung up".into()), false),
        ] {
            let was_there = before.accepted();
            assert!(before.unless_final(false).is_ok());
            assert_eq!(stranger().unless_final(was_there).is_err(), is_final);
            assert!(Failure::Final(ClientError::Closed).unless_final(was_there).is_err());
        }
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
    fn a_name_that_nobody_answers_for_is_waited_for_within_the_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (answer, answered) = mpsc::channel::<()>();
        let limit = Duration::from_millis(50);
        let look_up = move |_: &str| {
            answered.recv().ok(); // a name server that is silent until the test is over
            Ok(Vec::new())
        };
        match runtime.block_on(resolve("somewhere.invalid:1", limit, look_up)) {
            Err(Failure::OutOfTime { cause, waited, accepted: false }) => {
                assert!(waited == limit && cause.contains("no answer within 0.1 s"), "{cause}");
            }
            other => panic!("it did not wait for the name: {other:?}"),
        }
        drop(answer);
    }
}
