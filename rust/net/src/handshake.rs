//! The first four frames of every connection, from both ends: which protocol, and that both hold the run's token.
//!
//! ```text
//! worker → Hello { protocols, nonce, purpose }
//!          Challenge { protocol, nonce, proof }  ← server
//! worker → Authenticate { proof }
//!          Welcome                               ← server      (or Refused, and the connection ends)
//! ```
//! A worker that finds the server's proof wrong sends Refused in the place of Authenticate. Until Welcome the server has
//! read at most two messages of 4 KiB and said nothing about its model.

use crate::frame::{FrameError, FrameReader, Socket};
use offbeat_core::wire::auth::{Nonce, Side, prove, verify};
use offbeat_core::wire::header::MAX_HANDSHAKE_BYTES;
use offbeat_core::wire::message::{Authenticate, Challenge, Hello, Purpose, RefusalCode, Refused, Welcome};
use offbeat_core::wire::{Header, HeaderError, Kind, PROTOCOL, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSliceMut};
use std::net::Shutdown;
use std::time::Duration;

/// How long a refused peer has to read why, before the connection is cut.
pub const FAREWELL: Duration = Duration::from_secs(1);

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The two do not share a token: found by the worker, which tells the server.
    #[error("{0}")]
    Authentication(&'static str),
    /// The other side said no; or, on the server, what it was told.
    #[error("{0}")]
    Refused(Refused),
    /// A frame that may not come now.
    #[error("{0}")]
    OutOfPlace(String),
    /// On the server: what came is no frame of ours. None of its bytes are told, which anybody may choose.
    #[error("what came is no Offbeat frame{}", .looks_like.map(|it| format!(": it looks like {it}")).unwrap_or_default())]
    Foreign { looks_like: Option<&'static str> },
    /// On the server: a message that is not what its kind should be; nor are its words told.
    #[error("a {kind:?} message of {bytes} bytes cannot be read")]
    Unreadable { kind: Kind, bytes: u32 },
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        Self::Frame(error.into())
    }
}

/// Random bytes from the operating system.
///
/// # Errors
/// If it has none to give.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Sends one message as one frame.
///
/// # Errors
/// What the operating system says.
///
/// # Cancel safety
/// Not safe, see [`Socket::write_all`].
pub async fn send<T: Serialize>(socket: &Socket, kind: Kind, request: u32, message: &T) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(256);
    encode(message, &mut bytes);
    let header = Header { request, ..Header::new(kind) }.with_payload(&bytes);
    socket.write_frame(&header, &bytes).await
}

/// Receives the one kind of message that may come now, at most `cap` long; a refusal, as long at most, is an error.
///
/// # Errors
/// [`HandshakeError`].
///
/// # Cancel safety
/// Not safe: a message half read is lost.
pub async fn expect<T: DeserializeOwned>(
    socket: &Socket,
    reader: &mut FrameReader,
    kind: Kind,
    cap: u32,
) -> Result<T, HandshakeError> {
    let header = reader.header(socket).await?;
    expected(socket, reader, &header, kind, cap).await
}

/// The same, with the header that has come.
async fn expected<T: DeserializeOwned>(
    socket: &Socket,
    reader: &mut FrameReader,
    header: &Header,
    kind: Kind,
    cap: u32,
) -> Result<T, HandshakeError> {
    if header.kind == kind && header.payload_len <= cap {
        return Ok(decode(reader.message(socket, header).await?).map_err(FrameError::from)?);
    }
    Err(match refused(socket, reader, header, cap).await? {
        Some(refused) => HandshakeError::Refused(refused),
        None => HandshakeError::OutOfPlace(format!(
            "a {kind:?} frame was due, a {:?} frame of {} bytes came",
            header.kind, header.payload_len
        )),
    })
}

/// The refusal that `header` announces, if it announces one, at most `cap` long.
///
/// # Errors
/// [`FrameError`].
///
/// # Cancel safety
/// Not safe: a message half read is lost.
pub async fn refused(
    socket: &Socket,
    reader: &mut FrameReader,
    header: &Header,
    cap: u32,
) -> Result<Option<Refused>, FrameError> {
    if header.kind != Kind::Refused || header.payload_len > cap {
        return Ok(None);
    }
    Ok(Some(decode(reader.message(socket, header).await?)?))
}

