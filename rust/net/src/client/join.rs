//! Joining: the data connection first, then the control connection that belongs to it.

use super::address::ATTEMPT;
use super::config::{ClientConfig, Interrupt, Session};
use super::connect::{Opened, Opening, Target, host};
use super::connection::{Connection, last_word};
use super::control::Control;
use super::error::ClientError;
use super::momentum::Keep;
use super::session::{Inner, check_size};
use super::stream::{LOOK, Stream};
use super::way::Way;
use crate::frame::{FrameError, FrameReader, Socket};
use crate::handshake::{FAREWELL, refused};
use crate::limits::explained;
use offbeat_core::optim::Isa;
use offbeat_core::table::TensorTable;
use offbeat_core::wire::header::MAX_TABLE_BYTES;
use offbeat_core::wire::message::{Attach, Join, Joined, Parting, RefusalCode};
use offbeat_core::wire::{Kind, encode};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// The number of the only request of one that says goodbye before any other.
const FIRST_REQUEST: u32 = 1;

/// Waits for `future` and looks up every now and then.
pub(super) async fn unless_interrupted<T>(
    interrupt: &dyn Interrupt,
    future: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    let mut future = pin!(future);
    let mut ticks = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            biased;
            result = &mut future => return result,
            _ = ticks.tick() => {
                if interrupt.interrupted() {
                    return Err(ClientError::Interrupted);
                }
            }
        }
    }
}

/// A runtime for the calling thread.
pub(super) fn runtime(address: &str) -> Result<Runtime, ClientError> {
    let built = tokio::runtime::Builder::new_current_thread().enable_all().build();
    built.map_err(|e| ClientError::Lost {
        address: address.to_owned(),
        cause: format!("no runtime: {}", explained(&e)),
    })
}

/// Both connections of a session, and what the server has said of it.
pub(super) struct Entered {
    pub(super) stream: Stream,
    pub(super) control: Control,
    pub(super) joined: Joined,
}

/// Opens both connections within `limit`. A new process that cannot begin says so; one that is back goes on trying.
pub(super) fn enter(
    target: &Target,
    join: &Join,
    limit: Duration,
    interrupt: &dyn Interrupt,
) -> Result<Entered, ClientError> {
    let address = &target.address;
    let runtime = runtime(address)?;
    let mut payload = Vec::new();
    encode(join, &mut payload);
    check_size(Kind::Join, &payload)?;
    let begun = Instant::now();
    let (socket, mut reader, joined) = runtime.block_on(unless_interrupted(interrupt, async {
        let (socket, reader, opened) = target.open(&Opening::Data(join), limit).await?;
        let Opened::Data(joined) = opened else { unreachable!("data was asked for") };
        Ok((socket, reader, joined))
    }))?;
    let attach = Opening::Control(Attach { incarnation: joined.incarnation, secret: joined.secret });
    // A server that let us in at the last moment has time for the other half.
    let left = limit.saturating_sub(begun.elapsed()).max(limit.min(ATTEMPT));
    let heartbeat = Duration::from_millis(joined.heartbeat_ms);
    // A name may stand for several servers, and not all of its addresses need answer.
    let found = Target { at: Some(socket.peer()), ..target.clone() };
    // Kept until the last word is said: the end of a control connection would be taken for a loss.
    let mut attaching = pin!(async {
        let (socket, reader, _) = found.open(&attach, left).await?;
        Control::start(socket, reader, heartbeat, address)
    });
    let control = runtime.block_on(unless_interrupted(interrupt, async {
        let unread = reader.buffered() as u64;
        let due = socket.received() - unread;
        let mut over = pin!(over(address, &socket, &mut reader));
        let attached = tokio::select! {
            biased;
            error = &mut over => return Err(error),
            attached = &mut attaching => attached,
        };
        match attached {
            // Why there is none is told on the other connection.
            Err(error @ ClientError::Refused { code: RefusalCode::State, .. }) => {
                let cause = error.to_string();
                let untold = match join.back {
                    // The server has heard of an end of the other connection that this side has not.
                    Some(_) => ClientError::Lost { address: address.clone(), cause },
                    None => error,
                };
                Err(timeout(FAREWELL, over).await.unwrap_or(untold))
            }
            Ok(_) if socket.received() > due => {
                let cause = format!("the rest of a frame has not come in {:.1} s", FAREWELL.as_secs_f64());
                let address = address.clone();
                let late = |_| ClientError::Lost { address, cause };
                Err(timeout(FAREWELL, over).await.unwrap_or_else(late))
            }
            attached => attached,
        }
    }));
    let stream = Stream::new(socket);
    let stream = stream.map_err(|e| ClientError::from_frame(address, &FrameError::Io(e)))?;
    let control = control.inspect_err(|error| {
        let cause = match error {
            ClientError::Interrupted => "interrupted while it joined".to_owned(),
            error => error.to_string(),
        };
        if join.back.is_none() {
            last_word(&stream, address, FIRST_REQUEST, Parting::Withdrawn { cause: Some(cause) });
        }
    })?;
    Ok(Entered { stream, control, joined: *joined })
}

impl Inner {
    pub(super) fn connect(
        config: ClientConfig,
        table: Option<&TensorTable>,
        interrupt: &dyn Interrupt,
    ) -> Result<Self, ClientError> {
        let ClientConfig { address, worker_id, token, run_id, in_flight, connect_timeout, patience } = config;
        let wanted = u32::try_from(in_flight).ok().filter(|n| (1..=2).contains(n));
        let Some(wanted) = wanted else {
            return Err(ClientError::bad_input(format!("in_flight is {in_flight}: it is 1 or 2")));
        };
        let target = Target { address: address.clone(), at: None, token };
        let table = table.cloned();
        let join =
            Join { worker_id, run_id, table, host: host(), in_flight: wanted, back: None, attempt: None };
        let Entered { stream, control, joined } = enter(&target, &join, connect_timeout, interrupt)?;
        let in_flight = wanted.min(joined.in_flight).max(1);
        let keep = if in_flight > 1 { Keep::Sent } else { Keep::Settled };
        let way = Way {
            target,
            secret: joined.secret,
            in_flight,
            patience,
            keeps_checkpoints: joined.keeps_checkpoints,
            term: joined.term,
            configured: None,
        };
        let Joined { run_id, worker_id, incarnation, term, version, model, run, .. } = joined;
        let session = Session {
            run_id,
            worker_id,
            incarnation,
            term,
            version,
            came: false,
            table: None,
            blueprint: None,
            run,
        };
        let mut inner = Self {
            session,
            contribution: None,
            connection: Connection::new(address, stream, keep),
            control,
            isa: Isa::detect(),
            unclaimed: VecDeque::new(),
            way,
            lost: None,
            unsettled: Vec::new(),
            told: VecDeque::new(),
            broken: None,
        };
        if let Some(model) = model {
            inner.adopt(model)?;
        }
        Ok(inner)
    }
}

/// Waits for what ends a session that has not begun: a refusal, or the connection's own end. Anything else was not asked
/// for.
async fn over(address: &str, socket: &Socket, reader: &mut FrameReader) -> ClientError {
    let heard = async {
        let header = reader.header(socket).await?;
        refused(socket, reader, &header, MAX_TABLE_BYTES).await
    };
    match heard.await {
        Ok(Some(refused)) => ClientError::from_refused(address, refused),
        Ok(None) => {
            let cause = "it spoke before it was asked".to_owned();
            ClientError::Protocol { address: address.to_owned(), cause }
        }
        Err(error) => ClientError::from_frame(address, &error),
    }
}
