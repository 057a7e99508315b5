//! What a scripted server answers, what it takes, and the key that its client's user presses.

use crate::script::Peer;
use crate::support::{DEADLINE, bytes_of, client_config, memories, never, parameter, table};
use offbeat_core::layout::Layout;
use offbeat_core::pipeline::Reason;
use offbeat_core::store::{Fate, Receipt};
use offbeat_core::table::TensorTable;
use offbeat_core::wire::{Header, Kind, encode, flags};
use offbeat_net::client::{Client, ClientConfig, ClientError, Interrupt, Memory, PushInput};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, mpsc};

/// Larger than what both socket buffers hold, so that a call cannot leave the rest to the kernel.
pub(crate) const LARGE: usize = 6_000_000;

/// Ctrl-C, pressed by the other side of the script.
#[derive(Clone, Default)]
pub(crate) struct Key(Arc<AtomicBool>);

impl Key {
    pub(crate) fn press(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Interrupt for Key {
    fn interrupted(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}

pub(crate) fn root(peer: &mut Peer, request: u32, fragment: usize, version: u64, payload: &[u8]) {
    let fragment = u32::try_from(fragment).unwrap();
    peer.frame(Header { request, fragment, version, term: 1, ..Header::new(Kind::Root) }, payload);
}

/// The first fragment is as the client has it.
pub(crate) fn unchanged(peer: &mut Peer, request: u32, version: u64, term: u64) {
    let header = Header { request, version, term, flags: flags::UNCHANGED, ..Header::new(Kind::Root) };
    peer.frame(header, &[]);
}

/// All roots with one value, from `first` on.
pub(crate) fn roots(peer: &mut Peer, layout: &Layout, request: u32, first: usize, version: u64, value: f32) {
    for (f, fragment) in layout.fragments.iter().enumerate().skip(first) {
        root(peer, request, f, version, &bytes_of(&vec![value; fragment.len]));
    }
}

pub(crate) fn pull_end(peer: &mut Peer, request: u32, version: u64) {
    peer.frame(Header { request, version, term: 1, ..Header::new(Kind::PullEnd) }, &[]);
}

pub(crate) fn receipt(version: u64) -> Receipt {
    Receipt {
        term: 1,
        version,
        staleness: 0,
        weight: 1.0,
        verdict: Fate::Admit,
        applied: true,
        duplicate: false,
        reason: None,
        detail: String::new(),
    }
}

pub(crate) fn settle(peer: &mut Peer, request: u32, version: u64) {
    let mut bytes = vec![];
    encode(&receipt(version), &mut bytes);
    peer.frame(Header { request, version, term: 1, ..Header::new(Kind::Receipt) }, &bytes);
}

/// Takes a whole push; the header of its head, and the payloads.
pub(crate) fn push(peer: &mut Peer, layout: &Layout) -> (Header, Vec<Vec<u8>>) {
    let (head, _) = peer.next(Kind::Push);
    let fragments = layout.fragments.iter().map(|_| peer.next(Kind::Fragment).1).collect();
    (head, fragments)
}

pub(crate) fn pull(
    client: &mut Client,
    params: &mut [Vec<u8>],
    incremental: bool,
    key: &dyn Interrupt,
) -> Result<u64, ClientError> {
    let out: Vec<Memory<'_>> = params.iter_mut().map(|p| Memory::of(p)).collect();
    client.pull(&out, incremental, key).map(|p| p.version)
}

pub(crate) fn push_pull(
    client: &mut Client,
    gradient: &mut [Option<Vec<u8>>],
    params: &mut [Vec<u8>],
    key: &dyn Interrupt,
) -> Result<Option<Receipt>, ClientError> {
    let out: Vec<Memory<'_>> = params.iter_mut().map(|p| Memory::of(p)).collect();
    client.push_pull(PushInput { values: &memories(gradient), samples: 1 }, &out, true, key)
}

pub(crate) fn waits() -> (Sender<()>, Receiver<()>) {
    mpsc::channel()
}

pub(crate) fn large() -> (TensorTable, Layout) {
    let table = table(vec![parameter("w", LARGE)]);
    let layout = Layout::of(&table);
    (table, layout)
}

/// A small model, and a client that waits for its server.
pub(crate) fn small() -> (TensorTable, Layout) {
    let table = table(vec![parameter("w", 8)]);
    let layout = Layout::of(&table);
    (table, layout)
}

pub(crate) fn patient(address: SocketAddr, in_flight: usize) -> Client {
    let config = ClientConfig { patience: Some(DEADLINE), ..client_config(address, in_flight) };
    Client::connect(config, None, &never).unwrap()
}

pub(crate) fn rejected() -> Receipt {
    let reason = Some(Reason::ConnectionLost);
    Receipt { verdict: Fate::Reject, applied: false, weight: 0.0, reason, ..receipt(1) }
}
