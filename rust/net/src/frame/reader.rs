//! Frames off a socket, with a little read-ahead.

use super::ahead::{AHEAD_BYTES, ReadAhead};
use super::error::FrameError;
use super::socket::Socket;
use offbeat_core::checksum::checksum;
use offbeat_core::wire::Header;
use std::io::IoSliceMut;

/// A message grows by at most this much before its next bytes have arrived.
pub(crate) const MESSAGE_STEP_BYTES: usize = 64 << 10;

/// Takes frames off a [`Socket`]. Moves from one runtime to another with the bytes it has read ahead.
#[derive(Debug, Default)]
pub struct FrameReader {
    ahead: ReadAhead,
    /// The last message that did not fit the read-ahead.
    message: Vec<u8>,
}

impl FrameReader {
    /// Bytes read ahead: 0 when the connection stands between two frames.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.ahead.len()
    }

    /// The next frame's header; its payload must be taken before the next one.
    ///
    /// # Errors
    /// [`FrameError::Closed`] with `inside: false` if the peer ended between two frames.
    ///
    /// # Cancel safety
    /// Safe: what has arrived is kept.
    pub async fn header(&mut self, socket: &Socket) -> Result<Header, FrameError> {
        loop {
            if let Some(header) = self.ahead.take_header() {
                return Ok(header?);
            }
            self.fill(socket, self.ahead.len() + 1).await?;
        }
    }

    /// Fills `target` with the payload's next bytes; what arrives behind them is kept for the next header.
    ///
    /// # Errors
    /// [`FrameError::Closed`] if the peer ended before all had come.
    ///
    /// # Cancel safety
    /// Not safe: bytes may be lost, and the connection is of no further use.
    pub async fn payload(&mut self, socket: &Socket, target: &mut [u8]) -> Result<(), FrameError> {
        let ahead = self.ahead.take(target.len());
        let mut filled = ahead.len();
        target[..filled].copy_from_slice(ahead);
        while filled < target.len() {
            let rest = target.len() - filled;
            let buffers = &mut [IoSliceMut::new(&mut target[filled..]), IoSliceMut::new(self.ahead.room())];
            let n = socket.read_vectored(buffers).await?;
            if n == 0 {
                return Err(FrameError::Closed { inside: true });
            }
            filled += n.min(rest);
            self.ahead.came(n.saturating_sub(rest));
        }
        Ok(())
    }

    /// A small payload, whole and checked against the header's checksum. The header's length must have been held
    /// against what the connection's state allows; memory grows with the bytes that arrive.
    ///
    /// # Errors
    /// [`FrameError::Checksum`] if the payload was damaged, [`FrameError::Closed`] if it did not come.
    ///
    /// # Cancel safety
    /// Not safe, see [`Self::payload`].
    pub async fn message(&mut self, socket: &Socket, header: &Header) -> Result<&[u8], FrameError> {
        let len = header.payload_len as usize;
        let bytes = if len <= AHEAD_BYTES {
            self.fill(socket, len).await.map_err(in_payload)?;
            self.ahead.take(len)
        } else {
            let mut message = std::mem::take(&mut self.message);
            message.clear();
            while message.len() < len {
                let from = message.len();
                message.resize(len.min(from + MESSAGE_STEP_BYTES), 0);
                self.payload(socket, &mut message[from..]).await?;
            }
            self.message = message;
            &self.message[..]
        };
        let computed = checksum(bytes);
        if computed != header.payload_checksum {
            return Err(FrameError::Checksum { kind: header.kind, found: header.payload_checksum, computed });
        }
        Ok(bytes)
    }

    /// Reads a payload and drops it.
    ///
    /// # Errors
    /// [`FrameError::Closed`] if the peer ended before all had come.
    ///
    /// # Cancel safety
    /// Not safe, see [`Self::payload`].
    pub async fn skip(&mut self, socket: &Socket, header: &Header) -> Result<(), FrameError> {
        let mut left = header.payload_len as usize;
        let mut sink = std::mem::take(&mut self.message);
        sink.resize(left.min(MESSAGE_STEP_BYTES), 0);
        while left > 0 {
            let n = left.min(sink.len());
            self.payload(socket, &mut sink[..n]).await?;
            left -= n;
        }
        self.message = sink;
        Ok(())
    }

    /// Reads until `wanted` bytes lie ahead.
    async fn fill(&mut self, socket: &Socket, wanted: usize) -> Result<(), FrameError> {
        while self.ahead.len() < wanted {
            let n = socket.read_vectored(&mut [IoSliceMut::new(self.ahead.room())]).await?;
            if n == 0 {
                return Err(FrameError::Closed { inside: !self.ahead.is_empty() });
            }
            self.ahead.came(n);
        }
        Ok(())
    }
}

