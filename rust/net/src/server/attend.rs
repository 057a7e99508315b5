//! What becomes of a data connection that has proved who it is: it joins, its session is served, and has its farewell.
//!
//! A session goes from one data thread to another, between two frames: with what it has read ahead, its place in the
//! store, its seat and its counts. Its stream gets a second descriptor, so that at no moment is there none by which the
//! connection could be closed from outside.

use super::connection::{Connection, Phase};
use super::end::End;
use super::join::join;
use super::poll;
use super::session::{Pause, Session};
use super::shared::{Enrolled, Meter, Shared};
use crate::frame::{FrameReader, Moving};
use crate::handshake::{self, frame_refusal};
use offbeat_core::wire::message::Refused;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;

/// A session, with what is held until it has ended.
struct Attended {
    session: Session,
    watched: Enrolled,
    /// The data threads.
    data: Arc<[Handle]>,
    admitted: OwnedSemaphorePermit,
}

/// Serves a connection that has proved who it is, to its end.
pub(super) async fn serve(
    shared: Arc<Shared>,
    data: Arc<[Handle]>,
    thread: usize,
    stream: Moving,
    reader: FrameReader,
    admitted: OwnedSemaphorePermit,
) {
    let socket = match stream.arrive() {
        Ok(socket) => socket,
        Err(error) => {
            tracing::debug!(%error, "a connection was gone before it was served");
            shared.loads[thread].connections.fetch_sub(1, Ordering::Relaxed);
            return;
        }
    };
    let connection = Arc::new(Connection::new(socket, Some(thread)));
    let watched = shared.enrol(&connection); // to the last word
    let (mut reader, peer) = (reader, connection.socket.peer());
    let joined = join(&shared, &connection, &mut reader).await;
    match joined {
        Ok(entered) => {
            let session = Session::new(shared, connection, reader, entered);
            attend(Attended { session, watched, data, admitted }).await;
        }
        Err(end) => {
            tracing::warn!(%peer, cause = end.cause(&connection), "a worker could not join");
            farewell(&connection, end).await;
        }
    }
}

/// Serves a session to its end, or until it moves.
async fn attend(mut attended: Attended) {
    let end = match attended.session.run().await {
        Ok(Pause::Gone) => return,
        Ok(Pause::Moves { to, stream }) => return attended.set_off(to, stream),
        Err(end) => end,
    };
    let Attended { session, watched, admitted, .. } = attended;
    let connection = session.end(&end); // an open push is given up before the farewell, which may take a moment
    farewell(&connection, end).await;
    drop((watched, admitted));
}

/// Tells the worker why, where it can still be told.
async fn farewell(connection: &Connection, end: End) {
    let (request, refused) = match (connection.end(), end) {
        // What this end refused comes before what its other connection's end made of it.
        (_, End::Refused { request, refused }) => (request, Some(refused)),
        (Some((code, message)), _) => (0, Some(Refused { code, message, fatal: true })),
        (None, End::Frame(error)) => (0, frame_refusal(&error)),
    };
    if let Some(refused) = refused {
        connection.enter(Phase::Parting); // the watchdog bounds it: data threads have no timers
        handshake::part(&connection.socket, request, &refused).await;
    }
}

impl Attended {
    /// Goes on on another thread. Not async: its task is not a part of the one that ends here.
    fn set_off(self, to: usize, stream: Moving) {
        let (meter, thread) = (Meter::new(&self.session.shared, to), self.data[to].clone());
        let mut attended = self;
        thread.spawn(poll::timed(meter, async move {
            attended.arrive(to, stream);
            attend(attended).await;
        }));
    }

