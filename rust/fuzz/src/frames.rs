//! Frames out of a fuzzer's bytes. One changed bit of a frame is always noticed, so a fuzzer that had to guess checksums
//! would never get past the first; here they are made right, unless the bytes themselves say otherwise.

use offbeat_core::checksum::checksum;
use offbeat_core::wire::header::MAGIC;
use offbeat_core::wire::{HEADER_BYTES, Header, Kind, PROTOCOL, encode};
use serde::Serialize;

/// In a header's reserved bytes, which are 0 in every frame that is one. Set: leave all from here on as it is.
const RAW: usize = 52;
/// Set: leave the length that is promised, whatever comes.
const PROMISE: usize = 53;
/// Set: leave the payload's checksum as it is.
const DAMAGED: usize = 54;

/// The bytes as frames whose checksums hold, where they do not say that they are not.
pub(crate) fn mended(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut rest = &mut bytes[..];
    while let Some((header, payload)) = rest.split_first_chunk_mut::<HEADER_BYTES>() {
        if header[RAW] != 0 {
            break;
        }
        let promised = u32::from_le_bytes([header[12], header[13], header[14], header[15]]);
        let len = payload.len().min(promised as usize);
        let (payload, behind) = payload.split_at_mut(len);
        if header[PROMISE] == 0 {
            let len = u32::try_from(len).expect("it is at most what was promised");
            header[12..16].copy_from_slice(&len.to_le_bytes());
        }
        if header[DAMAGED] == 0 {
            header[48..52].copy_from_slice(&checksum(payload).to_le_bytes());
        }
        header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4..6].copy_from_slice(&PROTOCOL.to_le_bytes());
        header[46..48].fill(0);
        header[52..60].fill(0);
        let of_header = checksum(&header[..60]);
        header[60..64].copy_from_slice(&of_header.to_le_bytes());
        rest = behind;
    }
    bytes
}

/// A frame with a payload.
pub(crate) fn frame(header: Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.with_payload(payload).encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// A message as a frame.
pub(crate) fn message<T: Serialize>(kind: Kind, request: u32, message: &T) -> Vec<u8> {
    let mut payload = vec![];
    encode(message, &mut payload);
    frame(Header { request, ..Header::new(kind) }, &payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_frames_stay_and_broken_ones_are_mended_unless_they_say_no() {
        let good =
            [frame(Header::new(Kind::Call), b"one"), frame(Header::new(Kind::Refused), b"two")].concat();
        assert_eq!(mended(&good), good);
        let mut bad = good.clone();
        bad[8] ^= 1; // the request's number
        bad[HEADER_BYTES] ^= 1; // the payload
        let changed = mended(&bad);
        let header = Header::decode(changed.first_chunk().unwrap()).unwrap();
        assert_eq!((header.request, header.payload_checksum), (1, checksum(b"nne")));
        bad[RAW] = 1;
        assert_eq!(mended(&bad), bad);
        let mut promise = good[..HEADER_BYTES].to_vec();
        (promise[12], promise[PROMISE]) = (200, 1);
        assert_eq!(Header::decode(mended(&promise).first_chunk().unwrap()).unwrap().payload_len, 200);
    }
}
