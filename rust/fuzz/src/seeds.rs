//! The seed corpus: one valid message of each kind, honest conversations, and the attacks that have a name. What it
//! makes is in the tree, under `fuzz/corpus`; a test holds the two together.

use crate::frames::{frame, message};
use crate::small;
use crate::targets::{GOLDEN, joined};
use offbeat_core::spec::Contribution;
use offbeat_core::store::{Fate, Receipt};
use offbeat_core::wire::auth::{Side, prove};
use offbeat_core::wire::header::{MAX_HANDSHAKE_BYTES, MAX_TABLE_BYTES};
use offbeat_core::wire::message::{
    Attach, Authenticate, Call, Challenge, Event, Heartbeat, Hello, Join, ModelInfo, New, Parting, Purpose,
    RefusalCode, Refused, Replaces, Reply, Welcome,
};
use offbeat_core::wire::{
    HEADER_BYTES, Header, Kind, PROTOCOL, PullRequest, PushRequest, Versions, Want, flags,
};

/// One input.
pub struct Seed {
    /// Of which target.
    pub target: &'static str,
    pub name: String,
    pub bytes: Vec<u8>,
}

/// All of them, always the same.
pub fn seeds() -> Vec<Seed> {
    [frames(), handshakes(), sessions(), servers(), checkpoints()].into_iter().flatten().collect()
}

fn seed(target: &'static str, name: impl Into<String>, bytes: Vec<u8>) -> Seed {
    Seed { target, name: name.into(), bytes }
}

/// The bytes of one.
#[cfg(test)]
pub(crate) fn seed_of(target: &str, name: &str) -> Vec<u8> {
    let found = seeds().into_iter().find(|seed| seed.target == target && seed.name == name);
    found.unwrap_or_else(|| panic!("no seed {name} for {target}")).bytes
}

// -------------------------------------------------------------------------------------------- messages

fn receipt() -> Receipt {
    Receipt {
        term: 1,
        version: 1,
        staleness: 0,
        weight: 1.0,
        verdict: Fate::Admit,
        applied: true,
        duplicate: false,
        reason: None,
        detail: String::new(),
    }
}

fn hello(purpose: Purpose) -> Vec<u8> {
    let (protocol_min, protocol_max) = (PROTOCOL, PROTOCOL);
    message(Kind::Hello, 0, &Hello { protocol_min, protocol_max, nonce: [3; 32], purpose })
}

fn challenge(proof: Option<[u8; 32]>) -> Vec<u8> {
    let token_required = proof.is_some();
    message(Kind::Challenge, 0, &Challenge { protocol: PROTOCOL, nonce: [1; 32], token_required, proof })
}

fn authenticate(proof: Option<[u8; 32]>) -> Vec<u8> {
    message(Kind::Authenticate, 0, &Authenticate { proof })
}

fn welcome() -> Vec<u8> {
    message(Kind::Welcome, 0, &Welcome { version: "0.1.0".into() })
}

fn refused(request: u32, fatal: bool) -> Vec<u8> {
    let message = "no".to_owned();
    crate::frames::message(Kind::Refused, request, &Refused { code: RefusalCode::Full, message, fatal })
}

fn calls() -> Vec<(&'static str, Call)> {
    let optimizer = Some(small::sgd(0.9));
    vec![
        (
            "init-begin",
            Call::InitBegin {
                table: small::table(),
                blueprint: Some("{}".into()),
                replaces: Some(Replaces::At { term: 1, version: 1 }),
            },
        ),
        ("init-commit", Call::InitCommit),
        ("wait-model", Call::WaitModel),
        ("configure", Call::Configure { contribution: Contribution::Gradient, optimizer }),
        ("status", Call::Status),
        ("enter", enter(None, None, None)),
        ("enter-by-terms", enter(Some(1), Some("a mean".into()), None)),
        ("enter-with-new", enter(None, None, Some(New { samples: 8.0, of: 1 }))),
        ("gather", Call::Gather { round: 1 }),
        ("goodbye", Call::Goodbye { parting: Parting::Left { cause: Some("why".into()) } }),
    ]
}

fn enter(at_least: Option<u32>, terms: Option<String>, new: Option<New>) -> Call {
    let (samples, at_work, grace_ms) = (32.0, true, Some(1000));
    let (linger_ms, wish) = (terms.as_ref().map(|_| 1000), terms.clone());
    Call::Enter { samples, at_work, grace_ms, at_least, linger_ms, terms, wish, new }
}

