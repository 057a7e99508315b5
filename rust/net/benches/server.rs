//! Push and pull over loopback, one worker: the whole path of an update, server and client in one process.
//!
//! Compare with `ps tcp N 1 1` of the C reference (`benches/peers`), which has no protocol, checksum or ledger.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use offbeat_core::dtype::Dtype;
use offbeat_core::spec::{Contribution, Group, OptimizerSpec, Rule, Transaction};
use offbeat_core::table::{Role, TensorSpec, TensorTable};
use offbeat_net::client::{Client, ClientConfig, Memory, PushInput};
use offbeat_net::server::{Server, ServerConfig, Snapshot};
use std::hint::black_box;
use std::time::Duration;

fn table(elements: usize) -> TensorTable {
    let spec = TensorSpec {
        name: "w".into(),
        aliases: vec![],
        shape: vec![elements as u64],
        dtype: Dtype::F32,
        role: Role::Parameter,
    };
    TensorTable::new(vec![spec]).expect("the table is right")
}

fn sgd() -> OptimizerSpec {
    let rule =
        Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    OptimizerSpec { groups: vec![Group { pattern: "*".into(), lr: 1e-6, rule }], momentum_correction: false }
}

fn push_pull(c: &mut Criterion) {
    let mut group = c.benchmark_group("push_pull");
    for (transaction, elements) in
        [(Transaction::Fragment, 10_000), (Transaction::Fragment, 1_000_000), (Transaction::Model, 1_000_000)]
    {
        let config = ServerConfig { optimizer: Some(sgd()), transaction, ..ServerConfig::default() };
        let server = Server::with_model(
            config,
            Snapshot::of(table(elements), &[vec![0; elements * 4]]).expect("it is the table's"),
        )
        .expect("it starts");
        let config = ClientConfig {
            address: format!("127.0.0.1:{}", server.address().port()),
            worker_id: None,
            token: None,
            run_id: None,
            in_flight: 1,
            connect_timeout: Duration::from_secs(10),
            patience: Some(Duration::ZERO),
        };
        let never = || false;
        let mut client = Client::connect(config, Some(&table(elements)), &never).expect("it joins");
        client.configure(Contribution::Gradient, None, &never).expect("it agrees");
        let (mut gradient, mut out) = (1_f32.to_le_bytes().repeat(elements), vec![0; elements * 4]);
        client.pull(&[Memory::of(&mut out)], false, &never).expect("it pulls");
        group.throughput(Throughput::Bytes(8 * elements as u64));
        group.bench_function(BenchmarkId::new(format!("{transaction:?}"), elements), |b| {
            b.iter(|| {
                let values = [Some(Memory::of(&mut gradient))];
                let input = PushInput { values: &values, samples: 1 };
                black_box(
                    client.push_pull(input, &[Memory::of(&mut out)], true, &never).expect("it is applied"),
                );
            });
        });
    }
    group.finish();
}

/// Short looks at many things: all of `cargo bench` is to take minutes. `--measurement-time` and its like say otherwise.
fn short() -> Criterion {
    let second = Duration::from_secs(1);
    Criterion::default().warm_up_time(second / 2).measurement_time(second).sample_size(30)
}

criterion_group! {
    name = benches;
    config = short();
    targets = push_pull
}
criterion_main!(benches);
