//! The one header of every frame: 64 bytes, little-endian, closed by its own checksum.
//!
//! ```text
//!  0 magic u32        4 protocol u16    6 kind u8     7 flags u8
//!  8 request u32     12 payload_len u32
//! 16 term u64        24 sequence u64
//! 32 version u64     40 fragment u32   44 codec u16  46 reserved u16
//! 48 payload_checksum u32 52 reserved [u8; 8]             60 header_checksum u32
//! ```
//! Magic, protocol and the checksum keep their place in every later protocol, so two builds that cannot talk can
//! still say so. Reserved bytes are 0; they are room for routing between several servers and a standby.

use crate::checksum::checksum;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
/// "OFBT", read as little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"OFBT");
/// The protocol this build speaks; it speaks no other.
pub const PROTOCOL: u16 = 1;
/// Parameters and gradients in their own element type, uncompressed.
pub const CODEC_RAW: u16 = 0;

/// Bits of [`Header::flags`].
pub mod flags {
    /// A root whose version the worker already has: no payload follows.
    pub const UNCHANGED: u8 = 1;
}

/// Largest message before a peer has proved who it is.
pub const MAX_HANDSHAKE_BYTES: u32 = 4 << 10;
/// Largest message that carries a tensor table, a blueprint or an optimizer.
pub const MAX_TABLE_BYTES: u32 = 32 << 20;
/// Largest table with its blueprint (100 000 tensors with names of usual length, and some MiB).
pub const MAX_MODEL_BYTES: u32 = 19 << 20;
/// Largest [`RunConfig`](super::message::RunConfig): an optimizer of the most groups, with patterns of usual length.
pub const MAX_RUN_BYTES: u32 = 12 << 20;
// Who joins is told of both, and of itself in a few hundred bytes.
const _: () = assert!(MAX_MODEL_BYTES + MAX_RUN_BYTES + MAX_HANDSHAKE_BYTES <= MAX_TABLE_BYTES);
/// Largest head of a push or a pull: it names the version of every fragment, and each tensor that is there.
pub const MAX_HEAD_BYTES: u32 = 2 << 20;
/// Largest other message.
pub const MAX_MESSAGE_BYTES: u32 = 1 << 20;
/// Largest raw tensor payload: a fragment of 64 Ki eight-byte buffers, new and old value.
pub const MAX_FRAGMENT_BYTES: u32 = 1 << 20;

/// What a frame is. The number is the byte on the wire and never changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Worker: which protocols, what for ([`super::message::Hello`]).
    Hello = 1,
    /// Server: its proof and its nonce ([`super::message::Challenge`]).
    Challenge = 2,
    /// Worker: its proof ([`super::message::Authenticate`]).
    Authenticate = 3,
    /// Server: you may speak ([`super::message::Welcome`]).
    Welcome = 4,
    /// Worker, data: who I am and what model I have ([`super::message::Join`]).
    Join = 5,
    /// Server, data: who you are and what model I have ([`super::message::Joined`]).
    Joined = 6,
    /// Worker, control: which data session this belongs to ([`super::message::Attach`]).
    Attach = 7,
    /// Server, control: attached. No payload.
    Attached = 8,
    /// Worker: a request ([`super::message::Call`]).
    Call = 16,
    /// Server: its answer, with the same request number ([`super::message::Reply`]).
    Reply = 17,
    /// Worker: a push begins ([`PushRequest`](super::PushRequest)).
    Push = 32,
    /// Worker: one fragment of the push that began.
    Fragment = 33,
    /// Server: staging for the whole push is reserved, send it (`transaction = model`). No payload.
    Grant = 34,
    /// Worker: send me the parameters ([`PullRequest`](super::PullRequest)).
    Pull = 35,
    /// Server: the parameters of one fragment. Those that answer a request come in the order of the fragments.
    Root = 36,
    /// Server: how a push ended, as a message (the store's receipt); `version` is what the worker has now read.
    Receipt = 37,
    /// Server: a pull's last frame; `term` and `version` are what was read. No payload.
    PullEnd = 38,
    /// Worker: one fragment's initial values, after [`super::message::Call::InitBegin`].
    Value = 39,
    /// Worker, control: alive, and how far ([`super::message::Heartbeat`]).
    Heartbeat = 48,
    /// Server, control: something happened ([`super::message::Event`]).
    Event = 49,
    /// Either side: no, and why ([`super::message::Refused`]).
    Refused = 63,
}

impl Kind {
    /// Every kind, in the order of its byte.
    pub const ALL: [Self; 21] = [
        Self::Hello,
        Self::Challenge,
        Self::Authenticate,
        Self::Welcome,
        Self::Join,
        Self::Joined,
        Self::Attach,
        Self::Attached,
        Self::Call,
        Self::Reply,
        Self::Push,
        Self::Fragment,
        Self::Grant,
        Self::Pull,
        Self::Root,
        Self::Receipt,
        Self::PullEnd,
        Self::Value,
        Self::Heartbeat,
        Self::Event,
        Self::Refused,
    ];

