//! What a forked child inherits and must let go of: the sockets of its parent's servers and clients. As long as a
//! child holds one, the peer does not notice that the parent has died.
//!
//! A child has one thread and whatever its parent's other threads left in memory: locks that are held for ever,
//! runtimes without their threads. So the child touches nothing but the numbers kept here, without a lock, and only
//! closes: a `shutdown` or a goodbye would end the parent's connection too. The objects that believe they own these
//! sockets are never used or dropped in the child: they compare [`Origin`] first.
//!
//! - FORK-1 A number in the chain is a descriptor that a live object of this process owns: it is entered after the
//!   object has been made, stays while the descriptor goes from one object to the next, and is taken out before the
//!   object is dropped, or at once after an object that did not become the next ([`ClosedInChildren`]).
//! - FORK-2 In the child no object closes a descriptor of the parent's, so closing by number closes it once.
//! - FORK-3 A place lives for ever: it is leaked before its address is stored, and nobody frees one.
#![expect(
    unsafe_code,
    reason = "in the child, a descriptor is closed without the object that owns it (FORK-2); places are leaked (FORK-3)"
)]

use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

/// No descriptor.
const FREE: RawFd = -1;

/// A place for one descriptor. Places are made when needed, reused, and never given back, so that a reader needs no
/// lock.
struct Place {
    fd: AtomicI32,
    /// Null, or a place that lives for ever. Not a `OnceLock`: what another thread was setting at the fork would be
    /// waited for without end in the child.
    next: AtomicPtr<Place>,
}

impl Place {
    const fn new() -> Self {
        Self { fd: AtomicI32::new(FREE), next: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Self> {
        let next = self.next.load(Ordering::Acquire); // pairs with `next_or_new`
        // SAFETY: FORK-3.
        (!next.is_null()).then(|| unsafe { &*next })
    }

    fn next_or_new(&self) -> &'static Self {
        if let Some(next) = self.next() {
            return next;
        }
        let new: *mut Self = Box::leak(Box::new(Self::new()));
        // Release: whoever finds the place finds it made. One that comes second is leaked, all 16 bytes of it.
        let null = std::ptr::null_mut();
        match self.next.compare_exchange(null, new, Ordering::Release, Ordering::Acquire) {
            // SAFETY: FORK-3, of the one that is in the chain now.
            Ok(_) => unsafe { &*new },
            // SAFETY: FORK-3.
            Err(found) => unsafe { &*found },
        }
    }
}

static FIRST: Place = Place::new();

/// A socket that is closed in children which are forked while this lives.
#[derive(Debug)]
pub(crate) struct ClosedInChildren<T> {
    registered: Registered, // before the socket: FORK-1
    socket: T,
}

impl<T: AsRawFd> ClosedInChildren<T> {
    pub(crate) fn new(socket: T) -> Self {
        Self { registered: Registered::new(&socket), socket }
    }

    /// Turns the socket into another object with the same descriptor, for instance to hand it to another thread's
    /// runtime. It is closed in children all the way.
    pub(crate) fn try_map<U: AsRawFd>(
        self,
        turn: impl FnOnce(T) -> io::Result<U>,
    ) -> io::Result<ClosedInChildren<U>> {
        let Self { registered, socket } = self;
        let number = registered.0.load(Ordering::Relaxed);
        let socket = turn(socket)?;
        debug_assert_eq!(socket.as_raw_fd(), number, "the same descriptor");
        Ok(ClosedInChildren { registered, socket })
    }

    /// [`Self::try_map`] with something that takes its time, such as connecting.
    ///
    /// # Cancel safety
    /// Safe; the socket is closed.
    pub(crate) async fn try_map_async<U, F: Future<Output = io::Result<U>>>(
        self,
        turn: impl FnOnce(T) -> F,
    ) -> io::Result<ClosedInChildren<U>> {
        let Self { registered, socket } = self;
        Ok(ClosedInChildren { socket: turn(socket).await?, registered })
    }
}

impl<T> Deref for ClosedInChildren<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.socket
    }
}

/// A descriptor is closed in children that are forked while this lives.
#[derive(Debug)]
struct Registered(&'static AtomicI32);

impl Registered {
    fn new(socket: &impl AsRawFd) -> Self {
        let fd = socket.as_raw_fd();
        let mut place = &FIRST;
        // Relaxed throughout: a fork copies memory as its own thread sees it, and that thread made the number's
        // object or was handed it.
        while place.fd.compare_exchange(FREE, fd, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            place = place.next_or_new();
        }
        Self(&place.fd)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Relaxed);
    }
}

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin(u32);

impl Origin {
    pub(crate) fn here() -> Self {
        Self(std::process::id())
    }

    /// Another process, for tests of what a child may do.
    #[cfg(test)]
    pub(crate) fn elsewhere() -> Self {
        Self(0)
    }

    /// Whether this is another process than the one that made it: a forked child.
    pub(crate) fn is_elsewhere(self) -> bool {
        self != Self::here()
    }
}

/// Closes, in a forked child, what it inherited. To be called once, first thing in the child and nowhere else:
/// Python registers it with `os.register_at_fork(after_in_child=...)`.
pub fn forget_after_fork() {
    let mut place = Some(&FIRST);
    while let Some(here) = place {
        let fd = here.fd.swap(FREE, Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: FORK-1 makes it a descriptor that is open, FORK-2 that nobody else in this process closes it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        place = here.next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::IntoRawFd;
    use std::process::Command;

    struct Number(RawFd);

    impl AsRawFd for Number {
        fn as_raw_fd(&self) -> RawFd {
            self.0
        }
    }

    /// Set for a process that runs one test alone.
    const ALONE: &str = "OFFBEAT_TEST_ALONE";

    /// In a process of its own: what other tests have registered would be closed under them.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test's own process is told by its environment")]
    fn only_what_is_registered_is_closed() {
        if std::env::var_os(ALONE).is_some() {
            return close_what_is_registered();
        }
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "fork::tests::only_what_is_registered_is_closed"]).env(ALONE, "yes");
        let output = alone.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("test result: ok. 1 passed;"), "{output:?}");
    }

    fn close_what_is_registered() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (kept, let_go, closed) = (connect(), connect(), connect());
        let mut peers: Vec<_> = (0..3).map(|_| listener.accept().unwrap().0).collect();
        peers.sort_by_key(|p| p.peer_addr().unwrap().port());
        let peer_of = |s: &TcpStream| {
            let port = s.local_addr().unwrap().port();
            peers.iter().find(|p| p.peer_addr().unwrap().port() == port).unwrap()
        };
        drop(Registered::new(&let_go));
        let mut peer = peer_of(&closed);
        let handed_on = ClosedInChildren::new(closed);
        // As if its owner were in the child's dead memory.
        let as_number = |stream: TcpStream| {
            let number = Number(stream.into_raw_fd());
            forget_after_fork();
            assert_eq!(peer.read(&mut [0]).unwrap(), 0, "closed while it is handed on");
            Ok(number)
        };
        drop(handed_on.try_map(as_number).unwrap());
        for open in [&kept, &let_go] {
            let mut peer = peer_of(open);
            peer.set_nonblocking(true).unwrap();
            assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        assert!(!Origin::here().is_elsewhere());
    }
}
