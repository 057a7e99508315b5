//! Both ends of a handshake, over a connection on loopback: whoever has not the token is not let in, and gets no more
//! of our memory than is his.

use crate::frames::mended;
use crate::input::Input;
use crate::memory::peak;
use offbeat_core::wire::message::Purpose;
use offbeat_net::frame::{FrameReader, Socket};
use offbeat_net::handshake::{admit, greet};
use socket2::SockRef;
use std::cell::RefCell;
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;
use tokio::runtime::Runtime;

/// Bits of the first byte.
const AS_WORKER: u8 = 1;
const WITH_TOKEN: u8 = 2;
/// All that is held for a peer before it has proved itself.
const MAX_PENDING_BYTES: usize = 64 << 10;
/// More than both messages may have, less than a socket holds.
const MAX_INPUT_BYTES: usize = 32 << 10;

thread_local! {
    static PLACE: RefCell<(Runtime, TcpListener)> = RefCell::new((
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("the machine has a runtime"),
        TcpListener::bind("127.0.0.1:0").expect("the machine has a free port"),
    ));
}

/// A handshake ends, in an error unless there is no token.
///
/// # Panics
/// If a peer without the token is let in, or takes more than 64 KiB.
pub fn handshake(bytes: &[u8]) {
    is_in(bytes);
}

/// Whether the peer was let in, or the server trusted.
fn is_in(bytes: &[u8]) -> bool {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let rest = input.rest();
    let said = mended(&rest[..rest.len().min(MAX_INPUT_BYTES)]);
    let token = (choice & WITH_TOKEN != 0).then_some("of the run");
    PLACE.with_borrow_mut(|(runtime, listener)| {
        let mut near = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("it listens");
        let far = listener.accept().expect("somebody has come").0;
        // It closes first and by a reset: else the machine would run out of ports.
        SockRef::from(&near).set_linger(Some(Duration::ZERO)).expect("it is connected");
        near.write_all(&said).expect("sockets hold as much");
        near.shutdown(Shutdown::Write).expect("it is connected");
        let socket = {
            let _on_it = runtime.enter();
            Socket::new(far).expect("it is connected")
        };
        let (is_in, taken) = peak(|| {
            let mut reader = FrameReader::default();
            if choice & AS_WORKER == 0 {
                runtime.block_on(admit(&socket, &mut reader, token)).is_ok()
            } else {
                runtime.block_on(greet(&socket, &mut reader, token, Purpose::Data)).is_ok()
            }
        });
        assert!(!(is_in && token.is_some()), "let in without the token");
        assert!(taken <= MAX_PENDING_BYTES, "{taken} bytes for a peer that has proved nothing");
        drop(near);
        let _on_it = runtime.enter();
        drop(socket);
        is_in
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::seed_of;

    #[test]
    fn whoever_is_honest_gets_in() {
        for name in ["worker", "worker-status", "server"] {
            assert!(is_in(&seed_of("handshake", name)), "{name}");
        }
        for name in ["worker-without-token", "server-without-token", "attack-forged-proof", "attack-cut"] {
            assert!(!is_in(&seed_of("handshake", name)), "{name}");
        }
    }
}
