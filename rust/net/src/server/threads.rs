//! The server's threads, each with a runtime of its own: how they start, and that they end together.

use super::clock;
use super::control;
use super::drain;
use super::error::ServerError;
use super::rendezvous;
use super::shared::{Shared, is_true};
use crate::fork::ClosedInChildren;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Handle, Runtime};

/// How long a stopping server waits for its connections to end.
const STOP_GRACE: Duration = Duration::from_secs(2);

pub(super) type Listener = ClosedInChildren<TcpListener>;

/// Starts the data threads, and the control thread, whose handle comes first. They go on until `stopping`.
pub(super) fn start(
    shared: &Arc<Shared>,
    listener: Listener,
) -> Result<(Handle, Vec<JoinHandle<()>>), ServerError> {
    let mut threads = Vec::new();
    let mut data = Vec::new();
    for number in 0..shared.loads.len() {
        let (handle, thread) = start_thread(&format!("offbeat-data-{number}"), Builder::enable_io, {
            let shared = Arc::clone(shared);
            move |runtime| {
                // Until the control thread has seen the connections end.
                runtime.block_on(is_true(&shared.ended));
            }
        })
        .inspect_err(|_| {
            shared.ended.send_replace(true);
        })?;
        data.push(handle);
        threads.push(thread);
    }
    let (control, thread) = start_thread("offbeat-control", Builder::enable_all, {
        let shared = Arc::clone(shared);
        move |runtime| {
            let _end = Ended(Arc::clone(&shared));
            runtime.block_on(async {
                tokio::select! {
                    () = control::accept(Arc::clone(&shared), listener, data) => {}
                    () = clock::tick(Arc::clone(&shared)) => {}
                    () = rendezvous::keep_time(Arc::clone(&shared)) => {}
                    () = is_true(&shared.stopping) => {}
                }
                is_true(&shared.stopping).await;
                let dismissed = async {
                    drain::dismiss(&shared).await;
                    drained(&shared).await;
                };
                tokio::select! {
                    () = clock::tick(Arc::clone(&shared)) => {}
                    () = dismissed => {}
                }
                let rest = shared.strangers().rest();
                rest.tell();
            });
        }
    })
    .inspect_err(|_| {
        shared.ended.send_replace(true);
    })?;
    threads.push(thread);
    Ok((control, threads))
}

/// Starts a thread with a runtime of its own; returns when its handle can be used.
fn start_thread(
    name: &str,
    drivers: impl Fn(&mut Builder) -> &mut Builder,
    body: impl FnOnce(Runtime) + Send + 'static,
) -> Result<(Handle, JoinHandle<()>), ServerError> {
    let mut builder = Builder::new_current_thread();
    // One more for each, for what takes longer than a turn may: a status, a model put in place.
    let runtime = drivers(&mut builder).max_blocking_threads(1).build().map_err(ServerError::System)?;
    let handle = runtime.handle().clone();
    let thread = thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || body(runtime))
        .map_err(ServerError::System)?;
    Ok((handle, thread))
}

/// Lets the data threads go when the control thread does, however that ends.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.ended.send_replace(true);
    }
}

/// Waits until no connection is left, but not for ever.
async fn drained(shared: &Shared) {
    let end = Instant::now() + STOP_GRACE;
    while shared.num_connections() > 0 && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