fn call(call: &Call) -> Vec<u8> {
    message(Kind::Call, 1, call)
}

fn replies() -> Vec<(&'static str, Reply)> {
    let model = ModelInfo { table: small::table(), blueprint: None };
    let run = joined(0).run;
    vec![
        ("init", Reply::Init { taken: true }),
        ("model", Reply::Model { model, run: run.clone(), term: 1, version: 2 }),
        ("configured", Reply::Configured { run }),
        ("status", Reply::Status { json: "{}".into() }),
        ("entered", entered(None)),
        ("entered-with-new", entered(Some(0.25))),
        ("gathered", Reply::Gathered { missing: 0, version: 3 }),
        ("goodbye", Reply::Goodbye),
    ]
}

fn entered(new_share: Option<f64>) -> Reply {
    Reply::Entered { round: 1, share: 0.5, members: 2, at_work: 1, agreed: true, new_share }
}

fn events() -> Vec<(&'static str, Event)> {
    vec![
        ("drain", Event::Drain),
        ("term", Event::Term { term: 2 }),
        ("fenced", Event::Fenced { detail: "another".into() }),
        ("finished", Event::Finished { reason: "budget".into() }),
    ]
}

fn join() -> Vec<u8> {
    let (worker_id, table) = (Some("w".into()), Some(small::table()));
    message(
        Kind::Join,
        0,
        &Join {
            worker_id,
            run_id: None,
            table,
            host: "here".into(),
            in_flight: 1,
            back: None,
            attempt: None,
        },
    )
}

/// A push's head.
fn head(sequence: u64, want: Want, have: Option<&[u64]>, present: Option<&[u8]>) -> Vec<u8> {
    let have = have.map(Versions::Numbers);
    let mut bytes = vec![];
    PushRequest { epoch: 1, samples: 8, norm: Some(1.0), want, answered: 0, present, have }
        .encode(&mut bytes);
    frame(Header { request: 1, sequence, term: 1, ..Header::new(Kind::Push) }, &bytes)
}

/// One fragment of the small model, of `number`s.
fn fragment(kind: Kind, sequence: u64, index: usize, byte: u8) -> Vec<u8> {
    // A buffer travels as its value and the value that was pulled.
    let values = if kind == Kind::Fragment && index == 2 { 2 } else { 1 };
    let header = Header { request: 1, sequence, fragment: index as u32, term: 1, ..Header::new(kind) };
    frame(header, &vec![byte; small::BYTES[index] * values])
}

fn push(sequence: u64, byte: u8) -> Vec<u8> {
    let fragments = (0..3).map(|index| fragment(Kind::Fragment, sequence, index, byte));
    [vec![head(sequence, Want::Parameters, None, None)], fragments.collect()].concat().concat()
}

/// A push of zeros but for the halves.
fn push_of_halves(sequence: u64, half: [u8; 2]) -> Vec<u8> {
    let header = Header { request: 1, sequence, fragment: 1, term: 1, ..Header::new(Kind::Fragment) };
    let zeros = |index| fragment(Kind::Fragment, sequence, index, 0);
    let head = head(sequence, Want::Receipt, None, None);
    [head, zeros(0), frame(header, &half.repeat(3)), zeros(2)].concat()
}

fn pull(have: Option<&[u64]>) -> Vec<u8> {
    let mut bytes = vec![];
    PullRequest { have: have.map(Versions::Numbers) }.encode(&mut bytes);
    frame(Header { request: 1, term: 1, ..Header::new(Kind::Pull) }, &bytes)
}

/// A header without what it promises.
fn promise(kind: Kind, bytes: u32) -> Vec<u8> {
    let mut header = Header { payload_len: bytes, ..Header::new(kind) }.encode();
    header[53] = 1; // as `frames::mended` is told to leave it
    header.to_vec()
}

/// A message of nothing but a promise: so many values of one byte, and none of them there.
fn bomb(kind: Kind, beginning: &[u8]) -> Vec<u8> {
    frame(Header::new(kind), &[beginning, b"\xdd\xff\xff\xff\xff"].concat())
}

// -------------------------------------------------------------------------------------------- targets

