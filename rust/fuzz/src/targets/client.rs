//! What a server may send to a worker: one that means harm, or is of another build.

use crate::frames::{mended, message};
use crate::input::Input;
use crate::peer::Peer;
use crate::small;
use offbeat_core::spec::{Contribution, Schedule, StalenessSpec, Transaction};
use offbeat_core::wire::message::{Attach, Join, Joined, ModelInfo, Purpose, RunConfig};
use offbeat_core::wire::{Header, Kind};
use offbeat_net::client::{Client, ClientConfig, Memory, PushInput};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// When the server says what the fuzzer says: instead of Joined, on the control connection, or (else) in answer to the
/// worker's first request.
const AT: u8 = 3;
const AT_JOINING: u8 = 1;
const AT_CONTROL: u8 = 2;
/// Further bits of the first byte: how the worker is.
const TWO_IN_FLIGHT: u8 = 4;
const MOMENTUM: u8 = 8;
const WHOLE_PUSHES: u8 = 16;
const OWN_TABLE: u8 = 32;

/// A worker gets an answer or an error.
///
/// # Panics
/// If it does not.
pub fn client(bytes: &[u8]) {
    answered(bytes);
}

/// How many of the worker's calls were answered.
fn answered(bytes: &[u8]) -> usize {
    let mut input = Input::new(bytes);
    let (how, what) = (input.byte(), input.byte());
    let said = mended(input.rest());
    let listener = TcpListener::bind("127.0.0.1:0").expect("the machine has a free port");
    let address = listener.local_addr().expect("it is bound").to_string();
    thread::scope(|scope| {
        let server = scope.spawn(|| serve(listener, how, &said));
        let mut answered = 0;
        work(&address, how, what, &mut answered);
        // A server that still waits for the worker's second connection finds that it does not come.
        drop(TcpStream::connect(address));
        server.join().expect("it has no promises to break"); // to its last breath: else it looks like a leak
        answered
    })
}

/// A worker's calls, to the first error.
fn work(address: &str, how: u8, what: u8, answered: &mut usize) -> Option<()> {
    let config = ClientConfig {
        address: address.to_owned(),
        worker_id: None,
        token: None,
        run_id: None,
        in_flight: if how & TWO_IN_FLIGHT != 0 { 2 } else { 1 },
        // A worker that was hung up on tries again for so long; where all is in order, only a busy machine takes longer.
        connect_timeout: if cfg!(test) { Duration::from_secs(20) } else { Duration::from_millis(50) },
        patience: Some(Duration::ZERO),
    };
    let table = (how & OWN_TABLE != 0).then(small::table);
    let never = || false;
    let mut client = Client::connect(config, table.as_ref(), &never).ok()?;
    let table = client.session().ok()?.table.clone()?;
    if table.tensors().iter().any(|t| t.num_elements() > 1000) {
        return None; // its memory is its user's choice
    }
    let values = || -> Vec<Vec<u8>> {
        table.tensors().iter().map(|t| vec![0; t.num_elements() as usize * t.dtype.size()]).collect()
    };
    let (mut out, mut gradients) = (values(), values());
    let out: Vec<Memory<'_>> = out.iter_mut().map(|t| Memory::of(t)).collect();
    let gradients: Vec<Option<Memory<'_>>> = gradients.iter_mut().map(|t| Some(Memory::of(t))).collect();
    let push = || PushInput { values: &gradients, samples: 1 };
    match what % 4 {
        0 => {
            client.pull(&out, false, &never).ok()?;
            *answered += 1;
            client.push_pull(push(), &out, true, &never).ok()?;
            client.flush(Some(&out), &never).ok()?;
        }
        1 => {
            client.pull(&out, false, &never).ok()?; // a gradient belongs to parameters that were read
            *answered += 1;
            client.push(push(), &never).ok()?;
        }
        2 => drop(client.configure(Contribution::Gradient, None, &never).ok()?),
        _ => drop(client.status(&never).ok()?),
    }
    *answered += 1;
    client.pull(&out, true, &never).ok()?;
    *answered += 1;
    Some(())
}

/// A server that does what is due until it says what it was given, and then hangs up.
fn serve(listener: TcpListener, how: u8, said: &[u8]) -> Option<()> {
    let mut data = accept(&listener, Purpose::Data)?;
    let _: Join = data.expect(Kind::Join)?;
    if how & AT == AT_JOINING {
        data.write(said)?;
    } else {
        data.write(&message(Kind::Joined, 0, &joined(how)))?;
    }
    let mut control = accept(&listener, Purpose::Control)?;
    drop(listener);
    let _: Attach = control.expect(Kind::Attach)?;
    control.write(&Header::new(Kind::Attached).encode())?;
    if how & AT == AT_CONTROL {
        control.write(said)?;
        control.0.shutdown(Shutdown::Write).ok()?;
        control.drain();
    } else if how & AT != AT_JOINING {
        data.next()?;
        data.write(said)?;
    }
    data.0.shutdown(Shutdown::Write).ok()?;
    data.drain();
    Some(())
}

/// What an honest server answers.
pub(crate) fn joined(how: u8) -> Joined {
    let transaction = if how & WHOLE_PUSHES != 0 { Transaction::Model } else { Transaction::Fragment };
    let momentum = if how & MOMENTUM != 0 { 0.9 } else { 0.0 };
    let run = RunConfig {
        epoch: 1,
        transaction,
        contribution: Some(Contribution::Gradient),
        optimizer: Some(small::sgd(momentum)),
        momentum_correction: momentum > 0.0,
        staleness: StalenessSpec::default(),
        schedule: Schedule::default(),
        max_samples: None,
    };
    Joined {
        run_id: "run".into(),
        worker_id: "w".into(),
        slot: 0,
        incarnation: 7,
        secret: [9; 16],
        term: 1,
        version: 0,
        durable_version: 0,
        model: Some(ModelInfo { table: small::table(), blueprint: None }),
        run,
        in_flight: 2,
        heartbeat_ms: 1000,
        lease_ms: 10_000,
        keeps_checkpoints: false,
        answers: Vec::new(),
        lost_updates: 0,
    }
}

fn accept(listener: &TcpListener, purpose: Purpose) -> Option<Peer> {
    let mut peer = Peer::new(listener.accept().ok()?.0)?;
    (peer.admit()? == purpose).then_some(peer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::seed_of;

    #[test]
    fn who_is_answered_as_is_due_gets_on() {
        for (name, due) in [
            ("pull-push", 2),
            ("pull-push-2", 2),
            ("pull-push-momentum", 2),
            ("pull-push-whole", 2),
            ("pull-own-table", 1),
            ("push", 2),
            ("refused", 1),
            ("reply-status", 1),
            ("reply-configured", 1),
            ("attack-early-end", 0),
            ("attack-unchanged-first", 0),
        ] {
            assert_eq!(answered(&seed_of("client", name)), due, "{name}");
        }
    }
}
