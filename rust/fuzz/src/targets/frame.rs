//! The wire's decoders: frames of every kind, one after the other.

use crate::frames::mended;
use crate::memory::within;
use offbeat_core::layout::Presence;
use offbeat_core::store::Receipt;
use offbeat_core::wire::message::{
    Attach, Authenticate, Call, Challenge, Event, Heartbeat, Hello, Join, Joined, Refused, Reply, Welcome,
};
use offbeat_core::wire::{
    HEADER_BYTES, Header, Kind, PullRequest, PushRequest, Versions, check_beginning, decode, encode,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes of memory for a byte of a message: a tensor without a name has 4 bytes on the wire and some 80 in memory, and
/// a list that grows is held twice for a moment.
const BYTES_A_BYTE: usize = 80;
/// And for any message.
const BYTES_MORE: usize = 16 << 10;
/// A longer refusal is cut by whoever sends it.
const MAX_WORDS_BYTES: usize = 16 << 10;
/// Tensors of the model that a push is held against.
const NUM_TENSORS: usize = 17;

/// Decoders neither panic nor take more memory than is due to what came; what they read, they write as it was.
///
/// # Panics
/// If one of that is not so.
pub fn frame(bytes: &[u8]) {
    check_beginning(bytes).ok();
    let bytes = mended(bytes);
    let mut rest = &bytes[..];
    while let Some((head, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::decode(head) else { return };
        assert_eq!(header.encode(), *head);
        assert!(header.payload_len <= header.kind.cap());
        let (came, behind) = behind.split_at(behind.len().min(header.payload_len as usize));
        payload(header.kind, came);
        rest = behind;
    }
}

fn payload(kind: Kind, bytes: &[u8]) {
    match kind {
        Kind::Hello => message::<Hello>(bytes),
        Kind::Challenge => message::<Challenge>(bytes),
        Kind::Authenticate => message::<Authenticate>(bytes),
        Kind::Welcome => message::<Welcome>(bytes),
        Kind::Join => message::<Join>(bytes),
        Kind::Joined => message::<Joined>(bytes),
        Kind::Attach => message::<Attach>(bytes),
        Kind::Call => message::<Call>(bytes),
        Kind::Reply => message::<Reply>(bytes),
        Kind::Receipt => message::<Receipt>(bytes),
        Kind::Heartbeat => message::<Heartbeat>(bytes),
        Kind::Event => message::<Event>(bytes),
        Kind::Refused => refusal(bytes),
        Kind::Push => push(bytes),
        Kind::Pull => pull(bytes),
        // Raw tensor bytes, whose length is held against the table; or nothing.
        Kind::Fragment | Kind::Root | Kind::Value | Kind::Attached | Kind::Grant | Kind::PullEnd => {}
    }
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    within(bytes.len(), BYTES_A_BYTE, BYTES_MORE, || decode(bytes)).ok()
}

fn written<T: Serialize>(message: &T) -> Vec<u8> {
    let mut bytes = vec![];
    encode(message, &mut bytes);
    bytes
}

fn message<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Some(message) = read::<T>(bytes) else { return };
    let once = written(&message);
    let again: T = decode(&once).expect("what we write, we read");
    assert_eq!(written(&again), once); // compared as bytes: a NaN is not itself
}

fn refusal(bytes: &[u8]) {
    if let Some(Refused { message: words, .. }) = read(bytes)
        && words.len() <= MAX_WORDS_BYTES
    {
        message::<Refused>(bytes);
    }
}

fn push(bytes: &[u8]) {
    let Ok(push) = within(0, 0, 0, || PushRequest::decode(bytes)) else { return };
    let mut once = vec![];
    push.encode(&mut once);
    assert_eq!(once, bytes, "there is one way to say it");
    let most = Presence::all(NUM_TENSORS).as_bytes().len();
    if let Ok(presence) = push.presence(NUM_TENSORS) {
        assert!(presence.as_bytes().len() == most);
    }
    versions(push.have);
}

fn pull(bytes: &[u8]) {
    let Ok(pull) = within(0, 0, 0, || PullRequest::decode(bytes)) else { return };
    let mut once = vec![];
    pull.encode(&mut once);
    assert_eq!(once, bytes, "there is one way to say it");
    versions(pull.have);
}

fn versions(have: Option<Versions<'_>>) {
    let Some(have) = have else { return };
    assert!((0..have.len()).all(|i| have.get(i).is_some()));
    assert!([have.len(), usize::MAX].iter().all(|&i| have.get(i).is_none()));
}
