//! A worker's side of a session.
//!
//! A [`Client`] is driven by the thread that calls it: every call sends and receives at once until it has what it waits
//! for, and answers Ctrl-C. Only opening a connection, and the control thread, run an event loop. One idea a file:
//!
//! - [`memory`](Memory): tensors that belong to the caller, sent and received in place
//! - `address`, `connect`, `join`: who answers, handshake, who we are; `back`: who we were; `control`: heartbeats and what the server has to say
//! - `stream`: the data connection's descriptor, and the wait for it; `outgoing` with `payload`, `inbound`: its two
//!   directions, with their half-done frames
//! - `connection`: one call's turn on both at once; `deliver`: where what arrives goes; `flight`: what was asked for
//!   and has not ended
//! - `held`: what was read, so what a push is based on; `momentum`: this worker's velocity
//! - `session`, `bring`, `push`, `round`: the calls; `finite`, `model`: what they check before a byte leaves
//!
//! Promises, each with its test:
//! - CLIENT-1 Sequence numbers are contiguous from 1 in an incarnation; a push that was refused did not use its own.
//! - CLIENT-2 A push that is refused for its values (not finite, wrong size) has sent nothing.
//! - CLIENT-3 A call that was interrupted leaves the connection in the middle of nothing: what had begun to leave is
//!   copied, and the next call sends the rest and reads the answer before it does anything else. The push may be
//!   applied; its receipt comes with [`Client::flush`]. Parameters that come too late are dropped, and what the worker
//!   has read stays what it was. The goodbye alone does not wait for that answer: where it is another worker's to give,
//!   this side has nothing more to say, and the server reads on.
//! - CLIENT-4 A full socket buffer never blocks the other direction.
//! - CLIENT-5 A push that was made for an optimizer that the run no longer has is rejected (`optimizer_changed`), and
//!   the client asks for the run before its next one: momentum and velocity are never those of another optimizer.
//! - CLIENT-6 In a forked child every call returns [`ClientError::Forked`] and dropping does nothing.
//!
//! - CLIENT-7 A connection that is lost is made again by the call that finds it so, within [`ClientConfig::patience`]:
//!   this process is who it was, and every push is applied once. With one in flight it is sent again where it is
//!   missing; with two, one whose memory is gone ends as it is, and its receipt says how.

mod address;
mod attempt;
mod back;
mod bring;
mod config;
mod connect;
mod connection;
mod control;
mod deliver;
mod error;
mod finite;
mod flight;
mod held;
mod inbound;
mod join;
mod memory;
mod model;
mod momentum;
mod outgoing;
mod payload;
mod push;
mod round;
mod session;
mod silence;
mod stream;
mod way;

pub use config::{ClientConfig, Interrupt, Pulled, PushInput, Session};
pub use control::Events;
pub use error::ClientError;
pub use memory::Memory;
pub use round::{Entered, Entry, Gathered};

use crate::fork::Origin;
use crate::token::Token;
use connect::{Opened, Opening, Target};
use offbeat_core::spec::{Contribution, OptimizerSpec};
use offbeat_core::store::Receipt;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::message::{Call, Parting, Replaces, Reply, RunConfig};
use push::Destination;
use session::Inner;
use std::sync::Arc;
use std::time::Duration;

/// How long [`Client::close`] waits for the server to have heard it.
const GOODBYE: Duration = Duration::from_secs(5);

/// A worker's session with a server.
///
/// With two pushes in flight ([`ClientConfig::in_flight`]) [`Client::push_pull`] sends push n and returns the answer to
/// push n − 1. What arrives of the answer to n while n is still being sent waits in memory of the client's own, at most
/// one model, and is copied by the next call.
#[derive(Debug)]
pub struct Client {
    origin: Origin,
    /// `None` once closed.
    inner: Option<Box<Inner>>,
}

impl Client {
    /// Joins a run, trying until [`ClientConfig::connect_timeout`]. `table` is the worker's model, which must be the
    /// server's, where it has one.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`], [`ClientError::Timeout`], [`ClientError::Authentication`],
    /// [`ClientError::ModelMismatch`], [`ClientError::Refused`] (another run, no room), [`ClientError::Interrupted`],
    /// [`ClientError::BadInput`], [`ClientError::Protocol`], [`ClientError::Lost`].
    pub fn connect(
        config: ClientConfig,
        table: Option<&TensorTable>,
        interrupt: &dyn Interrupt,
    ) -> Result<Self, ClientError> {
        let inner = Inner::connect(config, table, interrupt)?;
        Ok(Self { origin: Origin::here(), inner: Some(Box::new(inner)) })
    }