fn frames() -> Vec<Seed> {
    let mut all = vec![
        ("hello".to_owned(), hello(Purpose::Data)),
        ("challenge".into(), challenge(Some([7; 32]))),
        ("authenticate".into(), authenticate(Some([8; 32]))),
        ("welcome".into(), welcome()),
        ("join".into(), join()),
        ("joined".into(), message(Kind::Joined, 0, &joined(0))),
        ("attach".into(), message(Kind::Attach, 0, &Attach { incarnation: 7, secret: [9; 16] })),
        ("attached".into(), frame(Header::new(Kind::Attached), &[])),
        ("push".into(), push(1, 0)),
        ("push-of-some".into(), head(1, Want::Receipt, Some(&[4, 5]), Some(&[3]))),
        ("grant".into(), frame(Header::new(Kind::Grant), &[])),
        ("pull".into(), pull(None)),
        ("pull-of-changes".into(), pull(Some(&[1, 2, u64::MAX]))),
        ("root".into(), fragment(Kind::Root, 0, 0, 0)),
        ("receipt".into(), message(Kind::Receipt, 1, &receipt())),
        ("pull-end".into(), frame(Header::new(Kind::PullEnd), &[])),
        ("value".into(), fragment(Kind::Value, 0, 0, 0)),
        ("heartbeat".into(), message(Kind::Heartbeat, 0, &Heartbeat { progress: u64::MAX })),
        ("refused".into(), refused(1, true)),
        (
            "attack-http".into(),
            b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nX: yyyyyyyyyyyyyy\r\n\r\n".to_vec(),
        ),
        ("attack-length-bomb".into(), promise(Kind::Hello, u32::MAX)),
        ("attack-promised-tensors".into(), bomb(Kind::Call, b"\x81\xaainit_begin\x82\xa5table")),
        ("attack-promised-names".into(), bomb(Kind::Join, b"\x81\xa5table\x91\x92\xa1w")),
        ("attack-nesting".into(), frame(Header::new(Kind::Call), &vec![0x91; 5000])),
        (
            "attack-empty-strings".into(),
            frame(
                Header::new(Kind::Join),
                &[b"\x81\xa5table\xdd\0\0\x30\0".to_vec(), vec![0xa0; 0x3000]].concat(),
            ),
        ),
    ];
    all.extend(calls().iter().map(|(name, c)| (format!("call-{name}"), call(c))));
    all.extend(
        replies().iter().map(|(name, reply)| (format!("reply-{name}"), message(Kind::Reply, 1, reply))),
    );
    all.extend(
        events().iter().map(|(name, event)| (format!("event-{name}"), message(Kind::Event, 0, event))),
    );
    all.into_iter().map(|(name, bytes)| seed("frame", name, bytes)).collect()
}

fn handshakes() -> Vec<Seed> {
    let as_server =
        |name, token: u8, said: Vec<Vec<u8>>| seed("handshake", name, [vec![token], said.concat()].concat());
    let as_worker = |name, token: u8, said: Vec<Vec<u8>>| {
        seed("handshake", name, [vec![token | 1], said.concat()].concat())
    };
    let guess = prove("of another run", Side::Worker, &[3; 32], &[1; 32]);
    let (min, max) = (PROTOCOL + 6, PROTOCOL + 8);
    let later = Hello { protocol_min: min, protocol_max: max, nonce: [0; 32], purpose: Purpose::Data };
    vec![
        as_server("worker", 0, vec![hello(Purpose::Data), authenticate(None)]),
        as_server("worker-status", 0, vec![hello(Purpose::Status), authenticate(None)]),
        as_server("worker-without-token", 2, vec![hello(Purpose::Data), authenticate(None)]),
        as_server("attack-forged-proof", 2, vec![hello(Purpose::Control), authenticate(Some(guess))]),
        as_server("attack-later-protocol", 0, vec![message(Kind::Hello, 0, &later)]),
        as_server("attack-twice-hello", 2, vec![hello(Purpose::Data), hello(Purpose::Data)]),
        as_server("attack-join-first", 2, vec![join()]),
        as_server("attack-length-bomb", 0, vec![promise(Kind::Hello, MAX_HANDSHAKE_BYTES + 1)]),
        as_server("attack-long-join", 0, vec![promise(Kind::Join, MAX_TABLE_BYTES)]),
        as_server("attack-cut", 2, vec![hello(Purpose::Data)[..HEADER_BYTES + 9].to_vec()]),
        as_server("attack-refusal", 2, vec![hello(Purpose::Data), refused(1, true)]),
        as_worker("server", 0, vec![challenge(None), welcome()]),
        as_worker("server-without-token", 2, vec![challenge(None), welcome()]),
        as_worker("attack-server-forged-proof", 2, vec![challenge(Some(guess)), welcome()]),
        as_worker("attack-server-welcomes", 2, vec![welcome()]),
        as_worker("attack-server-refuses", 2, vec![refused(1, true)]),
    ]
}

