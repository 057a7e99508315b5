//! Pushes that can be told from one another: each moves a cell of its own in every fragment.

use crate::relay::Relay;
use crate::support::{DEADLINE, Worker, client_config, filled, never, parameter, table, tensor};
use offbeat_core::dtype::Dtype;
use offbeat_core::table::{Role, TensorTable};
use offbeat_net::client::{Client, ClientConfig};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use serde_json::Value;

/// Of three fragments.
pub(crate) const W: usize = 140_000;
pub(crate) const FRAGMENT: usize = 65_536;
pub(crate) const MODEL_BYTES: usize = 4 * W;

pub(crate) fn model(has_buffers: bool) -> TensorTable {
    let mut tensors = vec![parameter("w", W)];
    if has_buffers {
        tensors.push(tensor("count", 1, Dtype::I64, Role::Buffer));
    }
    table(tensors)
}

pub(crate) fn start(config: ServerConfig, has_buffers: bool) -> Server {
    let table = model(has_buffers);
    let values = filled(&table, 0);
    Server::with_model(config, Snapshot::of(table, &values).unwrap()).unwrap()
}

pub(crate) fn join(relay: &Relay, in_flight: usize) -> Worker {
    join_as(relay, in_flight, None)
}

pub(crate) fn join_as(relay: &Relay, in_flight: usize, name: Option<&str>) -> Worker {
    let config = ClientConfig {
        patience: Some(DEADLINE),
        worker_id: name.map(str::to_owned),
        ..client_config(relay.address, in_flight)
    };
    let client = Client::connect(config, None, &never).unwrap();
    let table = client.session().unwrap().table.as_deref().unwrap().clone();
    let params = filled(&table, 0xa5);
    let mut worker = Worker { client, table, params };
    worker.pull(false).unwrap();
    worker
}

/// Push n, which moves cell n of every fragment by one; and a forward pass, which counts itself.
pub(crate) fn cells(worker: &mut Worker, n: usize) -> Vec<Option<Vec<u8>>> {
    let mut gradient = vec![0.0_f32; W];
    for fragment in 0..W.div_ceil(FRAGMENT) {
        gradient[fragment * FRAGMENT + n] = -1.0;
    }
    let mut values = vec![Some(crate::support::bytes_of(&gradient))];
    if let Some(count) = worker.params.get_mut(1) {
        let next = i64::from_le_bytes(count[..].try_into().unwrap()) + 1;
        *count = next.to_le_bytes().to_vec();
        values.push(Some(count.clone()));
    }
    values
}

/// Which fragments hold each of the first `pushes`; nothing else may have moved.
pub(crate) fn held(server: &Server, pushes: usize) -> Vec<Vec<f32>> {
    let (_, tensors) = server.tensors().unwrap().unwrap();
    let w = crate::support::floats(&tensors[0]);
    let of = |n: usize| (0..W.div_ceil(FRAGMENT)).map(|f| w[f * FRAGMENT + n]).collect::<Vec<_>>();
    let moved: usize = w.iter().filter(|w| **w != 0.0).count();
    let held: Vec<_> = (0..pushes).map(of).collect();
    assert_eq!(held.iter().flatten().filter(|w| **w != 0.0).count(), moved, "what nobody pushed has moved");
    held
}

pub(crate) fn status(server: &Server) -> Value {
    serde_json::from_str(&server.status_json().unwrap()).unwrap()
}
