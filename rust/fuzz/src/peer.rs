//! The other end of a connection, spoken frame by frame; what goes wrong with it is how an attack ends.

use crate::frames::message;
use offbeat_core::wire::message::{Authenticate, Challenge, Hello, Purpose, Welcome};
use offbeat_core::wire::{HEADER_BYTES, Header, Kind, PROTOCOL, decode};
use serde::de::DeserializeOwned;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Nothing here takes so long, however busy the machine.
const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) struct Peer(pub(crate) TcpStream);

impl Peer {
    pub(crate) fn new(stream: TcpStream) -> Option<Self> {
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(DEADLINE)).ok()?;
        stream.set_write_timeout(Some(DEADLINE)).ok()?;
        Some(Self(stream))
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Option<()> {
        self.0.write_all(bytes).ok()
    }

    /// The next frame; nothing if there is none.
    ///
    /// # Panics
    /// If none comes, nor the end.
    pub(crate) fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut head = [0; HEADER_BYTES];
        self.read(&mut head)?;
        let header = Header::decode(&head).expect("our other end speaks our protocol");
        let mut payload = vec![0; header.payload_len as usize];
        self.read(&mut payload)?;
        Some((header, payload))
    }

    fn read(&mut self, to: &mut [u8]) -> Option<()> {
        match self.0.read_exact(to) {
            Ok(()) => Some(()),
            Err(error) => {
                let hangs = [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind());
                assert!(!hangs, "our other end has stopped");
                None
            }
        }
    }

    pub(crate) fn expect<T: DeserializeOwned>(&mut self, kind: Kind) -> Option<T> {
        let (header, payload) = self.next()?;
        if header.kind == kind { decode(&payload).ok() } else { None }
    }

    /// Reads to the end, whatever comes.
    pub(crate) fn drain(&mut self) {
        let mut sink = [0; 4096];
        while matches!(self.0.read(&mut sink), Ok(n) if n > 0) {}
    }

    /// Opens the connection as a worker without a token.
    pub(crate) fn greet(&mut self, purpose: Purpose) -> Option<()> {
        let hello = Hello { protocol_min: PROTOCOL, protocol_max: PROTOCOL, nonce: [3; 32], purpose };
        self.write(&message(Kind::Hello, 0, &hello))?;
        let _: Challenge = self.expect(Kind::Challenge)?;
        self.write(&message(Kind::Authenticate, 0, &Authenticate { proof: None }))?;
        let _: Welcome = self.expect(Kind::Welcome)?;
        Some(())
    }

    /// Opens it as a server without a token; says what for.
    pub(crate) fn admit(&mut self) -> Option<Purpose> {
        let hello: Hello = self.expect(Kind::Hello)?;
        let challenge = Challenge { protocol: PROTOCOL, nonce: [1; 32], token_required: false, proof: None };
        self.write(&message(Kind::Challenge, 0, &challenge))?;
        let _: Authenticate = self.expect(Kind::Authenticate)?;
        self.write(&message(Kind::Welcome, 0, &Welcome { version: "fuzz".into() }))?;
        Some(hello.purpose)
    }
}
