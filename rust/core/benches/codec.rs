//! What the wire form costs: a header (two a fragment), the head and receipt of a push (one each), and the checksum of a
//! payload, with the bytes warm as they are where it is taken.
//!
//!     cargo bench -p offbeat-core --bench codec

#![expect(clippy::unwrap_used, reason = "a bench may panic")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use offbeat_core::checksum::{Checksum, checksum};
use offbeat_core::layout::Presence;
use offbeat_core::store::{Fate, Receipt};
use offbeat_core::wire::{Header, Kind, PushRequest, Versions, Want, decode, encode};
use std::hint::black_box;
use std::time::Duration;

/// A model of 25 M parameters in as many fragments and, say, tensors.
const FRAGMENTS: usize = 382;

fn header(c: &mut Criterion) {
    let header = Header {
        request: 7,
        payload_len: 262_144,
        term: 1,
        sequence: 1 << 20,
        version: 1 << 21,
        fragment: 381,
        payload_checksum: 0xdead_beef,
        ..Header::new(Kind::Fragment)
    };
    let bytes = header.encode();
    let mut group = c.benchmark_group("header");
    group.bench_function("encode", |b| b.iter(|| black_box(&header).encode()));
    group.bench_function("decode", |b| b.iter(|| Header::decode(black_box(&bytes)).unwrap()));
    group.finish();
}

fn push_head(c: &mut Criterion) {
    let versions: Vec<u64> = (0..FRAGMENTS as u64).collect();
    let present = Presence::from_fn(FRAGMENTS, |tensor| tensor % 3 != 0);
    let request = PushRequest {
        epoch: 1,
        samples: 64,
        norm: Some(1.5),
        want: Want::Parameters,
        answered: 0,
        present: Some(present.as_bytes()),
        have: Some(Versions::Numbers(&versions)),
    };
    let (mut out, mut bytes) = (Vec::new(), Vec::new());
    request.encode(&mut bytes);
    let mut group = c.benchmark_group("push_head");
    group.bench_function("encode", |b| {
        b.iter(|| {
            out.clear();
            black_box(&request).encode(&mut out);
        });
    });
    group.bench_function("decode", |b| b.iter(|| PushRequest::decode(black_box(&bytes)).unwrap().samples));
    group.finish();
}

fn receipt(c: &mut Criterion) {
    let receipt = Receipt {
        term: 1,
        version: 1 << 20,
        staleness: 3,
        weight: 0.25,
        verdict: Fate::Damp,
        applied: true,
        duplicate: false,
        reason: None,
        detail: String::new(),
    };
    let (mut out, mut bytes) = (Vec::new(), Vec::new());
    encode(&receipt, &mut bytes);
    let mut group = c.benchmark_group("receipt");
    group.bench_function("encode", |b| {
        b.iter(|| {
            out.clear();
            encode(black_box(&receipt), &mut out);
        });
    });
    group.bench_function("decode", |b| b.iter(|| decode::<Receipt>(black_box(&bytes)).unwrap()));
    group.finish();
}

fn checksums(c: &mut Criterion) {
    let mut group = c.benchmark_group("checksum");
    for len in [60, 4096, 262_144] {
        let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        group.throughput(Throughput::Bytes(len));
        group.bench_function(BenchmarkId::new("whole", len), |b| b.iter(|| checksum(black_box(&bytes))));
        group.bench_function(BenchmarkId::new("in parts of 16 KiB", len), |b| {
            b.iter(|| {
                let mut sum = Checksum::default();
                black_box(&bytes).chunks(16 << 10).for_each(|part| sum.update(part));
                sum.finish()
            });
        });
    }
    group.finish();
}

/// Short looks at many things: all of `cargo bench` is to take minutes. `--measurement-time` and its like say otherwise.
fn short() -> Criterion {
    let second = Duration::from_secs(1);
    Criterion::default().warm_up_time(second / 4).measurement_time(second / 2).sample_size(30)
}

criterion_group! {
    name = benches;
    config = short();
    targets = header, push_head, receipt, checksums
}
criterion_main!(benches);