fn sessions() -> Vec<Seed> {
    let of = |name: &str, choice: u8, frames: Vec<Vec<u8>>| {
        seed("session", name, [vec![choice], frames.concat()].concat())
    };
    let begin = call(&Call::InitBegin { table: small::table(), blueprint: None, replaces: None });
    let instead = call(&Call::InitBegin {
        table: small::table(),
        blueprint: None,
        replaces: Some(Replaces::At { term: 1, version: 0 }),
    });
    let whole = |begin: Vec<u8>| {
        let values = (0..3).map(|index| fragment(Kind::Value, 0, index, 0));
        [vec![begin], values.collect(), vec![call(&Call::InitCommit), pull(None)]].concat()
    };
    let init = whole(begin.clone());
    let mut all = vec![
        of("push", 0, vec![push(1, 0)]),
        of("push-twice", 0, vec![push(1, 0), push(2, 0)]),
        of("push-whole", 1, vec![push(1, 0)]),
        of(
            "push-of-some",
            0,
            vec![head(1, Want::Receipt, Some(&[0, 0]), Some(&[1])), fragment(Kind::Fragment, 1, 0, 1)],
        ),
        of("pull", 0, vec![pull(None), pull(Some(&[0, 0, 0]))]),
        of("init", 2, init),
        of("init-instead", 0, whole(instead)),
        of("attack-not-finite", 0, vec![push(1, 0xff)]),
        of("attack-large", 0, vec![push(1, 0x7f), push(2, 0x7e)]),
        of("attack-large-half", 0, vec![push(1, 0x7f), push_of_halves(2, [0x40, 0x7b])]),
        of("attack-replay", 0, vec![push(1, 1), push(1, 2)]),
        of("attack-gap", 0, vec![push(u64::MAX, 0)]),
        of("attack-fragment-first", 0, vec![fragment(Kind::Fragment, 1, 0, 0)]),
        of("attack-too-many-versions", 0, vec![pull(Some(&[0; 9]))]),
        of("attack-init-of-a-model", 0, vec![begin]),
        of("attack-values-unasked", 2, vec![fragment(Kind::Value, 0, 0, 0)]),
        of("attack-promise", 0, vec![promise(Kind::Push, 1 << 20)]),
    ];
    all.extend(calls().iter().map(|(name, c)| of(&format!("call-{name}"), 0, vec![call(c)])));
    all
}

/// What servers say: [how, what] of the target `client`, then frames.
fn servers() -> Vec<Seed> {
    let of = |name: &str, how: u8, what: u8, frames: Vec<Vec<u8>>| {
        seed("client", name, [vec![how, what], frames.concat()].concat())
    };
    let end = |kind, request| frame(Header { request, term: 1, ..Header::new(kind) }, &[]);
    let roots = |request: u32, unchanged: bool| -> Vec<u8> {
        let root = |index: usize| {
            let header = Header { request, fragment: index as u32, term: 1, ..Header::new(Kind::Root) };
            if unchanged {
                frame(Header { flags: flags::UNCHANGED, ..header }, &[])
            } else {
                frame(header, &vec![0; small::BYTES[index]])
            }
        };
        (0..3).flat_map(root).collect()
    };
    let receipt_of = |request| message(Kind::Receipt, request, &receipt());
    let pulled = [roots(1, false), end(Kind::PullEnd, 1)].concat();
    let pushed = [roots(2, true), receipt_of(2)].concat();
    let bare = ModelInfo { table: small::table(), blueprint: None };
    let huge = {
        let mut said = joined(0);
        (said.heartbeat_ms, said.lease_ms, said.in_flight) = (u64::MAX, 0, u32::MAX);
        message(Kind::Joined, 0, &said)
    };
    let mut all = vec![
        of("pull-push", 0, 0, vec![pulled.clone(), pushed.clone()]),
        of("pull-push-2", 4, 0, vec![pulled.clone(), pushed.clone()]),
        of("pull-push-momentum", 8, 0, vec![pulled.clone(), pushed.clone()]),
        of("pull-push-whole", 16, 0, vec![pulled.clone(), end(Kind::Grant, 2), pushed]),
        of("pull-own-table", 32, 0, vec![pulled.clone()]),
        of("push", 0, 1, vec![pulled.clone(), receipt_of(2)]),
        of("refused", 0, 1, vec![pulled.clone(), refused(2, false)]),
        of("joined", 1, 0, vec![message(Kind::Joined, 0, &joined(0))]),
        of("attack-joined-timings", 1, 0, vec![huge]),
        of("attack-joined-bomb", 1, 0, vec![bomb(Kind::Joined, b"\x81\xa5model\x81\xa5table")]),
        of("attack-unasked-root", 0, 3, vec![roots(1, false)]),
        of("attack-unchanged-first", 0, 0, vec![roots(1, true), end(Kind::PullEnd, 1)]),
        of("attack-root-of-no-fragment", 0, 0, vec![fragment(Kind::Root, 0, 1, 0)]),
        of("attack-early-end", 0, 0, vec![end(Kind::PullEnd, 1)]),
        of("attack-other-reply", 0, 3, vec![message(Kind::Reply, 1, &Reply::Goodbye)]),
        of(
            "attack-other-model",
            0,
            2,
            vec![message(
                Kind::Reply,
                1,
                &Reply::Model { model: bare, run: joined(8).run, term: 9, version: 9 },
            )],
        ),
        of("attack-promise", 0, 3, vec![promise(Kind::Reply, MAX_TABLE_BYTES)]),
        of("attack-control-heartbeat", 2, 0, vec![message(Kind::Heartbeat, 0, &Heartbeat { progress: 1 })]),
    ];
    all.extend(
        events()
            .iter()
            .map(|(name, event)| of(&format!("event-{name}"), 2, 0, vec![message(Kind::Event, 0, event)])),
    );
    let of_call = |name: &str| if name == "status" { 3 } else { 2 };
    all.extend(
        replies().iter().map(|(name, r)| {
            of(&format!("reply-{name}"), 0, of_call(name), vec![message(Kind::Reply, 1, r)])
        }),
    );
    all
}