    fn inner(&mut self) -> Result<&mut Inner, ClientError> {
        if self.origin.is_elsewhere() {
            return Err(ClientError::Forked);
        }
        let inner = self.inner.as_mut().ok_or(ClientError::Closed)?;
        inner.check()?;
        Ok(inner)
    }

    fn look(&self) -> Result<&Inner, ClientError> {
        if self.origin.is_elsewhere() {
            return Err(ClientError::Forked);
        }
        self.inner.as_deref().ok_or(ClientError::Closed)
    }

    /// What the server has said about the session.
    ///
    /// # Errors
    /// [`ClientError::Forked`], [`ClientError::Closed`].
    pub fn session(&self) -> Result<&Session, ClientError> {
        Ok(&self.look()?.session)
    }

    /// How long a call waits for the server where that is lost: as it was given, or by whether that keeps checkpoints.
    ///
    /// # Errors
    /// [`ClientError::Forked`], [`ClientError::Closed`].
    pub fn patience(&self) -> Result<Duration, ClientError> {
        Ok(self.look()?.way.patience())
    }

    /// What the server has said on the control connection.
    ///
    /// # Errors
    /// [`ClientError::Forked`], [`ClientError::Closed`].
    pub fn events(&self) -> Result<Events, ClientError> {
        Ok(self.look()?.control.events())
    }

    /// Waits until the server has a model. After an interrupt the server still waits: this call or [`Self::close`] goes
    /// on, any other waits for the model too.
    ///
    /// # Errors
    /// [`ClientError::Interrupted`], [`ClientError::Lost`], [`ClientError::Protocol`], [`ClientError::Refused`]; and
    /// from here on, for every call: [`ClientError::Fenced`], [`ClientError::Forked`], [`ClientError::Closed`].
    pub fn wait_for_model(&mut self, interrupt: &dyn Interrupt) -> Result<Arc<TensorTable>, ClientError> {
        self.inner()?.again(interrupt, &mut |inner| inner.wait_for_model(interrupt))
    }

    /// Brings a model: `values` are the tensors' bytes in the table's order. Waits while another worker brings one.
    /// Returns whether this one was taken; if not, the server has the same tensors with other values.
    ///
    /// # Errors
    /// [`ClientError::ModelMismatch`] if another model was there first. An interrupt ends the session, since others
    /// wait for the values. Else as [`Self::wait_for_model`].
    pub fn init(
        &mut self,
        table: &TensorTable,
        values: &[&[u8]],
        blueprint: Option<&str>,
        interrupt: &dyn Interrupt,
    ) -> Result<bool, ClientError> {
        let inner = self.inner()?;
        inner.again(interrupt, &mut |inner| inner.init(table, values, blueprint, None, interrupt))
    }

    /// Brings values, as [`Self::init`] does, also where there is a model that is to give way: it has these values then in a
    /// new term, in which its optimizer begins anew, and pushes that were computed on the ones before are rejected. Whether it
    /// is such a model is asked once more as the term is raised, so that no push that gets its version after the one that
    /// [`Replaces::At`] names is lost to them. One that had it, and was still arriving as that was pulled, is, where the
    /// server's transaction is "fragment". Returns whether these were taken; where a connection was lost on the way, `false` may be said of values that had been, and are
    /// there.
    ///
    /// # Errors
    /// As [`Self::init`].
    pub fn replace(
        &mut self,
        table: &TensorTable,
        values: &[&[u8]],
        gives_way: Replaces,
        interrupt: &dyn Interrupt,
    ) -> Result<bool, ClientError> {
        let inner = self.inner()?;
        inner.again(interrupt, &mut |inner| inner.init(table, values, None, Some(gives_way), interrupt))
    }

    /// Says what this worker's pushes carry and which optimizer it was given.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the run has another contribution or optimizer. Else as [`Self::wait_for_model`].
    pub fn configure(
        &mut self,
        contribution: Contribution,
        optimizer: Option<&OptimizerSpec>,
        interrupt: &dyn Interrupt,
    ) -> Result<RunConfig, ClientError> {
        let call = Call::Configure { contribution, optimizer: optimizer.cloned() };
        let inner = self.inner()?;
        inner.again(interrupt, &mut |inner| match inner.call(&call, interrupt)? {
            Reply::Configured { run } => {
                inner.set_run(run.clone());
                inner.contribution = Some(contribution);
                inner.way.configured = Some((contribution, optimizer.cloned()));
                Ok(run)
            }
            reply => Err(inner.unexpected(&reply)),
        })
    }