/// Opens a connection as a worker.
///
/// # Errors
/// [`HandshakeError`]. The caller bounds the time.
///
/// # Cancel safety
/// Not safe: the connection is of no further use.
pub async fn greet(
    socket: &Socket,
    reader: &mut FrameReader,
    token: Option<&str>,
    purpose: Purpose,
) -> Result<Welcome, HandshakeError> {
    let nonce: Nonce = random()?;
    let hello = Hello { protocol_min: PROTOCOL, protocol_max: PROTOCOL, nonce, purpose };
    send(socket, Kind::Hello, 0, &hello).await?;
    let challenge: Challenge = expect(socket, reader, Kind::Challenge, MAX_HANDSHAKE_BYTES).await?;
    if let Some(token) = token {
        let distrusted = match challenge.proof {
            None => Some(
                "this worker has a token and the server has none: give the server the same token, or this worker none",
            ),
            Some(proof) if verify(token, Side::Server, &nonce, &challenge.nonce, &proof) => None,
            Some(_) => {
                Some("the server's token is not this worker's: give both the same (token= or OFFBEAT_TOKEN)")
            }
        };
        if let Some(message) = distrusted {
            // For the server's log. Nothing of its is unread, so closing does not throw it away.
            let refused =
                Refused { code: RefusalCode::Authentication, message: message.to_owned(), fatal: true };
            if let Err(error) = send(socket, Kind::Refused, 0, &refused).await {
                tracing::debug!(peer = %socket.peer(), %error, "a server was not told that its token is another");
            }
            return Err(HandshakeError::Authentication(message));
        }
    }
    let proof = token.map(|token| prove(token, Side::Worker, &nonce, &challenge.nonce));
    send(socket, Kind::Authenticate, 0, &Authenticate { proof }).await?;
    expect(socket, reader, Kind::Welcome, MAX_HANDSHAKE_BYTES).await
}

/// Opens a connection as the server. What cannot be let in has been told why when this returns an error.
///
/// # Errors
/// [`HandshakeError`]. The caller bounds the time.
///
/// # Cancel safety
/// Not safe: the connection is of no further use.
pub async fn admit(
    socket: &Socket,
    reader: &mut FrameReader,
    token: Option<&str>,
) -> Result<Purpose, HandshakeError> {
    match challenge(socket, reader, token).await {
        Ok(purpose) => Ok(purpose),
        Err(error) => {
            if let Some(refused) = refusal(&error) {
                refuse(socket, 0, refused).await;
            }
            Err(error)
        }
    }
}

async fn challenge(
    socket: &Socket,
    reader: &mut FrameReader,
    token: Option<&str>,
) -> Result<Purpose, HandshakeError> {
    let hello: Hello = hear(socket, reader, Kind::Hello).await.map_err(in_our_words)?;
    if !(hello.protocol_min..=hello.protocol_max).contains(&PROTOCOL) {
        return Err(HandshakeError::Refused(Refused {
            code: RefusalCode::Protocol,
            message: format!(
                "the server speaks protocol {PROTOCOL}, the worker {} to {}; install the same version on both sides",
                hello.protocol_min, hello.protocol_max
            ),
            fatal: true,
        }));
    }
    let nonce: Nonce = random()?;
    let proof = token.map(|token| prove(token, Side::Server, &hello.nonce, &nonce));
    let challenge = Challenge { protocol: PROTOCOL, nonce, token_required: token.is_some(), proof };
    send(socket, Kind::Challenge, 0, &challenge).await?;
    let answer: Authenticate = match hear(socket, reader, Kind::Authenticate).await {
        Err(HandshakeError::Refused(Refused { code: RefusalCode::Authentication, .. })) => {
            return Err(HandshakeError::Authentication(match token {
                Some(_) => {
                    "the worker's token is not the server's: give both the same (token= or OFFBEAT_TOKEN)"
                }
                None => {
                    "the worker has a token and the server has none: give both the same, or the worker none"
                }
            }));
        }
        answer => answer.map_err(in_our_words)?,
    };
    if let Some(token) = token {
        let message = match answer.proof {
            None => Some("the server asks for a token and this worker has none (token= or OFFBEAT_TOKEN)"),
            Some(proof) if verify(token, Side::Worker, &hello.nonce, &nonce, &proof) => None,
            Some(_) => {
                Some("the worker's token is not the server's: give both the same (token= or OFFBEAT_TOKEN)")
            }
        };
        if let Some(message) = message {
            let code = RefusalCode::Authentication;
            return Err(HandshakeError::Refused(Refused { code, message: message.to_owned(), fatal: true }));
        }
    }
    send(socket, Kind::Welcome, 0, &Welcome { version: env!("CARGO_PKG_VERSION").to_owned() }).await?;
    Ok(hello.purpose)
}

