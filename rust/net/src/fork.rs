//! What a forked child inherits and must let go of: the sockets of its parent's servers and clients. As long as a
//! child holds one, the peer does not notice that the parent has died.
//!
//! A child has one thread and whatever its parent's other threads left in memory: locks that are held for ever,
//! runtimes without their threads. So the child touches nothing but the numbers kept here, without a lock, and only
//! closes: a `shutdown` or a goodbye would end the parent's connection too. The objects that believe they own these
//! sockets are never used or dropped in the child: they compare [`Origin`] first.
//!
//! - FORK-1 A number in the chain is a descriptor that a live object of this process owns; it is entered after the
//!   object has been made and taken out before the object is dropped ([`Registered`] is declared before the socket).
//! - FORK-2 In the child no object closes a descriptor of the parent's, so closing by number closes it once.
//! - FORK-3 A place lives for ever: it is leaked before its address is stored, and nobody frees one.
#![expect(
    unsafe_code,
    reason = "in the child, a descriptor is closed without the object that owns it (FORK-2); places are leaked (FORK-3)"
)]

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

/// A descriptor is closed in children that are forked while this lives.
#[derive(Debug)]
pub(crate) struct Registered(&'static AtomicI32);

impl Registered {
    pub(crate) fn new(socket: &impl AsRawFd) -> Self {
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

    #[test]
    fn only_what_is_registered_is_closed() {
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
        let registered = Registered::new(&closed);
        let mut peer = peer_of(&closed);
        let _number = closed.into_raw_fd(); // as if its owner were in the child's dead memory
        forget_after_fork();
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the end of the registered one");
        for open in [&kept, &let_go] {
            let mut peer = peer_of(open);
            peer.set_nonblocking(true).unwrap();
            assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        }
        drop(registered);
        assert!(!Origin::here().is_elsewhere());
    }
}
