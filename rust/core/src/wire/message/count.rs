//! How many values a message holds, counted before it is decoded: one byte on the wire may be an empty string or a
//! number of unknown use, which are 24 and 32 bytes in memory; and five may promise four thousand million values, for
//! which a decoder makes room at once.

use crate::wire::cursor::{Cursor, MessageError};

/// Shorter messages may hold what they will, if it came.
const SMALL_BYTES: usize = 4 << 10;
/// Most values of a message. A table of the most tensors with the most names and dimensions, and an optimizer of the
/// most groups, have fewer together.
const MAX_VALUES: usize = 5_000_000;

/// Refuses a message that would take many times its own size in memory. One that ends too early, or is none, is left to
/// the decoder, but for lists that promise more than came. Ours have at least two bytes a value: keys are words, and
/// names differ.
pub(super) fn check(bytes: &[u8]) -> Result<(), MessageError> {
    let most = if bytes.len() <= SMALL_BYTES { usize::MAX } else { MAX_VALUES.min(bytes.len() / 2) };
    let mut cursor = Cursor(bytes);
    let (mut counted, mut due) = (0, 1_u64);
    while due > 0 {
        let Ok(inner) = next(&mut cursor) else { return Ok(()) };
        due = (due - 1).saturating_add(inner);
        // Of all lists that are open, one within another: each value is a byte at least.
        if due > cursor.0.len() as u64 {
            return Err(MessageError::Form("its lists promise more values than came"));
        }
        counted += 1;
        if counted > most {
            return Err(MessageError::Form("it holds more values than any message of its size does"));
        }
    }
    Ok(())
}

