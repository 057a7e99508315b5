//! A worker as tests want it: tensors in Rust's own memory.

use offbeat_core::dtype::Dtype;
use offbeat_core::spec::{Group, OptimizerSpec, Rule};
use offbeat_core::store::Receipt;
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use offbeat_net::client::{Client, ClientConfig, ClientError, Memory, Pulled, PushInput};
use offbeat_net::server::{Server, ServerConfig};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// No test waits longer for anything.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Nobody presses Ctrl-C.
pub(crate) fn never() -> bool {
    false
}

/// Waits until something is so.
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    let (_never, clock) = mpsc::channel::<()>();
    while !is() {
        assert!(Instant::now() < end, "{what} did not come about");
        clock.recv_timeout(Duration::from_millis(2)).ok();
    }
}

pub(crate) fn tensor(name: &str, len: usize, dtype: Dtype, role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), aliases: vec![], shape: vec![len as u64], dtype, role }
}

pub(crate) fn parameter(name: &str, len: usize) -> TensorSpec {
    tensor(name, len, Dtype::F32, Role::Parameter)
}

pub(crate) fn table(specs: Vec<TensorSpec>) -> TensorTable {
    TensorTable::new(specs).unwrap()
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Every tensor filled with one byte.
pub(crate) fn filled(table: &TensorTable, byte: u8) -> Vec<Vec<u8>> {
    table.tensors().iter().map(|t| vec![byte; t.num_elements() as usize * t.dtype.size()]).collect()
}

pub(crate) fn sgd(lr: f64, momentum: f64, weight_decay: f64) -> OptimizerSpec {
    let rule = Rule::Sgd { momentum, dampening: 0.0, weight_decay, nesterov: false, maximize: false };
    let groups = vec![Group { pattern: "*".into(), lr, rule }];
    OptimizerSpec { groups, momentum_correction: momentum != 0.0 }
}

pub(crate) fn config(optimizer: OptimizerSpec) -> ServerConfig {
    ServerConfig { optimizer: Some(optimizer), num_data_threads: Some(2), ..ServerConfig::default() }
}

pub(crate) fn client_config(address: impl ToString, in_flight: usize) -> ClientConfig {
    ClientConfig {
        address: address.to_string(),
        worker_id: None,
        token: None,
        run_id: None,
        in_flight,
        connect_timeout: DEADLINE,
        patience: Some(Duration::ZERO),
    }
}

/// A client with its parameters.
pub(crate) struct Worker {
    pub(crate) client: Client,
    pub(crate) table: TensorTable,
    pub(crate) params: Vec<Vec<u8>>,
}

impl Worker {
    pub(crate) fn join(server: &Server, in_flight: usize) -> Self {
        let client = Client::connect(client_config(server.address(), in_flight), None, &never).unwrap();
        let table = client.session().unwrap().table.as_deref().expect("the server has a model").clone();
        let params = filled(&table, 0xa5);
        Self { client, table, params }
    }

    /// Joined, and has pulled.
    pub(crate) fn ready(server: &Server, in_flight: usize) -> Self {
        let mut worker = Self::join(server, in_flight);
        worker.pull(false).unwrap();
        worker
    }

    pub(crate) fn pull(&mut self, incremental: bool) -> Result<Pulled, ClientError> {
        let out: Vec<Memory<'_>> = self.params.iter_mut().map(|p| Memory::of(p)).collect();
        self.client.pull(&out, incremental, &never)
    }

    pub(crate) fn push(&mut self, values: &mut [Option<Vec<u8>>]) -> Result<Receipt, ClientError> {
        let values = memories(values);
        self.client.push(PushInput { values: &values, samples: 1 }, &never)
    }

    pub(crate) fn push_pull(
        &mut self,
        values: &mut [Option<Vec<u8>>],
        incremental: bool,
    ) -> Result<Option<Receipt>, ClientError> {
        let values = memories(values);
        let out: Vec<Memory<'_>> = self.params.iter_mut().map(|p| Memory::of(p)).collect();
        self.client.push_pull(PushInput { values: &values, samples: 1 }, &out, incremental, &never)
    }

    pub(crate) fn flush(&mut self) -> Result<Vec<Receipt>, ClientError> {
        let out: Vec<Memory<'_>> = self.params.iter_mut().map(|p| Memory::of(p)).collect();
        self.client.flush(Some(&out), &never)
    }

    pub(crate) fn floats(&self, tensor: usize) -> Vec<f32> {
        floats(&self.params[tensor])
    }

    /// The same f32 gradient everywhere.
    pub(crate) fn gradient(&self, value: f32) -> Vec<Option<Vec<u8>>> {
        let of = |t: &TensorSpec| {
            (t.role == Role::Parameter).then(|| bytes_of(&vec![value; t.num_elements() as usize]))
        };
        self.table.tensors().iter().map(of).collect()
    }
}

pub(crate) fn memories(values: &mut [Option<Vec<u8>>]) -> Vec<Option<Memory<'_>>> {
    values.iter_mut().map(|v| v.as_mut().map(|v| Memory::of(v))).collect()
}
