//! Messages off the hot path (and the receipt, which is cheap enough): small structs in named MessagePack. A field
//! that a peer does not know is ignored, a new one has a default, so that builds of one protocol understand each
//! other. So do names that only tell something, a refusal's code or the reason in a receipt: an unknown one is read as
//! that, and the words beside it say what it is. (A receipt's fate follows from what it says besides, so that there is
//! never another.) What must be obeyed, a rule or a policy, is refused where it is not known.

mod call;
mod count;
mod handshake;
mod membership;
mod refusal;

pub use call::{Call, FIRST_TERM, MOST_TERMS_BYTES, New, Parting, Replaces, Reply};
pub use handshake::{Authenticate, Challenge, Hello, Purpose, Welcome};
pub use membership::{
    Attach, Attempt, Back, Event, FINISHED_BUDGET, FINISHED_STOPPED, Heartbeat, Join, Joined, ModelInfo,
    ModelTooLong, RunConfig,
};
pub use refusal::{RefusalCode, Refused, cut, is_printable};

use super::cursor::MessageError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most bytes of a decoder's words, which quote what it could not read.
const MAX_WORDS_BYTES: usize = 512;

/// Appends a message's wire form.
///
/// # Panics
/// Never with the messages of this crate: their keys are strings, and a `Vec` takes any length.
pub fn encode<T: Serialize>(message: &T, out: &mut Vec<u8>) {
    rmp_serde::encode::write_named(out, message)
        .expect("our messages have string keys, and a Vec takes any length");
}