/// Receives the one kind of message that may come now from somebody who has not proved anything.
async fn hear<T: DeserializeOwned>(
    socket: &Socket,
    reader: &mut FrameReader,
    kind: Kind,
) -> Result<T, HandshakeError> {
    let header = match reader.header(socket).await {
        Err(FrameError::Header(HeaderError::Magic { first, came })) => {
            return Err(HandshakeError::Foreign { looks_like: looks_like(&first[..came]) });
        }
        header => header?,
    };
    match expected(socket, reader, &header, kind, MAX_HANDSHAKE_BYTES).await {
        Err(HandshakeError::Frame(FrameError::Message(_))) => {
            Err(HandshakeError::Unreadable { kind: header.kind, bytes: header.payload_len })
        }
        heard => heard,
    }
}

/// What else speaks so, as far as the first four bytes tell it.
fn looks_like(first: &[u8]) -> Option<&'static str> {
    match first {
        b"GET " | b"POST" | b"HEAD" | b"PUT " | b"OPTI" | b"CONN" | b"PRI " => Some("HTTP"),
        b"SSH-" => Some("SSH"),
        [0x16, 0x03, ..] => Some("TLS"),
        _ => None,
    }
}

/// Nobody has to prove anything to refuse, and what fails here goes to the log.
fn in_our_words(error: HandshakeError) -> HandshakeError {
    match error {
        HandshakeError::Refused(Refused { code, .. }) => {
            HandshakeError::OutOfPlace(format!("the peer refused ({code:?})"))
        }
        error => error,
    }
}

/// What to tell the peer about a connection that failed; nothing if it is gone or does not speak our language.
#[must_use]
pub fn refusal(error: &HandshakeError) -> Option<Refused> {
    let code = match error {
        HandshakeError::Refused(refused) => return Some(refused.clone()),
        HandshakeError::Authentication(_) => RefusalCode::Authentication,
        HandshakeError::OutOfPlace(_) => RefusalCode::State,
        HandshakeError::Unreadable { .. } => RefusalCode::Malformed,
        HandshakeError::Foreign { .. } => return None,
        HandshakeError::Frame(error) => return frame_refusal(error),
    };
    Some(Refused { code, message: error.to_string(), fatal: true })
}

/// What to tell the peer about bytes that make no frame.
#[must_use]
pub fn frame_refusal(error: &FrameError) -> Option<Refused> {
    let code = match error {
        FrameError::Io(_) | FrameError::Closed { .. } | FrameError::Header(HeaderError::Magic { .. }) => {
            return None;
        }
        FrameError::Header(HeaderError::Protocol(_)) => RefusalCode::Protocol,
        FrameError::Header(HeaderError::Checksum { .. }) | FrameError::Checksum { .. } => {
            RefusalCode::Checksum
        }
        FrameError::Header(HeaderError::Kind(_) | HeaderError::Reserved | HeaderError::TooLong { .. })
        | FrameError::Message(_) => RefusalCode::Malformed,
    };
    Some(Refused { code, message: error.to_string(), fatal: true })
}

/// Says no for good and gives the peer a moment to have read it.
///
/// # Cancel safety
/// Not safe: the connection is of no further use.
pub async fn refuse(socket: &Socket, request: u32, refused: Refused) {
    if tokio::time::timeout(FAREWELL, part(socket, request, &refused)).await.is_err() {
        tracing::debug!(peer = %socket.peer(), code = ?refused.code, "a refused peer did not wait to read why");
    }
}

/// Says no for good and waits until the peer has closed: closing a socket with unread bytes in it would throw the
/// refusal away. The caller bounds the time.
///
/// # Cancel safety
/// Not safe: the connection is of no further use.
pub async fn part(socket: &Socket, request: u32, refused: &Refused) {
    let farewell = async {
        send(socket, Kind::Refused, request, refused).await?;
        socket.shutdown(Shutdown::Write)?;
        let mut sink = [0; 4096];
        while socket.read_vectored(&mut [IoSliceMut::new(&mut sink)]).await? > 0 {}
        io::Result::Ok(())
    };
    if let Err(error) = farewell.await {
        tracing::debug!(peer = %socket.peer(), code = ?refused.code, %error, "a refused peer did not wait to read why");
    }
}