fn in_payload(error: FrameError) -> FrameError {
    match error {
        FrameError::Closed { .. } => FrameError::Closed { inside: true },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offbeat_core::wire::{HEADER_BYTES, Kind};
    use proptest::prelude::*;
    use std::io::{IoSlice, Write};
    use std::net::{TcpListener, TcpStream};
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// Frames as bytes, with the payloads they carry.
    fn frames(lengths: &[usize]) -> (Vec<u8>, Vec<(Header, Vec<u8>)>) {
        let (mut bytes, mut frames) = (vec![], vec![]);
        for (i, &len) in lengths.iter().enumerate() {
            let payload: Vec<u8> = (0..len).map(|k| (k * 31 + i) as u8).collect();
            let header = Header { sequence: i as u64, ..Header::new(Kind::Fragment) }.with_payload(&payload);
            bytes.extend_from_slice(&header.encode());
            bytes.extend_from_slice(&payload);
            frames.push((header, payload));
        }
        (bytes, frames)
    }

    /// Takes the frames in turn by each of the reader's ways.
    async fn take(socket: &Socket, reader: &mut FrameReader, frames: &[(Header, Vec<u8>)]) {
        for (i, (header, payload)) in frames.iter().enumerate() {
            assert_eq!(reader.header(socket).await.unwrap(), *header);
            match i % 3 {
                0 => {
                    let mut target = vec![0; payload.len()];
                    reader.payload(socket, &mut target).await.unwrap();
                    assert_eq!(target, *payload);
                }
                1 => assert_eq!(reader.message(socket, header).await.unwrap(), *payload),
                _ => reader.skip(socket, header).await.unwrap(),
            }
        }
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn frames_come_whole_however_they_drip(
            lengths in prop::collection::vec(prop_oneof![0_usize..200, 900_usize..1200, 60_000_usize..70_000], 1..6),
            drips in prop::collection::vec(1_usize..2000, 1..20),
        ) {
            let (bytes, frames) = frames(&lengths);
            let (mut near, far) = pair();
            near.set_nodelay(true).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let mut rest = &bytes[..];
                    for drip in drips.into_iter().cycle() {
                        let (now, later) = rest.split_at(drip.min(rest.len()));
                        near.write_all(now).unwrap();
                        rest = later;
                        if rest.is_empty() {
                            break;
                        }
                    }
                });
                runtime().block_on(async {
                    let socket = Socket::new(far).unwrap();
                    let mut reader = FrameReader::default();
                    take(&socket, &mut reader, &frames).await;
                    assert!(matches!(reader.header(&socket).await, Err(FrameError::Closed { inside: false })));
                });
            });
        }
    }

    #[test]
    fn a_header_that_is_given_up_at_any_byte_is_not_lost() {
        let (bytes, frames) = frames(&[10]);
        runtime().block_on(async {
            let (mut near, far) = pair();
            near.set_nodelay(true).unwrap();
            let (socket, mut reader) = (Socket::new(far).unwrap(), FrameReader::default());
            for (i, byte) in bytes[..HEADER_BYTES].iter().enumerate() {
                near.write_all(&[*byte]).unwrap();
                if i + 1 == HEADER_BYTES {
                    break;
                }
                // Polls until this byte is in, then drops the future.
                while reader.buffered() <= i {
                    {
                        let mut header = pin!(reader.header(&socket));
                        let polled = header.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                        assert!(matches!(polled, Poll::Pending));
                    }
                    tokio::task::yield_now().await;
                }
            }
            near.write_all(&bytes[HEADER_BYTES..]).unwrap();
            take(&socket, &mut reader, &frames).await;
        });
    }

    #[test]
    fn the_end_inside_a_frame_is_told_from_the_end_between_two() {
        let (bytes, frames) = frames(&[2000]);
        for cut in [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, bytes.len() - 1] {
            runtime().block_on(async {
                let (mut near, far) = pair();
                near.write_all(&bytes[..cut]).unwrap();
                drop(near);
                let (socket, mut reader) = (Socket::new(far).unwrap(), FrameReader::default());
                let ended = match reader.header(&socket).await {
                    Ok(_) => reader.payload(&socket, &mut vec![0; frames[0].1.len()]).await.unwrap_err(),
                    Err(error) => error,
                };
                assert!(
                    matches!(ended, FrameError::Closed { inside } if inside == (cut > 0)),
                    "{cut}: {ended}"
                );
            });
        }
    }

    #[test]
    fn a_damaged_message_is_an_error() {
        let (mut bytes, frames) = frames(&[500]);
        bytes[HEADER_BYTES + 77] ^= 8;
        runtime().block_on(async {
            let (mut near, far) = pair();
            near.write_all(&bytes).unwrap();
            let (socket, mut reader) = (Socket::new(far).unwrap(), FrameReader::default());
            reader.header(&socket).await.unwrap();
            let error = reader.message(&socket, &frames[0].0).await.unwrap_err();
            assert!(matches!(error, FrameError::Checksum { kind: Kind::Fragment, .. }), "{error}");
        });
    }

    #[test]
    fn both_directions_go_on_while_both_buffers_are_full() {
        // Each side sends more than the sockets hold before it has read anything.
        let (bytes, frames) = frames(&[1_000_000; 12]);
        let talk = |stream: TcpStream| {
            let (bytes, frames) = (&bytes, &frames);
            move || {
                runtime().block_on(async {
                    let (socket, mut reader) = (Socket::new(stream).unwrap(), FrameReader::default());
                    let slices =
                        &mut [IoSlice::new(&bytes[..100]), IoSlice::new(&[]), IoSlice::new(&bytes[100..])];
                    let (sent, ()) =
                        tokio::join!(socket.write_all(slices), take(&socket, &mut reader, frames));
                    sent.unwrap();
                    assert_eq!((socket.sent(), socket.received()), (bytes.len() as u64, bytes.len() as u64));
                });
            }
        };
        let (near, far) = pair();
        std::thread::scope(|scope| {
            scope.spawn(talk(near));
            scope.spawn(talk(far));
        });
    }
}
