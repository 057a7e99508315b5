//! The data connection's stream, as the thread that calls drives it. Reads and writes never wait, except for the one
//! read that [`Stream::wait`] announces. There is one descriptor and one thread, so an event loop would only cost time;
//! and the socket's own time limit costs less than that of `poll`, which sets a timer of high resolution.

use crate::fork::ClosedInChildren;
use crate::frame::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use std::cell::Cell;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::task::Poll;
use std::time::Duration;

/// How often a waiting call looks up: at the caller's interrupt and at what the control thread has heard.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// A connected stream, closed in forked children.
#[derive(Debug)]
pub(super) struct Stream {
    socket: ClosedInChildren<TcpStream>,
    /// A read found less than it had room for, so that the next one would find nothing.
    drained: Cell<bool>,
    /// A write left something over.
    full: Cell<bool>,
    /// The next read may wait.
    patient: Cell<bool>,
    /// A wait has ended without the stream's doing: a signal came, or the time is up.
    nudged: Cell<bool>,
}

impl Stream {
    /// Takes a stream that has shaken hands.
    pub(super) fn new(socket: Socket) -> io::Result<Self> {
        let stream = socket.into_std()?;
        stream.set_nonblocking(false)?; // every call says for itself whether it waits
        set_socket_timeout(&*stream, Timeout::Recv, Some(LOOK))?;
        Ok(Self {
            socket: stream,
            drained: Cell::new(false),
            full: Cell::new(false),
            patient: Cell::new(false),
            nudged: Cell::new(false),
        })
    }

    /// Takes what has arrived, as far as there is room. Pending: nothing.
    pub(super) fn read(&self, room: &mut [IoSliceMut<'_>]) -> Poll<io::Result<usize>> {
        let wanted = room.iter().map(|r| r.len()).sum();
        let patient = self.patient.take();
        let flags = if patient { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let call = || {
            let mut nothing = RecvAncillaryBuffer::default();
            Ok(rustix::net::recvmsg(&*self.socket, room, &mut nothing, flags)?.bytes)
        };
        let done = attempt(&self.drained, wanted, call);
        self.nudged.set(patient && done.is_pending());
        done
    }

    /// Gives what there is room for.
    pub(super) fn write(&self, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let wanted = slices.iter().map(|s| s.len()).sum();
        let call = || {
            let mut nothing = SendAncillaryBuffer::default();
            rustix::net::sendmsg(
                &*self.socket,
                slices,
                &mut nothing,
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            )
        };
        match attempt(&self.full, wanted, call) {
            Poll::Ready(Ok(0)) if wanted > 0 => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            done => done,
        }
    }

    /// Sends what the stream takes at once; whether that was all.
    pub(super) fn try_write_all(&self, bytes: &[u8]) -> io::Result<bool> {
        match self.write(&[IoSlice::new(bytes)]) {
            Poll::Ready(sent) => Ok(sent? == bytes.len()),
            Poll::Pending => Ok(false),
        }
    }

    /// Sleeps until there are bytes, or room where a write has found none, or a signal, for at most [`LOOK`]: here, or
    /// in the next read.
    pub(super) fn wait(&self) -> io::Result<()> {
        if !self.full.get() {
            self.drained.set(false);
            self.patient.set(true);
            return Ok(());
        }
        let limit = Timespec::try_from(LOOK).ok();
        match poll(&mut [PollFd::new(&*self.socket, PollFlags::IN | PollFlags::OUT)], limit.as_ref()) {
            Ok(0) | Err(Errno::INTR) => self.nudged.set(true),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        self.drained.set(false);
        self.full.set(false);
        Ok(())
    }

    /// The wait that was announced is over: whoever reads next has not asked for it.
    pub(super) fn hurry(&self) {
        self.patient.set(false);
    }

    /// Whether a wait has ended because a signal came or the time was up; asked once.
    pub(super) fn take_nudge(&self) -> bool {
        self.nudged.take()
    }

    /// Has the other side know that nothing more comes; what it has to say is read still.
    pub(super) fn end_sending(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&*self.socket, Shutdown::Write)?)
    }

    /// Ends the connection.
    pub(super) fn shutdown(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&*self.socket, Shutdown::Both)?)
    }
}

/// One call of the system, unless it is known to be in vain.
fn attempt(
    stuck: &Cell<bool>,
    wanted: usize,
    call: impl FnOnce() -> Result<usize, Errno>,
) -> Poll<io::Result<usize>> {
    if stuck.get() {
        return Poll::Pending;
    }
    match call() {
        Ok(n) => {
            stuck.set(0 < n && n < wanted);
            Poll::Ready(Ok(n))
        }
        Err(Errno::AGAIN | Errno::INTR) => {
            stuck.set(true);
            Poll::Pending
        }
        Err(error) => Poll::Ready(Err(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_wait_that_was_broken_off_does_not_hold_up_the_next_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let stream = runtime.block_on(async { Stream::new(Socket::new(socket).unwrap()).unwrap() });
        let mut room = [0; 1];
        let mut read = || stream.read(&mut [IoSliceMut::new(&mut room)]);
        stream.wait().unwrap();
        assert!(read().is_pending());
        assert!(stream.take_nudge(), "that read has waited");
        stream.wait().unwrap();
        stream.hurry();
        assert!(read().is_pending());
        assert!(!stream.take_nudge(), "this one has not");
    }
}
