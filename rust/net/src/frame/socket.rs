//! A TCP connection as a task uses it. Reading and writing take `&Socket`, so one task can do both at the same time.

use crate::fork::ClosedInChildren;
use offbeat_core::wire::Header;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use socket2::SockRef;
use std::future::poll_fn;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Both socket buffers of a loopback connection. What is under way beyond the processor's cache is copied slowly: twice as
/// much costs some 5 % at 100 MB, and with half of it a push of 4 MB waits for room more often. Elsewhere the kernel's own
/// tuning is better.
const LOOPBACK_BUFFER_BYTES: usize = 1 << 20;

/// As many as one system call takes (Linux: `UIO_MAXIOV`).
const MAX_SLICES: usize = 1024;

/// A non-blocking TCP stream on the runtime of the thread that made it; closed in forked children.
#[derive(Debug)]
pub struct Socket {
    stream: ClosedInChildren<TcpStream>,
    peer: SocketAddr,
    received: AtomicU64,
    sent: AtomicU64,
}

/// A socket between two runtimes.
#[derive(Debug)]
pub struct Moving {
    stream: ClosedInChildren<std::net::TcpStream>,
    received: u64,
    sent: u64,
}

impl Moving {
    /// Registers the stream with the current runtime.
    ///
    /// # Errors
    /// As [`Socket::new`].
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn arrive(self) -> io::Result<Socket> {
        let socket = Socket::from_std(self.stream)?;
        Ok(Socket { received: self.received.into(), sent: self.sent.into(), ..socket })
    }
}