    /// Fetches the parameters into `out`, one memory per tensor of the table. `incremental`: `out` holds what the last
    /// call wrote into it (its buffers may have changed since), so that what the server has not changed need not come.
    ///
    /// # Errors
    /// As [`Self::wait_for_model`]; after any error `out` holds old and new fragments.
    pub fn pull(
        &mut self,
        out: &[Memory<'_>],
        incremental: bool,
        interrupt: &dyn Interrupt,
    ) -> Result<Pulled, ClientError> {
        self.inner()?.pull(Destination { out, incremental }, interrupt)
    }

    /// Sends a contribution and waits for its receipt. What was in flight is settled before; its parameters are dropped.
    ///
    /// # Errors
    /// [`ClientError::NonFinite`], [`ClientError::BadInput`]: nothing was sent. [`ClientError::Refused`] if the run's
    /// pushes have come to carry something else. Else as [`Self::wait_for_model`]. That there is no optimizer, or that
    /// the run is over, is a receipt and no error.
    pub fn push(&mut self, input: PushInput<'_>, interrupt: &dyn Interrupt) -> Result<Receipt, ClientError> {
        match self.inner()?.push(&input, None, interrupt)? {
            Some(receipt) => Ok(receipt),
            None => unreachable!("a push without parameters waits for its own receipt"),
        }
    }

    /// Sends a contribution and fetches the parameters. With one in flight: those that follow from it, and its receipt;
    /// with two: those that follow from the call before, and that one's receipt, so nothing at the first call.
    ///
    /// # Errors
    /// As [`Self::push`] and [`Self::pull`].
    pub fn push_pull(
        &mut self,
        input: PushInput<'_>,
        out: &[Memory<'_>],
        incremental: bool,
        interrupt: &dyn Interrupt,
    ) -> Result<Option<Receipt>, ClientError> {
        self.inner()?.push(&input, Some(Destination { out, incremental }), interrupt)
    }

    /// Settles everything in flight: the receipts not yet seen, those of interrupted pushes among them (the newest 64).
    /// The newest parameters go to `out`, which must be the memory of the calls before if these were incremental;
    /// without it they are dropped.
    ///
    /// # Errors
    /// As [`Self::pull`].
    pub fn flush(
        &mut self,
        out: Option<&[Memory<'_>]>,
        interrupt: &dyn Interrupt,
    ) -> Result<Vec<Receipt>, ClientError> {
        self.inner()?.flush(out, interrupt)
    }

    /// Takes receipts back that did not reach the caller: they come with the next [`Self::flush`].
    ///
    /// # Errors
    /// [`ClientError::Closed`].
    pub fn unclaim(&mut self, receipts: &[Receipt]) -> Result<(), ClientError> {
        self.inner()?.keep_for_flush(receipts.iter().cloned());
        Ok(())
    }

    /// Enters a round with what so many samples have made, and waits for those who take part: all who have entered one
    /// before and are there, or until the longest `grace` that is given has passed since the first entered; the server
    /// looks at the clock, in milliseconds. Then push what is to be this worker's share of the whole, and
    /// [gather](Self::gather): who does nothing for long while others wait for that is given up.
    ///
    /// Until it has gathered, a worker is in its round: if it enters again, whatever it says, it is answered the same.
    /// After an interrupt the server still waits: this call or [`Self::close`] goes on, any other waits for the round too.
    ///
    /// # Errors
    /// [`ClientError::BadInput`] if `samples` is not a finite number, 0 or more, or words are too long;
    /// [`ClientError::Refused`] if others take part by other terms. Else as [`Self::wait_for_model`].
    pub fn enter(&mut self, entry: &Entry, interrupt: &dyn Interrupt) -> Result<Entered, ClientError> {
        self.inner()?.enter(entry, interrupt)
    }

    /// Says that this worker's push in a round has ended, and waits until everybody's has; those who are lost or leave are
    /// not waited for. A pull after that has all that came. A round that the server does not know is over.
    ///
    /// # Errors
    /// As [`Self::wait_for_model`].
    pub fn gather(&mut self, round: u64, interrupt: &dyn Interrupt) -> Result<Gathered, ClientError> {
        self.inner()?.gather(round, interrupt)
    }

    /// The server's status, as JSON.
    ///
    /// # Errors
    /// As [`Self::wait_for_model`].
    pub fn status(&mut self, interrupt: &dyn Interrupt) -> Result<String, ClientError> {
        self.inner()?.again(interrupt, &mut |inner| match inner.call(&Call::Status, interrupt)? {
            Reply::Status { json } => Ok(json),
            reply => Err(inner.unexpected(&reply)),
        })
    }

    /// What the heartbeats say; a worker whose number stands still is shown as stalled.
    ///
    /// # Errors
    /// [`ClientError::Forked`], [`ClientError::Closed`].
    pub fn set_progress(&self, progress: u64) -> Result<(), ClientError> {
        self.look()?.control.set_progress(progress);
        Ok(())
    }

    /// Says goodbye and closes. What is in flight is waited for, 5 seconds at most, and its parameters are dropped; an interrupted
    /// call that waits for other workers is given up.
    /// Closing twice is fine.
    ///
    /// # Errors
    /// [`ClientError::Forked`].
    pub fn close(&mut self, parting: Parting, interrupt: &dyn Interrupt) -> Result<(), ClientError> {
        if self.origin.is_elsewhere() {
            return Err(ClientError::Forked);
        }
        if let Some(mut inner) = self.inner.take() {
            inner.goodbye(parting, interrupt, GOODBYE);
        }
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let Some(mut inner) = self.inner.take() else {
            return;
        };
        if self.origin.is_elsewhere() {
            // Its sockets and thread are the parent's; `forget_after_fork` has closed what must be closed.
            Box::leak(inner);
        } else {
            inner.last_word();
        }
    }
}

/// Asks a server for its status without joining it.
///
/// # Errors
/// As [`Client::connect`].
pub fn fetch_status(
    address: &str,
    token: Option<&str>,
    limit: Duration,
    interrupt: &dyn Interrupt,
) -> Result<String, ClientError> {
    let target = Target { address: address.to_owned(), at: None, token: token.map(Token::from) };
    let runtime = join::runtime(address)?;
    let opened = join::unless_interrupted(interrupt, target.open(&Opening::Status, limit));
    match runtime.block_on(opened)?.2 {
        Opened::Status(json) => Ok(json),
        Opened::Data(_) | Opened::Control => unreachable!("a status was asked for"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{Server, ServerConfig};

    #[test]
    fn a_client_may_move_to_another_thread() {
        fn is_send<T: Send>() {}
        is_send::<Client>();
        is_send::<Memory<'_>>();
    }

    #[test]
    fn in_a_forked_child_nothing_works_and_nothing_is_touched() {
        let never = || false;
        let server = Server::start(ServerConfig::default()).unwrap();
        let config = ClientConfig {
            address: server.address().to_string(),
            worker_id: Some("parent".into()),
            token: None,
            run_id: None,
            in_flight: 1,
            connect_timeout: GOODBYE,
            patience: None,
        };
        let mut client = Client::connect(config, None, &never).unwrap();
        client.origin = Origin::elsewhere();
        let input = || PushInput { values: &[], samples: 1 };
        assert_eq!(client.wait_for_model(&never).unwrap_err(), ClientError::Forked);
        assert_eq!(client.pull(&[], false, &never), Err(ClientError::Forked));
        assert_eq!(client.push(input(), &never), Err(ClientError::Forked));
        assert_eq!(client.push_pull(input(), &[], false, &never), Err(ClientError::Forked));
        assert_eq!(client.flush(None, &never), Err(ClientError::Forked));
        assert_eq!(client.status(&never), Err(ClientError::Forked));
        assert_eq!(client.enter(&Entry::of(1.0), &never), Err(ClientError::Forked));
        assert_eq!(client.gather(1, &never), Err(ClientError::Forked));
        assert_eq!(client.configure(Contribution::Gradient, None, &never), Err(ClientError::Forked));
        assert_eq!(client.close(Parting::Finished, &never), Err(ClientError::Forked));
        assert_eq!(client.set_progress(1), Err(ClientError::Forked));
        assert_eq!(client.session().unwrap_err(), ClientError::Forked);
        assert_eq!(client.events().unwrap_err(), ClientError::Forked);
        drop(client);
        let status = server.status_json().unwrap();
        assert!(status.contains("\"joined\"") && !status.contains("\"left\""), "{status}");
    }
}