    /// The kind a byte names.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Challenge,
            3 => Self::Authenticate,
            4 => Self::Welcome,
            5 => Self::Join,
            6 => Self::Joined,
            7 => Self::Attach,
            8 => Self::Attached,
            16 => Self::Call,
            17 => Self::Reply,
            32 => Self::Push,
            33 => Self::Fragment,
            34 => Self::Grant,
            35 => Self::Pull,
            36 => Self::Root,
            37 => Self::Receipt,
            38 => Self::PullEnd,
            39 => Self::Value,
            48 => Self::Heartbeat,
            49 => Self::Event,
            63 => Self::Refused,
            _ => return None,
        })
    }

    /// The largest payload this kind may ever have. What a state of a connection allows is at most this.
    #[must_use]
    pub const fn cap(self) -> u32 {
        match self {
            Self::Hello
            | Self::Challenge
            | Self::Authenticate
            | Self::Welcome
            | Self::Attach
            | Self::Heartbeat => MAX_HANDSHAKE_BYTES,
            Self::Attached | Self::Grant | Self::PullEnd => 0,
            Self::Join | Self::Joined | Self::Call | Self::Reply => MAX_TABLE_BYTES,
            Self::Push | Self::Pull => MAX_HEAD_BYTES,
            Self::Receipt | Self::Event | Self::Refused => MAX_MESSAGE_BYTES,
            Self::Fragment | Self::Root | Self::Value => MAX_FRAGMENT_BYTES,
        }
    }
}

/// A header that is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// What came where a frame was due, its first bytes: four, or as many as had come.
    #[error("what came is no Offbeat frame: it begins with \"{}\"", first[..*came].escape_ascii())]
    Magic { first: [u8; 4], came: usize },
    #[error("a frame's header is damaged (checksum {found:#010x}, computed {computed:#010x})")]
    Checksum { found: u32, computed: u32 },
    #[error(
        "the peer speaks protocol {0}, this build protocol {PROTOCOL}; install the same version on both sides"
    )]
    Protocol(u16),
    #[error("a frame of unknown kind {0}; install the same version on both sides")]
    Kind(u8),
    #[error("a frame's header sets bytes that are reserved")]
    Reserved,
    #[error("a {kind:?} frame of {bytes} bytes; at most {} are allowed", kind.cap())]
    TooLong { kind: Kind, bytes: u32 },
}

/// Whether what has come of a header may still become one; a peer of another protocol may never send as much.
///
/// # Errors
/// [`HeaderError::Magic`].
pub fn check_beginning(bytes: &[u8]) -> Result<(), HeaderError> {
    let came = bytes.len().min(4);
    if bytes[..came] == MAGIC.to_le_bytes()[..came] {
        return Ok(());
    }
    let mut first = [0; 4];
    first[..came].copy_from_slice(&bytes[..came]);
    Err(HeaderError::Magic { first, came })
}

/// A frame's header, decoded. What a kind does not use is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub flags: u8,
    /// Chosen by the worker, echoed by the server.
    pub request: u32,
    pub payload_len: u32,
    pub term: u64,
    /// Of the push.
    pub sequence: u64,
    /// Push: the model version read. Fragment: the fragment's version read. Root: the fragment's version.
    /// Receipt and PullEnd: the model version that the parameters just sent count as.
    pub version: u64,
    pub fragment: u32,
    pub codec: u16,
    /// Of the payload, in every kind that has one; 0 without.
    pub payload_checksum: u32,
}