impl Socket {
    /// Registers a stream with the current runtime.
    ///
    /// # Errors
    /// What the operating system says, for instance that the peer is gone already.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn new(stream: std::net::TcpStream) -> io::Result<Self> {
        Self::from_std(ClosedInChildren::new(stream))
    }

    /// [`Self::new`] for a stream that another runtime has given back.
    pub(crate) fn from_std(stream: ClosedInChildren<std::net::TcpStream>) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Self::of(stream.try_map(TcpStream::from_std)?)
    }

    /// Takes a stream of the current runtime.
    pub(crate) fn of(stream: ClosedInChildren<TcpStream>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let peer = stream.peer_addr()?;
        if peer.ip().to_canonical().is_loopback() {
            let socket = SockRef::from(&*stream);
            socket.set_send_buffer_size(LOOPBACK_BUFFER_BYTES)?;
            socket.set_recv_buffer_size(LOOPBACK_BUFFER_BYTES)?;
        }
        Ok(Self { stream, peer, received: AtomicU64::new(0), sent: AtomicU64::new(0) })
    }

    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Gives the stream back, for another runtime or for none.
    pub(crate) fn into_std(self) -> io::Result<ClosedInChildren<std::net::TcpStream>> {
        self.stream.try_map(TcpStream::into_std)
    }

    /// Takes the stream off this runtime, to go on with another one. What was received and sent stays counted: a part
    /// of it may lie in the reader that moves along.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn into_moving(self) -> io::Result<Moving> {
        let (received, sent) = (self.received(), self.sent());
        Ok(Moving { stream: self.into_std()?, received, sent })
    }

    /// A second handle of the stream, to go on with on another runtime, as [`Self::into_moving`] does. This one is good for
    /// [`Self::shutdown`] as long as somebody has it: it ends the stream for both.
    ///
    /// # Errors
    /// What the operating system says, for instance that there are no more descriptors.
    pub fn to_moving(&self) -> io::Result<Moving> {
        let stream = ClosedInChildren::new(SockRef::from(&*self.stream).try_clone()?.into());
        Ok(Moving { stream, received: self.received(), sent: self.sent() })
    }

    /// Ends one or both directions for everybody who holds the stream; may be called from any thread.
    ///
    /// # Errors
    /// What the operating system says, for instance that the peer has ended it already.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        SockRef::from(&*self.stream).shutdown(how)
    }

    /// Bytes received so far; grows whenever the peer makes progress.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed) // a statistic and a sign of life; orders nothing
    }

    /// Bytes sent so far; grows whenever the peer takes some.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed) // as above
    }

    /// Waits until there are bytes, then reads some: 0 at the peer's end.
    ///
    /// # Errors
    /// What the operating system says.
    ///
    /// # Cancel safety
    /// Safe: bytes are read in the poll that returns them.
    pub async fn read_vectored(&self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let wanted = buffers.iter().map(|b| b.len()).sum();
        loop {
            poll_fn(|cx| self.stream.poll_read_ready(cx)).await?;
            if let Some(n) = self.attempt(Interest::READABLE, wanted, |mut s| s.read_vectored(buffers))? {
                self.received.fetch_add(n as u64, Ordering::Relaxed);
                return Ok(n);
            }
        }
    }

    /// Sends all of the slices, in order, with as few system calls as the peer's speed allows. The slices are
    /// advanced as they are sent.
    ///
    /// # Errors
    /// What the operating system says.
    ///
    /// # Cancel safety
    /// Not safe: an unknown part has been sent, and the connection is of no further use.
    pub async fn write_all(&self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0); // drops empty ones at the front
        while !slices.is_empty() {
            let wanted = slices.iter().map(|s| s.len()).sum();
            poll_fn(|cx| self.stream.poll_write_ready(cx)).await?;
            let send = |socket: &socket2::Socket| {
                // Not by `Write`, which lets a peer that is gone end the process where SIGPIPE does that.
                let mut nothing = SendAncillaryBuffer::default();
                let some = &slices[..slices.len().min(MAX_SLICES)];
                Ok(rustix::net::sendmsg(socket, some, &mut nothing, SendFlags::NOSIGNAL)?)
            };
            match self.attempt(Interest::WRITABLE, wanted, send)? {
                Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                Some(n) => {
                    self.sent.fetch_add(n as u64, Ordering::Relaxed);
                    IoSlice::advance_slices(&mut slices, n);
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Resolves when the peer has closed its side, or ours has been closed for reading, whatever was sent before that
    /// (as much as the kernel takes unread; the end does not arrive behind more).
    ///
    /// # Errors
    /// What the operating system says.
    ///
    /// # Cancel safety
    /// Safe: nothing is taken off the stream.
    pub async fn closed(&self) -> io::Result<()> {
        // Readable it may be for long, by bytes that are somebody else's to read. Nobody sends urgent ones; the end of
        // the stream is part of that readiness, too.
        self.stream.ready(Interest::PRIORITY).await.map(drop)
    }

    /// One system call where readiness was promised. `None`: the promise was stale, wait again.
    fn attempt(
        &self,
        interest: Interest,
        wanted: usize,
        call: impl FnOnce(&socket2::Socket) -> io::Result<usize>,
    ) -> io::Result<Option<usize>> {
        let mut done = None;
        let tried = self.stream.try_io(interest, || {
            let n = call(&SockRef::from(&*self.stream))?;
            done = Some(n);
            // Less than asked for means that the kernel's buffer is empty (or full). Saying so here makes the next
            // attempt wait for an event at once, instead of making a call that would only find that out.
            if 0 < n && n < wanted { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
        });
        match tried {
            Ok(()) => Ok(done),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(done),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Sends a header and its payload, whose length and checksum the header has.
    ///
    /// # Errors
    /// What the operating system says.
    ///
    /// # Cancel safety
    /// Not safe, see [`Self::write_all`].
    pub async fn write_frame(&self, header: &Header, payload: &[u8]) -> io::Result<()> {
        debug_assert_eq!(header.payload_len as usize, payload.len());
        self.write_all(&mut [IoSlice::new(&header.encode()), IoSlice::new(payload)]).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[tokio::test]
    async fn closing_is_noticed_without_reading() {
        for said in [&b""[..], b"goodbye"] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let socket = Socket::new(listener.accept().unwrap().0).unwrap();
            near.write_all(said).unwrap();
            if !said.is_empty() {
                poll_fn(|cx| socket.stream.poll_read_ready(cx)).await.unwrap();
            }
            let mut closed = pin!(socket.closed());
            assert!(matches!(closed.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
            drop(near);
            closed.await.unwrap();
            let mut read = [0; 16];
            let n = socket.read_vectored(&mut [IoSliceMut::new(&mut read)]).await.unwrap();
            assert_eq!(&read[..n], said, "what was sent is there to be read");
        }
    }

    #[tokio::test]
    async fn our_own_closing_is_noticed_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Socket::new(listener.accept().unwrap().0).unwrap();
        near.write_all(b"more").unwrap();
        let mut closed = pin!(socket.closed());
        assert!(matches!(closed.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
        socket.shutdown(Shutdown::Read).unwrap();
        closed.await.unwrap();
    }
}
