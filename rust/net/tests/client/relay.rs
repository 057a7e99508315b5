//! A stretch of network between a worker and its server that breaks where a test wants it to.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// How much goes through a connection before it is cut: bytes to the server and bytes back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) up: usize,
    pub(crate) down: usize,
    /// Whether the server hears of it.
    pub(crate) is_heard: bool,
}

/// Nothing is cut.
pub(crate) const WHOLE: Cut = Cut { up: usize::MAX, down: usize::MAX, is_heard: true };

#[derive(Debug)]
struct State {
    /// Of the next connections, first to last; afterwards they are whole.
    plan: VecDeque<Cut>,
    /// `None`: whoever connects is hung up on.
    server: Option<SocketAddr>,
    sockets: Vec<TcpStream>,
    /// What of an answer still gets through.
    answer: Option<usize>,
    is_over: bool,
    num_cut: usize,
}

impl State {
    fn hang_up(&mut self) {
        for socket in self.sockets.drain(..) {
            socket.shutdown(Shutdown::Both).ok(); // it may have ended
        }
    }

    /// How many bytes of an answer get through.
    fn let_through(&mut self, bytes: usize) -> usize {
        let Some(left) = self.answer else { return bytes };
        self.answer = if bytes < left { Some(left - bytes) } else { None };
        bytes.min(left)
    }
}

/// Passes connections on.
pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
    acceptor: Option<JoinHandle<()>>,
}

impl Relay {
    pub(crate) fn new(server: SocketAddr, plan: impl IntoIterator<Item = Cut>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let plan = plan.into_iter().collect();
        let state = State {
            plan,
            server: Some(server),
            sockets: Vec::new(),
            answer: None,
            is_over: false,
            num_cut: 0,
        };
        let state = Arc::new(Mutex::new(state));
        let of_thread = Arc::clone(&state);
        let acceptor = std::thread::spawn(move || accept(&listener, &of_thread));
        Self { address, state, acceptor: Some(acceptor) }
    }

    /// Hangs up on everybody, and cuts what comes next as planned.
    pub(crate) fn disturb(&self, plan: impl IntoIterator<Item = Cut>) {
        let mut state = self.state.lock().unwrap();
        state.plan = plan.into_iter().collect();
        state.hang_up();
    }

    /// Of what the server sends next so many bytes get through, and then its connection is cut.
    pub(crate) fn cut_answer_after(&self, bytes: usize) {
        self.state.lock().unwrap().answer = Some(bytes);
    }

    /// Whoever connects from now on finds nobody, until there is a server again; connections stand.
    pub(crate) fn send_on_to_nobody(&self) {
        self.state.lock().unwrap().server = None;
    }

    /// Hangs up on everybody, and on whoever comes, until there is a server again.
    pub(crate) fn go_down(&self) {
        let mut state = self.state.lock().unwrap();
        state.server = None;
        state.hang_up();
    }

    pub(crate) fn come_up(&self, server: SocketAddr) {
        self.state.lock().unwrap().server = Some(server);
    }

    /// Connections that were cut as planned.
    pub(crate) fn num_cut(&self) -> usize {
        self.state.lock().unwrap().num_cut
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.go_down();
        self.state.lock().unwrap().is_over = true;
        drop(TcpStream::connect(self.address)); // wakes the acceptor
        self.acceptor.take().unwrap().join().unwrap();
    }
}

fn accept(listener: &TcpListener, state: &Arc<Mutex<State>>) {
    while let Ok((worker, _)) = listener.accept() {
        let mut locked = state.lock().unwrap();
        if locked.is_over {
            return;
        }
        let Some(server) = locked.server else { continue };
        let Ok(server) = TcpStream::connect(server) else { continue };
        let cut = locked.plan.pop_front().unwrap_or(WHOLE);
        let copy = |socket: &TcpStream| socket.try_clone().unwrap();
        locked.sockets.extend([copy(&worker), copy(&server)]);
        let up = Way { from: copy(&worker), to: copy(&server), budget: cut.up, answers: None };
        let down = Way { from: server, to: worker, budget: cut.down, answers: Some(Arc::clone(state)) };
        for way in [up, down] {
            let state = Arc::clone(state);
            std::thread::spawn(move || {
                let is_cut = way.pump();
                state.lock().unwrap().num_cut += usize::from(is_cut);
                // The worker hears of it in any case.
                let (server, worker) =
                    if way.answers.is_some() { (&way.from, &way.to) } else { (&way.to, &way.from) };
                worker.shutdown(Shutdown::Both).ok();
                if cut.is_heard || !is_cut {
                    server.shutdown(Shutdown::Both).ok();
                }
            });
        }
    }
}

/// One direction of a connection.
struct Way {
    from: TcpStream,
    to: TcpStream,
    budget: usize,
    /// From the server.
    answers: Option<Arc<Mutex<State>>>,
}

impl Way {
    /// Passes bytes on until one side ends, or the budget does; whether it was that.
    fn pump(&self) -> bool {
        let mut bytes = [0; 16 << 10];
        let mut budget = self.budget;
        while budget > 0 {
            let most = bytes.len().min(budget);
            let Ok(read @ 1..) = (&self.from).read(&mut bytes[..most]) else { return false };
            let through = self.answers.as_ref().map_or(read, |state| state.lock().unwrap().let_through(read));
            if (&self.to).write_all(&bytes[..through]).is_err() {
                return false;
            }
            if through < read {
                return true;
            }
            budget -= read;
        }
        true
    }
}
