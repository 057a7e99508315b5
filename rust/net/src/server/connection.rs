//! One accepted connection as the rest of the server sees it: what it waits for, and whether anything moves. A
//! watchdog on the control thread looks at all of them a few times a second, so that the data path needs no timers.

use crate::frame::Socket;
use crate::handshake::FAREWELL;
use offbeat_core::wire::message::RefusalCode;
use std::net::Shutdown;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a peer that owes something must move within the timeout, unless it is done with less: a packet brings more. Less
/// would let one that sends a byte now and then hold what it holds for ever.
const PROGRESS_BYTES: u64 = 1 << 10;

/// What a connection's task is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Between two frames: silence is fine, a part of a header is not.
    Idle = 0,
    /// In the middle of a frame, or of a push: the peer owes us bytes.
    Receiving = 1,
    /// The peer owes us room for what we send.
    Sending = 2,
    /// Waiting for something that is not the peer's to give.
    Waiting = 3,
    /// The peer has been told that this is the end.
    Parting = 4,
}

impl Phase {
    const fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Idle,
            1 => Self::Receiving,
            2 => Self::Sending,
            3 => Self::Waiting,
            _ => Self::Parting,
        }
    }
}

/// What a connection's task sends, if it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// What the peer waits for.
    Awaited,
    /// A part of a push or a pull. A worker with two pushes in flight reads nothing while it computes, for as long as
    /// that takes.
    Exchange {
        /// The (term, version) of the model that is kept alive for it.
        pinned: Option<(u64, u64)>,
    },
}

/// An accepted connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Socket,
    /// The data thread that serves it; `None`: the control thread.
    pub(super) thread: Option<usize>,
    /// The data thread that is to serve it.
    asked: AtomicUsize,
    phase: AtomicU8,
    /// Bytes received when the last frame had been taken whole.
    boundary: AtomicU64,
    answer: Mutex<Answer>,
    /// Shared with what it was on another thread: whoever still has that one may close it.
    end: Arc<Mutex<Option<(RefusalCode, String)>>>,
}

impl Connection {
    pub(super) fn new(socket: Socket, thread: Option<usize>) -> Self {
        let phase = AtomicU8::new(Phase::Receiving as u8);
        let (boundary, answer) = (AtomicU64::new(0), Mutex::new(Answer::Awaited));
        let asked = AtomicUsize::new(thread.unwrap_or_default());
        Self { socket, thread, asked, phase, boundary, answer, end: Arc::default() }
    }

    /// The same connection on another thread, between two frames; its socket was [`Socket::to_moving`]'s.
    pub(super) fn moved(&self, socket: Socket, thread: usize) -> Self {
        let moved = Self { end: Arc::clone(&self.end), ..Self::new(socket, Some(thread)) };
        moved.boundary.store(self.boundary.load(Ordering::Relaxed), Ordering::Relaxed);
        moved.enter(Phase::Idle);
        moved
    }

    /// Asks its task to go on on another data thread. Relaxed: it looks between any two frames.
    pub(super) fn ask_to_move(&self, to: usize) {
        self.asked.store(to, Ordering::Relaxed);
    }

    /// The data thread that it is to move to, if it is not there.
    pub(super) fn asked_to_move(&self) -> Option<usize> {
        let asked = self.asked.load(Ordering::Relaxed);
        self.thread.is_some_and(|thread| thread != asked).then_some(asked)
    }

    /// Relaxed, as all that the watchdog reads: it looks again, and acts on what has not changed for seconds.
    pub(super) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Between two frames, with `buffered` bytes of the next one read ahead.
    pub(super) fn idle(&self, buffered: usize) {
        self.boundary.store(self.socket.received() - buffered as u64, Ordering::Relaxed);
        self.enter(Phase::Idle);
    }