    /// On the new thread.
    fn arrive(&mut self, to: usize, stream: Moving) {
        let session = &mut self.session;
        match stream.arrive() {
            Ok(socket) => {
                let moved = Arc::new(session.connection.moved(socket, to));
                session.shared.members().moved(session.incarnation, &session.connection, &moved);
                self.watched.moved(&moved);
                session.connection = moved;
            }
            // With the stream of before, of which the old thread will tell. Mostly the peer has just gone.
            Err(error) => session.stay(&error),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::client::{Client, ClientConfig, Memory, PushInput};
    use crate::server::connection::Connection;
    use crate::server::{Server, ServerConfig, Snapshot};
    use offbeat_core::dtype::Dtype;
    use offbeat_core::spec::{Group, OptimizerSpec, Rule, Transaction};
    use offbeat_core::table::{Role, TensorSpec, TensorTable};
    use offbeat_core::wire::message::Parting;
    use serde_json::Value;
    use std::sync::Arc;
    use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
    use std::thread;
    use std::time::{Duration, Instant};

    const DEADLINE: Duration = Duration::from_secs(60);
    const LOOK: Duration = Duration::from_millis(1);
    /// Elements: a whole fragment and a part of one.
    const LEN: usize = 70_000;

    fn server(transaction: Transaction) -> Server {
        let (name, dtype, role) = ("w".into(), Dtype::F32, Role::Parameter);
        let tensor = TensorSpec { name, aliases: vec![], shape: vec![LEN as u64], dtype, role };
        let model = Snapshot::of(TensorTable::new(vec![tensor]).unwrap(), &[vec![0; 4 * LEN]]).unwrap();
        let rule =
            Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
        let groups = vec![Group { pattern: "*".into(), lr: 1.0, rule }];
        let optimizer = Some(OptimizerSpec { groups, momentum_correction: false });
        let num_data_threads = Some(2);
        let config = ServerConfig { transaction, optimizer, num_data_threads, ..ServerConfig::default() };
        Server::with_model(config, model).unwrap()
    }

    fn client(server: &Server, in_flight: usize) -> Client {
        let config = ClientConfig {
            address: server.address().to_string(),
            worker_id: None,
            token: None,
            run_id: None,
            in_flight,
            connect_timeout: DEADLINE,
            patience: Some(Duration::ZERO),
        };
        Client::connect(config, None, &|| false).unwrap()
    }

    /// Pushes ones until `goes_on` says no, then says goodbye. How often.
    fn work(mut client: Client, mut goes_on: impl FnMut(u64) -> bool) -> u64 {
        let never = || false;
        let mut gradient = 1_f32.to_le_bytes().repeat(LEN);
        let mut parameters = vec![0; 4 * LEN];
        client.pull(&[Memory::of(&mut parameters)], false, &never).unwrap();
        let mut num_pushes = 0;
        while goes_on(num_pushes) {
            let values = [Some(Memory::of(&mut gradient))];
            let input = PushInput { values: &values, samples: 1 };
            client.push_pull(input, &[Memory::of(&mut parameters)], true, &never).unwrap();
            num_pushes += 1;
        }
        client.flush(None, &never).unwrap();
        client.close(Parting::Finished, &never).unwrap();
        num_pushes
    }

    fn served(server: &Server) -> Vec<(u64, Arc<Connection>)> {
        server.shared.connections().into_iter().filter(|(_, c)| c.thread.is_some()).collect()
    }

    /// How many connections each of two threads serves: as the watchdog's list has it, and as the counts do.
    fn by_thread(server: &Server) -> [usize; 2] {
        let served = served(server);
        [0, 1].map(|thread| served.iter().filter(|(_, c)| c.thread == Some(thread)).count())
    }

    fn status(server: &Server) -> Value {
        serde_json::from_str(&server.status_json().unwrap()).unwrap()
    }

    /// Every push has counted once, in every element.
    fn assert_exact(server: &Server, num_pushes: u64) {
        let status = status(server);
        let tickets = &status["tickets"];
        assert_eq!((&tickets["issued"], &tickets["applied"]), (&num_pushes.into(), &num_pushes.into()));
        assert_eq!((&status["duplicates"], &status["rejected"]), (&0.into(), &serde_json::json!({})));
        let (_, tensors) = server.tensors().unwrap().unwrap();
        let (values, rest) = tensors[0].as_chunks();
        assert!(rest.is_empty() && values.len() == LEN);
        assert!(values.iter().all(|v| f32::from_le_bytes(*v) == -(num_pushes as f32)));
    }

    #[test]
    fn pushes_count_once_while_their_connections_go_back_and_forth() {
        const WORKERS: u64 = 3;
        const PUSHES: u64 = 60;
        for (transaction, in_flight) in
            [(Transaction::Fragment, 1), (Transaction::Fragment, 2), (Transaction::Model, 2)]
        {
            let server = server(transaction);
            let (done, is_done) = mpsc::channel::<()>();
            thread::scope(|scope| {
                for _ in 0..WORKERS {
                    let (client, done) = (client(&server, in_flight), done.clone());
                    scope.spawn(move || {
                        work(client, |n| n < PUSHES);
                        drop(done);
                    });
                }
                drop(done);
                while is_done.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    for (_, connection) in served(&server) {
                        connection.ask_to_move(1 - connection.thread.unwrap());
                    }
                }
            });
            assert_exact(&server, WORKERS * PUSHES);
            let status = status(&server);
            assert!(status["moved_connections"].as_u64().unwrap() > WORKERS, "{status:#}");
            let workers = status["workers"].as_array().unwrap();
            assert!(workers.iter().all(|w| w["state"] == "finished" && w["pushes"] == PUSHES), "{status:#}");
            let bytes = PUSHES * 4 * LEN as u64;
            for worker in workers {
                let received = worker["bytes_received"].as_u64().unwrap();
                assert!((bytes..bytes + bytes / 8).contains(&received), "{received} of {bytes}");
            }
        }
    }

    #[test]
    fn those_who_stay_are_spread_when_all_of_one_thread_leave() {
        let server = server(Transaction::Fragment);
        let work_until_told = |client: Client, told: Receiver<()>| {
            work(client, |_| told.try_recv() != Err(mpsc::TryRecvError::Disconnected))
        };
        let mut workers: Vec<(usize, Sender<()>, thread::JoinHandle<u64>)> = Vec::new();
        while by_thread(&server).iter().any(|&n| n < 4) {
            let client = client(&server, 1);
            let newest = served(&server).pop().unwrap().1.thread.unwrap();
            let (tell, told) = mpsc::channel();
            workers.push((newest, tell, thread::spawn(move || work_until_told(client, told))));
            assert!(workers.len() <= 64, "all connections are on one thread");
        }
        let (mut pushed, mut staying) = (0, Vec::new());
        for (at, tell, worker) in workers {
            // It may have moved by now, which is as good: many of one thread leave.
            if at == 1 {
                drop(tell);
                pushed += worker.join().unwrap();
            } else {
                staying.push((tell, worker));
            }
        }
        let end = Instant::now() + DEADLINE;
        let (_never, clock) = mpsc::channel::<()>();
        let is_even = || by_thread(&server).iter().all(|n| n.abs_diff(staying.len() / 2) <= 1);
        while !is_even() {
            assert!(Instant::now() < end, "{:?}", by_thread(&server));
            clock.recv_timeout(LOOK).ok();
        }
        for (tell, worker) in staying {
            drop(tell);
            pushed += worker.join().unwrap();
        }
        assert_exact(&server, pushed);
    }

    #[test]
    fn who_was_closed_from_outside_while_it_moved_is_told_why() {
        let server = server(Transaction::Fragment);
        let client = client(&server, 1);
        let before = served(&server).pop().unwrap().1;
        before.ask_to_move(1 - before.thread.unwrap());
        let (gone, is_gone) = mpsc::channel::<()>();
        let worker = thread::spawn(move || {
            let pushes = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(client, |_| true)));
            drop(gone);
            pushes.expect_err("it has pushed to its end").downcast_ref::<String>().unwrap().clone()
        });
        let end = Instant::now() + DEADLINE;
        while served(&server).iter().all(|(_, now)| Arc::ptr_eq(now, &before)) {
            assert!(Instant::now() < end, "it has not moved");
            is_gone.recv_timeout(LOOK).ok();
        }
        // Who looked it up before it moved has only this.
        let code = offbeat_core::wire::message::RefusalCode::Timeout;
        before.close(code, "it was too slow for us", std::net::Shutdown::Read);
        assert!(worker.join().unwrap().contains("it was too slow for us"));
    }
}