/// What is in checkpoints: [way, model file, optimizer file] of the target, then a manifest or changes to one.
fn checkpoints() -> Vec<Seed> {
    let of = |name: &str, how: [u8; 3], bytes: &[u8]| seed("checkpoint", name, [&how[..], bytes].concat());
    let text = String::from_utf8_lossy(GOLDEN[0]).into_owned();
    let body = text.split(",\"sha256\":\"").collect::<Vec<_>>();
    let body = body[..body.len() - 1].join(",\"sha256\":\"");
    let edited = |from: &str, to: &str| {
        assert!(body.contains(from), "{from} is in the golden manifest");
        body.replacen(from, to, 1)
    };
    let change = |op: u8, from: u16, at: u16, number: u64| {
        [&[op][..], &from.to_le_bytes(), &at.to_le_bytes(), &number.to_le_bytes()].concat()
    };
    let many = (0..40).map(|at| change(0, 0, at * 3, u64::MAX)).collect::<Vec<_>>();
    let mut all = vec![
        of("golden", [0, 0, 0], GOLDEN[0]),
        of("golden-sealed", [1, 0, 0], body.as_bytes()),
        of("golden-unchanged", [2, 0, 0], &[]),
        of("model-cut", [0, 0x84, 0], GOLDEN[0]),
        of("model-flipped", [0, 0x05, 0], GOLDEN[0]),
        of("model-missing", [0, 7, 0], GOLDEN[0]),
        of("optimizer-longer", [0, 0, 6], GOLDEN[0]),
        of("attack-path", [1, 0, 0], edited("model.safetensors", "../../etc/passwd").as_bytes()),
        of("attack-format", [1, 0, 0], edited("\"format\":1", "\"format\":4294967295").as_bytes()),
        of("attack-shape", [1, 0, 0], edited("[2,2]", "[18446744073709551615,2]").as_bytes()),
        of("attack-large", [1, 0, 0], edited("[2,2]", "[65536,131071]").as_bytes()),
        of("attack-slot", [1, 0, 0], edited("\"slot\":0", "\"slot\":4294967295").as_bytes()),
        of("attack-nesting", [1, 0, 0], "[".repeat(4000).as_bytes()),
        of("attack-twice", [1, 0, 0], edited("\"format\":1", "\"format\":1,\"format\":2").as_bytes()),
        of("attack-not-finite", [1, 0, 0], edited("\"lr\":0.1", "\"lr\":1e999").as_bytes()),
    ];
    all.extend(many.iter().enumerate().map(|(i, bytes)| of(&format!("changed-{i:02}"), [2, 0, 0], bytes)));
    all
}
