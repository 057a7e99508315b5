//! Opening a connection: try until the time is up, shake hands, say who we are.

use super::address::{ATTEMPT, Failure, any_of, last_words, reach, resolve, time_until};
use super::attempt;
use super::error::ClientError;
use crate::fork::ClosedInChildren;
use crate::frame::{FrameError, FrameReader, Socket};
use crate::handshake::{HandshakeError, expect, greet, random, refused, send};
use crate::token::Token;
use offbeat_core::wire::Kind;
use offbeat_core::wire::header::{MAX_HANDSHAKE_BYTES, MAX_TABLE_BYTES};
use offbeat_core::wire::message::{Attach, Call, Join, Joined, Purpose, Reply};
use socket2::{SockRef, TcpKeepalive};
use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tracing::{debug, warn};

/// As long as can be; a time that far ahead is still a time.
const ENDLESS: Duration = Duration::from_secs(1 << 30);
/// Longest time for a server that has proved itself to hear who we are and to answer; on a slow line a model's table
/// takes a while, both ways.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pauses between attempts grow from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// After so long without a server it is said that there is none yet: who waits wants to know for what.
const SILENT: Duration = Duration::from_secs(1);
/// How often that was to be said of an address since there was a server: one that is tried again and again for hours is
/// told of at doubling distances, and logged as debug between.
static ABSENT: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);
/// A peer that vanished without a word is noticed after idle + retries × interval, where nothing is on its way to it.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(10))
    .with_interval(Duration::from_secs(3))
    .with_retries(3);
/// While something is on its way nothing is probed, and the system goes on sending for a quarter of an hour: that long
/// heartbeats may stay without an acknowledgement. On the control connection alone: a server that only stands still
/// (stopped, moved to another host) acknowledges heartbeats, but has no room for a push, which would count too.
const UNACKNOWLEDGED: Duration = Duration::from_secs(20);

/// Counts one more call that found no server there.
fn count_absent(address: &str) -> u64 {
    let mut all = ABSENT.lock().unwrap_or_else(PoisonError::into_inner);
    let num = all.get_or_insert_default().entry(address.to_owned()).or_default();
    *num += 1;
    *num
}

fn forget_absent(address: &str) {
    if let Some(all) = ABSENT.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
        all.remove(address);
    }
}

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
    pub(super) token: Option<Token>,
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
                Ok(opened) => {
                    forget_absent(&self.address);
                    return Ok(opened);
                }
                Err(failure) => failure.unless_final(was_there)?,
            };
            was_there |= failure.accepted();
            let failure = last_words(told, failure);
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
                        ClientError::Timeout { address, waited }
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
                if count_absent(address).is_power_of_two() {
                    warn!("no server at {address} yet ({failure}); trying {until}");
                } else {
                    debug!("no server at {address} yet ({failure}); trying {until}");
                }
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
            // Each try says when it was made: the server may hear of one that broke off after the next.
            let join = Join { attempt: Some(attempt::now()?), ..(*join).clone() };
            send(socket, Kind::Join, 0, &join).await?;
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

/// This machine's name, for the server's status; empty where the system does not tell.
pub(super) fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_silence_is_what_is_left_when_somebody_has_accepted() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let left = Duration::from_millis(400);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap(); // accepts in the kernel
        let target = Target { address: listener.local_addr().unwrap().to_string(), at: None, token: None };
        match runtime.block_on(target.attempt(&Opening::Status, left)) {
            Err(Failure::Silent(waited)) => assert!(waited < left, "to connect took some: {waited:?}"),
            other => panic!("{:?}", other.err()),
        }
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
}