    /// What is sent from now on.
    pub(super) fn answers(&self, answer: Answer) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }

    /// What a push or a pull that is under way waits for.
    pub(super) fn exchanging(&self) -> Option<Phase> {
        let phase = Phase::from_byte(self.phase.load(Ordering::Relaxed));
        let answer = *self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        let is_under_way = matches!(phase, Phase::Receiving | Phase::Sending | Phase::Waiting)
            && matches!(answer, Answer::Exchange { .. });
        is_under_way.then_some(phase)
    }

    /// What is being sent, if the peer owes us room for it.
    pub(super) fn sending(&self) -> Option<Answer> {
        let sending = self.phase.load(Ordering::Relaxed) == Phase::Sending as u8;
        sending.then(|| *self.answer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the connection from outside: its task finds the stream at its end, and here why. With
    /// [`Shutdown::Read`] the peer can still be told.
    pub(super) fn close(&self, code: RefusalCode, cause: &str, how: Shutdown) {
        self.end
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_with(|| (code, cause.to_owned()));
        // It may be closed already, which is what is wanted.
        self.socket.shutdown(how).ok();
    }

    /// Why the connection was closed from outside.
    pub(super) fn end(&self) -> Option<(RefusalCode, String)> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the watchdog compares between two looks.
    fn sight(&self) -> Sight {
        let (received, sent) = (self.socket.received(), self.socket.sent());
        let phase = match Phase::from_byte(self.phase.load(Ordering::Relaxed)) {
            Phase::Idle if received > self.boundary.load(Ordering::Relaxed) => Phase::Receiving,
            phase => phase,
        };
        // Whatever the peer still sends does not put off the end.
        if phase == Phase::Parting {
            Sight { phase, boundary: 0, received: 0, sent: 0 }
        } else {
            Sight { phase, boundary: self.boundary.load(Ordering::Relaxed), received, sent }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sight {
    phase: Phase,
    boundary: u64,
    received: u64,
    sent: u64,
}

impl Sight {
    /// Bytes moved since an earlier look.
    fn moved(&self, before: &Self) -> u64 {
        self.received.saturating_sub(before.received) + self.sent.saturating_sub(before.sent)
    }

    /// Whether that is another frame, or much of the same.
    fn is_progress(&self, before: &Self) -> bool {
        (self.phase, self.boundary) != (before.phase, before.boundary) || self.moved(before) >= PROGRESS_BYTES
    }
}

/// A peer that owes something and is too slow with it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Slow {
    judged: Sight,
    /// What to say about it.
    pub(super) cause: String,
    /// Whether it can still be told.
    pub(super) how: Shutdown,
}

impl Slow {
    /// Whether what was judged is still so: its task goes on meanwhile, and may have moved to another thread.
    pub(super) fn holds(&self, connection: &Connection) -> bool {
        !connection.sight().is_progress(&self.judged)
    }
}

/// The watchdog's memory of one connection.
#[derive(Debug)]
pub(super) struct Watch {
    last: Sight,
    /// When the peer last got on, and how things were then.
    progress: Sight,
    since: Instant,
    /// Bytes moved recently: an eighth is forgotten at each look.
    recent_bytes: u64,
}

impl Watch {
    pub(super) fn new(connection: &Connection, now: Instant) -> Self {
        let sight = connection.sight();
        Self { last: sight, progress: sight, since: now, recent_bytes: 0 }
    }

    /// The server stood still for so long: no peer owes anything for that time.
    pub(super) fn excuse(&mut self, standstill: Duration, now: Instant) {
        self.since = (self.since + standstill).min(now);
    }

    pub(super) const fn recent_bytes(&self) -> u64 {
        self.recent_bytes
    }

    /// For how long nothing has come, if the connection is between two frames.
    pub(super) fn idle(&self, now: Instant) -> Option<Duration> {
        (self.last.phase == Phase::Idle).then(|| now.saturating_duration_since(self.since))
    }

    /// Looks again. Returns the bytes moved since the last look and, if the peer owes something and too little has
    /// moved for `timeout`, what was judged.
    pub(super) fn look(
        &mut self,
        connection: &Connection,
        now: Instant,
        timeout: Duration,
    ) -> (u64, Option<Slow>) {
        let sight = connection.sight();
        let moved = sight.moved(&self.last);
        self.last = sight;
        self.recent_bytes = self.recent_bytes - self.recent_bytes / 8 + moved;
        if sight.is_progress(&self.progress) {
            (self.progress, self.since) = (sight, now);
            return (moved, None);
        }
        let timeout = if sight.phase == Phase::Parting { FAREWELL } else { timeout };
        if now.duration_since(self.since) < timeout {
            return (moved, None);
        }
        let seconds = timeout.as_secs_f64();
        let (came, taken) = match sight.moved(&self.progress) {
            0 => ("no byte".to_owned(), "none".to_owned()),
            few => (format!("only {few} bytes"), format!("only {few}")),
        };
        let (cause, how) = match sight.phase {
            Phase::Idle | Phase::Waiting => return (moved, None),
            Phase::Receiving => (format!("{came} for {seconds} s in the middle of a frame"), Shutdown::Read),
            Phase::Parting => (format!("did not close within {seconds} s"), Shutdown::Both),
            Phase::Sending => {
                (format!("took {taken} of the bytes sent to it for {seconds} s"), Shutdown::Both)
            }
        };
        (moved, Some(Slow { judged: sight, cause, how }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (TcpStream, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (peer, Connection::new(Socket::new(listener.accept().unwrap().0).unwrap(), None))
    }

    #[tokio::test]
    async fn only_a_peer_that_owes_something_is_too_slow() {
        let (_peer, connection) = pair();
        let (start, timeout) = (Instant::now(), Duration::from_secs(10));
        let late = start + timeout;
        for (phase, slow) in
            [(Phase::Idle, false), (Phase::Waiting, false), (Phase::Receiving, true), (Phase::Sending, true)]
        {
            connection.enter(phase);
            let mut watch = Watch::new(&connection, start);
            assert_eq!(watch.look(&connection, start + timeout / 2, timeout), (0, None));
            assert_eq!(watch.look(&connection, late, timeout).1.is_some(), slow, "{phase:?}");
        }
    }

    #[tokio::test]
    async fn who_gets_on_between_the_look_and_the_judgement_is_not_too_slow() {
        let (_peer, connection) = pair();
        let (start, timeout) = (Instant::now(), Duration::from_secs(10));
        for phase in [Phase::Receiving, Phase::Sending] {
            connection.enter(phase);
            let slow = Watch::new(&connection, start).look(&connection, start + timeout, timeout).1.unwrap();
            assert!(slow.holds(&connection), "{phase:?}");
            connection.idle(0);
            assert!(!slow.holds(&connection), "{phase:?} is over");
        }
    }

    #[tokio::test]
    async fn the_servers_own_standstill_is_no_peers_debt() {
        let (_peer, connection) = pair();
        let (start, timeout, standstill) =
            (Instant::now(), Duration::from_secs(10), Duration::from_secs(100));
        let mut watch = Watch::new(&connection, start);
        let woke = start + timeout / 2 + standstill;
        watch.excuse(standstill, woke);
        assert_eq!(watch.look(&connection, woke, timeout), (0, None));
        assert!(watch.look(&connection, woke + timeout / 2, timeout).1.is_some());
    }

    #[tokio::test]
    async fn a_peer_that_was_told_to_go_has_a_moment() {
        let (_peer, connection) = pair();
        let start = Instant::now();
        connection.enter(Phase::Parting);
        let mut watch = Watch::new(&connection, start);
        assert_eq!(watch.look(&connection, start + FAREWELL / 2, FAREWELL * 9), (0, None));
        assert!(watch.look(&connection, start + FAREWELL, FAREWELL * 9).1.is_some());
    }

    /// Reads what the peer has sent.
    async fn read(connection: &Connection, bytes: usize) {
        let mut room = vec![0; bytes];
        let mut left = &mut room[..];
        while !left.is_empty() {
            let n = connection.socket.read_vectored(&mut [std::io::IoSliceMut::new(left)]).await.unwrap();
            left = &mut left[n..];
        }
    }

    #[tokio::test]
    async fn a_part_of_a_header_is_a_debt_and_a_byte_now_and_then_no_payment() {
        let (mut peer, connection) = pair();
        connection.idle(0);
        let (start, timeout) = (Instant::now(), Duration::from_secs(10));
        let mut watch = Watch::new(&connection, start);
        assert_eq!(watch.look(&connection, start + timeout * 9, timeout), (0, None));
        peer.write_all(&[1, 2, 3]).unwrap();
        read(&connection, 3).await;
        let now = start + timeout * 9;
        assert_eq!(watch.look(&connection, now, timeout), (3, None), "now it owes the rest");
        peer.write_all(&[4]).unwrap();
        read(&connection, 1).await;
        assert_eq!(watch.look(&connection, now + timeout / 2, timeout), (1, None));
        let said = watch.look(&connection, now + timeout, timeout).1.unwrap().cause;
        assert!(said.contains("only 1 bytes for 10 s"), "{said}");
    }

    #[tokio::test]
    async fn a_packet_or_the_end_of_a_frame_is_a_respite() {
        let (mut peer, connection) = pair();
        let (start, timeout) = (Instant::now(), Duration::from_secs(10));
        connection.enter(Phase::Receiving);
        let mut watch = Watch::new(&connection, start);
        let packet = usize::try_from(PROGRESS_BYTES).unwrap();
        peer.write_all(&vec![0; packet + 7]).unwrap();
        read(&connection, packet).await;
        assert_eq!(watch.look(&connection, start + timeout, timeout), (PROGRESS_BYTES, None));
        read(&connection, 7).await;
        connection.idle(0); // between two looks
        connection.enter(Phase::Receiving);
        assert_eq!(watch.look(&connection, start + timeout * 2, timeout), (7, None));
        let said = watch.look(&connection, start + timeout * 3, timeout).1.unwrap().cause;
        assert!(said.contains("no byte for 10 s"), "{said}");
    }
}