/// Passes over one value's own bytes; returns how many values are inside of it. See the MessagePack specification.
fn next(cursor: &mut Cursor<'_>) -> Result<u64, MessageError> {
    let [marker] = cursor.array()?;
    let count = match marker {
        0x80..=0x9f => u64::from(marker & 0x0f),
        0xa0..=0xbf => u64::from(marker & 0x1f),
        0xc4 | 0xc7 | 0xd9 => u64::from(u8::from_be_bytes(cursor.array()?)),
        0xc5 | 0xc8 | 0xda | 0xdc | 0xde => u64::from(u16::from_be_bytes(cursor.array()?)),
        0xc6 | 0xc9 | 0xdb | 0xdd | 0xdf => u64::from(u32::from_be_bytes(cursor.array()?)),
        _ => 0,
    };
    let bytes = match marker {
        0xa0..=0xbf | 0xc4..=0xc6 | 0xd9..=0xdb => count, // strings and bytes
        0xc7..=0xc9 => count + 1,                         // extensions, with their type
        0xcc | 0xd0 => 1,
        0xcd | 0xd1 | 0xd4 => 2,
        0xd5 => 3,
        0xca | 0xce | 0xd2 => 4,
        0xd6 => 5,
        0xcb | 0xcf | 0xd3 => 8,
        0xd7 => 9,
        0xd8 => 17,
        _ => 0,
    };
    cursor.take(usize::try_from(bytes).unwrap_or(usize::MAX))?;
    Ok(match marker {
        0x80..=0x8f | 0xde | 0xdf => 2 * count,
        0x90..=0x9f | 0xdc | 0xdd => count,
        _ => 0,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Call, Join, ModelInfo, Replaces, decode, encode};
    use crate::dtype::Dtype;
    use crate::spec::{Contribution, Group, OptimizerSpec, Rule};
    use crate::table::{MAX_DIMS, MAX_NAMES, MAX_TENSORS, Role, TensorSpec, TensorTable};
    use crate::validate::MAX_GROUPS;

    const EMPTY_STRING: u8 = 0xa0;

    #[test]
    fn a_message_of_nothing_but_values_is_refused_before_it_is_decoded() {
        let refused = |bytes: Vec<u8>| decode::<Call>(&bytes).unwrap_err().to_string();
        let mut bytes = vec![];
        let spec = serde_json::json!({"name": "w", "aliases": "HERE", "shape": [1], "dtype": "f32", "role": "parameter"});
        encode(&serde_json::json!({"init_begin": {"blueprint": null, "table": [spec]}}), &mut bytes);
        assert!(refused(with(&bytes, 1 << 20, EMPTY_STRING)).contains("more values"));
        // What a rule does not know is kept by its decoder until the rule is known.
        let rule = serde_json::json!({"name": "Add", "junk": "HERE"});
        let groups = serde_json::json!([{"pattern": "*", "lr": 1.0, "rule": rule}]);
        let optimizer = serde_json::json!({"groups": groups, "momentum_correction": false});
        let mut bytes = vec![];
        encode(
            &serde_json::json!({"configure": {"contribution": "gradient", "optimizer": optimizer}}),
            &mut bytes,
        );
        assert!(refused(with(&bytes, 1 << 20, 0)).contains("more values"));
        assert!(decode::<Call>(&with(&bytes, 9, 0)).is_ok());
    }

    #[test]
    fn a_list_that_promises_more_than_came_is_refused_before_room_is_made_for_it() {
        let shortest =
            [b"\xdc\xff\xff".as_slice(), b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"];
        for list in shortest {
            for padding in [0, 1, super::SMALL_BYTES, 0xfffe] {
                let mut bytes = vec![0x92]; // within another, and behind a string
                bytes.extend_from_slice(b"\xdb\0\0\x12\x34");
                bytes.resize(bytes.len() + 0x1234, b'x');
                bytes.extend_from_slice(list);
                bytes.resize(bytes.len() + padding, EMPTY_STRING);
                let refused = super::check(&bytes).unwrap_err().to_string();
                let is_said = refused.contains("promise more") || refused.contains("more values");
                assert!(is_said, "{list:x?} with {padding}: {refused}");
                assert!(super::check(list).unwrap_err().to_string().contains("promise more"));
            }
        }
        let mut bytes = b"\xdc\0\x20".to_vec();
        bytes.resize(bytes.len() + 0x20, EMPTY_STRING);
        assert!(super::check(&bytes).is_ok(), "all of them have come");
        assert!(super::check(&bytes[..bytes.len() - 1]).is_err(), "one has not");
        // Short lists, each the first value of another, add up.
        assert!(super::check(&[0x8f; 100]).unwrap_err().to_string().contains("promise more"));
    }

    /// The message with an array in the place of "HERE", of so many values of one byte.
    fn with(message: &[u8], num_values: u32, value: u8) -> Vec<u8> {
        let here = b"\xa4HERE";
        let at = message.windows(here.len()).position(|w| w == here).unwrap();
        let mut bytes = message[..at].to_vec();
        bytes.push(0xdd);
        bytes.extend_from_slice(&num_values.to_be_bytes());
        bytes.resize(bytes.len() + num_values as usize, value);
        bytes.extend_from_slice(&message[at + here.len()..]);
        bytes
    }

    #[test]
    fn the_largest_messages_are_read() {
        let mut specs: Vec<_> = (0..MAX_TENSORS)
            .map(|i| TensorSpec {
                name: format!("{i:x}"),
                aliases: vec![],
                shape: vec![1; MAX_DIMS],
                dtype: Dtype::F32,
                role: Role::Parameter,
            })
            .collect();
        specs[0].aliases = (0..MAX_NAMES - MAX_TENSORS).map(|i| format!("_{i:x}")).collect();
        let table = TensorTable::new(specs).unwrap();
        let rule = Rule::Adam {
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            amsgrad: false,
            maximize: false,
            decoupled_weight_decay: true,
        };
        let groups = vec![Group { pattern: "*".into(), lr: 0.1, rule }; MAX_GROUPS];
        let optimizer = OptimizerSpec { groups, momentum_correction: false };
        let both = (ModelInfo { table: table.clone(), blueprint: None }, optimizer.clone());
        let mut bytes = vec![];
        encode(&both, &mut bytes);
        assert!(decode::<(ModelInfo, OptimizerSpec)>(&bytes) == Ok(both));
        for message in [
            Call::InitBegin {
                table: table.clone(),
                blueprint: Some("x".repeat(1 << 20)),
                replaces: Some(Replaces::At { term: 1, version: 1 }),
            },
            Call::Configure { contribution: Contribution::Gradient, optimizer: Some(optimizer) },
        ] {
            let mut bytes = vec![];
            encode(&message, &mut bytes);
            assert!(decode::<Call>(&bytes) == Ok(message));
        }
        let join = Join {
            worker_id: None,
            run_id: None,
            table: Some(table),
            host: "h".into(),
            in_flight: 1,
            back: None,
            attempt: None,
        };
        let mut bytes = vec![];
        encode(&join, &mut bytes);
        assert!(decode::<Join>(&bytes) == Ok(join));
    }

    #[test]
    fn every_marker_is_passed_over_as_the_decoder_does() {
        // One of each, with an element where it has any; each is then followed by what is refused, or is not, only if it
        // was passed over in full.
        let of_each: [&[u8]; 36] = [
            b"\x05",
            b"\xff",
            b"\x81\xa1k\x01",
            b"\x91\x01",
            b"\xa2xy",
            b"\xc0",
            b"\xc2",
            b"\xc3",
            b"\xc4\x01a",
            b"\xc5\0\x01a",
            b"\xc6\0\0\0\x01a",
            b"\xc7\x01\0a",
            b"\xc8\0\x01\0a",
            b"\xc9\0\0\0\x01\0a",
            b"\xcaaaaa",
            b"\xcbaaaaaaaa",
            b"\xcca",
            b"\xcdaa",
            b"\xceaaaa",
            b"\xcfaaaaaaaa",
            b"\xd0a",
            b"\xd1aa",
            b"\xd2aaaa",
            b"\xd3aaaaaaaa",
            b"\xd4\0a",
            b"\xd5\0aa",
            b"\xd6\0aaaa",
            b"\xd7\0aaaaaaaa",
            b"\xd8\0aaaaaaaaaaaaaaaa",
            b"\xd9\x01a",
            b"\xda\0\x01a",
            b"\xdb\0\0\0\x01a",
            b"\xdc\0\x01\x01",
            b"\xdd\0\0\0\x01\x01",
            b"\xde\0\x01\xa1k\x01",
            b"\xdf\0\0\0\x01\xa1k\x01",
        ];
        // Each marker has its own example, but those that hold a number in themselves, and the one that is never used.
        let family = |marker: u8| match marker {
            0x00..=0x7f => 0x00,
            0x80..=0x8f => 0x80,
            0x90..=0x9f => 0x90,
            0xa0..=0xbf => 0xa0,
            0xe0..=0xff => 0xe0,
            other => other,
        };
        let shown = of_each.map(|value| family(value[0]));
        let missing: Vec<u8> = (0..=0xff).filter(|&m| m != 0xc1 && !shown.contains(&family(m))).collect();
        assert!(missing.is_empty(), "{missing:x?}");
        for value in of_each {
            let crowd = 5000_u16;
            let mut bytes = vec![0x92]; // an array of two: the value, and the crowd
            bytes.extend_from_slice(value);
            bytes.push(0xdc);
            bytes.extend_from_slice(&crowd.to_be_bytes());
            bytes.resize(bytes.len() + usize::from(crowd), 0xa0);
            assert!(super::check(&bytes).is_err(), "{value:x?}");
            let mut bytes = vec![0x92];
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(&[0xdb, 0, 0, 0x20, 0]);
            bytes.resize(bytes.len() + 0x2000, 0xa0);
            assert!(super::check(&bytes).is_ok(), "{value:x?}");
        }
    }
}