impl Header {
    /// A header with everything but its kind at 0.
    #[must_use]
    pub const fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            request: 0,
            payload_len: 0,
            term: 0,
            sequence: 0,
            version: 0,
            fragment: 0,
            codec: CODEC_RAW,
            payload_checksum: 0,
        }
    }

    /// Length and checksum of a payload that is complete in memory and at most [`Kind::cap`] long.
    #[must_use]
    pub fn with_payload(mut self, payload: &[u8]) -> Self {
        debug_assert!(payload.len() <= self.kind.cap() as usize);
        self.payload_len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        self.payload_checksum = checksum(payload);
        self
    }

    /// The bytes that go on the wire.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut b = [0; HEADER_BYTES];
        b[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4..6].copy_from_slice(&PROTOCOL.to_le_bytes());
        b[6] = self.kind as u8;
        b[7] = self.flags;
        b[8..12].copy_from_slice(&self.request.to_le_bytes());
        b[12..16].copy_from_slice(&self.payload_len.to_le_bytes());
        b[16..24].copy_from_slice(&self.term.to_le_bytes());
        b[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        b[32..40].copy_from_slice(&self.version.to_le_bytes());
        b[40..44].copy_from_slice(&self.fragment.to_le_bytes());
        b[44..46].copy_from_slice(&self.codec.to_le_bytes());
        b[48..52].copy_from_slice(&self.payload_checksum.to_le_bytes());
        let checksum = checksum(&b[..60]);
        b[60..64].copy_from_slice(&checksum.to_le_bytes());
        b
    }

    /// Reads a header. Its length is at most its kind's cap; a state of a connection may allow less.
    ///
    /// # Errors
    /// [`HeaderError`]: after any of them the connection cannot be followed further.
    pub fn decode(b: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let u16_at = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        check_beginning(b)?;
        let (found, computed) = (u32_at(60), checksum(&b[..60]));
        if found != computed {
            return Err(HeaderError::Checksum { found, computed });
        }
        if u16_at(4) != PROTOCOL {
            return Err(HeaderError::Protocol(u16_at(4)));
        }
        let kind = Kind::from_byte(b[6]).ok_or(HeaderError::Kind(b[6]))?;
        if u16_at(46) != 0 || u64_at(52) != 0 {
            return Err(HeaderError::Reserved);
        }
        let payload_len = u32_at(12);
        if payload_len > kind.cap() {
            return Err(HeaderError::TooLong { kind, bytes: payload_len });
        }
        Ok(Self {
            kind,
            flags: b[7],
            request: u32_at(8),
            payload_len,
            term: u64_at(16),
            sequence: u64_at(24),
            version: u64_at(32),
            fragment: u32_at(40),
            codec: u16_at(44),
            payload_checksum: u32_at(48),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any header a peer of this build could send.
    pub(crate) fn any_header() -> impl Strategy<Value = Header> {
        (
            (prop::sample::select(Kind::ALL.to_vec()), any::<u8>(), any::<u32>(), any::<u32>()),
            (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u16>(), any::<u32>()),
        )
            .prop_map(
                |(
                    (kind, flags, request, len),
                    (term, sequence, version, fragment, codec, payload_checksum),
                )| {
                    let payload_len = len % (kind.cap() + 1);
                    Header {
                        kind,
                        flags,
                        request,
                        payload_len,
                        term,
                        sequence,
                        version,
                        fragment,
                        codec,
                        payload_checksum,
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn a_header_survives_the_wire(header in any_header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn every_flipped_bit_is_seen(header in any_header()) {
            let good = header.encode();
            for bit in 0..HEADER_BYTES * 8 {
                let mut bad = good;
                bad[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(Header::decode(&bad).is_err(), "bit {}", bit);
            }
        }

        #[test]
        fn arbitrary_bytes_are_refused_or_read(bytes in any::<[u8; 32]>(), more in any::<[u8; 32]>()) {
            let mut all = [0; HEADER_BYTES];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&more);
            prop_assert!(Header::decode(&all).is_err());
            // The same with what lets a header through to the later checks.
            all[0..4].copy_from_slice(&MAGIC.to_le_bytes());
            all[4..6].copy_from_slice(&PROTOCOL.to_le_bytes());
            let checksum = checksum(&all[..60]);
            all[60..64].copy_from_slice(&checksum.to_le_bytes());
            if let Ok(header) = Header::decode(&all) {
                prop_assert!(header.payload_len <= header.kind.cap());
            }
        }
    }

    #[test]
    fn a_kind_and_its_byte_agree() {
        for byte in 0..=u8::MAX {
            match Kind::from_byte(byte) {
                Some(kind) => assert!(kind as u8 == byte && Kind::ALL.contains(&kind)),
                None => assert!(Kind::ALL.iter().all(|k| *k as u8 != byte)),
            }
        }
    }

    #[test]
    fn a_promised_length_above_the_cap_is_refused() {
        let mut header = Header::new(Kind::Hello);
        header.payload_len = MAX_HANDSHAKE_BYTES + 1;
        let refused = HeaderError::TooLong { kind: Kind::Hello, bytes: MAX_HANDSHAKE_BYTES + 1 };
        assert_eq!(Header::decode(&header.encode()), Err(refused));
    }

    #[test]
    fn another_protocol_is_named() {
        let mut bytes = Header::new(Kind::Hello).encode();
        bytes[4..6].copy_from_slice(&(PROTOCOL + 1).to_le_bytes());
        let checksum = checksum(&bytes[..60]);
        bytes[60..].copy_from_slice(&checksum.to_le_bytes());
        assert_eq!(Header::decode(&bytes), Err(HeaderError::Protocol(PROTOCOL + 1)));
    }

    #[test]
    fn the_layout_of_protocol_1_is_fixed() {
        let header = Header {
            kind: Kind::Fragment,
            flags: 1,
            request: 0x0203_0405,
            payload_len: 0x0006_0708,
            term: 9,
            sequence: 10,
            version: 11,
            fragment: 12,
            codec: 0,
            payload_checksum: 0x0d0e_0f10,
        };
        let b = header.encode();
        let golden: [u8; 52] = [
            b'O', b'F', b'B', b'T', 1, 0, 33, 1, 5, 4, 3, 2, 8, 7, 6, 0, 9, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0,
            0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x0f, 0x0e, 0x0d,
        ];
        assert_eq!(b[..52], golden);
        assert_eq!(b[52..60], [0; 8]);
    }
}