/// Reads a message's wire form.
///
/// # Errors
/// [`MessageError::Decode`], with the decoder's words; [`MessageError::Form`] for one that would take many times its size
/// in memory.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    count::check(bytes)?;
    rmp_serde::from_slice(bytes)
        .map_err(|e| MessageError::Decode(cut(&e.to_string(), MAX_WORDS_BYTES).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::pipeline::Reason;
    use crate::spec::{Contribution, Group, OptimizerSpec, Rule, Schedule, StalenessSpec, Transaction};
    use crate::store::{Claim, Fate, Receipt, Unsettled};
    use crate::table::{Role, TensorSpec, TensorTable};
    use proptest::prelude::*;
    use std::fmt;

    fn survives<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug>(message: &T) {
        let mut bytes = vec![];
        encode(message, &mut bytes);
        assert_eq!(&decode::<T>(&bytes).unwrap(), message);
        for cut in 0..bytes.len() {
            assert!(decode::<T>(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    fn table() -> TensorTable {
        let spec = |name: &str, role| TensorSpec {
            name: name.into(),
            aliases: vec![format!("{name}.tied")],
            shape: vec![2, 3],
            dtype: Dtype::F32,
            role,
        };
        TensorTable::new(vec![spec("w", Role::Parameter), spec("b", Role::Buffer)]).unwrap()
    }

    fn optimizer() -> OptimizerSpec {
        let rule =
            Rule::Sgd { momentum: 0.9, dampening: 0.0, weight_decay: 1e-4, nesterov: true, maximize: false };
        OptimizerSpec {
            groups: vec![Group { pattern: "*".into(), lr: 0.1, rule }],
            momentum_correction: true,
        }
    }

    fn run() -> RunConfig {
        RunConfig {
            epoch: 3,
            transaction: Transaction::Model,
            contribution: Some(Contribution::Gradient),
            optimizer: Some(optimizer()),
            momentum_correction: true,
            staleness: StalenessSpec { max_staleness: Some(10), ..StalenessSpec::default() },
            schedule: Schedule::default(),
            max_samples: None,
        }
    }

    fn receipt() -> Receipt {
        Receipt {
            term: 1,
            version: 2,
            staleness: 3,
            weight: 0.5,
            verdict: Fate::Damp,
            applied: true,
            duplicate: true,
            reason: Some(Reason::Stale),
            detail: "why".into(),
        }
    }

    /// [`Call::Enter`] and [`Reply::Entered`] as the first builds of this protocol had them.
    #[derive(Serialize, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Before {
        Enter { samples: f64, at_work: bool, grace_ms: Option<u64> },
        Entered { round: u64, share: f64, members: u32, at_work: u32 },
    }

    #[test]
    fn builds_whose_rounds_know_of_no_terms_understand_those_that_do() {
        let mut bytes = vec![];
        encode(&Before::Enter { samples: 2.0, at_work: true, grace_ms: None }, &mut bytes);
        let (grace_ms, at_least, linger_ms, terms, wish, new) = (None, None, None, None, None, None);
        let enter =
            Call::Enter { samples: 2.0, at_work: true, grace_ms, at_least, linger_ms, terms, wish, new };
        assert_eq!(decode::<Call>(&bytes).unwrap(), enter);
        bytes.clear();
        encode(&enter, &mut bytes);
        assert!(matches!(decode(&bytes).unwrap(), Before::Enter { samples: 2.0, .. }));
        bytes.clear();
        encode(&Before::Entered { round: 1, share: 0.5, members: 2, at_work: 1 }, &mut bytes);
        let (agreed, new_share) = (true, None);
        let entered = Reply::Entered { round: 1, share: 0.5, members: 2, at_work: 1, agreed, new_share };
        assert_eq!(decode::<Reply>(&bytes).unwrap(), entered);
        bytes.clear();
        encode(&entered, &mut bytes);
        assert!(matches!(decode(&bytes).unwrap(), Before::Entered { round: 1, .. }));
    }

    #[test]
    fn every_message_survives_the_wire() {
        survives(&Hello { protocol_min: 1, protocol_max: 3, nonce: [200; 32], purpose: Purpose::Data });
        survives(&Challenge { protocol: 1, nonce: [7; 32], token_required: true, proof: Some([255; 32]) });
        survives(&Authenticate { proof: None });
        survives(&Welcome { version: "0.1.0".into() });
        survives(&Join {
            worker_id: Some("w".into()),
            run_id: None,
            table: Some(table()),
            host: "a".into(),
            in_flight: 2,
            back: None,
            attempt: Some(Attempt { clock: [255; 16], at_ns: u64::MAX }),
        });
        let unsettled = vec![Unsettled { sequence: 8, samples: 32, gone: true }];
        let claim = Claim { incarnation: 3, term: 2, settled: 7, applied: 5, unsettled };
        survives(&Back { claim, secret: [255; 16] });
        survives(&Joined {
            run_id: "r".into(),
            worker_id: "w".into(),
            slot: 3,
            incarnation: 9,
            secret: [1; 16],
            term: 1,
            version: 1 << 40,
            durable_version: 0,
            model: Some(ModelInfo { table: table(), blueprint: Some("{}".into()) }),
            run: run(),
            in_flight: 2,
            heartbeat_ms: 1000,
            lease_ms: 10_000,
            keeps_checkpoints: true,
            answers: vec![(8, receipt())],
            lost_updates: 3,
        });
        survives(&Attach { incarnation: 1, secret: [9; 16] });
        survives(&Call::InitBegin { table: table(), blueprint: None, replaces: None });
        for replaces in [Replaces::Untrained, Replaces::At { term: 3, version: u64::MAX }] {
            survives(&Call::InitBegin { table: table(), blueprint: None, replaces: Some(replaces) });
        }
        survives(&Call::InitCommit);
        survives(&Call::Configure { contribution: Contribution::Delta, optimizer: Some(optimizer()) });
        let said = |words: &str| Some(words.to_owned());
        let new = New { samples: f64::MIN_POSITIVE, of: u64::MAX };
        for (grace_ms, at_least, terms, wish, new) in [
            (Some(u64::MAX), Some(u32::MAX), said("a mean"), said("another"), Some(new)),
            (None, None, None, None, None),
        ] {
            let (samples, at_work, linger_ms) = (f64::MAX, false, grace_ms);
            survives(&Call::Enter { samples, at_work, grace_ms, at_least, linger_ms, terms, wish, new });
        }
        survives(&Call::Gather { round: u64::MAX });
        survives(&Call::Goodbye { parting: Parting::Finished });
        survives(&Call::Goodbye { parting: Parting::Withdrawn { cause: Some("it differs".to_owned()) } });
        survives(&Reply::Init { taken: true });
        survives(&Reply::Model {
            model: ModelInfo { table: table(), blueprint: None },
            run: run(),
            term: 1,
            version: 2,
        });
        survives(&Reply::Status { json: "{}".into() });
        let (round, share, members) = (u64::MAX, 1.0 / 3.0, u32::MAX);
        for new_share in [None, Some(1.0 / 3.0)] {
            survives(&Reply::Entered { round, share, members, at_work: 2, agreed: false, new_share });
        }
        survives(&Reply::Gathered { missing: 1, version: 1 << 40 });
        survives(&Heartbeat { progress: u64::MAX });
        survives(&Event::Finished { reason: FINISHED_BUDGET.into() });
        survives(&Refused { code: RefusalCode::Fenced, message: "no".into(), fatal: true });
    }

    #[test]
    fn an_unknown_field_or_code_is_no_error() {
        #[derive(Serialize)]
        struct Newer<'a> {
            code: &'a str,
            message: &'a str,
            fatal: bool,
            also: [u8; 3],
        }
        let mut bytes = vec![];
        encode(&Newer { code: "of_tomorrow", message: "no", fatal: false, also: [1, 2, 3] }, &mut bytes);
        let read: Refused = decode(&bytes).unwrap();
        assert_eq!(read, Refused { code: RefusalCode::Unknown, message: "no".into(), fatal: false });
    }

    #[test]
    fn an_unknown_reason_leaves_the_rest_of_the_receipt() {
        let newer = serde_json::json!({
            "term": 1, "version": 2, "staleness": 0, "weight": 0.0, "verdict": "reject", "applied": false,
            "duplicate": false, "reason": "of_tomorrow", "detail": "why", "also": [1, 2, 3],
        });
        let mut bytes = vec![];
        encode(&newer, &mut bytes);
        let read: Receipt = decode(&bytes).unwrap();
        assert_eq!(read.reason.map(Reason::name), Some("unknown"));
        assert_eq!((read.version, read.verdict, read.detail.as_str()), (2, Fate::Reject, "why"));
    }

    #[test]
    fn a_refusal_and_a_decoders_words_are_cut_before_they_are_too_long_to_send() {
        let refused = |message: String| Refused { code: RefusalCode::Malformed, message, fatal: true };
        for long in ["x".repeat(40 << 20), "é".repeat(20 << 20), "€".repeat(9000)] {
            let mut bytes = vec![];
            encode(&refused(long.clone()), &mut bytes);
            assert!(bytes.len() < 17 << 10);
            let read: Refused = decode(&bytes).unwrap();
            assert!(read.message.starts_with(&long[..9000]));
            assert!(read.message.ends_with(&format!("… ({} bytes in all)", long.len())));
        }
        let mut bytes = vec![];
        encode(&"of_tomorrow".repeat(1 << 20), &mut bytes);
        let words = decode::<Event>(&bytes).unwrap_err().to_string();
        assert!(words.contains("of_tomorrow") && words.len() < 1000, "{} bytes", words.len());
    }

    #[test]
    fn a_table_that_is_none_is_refused_on_the_way_in() {
        #[derive(Serialize)]
        struct Bad {
            table: Vec<TensorSpec>,
        }
        let mut bytes = vec![];
        encode(&Bad { table: vec![] }, &mut bytes);
        assert!(decode::<Join>(&bytes).unwrap_err().to_string().contains("a model without tensors"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(decode::<Hello>(&bytes));
            drop(decode::<Challenge>(&bytes));
            drop(decode::<Join>(&bytes));
            drop(decode::<Joined>(&bytes));
            drop(decode::<Call>(&bytes));
            drop(decode::<Reply>(&bytes));
            drop(decode::<Event>(&bytes));
            drop(decode::<Refused>(&bytes));
        }

        #[test]
        fn a_damaged_message_never_panics(at in 0_usize..400, byte: u8) {
            let mut bytes = vec![];
            encode(&Join { worker_id: None, run_id: None, table: Some(table()), host: String::new(), in_flight: 1, back: None, attempt: None }, &mut bytes);
            let at = at % bytes.len();
            bytes[at] = byte;
            drop(decode::<Join>(&bytes));
        }
    }

    #[test]
    fn a_promised_length_allocates_nothing() {
        // An array of 2^32-1 tensors, a string of 2^32-1 bytes, and a thousand nested arrays.
        for bytes in
            [vec![0xdd, 0xff, 0xff, 0xff, 0xff], vec![0xdb, 0xff, 0xff, 0xff, 0xff], vec![0x91; 5000]]
        {
            assert!(decode::<TensorTable>(&bytes).is_err());
            assert!(decode::<Call>(&bytes).is_err());
        }
    }
}
